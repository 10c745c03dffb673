//! Why a model turns callers away, and what they are told.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Denied, Failure};

/// Why callers are turned away at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The process does not start; the next attempt is at this time.
    StartFailed(Failure, Instant),
    /// It waits for a change; the next attempt without one is at this time.
    Failed(Failure, Instant),
    /// The endpoint that serves it does not answer; it is asked again at this time.
    Silent(Failure, Instant),
    /// Nobody new is let in, whatever is open.
    ShuttingDown,
    /// Nobody new is let in, whatever is open.
    Removed,
}

impl Refusal {
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::ShuttingDown | Self::Removed)
    }

    pub(super) fn denied(&self) -> Denied {
        // Whole seconds, rounded up: whoever comes back then does not come too early.
        let left = |at: &Instant| {
            let left = at.saturating_duration_since(Instant::now());
            Duration::from_secs((left.as_secs() + u64::from(left.subsec_nanos() > 0)).max(1))
        };
        match self {
            Self::StartFailed(failure, at) => Denied::StartFailed(failure.clone(), Some(left(at))),
            Self::Failed(failure, at) => Denied::Failed(failure.clone(), left(at)),
            Self::Silent(failure, at) => Denied::Silent(failure.clone(), left(at)),
            Self::ShuttingDown => Denied::ShuttingDown,
            Self::Removed => Denied::Removed,
        }
    }
}
