//! Which switches stop the growth: what to run next, and what follows from it.
//!
//! ```text
//!  baseline ── no leak ──────────────────────────────────────────────> nothing to cure
//!     │ leaks
//!     v
//!  each switch alone ── one stops everything ────────────────────────> that one (the cheapest, if the first is dear)
//!     │ none does
//!     v
//!  all together ── they stop nothing ────────────────────────────────> no cure
//!     │ they stop some memories: those are the targets
//!     v
//!  small sets, by size, that can do it by what each did alone ── one does ──> that set
//!     │ none
//!     v
//!  all together, less one after the other ───────────────────────────> what is left
//! ```
//!
//! Every trial alternates with the baseline, so that what changes on the machine meanwhile changes both, and ends as soon
//! as [`judge`](super::sequential::judge) has decided. Two things are taken for granted, and used to leave trials out:
//! more switches never stop less, and what two do together is at most what they do alone, added up. Where the second does
//! not hold, taking away one by one still finds a set of which nothing can be spared.
//!
//! It never runs anything: whoever has it asks [`Planner::next`], runs that, and tells [`Planner::observe`].

use super::sequential::CurePolicy;
use super::trial::{Leg, Trial};
use super::{Ended, Finding};

mod baseline;
mod conclusion;
mod search;
mod sets;

pub use self::conclusion::{Conclusion, Outcome};
pub use super::trial::{Arm, Beside, Cost, Track, TrialReport};

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Start a fresh process with these switches, do all the work, and tell what was found.
    Run(Arm),
    /// Nothing more.
    Done(Conclusion),
}

/// What is tried at present.
#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Baseline,
    Alone,
    Together,
    /// Sets to try, the next one last, of this size.
    Sets(usize, Vec<Vec<usize>>),
    /// A set that does it, and what has not been taken away yet for a try, the next one last.
    Reduce(Vec<usize>, Vec<Vec<usize>>),
    Over(Outcome),
}

/// The state machine. See the module.
#[derive(Clone, Debug)]
pub struct Planner {
    policy: CurePolicy,
    switches: usize,
    clashes: Vec<[usize; 2]>,
    phase: Phase,
    baseline: Vec<Leg>,
    /// Baseline legs that failed in a row.
    failed: u32,
    /// Legs with switches since the last baseline.
    since: u32,
    leaking: Vec<Track>,
    /// What something can stop; everything that leaks until that is known.
    targets: Vec<Track>,
    trials: Vec<Trial>,
    sets: u32,
    cure: Vec<usize>,
    legs: usize,
}

impl Planner {
    /// For so many switches, the cheapest and likeliest first; `clashes` are pairs that cannot be used together.
    pub fn new(policy: &CurePolicy, switches: usize, clashes: Vec<[usize; 2]>) -> Self {
        Self {
            policy: policy.clone(),
            switches,
            clashes,
            phase: Phase::Baseline,
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

    /// What to run now. Asking again without telling anything gives the same.
    #[expect(
        clippy::should_implement_trait,
        reason = "it does not end in None, and asking twice changes nothing"
    )]
    pub fn next(&mut self) -> Step {
        loop {
            if let Phase::Over(outcome) = &self.phase {
                return Step::Done(self.conclude(outcome.clone()));
            }
            if self.wants_baseline() {
                return Step::Run(Arm::default());
            }
            if let Some(open) = self.trials.last().filter(|trial| !trial.closed) {
                return Step::Run(open.arm.clone());
            }
            self.advance();
        }
    }

    /// Takes in what a fresh process with these switches did: one finding for each workload.
    pub fn observe(&mut self, arm: &Arm, findings: &[Finding]) {
        let ended = findings.iter().find_map(|finding| match &finding.ended {
            Ended::Crashed { why } | Ended::Killed { why } | Ended::Failed { why } => Some(why.clone()),
            _ => None,
        });
        self.take(arm, ended.map_or_else(|| Ok(Leg::of(findings)), Err));
    }

    /// Takes in that there is no process with these switches, and why.
    pub fn observe_failure(&mut self, arm: &Arm, why: String) {
        self.take(arm, Err(why));
    }

    fn take(&mut self, arm: &Arm, leg: Result<Leg, String>) {
        self.legs += 1;
        if arm.is_baseline() {
            match leg {
                Ok(leg) => {
                    (self.failed, self.since) = (0, 0);
                    self.baseline.push(leg);
                }
                Err(why) if self.failed + 1 >= self.policy.baseline_failures => {
                    self.phase = Phase::Over(Outcome::BaselineFailed { why });
                    return;
                }
                Err(_) => self.failed += 1,
            }
            self.look();
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
        self.look();
    }

    /// What is known if nothing more is run.
    pub fn interrupt(&self) -> Conclusion {
        match &self.phase {
            Phase::Over(outcome) => self.conclude(outcome.clone()),
            _ => self.conclude(Outcome::Interrupted),
        }
    }

    /// How far it is, for a display: trials that are over, and trials that there will be at most in this phase and
    /// the earlier ones.
    pub fn progress(&self) -> (usize, usize) {
        let done = self.trials.iter().filter(|trial| trial.closed).count();
        let open = match &self.phase {
            Phase::Baseline | Phase::Alone => self.switches,
            Phase::Together => self.switches + 1,
            Phase::Sets(_, queue) | Phase::Reduce(_, queue) => done + queue.len() + 1,
            Phase::Over(_) => done,
        };
        (done, open.max(done))
    }

    fn wants_baseline(&self) -> bool {
        match self.baseline.len() {
            0 => return true,
            1 if self.phase == Phase::Baseline && self.unclear() => return true,
            // Before the first switch: without knowing how much processes differ nothing is said of any.
            few if self.phase != Phase::Baseline && few < self.policy.baseline_least => return true,
            _ => {}
        }
        match self.trials.last() {
            // Each leg with a switch that left something open is followed by one without.
            Some(open) if !open.closed => !open.legs.is_empty() && self.since > 0,
            _ => self.phase != Phase::Baseline && self.since >= self.policy.baseline_every,
        }
    }

    /// Judges the open trial by all legs so far.
    fn look(&mut self) {
        let informs = matches!(self.phase, Phase::Alone | Phase::Together);
        let Some(trial) = self.trials.last_mut() else { return };
        trial.judge(&self.policy, &self.baseline, &self.leaking);
        trial.close(&self.policy, &self.targets, informs);
    }

    fn begin(&mut self, mut switches: Vec<usize>) {
        switches.sort_unstable();
        self.trials.push(Trial::new(Arm { switches }));
    }
}

#[cfg(test)]
#[path = "bisect_tests.rs"]
mod tests;
