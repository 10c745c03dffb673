//! Interface between the search and one kind of symptom. A judge knows which processes show the difference
//! between the ends, and how a revision compares with them. The search decides which revision comes next.

use std::fmt::Debug;

use super::conclusion::{JudgedRevision, RevisionConclusion, RevisionOutcome, RevisionSymptom};
use super::{ProcessOrder, ProcessResult};

/// Judge of one kind of symptom.
pub(super) trait SymptomJudge: Debug + Send {
    /// Returns the next process to run: of an end until the difference is known, then of the open revision.
    /// `None` if none is open.
    fn next(&self) -> Option<ProcessOrder>;

    /// Adds the result of a process.
    fn add_result(&mut self, ask: ProcessOrder, seen: ProcessResult) -> JudgeReply;

    /// Opens a revision, or judges it at once from its processes as an end. `again` accepts only new
    /// processes.
    fn begin(&mut self, revision: usize, again: bool) -> JudgeReply;

    /// Returns true if no round of processes is incomplete.
    fn is_whole(&self) -> bool {
        true
    }

    /// Adds the findings on the ends to a conclusion.
    fn describe_ends(&self, conclusion: &mut RevisionConclusion);
}

/// Consequence of a process's result.
#[derive(Debug)]
pub(super) enum JudgeReply {
    /// More processes are needed.
    More,
    /// An end has the symptom; `is_newer`: the newer end has it.
    Differ { symptom: RevisionSymptom, is_newer: bool },
    /// The open revision is judged.
    Judged(Box<JudgedRevision>),
    /// The search is over.
    Over(RevisionOutcome),
}
