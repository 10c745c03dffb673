//! Expected time until a model's next process serves: shown to waiting requests, and used to refuse
//! requests that would wait too long.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{LeaseQueue, QueueState};
use crate::clock;
use crate::error::LeaseDenied;
use crate::sync::lock;

/// Estimates for the next process of a model that has no serving process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextProcess {
    /// Moment when the start began; `None` if it has not begun.
    pub since: Option<Instant>,
    /// Duration of the model's last start; `None` if there was none in this run.
    pub took: Option<Duration>,
    /// Duration of the fastest start with the same command.
    pub fastest: Option<Duration>,
    /// True if the model waits for room in memory.
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
    /// Refuses a request that would wait in vain, because even the fastest start would take too long. The
    /// client is told when to retry, and the model is loaded as if the request were waiting.
    pub(super) fn refuse_if_slow(&mut self, now: Instant) -> Option<LeaseDenied> {
        let least = self.next_process.least_time_left(now);
        if least <= self.wait {
            return None;
        }
        let left = self.next_process.time_left(now).unwrap_or(least).max(least);
        self.retry_expected = Some(clock::after(now, left.saturating_add(self.wait)));
        Some(LeaseDenied::TooSlow { left, wait: self.wait })
    }

    /// True if a refused client was told when to retry, and its retry is still expected.
    pub(super) fn expects(&self) -> bool {
        self.retry_expected.is_some_and(|until| until > Instant::now())
    }
}

impl LeaseQueue {
    /// Sets the estimates for the next process.
    pub(crate) fn set_next_process(&self, coming: NextProcess) {
        lock(&self.state).next_process = coming;
    }

    /// Expects no more retries, because an operator has drained the model.
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

    /// Estimates for the next process; `None` while a process serves.
    pub(crate) fn next_process(self: &Arc<Self>) -> Option<NextProcess> {
        let state = lock(&self.state);
        (!state.dispatch.any_open()).then_some(state.next_process)
    }
}
