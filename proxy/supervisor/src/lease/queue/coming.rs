//! When a model that serves nobody will serve: to tell callers while they wait, and to refuse those who would wait too long.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Leases, State};
use crate::clock;
use crate::error::Denied;
use crate::sync::lock;

/// What is known of the next process of a model of which none serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coming {
    /// Since when it starts; `None`: it does not yet.
    pub since: Option<Instant>,
    /// How long the last one took until it served; `None` if there was none since we run.
    pub took: Option<Duration>,
    /// How long the fastest one took that was started likewise.
    pub fastest: Option<Duration>,
    /// Its model waits until there is room in memory.
    pub waits_for_room: bool,
}

impl Coming {
    /// How long it will take from now on, if it is as fast as the last one.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        self.took.map(|took| self.rest(took, now))
    }

    /// The same, if it is as fast as the fastest.
    fn at_least(&self, now: Instant) -> Duration {
        self.fastest.map_or(Duration::ZERO, |took| self.rest(took, now))
    }

    fn rest(&self, took: Duration, now: Instant) -> Duration {
        took.saturating_sub(self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)))
    }
}

impl State {
    /// Whether a caller that comes now would wait in vain: not even the fastest start would end in time. It is expected back
    /// when the model serves, and the model is loaded for it as if it waited.
    pub(super) fn too_slow(&mut self, now: Instant) -> Option<Denied> {
        let least = self.coming.at_least(now);
        if least <= self.wait {
            return None;
        }
        let left = self.coming.left(now).unwrap_or(least).max(least);
        self.expects = Some(clock::after(now, left.saturating_add(self.wait)));
        Some(Denied::TooSlow { left, wait: self.wait })
    }

    /// Whether a caller was refused with a time to come back at, and has not come yet.
    pub(super) fn expects(&self) -> bool {
        self.expects.is_some_and(|until| until > Instant::now())
    }
}

impl Leases {
    /// What is known of the next process, now.
    pub(crate) fn set_coming(&self, coming: Coming) {
        lock(&self.state).coming = coming;
    }

    /// Nobody is expected any more: an operator has drained the model.
    pub(crate) fn expect_nobody(&self) {
        lock(&self.state).expects = None;
    }

    /// Whether a caller that comes now is turned away at once.
    pub(crate) fn refuses(&self) -> bool {
        let state = lock(&self.state);
        let is_shut = state.refusal.is_some() || state.coming.at_least(Instant::now()) > state.wait;
        !state.dispatch.any_open() && is_shut
    }

    /// The same, for callers; `None` while one serves.
    pub(crate) fn coming(self: &Arc<Self>) -> Option<Coming> {
        let state = lock(&self.state);
        (!state.dispatch.any_open()).then_some(state.coming)
    }
}
