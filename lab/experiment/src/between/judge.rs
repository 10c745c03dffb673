//! Interface between the search and the judges. A judge handles one kind of symptom: it selects the processes
//! that show the difference between the ends, and compares a revision with the ends. The search decides which
//! revision comes next.

use std::fmt::Debug;

use super::conclusion::{JudgedRevision, RevisionConclusion, RevisionOutcome, RevisionSymptom};
use super::{ProcessOrder, ProcessResult};

/// Judge of one kind of symptom.
pub(super) trait SymptomJudge: Debug + Send {
    /// Returns the next process to run: of an end until the difference is known, then for the revision being
    /// judged. `None` if no revision is being judged.
    fn next(&self) -> Option<ProcessOrder>;

    /// Adds the result of a process.
    fn add_result(&mut self, ask: ProcessOrder, seen: ProcessResult) -> JudgeReply;

    /// Begins to judge a revision, or judges it at once if its processes were already run as those of an end.
    /// With `again`, only new processes count.
    fn begin(&mut self, revision: usize, again: bool) -> JudgeReply;

    /// Returns true if every round of processes that was begun is complete.
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
    /// Only one end has the symptom: the newer one if `is_newer`.
    Differ { symptom: RevisionSymptom, is_newer: bool },
    /// The judgement of the revision is complete.
    Judged(Box<JudgedRevision>),
    /// The search is over.
    Over(RevisionOutcome),
}
