//! Classes of errors, by who has to act.

/// Class of a [`BuilderError`](crate::BuilderError), by who has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The caller's arguments are wrong.
    Input,
    /// The machine lacks a program, disk space, memory or a permission.
    Machine,
    /// The source did not become a working llama-server.
    Build,
    /// A patch set is not known to be right for this source, so it is not applied.
    Refused,
    /// The caller cancelled.
    Cancelled,
}
