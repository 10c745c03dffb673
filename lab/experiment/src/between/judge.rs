//! The interface between a search and a kind of symptom: a judge knows which processes show whether the ends differ, and how a revision
//! between them stands. The search itself decides which revision comes next.

use std::fmt::Debug;

use super::conclusion::{Conclusion, Judged, Outcome, Symptom};
use super::{Ask, Seen};

/// See the module.
pub(super) trait Judge: Debug + Send {
    /// The next process: of an end, until it is known how they differ, then for the revision that is being judged. `None`: none is.
    fn next(&self) -> Option<Ask>;

    /// Takes in what came of a process.
    fn take(&mut self, ask: Ask, seen: Seen) -> Heard;

    /// Begins to judge a revision, or judges it at once by what its processes as an end showed. `again`: by new processes alone.
    fn begin(&mut self, revision: usize, again: bool) -> Heard;

    /// Whether no round of processes is incomplete.
    fn is_whole(&self) -> bool {
        true
    }

    /// Adds what is known of the ends.
    fn describe_ends(&self, conclusion: &mut Conclusion);
}

/// What follows from a process.
#[derive(Debug)]
pub(super) enum Heard {
    /// More processes are needed.
    More,
    /// One end has what the other has not; `is_newer`: the newer one has it.
    Differ { symptom: Symptom, is_newer: bool },
    /// A revision is judged.
    Stands(Box<Judged>),
    /// Nothing more can be learnt.
    Over(Outcome),
}
