//! Derives actions from the present state, whatever events led to it.

use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::Reason;
use warden_policies::lifecycle::{AfterStop, BackendPhase, LifecycleEvent, LifecycleTimer};

use super::ModelTask;
use super::environment::TaskEnvironment;
use super::generation::process_recipe;
use super::life::{TaskEnd, TaskLife};
use super::loading::room::LoadState;
use super::replacement::{Replacement, ReplacementTracker, decision_for};
use super::unit::{ProcessUnit, UnitList, UnitRole};
use crate::clock;
use crate::error::LeaseDenied;
use crate::lease::queue::LeaseQueue;
use crate::lease::queue::ask::NextProcess;
use crate::view::ledger::ReplacementMode;

impl ModelTask {
    pub(super) fn settle_once(&mut self) {
        self.settle_processes();
        self.settle_restarts();
        self.operators.answer_done_drains(&self.units);
        if let Some(failure) = self.units.short_start() {
            self.fall_back(&failure.message);
        }
        let is_free = self.replacements.is_empty();
        let dead = &mut self.experience.dead_starts;
        let fallback =
            dead.settle(&self.env, &mut self.mail, &self.room, &self.units, &mut self.life, is_free);
        if let Some(because) = fallback {
            self.fall_back(&because);
        }
        if self.room.state == LoadState::Unloaded && self.units.holds_starts() && self.life.end.is_none() {
            // The room was given back while a start waits: request room again.
            self.may_start();
        } else {
            let any = self.units.any_process() || self.experience.dead_starts.is_searching();
            let replacements = &mut self.replacements;
            self.room.settle(&mut self.env, &self.units, replacements, &mut self.life, any);
        }
        if let Some((late, over)) = self.life.settle_end(&self.env.leases) {
            let ends = self.units.ends(LifecycleEvent::Down, |phase| over || phase != BackendPhase::Ready);
            self.step_all(ends);
            let timer = LifecycleEvent::Timer(LifecycleTimer::Drain);
            let ends = self.units.ends(timer, |phase| late && phase == BackendPhase::Draining);
            self.step_all(ends);
            return;
        }
        // Replace outdated processes one after another, with a pause after a failed replacement.
        if self.replacements.is_empty()
            && self.life.timers.configuration.is_none_or(|at| at <= Instant::now())
            && let Some(replica) = self.units.outdated_replica(&process_recipe(&self.env.spec))
        {
            self.replace_replica(replica, Reason::Configuration);
        }
        let is_replacing = !self.replacements.is_empty() || !self.operators.restarts.is_empty();
        if self.room.is_ttl_over(&self.env, &self.units, &mut self.life, is_replacing) {
            self.room.wanted = false;
            self.stop_all("the model had no requests");
        }
        if self.room.needs_start(&self.env, &self.units, &mut self.life) && self.may_start() {
            let idle = self.units.all.iter().filter(|unit| unit.is_idle());
            let starts = idle.map(|unit| (unit.id, LifecycleEvent::Up)).collect();
            self.step_all(starts);
        }
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
            took: self.replacements.pace.load_time,
            fastest: self.experience.fastest_start(&self.env.spec.command),
            waits_for_room: self.room.is_waiting(),
        };
        self.env.leases.with_state(|queue| queue.coming.next = next);
    }

    /// Continues drains and replacements.
    fn settle_processes(&mut self) {
        let doubted = self.units.take_doubted(&self.env.leases);
        self.step_all(doubted.into_iter().map(|id| (id, LifecycleEvent::ProbesLost)).collect());
        let is_over = self.life.end.is_some();
        for id in self.units.ids() {
            let Some(unit) = self.units.get_mut(id) else { continue };
            let replacements = &mut self.replacements;
            if unit.is_drained(&self.env.leases)
                && self.experience.is_packed(&self.env, &mut self.mail, replacements, unit, self.life.end)
            {
                self.step_machine(id, LifecycleEvent::Drained);
            }
        }
        let superseded = self.units.superseded();
        self.step_all(superseded);
        if self.units.switch_over() {
            self.life.note_action();
        }
        let is_paused = !is_over && self.units.any_ending() && !self.env.leases.any_open();
        self.env.leases.with_state(|queue| queue.limits.set_paused(is_paused));
        if !is_over {
            self.replacements.replace_unresponsive(&self.env, &self.units, &mut self.life);
        }
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
        let count = self.units.all.len();
        for (replica, failure) in self.units.take_failed(self.env.spec.lifecycle.failures_told) {
            self.fail_replacement(replica, &failure);
        }
        if self.units.all.len() != count {
            self.life.note_action();
        }
        while let Some(replacement) = self.replacements.take_first(Replacement::is_complete) {
            let entry = self.replacements.write_entry(&self.env, replacement, None);
            self.replacements.note_completed(entry);
            // During the replacement, the loader got no memory reports.
            self.room.report_memory(&self.env, &self.units, &self.replacements);
            self.life.note_action();
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
}

impl ReplacementTracker {
    /// Begins a replacement of an unresponsive process that the life-cycle machine stops.
    fn replace_unresponsive(&mut self, env: &TaskEnvironment, units: &UnitList, life: &mut TaskLife) {
        let is_given_up = |unit: &&ProcessUnit| {
            unit.machine.after_stop() == Some(AfterStop::Restart)
                && unit.live.as_ref().is_some_and(|live| live.start.ready.is_some())
        };
        for unit in units.with_role(UnitRole::Current).filter(is_given_up) {
            if self.reason(unit.replica).is_none() {
                let note = "sequential: the process does not answer".to_owned();
                let generation = unit.live.as_ref();
                let crashed = generation.and_then(|generation| generation.probing.crashed_at);
                let reason = if crashed.is_some() { Reason::Crashed } else { Reason::Unresponsive };
                let gpus = generation.map(|generation| generation.memory.used_gpus()).unwrap_or_default();
                let permit = Some(env.claim_permit(unit.replica, &gpus));
                let mode = ReplacementMode::Sequential;
                self.begin(env, unit, &decision_for(reason), mode, Some(note), permit);
                life.note_action();
            }
        }
    }
}

impl TaskLife {
    /// Returns two answers during a removal or shutdown, else `None`: whether the shutdown's deadline has
    /// passed, and whether serving processes have to end now. A shutdown waits for leases until its deadline.
    fn settle_end(&self, leases: &Arc<LeaseQueue>) -> Option<(bool, bool)> {
        Some(match self.end? {
            TaskEnd::Removed => (false, true),
            TaskEnd::Shutdown(deadline) => {
                let late = deadline <= Instant::now();
                if !leases.any_open() || late {
                    leases.refuse_waiting(&LeaseDenied::ShuttingDown);
                }
                (late, late || leases.with_state(|queue| queue.is_idle()))
            }
        })
    }
}
