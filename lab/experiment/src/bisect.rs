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
//! Processes with and without switches alternate, so that drift of the machine affects both. A trial ends
//! once [`judge`](super::sequential::judge) has decided. Two assumptions save trials: more switches never
//! stop less growth, and two switches together stop at most the sum of their effects. If the second is wrong,
//! removing switches one by one still finds a minimal set.
//!
//! The planner runs nothing: the caller runs the process that [`CurePlanner::next`] names, and passes the
//! findings to [`CurePlanner::observe`].

use serde::{Deserialize, Serialize};
use warden_policies::growth::GrowthVerdict;

use super::LegFinding;
use super::sequential::CurePolicy;
use super::trial::{SwitchTrial, TrialLeg};

mod search;

pub use super::trial::{ComparedFigure, SwitchCost, SwitchSet, TrialReport, WorkloadMemory};

/// Next step of a bisection.
#[derive(Clone, Debug, PartialEq)]
pub enum CureStep {
    /// Run a fresh process with these switches under all workloads, and report the findings.
    Run(SwitchSet),
    /// The bisection is over.
    Done(CureConclusion),
}

/// Outcome of the search for a cure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum CureOutcome {
    /// Nothing leaks without switches.
    NothingToCure,
    /// No process ran, or none ran long enough to show a leak.
    NotKnown {
        /// Reason.
        why: String,
    },
    /// Switches stop all leaks.
    Cured,
    /// Switches stop some of the leaks.
    PartlyCured,
    /// Switches stop no leak.
    NotCured,
    /// The server fails under the work even without switches.
    BaselineFailed {
        /// Reason.
        why: String,
    },
    /// The bisection was interrupted.
    Interrupted,
}

/// Conclusion of the search for a cure, complete or interrupted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CureConclusion {
    /// Outcome of the bisection.
    pub outcome: CureOutcome,
    /// Kinds of memory that leak without switches, by workload.
    pub leaking: Vec<WorkloadMemory>,
    /// Smallest set found that stops every curable leak, as indices of switches.
    pub cure: Vec<usize>,
    /// Leaks that this set stops.
    pub stopped: Vec<WorkloadMemory>,
    /// For each curable leak, the smallest set that stops it.
    pub by_track: Vec<(WorkloadMemory, Vec<usize>)>,
    /// Trials in order.
    pub trials: Vec<TrialReport>,
    /// Number of processes run, baseline included.
    pub legs: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum CurePhase {
    Baseline,
    Alone,
    Together,
    /// Size of the sets in trial, and the untried sets of this size, the next one last.
    Sets(usize, Vec<Vec<usize>>),
    /// A set that works, and the groups of switches to remove from it, the next one last.
    Reduce(Vec<usize>, Vec<Vec<usize>>),
    Over(CureOutcome),
}

#[derive(Clone, Debug, Default)]
struct BaselineLegs {
    legs: Vec<TrialLeg>,
    failed: u32,
    /// Legs with switches since the last leg without.
    since: u32,
}

impl BaselineLegs {
    /// Adds a leg; fails with the last reason if too many legs have failed in a row.
    fn add(&mut self, leg: Result<TrialLeg, String>, failures: u32) -> Result<(), String> {
        match leg {
            Ok(leg) => {
                (self.failed, self.since) = (0, 0);
                self.legs.push(leg);
            }
            Err(why) if self.failed + 1 >= failures => return Err(why),
            Err(_) => self.failed += 1,
        }
        Ok(())
    }

    /// Returns true if a second leg is needed: a suspected leak may exist next to a certain one, and a cure
    /// has to stop both.
    fn is_unclear(&self) -> bool {
        let all = || self.legs.iter().flat_map(|leg| &leg.tracks).map(|(.., verdict)| *verdict);
        let leaks = all().any(GrowthVerdict::leaks);
        // A second leg would have too few readings as well: repeat a short leg only if no leak is certain.
        all().any(|verdict| verdict == GrowthVerdict::Suspected || (!verdict.is_known() && !leaks))
    }

    /// Returns the kinds of memory that leak in a leg, or are suspected in two.
    fn find_leaks(&self) -> Vec<WorkloadMemory> {
        let mut tracks: Vec<WorkloadMemory> = Vec::new();
        for (track, ..) in self.legs.iter().flat_map(|leg| &leg.tracks) {
            let own = self.legs.iter().filter_map(|leg| leg.of_track(*track));
            let verdicts: Vec<GrowthVerdict> = own.map(|(_, verdict)| verdict).collect();
            let suspect = verdicts.iter().filter(|verdict| verdict.grows()).count();
            let leaks = verdicts.contains(&GrowthVerdict::Leaking) || suspect > 1;
            if leaks && !tracks.contains(track) {
                tracks.push(*track);
            }
        }
        tracks
    }

    fn nothing_found(&self) -> CureOutcome {
        if self.legs.iter().all(|leg| leg.short) {
            let why = "there are too few readings to say whether anything leaks".to_owned();
            return CureOutcome::NotKnown { why };
        }
        CureOutcome::NothingToCure
    }
}

/// Search for the smallest set of switches that stops all curable leaks.
#[derive(Clone, Debug)]
pub struct CurePlanner {
    policy: CurePolicy,
    switches: usize,
    clashes: Vec<[usize; 2]>,
    phase: CurePhase,
    baseline: BaselineLegs,
    leaking: Vec<WorkloadMemory>,
    /// Leaks that some switch can stop; until known, all leaks.
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
            baseline: BaselineLegs::default(),
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
        let failure = findings.iter().find_map(|finding| finding.ended.failure());
        self.add_leg(
            arm,
            failure.map_or_else(|| Ok(TrialLeg::from_findings(findings)), |why| Err(why.clone())),
        );
    }

    /// Records that no process ran with these switches, and the reason.
    pub fn observe_failure(&mut self, arm: &SwitchSet, why: String) {
        self.add_leg(arm, Err(why));
    }

    fn add_leg(&mut self, arm: &SwitchSet, leg: Result<TrialLeg, String>) {
        self.legs += 1;
        if arm.is_baseline() {
            match self.baseline.add(leg, self.policy.baseline_failures) {
                Ok(()) => self.judge_open(),
                Err(why) => self.phase = CurePhase::Over(CureOutcome::BaselineFailed { why }),
            }
            return;
        }
        self.baseline.since += 1;
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

    /// Returns the number of finished trials, and the most trials by the end of this phase.
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
        match self.baseline.legs.len() {
            0 => return true,
            1 if self.phase == CurePhase::Baseline && self.baseline.is_unclear() => return true,
            // Before the first switch is tried, the scatter between processes must be known.
            few if self.phase != CurePhase::Baseline && few < self.policy.baseline_least => return true,
            _ => {}
        }
        match self.trials.last() {
            Some(open) if !open.closed => !open.legs.is_empty() && self.baseline.since > 0,
            _ => self.phase != CurePhase::Baseline && self.baseline.since >= self.policy.baseline_every,
        }
    }

    fn judge_open(&mut self) {
        let informs = matches!(self.phase, CurePhase::Alone | CurePhase::Together);
        let Some(trial) = self.trials.last_mut() else { return };
        trial.judge(&self.policy, &self.baseline.legs, &self.leaking);
        trial.close(&self.policy, &self.targets, informs);
    }

    fn begin_trial(&mut self, mut switches: Vec<usize>) {
        switches.sort_unstable();
        self.trials.push(SwitchTrial::new(SwitchSet { switches }));
    }

    fn finish_with(&mut self, cure: Vec<usize>) -> CurePhase {
        self.cure = cure;
        let stopped = self.stopped();
        CurePhase::Over(if stopped.is_empty() {
            CureOutcome::NotCured
        } else if self.leaking.iter().all(|track| stopped.contains(track)) {
            CureOutcome::Cured
        } else {
            CureOutcome::PartlyCured
        })
    }

    fn stopped(&self) -> Vec<WorkloadMemory> {
        let own = self.trials.iter().find(|trial| trial.arm.switches == self.cure);
        let Some(own) = own else { return Vec::new() };
        self.leaking.iter().copied().filter(|track| own.stops(*track)).collect()
    }

    fn conclude(&self, outcome: CureOutcome) -> CureConclusion {
        let mut by_track = Vec::new();
        for track in &self.leaking {
            let stops = self.trials.iter().filter(|trial| trial.stops(*track));
            if let Some(least) = stops.min_by_key(|trial| trial.arm.switches.len()) {
                by_track.push((*track, least.arm.switches.clone()));
            }
        }
        CureConclusion {
            outcome,
            leaking: self.leaking.clone(),
            cure: self.cure.clone(),
            stopped: self.stopped(),
            by_track,
            trials: self.trials.iter().map(|trial| trial.report(&self.baseline.legs)).collect(),
            legs: self.legs,
        }
    }
}

#[cfg(test)]
#[path = "bisect_tests.rs"]
mod tests;
