//! Derives actions from the present state, independent of the events that led to it.

use std::sync::atomic::Ordering;

use tokio::time::Instant;
use warden_policies::lifecycle::{AfterStop, BackendPhase, LifecycleEvent, LifecycleTimer};
use warden_policies::{GenerationId, Reason};

use super::loading::LoadState;
use super::operators::DrainRequest;
use super::recipe::process_recipe;
use super::replace::decision_for;
use super::unit::{ProcessUnit, UnitId, UnitRole};
use super::{ModelTask, TaskEnd};
use crate::error::{BackendFailure, LeaseDenied};
use crate::lease::queue::QueueRefusal;
use crate::lease::queue::coming::NextProcess;
use crate::view::ledger::ReplacementMode;

impl ModelTask {
    pub(super) fn settle_once(&mut self) {
        self.probe_doubted_units();
        self.finish_drains();
        self.switch_over();
        self.pause_queue_clock();
        self.replace_unresponsive();
        self.remove_retired();
        self.watch_idle();
        self.judge_recycle_wishes();
        self.fail_replacements();
        self.complete_replacements();
        self.settle_restarts();
        self.settle_drains();
        self.settle_fallback();
        self.settle_start_search();
        self.settle_loading();
        if self.end.is_some() {
            self.settle_end();
            return;
        }
        self.settle_configuration();
        self.unload_if_idle();
        self.start_needed();
        self.watch_needs();
        self.settle_refusal();
        self.publish_next_process();
    }

    /// Sends no new requests to generations that refused a connection, until they answer a probe.
    fn probe_doubted_units(&mut self) {
        for generation in self.leases.take_doubts() {
            let of = |unit: &&mut ProcessUnit| unit.generation() == Some(generation);
            let Some(unit) = self.units.iter_mut().find(of) else { continue };
            let (id, phase) = (unit.id, unit.phase());
            if matches!(phase, BackendPhase::Ready | BackendPhase::Suspect)
                && let Some(live) = &mut unit.live
            {
                let now = Instant::now();
                live.doubted_at = Some(now);
                live.timers.probe = live.timers.probe.map(|_| now);
                self.step_machine(id, LifecycleEvent::ProbesLost);
            }
        }
    }

    /// Ends the drain of generations that no request uses or can still reach.
    fn finish_drains(&mut self) {
        for id in self.ids() {
            let Some(unit) = self.unit(id) else { continue };
            let empty = unit.generation().is_none_or(|generation| self.leases.is_unused(generation));
            if unit.phase() == BackendPhase::Draining && empty && self.is_packed(id) {
                self.step_machine(id, LifecycleEvent::Drained);
            }
        }
    }

    /// Makes the successor of an overlap the current unit when it is ready, or when the old process has
    /// ended first.
    fn switch_over(&mut self) {
        let successors = self.units.iter().filter(|unit| unit.role == UnitRole::Successor);
        let pairs: Vec<(UnitId, u32)> = successors.map(|unit| (unit.id, unit.replica)).collect();
        for (new, replica) in pairs {
            let Some(old) = self.current_unit(replica) else { continue };
            let (old, phase, then) = (old.id, old.phase(), old.machine.after_stop());
            let ready = self.unit(new).is_some_and(|unit| unit.phase() == BackendPhase::Ready);
            // The successor serves from now on, so the old process must not be restarted.
            if ready
                || then == Some(AfterStop::Restart)
                || matches!(phase, BackendPhase::Backoff | BackendPhase::Failed)
            {
                self.step_machine(old, LifecycleEvent::Down);
            }
            let gone = self.unit(old).is_some_and(|unit| !unit.machine.has_process());
            if ready || gone {
                self.set_role(old, UnitRole::Retiring);
                self.set_role(new, UnitRole::Current);
            }
        }
    }

    /// Pauses the time limits of queued requests while a process drains or stops and no other takes requests.
    /// Resumes them afterwards.
    fn pause_queue_clock(&mut self) {
        let going =
            |unit: &ProcessUnit| matches!(unit.phase(), BackendPhase::Draining | BackendPhase::Stopping);
        let stands = self.end.is_none() && self.units.iter().any(going) && !self.leases.any_open();
        if stands != self.queue_paused_at.is_some() {
            self.queue_paused_at = stands.then(Instant::now);
            self.leases.pause_clock(stands);
        }
    }

    fn set_role(&mut self, id: UnitId, role: UnitRole) {
        if let Some(unit) = self.unit_mut(id) {
            unit.role = role;
        }
        self.note_action();
    }

    /// Begins a replacement, with a ledger entry, for an unresponsive process that the life-cycle machine
    /// gave up.
    fn replace_unresponsive(&mut self) {
        let given_up = self.units.iter().filter(|unit| {
            unit.role == UnitRole::Current
                && unit.machine.after_stop() == Some(AfterStop::Restart)
                && unit.live.as_ref().is_some_and(|live| live.ready.is_some())
        });
        let given_up: Vec<u32> = given_up.map(|unit| unit.replica).collect();
        for replica in given_up {
            if self.end.is_none() && self.replacements.reason(replica).is_none() {
                let note = "sequential: the process does not answer".to_owned();
                let crashed = self.current_unit(replica).and_then(|unit| unit.live.as_ref()?.crashed_at);
                let reason = if crashed.is_some() { Reason::Crashed } else { Reason::Unresponsive };
                let permit = self.current_unit(replica).map(|unit| self.claim_permit(unit.id, replica));
                let decision = decision_for(reason);
                self.record_replacement(replica, &decision, ReplacementMode::Sequential, Some(note), permit);
            }
        }
    }

    /// Removes retired units that have no process any more.
    fn remove_retired(&mut self) {
        let before = self.units.len();
        self.units.retain(|unit| unit.role != UnitRole::Retiring || unit.machine.has_process());
        if self.units.len() < before {
            self.note_action();
        }
    }

    /// Ends replacements whose new process does not become ready.
    fn fail_replacements(&mut self) {
        let many = self.spec.lifecycle.failures_told;
        let failed = self.units.iter().filter(|unit| match unit.role {
            // The old process still serves, so one failed start is enough to give up.
            UnitRole::Successor => !unit.machine.has_process(),
            UnitRole::Current => unit.is_hopeless(many),
            UnitRole::Retiring => false,
        });
        let failed: Vec<(UnitId, u32, UnitRole, Option<BackendFailure>)> =
            failed.map(|unit| (unit.id, unit.replica, unit.role, unit.failure.clone())).collect();
        for (id, replica, role, failure) in failed {
            if let Some(failure) = failure {
                self.fail_replacement(replica, &failure);
            }
            if role == UnitRole::Successor {
                self.units.retain(|unit| unit.id != id);
                self.note_action();
            }
        }
    }

    /// Replaces processes that have an older configuration, one after another; stops when a replacement
    /// fails.
    fn settle_configuration(&mut self) {
        if !self.replacements.is_empty() || self.timers.configuration.is_some_and(|at| at > Instant::now()) {
            return;
        }
        let made_of = process_recipe(&self.spec);
        let stumbled = |phase| matches!(phase, BackendPhase::Backoff | BackendPhase::Failed);
        let current = || self.units.iter().filter(|unit| unit.role == UnitRole::Current);
        if current().any(|unit| stumbled(unit.phase())) {
            return;
        }
        let stale = current().find(|unit| {
            let live = unit.live.as_ref().filter(|live| live.recipe != made_of);
            live.is_some()
                && matches!(
                    unit.phase(),
                    BackendPhase::Starting | BackendPhase::Ready | BackendPhase::Suspect
                )
        });
        if let Some(replica) = stale.map(|unit| unit.replica) {
            self.replace_replica(replica, Reason::Configuration);
        }
    }

    /// Starts processes that should run, or that waiting requests need.
    fn start_needed(&mut self) {
        if self.leases.needs_process() {
            self.wanted = true;
        }
        let leaving = self.context.leaving.load(Ordering::SeqCst) > 0;
        self.timers.room = self.timers.room.filter(|until| leaving && *until > Instant::now());
        let idle = |unit: &ProcessUnit| unit.role == UnitRole::Current && unit.phase() == BackendPhase::Idle;
        if !self.wanted || self.timers.room.is_some() || !self.units.iter().any(idle) || !self.may_start() {
            return;
        }
        for id in self.ids() {
            if self.unit(id).is_some_and(idle) {
                self.step_machine(id, LifecycleEvent::Up);
            }
        }
    }

    /// Publishes for waiting requests when the next process is expected.
    fn publish_next_process(&self) {
        let starting = self.live_generations().filter(|live| live.ready.is_none()).map(|live| live.spawned);
        self.leases.set_next_process(NextProcess {
            since: starting.min(),
            took: self.experience.load_time,
            fastest: self.experience.fastest_start(process_recipe(&self.spec).command()),
            waits_for_room: matches!(self.load_state, LoadState::Waiting { .. }),
        });
    }

    /// Refuses requests at once while no process can be expected.
    fn settle_refusal(&mut self) {
        let told = self.spec.lifecycle.failures_told;
        let units = || self.units.iter().filter(|unit| unit.role != UnitRole::Retiring);
        let hopeless = units().next().is_some() && units().all(|unit| unit.is_hopeless(told));
        // Hide output of processes that served: it may contain prompts, and this message goes to all
        // clients.
        let told = |unit: &ProcessUnit| {
            let mut failure = unit.failure.clone()?;
            if unit.start_failures == 0 {
                failure.lines.clear();
            }
            Some(failure)
        };
        let failure = units().filter_map(told).next_back();
        let refusal = failure.filter(|_| hopeless).map(|failure| {
            // Clients should retry after the next start.
            let next = units().filter_map(|unit| unit.timer.map(|(_, at)| at)).min();
            let next = next.unwrap_or_else(Instant::now);
            if units().all(|unit| unit.phase() == BackendPhase::Failed) {
                QueueRefusal::Failed(failure, next)
            } else {
                QueueRefusal::StartFailed(failure, next)
            }
        });
        self.leases.set_refusal(refusal);
        if let Some(denied) = self.leases.predecessor_refusal() {
            self.context.refuse_in_predecessor(&self.spec.name, &denied);
        }
    }

    /// Handles restarts that operators requested: done when a newer process serves each replica.
    fn settle_restarts(&mut self) {
        let Some(oldest) = self.operators.restarts.first().map(|restart| restart.after) else { return };
        if self.answer_done_restarts() || !self.replacements.is_empty() {
            return;
        }
        if let Some(replica) = self.units.iter().find(is_not_newer(oldest)).map(|unit| unit.replica) {
            self.replace_replica(replica, Reason::Operator);
            let by = self.operators.restarts.first().and_then(|restart| restart.by.as_deref());
            self.replacements.note_operator(replica, by);
        }
    }

    /// Answers operators whose restart is done. Returns true if there was one.
    pub(super) fn answer_done_restarts(&mut self) -> bool {
        let serves =
            |unit: &ProcessUnit| unit.role != UnitRole::Current || unit.phase() == BackendPhase::Ready;
        if !self.replacements.is_empty() || !self.units.iter().all(serves) {
            return false;
        }
        let done = |after| !self.units.iter().any(|unit| is_not_newer(after)(&unit));
        let count = self.operators.restarts.iter().take_while(|restart| done(restart.after)).count();
        for restart in self.operators.restarts.drain(..count).collect::<Vec<_>>() {
            let current = |id| self.units.iter().any(|unit| unit.generation() == id);
            let entries =
                self.replacements.last.iter().filter(|entry| entry.to.is_some() && current(entry.to));
            let entries = entries.cloned().collect();
            self.answer(restart.reply, Ok(entries));
        }
        count > 0
    }

    /// Handles drains that operators requested: done when the processes that ran at the request are gone.
    fn settle_drains(&mut self) {
        let lives = |id: &GenerationId| self.units.iter().any(|unit| unit.generation() == Some(*id));
        let (waiting, done) = std::mem::take(&mut self.operators.drains)
            .into_iter()
            .partition(|drain| drain.generations.iter().any(lives));
        self.operators.drains = waiting;
        let done: Vec<DrainRequest> = done;
        for drain in done {
            self.answer(drain.reply, Ok(()));
        }
    }

    /// Carries out removal and shutdown: running requests may continue until the deadline, and no process
    /// is started.
    fn settle_end(&mut self) {
        let (late, over) = match self.end {
            None => return,
            Some(TaskEnd::Removed) => (false, true),
            Some(TaskEnd::Shutdown(deadline)) => {
                let late = deadline <= Instant::now();
                if !self.leases.any_open() || late {
                    self.leases.refuse_waiting(&LeaseDenied::ShuttingDown);
                }
                (late, late || self.leases.is_idle())
            }
        };
        for id in self.ids() {
            if over || self.unit(id).is_some_and(|unit| unit.phase() != BackendPhase::Ready) {
                self.step_machine(id, LifecycleEvent::Down);
            }
            if late && self.unit(id).is_some_and(|unit| unit.phase() == BackendPhase::Draining) {
                self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Drain));
            }
        }
    }
}

/// Predicate for current units whose process is not newer than the generation `after` of a requested
/// restart.
fn is_not_newer(after: GenerationId) -> impl Fn(&&ProcessUnit) -> bool {
    move |unit| {
        unit.role == UnitRole::Current && unit.generation().is_none_or(|generation| generation <= after)
    }
}
