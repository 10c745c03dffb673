//! Faults of a request's body.

use crate::observe::RequestOutcome;

/// Content codings that the gateway decodes, in the form of `Accept-Encoding`.
pub(crate) const ACCEPTED_CODINGS: &str = "gzip, zstd, identity";

/// Maximum ratio of decoded to received bytes. Conversations reach a ratio of 10 or 20.
pub(crate) const MAX_DECODED_RATIO: u64 = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("the request body is larger than allowed")]
    TooLarge,
    #[error("the request body did not arrive in time")]
    TooSlow,
    #[error("the request body broke off")]
    Broken,
    #[error("the request body names a second model")]
    TwoModels,
    #[error("the request ended its server while it ran there alone, and is refused")]
    Quarantined,
    #[error("the process that the request was for was stopped before it had the request")]
    Stopped,
    #[error("the request body cannot be decoded")]
    Undecodable,
    #[error("the request body decodes to too many bytes for its size")]
    TooDense,
}

impl BodyError {
    pub(crate) const fn outcome(self) -> RequestOutcome {
        match self {
            Self::TooLarge => RequestOutcome::Rejected("body_too_large"),
            Self::TooSlow => RequestOutcome::Rejected("body_too_slow"),
            Self::Broken => RequestOutcome::ClientGone,
            Self::TwoModels => RequestOutcome::Rejected("two_models"),
            Self::Quarantined => RequestOutcome::Rejected("quarantined"),
            Self::Undecodable => RequestOutcome::Rejected("undecodable"),
            Self::TooDense => RequestOutcome::Rejected("body_too_dense"),
            Self::Stopped => RequestOutcome::Denied("unreachable"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnreadableBody {
    NotObject,
    /// The body repeats a member, or has too many system messages.
    Repeats,
}
