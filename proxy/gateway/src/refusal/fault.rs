//! Faults of a request's body.

use crate::observe::Outcome;

/// Content codings that are decoded, as `Accept-Encoding` lists them.
pub(crate) const ACCEPTED_CODINGS: &str = "gzip, zstd, identity";

/// Largest ratio of decoded to sent bytes. Conversations reach 10 or 20.
pub(crate) const MAX_DECODED_RATIO: u64 = 200;

/// Reasons why a body ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyFault {
    #[error("the request body is larger than allowed")]
    TooLarge = 1,
    #[error("the request body did not arrive in time")]
    TooSlow = 2,
    #[error("the request body broke off")]
    Broken = 3,
    #[error("the request body names a second model")]
    TwoModels = 4,
    #[error("the request ended its server while it ran there alone, and is refused")]
    Quarantined = 5,
    #[error("the process that the request was for was stopped before it had the request")]
    Stopped = 6,
    #[error("the request body cannot be decoded")]
    Undecodable = 7,
    #[error("the request body decodes to too many bytes for its size")]
    TooDense = 8,
}

impl BodyFault {
    /// Returns the outcome of its request.
    pub(crate) const fn outcome(self) -> Outcome {
        match self {
            Self::TooLarge => Outcome::Rejected("body_too_large"),
            Self::TooSlow => Outcome::Rejected("body_too_slow"),
            Self::Broken => Outcome::ClientGone,
            Self::TwoModels => Outcome::Rejected("two_models"),
            Self::Quarantined => Outcome::Rejected("quarantined"),
            Self::Undecodable => Outcome::Rejected("undecodable"),
            Self::TooDense => Outcome::Rejected("body_too_dense"),
            Self::Stopped => Outcome::Denied("unreachable"),
        }
    }
}

/// Reasons why a body cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// The body is no JSON object.
    NotObject,
    /// The body repeats a member, or has too many system messages.
    Repeats,
}
