//! Interface between the search and one kind of symptom. A judge knows which processes show the difference
//! between the ends, and how a revision compares with them. The search decides which revision comes next.

use std::fmt::Debug;

use super::conclusion::{Conclusion, Judged, Outcome, Symptom};
use super::{Ask, Seen};

/// Judge of one kind of symptom.
pub(super) trait Judge: Debug + Send {
    /// Returns the next process to run: of an end until the difference is known, then of the open revision.
    /// `None` if none is open.
    fn next(&self) -> Option<Ask>;

    /// Adds the result of a process.
    fn take(&mut self, ask: Ask, seen: Seen) -> Heard;

    /// Opens a revision, or judges it at once from its processes as an end. `again` accepts only new
    /// processes.
    fn begin(&mut self, revision: usize, again: bool) -> Heard;

    /// Returns true if no round of processes is incomplete.
    fn is_whole(&self) -> bool {
        true
    }

    /// Adds the findings on the ends to a conclusion.
    fn describe_ends(&self, conclusion: &mut Conclusion);
}

/// Consequence of a process's result.
#[derive(Debug)]
pub(super) enum Heard {
    /// More processes are needed.
    More,
    /// An end has the symptom; `is_newer`: the newer end has it.
    Differ { symptom: Symptom, is_newer: bool },
    /// The open revision is judged.
    Stands(Box<Judged>),
    /// The search is over.
    Over(Outcome),
}
