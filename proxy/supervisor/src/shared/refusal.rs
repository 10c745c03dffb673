//! Why a model turns callers away, and what they are told.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::Denied;
use crate::view::Failure;

/// Why callers are turned away at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The process does not start; the next attempt is at this time.
    StartFailed(Failure, Instant),
    /// It stays down.
    Failed(Failure),
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
        match self {
            Self::StartFailed(failure, at) => {
                let left = at.saturating_duration_since(Instant::now());
                let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
                Denied::StartFailed(failure.clone(), Some(Duration::from_secs(seconds.max(1))))
            }
            Self::Failed(failure) => Denied::Failed(failure.clone()),
            Self::ShuttingDown => Denied::ShuttingDown,
            Self::Removed => Denied::Removed,
        }
    }
}
