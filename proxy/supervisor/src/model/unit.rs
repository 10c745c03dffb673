//! Units of a model: each with a life-cycle machine, a timer and a process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::DropGuard;
use warden_policies::cooldown::HoldReason;
use warden_policies::cooldown::working_set::PassedBudgets;
use warden_policies::health::HealthSymptom;
use warden_policies::lifecycle::{
    AfterStop, BackendPhase, LifecycleEvent, LifecycleMachine, LifecyclePolicy, LifecycleTimer,
};
use warden_policies::{GenerationId, RecycleDecision, ServerFacts};

use super::health::HealthTracker;
use super::reclaim::ReclaimState;
use crate::clock;
use crate::error::{BackendFailure, FailureKind};
use crate::lease::cell::GenerationCell;
use crate::lease::queue::{LeaseQueue, QueueRefusal};
use crate::memory::tracker::MemoryTracker;
use crate::process::BackendProcess;
use crate::process::failure::{self, StartLateness};
use crate::process::needs::NeedsCheck;
use crate::process::slot_files::SlotFiles;
use crate::spec::{ModelSpec, ServerCommand, SocketMode, SpawnRequest};
use crate::view::event::EventKind;
use crate::view::log::LogRing;

/// Starts that fail for lack of memory before the fallback is used. After the first one, the loader makes
/// other models free memory.
const SHORT_STARTS: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitRole {
    /// The process serves the replica.
    Current,
    /// The new process of an overlap serves once it is ready.
    Successor,
    /// The old process of an overlap, or of a replica that is no longer configured, drains.
    Retiring,
}

#[derive(Debug, Default)]
pub(super) struct UnitList {
    pub(super) all: Vec<ProcessUnit>,
    next: u64,
}

impl UnitList {
    pub(super) fn add(&mut self, replica: u32, role: UnitRole) -> UnitId {
        let id = UnitId(self.next);
        self.next += 1;
        // Most models have one unit; `push` would reserve four.
        self.all.reserve_exact(1);
        self.all.push(ProcessUnit::new(id, replica, role));
        id
    }

    pub(super) fn ids(&self) -> Vec<UnitId> {
        self.all.iter().map(|unit| unit.id).collect()
    }

    pub(super) fn get(&self, id: UnitId) -> Option<&ProcessUnit> {
        self.all.iter().find(|unit| unit.id == id)
    }

    pub(super) fn get_mut(&mut self, id: UnitId) -> Option<&mut ProcessUnit> {
        self.all.iter_mut().find(|unit| unit.id == id)
    }

    pub(super) fn live(&self, id: UnitId) -> Option<&LiveGeneration> {
        self.get(id)?.live.as_deref()
    }

    pub(super) fn live_mut(&mut self, id: UnitId) -> Option<&mut LiveGeneration> {
        self.get_mut(id)?.live.as_deref_mut()
    }

    pub(super) fn phase_and_live(&mut self, id: UnitId) -> Option<(BackendPhase, &mut LiveGeneration)> {
        let unit = self.get_mut(id)?;
        let phase = unit.phase();
        Some((phase, unit.live.as_deref_mut()?))
    }

    pub(super) fn lives(&self) -> impl Iterator<Item = &LiveGeneration> {
        self.all.iter().filter_map(|unit| unit.live.as_deref())
    }

    pub(super) fn lives_mut(&mut self) -> impl Iterator<Item = &mut LiveGeneration> {
        self.all.iter_mut().filter_map(|unit| unit.live.as_deref_mut())
    }

    pub(super) fn any_process(&self) -> bool {
        self.lives().next().is_some()
    }

    pub(super) fn generation(&self, id: UnitId) -> Option<GenerationId> {
        Some(self.live(id)?.id)
    }

    pub(super) fn with_generation(&self, generation: GenerationId) -> Option<&ProcessUnit> {
        self.all.iter().find(|unit| unit.generation() == Some(generation))
    }

    pub(super) fn with_role(&self, role: UnitRole) -> impl Iterator<Item = &ProcessUnit> {
        self.all.iter().filter(move |unit| unit.role == role)
    }

    pub(super) fn staying(&self) -> impl DoubleEndedIterator<Item = &ProcessUnit> {
        self.all.iter().filter(|unit| unit.role != UnitRole::Retiring)
    }

    pub(super) fn current(&self, replica: u32) -> Option<&ProcessUnit> {
        self.with_role(UnitRole::Current).find(|unit| unit.replica == replica)
    }

    /// Processes that refused a connection. They are probed at once; until they answer, their gates have to be
    /// closed.
    pub(super) fn take_doubted(&mut self, leases: &LeaseQueue) -> Vec<UnitId> {
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
    pub(super) fn wishing_recycle(&self, leases: &LeaseQueue) -> Vec<UnitId> {
        let is_news = |live: &LiveGeneration| {
            let wish = leases.admission_wish(live.id);
            wish.is_some() && wish != live.memory.facts.as_ref().and_then(|facts| facts.admission)
        };
        let wishing = self.all.iter().filter(|unit| unit.live.as_deref().is_some_and(is_news));
        wishing.map(|unit| unit.id).collect()
    }

    pub(super) fn any_ending(&self) -> bool {
        let phases = [BackendPhase::Draining, BackendPhase::Stopping];
        self.all.iter().any(|unit| phases.contains(&unit.phase()))
    }

    pub(super) fn starting_since(&self) -> Option<Instant> {
        let starting = self.lives().filter(|live| live.start.ready.is_none());
        starting.map(|live| live.start.spawned).min()
    }

    /// Replica whose process has another recipe, unless a process fails to start.
    pub(super) fn outdated_replica(&self, made_of: &ProcessRecipe) -> Option<u32> {
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
    pub(super) fn short_start(&self) -> Option<BackendFailure> {
        let is_short = |unit: &&ProcessUnit| {
            unit.start_failures >= SHORT_STARTS
                && unit.failure.as_ref().is_some_and(|failure| failure.kind == FailureKind::OutOfMemory)
        };
        self.all.iter().find(is_short).and_then(|unit| unit.failure.clone())
    }

    /// Refusal of requests, if no start is expected to help.
    pub(super) fn refusal(&self, failures_told: u32) -> Option<QueueRefusal> {
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
    pub(super) fn set_facts(&self, binary: &Path, facts: ServerFacts) {
        for live in self.lives().filter(|live| live.recipe.command().binary == binary) {
            live.cell.set_facts(facts);
        }
    }

    /// Sends an event to the units in some phases.
    pub(super) fn ends(
        &self,
        event: LifecycleEvent,
        is_meant: impl Fn(BackendPhase) -> bool,
    ) -> Vec<(UnitId, LifecycleEvent)> {
        self.all.iter().filter(|unit| is_meant(unit.phase())).map(|unit| (unit.id, event)).collect()
    }

    /// Takes the start events that wait for room.
    pub(super) fn take_held_starts(&mut self) -> Vec<(UnitId, LifecycleEvent)> {
        self.all.iter_mut().filter_map(|unit| Some((unit.id, unit.held_start.take()?))).collect()
    }

    /// Forgets the failures of units without a process. Returns the events that start them again.
    pub(super) fn forget_failures(&mut self) -> Vec<(UnitId, LifecycleEvent)> {
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
    pub(super) fn take_failed(&mut self, failures_told: u32) -> Vec<(u32, BackendFailure)> {
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
    pub(super) fn superseded(&self) -> Vec<(UnitId, LifecycleEvent)> {
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
    pub(super) fn switch_over(&mut self) -> bool {
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

    pub(super) fn all_serve(&self) -> bool {
        let is_ready = |unit: &ProcessUnit| unit.phase() == BackendPhase::Ready;
        self.with_role(UnitRole::Current).any(is_ready)
            && self.with_role(UnitRole::Current).all(|unit| is_ready(unit) || unit.waits_for_change())
    }

    pub(super) fn holds_starts(&self) -> bool {
        self.all.iter().any(|unit| unit.held_start.is_some())
    }

    /// True if another replica will start soon and this one serves its requests meanwhile.
    pub(super) fn is_another_starting(&self, replica: u32, failures_told: u32) -> bool {
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

#[derive(Debug)]
pub(super) struct ProcessUnit {
    pub(super) id: UnitId,
    pub(super) replica: u32,
    pub(super) role: UnitRole,
    pub(super) machine: LifecycleMachine,
    pub(super) timer: Option<(LifecycleTimer, Instant)>,
    /// Start event that waits for room.
    pub(super) held_start: Option<LifecycleEvent>,
    /// Boxed, because a process takes 1.6 KiB, and most models of a large configuration have none.
    pub(super) live: Option<Box<LiveGeneration>>,
    pub(super) start_failures: u32,
    /// Cause of the last unrequested end.
    pub(super) failure: Option<BackendFailure>,
    /// Result of the file check before the last start.
    pub(super) sight: Option<NeedsCheck>,
}

impl ProcessUnit {
    pub(super) fn new(id: UnitId, replica: u32, role: UnitRole) -> Self {
        Self {
            id,
            replica,
            role,
            machine: LifecycleMachine::new(),
            timer: None,
            held_start: None,
            live: None,
            start_failures: 0,
            failure: None,
            sight: None,
        }
    }

    pub(super) fn phase(&self) -> BackendPhase {
        self.machine.phase()
    }

    pub(super) fn generation(&self) -> Option<GenerationId> {
        self.live.as_ref().map(|live| live.id)
    }

    pub(super) fn due_next(&self) -> Option<Instant> {
        let of_life = self.timer.map(|(_, at)| at);
        let of_process = self.live.as_ref().and_then(|live| live.timers.next_deadline());
        of_life.into_iter().chain(of_process).min()
    }

    /// True if the unit serves its replica, but has no process.
    pub(super) fn is_idle(&self) -> bool {
        self.role == UnitRole::Current && self.phase() == BackendPhase::Idle
    }

    /// True if the process drains and has no leases.
    pub(super) fn is_drained(&self, leases: &LeaseQueue) -> bool {
        let is_unused = |generation| leases.with_state(|queue| queue.is_unused(generation));
        self.phase() == BackendPhase::Draining && self.generation().is_none_or(is_unused)
    }

    /// True if a retiring process is gone.
    pub(super) fn is_over(&self) -> bool {
        self.role == UnitRole::Retiring && !self.machine.has_process()
    }

    /// Detects that the process has become idle or busy. An idle process gets an idle sample, and a judgement
    /// if a replacement waits for a quiet moment.
    pub(super) fn watch_idle(&mut self, leases: &LeaseQueue, settle: Duration, quiet_for: Duration) {
        if self.phase() != BackendPhase::Ready {
            return;
        }
        let Some(live) = &mut self.live else { return };
        // Repeat, because requests come and go meanwhile.
        loop {
            let idle = leases.idle_since(live.id);
            if live.timers.idle_seen != idle {
                live.timers.idle_seen = idle;
                live.timers.idle_sample = idle.map(|since| (clock::after(since, settle), since));
                if let Some(since) = idle
                    && live.wish.since.is_some()
                {
                    live.timers.judgement = Some(clock::after(since, quiet_for));
                }
            }
            let returns = live.timers.idle_sample.is_some();
            if leases.with_state(|queue| queue.table.watch_idle(live.id, idle, returns)) || returns {
                break;
            }
        }
    }

    /// Starts a timer of the machine, and returns its time.
    pub(super) fn arm_timer(
        &mut self,
        timer: LifecycleTimer,
        timing: &LifecyclePolicy,
        logs: &LogRing,
    ) -> Duration {
        let live = self.live.as_mut();
        let after = match timer {
            LifecycleTimer::Start => timing.start_timeout,
            LifecycleTimer::Suspect => match live.and_then(|live| live.note_crash(logs)) {
                Some(since) => timing.crash_ends.saturating_sub(since.elapsed()).min(timing.suspect_timeout),
                None => timing.suspect_timeout,
            },
            // The drain deadline is shorter for a crashed or silent process.
            LifecycleTimer::Drain => {
                live.map_or(timing.drain_deadline, |live| live.probing.longest_drain(timing))
            }
            LifecycleTimer::Grace if live.is_some_and(|live| live.child.short_grace) => timing.kill_grace,
            LifecycleTimer::Grace => timing.stop_grace,
            LifecycleTimer::Backoff { failures, short } => timing.pause(failures, short, rand::random()),
            LifecycleTimer::Trial => timing.recheck,
        };
        self.timer = Some((timer, clock::after(Instant::now(), after)));
        after
    }

    /// Event to log when the unit has changed from one phase to another.
    pub(super) fn phase_event(
        &self,
        before: BackendPhase,
        phase: BackendPhase,
        leases: &LeaseQueue,
        logs: &LogRing,
    ) -> Option<EventKind> {
        let live = self.live.as_ref();
        match (before, phase) {
            (_, BackendPhase::Suspect) => Some(EventKind::Suspect {
                refused: live.is_some_and(|live| live.probing.doubted_at.is_some()),
                crash: live.and_then(|live| live.crash_line(logs)),
            }),
            (BackendPhase::Suspect, BackendPhase::Ready) => Some(EventKind::Recovered),
            (_, BackendPhase::Draining) => {
                let in_flight = live.map_or(0, |live| leases.in_flight(live.id));
                Some(EventKind::Draining { in_flight })
            }
            (_, BackendPhase::Failed) => self.failure.clone().map(|failure| EventKind::Failed { failure }),
            _ => None,
        }
    }

    /// True if the unit has no process, or one with at most this number.
    pub(super) fn is_not_newer(&self, after: GenerationId) -> bool {
        self.generation().is_none_or(|generation| generation <= after)
    }

    /// True if requests should be refused instead of waiting for the next start. False during a trial start
    /// and after the end of a process that had served: both soon show a result.
    pub(super) fn is_hopeless(&self, failures_told: u32) -> bool {
        // This start waits only for room, which the loader frees for waiting requests.
        if self.held_start.is_some() {
            return false;
        }
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0 && self.start_failures >= failures_told,
            _ => false,
        }
    }

    pub(super) fn waits_for_change(&self) -> bool {
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0,
            _ => false,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct PolicyWish {
    pub(super) last_decision: Option<(RecycleDecision, Option<HoldReason>)>,
    pub(super) since: Option<Instant>,
    /// Begin of a drain that the policy demands at once.
    pub(super) urgent_since: Option<Instant>,
    /// Earliest time of the next drain, set when requests outlasted the last one.
    pub(super) not_before: Option<Instant>,
    pub(super) passed: PassedBudgets,
    /// Random number that spreads the replacements of several processes in time.
    pub(super) random: f64,
}

/// Command and options of a process. A process with an equal recipe need not be replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecipe {
    pub(super) request: SpawnRequest,
    pub(super) memory_report: bool,
    pub(super) reclaim: bool,
    socket: SocketMode,
}

impl ProcessRecipe {
    pub(super) fn command(&self) -> &ServerCommand {
        &self.request.command
    }
}

pub(super) fn process_recipe(spec: &ModelSpec) -> ProcessRecipe {
    ProcessRecipe {
        request: SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj },
        memory_report: spec.run.memory_report,
        reclaim: spec.recycle.common.reclaim,
        socket: spec.run.socket,
    }
}

/// Signal to send as soon as the process has been created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingSignal {
    Terminate,
    Kill,
}

#[derive(Debug)]
pub(super) struct ChildHandle {
    pub(super) socket: PathBuf,
    pub(super) process: Option<Arc<dyn BackendProcess>>,
    pub(super) pending: Option<PendingSignal>,
    /// Start command, including added arguments.
    pub(super) started_with: Option<ServerCommand>,
    pub(super) short_grace: bool,
}

impl ChildHandle {
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid())
    }
}

#[derive(Debug)]
pub(super) struct StartProgress {
    pub(super) spawned: Instant,
    /// Load time of a process that the previous instance created.
    pub(super) adopted: Option<Duration>,
    /// Stops the helper that watches for a stalled start, when dropped.
    pub(super) watch: Option<DropGuard>,
    pub(super) timed_out: Option<StartLateness>,
    pub(super) ready: Option<Instant>,
    /// Number of slots that the ready process reported.
    pub(super) slots: Option<u32>,
}

#[derive(Debug, Default)]
pub(super) struct ProbeState {
    pub(super) answered: bool,
    pub(super) probes_lost: u32,
    pub(super) lost_since: Option<Instant>,
    /// True if a short drain deadline was set, because the process is silent.
    pub(super) short_drain: bool,
    /// Send time of the last probe. Results of earlier probes are ignored.
    pub(super) last_probe: Option<Instant>,
    /// Lines that the model's processes had logged at the last probe.
    pub(super) lines_at_probe: u64,
    /// Lines that the model's processes had logged at the last answered probe.
    pub(super) lines_at_answer: u64,
    /// Tokens and complete answers at the last probe.
    pub(super) progress_at_probe: u64,
    /// Time of a crash line, if the process has answered no probe since.
    pub(super) crash_logged_at: Option<Instant>,
    /// Time of a crash line, if the process is known to be unresponsive.
    pub(super) crashed_at: Option<Instant>,
    /// Time of a refused connection. Probes sent before it do not count.
    pub(super) doubted_at: Option<Instant>,
}

impl ProbeState {
    pub(super) fn note_lost(&mut self, sent: Instant) {
        if self.probes_lost == 0 {
            self.lost_since = Some(sent);
        }
        self.probes_lost += 1;
    }

    /// Records progress of requests. A logged crash is not forgotten: the progress may be older than the
    /// crash line.
    pub(super) fn note_progress(&mut self, now: Instant) {
        self.probes_lost = 0;
        self.crash_logged_at = self.crash_logged_at.map(|_| now);
    }

    pub(super) fn note_answer(&mut self) {
        self.probes_lost = 0;
        self.crash_logged_at = None;
        self.lines_at_answer = self.lines_at_probe;
    }

    fn longest_drain(&mut self, timing: &LifecyclePolicy) -> Duration {
        match self.crashed_at {
            // After a crash, the process answers no more requests.
            Some(since) => timing.crash_ends.saturating_sub(since.elapsed()).min(timing.drain_deadline),
            // A process that was stopped by SIGSTOP may continue later.
            None if self.silent_for(timing.probes_lost).is_some() => {
                self.short_drain = true;
                timing.crash_ends.min(timing.drain_deadline)
            }
            None => timing.drain_deadline,
        }
    }

    /// Time without answers and progress; `None` until enough probes are lost.
    pub(super) fn silent_for(&self, probes_lost: u32) -> Option<Duration> {
        let is_silent = self.probes_lost > 0 && self.probes_lost >= probes_lost;
        if is_silent { self.lost_since.map(|since| since.elapsed()) } else { None }
    }
}

#[derive(Debug, Default)]
pub(super) struct GenerationTimers {
    pub(super) probe: Option<Instant>,
    pub(super) sample: Option<Instant>,
    /// Time of the next idle sample, and the moment from which the process must have been idle.
    pub(super) idle_sample: Option<(Instant, Instant)>,
    pub(super) judgement: Option<Instant>,
    pub(super) idle_seen: Option<Instant>,
}

impl GenerationTimers {
    fn next_deadline(&self) -> Option<Instant> {
        let idle_sample = self.idle_sample.map(|(at, _)| at);
        [self.probe, self.sample, idle_sample, self.judgement].into_iter().flatten().min()
    }

    /// Stops the timers for a phase. During a drain, memory is still sampled, because a shortage cuts the
    /// drain short, and a process with a crash line is still probed.
    fn stop(&mut self, phase: BackendPhase, is_alarmed: bool) {
        let drains = phase == BackendPhase::Draining;
        *self = Self {
            probe: if drains && is_alarmed { self.probe } else { None },
            sample: if drains { self.sample } else { None },
            idle_seen: self.idle_seen,
            ..Self::default()
        };
    }

    /// Takes an idle sample that is due. Returns since when the process must have been idle.
    pub(super) fn take_idle_sample(&mut self, now: Instant) -> Option<Instant> {
        self.idle_sample.take_if(|(at, _)| *at <= now).map(|(_, since)| since)
    }
}

/// Clears a timer that is due. Returns true if it was due.
pub(super) fn take_due(timer: &mut Option<Instant>, now: Instant) -> bool {
    timer.take_if(|at| *at <= now).is_some()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PackProgress {
    #[default]
    NotYet,
    UnderWay,
    Done,
}

#[derive(Debug, Default)]
pub(super) struct WarmProgress {
    /// Directory for saved slots, if the process can save any.
    pub(super) files: Option<Arc<SlotFiles>>,
    pub(super) packed: PackProgress,
    pub(super) from: Option<GenerationId>,
}

#[derive(Debug)]
pub(super) struct LiveGeneration {
    pub(super) id: GenerationId,
    pub(super) cell: Arc<GenerationCell>,
    pub(super) recipe: ProcessRecipe,
    pub(super) child: ChildHandle,
    pub(super) start: StartProgress,
    pub(super) probing: ProbeState,
    pub(super) timers: GenerationTimers,
    pub(super) memory: Box<MemoryTracker>,
    pub(super) health: Box<HealthTracker>,
    pub(super) wish: PolicyWish,
    pub(super) reclaim: ReclaimState,
    pub(super) warm: WarmProgress,
}

impl LiveGeneration {
    pub(super) fn new(
        id: GenerationId,
        socket: PathBuf,
        cell: Arc<GenerationCell>,
        recipe: ProcessRecipe,
        memory: MemoryTracker,
        health: HealthTracker,
    ) -> Self {
        let start = StartProgress {
            spawned: Instant::now(),
            adopted: None,
            watch: None,
            timed_out: None,
            ready: None,
            slots: None,
        };
        Self {
            id,
            cell,
            recipe,
            child: ChildHandle {
                socket,
                process: None,
                pending: None,
                started_with: None,
                short_grace: false,
            },
            start,
            probing: ProbeState::default(),
            timers: GenerationTimers::default(),
            memory: Box::new(memory),
            health: Box::new(health),
            wish: PolicyWish { random: rand::random(), ..PolicyWish::default() },
            reclaim: ReclaimState::default(),
            warm: WarmProgress::default(),
        }
    }

    pub(super) fn enter_phase(&mut self, phase: BackendPhase, policy: &LifecyclePolicy) {
        let is_alarmed = self.probing.crash_logged_at.is_some();
        if matches!(phase, BackendPhase::Draining | BackendPhase::Stopping | BackendPhase::Starting) {
            self.timers.stop(phase, is_alarmed);
            self.wish.last_decision = None;
        }
        if phase == BackendPhase::Draining && !is_alarmed {
            // Probe during a drain: a process that stops answering must not use the whole deadline.
            let is_silent = self.probing.silent_for(policy.probes_lost).is_some();
            let pause = if is_silent { policy.start_probe_interval } else { policy.probe_interval };
            self.timers.probe = Some(clock::after(Instant::now(), pause));
        }
    }

    /// Crash line that the process has logged since it last answered a probe. An older line is ignored:
    /// it may be text that a client sent.
    pub(super) fn crash_line(&self, logs: &LogRing) -> Option<String> {
        failure::crash_line(&logs.lines_since(self.id, self.probing.lines_at_answer))
    }

    /// Handles an unanswered probe. Returns the time of the crash if the process has logged one since its
    /// last answered probe.
    pub(super) fn note_crash(&mut self, logs: &LogRing) -> Option<Instant> {
        let has_line = self.crash_line(logs).is_some();
        let probing = &mut self.probing;
        probing.crashed_at = has_line.then(|| probing.crash_logged_at.unwrap_or_else(Instant::now));
        probing.crashed_at
    }

    /// Duration of the hang for which a process is ended. Its requests may be the cause.
    pub(super) fn hung_for(&self) -> Option<Duration> {
        let silent = |symptom: &HealthSymptom| match symptom {
            HealthSymptom::Wedged { seconds, .. } => Some(Duration::from_secs(*seconds)),
            _ => None,
        };
        let crashed = self.probing.crashed_at.map(|since| since.elapsed());
        crashed.or_else(|| self.health.symptoms().iter().find_map(silent))
    }

    /// False if the process is known to answer no more requests, or has to end at once.
    pub(super) fn may_drain_on(&self, probes_lost: u32) -> bool {
        !self.child.short_grace
            && self.probing.crashed_at.is_none()
            && self.probing.silent_for(probes_lost).is_none()
    }

    /// Sends SIGTERM, now or as soon as the process has been created.
    pub(super) fn terminate(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.terminate(),
            None => self.child.pending = self.child.pending.or(Some(PendingSignal::Terminate)),
        }
    }

    /// Sends SIGKILL, now or as soon as the process has been created.
    pub(super) fn kill(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.kill(),
            None => self.child.pending = Some(PendingSignal::Kill),
        }
    }
}
