//! A missing requirement of a start, as far as it can be detected in advance.

use crate::error::FailureKind;

/// A missing requirement of a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MissingNeed {
    pub(crate) kind: FailureKind,
    /// Message with object, reason and advice.
    pub(crate) message: String,
}
