//! What keeps a process from starting, as far as it can be seen beforehand.

use crate::error::FailureKind;

/// Something that a start needs and that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) kind: FailureKind,
    /// What and why, with a hint.
    pub(crate) message: String,
}
