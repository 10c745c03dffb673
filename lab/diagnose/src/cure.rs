//! Alternates processes with and without switches, to find the switches that stop the growth, or a crash.
//!
//! ```text
//!   CurePlanner    ── SwitchSet ──> Experiment: the workloads that leak ──> findings ──> CurePlanner ── …
//!   SurvivalSearch ── SwitchSet ──> a leg of the workload that crashes ──> died or not ──> SurvivalSearch
//!   ── … at last: the conclusion of the planner, or of the search
//! ```

use tokio_util::sync::CancellationToken;
use warden_experiment::bisect::{self, CurePlanner, SwitchSet};
use warden_experiment::crash::WorkloadCrash;
use warden_experiment::survive::{self, SurvivalResult, SurvivalSearch};
use warden_experiment::{LegEnd, LegFinding, Workload};
use warden_supervisor::SoloSpec;

use crate::error::DiagnoseError;
use crate::experiment::Experiment;
use crate::lab::Lab;
use crate::leg::{LegProgress, failure_text, run_leg};

/// Switches to try on a server.
pub struct SwitchTrials<'a> {
    /// Workloads under which the server leaks or crashes; the server in it is ignored.
    pub base: Experiment,
    /// Number of switches; the cheapest and likeliest comes first.
    pub switches: usize,
    /// Pairs of switches that cannot be combined.
    pub clashes: Vec<[usize; 2]>,
    /// Returns the server with a set of switches, or the reason why there is none.
    pub with: &'a (dyn Fn(&SwitchSet) -> Result<SoloSpec, String> + Sync),
}

impl std::fmt::Debug for SwitchTrials<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SwitchTrials")
            .field("base", &self.base)
            .field("switches", &self.switches)
            .finish_non_exhaustive()
    }
}

/// Progress of the trials.
#[derive(Clone, Copy, Debug)]
pub enum TrialProgress<'a> {
    /// A process with these switches follows.
    Next {
        /// The switches.
        arm: &'a SwitchSet,
        /// Trials that are finished.
        done: usize,
        /// Estimated number of trials at most.
        of: usize,
    },
    /// Progress of the process.
    Leg(LegProgress<'a>),
}

impl SwitchTrials<'_> {
    /// Finds switches that stop the growth. `known` are findings without switches under these workloads; with
    /// them, that process is saved. Cancelling `stop` ends the trials early, with a conclusion from the
    /// results so far.
    ///
    /// # Errors
    /// Only errors that are not a server's fault; a server that does not start, or dies, is part of the
    /// conclusion.
    pub async fn stop_growth(
        &self,
        lab: &Lab,
        known: &[LegFinding],
        watch: &mut (dyn FnMut(TrialProgress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<bisect::CureConclusion, DiagnoseError> {
        let mut planner = CurePlanner::new(&lab.numbers.cure, self.switches, self.clashes.clone());
        if !known.is_empty() {
            planner.observe(&SwitchSet::default(), known);
        }
        loop {
            let arm = match planner.next() {
                bisect::CureStep::Done(conclusion) => return Ok(conclusion),
                bisect::CureStep::Run(arm) => arm,
            };
            match self.run(lab, &arm, planner.progress(), None, watch, stop).await? {
                Some(Ok(findings)) => planner.observe(&arm, &findings),
                Some(Err(why)) => planner.observe_failure(&arm, why),
                None => return Ok(planner.interrupt()),
            }
        }
    }

    /// Finds switches that stop a crash under a workload. Cancelling `stop` ends the trials early.
    ///
    /// # Errors
    /// Only errors that are not a server's fault.
    pub async fn stop_crash(
        &self,
        lab: &Lab,
        workload: Workload,
        crash: &WorkloadCrash,
        watch: &mut (dyn FnMut(TrialProgress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<survive::SurvivalConclusion, DiagnoseError> {
        let mut search =
            SurvivalSearch::new(&lab.numbers.crash, self.switches, self.clashes.clone(), &crash.runs);
        loop {
            let arm = match search.next() {
                survive::SurvivalStep::Done(conclusion) => return Ok(conclusion),
                survive::SurvivalStep::Run(arm) => arm,
            };
            match self.run(lab, &arm, search.progress(), Some(workload), watch, stop).await? {
                Some(shown) => search.observe(&arm, survival_result(shown)),
                None => return Ok(search.interrupt()),
            }
        }
    }

    /// Runs one process, under all workloads or only one. An inner error is the reason why the process showed
    /// nothing; `None` if the user interrupted the process.
    async fn run(
        &self,
        lab: &Lab,
        arm: &SwitchSet,
        (done, of): (usize, usize),
        alone: Option<Workload>,
        watch: &mut (dyn FnMut(TrialProgress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Option<Result<Vec<LegFinding>, String>>, DiagnoseError> {
        if stop.is_cancelled() {
            return Ok(None);
        }
        watch(TrialProgress::Next { arm, done, of });
        let spec = match (self.with)(arm) {
            Ok(spec) => spec,
            Err(why) => return Ok(Some(Err(why))),
        };
        let mut show = |progress: LegProgress<'_>| watch(TrialProgress::Leg(progress));
        let found = if let Some(workload) = alone {
            let leg = self.base.leg(spec, workload, false);
            run_leg(lab, &leg, &mut show, stop).await.map(|done| vec![done.finding])
        } else {
            let experiment = Experiment { spec, ..self.base.clone() };
            let done = experiment.run(lab, &mut show, stop).await;
            done.map(|done| done.legs.into_iter().map(|leg| leg.finding).collect())
        };
        match found {
            _ if stop.is_cancelled() => Ok(None),
            Ok(findings) => Ok(Some(Ok(findings))),
            Err(DiagnoseError::Start(failure)) => {
                Ok(Some(Err(format!("it did not start: {}", failure_text(&failure)))))
            }
            Err(error @ DiagnoseError::CannotDo { .. }) if !arm.is_baseline() => {
                Ok(Some(Err(error.to_string())))
            }
            Err(DiagnoseError::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn survival_result(shown: Result<Vec<LegFinding>, String>) -> SurvivalResult {
    let finding = match shown.map(|findings| findings.into_iter().next()) {
        Ok(Some(finding)) => finding,
        Ok(None) => return SurvivalResult::Nothing("the leg was cut short".to_owned()),
        Err(why) => return SurvivalResult::Nothing(why),
    };
    let Some(run) = finding.as_crash_run() else {
        return SurvivalResult::Nothing(match finding.ended {
            LegEnd::Killed { why } | LegEnd::Failed { why } | LegEnd::OutOfMemory { why } => why,
            _ => "the leg was cut short".to_owned(),
        });
    };
    let memory = finding.series.iter().map(|found| (found.series, found.verdict)).collect();
    SurvivalResult::Run { run, speed: finding.speed.tokens_per_second, memory }
}
