//! Whose turn it is when something was not done.

/// Whose turn it is to act on an [`Error`](crate::Error).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What was asked for makes no sense as given: the caller's arguments are wrong.
    Input,
    /// The machine lacks something: a program, disk, memory, a permission.
    Machine,
    /// The source did not become a working llama-server.
    Build,
    /// A patch set is not applied to this source, because it is not known to be right there.
    Refused,
    /// The caller wanted it to stop.
    Cancelled,
}
