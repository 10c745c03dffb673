//! Reasons for refusing all requests of a model, and the resulting answers.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{BackendFailure, LeaseDenied};

/// Why requests are refused at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueueRefusal {
    /// Starts fail; the next attempt is at this time.
    StartFailed(BackendFailure, Instant),
    /// The next start needs a change of a flag or file; without one, the next attempt is at this time.
    Failed(BackendFailure, Instant),
    /// The remote endpoint does not answer; the next probe is at this time.
    EndpointSilent(BackendFailure, Instant),
    /// The fleet is shutting down; new requests are refused even if a process serves.
    ShuttingDown,
    /// The model was removed; new requests are refused even if a process serves.
    Removed,
}

impl QueueRefusal {
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::ShuttingDown | Self::Removed)
    }

    pub(super) fn denied(&self) -> LeaseDenied {
        // Round up to whole seconds, so that clients do not retry too early.
        let left = |at: &Instant| {
            let left = at.saturating_duration_since(Instant::now());
            Duration::from_secs((left.as_secs() + u64::from(left.subsec_nanos() > 0)).max(1))
        };
        match self {
            Self::StartFailed(failure, at) => LeaseDenied::StartFailed(failure.clone(), Some(left(at))),
            Self::Failed(failure, at) => LeaseDenied::Failed(failure.clone(), left(at)),
            Self::EndpointSilent(failure, at) => LeaseDenied::Silent(failure.clone(), left(at)),
            Self::ShuttingDown => LeaseDenied::ShuttingDown,
            Self::Removed => LeaseDenied::Removed,
        }
    }
}
