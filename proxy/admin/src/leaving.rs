//! State of leaving a group of instances. Probes and load balancers learn of it at once, while the instance
//! still accepts requests.
//!
//! ```text
//!   serving <── undo ── leaving (an operator's order) ── SIGTERM ──> ending: final
//! ```

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_gateway::GatewayGauges;
use warden_supervisor::sync::lock;

/// State of leaving, shared by admin routes, probes and the end of the program.
#[derive(Debug)]
pub struct LeaveControl {
    gauges: Arc<GatewayGauges>,
    state: Mutex<LeaveState>,
}

#[derive(Clone, Copy, Debug, Default)]
struct LeaveState {
    since: Option<Instant>,
    ending: bool,
}

/// Error: the program is ending, so leaving cannot be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("llama-warden is ending, so it cannot come back: start it again")]
pub(crate) struct LeaveIsFinal;

impl LeaveControl {
    /// Creates the state of an instance that stays.
    pub fn new(gauges: Arc<GatewayGauges>) -> Self {
        Self { gauges, state: Mutex::default() }
    }

    /// Starts leaving. Returns false if the instance was already leaving.
    pub fn begin(&self) -> bool {
        let mut state = lock(&self.state);
        let is_new = state.since.is_none();
        state.since.get_or_insert_with(Instant::now);
        self.gauges.draining.store(true, Ordering::Relaxed);
        is_new
    }

    /// Returns whether the instance is leaving.
    pub fn is_begun(&self) -> bool {
        lock(&self.state).since.is_some()
    }

    /// Cancels leaving. Returns false if the instance was not leaving.
    pub(crate) fn undo(&self) -> Result<bool, LeaveIsFinal> {
        let mut state = lock(&self.state);
        if state.ending {
            return Err(LeaveIsFinal);
        }
        self.gauges.draining.store(false, Ordering::Relaxed);
        Ok(state.since.take().is_some())
    }

    /// Marks the end of the program. Returns the part of `delay` still to wait for load balancers.
    pub fn end(&self, delay: Duration) -> Duration {
        self.begin();
        let mut state = lock(&self.state);
        state.ending = true;
        delay.saturating_sub(state.since.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    /// Returns the number of requests whose head has arrived and whose answer has not ended.
    pub fn in_flight(&self) -> usize {
        self.gauges.in_flight.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_can_come_back_until_it_ends_and_time_that_was_waited_counts() {
        let gauges = Arc::new(GatewayGauges::default());
        let leaving = LeaveControl::new(gauges.clone());
        let draining = || gauges.draining.load(Ordering::Relaxed);
        assert_eq!(leaving.undo(), Ok(false));
        assert!(leaving.begin() && draining() && !leaving.begin());
        assert_eq!(leaving.undo(), Ok(true));
        assert!(!draining() && leaving.begin());
        let minute = Duration::from_secs(60);
        lock(&leaving.state).since = Instant::now().checked_sub(minute);
        let left = leaving.end(10 * minute);
        assert!(left <= 9 * minute && left > 8 * minute, "{left:?}");
        assert_eq!(leaving.end(minute), Duration::ZERO);
        assert!(leaving.undo() == Err(LeaveIsFinal) && draining());
    }
}
