//! What processes held that have ended, until free memory shows it.
//!
//! A driver may give memory back a moment after the process that held it is gone. Who looks for room in that moment sees a machine on which it
//! is nobody's and yet not free, and would drive out another model for what comes back by itself.

use std::time::Duration;

use super::{Amounts, Loading, Numbers};

/// What has not come back yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Returning {
    /// What they held.
    held: Amounts,
    /// What was free before the first of them was gone. What is free more than that has come back.
    before: Amounts,
    /// Until when it is waited for, whoever goes meanwhile: else somebody who takes what came back would hold up everybody. `None`: nobody has
    /// looked yet.
    until: Option<Duration>,
    /// What is missing at the last look.
    left: Amounts,
}

impl Loading {
    /// One that held this is gone.
    pub(super) fn returns(&mut self, held: &Amounts) {
        let Some(seen) = &self.seen_free else { return };
        let returning =
            self.returning.get_or_insert_with(|| Returning { before: seen.clone(), ..Returning::default() });
        returning.held = returning.held.plus(held);
        returning.left = returning.held.clone();
    }

    /// Looks at what has come back.
    pub(super) fn see_returned(&mut self, now: Duration, free: Option<&Amounts>) {
        if let Some((returning, free)) = self.returning.as_mut().zip(free) {
            returning.left = returning.held.minus(&free.minus(&returning.before));
            let Numbers { returns_within, .. } = self.numbers;
            let until = *returning.until.get_or_insert_with(|| now.saturating_add(returns_within));
            if now >= until || returning.left.is_within(&Amounts::none()) {
                self.returning = None;
            }
        }
        self.seen_free = free.cloned();
    }

    /// What comes back by itself.
    pub(super) fn returning(&self) -> Option<&Amounts> {
        self.returning.as_ref().map(|returning| &returning.left)
    }
}
