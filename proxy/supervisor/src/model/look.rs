//! Checks that the files needed by the next process exist. The check is made before a healthy process is
//! replaced, and repeatedly while a failed start waits for a change.
//!
//! A helper makes the check, because a file system may hang. A replacement uses a fresh result if there is
//! one; otherwise it requests a check and is tried again after it.

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

/// Maximum age of a check that a replacement uses.
const CHECK_MAX_AGE: Duration = Duration::from_secs(2);

/// Time limit for reading the next process's model files into the page cache, while the old process serves.
pub(super) const READ_AHEAD_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for reading model files ahead of an urgent replacement.
pub(super) const URGENT_READ_AHEAD_LIMIT: Duration = Duration::from_secs(3);

/// Last results of these checks, and a replacement that waits for one.
#[derive(Debug, Default)]
pub(super) struct NeedsState {
    pub(super) is_checking: bool,
    /// A replacement waits for the next result.
    pub(super) is_wanted: bool,
    /// Result for the waiting replacement: time, recipe of the next process, and findings.
    pub(super) for_replacement: Option<(Instant, ProcessRecipe, NeedsCheck)>,
    /// Last result with something missing.
    pub(super) last_missing: Option<NeedsCheck>,
    /// Result because of which a replacement did not begin.
    pub(super) blocking: Option<NeedsCheck>,
    /// Replica and reason of a replacement that begins when the check is done.
    pub(super) pending_replacement: Option<(u32, Reason)>,
}

impl ModelTask {
    /// Decides whether the process of a unit may be replaced. `Err`: the process is healthy, and the next
    /// one could not start. `None`: a check is under way, which first reads model files ahead for at most
    /// `patience`. A process that is not healthy may always be replaced.
    pub(super) fn may_replace(&mut self, id: UnitId, patience: Duration) -> Option<Result<(), MissingNeed>> {
        let unit = self.units.get(id)?;
        if unit.phase() != BackendPhase::Ready {
            return Some(Ok(()));
        }
        let made_of = process_recipe(&self.spec);
        // Take the result: it serves one replacement only, because files may have changed before the next
        // one.
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
        // Compare with the running process's libraries only if the next process has the same recipe.
        let live = self.units.live(id).filter(|live| live.recipe == made_of);
        let running = live.and_then(|live| live.child.pid());
        self.replacements.needs.is_wanted = true;
        self.check_needs(made_of, running, Some(patience));
        None
    }

    /// Starts a check in a helper. `ahead`: time for which the model's files may be read ahead first.
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
        // Apply the policy again to units with a pending decision: one of them may have requested the check.
        for id in self.units.ids() {
            let last = self.units.live(id).and_then(|live| live.wish.last_decision);
            if last.is_some_and(|(decision, _)| decision.action != RecycleAction::Observe) {
                self.judge_unit(id);
            }
        }
        self.life.steps += 1;
    }

    /// Schedules checks while something waits for a change.
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
    /// reason each time. After a decision of the policy, the ledger gets the reason once, and again only if
    /// it changes.
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

    /// True if the check of the needed files allows a replacement to begin.
    pub(super) fn may_begin_replacement(&mut self, id: UnitId, replica: u32, reason: Reason) -> bool {
        match self.may_replace(id, READ_AHEAD_LIMIT) {
            Some(Ok(())) => true,
            Some(Err(missing)) => {
                self.keep_present_process(replica, &decision_for(reason), &missing);
                false
            }
            None => {
                // Remember only other reasons: each settling tries again for an operator and for a new
                // configuration.
                if !matches!(reason, Reason::Operator | Reason::Configuration) {
                    self.replacements.needs.pending_replacement = Some((replica, reason));
                }
                false
            }
        }
    }
}
