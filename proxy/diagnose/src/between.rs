//! Runs what a [`Search`] asks for: fresh processes of revisions, until it is known which one brought a symptom, or ended it.
//!
//! ```text
//!   Search ── Ask ──> the server of the revision ──> an experiment (an end), or one leg ──> findings ──> Search ── … ──> Conclusion
//!                                                                                             └──> told, to be kept: what is known is not run again
//! ```
//!
//! Where a server of a revision comes from is the caller's business.

use std::pin::Pin;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use warden_policies::experiment::between::{Ask, Conclusion, Search, Seen, Step};
use warden_policies::experiment::{Ended, Finding};
use warden_supervisor::SoloSpec;

use crate::error::DiagnoseError;
use crate::experiment::Experiment;
use crate::lab::Lab;
use crate::leg::{Leg, Progress, run_leg};

/// The server of a revision; why there is none, if there is none.
pub type Serving<'a> = Pin<Box<dyn Future<Output = Result<SoloSpec, NoServer>> + Send + 'a>>;

/// Why a revision has no server.
#[derive(Debug)]
pub enum NoServer {
    /// It cannot be built, or not be run as it is asked for, in words.
    Cannot(String),
    /// Somebody asked for an end.
    Interrupted,
}

/// A line of revisions.
pub struct Line<'a> {
    /// The work, and how much of it. The server in it is not used.
    pub base: Experiment,
    /// The place of the newest revision; the oldest one is 0.
    pub last: usize,
    /// Their servers.
    pub server: &'a (dyn Fn(usize) -> Serving<'a> + Sync),
}

impl std::fmt::Debug for Line<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("base", &self.base).field("last", &self.last).finish_non_exhaustive()
    }
}

/// What one process was asked for, and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// What was asked for.
    pub ask: Ask,
    /// What came of it.
    pub seen: Seen,
}

/// What happens, for whoever watches.
#[derive(Debug)]
pub enum Searching<'a> {
    /// A process of a revision comes next; so many revisions may be it, once that can be said.
    Next(Ask, Option<usize>),
    /// What it does.
    Leg(Progress<'a>),
    /// It is over, and this came of it.
    Told(&'a Told),
}

impl Line<'_> {
    /// Runs it. `known`: what was told by an earlier run, in order; what does not fit is not used. Cancel `stop` for an early end: what is
    /// known by then is the conclusion.
    ///
    /// # Errors
    /// Nothing that a server could be blamed for.
    pub async fn run(
        &self,
        lab: &Lab,
        known: &[Told],
        watch: &mut (dyn FnMut(Searching<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Conclusion, DiagnoseError> {
        let mut search = Search::new(&lab.numbers.cure, &lab.numbers.crash, self.last);
        let mut known = known.iter();
        loop {
            let ask = match search.next() {
                Step::Done(conclusion) => return Ok(conclusion),
                Step::Run(ask) => ask,
            };
            if let Some(told) = known.next() {
                if told.ask == ask {
                    search.observe(ask, told.seen.clone());
                    continue;
                }
                known = [].iter();
            }
            if stop.is_cancelled() {
                return Ok(search.interrupt());
            }
            watch(Searching::Next(ask, search.left()));
            let Some(seen) = self.see(lab, ask, watch, stop).await? else { return Ok(search.interrupt()) };
            let told = Told { ask, seen };
            watch(Searching::Told(&told));
            search.observe(ask, told.seen);
        }
    }

    /// What comes of one process; `None` if somebody asked for an end.
    async fn see(
        &self,
        lab: &Lab,
        ask: Ask,
        watch: &mut (dyn FnMut(Searching<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Option<Seen>, DiagnoseError> {
        let mut spec = match (self.server)(ask.revision).await {
            Ok(spec) => spec,
            Err(NoServer::Cannot(why)) => return Ok(Some(Seen::Cannot(why))),
            Err(NoServer::Interrupted) => return Ok(None),
        };
        if ask.control {
            // The last one counts.
            spec.command.args.extend(["--cache-ram".to_owned(), "0".to_owned()]);
        }
        let mut show = |progress: Progress<'_>| watch(Searching::Leg(progress));
        let found = if ask.is_end {
            let experiment = Experiment { spec, ..self.base.clone() };
            Box::pin(experiment.run(lab, &mut show, stop)).await.map(|outcome| {
                let findings: Vec<Finding> = outcome.legs.into_iter().map(|leg| leg.finding).collect();
                (findings, outcome.interrupted)
            })
        } else {
            let workload = ask.workload.or_else(|| self.base.workloads.first().copied());
            let Some(workload) = workload else { return Ok(None) };
            let (steps, replay) = (self.base.steps, self.base.replay.clone());
            let leg = Leg { spec, workload, steps, early: !ask.whole, replay };
            run_leg(lab, &leg, &mut show, stop).await.map(|leg| {
                let interrupted = leg.finding.ended == Ended::Interrupted;
                (vec![Finding { control: ask.control, ..leg.finding }], interrupted)
            })
        };
        match found {
            Ok((_, true)) | Err(DiagnoseError::Interrupted) => Ok(None),
            Ok((findings, false)) if findings.is_empty() => {
                Ok(Some(Seen::Cannot("it can do none of these workloads".to_owned())))
            }
            Ok((findings, false)) => Ok(Some(Seen::Findings(findings))),
            Err(DiagnoseError::Start(failure)) => {
                let last = failure.lines.iter().rev().find(|line| !line.trim().is_empty());
                let last = last.map(|line| format!("; its last line: {}", line.trim()));
                let why = format!("it did not start: {}{}", failure.message, last.unwrap_or_default());
                Ok(Some(Seen::Cannot(why)))
            }
            Err(error @ DiagnoseError::CannotDo { .. }) => Ok(Some(Seen::Cannot(error.to_string()))),
            Err(error) => Err(error),
        }
    }
}
