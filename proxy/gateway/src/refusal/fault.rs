//! What can be wrong with a request's body.

use crate::observe::Outcome;

/// The codings of a body that are decoded, as `Accept-Encoding` lists them.
pub(crate) const ACCEPTED_CODINGS: &str = "gzip, zstd, identity";

/// How many times as large as the sent bytes a decoded body may be. Conversations come to 10 or 20.
pub(crate) const MAX_DECODED_RATIO: u64 = 200;

/// Why a body ended early.
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
    /// How a request ends by it.
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

/// Why a body cannot be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreadable {
    /// It is no JSON object.
    NotObject,
    /// It repeats what should stand once, many times.
    Repeats,
}
