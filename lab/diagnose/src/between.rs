//! Runs the processes that a [`RevisionSearch`] requests, until the search finds the revision that introduced
//! or ended a symptom.
//!
//! ```text
//!   RevisionSearch ── ProcessOrder ──> server of the revision ──> experiment (for an end), leg or visit
//!         ^                                                           │
//!         └───────────────────── ProcessResult ───────────────────────┴──> record, for a later run
//!   at last: RevisionSearch ──> RevisionConclusion
//! ```
//!
//! The caller supplies the server of each revision.

use std::pin::Pin;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use warden_experiment::between::{
    JudgingPolicies, ProcessOrder, ProcessResult, RevisionAim, RevisionConclusion, RevisionSearch,
    RevisionStep,
};
use warden_experiment::{LegEnd, LegFinding, Workload};
use warden_supervisor::SoloSpec;

use crate::error::DiagnoseError;
use crate::experiment::{Experiment, without_prompt_cache};
use crate::lab::Lab;
use crate::leg::{LegProgress, failure_text, run_leg};
use crate::proof::TextLengths;
use crate::proof::visit::{self, VisitTasks};

/// Server of a revision, or the reason why there is none.
pub type ServerFuture<'a, E> = Pin<Box<dyn Future<Output = Result<SoloSpec, NoServer<E>>> + Send + 'a>>;

/// Reason why a revision has no server.
#[derive(Debug)]
pub enum NoServer<E> {
    /// The revision cannot be built or run, for this reason.
    Unavailable(String),
    /// The search must end, but not because of a revision.
    Stop(E),
    /// The user interrupted the search.
    Interrupted,
}

/// Revisions to search, in order.
pub struct RevisionLine<'a, E> {
    /// Experiment to run; the server in it is ignored.
    pub base: Experiment,
    /// Index of the newest revision; the oldest is 0.
    pub last: usize,
    /// True to end the search once only the older end is known to have the symptom.
    pub newer_only: bool,
    /// Lengths of the requests that time or question a process; the first process sets them.
    pub lengths: &'a OnceLock<TextLengths>,
    /// Returns the server of a revision. No process of the search runs meanwhile.
    pub server: &'a (dyn Fn(usize) -> ServerFuture<'a, E> + Sync),
}

impl<E> std::fmt::Debug for RevisionLine<'_, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RevisionLine")
            .field("base", &self.base)
            .field("last", &self.last)
            .finish_non_exhaustive()
    }
}

/// Order and result of one process of a search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Process that the search ordered.
    pub ask: ProcessOrder,
    /// Result of the process.
    pub seen: ProcessResult,
    /// Lengths of the requests that timed or questioned the process; later processes get the same lengths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lengths: Option<TextLengths>,
}

/// Progress of a search.
#[derive(Debug)]
pub enum SearchEvent<'a> {
    /// A process starts next; with the number of revisions still suspected, if known.
    Next(ProcessOrder, Option<usize>),
    /// Progress of a leg of this process.
    Leg(LegProgress<'a>),
    /// The process did not start, or was ended from outside, and is started again.
    OnceMore(&'a str),
    /// The process is finished; a resumed search need not repeat it.
    Record(&'a ProcessRecord),
}

impl ProcessRecord {
    /// Returns true if an end (the oldest or newest revision) could not be run. Such a record is not kept,
    /// because a later attempt may succeed.
    fn is_passing(&self, last: usize) -> bool {
        let is_end = self.ask.revision == 0 || self.ask.revision == last;
        is_end
            && match &self.seen {
                ProcessResult::Cannot(_) => true,
                // Findings of a whole experiment with an end always count. A single process of an end that
                // was killed from outside runs again.
                ProcessResult::Findings(all) => {
                    !self.ask.is_end && all.iter().any(|one| matches!(one.ended, LegEnd::Killed { .. }))
                }
                ProcessResult::Visit(_) => false,
            }
    }
}

/// Resumes a search from records; also returns the number of records used. Stops at the first record that the
/// search would not order now, or that belongs to an incomplete round.
pub fn resume_search(
    rules: JudgingPolicies<'_>,
    aim: RevisionAim,
    last: usize,
    known: &[ProcessRecord],
) -> (RevisionSearch, usize) {
    let mut search = RevisionSearch::new(rules, aim, last);
    let mut used = 0;
    let mut whole = 0;
    for record in known {
        if search.next() != RevisionStep::Run(record.ask) {
            break;
        }
        search.observe(record.ask, record.seen.clone());
        used += 1;
        if search.is_whole() {
            whole = used;
        }
    }
    if whole < used { resume_search(rules, aim, last, &known[..whole]) } else { (search, used) }
}

/// A process that does not start, or is ended from outside, is started again: another program may hold the
/// memory for a moment.
const MAX_ATTEMPTS: u32 = 3;

enum ProcessAttempt {
    Seen(ProcessResult),
    /// Reason of a failure that may pass, and the result that counts if all attempts fail.
    Failed(String, ProcessResult),
    Interrupted,
}

impl<E: From<DiagnoseError>> RevisionLine<'_, E> {
    /// Cancelling `stop` ends the search early, with a conclusion from the results so far.
    ///
    /// # Errors
    /// Only errors that are not a server's fault.
    pub async fn run(
        &self,
        lab: &Lab,
        mut search: RevisionSearch,
        watch: &mut (dyn FnMut(SearchEvent<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<RevisionConclusion, E> {
        loop {
            let ask = match search.next() {
                RevisionStep::Done(conclusion) => return Ok(conclusion),
                RevisionStep::Run(ask) => ask,
            };
            if stop.is_cancelled() || (self.newer_only && search.only_older_is_ill()) {
                return Ok(search.interrupt());
            }
            watch(SearchEvent::Next(ask, search.candidates_left()));
            let seen = match (self.server)(ask.revision).await {
                Err(NoServer::Stop(error)) => return Err(error),
                Err(NoServer::Interrupted) => None,
                _ if stop.is_cancelled() => None,
                Err(NoServer::Unavailable(why)) => Some(ProcessResult::Cannot(why)),
                Ok(spec) => self.run_process(lab, ask, &spec, watch, stop).await?,
            };
            let Some(seen) = seen else { return Ok(search.interrupt()) };
            let lengths = if ask.aim.is_growth() { None } else { self.lengths.get().copied() };
            let record = ProcessRecord { ask, seen, lengths };
            if !record.is_passing(self.last) {
                watch(SearchEvent::Record(&record));
            }
            search.observe(ask, record.seen);
        }
    }

    /// Runs one process and repeats failed attempts; `None` if the user interrupted the search.
    async fn run_process(
        &self,
        lab: &Lab,
        ask: ProcessOrder,
        spec: &SoloSpec,
        watch: &mut (dyn FnMut(SearchEvent<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Option<ProcessResult>, DiagnoseError> {
        for tried in 1.. {
            let attempt = if ask.aim.is_growth() {
                let mut spec = spec.clone();
                // A build without a prompt cache fails to start with `--cache-ram 0`, so only the first
                // attempt adds it.
                if ask.control && tried == 1 {
                    without_prompt_cache(&mut spec);
                }
                self.run_workload(lab, ask, spec, &mut |progress| watch(SearchEvent::Leg(progress)), stop)
                    .await?
            } else {
                self.run_visit(lab, ask, spec, stop).await?
            };
            match attempt {
                ProcessAttempt::Seen(seen) => return Ok(Some(seen)),
                ProcessAttempt::Failed(_, seen) if tried >= MAX_ATTEMPTS => return Ok(Some(seen)),
                ProcessAttempt::Failed(why, _) => watch(SearchEvent::OnceMore(&why)),
                ProcessAttempt::Interrupted => break,
            }
        }
        Ok(None)
    }

    async fn run_workload(
        &self,
        lab: &Lab,
        ask: ProcessOrder,
        spec: SoloSpec,
        show: &mut (dyn FnMut(LegProgress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<ProcessAttempt, DiagnoseError> {
        let found = if ask.is_end {
            let experiment = Experiment { spec, ..self.base.clone() };
            let done = Box::pin(experiment.run(lab, show, stop)).await;
            done.map(|done| done.legs.into_iter().map(|leg| leg.finding).collect())
        } else {
            let workload = ask.workload.or_else(|| self.base.workloads.first().copied());
            let leg = self.base.leg(spec, workload.unwrap_or(Workload::ShortText), !ask.whole);
            run_leg(lab, &leg, show, stop)
                .await
                .map(|done| vec![LegFinding { control: ask.control, ..done.finding }])
        };
        if stop.is_cancelled() {
            return Ok(ProcessAttempt::Interrupted);
        }
        match found {
            Ok(findings) if findings.is_empty() => Ok(ProcessAttempt::Seen(ProcessResult::Cannot(
                "it can do none of these workloads".to_owned(),
            ))),
            Ok(findings) => Ok(match ended_from_outside(&findings) {
                Some(why) => ProcessAttempt::Failed(why, ProcessResult::Findings(findings)),
                None => ProcessAttempt::Seen(ProcessResult::Findings(findings)),
            }),
            Err(DiagnoseError::Start(failure)) => {
                let why = format!("it did not start: {}", failure_text(&failure));
                Ok(ProcessAttempt::Failed(why.clone(), ProcessResult::Cannot(why)))
            }
            Err(error @ DiagnoseError::CannotDo { .. }) => {
                Ok(ProcessAttempt::Seen(ProcessResult::Cannot(error.to_string())))
            }
            Err(DiagnoseError::Interrupted) => Ok(ProcessAttempt::Interrupted),
            Err(error) => Err(error),
        }
    }

    async fn run_visit(
        &self,
        lab: &Lab,
        ask: ProcessOrder,
        spec: &SoloSpec,
        stop: &CancellationToken,
    ) -> Result<ProcessAttempt, DiagnoseError> {
        let answers = ask.aim == RevisionAim::Answers;
        let pace = ask.aim == RevisionAim::Slowdown;
        let wanted =
            VisitTasks { answers, pace, lengths: self.lengths.get().copied(), ..VisitTasks::default() };
        let Some(seen) = stop.run_until_cancelled(visit::run_visit(lab, spec, wanted)).await else {
            return Ok(ProcessAttempt::Interrupted);
        };
        Ok(match seen? {
            Ok(visited) => {
                self.lengths.get_or_init(|| visited.lengths);
                ProcessAttempt::Seen(ProcessResult::Visit(visited.visit))
            }
            Err(why) => ProcessAttempt::Failed(why.clone(), ProcessResult::Cannot(why)),
        })
    }
}

/// Returns the reason if another program, or lack of memory, ended a process.
fn ended_from_outside(findings: &[LegFinding]) -> Option<String> {
    findings.iter().find_map(|finding| match &finding.ended {
        LegEnd::Killed { why } | LegEnd::OutOfMemory { why } => Some(why.clone()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_experiment::proof::{BuildMetric, BuildVisit};

    /// Returns all records of a search; the search ends when `seen` returns `None`.
    fn told(
        aim: RevisionAim,
        last: usize,
        seen: &mut dyn FnMut(ProcessOrder) -> Option<ProcessResult>,
    ) -> Vec<ProcessRecord> {
        let all = warden_policies::defaults();
        let rules =
            JudgingPolicies { cure: &all.diagnose.cure, crash: &all.diagnose.crash, proof: &all.proof };
        let mut search = RevisionSearch::new(rules, aim, last);
        let mut told = Vec::new();
        while let RevisionStep::Run(ask) = search.next()
            && let Some(seen) = seen(ask)
        {
            search.observe(ask, seen.clone());
            told.push(ProcessRecord { ask, seen, lengths: None });
        }
        told
    }

    fn again(aim: RevisionAim, last: usize, known: &[ProcessRecord]) -> (RevisionSearch, usize) {
        let all = warden_policies::defaults();
        let rules =
            JudgingPolicies { cure: &all.diagnose.cure, crash: &all.diagnose.crash, proof: &all.proof };
        resume_search(rules, aim, last, known)
    }

    /// Revisions from 8 on take a third more time; single processes differ slightly.
    fn timed(ask: ProcessOrder, count: usize) -> ProcessResult {
        let own = if ask.revision >= 8 { 0.0266 } else { 0.02 };
        let by = [1.0, 1.003, 0.998, 1.001][count % 4];
        ProcessResult::Visit(BuildVisit {
            measured: vec![(BuildMetric::Decode, own * by)],
            replies: Vec::new(),
        })
    }

    #[test]
    fn an_end_that_could_not_be_run_for_a_while_does_not_end_the_search_for_ever() {
        let (mut count, mut left) = (0, 4);
        let all = told(RevisionAim::Slowdown, 16, &mut |ask| {
            count += 1;
            if !ask.is_end && ask.revision == 16 {
                left -= 1;
                return (left >= 0).then(|| ProcessResult::Cannot("it did not start".to_owned()));
            }
            Some(timed(ask, count))
        });
        // The search ended because the slower end failed.
        let (passing, kept) = (&all[all.len() - 3..], &all[..all.len() - 3]);
        assert!(passing.iter().all(|record| matches!(record.seen, ProcessResult::Cannot(_))), "{all:?}");
        assert!(passing.iter().all(|record| record.is_passing(16)), "none of it is written");
        let (mut search, used) = again(RevisionAim::Slowdown, 16, kept);
        assert!(used > 0 && used <= kept.len());
        assert!(matches!(search.next(), RevisionStep::Run(ask) if !ask.is_end), "{:?}", search.next());
        // A revision between the ends keeps this result.
        let ask = ProcessOrder { revision: 7, ..all[0].ask };
        assert!(
            !ProcessRecord { ask, seen: ProcessResult::Cannot(String::new()), lengths: None }.is_passing(16)
        );
    }

    #[test]
    fn a_round_of_which_a_process_is_missing_is_run_anew() {
        let mut count = 0;
        let all = told(RevisionAim::Slowdown, 16, &mut |ask| {
            count += 1;
            Some(timed(ask, count))
        });
        let first = all.iter().position(|told| !told.ask.is_end).unwrap();
        assert!(first.is_multiple_of(2) && all.len() > first + 6);
        for known in 0..first + 6 {
            let (mut search, used) = again(RevisionAim::Slowdown, 16, &all[..known]);
            let round = if known < first { 2 } else { 3 };
            let begun = if known < first { 0 } else { first };
            assert_eq!(used, known - (known - begun) % round, "{known} known");
            assert_eq!(search.next(), RevisionStep::Run(all[used].ask));
        }
    }
}
