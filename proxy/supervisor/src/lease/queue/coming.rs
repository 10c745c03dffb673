//! Expected time of a model's next process, to inform waiting requests and to refuse those that would wait
//! too long.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{LeaseQueue, QueueState};
use crate::clock;
use crate::error::LeaseDenied;
use crate::sync::lock;

/// Expectation for the next process of a model without a serving one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextProcess {
    /// Begin of the start; `None` before it.
    pub since: Option<Instant>,
    /// Duration of the last start; `None` if there was none in this run.
    pub took: Option<Duration>,
    /// Duration of the fastest start with the same command.
    pub fastest: Option<Duration>,
    /// The model waits for room in memory.
    pub waits_for_room: bool,
}

impl NextProcess {
    /// Remaining time, if the start takes as long as the last one.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        self.took.map(|took| self.rest(took, now))
    }

    /// Remaining time, if the start takes as long as the fastest one.
    fn at_least(&self, now: Instant) -> Duration {
        self.fastest.map_or(Duration::ZERO, |took| self.rest(took, now))
    }

    fn rest(&self, took: Duration, now: Instant) -> Duration {
        took.saturating_sub(self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)))
    }
}

impl QueueState {
    /// Refuses a request that would wait in vain, because not even the fastest start would end in time. The
    /// client gets a time to retry at, and the model is loaded as if the request waited.
    pub(super) fn refuse_if_slow(&mut self, now: Instant) -> Option<LeaseDenied> {
        let least = self.coming.at_least(now);
        if least <= self.wait {
            return None;
        }
        let left = self.coming.left(now).unwrap_or(least).max(least);
        self.expects = Some(clock::after(now, left.saturating_add(self.wait)));
        Some(LeaseDenied::TooSlow { left, wait: self.wait })
    }

    /// True if a refused request got a time to retry at, and has not come back.
    pub(super) fn expects(&self) -> bool {
        self.expects.is_some_and(|until| until > Instant::now())
    }
}

impl LeaseQueue {
    /// Sets the expectation.
    pub(crate) fn set_next_process(&self, coming: NextProcess) {
        lock(&self.state).coming = coming;
    }

    /// Expects no retries any more, because an operator has drained the model.
    pub(crate) fn expect_no_retries(&self) {
        lock(&self.state).expects = None;
    }

    /// True if a new request would be refused at once.
    pub(crate) fn refuses(&self) -> bool {
        let state = lock(&self.state);
        let is_shut = state.refusal.is_some() || state.coming.at_least(Instant::now()) > state.wait;
        !state.dispatch.any_open() && is_shut
    }

    /// The expectation; `None` while a process serves.
    pub(crate) fn coming(self: &Arc<Self>) -> Option<NextProcess> {
        let state = lock(&self.state);
        (!state.dispatch.any_open()).then_some(state.coming)
    }
}
