//! Finds the switches that stop a leak: decides the next process and draws the conclusion.
//!
//! ```text
//!  baseline ── no leak ──────────────────────────────────────────────> nothing to cure
//!     │ leaks
//!     v
//!  each switch alone ── one stops everything ────────────────────────> that one (the cheapest, if the first is costly)
//!     │ none does
//!     v
//!  all together ── they stop nothing ────────────────────────────────> no cure
//!     │ they stop some memories: these are the targets
//!     v
//!  small sets, by size, plausible by the switches' own results ──────> the first set that works
//!     │ none
//!     v
//!  all together, minus one after the other ──────────────────────────> the rest
//! ```
//!
//! Trials alternate with processes without switches (the baseline), so that drift of the machine affects
//! both. A trial ends once [`judge`](super::sequential::judge) has decided. Two assumptions save trials:
//! more switches never stop less growth, and two switches together stop at most the sum of their effects.
//! If the second assumption is wrong, removing switches one by one still finds a minimal set.
//!
//! The planner runs nothing: the caller calls [`CurePlanner::next`], runs the process, and passes the
//! findings to [`CurePlanner::observe`].

use super::sequential::CurePolicy;
use super::trial::{SwitchTrial, TrialLeg};
use super::{LegEnd, LegFinding};

mod baseline;
mod conclusion;
mod search;
mod sets;

pub use self::conclusion::{CureConclusion, CureOutcome};
pub use super::trial::{ComparedFigure, SwitchCost, SwitchSet, TrialReport, WorkloadMemory};

/// Next step of a bisection.
#[derive(Clone, Debug, PartialEq)]
pub enum CureStep {
    /// Run a fresh process with these switches under all workloads, and report the findings.
    Run(SwitchSet),
    /// The bisection is over.
    Done(CureConclusion),
}

/// Phase of a bisection.
#[derive(Clone, Debug, PartialEq)]
enum CurePhase {
    Baseline,
    Alone,
    Together,
    /// Size of the sets being tried, and the sets of this size still to try, the next one last.
    Sets(usize, Vec<Vec<usize>>),
    /// A set that works, and the groups of switches still to remove from it, the next one last.
    Reduce(Vec<usize>, Vec<Vec<usize>>),
    Over(CureOutcome),
}

/// State machine of the bisection.
#[derive(Clone, Debug)]
pub struct CurePlanner {
    policy: CurePolicy,
    switches: usize,
    clashes: Vec<[usize; 2]>,
    phase: CurePhase,
    baseline: Vec<TrialLeg>,
    /// Number of consecutive failed baseline legs.
    failed: u32,
    /// Number of legs with switches since the last baseline leg.
    since: u32,
    leaking: Vec<WorkloadMemory>,
    /// Kinds of memory that some switch can stop; until that is known, all that leak.
    targets: Vec<WorkloadMemory>,
    trials: Vec<SwitchTrial>,
    sets: u32,
    cure: Vec<usize>,
    legs: usize,
}

impl CurePlanner {
    /// Creates a planner for switches ordered by cost and likelihood, best first. `clashes` lists pairs of
    /// switches that cannot be combined.
    pub fn new(policy: &CurePolicy, switches: usize, clashes: Vec<[usize; 2]>) -> Self {
        Self {
            policy: policy.clone(),
            switches,
            clashes,
            phase: CurePhase::Baseline,
            baseline: Vec::new(),
            failed: 0,
            since: 0,
            leaking: Vec::new(),
            targets: Vec::new(),
            trials: Vec::new(),
            sets: 0,
            cure: Vec::new(),
            legs: 0,
        }
    }

    /// Returns the next step; repeated calls without new findings return the same step.
    #[expect(
        clippy::should_implement_trait,
        reason = "it does not end in None, and asking twice changes nothing"
    )]
    pub fn next(&mut self) -> CureStep {
        loop {
            if let CurePhase::Over(outcome) = &self.phase {
                return CureStep::Done(self.conclude(outcome.clone()));
            }
            if self.wants_baseline() {
                return CureStep::Run(SwitchSet::default());
            }
            if let Some(open) = self.trials.last().filter(|trial| !trial.closed) {
                return CureStep::Run(open.arm.clone());
            }
            self.advance();
        }
    }

    /// Adds the findings of a fresh process with these switches, one per workload.
    pub fn observe(&mut self, arm: &SwitchSet, findings: &[LegFinding]) {
        let ended = findings.iter().find_map(|finding| match &finding.ended {
            LegEnd::Crashed { why } | LegEnd::Killed { why } | LegEnd::Failed { why } => Some(why.clone()),
            _ => None,
        });
        self.add_leg(arm, ended.map_or_else(|| Ok(TrialLeg::from_findings(findings)), Err));
    }

    /// Records that no process ran with these switches, and the reason.
    pub fn observe_failure(&mut self, arm: &SwitchSet, why: String) {
        self.add_leg(arm, Err(why));
    }

    fn add_leg(&mut self, arm: &SwitchSet, leg: Result<TrialLeg, String>) {
        self.legs += 1;
        if arm.is_baseline() {
            match leg {
                Ok(leg) => {
                    (self.failed, self.since) = (0, 0);
                    self.baseline.push(leg);
                }
                Err(why) if self.failed + 1 >= self.policy.baseline_failures => {
                    self.phase = CurePhase::Over(CureOutcome::BaselineFailed { why });
                    return;
                }
                Err(_) => self.failed += 1,
            }
            self.judge_open();
            return;
        }
        self.since += 1;
        let Some(trial) = self.trials.last_mut().filter(|trial| !trial.closed && trial.arm == *arm) else {
            return;
        };
        match leg {
            Ok(leg) => trial.legs.push(leg),
            Err(why) => {
                trial.crashed = Some(why);
                trial.closed = true;
            }
        }
        self.judge_open();
    }

    /// Returns the conclusion that can be drawn now.
    pub fn interrupt(&self) -> CureConclusion {
        match &self.phase {
            CurePhase::Over(outcome) => self.conclude(outcome.clone()),
            _ => self.conclude(CureOutcome::Interrupted),
        }
    }

    /// Returns the progress for a display: finished trials, and the most trials by the end of this phase.
    pub fn progress(&self) -> (usize, usize) {
        let done = self.trials.iter().filter(|trial| trial.closed).count();
        let open = match &self.phase {
            CurePhase::Baseline | CurePhase::Alone => self.switches,
            CurePhase::Together => self.switches + 1,
            CurePhase::Sets(_, queue) | CurePhase::Reduce(_, queue) => done + queue.len() + 1,
            CurePhase::Over(_) => done,
        };
        (done, open.max(done))
    }

    fn wants_baseline(&self) -> bool {
        match self.baseline.len() {
            0 => return true,
            1 if self.phase == CurePhase::Baseline && self.baseline_is_unclear() => return true,
            // Before the first switch is tried, the scatter between processes must be known.
            few if self.phase != CurePhase::Baseline && few < self.policy.baseline_least => return true,
            _ => {}
        }
        match self.trials.last() {
            // Each inconclusive leg with a switch is followed by a baseline leg.
            Some(open) if !open.closed => !open.legs.is_empty() && self.since > 0,
            _ => self.phase != CurePhase::Baseline && self.since >= self.policy.baseline_every,
        }
    }

    /// Judges the present trial by all legs so far.
    fn judge_open(&mut self) {
        let informs = matches!(self.phase, CurePhase::Alone | CurePhase::Together);
        let Some(trial) = self.trials.last_mut() else { return };
        trial.judge(&self.policy, &self.baseline, &self.leaking);
        trial.close(&self.policy, &self.targets, informs);
    }

    fn begin_trial(&mut self, mut switches: Vec<usize>) {
        switches.sort_unstable();
        self.trials.push(SwitchTrial::new(SwitchSet { switches }));
    }
}

#[cfg(test)]
#[path = "bisect_tests.rs"]
mod tests;
