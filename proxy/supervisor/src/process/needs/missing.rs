//! A missing requirement of a start (a file, a library), detected before the start.

use crate::error::FailureKind;

/// Something that a start needs and that is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MissingNeed {
    pub(crate) kind: FailureKind,
    /// Sentence for people: what is missing, why it is needed, and advice.
    pub(crate) message: String,
}
