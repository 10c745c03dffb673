//! Replacements, from the decision to the ledger entry.
//!
//! ```text
//!   sequential:  Recycle -> old drains -> old stops -> new starts -> new opens -> its first sample -> entry
//!   overlap:     new unit starts -> new opens, old closes -> old drains and stops \
//!                                                        new's first sample       > entry
//! ```
//!
//! The available memory decides the mode. Each model has one replacement at a time, because several would
//! take several replicas out of service or need memory for several additional processes.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{LifecycleEvent, LifecycleTimer};
use warden_policies::share::ReplacementReach;
use warden_policies::{Reason, RecycleAction, RecycleDecision};

use crate::clock;
use crate::error::{BackendFailure, ControlError};
use crate::memory::loading::LoadingReport;
use crate::model::ModelTask;
use crate::model::context::ReplacementPermit;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::{ProcessRecipe, process_recipe};
use crate::model::replacement::needs::READ_AHEAD_LIMIT;
use crate::model::replacement::{ReplacementTracker, decision_for};
use crate::model::unit::{ProcessUnit, UnitId, UnitRole};
use crate::process::needs::{MissingNeed, NeedsCheck};
use crate::view::ledger::ReplacementMode;

const MAX_PERMIT_INTERVAL: Duration = Duration::from_secs(1);

impl ModelTask {
    /// Begins a replacement that the policy has decided. Without a permit it begins at once.
    pub(crate) fn replace_by_policy(
        &mut self,
        id: UnitId,
        decision: RecycleDecision,
        permit: Option<ReplacementPermit>,
    ) {
        let kills = decision.action == RecycleAction::KillNow;
        if self.room.is_asking_to_stay() && !kills {
            // Room for the new settings is not granted yet. The unit is judged again later.
            return;
        }
        let Some(unit) = self.units.get(id) else { return };
        let (mode, note) = if kills {
            let note = "sequential: memory is almost gone, so it does not drain";
            (ReplacementMode::Sequential, Some(note.to_owned()))
        } else {
            self.room.choose_mode(&self.env, unit)
        };
        let gpus = || unit.live.as_ref().map(|live| live.memory.used_gpus()).unwrap_or_default();
        let permit = permit.unwrap_or_else(|| self.env.claim_permit(unit.replica, &gpus()));
        self.replacements.pace.note_policy_start(&self.env, &decision);
        self.begin_replacement(id, &decision, mode, note, permit);
        if kills && let Some(live) = self.units.live_mut(id) {
            live.cut_drain(&self.env, &decision);
            self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Drain));
        }
    }

    /// Begins to replace the process of a replica, or starts a process if there is none. Only a replacement
    /// for a new configuration waits for a permit.
    pub(crate) fn replace_replica(&mut self, replica: u32, reason: Reason) {
        if self.units.current(replica).is_none() || !self.may_start() {
            return;
        }
        let Some(unit) = self.units.current(replica) else { return };
        let id = unit.id;
        match self.replacements.needs.may_replace(&self.env, &mut self.mail, unit, READ_AHEAD_LIMIT) {
            Some(Ok(())) => {}
            Some(Err(missing)) => {
                let decision = decision_for(reason);
                let failure = self.replacements.keep_present(&self.env, unit, &decision, &missing);
                if let Some(failure) = failure {
                    self.fail_replacement(replica, &failure);
                }
                return;
            }
            None => {
                // Settling retries operator and configuration replacements, so remember only other reasons.
                if !matches!(reason, Reason::Operator | Reason::Configuration) {
                    self.replacements.needs.pending_replacement = Some((replica, reason));
                }
                return;
            }
        }
        let gpus = unit.live.as_ref().map(|live| live.memory.used_gpus());
        let permit = if reason == Reason::Configuration {
            // Replace one process at a time, so that each decision sees the memory that the previous
            // replacement left.
            gpus.and_then(|gpus| self.env.replacement_permit(replica, &gpus, ReplacementReach::Machine))
        } else {
            Some(self.env.claim_permit(replica, &gpus.unwrap_or_default()))
        };
        let Some(permit) = permit else {
            // No message reports a free permit, so try again after a pause.
            let pause = self.env.spec.recycle.common.quiet_for.min(MAX_PERMIT_INTERVAL);
            self.life.timers.configuration = Some(clock::after_pause(Instant::now(), pause));
            return;
        };
        let (mode, note) = self.room.choose_mode(&self.env, unit);
        self.begin_replacement(id, &decision_for(reason), mode, note, permit);
    }

    fn begin_replacement(
        &mut self,
        id: UnitId,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        permit: ReplacementPermit,
    ) {
        let Some(unit) = self.units.get(id) else { return };
        let replica = unit.replica;
        self.replacements.begin(&self.env, unit, decision, mode, note, Some(permit));
        self.life.note_action();
        match mode {
            ReplacementMode::Sequential => self.step_machine(id, LifecycleEvent::Recycle),
            ReplacementMode::Overlap => {
                let successor = self.units.add(replica, UnitRole::Successor);
                self.step_machine(successor, LifecycleEvent::Up);
            }
        }
    }

    /// Handles an expired drain deadline without interrupting requests: the process serves again and is
    /// drained later.
    pub(crate) fn postpone_drain(&mut self, id: UnitId) {
        let deadline = self.env.spec.lifecycle.drain_deadline;
        let Some(unit) = self.units.get_mut(id) else { return };
        let replica = unit.replica;
        let now = Instant::now();
        if unit.role == UnitRole::Retiring {
            // Another process already serves: continue the drain, but let other replacements begin.
            unit.timer = Some((LifecycleTimer::Drain, clock::after_pause(now, deadline)));
            let from = unit.generation();
            if let Some(replacement) = from.and_then(|from| self.replacements.replacement_of_mut(from)) {
                drop(replacement.permit.take());
            }
            return;
        }
        let Some(live) = &mut unit.live else { return };
        live.wish.not_before = Some(clock::after_pause(now, deadline.saturating_mul(2)));
        live.timers.probe = Some(now);
        live.timers.sample = Some(now);
        let generation = live.id;
        let running = self.env.leases.in_flight(generation);
        self.step_machine(id, LifecycleEvent::Resume);
        let message = format!(
            "{running} request(s) were still running at the drain deadline, and the machine has memory: the process \
             continues to serve, and is drained again later"
        );
        if let Some(mut replacement) = self.replacements.take(replica) {
            replacement.is_inconclusive = true;
            self.replacements.write_entry(&self.env, replacement, Some(message));
        }
        self.life.note_action();
    }

    /// Ends a replacement whose new process does not serve. The ledger and operators get the reason.
    pub(crate) fn fail_replacement(&mut self, replica: u32, failure: &BackendFailure) {
        let Some(replacement) = self.replacements.take(replica) else { return };
        if replacement.reason() == Reason::Configuration {
            self.room.report(LoadingReport::ReplacementDropped);
            self.life.timers.configuration =
                Some(clock::after_pause(Instant::now(), self.env.spec.recycle.common.min_interval));
        }
        self.replacements.write_entry(&self.env, replacement, Some(failure.message.clone()));
        for restart in std::mem::take(&mut self.operators.restarts) {
            let model = self.env.spec.name.clone();
            let failure = failure.clone();
            self.operators.answer(restart.reply, Err(ControlError::StartFailed { model, failure }));
        }
        self.life.note_action();
    }

    /// Ends all replacements because of another command. The ledger and waiting operators get the reason.
    pub(crate) fn give_up_replacements(&mut self, because: &str) {
        while let Some(replacement) = self.replacements.take_any() {
            self.replacements.give_up(&self.env, replacement, because);
        }
        self.operators.answer_done_restarts(&self.units, &self.replacements);
        for restart in std::mem::take(&mut self.operators.restarts) {
            let model = self.env.spec.name.clone();
            let because = because.to_owned();
            self.operators.answer(restart.reply, Err(ControlError::GivenUp { model, because }));
        }
        self.life.note_action();
    }

    pub(crate) fn note_needs(&mut self, made_of: ProcessRecipe, sight: NeedsCheck) {
        self.replacements.needs.is_checking = false;
        let other = |before: &NeedsCheck| before.stamps != sight.stamps;
        if self.replacements.needs.unblock(&sight) {
            self.life.timers.configuration = None;
            self.replacements.note = None;
            self.life.note_action();
        }
        if made_of == process_recipe(&self.env.spec) {
            let failed = self.units.all.iter_mut().filter(|unit| unit.waits_for_change());
            let renewed = failed.filter(|unit| unit.sight.as_ref().is_some_and(other));
            let renew = |unit: &mut ProcessUnit| {
                unit.sight = Some(sight.clone());
                (unit.id, LifecycleEvent::Changed)
            };
            let changes = renewed.map(renew).collect();
            self.revive_all(changes);
        }
        if std::mem::take(&mut self.replacements.needs.is_wanted) {
            self.replacements.needs.for_replacement = Some((Instant::now(), made_of, sight));
        }
        if let Some((replica, reason)) = self.replacements.needs.pending_replacement.take()
            && self.replacements.is_empty()
            && self.life.end.is_none()
        {
            self.replace_replica(replica, reason);
        }
        // Apply the policy again to units with a pending decision: one of them may have requested this check.
        for id in self.units.ids() {
            let last = self.units.live(id).and_then(|live| live.wish.last_decision);
            if last.is_some_and(|(decision, _)| decision.action != RecycleAction::Observe) {
                self.judge_unit(id);
            }
        }
        self.life.steps += 1;
    }
}

impl ReplacementTracker {
    /// Keeps the present process because the next one could not start. An operator or a reload gets the
    /// reason each time; the ledger gets it only if it changes.
    pub(crate) fn keep_present(
        &mut self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
        decision: &RecycleDecision,
        missing: &MissingNeed,
    ) -> Option<BackendFailure> {
        let asked = matches!(decision.reason, Some(Reason::Operator | Reason::Configuration));
        if self.needs.note_blocking() && !asked {
            return None;
        }
        let message = format!("{}; the running process was kept", missing.message);
        let note = Some(message.clone());
        self.track(env, unit, decision, ReplacementMode::Sequential, note, None);
        Some(BackendFailure { kind: missing.kind, message, lines: Vec::new(), failures: 0 })
    }
}
