//! Checks that the files needed by the next process exist: before a healthy process is replaced, and
//! repeatedly while a failed start waits for a changed file.
//!
//! A helper makes the check, because a file system may hang. A replacement uses a fresh result. Without one,
//! it requests a check and retries afterwards.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::{Reason, RecycleAction, RecycleDecision};

use super::replace::decision_for;
use super::unit::{ProcessRecipe, ProcessUnit, UnitId, UnitRole, process_recipe, take_due};
use super::{ModelTask, TaskMessage};
use crate::clock;
use crate::error::BackendFailure;
use crate::process::needs::{MissingNeed, NeedsCheck};
use crate::view::ledger::ReplacementMode;

const CHECK_MAX_AGE: Duration = Duration::from_secs(2);

/// Time limit for reading model files into the page cache while the old process serves.
pub(super) const READ_AHEAD_LIMIT: Duration = Duration::from_secs(30);
pub(super) const URGENT_READ_AHEAD_LIMIT: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub(super) struct NeedsState {
    pub(super) is_checking: bool,
    pub(super) is_wanted: bool,
    pub(super) for_replacement: Option<(Instant, ProcessRecipe, NeedsCheck)>,
    pub(super) last_missing: Option<NeedsCheck>,
    /// Result that prevented a replacement.
    pub(super) blocking: Option<NeedsCheck>,
    pub(super) pending_replacement: Option<(u32, Reason)>,
}

impl ModelTask {
    /// Decides whether a unit's process may be replaced; an unhealthy process always may. `Err`: the next
    /// process could not start. `None`: a check is under way, and for at most `patience` model files are
    /// read ahead.
    pub(super) fn may_replace(&mut self, id: UnitId, patience: Duration) -> Option<Result<(), MissingNeed>> {
        let unit = self.units.get(id)?;
        if unit.phase() != BackendPhase::Ready {
            return Some(Ok(()));
        }
        let made_of = process_recipe(&self.spec);
        // Use a result for one replacement only: files may have changed before the next one.
        if let Some((at, of, sight)) = self.replacements.needs.for_replacement.take()
            && at.elapsed() <= CHECK_MAX_AGE
            && of == made_of
        {
            return Some(match sight.missing.clone() {
                Some(missing) => {
                    self.replacements.needs.last_missing = Some(sight);
                    Err(missing)
                }
                None => Ok(()),
            });
        }
        // The libraries of the running process are comparable only if the next one has the same recipe.
        let live = self.units.live(id).filter(|live| live.recipe == made_of);
        let running = live.and_then(|live| live.child.pid());
        self.replacements.needs.is_wanted = true;
        self.check_needs(made_of, running, Some(patience));
        None
    }

    /// `ahead`: time for which the model's files may be read ahead first.
    fn check_needs(&mut self, made_of: ProcessRecipe, running: Option<u32>, ahead: Option<Duration>) {
        if std::mem::replace(&mut self.replacements.needs.is_checking, true) {
            return;
        }
        let world = Arc::clone(&self.context.world);
        let outbox = self.mail.outbox.clone();
        let command = self.spec.command.clone();
        self.mail.helpers.spawn(async move {
            if let Some(limit) = ahead {
                world.read_ahead(command.clone(), limit).await;
            }
            let sight = world.check_needs(command, running).await;
            outbox.send(TaskMessage::Looked(Box::new(made_of), sight));
        });
    }

    pub(super) fn note_needs(&mut self, made_of: ProcessRecipe, sight: NeedsCheck) {
        self.replacements.needs.is_checking = false;
        let other = |before: &NeedsCheck| before.stamps != sight.stamps;
        if self
            .replacements
            .needs
            .blocking
            .as_ref()
            .is_some_and(|kept| other(kept) || sight.missing.is_none())
        {
            self.replacements.needs.blocking = None;
            self.life.timers.configuration = None;
            self.replacements.note = None;
            self.life.note_action();
        }
        if made_of == process_recipe(&self.spec) {
            for id in self.units.ids() {
                let Some(unit) = self.units.get_mut(id).filter(|unit| unit.waits_for_change()) else {
                    continue;
                };
                if unit.sight.as_ref().is_some_and(other) {
                    unit.sight = Some(sight.clone());
                    self.revive(id, LifecycleEvent::Changed);
                }
            }
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

    pub(super) fn watch_needs(&mut self) {
        let waits = self.units.with_role(UnitRole::Current).any(ProcessUnit::waits_for_change);
        if !waits && self.replacements.needs.blocking.is_none() {
            self.life.timers.look = None;
        } else if self.life.timers.look.is_none() && !self.replacements.needs.is_checking {
            self.life.timers.look =
                Some(clock::after_pause(Instant::now(), self.spec.lifecycle.look_interval));
        }
    }

    pub(super) fn fire_needs_check(&mut self, now: Instant) {
        if take_due(&mut self.life.timers.look, now) {
            let made_of = process_recipe(&self.spec);
            let same = self.units.lives().find(|live| live.recipe == made_of);
            let running = same.and_then(|live| live.child.pid());
            self.check_needs(made_of, running, None);
        }
    }

    /// Keeps the present process because the next one could not start. An operator or a reload gets the
    /// reason each time; the ledger gets it only if it changes.
    pub(super) fn keep_present_process(
        &mut self,
        replica: u32,
        decision: &RecycleDecision,
        missing: &MissingNeed,
    ) {
        let asked = matches!(decision.reason, Some(Reason::Operator | Reason::Configuration));
        let sight = self.replacements.needs.last_missing.take();
        let known = self.replacements.needs.blocking.is_some() && self.replacements.needs.blocking == sight;
        self.replacements.needs.blocking = sight;
        if known && !asked {
            return;
        }
        let message = format!("{}; the running process was kept", missing.message);
        self.track_replacement(replica, decision, ReplacementMode::Sequential, Some(message.clone()), None);
        let failure = BackendFailure { kind: missing.kind, message, lines: Vec::new(), failures: 0 };
        self.fail_replacement(replica, &failure);
    }

    pub(super) fn may_begin_replacement(&mut self, id: UnitId, replica: u32, reason: Reason) -> bool {
        match self.may_replace(id, READ_AHEAD_LIMIT) {
            Some(Ok(())) => true,
            Some(Err(missing)) => {
                self.keep_present_process(replica, &decision_for(reason), &missing);
                false
            }
            None => {
                // Settling retries operator and configuration replacements, so remember only other reasons.
                if !matches!(reason, Reason::Operator | Reason::Configuration) {
                    self.replacements.needs.pending_replacement = Some((replica, reason));
                }
                false
            }
        }
    }
}
