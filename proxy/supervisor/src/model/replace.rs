//! Replacements, from the decision to the ledger entry.
//!
//! ```text
//!   sequential:  Recycle -> old drains -> old stops -> new starts -> new opens -> its first sample -> entry
//!   overlap:     new unit starts -> new opens, old closes -> old drains and stops \
//!                                                        new's first sample       > entry
//! ```
//!
//! Each model has one replacement at a time: several at once would take several replicas out of service, or
//! need memory for several additional processes.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{AfterStop, LifecycleEvent, LifecycleTimer};
use warden_policies::{MemoryKind, Reason, RecycleAction, RecycleDecision};

use super::ModelTask;
use super::context::ReplacementPermit;
use super::replacement::{ExceededBudget, Replacement};
use super::unit::{ProcessUnit, UnitId, UnitRole};
use crate::clock;
use crate::error::{BackendFailure, ControlError};
use crate::memory::loading::LoadingReport;
use crate::view::event::EventKind;
use crate::view::ledger::{LedgerEntry, ReplacementMode};

/// Maximum interval between two requests for a permit.
const MAX_PERMIT_INTERVAL: Duration = Duration::from_secs(1);

/// Decision for a replacement that the policy did not decide.
pub(super) fn decision_for(reason: Reason) -> RecycleDecision {
    RecycleDecision {
        action: RecycleAction::DrainNow,
        reason: Some(reason),
        due: true,
        ..RecycleDecision::OBSERVE
    }
}

impl ModelTask {
    /// Begins a replacement that the policy decided and nothing holds back.
    pub(super) fn replace_by_policy(
        &mut self,
        replica: u32,
        decision: RecycleDecision,
        permit: Option<ReplacementPermit>,
    ) {
        if self.is_asking_to_stay() {
            // Room for the new settings is not granted yet, so a new process may not start. The unit is
            // judged again later.
            return;
        }
        let Some(unit) = self.current_unit(replica) else { return };
        let id = unit.id;
        let (mode, note) = self.choose_mode(unit);
        self.note_policy_replacement(&decision);
        self.record_replacement(replica, &decision, mode, note, permit);
        self.execute_replacement(id, replica, mode);
    }

    /// Records a replacement that the policy decided. The caller ends the process without a drain.
    pub(super) fn begin_by_policy(
        &mut self,
        replica: u32,
        decision: &RecycleDecision,
        permit: Option<ReplacementPermit>,
        note: &str,
    ) {
        self.note_policy_replacement(decision);
        self.record_replacement(
            replica,
            decision,
            ReplacementMode::Sequential,
            Some(note.to_owned()),
            permit,
        );
    }

    fn note_policy_replacement(&mut self, decision: &RecycleDecision) {
        let Some(reason) = decision.reason else { return };
        let off = self.cooldown.record_start(self.context.now(), reason, &self.spec.recycle);
        if let Some(held) = off {
            self.log_event(None, EventKind::PolicyOff { message: held.to_string() });
        }
    }

    /// Begins to replace the process of a replica, or starts a process if there is none. A replacement for
    /// an operator begins at once; a replacement for a new configuration waits for a permit.
    pub(super) fn replace_replica(&mut self, replica: u32, reason: Reason) {
        let Some(id) = self.current_unit(replica).map(|unit| unit.id) else { return };
        if !self.may_start() {
            return;
        }
        if !self.may_begin_replacement(id, replica, reason) {
            return;
        }
        let permit = if reason == Reason::Configuration {
            let Some(permit) = self.exclusive_permit(id, replica) else {
                // No message says that a permit is free again, so ask again after a pause.
                self.timers.configuration = Some(clock::after_pause(
                    Instant::now(),
                    self.spec.recycle.common.quiet_for.min(MAX_PERMIT_INTERVAL),
                ));
                return;
            };
            permit
        } else {
            self.claim_permit(id, replica)
        };
        let Some(unit) = self.current_unit(replica) else { return };
        let (mode, note) = self.choose_mode(unit);
        self.record_replacement(replica, &decision_for(reason), mode, note, Some(permit));
        self.execute_replacement(id, replica, mode);
    }

    fn execute_replacement(&mut self, id: UnitId, replica: u32, mode: ReplacementMode) {
        match mode {
            ReplacementMode::Sequential => self.step_machine(id, LifecycleEvent::Recycle),
            ReplacementMode::Overlap => {
                let successor = self.add_unit(replica, UnitRole::Successor);
                self.step_machine(successor, LifecycleEvent::Up);
            }
        }
    }

    /// Tracks and logs a replacement. The caller carries it out.
    pub(super) fn record_replacement(
        &mut self,
        replica: u32,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        permit: Option<ReplacementPermit>,
    ) {
        let from = self.current_unit(replica).and_then(ProcessUnit::generation);
        self.track_replacement(replica, decision, mode, note.clone(), permit);
        if let Some(reason) = decision.reason {
            self.log_event(from, EventKind::RecycleBegan { reason, mode, note });
        }
        self.note_action();
    }

    /// Tracks a replacement without logging it yet.
    pub(super) fn track_replacement(
        &mut self,
        replica: u32,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        permit: Option<ReplacementPermit>,
    ) {
        let (Some(unit), Some(reason)) = (self.current_unit(replica), decision.reason) else { return };
        let running = unit.generation().map_or(0, |generation| self.leases.in_flight(generation));
        let (why, how) = ((reason, decision), (mode, note.clone()));
        let mut replacement = Replacement::new(&self.spec.name, unit, why, how, running, permit);
        let passed = unit.live.as_ref().and_then(|live| live.wish.passed.find(reason, decision.series));
        let load_time = self.experience.load_time;
        replacement.budget = passed.map(|first| ExceededBudget {
            first: *first,
            repeats: self.cooldown.is_repeated(first, load_time, &self.spec.recycle),
        });
        self.replacements.add(replacement);
        self.note = note;
    }

    /// True if the running requests of a draining generation may outlast the drain deadline: the
    /// replacement is because of size, age or speed, and the machine has enough memory.
    pub(super) fn may_outlast_drain(&self, id: UnitId) -> bool {
        let Some(unit) = self.unit(id) else { return false };
        let Some(live) = unit.live.as_ref() else { return false };
        let Some(reason) = self.replacements.replacement_of(live.id).map(Replacement::reason) else {
            return false;
        };
        let ill = matches!(
            reason,
            Reason::MemoryExhausted | Reason::Wedged | Reason::ComputeErrors | Reason::DeviceFault
        );
        let facts = live.memory.facts.as_ref();
        let short =
            facts.is_none_or(|facts| facts.series.iter().any(|series| self.spec.recycle.is_short(series)));
        self.end.is_none()
            && self.operators.restarts.is_empty()
            && unit.machine.after_stop() == Some(AfterStop::Restart)
            && reason.is_policy()
            && !ill
            && !short
            && !live.short_grace
            && live.crashed_at.is_none()
            && live.silent_for(self.spec.lifecycle.probes_lost).is_none()
    }

    /// Handles an expired drain deadline when the running requests must not be cut: the process serves
    /// again, and is drained later.
    pub(super) fn postpone_drain(&mut self, id: UnitId) {
        let deadline = self.spec.lifecycle.drain_deadline;
        let Some(unit) = self.unit_mut(id) else { return };
        let (replica, role) = (unit.replica, unit.role);
        let now = Instant::now();
        if role == UnitRole::Retiring {
            // Another process already serves, so this one keeps draining, but no longer delays other
            // replacements.
            unit.timer = Some((LifecycleTimer::Drain, clock::after_pause(now, deadline)));
            if let Some(replacement) =
                unit.generation().and_then(|from| self.replacements.replacement_of_mut(from))
            {
                drop(replacement.permit.take());
            }
            return;
        }
        let Some(live) = &mut unit.live else { return };
        live.wish.not_before = Some(clock::after_pause(now, deadline.saturating_mul(2)));
        live.timers.probe = Some(now);
        live.timers.sample = Some(now);
        let generation = live.id;
        let running = self.leases.in_flight(generation);
        self.step_machine(id, LifecycleEvent::Resume);
        let message = format!(
            "{running} request(s) were still running at the drain deadline, and the machine has memory: the process continues to serve, \
             and is drained again later"
        );
        if let Some(mut replacement) = self.replacements.take(replica) {
            replacement.is_inconclusive = true;
            self.write_entry(replacement, Some(message));
        }
        self.note_action();
    }

    /// Writes the ledger entries of complete replacements.
    pub(super) fn complete_replacements(&mut self) {
        while let Some(replacement) = self.replacements.take_complete() {
            let entry = self.write_entry(replacement, None);
            self.replacements.note_completed(entry);
            // Report memory to the loader now, because it was not reported during the replacement.
            self.report_memory();
            self.note_action();
        }
    }

    /// Ends a replacement whose new process does not serve. The ledger entry and waiting operators get the
    /// reason.
    pub(super) fn fail_replacement(&mut self, replica: u32, failure: &BackendFailure) {
        let Some(replacement) = self.replacements.take(replica) else { return };
        if replacement.reason() == Reason::Configuration {
            self.report_loading(LoadingReport::ReplacementDropped);
            self.timers.configuration =
                Some(clock::after_pause(Instant::now(), self.spec.recycle.common.min_interval));
        }
        self.write_entry(replacement, Some(failure.message.clone()));
        for restart in std::mem::take(&mut self.operators.restarts) {
            let (model, failure) = (self.spec.name.clone(), failure.clone());
            self.answer(restart.reply, Err(ControlError::StartFailed { model, failure }));
        }
        self.note_action();
    }

    /// Ends all replacements because of another command. The ledger entries and operators who wait for a
    /// restart get the reason.
    pub(super) fn give_up_replacements(&mut self, because: &str) {
        while let Some(replacement) = self.replacements.take_any() {
            self.give_up_replacement(replacement, because);
        }
        self.answer_done_restarts();
        for restart in std::mem::take(&mut self.operators.restarts) {
            let (model, because) = (self.spec.name.clone(), because.to_owned());
            self.answer(restart.reply, Err(ControlError::GivenUp { model, because }));
        }
        self.note_action();
    }

    /// Ends the tracking of a replacement. If the new process already serves, the replacement counts as
    /// done, although measurements may be missing.
    pub(super) fn give_up_replacement(&mut self, mut replacement: Replacement, because: &str) {
        if replacement.has_taken_over() {
            let entry = self.write_entry(replacement, None);
            self.replacements.note_completed(entry);
        } else {
            replacement.give_up();
            self.write_entry(replacement, Some(because.to_owned()));
        }
    }

    fn write_entry(&mut self, mut replacement: Replacement, failed: Option<String>) -> LedgerEntry {
        // Hold the permit until the events below are logged; then other replacements may begin.
        let _held = replacement.permit.take();
        let entry = LedgerEntry {
            id: self.context.ledger.next_number(),
            at: clock::wall_time(),
            ..replacement.finish(failed)
        };
        self.context.ledger.append(&entry);
        self.log_event(entry.to.or(entry.from), EventKind::RecycleDone { entry: Box::new(entry.clone()) });
        let series = entry.evidence.series.unwrap_or(MemoryKind::Host);
        let known = self.cooldown.find_bar(entry.reason, Some(series), None, &self.spec.recycle).is_some();
        if let Some(helped) = entry.helped
            && let Some(held) = self.cooldown.record_result(series, helped, &self.spec.recycle)
            && !known
        {
            self.log_event(None, EventKind::PolicyOff { message: held.to_string() });
        }
        entry
    }
}
