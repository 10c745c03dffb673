//! Derives actions from the present state, whatever events led to it.

use std::sync::atomic::Ordering;

use tokio::time::Instant;
use warden_policies::lifecycle::{AfterStop, BackendPhase, LifecycleEvent, LifecycleTimer};
use warden_policies::{GenerationId, Reason};

use super::control::DrainRequest;
use super::replace::decision_for;
use super::unit::{ProcessUnit, UnitRole, process_recipe};
use super::{ModelTask, TaskEnd};
use crate::error::LeaseDenied;
use crate::lease::queue::QueueRefusal;
use crate::lease::queue::ask::NextProcess;
use crate::view::ledger::{LedgerEntry, ReplacementMode};

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
        if self.life.end.is_some() {
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

    /// Closes the gates of generations that refused a connection, until they answer a probe.
    fn probe_doubted_units(&mut self) {
        for generation in self.leases.with_state(|queue| std::mem::take(&mut queue.table.doubted)) {
            let Some(id) = self.units.with_generation(generation).map(|unit| unit.id) else { continue };
            if let Some((BackendPhase::Ready | BackendPhase::Suspect, live)) = self.units.phase_and_live(id) {
                let now = Instant::now();
                live.probing.doubted_at = Some(now);
                live.timers.probe = live.timers.probe.map(|_| now);
                self.step_machine(id, LifecycleEvent::ProbesLost);
            }
        }
    }

    fn finish_drains(&mut self) {
        for id in self.units.ids() {
            let Some(unit) = self.units.get(id) else { continue };
            let is_unused =
                unit.generation().is_none_or(|id| self.leases.with_state(|queue| queue.is_unused(id)));
            if unit.phase() == BackendPhase::Draining && is_unused && self.is_packed(id) {
                self.step_machine(id, LifecycleEvent::Drained);
            }
        }
    }

    /// Makes the successor of an overlap current when it is ready or the old process has ended.
    fn switch_over(&mut self) {
        let successors = self.units.with_role(UnitRole::Successor);
        let successors: Vec<_> = successors.map(|unit| (unit.id, unit.replica)).collect();
        for (new, replica) in successors {
            let Some(unit) = self.units.current(replica) else { continue };
            let old = unit.id;
            let phase = unit.phase();
            let then = unit.machine.after_stop();
            let ready = self.units.get(new).is_some_and(|unit| unit.phase() == BackendPhase::Ready);
            // The successor serves, so the old process must not be restarted.
            if ready
                || then == Some(AfterStop::Restart)
                || matches!(phase, BackendPhase::Backoff | BackendPhase::Failed)
            {
                self.step_machine(old, LifecycleEvent::Down);
            }
            let gone = self.units.get(old).is_some_and(|unit| !unit.machine.has_process());
            if ready || gone {
                self.units.set_role(old, UnitRole::Retiring);
                self.units.set_role(new, UnitRole::Current);
                self.life.note_action();
            }
        }
    }

    fn pause_queue_clock(&mut self) {
        let is_ending =
            |unit: &ProcessUnit| matches!(unit.phase(), BackendPhase::Draining | BackendPhase::Stopping);
        let is_paused =
            self.life.end.is_none() && self.units.all.iter().any(is_ending) && !self.leases.any_open();
        self.leases.with_state(|queue| queue.limits.set_paused(is_paused));
    }

    /// Begins a replacement of an unresponsive process that the life-cycle machine gave up.
    fn replace_unresponsive(&mut self) {
        let is_given_up = |unit: &&ProcessUnit| {
            unit.machine.after_stop() == Some(AfterStop::Restart)
                && unit.live.as_ref().is_some_and(|live| live.start.ready.is_some())
        };
        let given_up = self.units.with_role(UnitRole::Current).filter(is_given_up);
        let given_up: Vec<_> = given_up.map(|unit| (unit.id, unit.replica)).collect();
        for (id, replica) in given_up {
            if self.life.end.is_none() && self.replacements.reason(replica).is_none() {
                let note = "sequential: the process does not answer".to_owned();
                let crashed = self.units.live(id).and_then(|live| live.probing.crashed_at);
                let reason = if crashed.is_some() { Reason::Crashed } else { Reason::Unresponsive };
                let permit = self.claim_permit(id, replica);
                let mode = ReplacementMode::Sequential;
                self.record_replacement(replica, &decision_for(reason), mode, Some(note), Some(permit));
            }
        }
    }

    fn remove_retired(&mut self) {
        let before = self.units.all.len();
        self.units.all.retain(|unit| unit.role != UnitRole::Retiring || unit.machine.has_process());
        if self.units.all.len() < before {
            self.life.note_action();
        }
    }

    fn fail_replacements(&mut self) {
        let many = self.spec.lifecycle.failures_told;
        for id in self.units.ids() {
            let Some(unit) = self.units.get(id) else { continue };
            let role = unit.role;
            let has_failed = match role {
                // The old process still serves: give up after one failed start.
                UnitRole::Successor => !unit.machine.has_process(),
                UnitRole::Current => unit.is_hopeless(many),
                UnitRole::Retiring => false,
            };
            if !has_failed {
                continue;
            }
            let replica = unit.replica;
            if let Some(failure) = unit.failure.clone() {
                self.fail_replacement(replica, &failure);
            }
            if role == UnitRole::Successor {
                self.units.all.retain(|unit| unit.id != id);
                self.life.note_action();
            }
        }
    }

    /// Replaces outdated processes one after another, with a pause after a failed replacement.
    fn settle_configuration(&mut self) {
        if !self.replacements.is_empty()
            || self.life.timers.configuration.is_some_and(|at| at > Instant::now())
        {
            return;
        }
        let stumbled =
            |unit: &ProcessUnit| matches!(unit.phase(), BackendPhase::Backoff | BackendPhase::Failed);
        if self.units.with_role(UnitRole::Current).any(stumbled) {
            return;
        }
        let made_of = process_recipe(&self.spec);
        let is_stale = |unit: &&ProcessUnit| {
            unit.live.as_ref().is_some_and(|live| live.recipe != made_of)
                && matches!(
                    unit.phase(),
                    BackendPhase::Starting | BackendPhase::Ready | BackendPhase::Suspect
                )
        };
        let stale = self.units.with_role(UnitRole::Current).find(is_stale);
        if let Some(replica) = stale.map(|unit| unit.replica) {
            self.replace_replica(replica, Reason::Configuration);
        }
    }

    fn start_needed(&mut self) {
        if self.leases.needs_process() {
            self.room.wanted = true;
        }
        let leaving = self.context.leaving.load(Ordering::SeqCst) > 0;
        self.life.timers.room = self.life.timers.room.filter(|until| leaving && *until > Instant::now());
        let idle = |unit: &ProcessUnit| unit.role == UnitRole::Current && unit.phase() == BackendPhase::Idle;
        if !self.room.wanted
            || self.life.timers.room.is_some()
            || !self.units.all.iter().any(idle)
            || !self.may_start()
        {
            return;
        }
        for id in self.units.ids() {
            if self.units.get(id).is_some_and(idle) {
                self.step_machine(id, LifecycleEvent::Up);
            }
        }
    }

    /// Publishes the expected time of the next process for waiting requests.
    fn publish_next_process(&self) {
        let starting =
            self.units.lives().filter(|live| live.start.ready.is_none()).map(|live| live.start.spawned);
        let next = NextProcess {
            since: starting.min(),
            took: self.experience.load_time,
            fastest: self.experience.fastest_start(process_recipe(&self.spec).command()),
            waits_for_room: self.room.is_waiting(),
        };
        self.leases.with_state(|queue| queue.coming.next = next);
    }

    fn settle_refusal(&mut self) {
        let many = self.spec.lifecycle.failures_told;
        let units = || self.units.staying();
        let is_hopeless = units().next().is_some() && units().all(|unit| unit.is_hopeless(many));
        let failed = units().rfind(|unit| unit.failure.is_some());
        let refusal = match failed.and_then(|unit| Some((unit, unit.failure.clone()?))) {
            Some((unit, mut failure)) if is_hopeless => {
                // Output of a process that served may contain prompts, and all clients get this message.
                if unit.start_failures == 0 {
                    failure.lines.clear();
                }
                let next = units().filter_map(|unit| unit.timer.map(|(_, at)| at)).min();
                let next = next.unwrap_or_else(Instant::now);
                if units().all(|unit| unit.phase() == BackendPhase::Failed) {
                    Some(QueueRefusal::Failed(failure, next))
                } else {
                    Some(QueueRefusal::StartFailed(failure, next))
                }
            }
            _ => None,
        };
        self.leases.set_refusal(refusal);
        if let Some(denied) = self.leases.with_state(|queue| queue.predecessor_refusal()) {
            self.context.refuse_in_predecessor(&self.spec.name, &denied);
        }
    }

    /// Continues requested restarts: each replica needs a newer process.
    fn settle_restarts(&mut self) {
        let Some(oldest) = self.operators.restarts.first().map(|restart| restart.after) else { return };
        if self.answer_done_restarts() || !self.replacements.is_empty() {
            return;
        }
        let older = self.units.with_role(UnitRole::Current).find(|unit| unit.is_not_newer(oldest));
        if let Some(replica) = older.map(|unit| unit.replica) {
            self.replace_replica(replica, Reason::Operator);
            let by = self.operators.restarts.first().and_then(|restart| restart.by.as_deref());
            self.replacements.note_operator(replica, by);
        }
    }

    /// Answers operators whose restart is done. Returns true if there was one.
    pub(super) fn answer_done_restarts(&mut self) -> bool {
        let serves =
            |unit: &ProcessUnit| unit.role != UnitRole::Current || unit.phase() == BackendPhase::Ready;
        if !self.replacements.is_empty() || !self.units.all.iter().all(serves) {
            return false;
        }
        let is_done = |after| !self.units.with_role(UnitRole::Current).any(|unit| unit.is_not_newer(after));
        let restarts = &mut self.operators.restarts;
        let count = restarts.iter().take_while(|restart| is_done(restart.after)).count();
        for restart in restarts.drain(..count).collect::<Vec<_>>() {
            let is_present = |entry: &&LedgerEntry| {
                entry.to.is_some_and(|generation| self.units.with_generation(generation).is_some())
            };
            let entries = self.replacements.last.iter().filter(is_present).cloned().collect();
            self.answer(restart.reply, Ok(entries));
        }
        count > 0
    }

    /// Answers operators whose drain is done: the processes that ran at the request are gone.
    fn settle_drains(&mut self) {
        let lives = |id: &GenerationId| self.units.with_generation(*id).is_some();
        let is_done = |drain: &mut DrainRequest| !drain.generations.iter().any(lives);
        let done: Vec<_> = self.operators.drains.extract_if(.., is_done).collect();
        for drain in done {
            self.answer(drain.reply, Ok(()));
        }
    }

    /// Continues a removal or shutdown. Requests may run until the deadline.
    fn settle_end(&mut self) {
        let (late, over) = match self.life.end {
            None => return,
            Some(TaskEnd::Removed) => (false, true),
            Some(TaskEnd::Shutdown(deadline)) => {
                let late = deadline <= Instant::now();
                if !self.leases.any_open() || late {
                    self.leases.refuse_waiting(&LeaseDenied::ShuttingDown);
                }
                (late, late || self.leases.with_state(|queue| queue.is_idle()))
            }
        };
        for id in self.units.ids() {
            if over || self.units.get(id).is_some_and(|unit| unit.phase() != BackendPhase::Ready) {
                self.step_machine(id, LifecycleEvent::Down);
            }
            if late && self.units.get(id).is_some_and(|unit| unit.phase() == BackendPhase::Draining) {
                self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Drain));
            }
        }
    }
}

impl ProcessUnit {
    fn is_not_newer(&self, after: GenerationId) -> bool {
        self.generation().is_none_or(|generation| generation <= after)
    }
}
