//! Derives actions from the present state, whatever events led to it.

use std::sync::atomic::Ordering;

use tokio::time::Instant;
use warden_policies::Reason;
use warden_policies::lifecycle::{AfterStop, BackendPhase, LifecycleEvent, LifecycleTimer};

use super::replacement::{Replacement, decision_for};
use super::unit::{ProcessUnit, UnitRole, process_recipe};
use super::{ModelTask, TaskEnd};
use crate::clock;
use crate::error::LeaseDenied;
use crate::lease::queue::ask::NextProcess;
use crate::view::ledger::ReplacementMode;

impl ModelTask {
    pub(super) fn settle_once(&mut self) {
        for id in self.units.take_doubted(&self.env.leases) {
            self.step_machine(id, LifecycleEvent::ProbesLost);
        }
        self.finish_drains();
        self.switch_over();
        let is_paused = self.life.end.is_none() && self.units.any_ending() && !self.env.leases.any_open();
        self.env.leases.with_state(|queue| queue.limits.set_paused(is_paused));
        self.replace_unresponsive();
        if self.units.all.extract_if(.., |unit| unit.is_over()).count() > 0 {
            self.life.note_action();
        }
        let quiet_for = self.env.spec.recycle.common.quiet_for;
        for unit in &mut self.units.all {
            unit.watch_idle(&self.env.leases, self.env.watch.sensors.idle_settle, quiet_for);
        }
        for id in self.units.wishing_recycle(&self.env.leases) {
            self.judge_unit(id);
        }
        self.fail_replacements();
        while let Some(replacement) = self.replacements.take_first(Replacement::is_complete) {
            let entry = self.replacements.write_entry(&self.env, replacement, None);
            self.replacements.note_completed(entry);
            // During the replacement, the loader got no memory reports.
            self.room.report_memory(&self.env, &self.units, &self.replacements);
            self.life.note_action();
        }
        self.settle_restarts();
        self.operators.answer_done_drains(&self.units);
        if let Some(failure) = self.units.short_start() {
            self.fall_back(&failure.message);
        }
        self.settle_start_search();
        self.settle_loading();
        if self.life.end.is_some() {
            self.settle_end();
            return;
        }
        // Replace outdated processes one after another, with a pause after a failed replacement.
        if self.replacements.is_empty()
            && self.life.timers.configuration.is_none_or(|at| at <= Instant::now())
            && let Some(replica) = self.units.outdated_replica(&process_recipe(&self.env.spec))
        {
            self.replace_replica(replica, Reason::Configuration);
        }
        self.unload_if_idle();
        self.start_needed();
        let waits = self.units.with_role(UnitRole::Current).any(ProcessUnit::waits_for_change);
        if !waits && self.replacements.needs.blocking.is_none() {
            self.life.timers.look = None;
        } else if self.life.timers.look.is_none() && !self.replacements.needs.is_checking {
            let pause = self.env.spec.lifecycle.look_interval;
            self.life.timers.look = Some(clock::after_pause(Instant::now(), pause));
        }
        self.env.leases.set_refusal(self.units.refusal(self.env.spec.lifecycle.failures_told));
        if let Some(denied) = self.env.leases.with_state(|queue| queue.predecessor_refusal()) {
            self.env.context.refuse_in_predecessor(&self.env.spec.name, &denied);
        }
        let next = NextProcess {
            since: self.units.starting_since(),
            took: self.replacements.load_time,
            fastest: self.experience.fastest_start(&self.env.spec.command),
            waits_for_room: self.room.is_waiting(),
        };
        self.env.leases.with_state(|queue| queue.coming.next = next);
    }

    fn finish_drains(&mut self) {
        for id in self.units.ids() {
            let Some(unit) = self.units.get(id) else { continue };
            let is_unused = unit
                .generation()
                .is_none_or(|generation| self.env.leases.with_state(|queue| queue.is_unused(generation)));
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

    /// Begins a replacement of an unresponsive process that the life-cycle machine gave up.
    fn replace_unresponsive(&mut self) {
        let is_given_up = |unit: &&ProcessUnit| {
            unit.machine.after_stop() == Some(AfterStop::Restart)
                && unit.live.as_ref().is_some_and(|live| live.start.ready.is_some())
        };
        let given_up = self.units.with_role(UnitRole::Current).filter(is_given_up);
        for unit in given_up {
            if self.life.end.is_none() && self.replacements.reason(unit.replica).is_none() {
                let note = "sequential: the process does not answer".to_owned();
                let live = unit.live.as_ref();
                let crashed = live.and_then(|live| live.probing.crashed_at);
                let reason = if crashed.is_some() { Reason::Crashed } else { Reason::Unresponsive };
                let gpus = live.map(|live| live.memory.used_gpus()).unwrap_or_default();
                let permit = Some(self.env.claim_permit(unit.replica, &gpus));
                let mode = ReplacementMode::Sequential;
                let decision = decision_for(reason);
                self.replacements.begin(&self.env, unit, &decision, mode, Some(note), permit);
                self.life.note_action();
            }
        }
    }

    fn fail_replacements(&mut self) {
        let many = self.env.spec.lifecycle.failures_told;
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

    fn start_needed(&mut self) {
        if self.env.leases.needs_process() {
            self.room.wanted = true;
        }
        let leaving = self.env.context.leaving.load(Ordering::SeqCst) > 0;
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

    /// Continues requested restarts: each replica needs a newer process.
    fn settle_restarts(&mut self) {
        let Some(oldest) = self.operators.restarts.first().map(|restart| restart.after) else { return };
        if self.operators.answer_done_restarts(&self.units, &self.replacements)
            || !self.replacements.is_empty()
        {
            return;
        }
        let older = self.units.with_role(UnitRole::Current).find(|unit| unit.is_not_newer(oldest));
        if let Some(replica) = older.map(|unit| unit.replica) {
            self.replace_replica(replica, Reason::Operator);
            let by = self.operators.restarts.first().and_then(|restart| restart.by.as_deref());
            self.replacements.note_operator(replica, by);
        }
    }

    /// Continues a removal or shutdown. Requests may run until the deadline.
    fn settle_end(&mut self) {
        let (late, over) = match self.life.end {
            None => return,
            Some(TaskEnd::Removed) => (false, true),
            Some(TaskEnd::Shutdown(deadline)) => {
                let late = deadline <= Instant::now();
                if !self.env.leases.any_open() || late {
                    self.env.leases.refuse_waiting(&LeaseDenied::ShuttingDown);
                }
                (late, late || self.env.leases.with_state(|queue| queue.is_idle()))
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
