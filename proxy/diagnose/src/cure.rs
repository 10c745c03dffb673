//! Runs what a [`Planner`] asks for: processes with switches and without, by turns, until it is known which ones stop the
//! growth.
//!
//! ```text
//!   Planner ── Arm ──> spec of the arm ──> Experiment: the workloads that leak ──> findings ──> Planner ── … ──> Conclusion
//! ```
//!
//! What a switch is, in flags and variables, is the caller's business.

use tokio_util::sync::CancellationToken;
use warden_policies::experiment::bisect::{Arm, Conclusion, Planner, Step};
use warden_policies::experiment::{Ended, Finding, Speed, Workload};
use warden_policies::sample::Work;
use warden_supervisor::SoloSpec;

use crate::error::DiagnoseError;
use crate::experiment::Experiment;
use crate::lab::Lab;
use crate::leg::{Progress, told};

/// Which switches to try on which server.
pub struct Bisection<'a> {
    /// The server without any of them, and the work that makes it leak.
    pub base: Experiment,
    /// How many switches there are, the cheapest and likeliest first.
    pub switches: usize,
    /// Pairs that cannot be used together.
    pub clashes: Vec<[usize; 2]>,
    /// The server with some of them; why it cannot be had, if it cannot.
    pub with: &'a (dyn Fn(&Arm) -> Result<SoloSpec, String> + Sync),
}

impl std::fmt::Debug for Bisection<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bisection")
            .field("base", &self.base)
            .field("switches", &self.switches)
            .finish_non_exhaustive()
    }
}

/// What happens, for whoever watches.
#[derive(Clone, Copy, Debug)]
pub enum Trying<'a> {
    /// A process with these switches comes next.
    Next {
        /// The switches.
        arm: &'a Arm,
        /// Trials that are over.
        done: usize,
        /// Trials that there will be at most, as far as can be told.
        of: usize,
    },
    /// What it does.
    Leg(Progress<'a>),
}

impl Bisection<'_> {
    /// Runs it. `known`: what the server without switches has just done with these workloads, which saves that leg; may be
    /// empty. Cancel `stop` for an early end: what is known by then is the conclusion.
    ///
    /// # Errors
    /// Nothing that a server could be blamed for. One that does not start, or dies, is part of the conclusion.
    pub async fn run(
        &self,
        lab: &Lab,
        known: &[Finding],
        watch: &mut (dyn FnMut(Trying<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Conclusion, DiagnoseError> {
        let mut planner = Planner::new(&lab.numbers.cure, self.switches, self.clashes.clone());
        if !known.is_empty() {
            planner.observe(&Arm::default(), known);
        }
        loop {
            let arm = match planner.next() {
                Step::Done(conclusion) => return Ok(conclusion),
                Step::Run(arm) => arm,
            };
            if stop.is_cancelled() {
                return Ok(planner.interrupt());
            }
            let (done, of) = planner.progress();
            watch(Trying::Next { arm: &arm, done, of });
            let spec = match (self.with)(&arm) {
                Ok(spec) => spec,
                Err(why) => {
                    planner.observe(&arm, &[self.crashed(why)]);
                    continue;
                }
            };
            let experiment = Experiment { spec, ..self.base.clone() };
            let result = experiment.run(lab, &mut |progress| watch(Trying::Leg(progress)), stop).await;
            match result {
                Ok(outcome) if outcome.interrupted => return Ok(planner.interrupt()),
                Ok(outcome) => {
                    let findings: Vec<Finding> = outcome.legs.into_iter().map(|leg| leg.finding).collect();
                    planner.observe(&arm, &findings);
                }
                Err(DiagnoseError::Interrupted) => return Ok(planner.interrupt()),
                Err(DiagnoseError::Start(failure)) => {
                    let why = format!("it did not start: {}", told(&failure));
                    planner.observe(&arm, &[self.crashed(why)]);
                }
                Err(error @ DiagnoseError::CannotDo { .. }) if !arm.is_baseline() => {
                    planner.observe(&arm, &[self.crashed(error.to_string())]);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn crashed(&self, why: String) -> Finding {
        Finding {
            workload: self.base.workloads.first().copied().unwrap_or(Workload::ShortText),
            steps: 0,
            enough: 0,
            requests: 0,
            work: Work::default(),
            series: Vec::new(),
            speed: Speed::default(),
            ended: Ended::Failed { why },
            crash: None,
            control: false,
        }
    }
}
