//! What processes held that have ended, until free memory shows it.
//!
//! A driver may give memory back a moment after the process that held it is gone. Who looks for room in that moment sees a machine on which it
//! is nobody's and yet not free, and would drive out another model for what comes back by itself.

use std::time::Duration;

use super::room::Amounts;

/// What has not come back yet.
#[derive(Debug, Default)]
pub(super) struct Returning {
    /// What those held that are gone, each waited for until then; `None`: nobody has looked since.
    gone: Vec<(Amounts, Option<Duration>)>,
    /// What was free before the first of them was gone. What is free more than that has come back.
    before: Amounts,
    /// The last look, and what was free then.
    seen: Option<(Duration, Amounts)>,
}

/// What of a process's memory is missing still is this part of it at least: other programs move, too.
const MISSING: u64 = 16;

impl Returning {
    /// What was free at the last look.
    pub(super) fn free(&self) -> Option<&Amounts> {
        self.seen.as_ref().map(|(_, free)| free)
    }

    /// Whether anything is waited for.
    pub(super) fn is_awaited(&self) -> bool {
        !self.gone.is_empty()
    }

    /// One that held this is gone.
    pub(super) fn add(&mut self, held: Amounts) {
        let Some((_, free)) = &self.seen else { return };
        if self.gone.is_empty() {
            self.before = free.clone();
        }
        self.gone.push((held, None));
    }

    /// Looks at what has come back. What has not, and is waited for.
    pub(super) fn look(
        &mut self,
        now: Duration,
        free: Option<&Amounts>,
        within: Duration,
    ) -> Option<Amounts> {
        // Of long ago: who is gone may have taken its memory since then, or given it back.
        let is_old = |seen: &(Duration, Amounts)| now.saturating_sub(seen.0) > within;
        let is_stale = self.seen.as_ref().is_none_or(is_old);
        self.seen = free.map(|free| (now, free.clone()));
        for (_, until) in &mut self.gone {
            until.get_or_insert_with(|| if is_stale { now } else { now.saturating_add(within) });
        }
        self.gone.retain(|(_, until)| until.is_some_and(|until| now < until));
        let all = self.gone.iter().fold(Amounts::none(), |sum, (held, _)| sum.plus(held));
        let left = all.minus(&free?.minus(&self.before));
        if left.is_within(&all.part(MISSING)) {
            self.gone.clear();
        }
        (!self.gone.is_empty()).then_some(left)
    }
}
