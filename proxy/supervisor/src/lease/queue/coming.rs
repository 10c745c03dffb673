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
    pub fn time_left(&self, now: Instant) -> Option<Duration> {
        self.took.map(|took| self.remaining(took, now))
    }

    /// Remaining time, if the start takes as long as the fastest one.
    fn least_time_left(&self, now: Instant) -> Duration {
        self.fastest.map_or(Duration::ZERO, |took| self.remaining(took, now))
    }

    fn remaining(&self, took: Duration, now: Instant) -> Duration {
        took.saturating_sub(self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)))
    }
}

impl QueueState {
    /// Refuses a request that would wait in vain, because not even the fastest start would end in time. The
    /// client gets a time to retry at, and the model is loaded as if the request waited.
    pub(super) fn refuse_if_slow(&mut self, now: Instant) -> Option<LeaseDenied> {
        let least = self.next_process.least_time_left(now);
        if least <= self.wait {
            return None;
        }
        let left = self.next_process.time_left(now).unwrap_or(least).max(least);
        self.retry_expected = Some(clock::after(now, left.saturating_add(self.wait)));
        Some(LeaseDenied::TooSlow { left, wait: self.wait })
    }

    /// True if a refused request got a time to retry at, and has not come back.
    pub(super) fn expects(&self) -> bool {
        self.retry_expected.is_some_and(|until| until > Instant::now())
    }
}

impl LeaseQueue {
    /// Sets the expectation.
    pub(crate) fn set_next_process(&self, coming: NextProcess) {
        lock(&self.state).next_process = coming;
    }

    /// Expects no retries any more, because an operator has drained the model.
    pub(crate) fn expect_no_retries(&self) {
        lock(&self.state).retry_expected = None;
    }

    /// True if a new request would be refused at once.
    pub(crate) fn refuses_requests(&self) -> bool {
        let state = lock(&self.state);
        let is_shut =
            state.refusal.is_some() || state.next_process.least_time_left(Instant::now()) > state.wait;
        !state.dispatch.any_open() && is_shut
    }

    /// The expectation; `None` while a process serves.
    pub(crate) fn next_process(self: &Arc<Self>) -> Option<NextProcess> {
        let state = lock(&self.state);
        (!state.dispatch.any_open()).then_some(state.next_process)
    }
}
