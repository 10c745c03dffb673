//! Checks that the files needed by the next process exist. A helper makes the check, because a file system
//! may hang.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::Reason;
use warden_policies::lifecycle::BackendPhase;

use crate::model::environment::TaskEnvironment;
use crate::model::generation::{ProcessRecipe, process_recipe};
use crate::model::message::{TaskMail, TaskMessage};
use crate::model::unit::ProcessUnit;
use crate::process::needs::{MissingNeed, NeedsCheck};

const CHECK_MAX_AGE: Duration = Duration::from_secs(2);

/// Time limit for reading model files into the page cache while the old process serves.
pub(crate) const READ_AHEAD_LIMIT: Duration = Duration::from_secs(30);
pub(crate) const URGENT_READ_AHEAD_LIMIT: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub(crate) struct NeedsState {
    pub(crate) is_checking: bool,
    pub(crate) is_wanted: bool,
    pub(crate) for_replacement: Option<(Instant, ProcessRecipe, NeedsCheck)>,
    pub(crate) last_missing: Option<NeedsCheck>,
    /// Result that prevented a replacement.
    pub(crate) blocking: Option<NeedsCheck>,
    pub(crate) pending_replacement: Option<(u32, Reason)>,
}

impl NeedsState {
    /// Decides whether a unit's process may be replaced; an unhealthy process always may. `Err`: the next
    /// process could not start. `None`: a check is under way, and for at most `patience` model files are
    /// read ahead.
    pub(crate) fn may_replace(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        unit: &ProcessUnit,
        patience: Duration,
    ) -> Option<Result<(), MissingNeed>> {
        if unit.phase() != BackendPhase::Ready {
            return Some(Ok(()));
        }
        let made_of = process_recipe(&env.spec);
        if let Some(fresh) = self.take_fresh(&made_of) {
            return Some(fresh);
        }
        // The libraries of the running process are comparable only if the next one has the same recipe.
        let live = unit.live.as_ref().filter(|live| live.recipe == made_of);
        let running = live.and_then(|live| live.child.pid());
        self.is_wanted = true;
        self.begin_check(env, mail, running, Some(patience));
        None
    }

    /// `ahead`: time for which the model's files may be read ahead first.
    pub(crate) fn begin_check(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        running: Option<u32>,
        ahead: Option<Duration>,
    ) {
        if std::mem::replace(&mut self.is_checking, true) {
            return;
        }
        let made_of = process_recipe(&env.spec);
        let world = Arc::clone(&env.context.world);
        let outbox = mail.outbox.clone();
        let command = env.spec.command.clone();
        mail.helpers.spawn(async move {
            if let Some(limit) = ahead {
                world.read_ahead(command.clone(), limit).await;
            }
            let sight = world.check_needs(command, running).await;
            outbox.send(TaskMessage::Looked(Box::new(made_of), sight));
        });
    }

    /// Takes a fresh result for a process with this recipe. Use a result for one replacement only: files may
    /// have changed before the next one.
    fn take_fresh(&mut self, made_of: &ProcessRecipe) -> Option<Result<(), MissingNeed>> {
        let (at, of, sight) = self.for_replacement.take()?;
        if at.elapsed() > CHECK_MAX_AGE || of != *made_of {
            return None;
        }
        let Some(missing) = sight.missing.clone() else { return Some(Ok(())) };
        self.last_missing = Some(sight);
        Some(Err(missing))
    }

    /// Records what prevents a replacement. Returns true if that was known before.
    pub(crate) fn note_blocking(&mut self) -> bool {
        let sight = self.last_missing.take();
        let known = self.blocking.is_some() && self.blocking == sight;
        self.blocking = sight;
        known
    }

    /// Forgets a result that prevented a replacement if this one differs. Returns true if so.
    pub(crate) fn unblock(&mut self, sight: &NeedsCheck) -> bool {
        let differs = |kept: &mut NeedsCheck| kept.stamps != sight.stamps || sight.missing.is_none();
        self.blocking.take_if(differs).is_some()
    }
}
