//! Units of a model: one per replica, and those of successors and of draining processes.

mod process_unit;

use std::path::Path;

use tokio::time::Instant;
use warden_policies::lifecycle::{AfterStop, BackendPhase, LifecycleEvent};
use warden_policies::{GenerationId, ServerFacts};

pub(crate) use self::process_unit::{ProcessUnit, UnitId, UnitRole};
use crate::error::{BackendFailure, FailureKind};
use crate::lease::queue::{LeaseQueue, QueueRefusal};
use crate::model::generation::{LiveGeneration, ProcessRecipe};

/// Starts that fail for lack of memory before the fallback is used. After the first one, the loader makes
/// other models free memory.
const SHORT_STARTS: u32 = 2;

#[derive(Debug, Default)]
pub(crate) struct UnitList {
    pub(crate) all: Vec<ProcessUnit>,
    next: u64,
}

impl UnitList {
    pub(crate) fn add(&mut self, replica: u32, role: UnitRole) -> UnitId {
        let id = UnitId(self.next);
        self.next += 1;
        // Most models have one unit; `push` would reserve four.
        self.all.reserve_exact(1);
        self.all.push(ProcessUnit::new(id, replica, role));
        id
    }

    pub(crate) fn ids(&self) -> Vec<UnitId> {
        self.all.iter().map(|unit| unit.id).collect()
    }

    pub(crate) fn get(&self, id: UnitId) -> Option<&ProcessUnit> {
        self.all.iter().find(|unit| unit.id == id)
    }

    pub(crate) fn get_mut(&mut self, id: UnitId) -> Option<&mut ProcessUnit> {
        self.all.iter_mut().find(|unit| unit.id == id)
    }

    pub(crate) fn live(&self, id: UnitId) -> Option<&LiveGeneration> {
        self.get(id)?.live.as_deref()
    }

    pub(crate) fn live_mut(&mut self, id: UnitId) -> Option<&mut LiveGeneration> {
        self.get_mut(id)?.live.as_deref_mut()
    }

    pub(crate) fn phase_and_live(&mut self, id: UnitId) -> Option<(BackendPhase, &mut LiveGeneration)> {
        let unit = self.get_mut(id)?;
        let phase = unit.phase();
        Some((phase, unit.live.as_deref_mut()?))
    }

    pub(crate) fn lives(&self) -> impl Iterator<Item = &LiveGeneration> {
        self.all.iter().filter_map(|unit| unit.live.as_deref())
    }

    pub(crate) fn lives_mut(&mut self) -> impl Iterator<Item = &mut LiveGeneration> {
        self.all.iter_mut().filter_map(|unit| unit.live.as_deref_mut())
    }

    pub(crate) fn any_process(&self) -> bool {
        self.lives().next().is_some()
    }

    pub(crate) fn generation(&self, id: UnitId) -> Option<GenerationId> {
        Some(self.live(id)?.id)
    }

    pub(crate) fn with_generation(&self, generation: GenerationId) -> Option<&ProcessUnit> {
        self.all.iter().find(|unit| unit.generation() == Some(generation))
    }

    pub(crate) fn with_role(&self, role: UnitRole) -> impl Iterator<Item = &ProcessUnit> {
        self.all.iter().filter(move |unit| unit.role == role)
    }

    pub(crate) fn staying(&self) -> impl DoubleEndedIterator<Item = &ProcessUnit> {
        self.all.iter().filter(|unit| unit.role != UnitRole::Retiring)
    }

    pub(crate) fn current(&self, replica: u32) -> Option<&ProcessUnit> {
        self.with_role(UnitRole::Current).find(|unit| unit.replica == replica)
    }

    /// Processes that refused a connection. They are probed at once; until they answer, their gates have to be
    /// closed.
    pub(crate) fn take_doubted(&mut self, leases: &LeaseQueue) -> Vec<UnitId> {
        let now = Instant::now();
        let mut doubted = Vec::new();
        for generation in leases.with_state(|queue| queue.table.take_doubted()) {
            let Some(id) = self.with_generation(generation).map(|unit| unit.id) else { continue };
            if let Some((BackendPhase::Ready | BackendPhase::Suspect, live)) = self.phase_and_live(id) {
                live.probing.doubted_at = Some(now);
                live.timers.probe = live.timers.probe.map(|_| now);
                doubted.push(id);
            }
        }
        doubted
    }

    /// Processes that have to be replaced for a waiting prompt, which was not known when they were judged.
    pub(crate) fn wishing_recycle(&self, leases: &LeaseQueue) -> Vec<UnitId> {
        let is_news = |live: &LiveGeneration| {
            let wish = leases.admission_wish(live.id);
            wish.is_some() && wish != live.memory.facts.as_ref().and_then(|facts| facts.admission)
        };
        let wishing = self.all.iter().filter(|unit| unit.live.as_deref().is_some_and(is_news));
        wishing.map(|unit| unit.id).collect()
    }

    pub(crate) fn any_ending(&self) -> bool {
        let phases = [BackendPhase::Draining, BackendPhase::Stopping];
        self.all.iter().any(|unit| phases.contains(&unit.phase()))
    }

    pub(crate) fn starting_since(&self) -> Option<Instant> {
        let starting = self.lives().filter(|live| live.start.ready.is_none());
        starting.map(|live| live.start.spawned).min()
    }

    /// Replica whose process has another recipe, unless a process fails to start.
    pub(crate) fn outdated_replica(&self, made_of: &ProcessRecipe) -> Option<u32> {
        let stumbled =
            |unit: &ProcessUnit| matches!(unit.phase(), BackendPhase::Backoff | BackendPhase::Failed);
        if self.with_role(UnitRole::Current).any(stumbled) {
            return None;
        }
        let is_stale = |unit: &&ProcessUnit| {
            unit.live.as_ref().is_some_and(|live| live.recipe != *made_of)
                && matches!(
                    unit.phase(),
                    BackendPhase::Starting | BackendPhase::Ready | BackendPhase::Suspect
                )
        };
        self.with_role(UnitRole::Current).find(is_stale).map(|unit| unit.replica)
    }

    /// Failure of a start that lacked memory although other models had made room.
    pub(crate) fn short_start(&self) -> Option<BackendFailure> {
        let is_short = |unit: &&ProcessUnit| {
            unit.start_failures >= SHORT_STARTS
                && unit.failure.as_ref().is_some_and(|failure| failure.kind == FailureKind::OutOfMemory)
        };
        self.all.iter().find(is_short).and_then(|unit| unit.failure.clone())
    }

    /// Refusal of requests, if no start is expected to help.
    pub(crate) fn refusal(&self, failures_told: u32) -> Option<QueueRefusal> {
        let units = || self.staying();
        if !units().all(|unit| unit.is_hopeless(failures_told)) {
            return None;
        }
        let unit = units().rfind(|unit| unit.failure.is_some())?;
        let mut failure = unit.failure.clone()?;
        // Output of a process that served may contain prompts, and all clients get this message.
        if unit.start_failures == 0 {
            failure.lines.clear();
        }
        let next = units().filter_map(|unit| unit.timer.map(|(_, at)| at)).min();
        let next = next.unwrap_or_else(Instant::now);
        Some(if units().all(|unit| unit.phase() == BackendPhase::Failed) {
            QueueRefusal::Failed(failure, next)
        } else {
            QueueRefusal::StartFailed(failure, next)
        })
    }

    /// Stores measured facts about a binary for its processes.
    pub(crate) fn set_facts(&self, binary: &Path, facts: ServerFacts) {
        for live in self.lives().filter(|live| live.recipe.command().binary == binary) {
            live.cell.set_facts(facts);
        }
    }

    /// Sends an event to the units in some phases.
    pub(crate) fn ends(
        &self,
        event: LifecycleEvent,
        is_meant: impl Fn(BackendPhase) -> bool,
    ) -> Vec<(UnitId, LifecycleEvent)> {
        self.all.iter().filter(|unit| is_meant(unit.phase())).map(|unit| (unit.id, event)).collect()
    }

    /// Takes the start events that wait for room.
    pub(crate) fn take_held_starts(&mut self) -> Vec<(UnitId, LifecycleEvent)> {
        self.all.iter_mut().filter_map(|unit| Some((unit.id, unit.held_start.take()?))).collect()
    }

    /// Forgets the failures of units without a process. Returns the events that start them again.
    pub(crate) fn forget_failures(&mut self) -> Vec<(UnitId, LifecycleEvent)> {
        let failed =
            |unit: &&mut ProcessUnit| matches!(unit.phase(), BackendPhase::Backoff | BackendPhase::Failed);
        let forget = |unit: &mut ProcessUnit| {
            unit.failure = None;
            unit.start_failures = 0;
            (unit.id, LifecycleEvent::Reset)
        };
        self.all.iter_mut().filter(failed).map(forget).collect()
    }

    /// Removes successors that did not start. Returns replicas whose next process does not serve, with the
    /// failure.
    pub(crate) fn take_failed(&mut self, failures_told: u32) -> Vec<(u32, BackendFailure)> {
        let has_failed = |unit: &ProcessUnit| match unit.role {
            // The old process still serves: give up after one failed start.
            UnitRole::Successor => !unit.machine.has_process(),
            UnitRole::Current => unit.is_hopeless(failures_told),
            UnitRole::Retiring => false,
        };
        let failed = self.all.iter().filter(|unit| has_failed(unit));
        let failures = failed.filter_map(|unit| Some((unit.replica, unit.failure.clone()?))).collect();
        self.all.retain(|unit| unit.role != UnitRole::Successor || !has_failed(unit));
        failures
    }

    /// Ends of processes whose successor serves, or that are not to be started again.
    pub(crate) fn superseded(&self) -> Vec<(UnitId, LifecycleEvent)> {
        let superseded = |new: &ProcessUnit| {
            let old = self.current(new.replica)?;
            // The successor serves, so the old process must not be restarted.
            let is_over = new.phase() == BackendPhase::Ready
                || old.machine.after_stop() == Some(AfterStop::Restart)
                || matches!(old.phase(), BackendPhase::Backoff | BackendPhase::Failed);
            is_over.then_some((old.id, LifecycleEvent::Down))
        };
        self.with_role(UnitRole::Successor).filter_map(superseded).collect()
    }

    /// Makes successors current that serve or whose old process has ended. Returns true if there are any.
    pub(crate) fn switch_over(&mut self) -> bool {
        let successors: Vec<_> = self.with_role(UnitRole::Successor).map(|unit| unit.id).collect();
        let mut any = false;
        for new in successors {
            let Some(unit) = self.get(new) else { continue };
            let serves = unit.phase() == BackendPhase::Ready;
            let Some(old) = self.current(unit.replica) else { continue };
            if serves || !old.machine.has_process() {
                let old = old.id;
                for unit in &mut self.all {
                    match unit.id {
                        id if id == old => unit.role = UnitRole::Retiring,
                        id if id == new => unit.role = UnitRole::Current,
                        _ => {}
                    }
                }
                any = true;
            }
        }
        any
    }

    pub(crate) fn all_serve(&self) -> bool {
        let is_ready = |unit: &ProcessUnit| unit.phase() == BackendPhase::Ready;
        self.with_role(UnitRole::Current).any(is_ready)
            && self.with_role(UnitRole::Current).all(|unit| is_ready(unit) || unit.waits_for_change())
    }

    pub(crate) fn holds_starts(&self) -> bool {
        self.all.iter().any(|unit| unit.held_start.is_some())
    }

    /// True if another replica will start soon and this one serves its requests meanwhile.
    pub(crate) fn is_another_starting(&self, replica: u32, failures_told: u32) -> bool {
        self.with_role(UnitRole::Current).any(|unit| {
            let comes = matches!(
                unit.phase(),
                BackendPhase::Starting
                    | BackendPhase::Draining
                    | BackendPhase::Stopping
                    | BackendPhase::Backoff
            );
            unit.replica != replica && comes && !unit.is_hopeless(failures_told)
        })
    }
}
