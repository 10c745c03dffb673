//! What a search needs of a kind of symptom: which processes tell whether the ends differ, and how a revision between them stands. Where on
//! the line is looked is the search's own business.

use super::conclusion::{Conclusion, Judged, Outcome, Symptom};
use super::{Ask, Seen};

/// See the module.
pub(super) trait Judge {
    /// What to run of the ends, until it is known how they differ.
    fn end(&self) -> Ask;

    /// Takes in what came of it.
    fn take_end(&mut self, ask: Ask, seen: Seen) -> Ends;

    /// A revision is judged from here on; `again`: once more, by processes of its own.
    fn begin(&mut self, revision: usize, again: bool);

    /// What to run for the revision that is being judged; `None`: none is.
    fn next(&self) -> Option<Ask>;

    /// Takes in what came of it.
    fn take(&mut self, ask: Ask, seen: Seen) -> Heard;

    /// The revision that is being judged, if one is.
    fn open(&self) -> Option<usize>;

    /// Those whose processes run beside it, by turns.
    fn beside(&self) -> Vec<usize>;

    /// Whether nothing is half done that has to be done at one time.
    fn is_whole(&self) -> bool {
        true
    }

    /// Adds what is known of the ends.
    fn tell(&self, conclusion: &mut Conclusion);
}

/// How the ends stand.
#[derive(Debug)]
pub(super) enum Ends {
    /// More is to be run.
    More,
    /// One has what the other has not. The healthy one is being judged, or is known.
    Differ {
        symptom: Symptom,
        /// The newer one has it.
        is_newer: bool,
        healthy: Heard,
    },
    /// There is nothing to look for, or nobody can.
    Over(Outcome),
}

/// What came of a process of the line.
#[derive(Debug)]
pub(super) enum Heard {
    /// More is to be run.
    More,
    /// A revision is judged.
    Stands(Box<Judged>),
    /// Nothing more can be told.
    Over(Outcome),
}
