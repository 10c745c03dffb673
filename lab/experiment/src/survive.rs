//! Finds the switch that stops a crash: decides the next process and draws the conclusion.
//!
//! ```text
//!  each switch alone ── one survives as often as needed ──────────> that one
//!     │ none does
//!  all together ── they die ──────────────────────────────────────> nothing helps
//!     │ they survive
//!  together, minus one after the other ── dies? it is needed ─────> the rest
//! ```
//!
//! A trial ends with the first death. After each process that survives, one without switches runs, so that
//! drift of the machine affects both. The search runs nothing: the caller runs the process that
//! [`SurvivalSearch::next`] names, and passes the result to [`SurvivalSearch::observe`].

use serde::{Deserialize, Serialize};

use super::bisect::SwitchSet;
use super::crash::{CrashPolicy, CrashRun, judge, no_effect_probability};
use super::sequential::SwitchEffect;
use warden_policies::growth::GrowthVerdict;
use warden_policies::sample::MemoryKind;

/// Next step of the search.
#[derive(Clone, Debug, PartialEq)]
pub enum SurvivalStep {
    /// Run a fresh process with these switches under the workload, and report if it survived.
    Run(SwitchSet),
    /// The search is over.
    Done(SurvivalConclusion),
}

/// Outcome of the search for a switch that stops a crash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum SurvivalOutcome {
    /// A switch or a set of switches stops the crash.
    Cured,
    /// No usable combination of switches stops the crash.
    NotCured,
    /// The crash did not recur, so a cure cannot be shown.
    NotAgain,
    /// The server without switches failed to run.
    BaselineFailed {
        /// Reason.
        why: String,
    },
    /// The search was interrupted.
    Interrupted,
}

/// Result of a fresh process.
#[derive(Clone, Debug, PartialEq)]
pub enum SurvivalResult {
    /// The process died, or completed the work.
    Run {
        /// Number of requests, and true if the process died.
        run: CrashRun,
        /// Requests per second, if the process lived long enough.
        speed: Option<f64>,
        /// Verdict on each kind of memory.
        memory: Vec<(MemoryKind, GrowthVerdict)>,
    },
    /// The process did not start, or was stopped from outside, for this reason.
    Nothing(String),
}

/// Set of switches and the results of its processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SurvivalTrial {
    /// Indices of the switches.
    pub switches: Vec<usize>,
    /// Runs of the processes with these switches.
    pub runs: Vec<CrashRun>,
    /// Effect according to the runs.
    pub does: SwitchEffect,
    /// Reason why the trial was given up.
    pub failed: Option<String>,
    /// Median tokens per second of the processes with these switches.
    pub tokens_per_second: Option<f64>,
    /// Verdicts on each kind of memory, from the last process that survived.
    pub memory: Vec<(MemoryKind, GrowthVerdict)>,
    #[serde(skip)]
    speeds: Vec<f64>,
    #[serde(skip)]
    closed: bool,
}

/// Conclusion of the search, complete or interrupted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SurvivalConclusion {
    /// Outcome of the search.
    pub outcome: SurvivalOutcome,
    /// Indices of the switches that stop the crash.
    pub cure: Vec<usize>,
    /// Greatest probability of this result if the switches have no effect; `None` without a cure.
    pub doubt: Option<f64>,
    /// Runs of the processes without switches.
    pub without: Vec<CrashRun>,
    /// Median tokens per second without switches.
    pub tokens_per_second: Option<f64>,
    /// Trials in the order in which they ran.
    pub trials: Vec<SurvivalTrial>,
    /// Number of processes run.
    pub legs: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum SurvivalPhase {
    Alone,
    Together,
    /// A set that survives, and the switches still to remove, the next one last.
    Less(Vec<usize>, Vec<usize>),
    Over(SurvivalOutcome),
}

/// Search for the switch that stops a crash.
#[derive(Clone, Debug)]
pub struct SurvivalSearch {
    policy: CrashPolicy,
    switches: usize,
    clashes: Vec<[usize; 2]>,
    phase: SurvivalPhase,
    without: Vec<CrashRun>,
    speeds: Vec<f64>,
    /// A process without switches must follow the last survivor.
    due: bool,
    failed: u32,
    trials: Vec<SurvivalTrial>,
    cure: Vec<usize>,
    legs: usize,
}

impl SurvivalSearch {
    /// Creates a search among switches ordered by likelihood, best first. `clashes` lists pairs that cannot
    /// be combined, `without` the known repetitions of the crash.
    pub fn new(
        policy: &CrashPolicy,
        switches: usize,
        clashes: Vec<[usize; 2]>,
        without: &[CrashRun],
    ) -> Self {
        let phase = match (without.iter().any(|run| run.died), switches) {
            (false, _) => SurvivalPhase::Over(SurvivalOutcome::NotAgain),
            (true, 0) => SurvivalPhase::Over(SurvivalOutcome::NotCured),
            (true, _) => SurvivalPhase::Alone,
        };
        let mut search = Self {
            policy: policy.clone(),
            switches,
            clashes,
            phase,
            without: without.to_vec(),
            speeds: Vec::new(),
            due: false,
            failed: 0,
            trials: Vec::new(),
            cure: Vec::new(),
            legs: 0,
        };
        if search.phase == SurvivalPhase::Alone {
            search.begin(vec![0]);
        }
        search
    }

    /// Returns the next step; repeated calls without a new result return the same step.
    #[expect(
        clippy::should_implement_trait,
        reason = "it does not end in None, and asking twice changes nothing"
    )]
    pub fn next(&mut self) -> SurvivalStep {
        loop {
            if let SurvivalPhase::Over(outcome) = &self.phase {
                return SurvivalStep::Done(self.conclude(outcome.clone()));
            }
            if self.due {
                return SurvivalStep::Run(SwitchSet::default());
            }
            if let Some(open) = self.trials.last().filter(|trial| !trial.closed) {
                return SurvivalStep::Run(SwitchSet { switches: open.switches.clone() });
            }
            self.advance();
        }
    }

    /// Adds the result of a fresh process with these switches.
    pub fn observe(&mut self, arm: &SwitchSet, seen: SurvivalResult) {
        self.legs += 1;
        if arm.is_baseline() {
            self.due = false;
            match seen {
                SurvivalResult::Run { run, speed, .. } => {
                    self.failed = 0;
                    self.without.push(run);
                    self.speeds.extend(speed);
                }
                SurvivalResult::Nothing(why) => {
                    self.failed += 1;
                    self.due = true;
                    if self.failed >= self.policy.baseline_failures {
                        self.phase = SurvivalPhase::Over(SurvivalOutcome::BaselineFailed { why });
                    }
                }
            }
        } else if let Some(trial) =
            self.trials.last_mut().filter(|trial| !trial.closed && trial.switches == arm.switches)
        {
            match seen {
                SurvivalResult::Run { run, speed, memory } => {
                    trial.runs.push(run);
                    trial.speeds.extend(speed);
                    if !run.died {
                        trial.memory = memory;
                        self.due = true;
                    }
                }
                SurvivalResult::Nothing(why) => {
                    trial.failed = Some(why);
                    trial.closed = true;
                }
            }
        }
        self.judge_open();
    }

    /// Returns the conclusion that can be drawn now.
    pub fn interrupt(&self) -> SurvivalConclusion {
        match &self.phase {
            SurvivalPhase::Over(outcome) => self.conclude(outcome.clone()),
            _ => self.conclude(SurvivalOutcome::Interrupted),
        }
    }

    /// Returns the number of finished trials, and an estimate of the most trials.
    pub fn progress(&self) -> (usize, usize) {
        let done = self.trials.iter().filter(|trial| trial.closed).count();
        let open = match &self.phase {
            SurvivalPhase::Alone => self.switches,
            SurvivalPhase::Together => self.switches + 1,
            SurvivalPhase::Less(_, queue) => done + queue.len() + 1,
            SurvivalPhase::Over(_) => done,
        };
        (done, open.max(done))
    }

    fn judge_open(&mut self) {
        let Some(trial) = self.trials.last_mut().filter(|trial| !trial.closed) else { return };
        trial.does = judge(&self.policy, &self.without, &trial.runs);
        trial.closed = trial.does != SwitchEffect::Undecided || trial.runs.len() >= self.policy.runs_most;
        if trial.does == SwitchEffect::Stops {
            self.due = false;
        }
    }

    fn begin(&mut self, mut switches: Vec<usize>) {
        switches.sort_unstable();
        self.trials.push(SurvivalTrial {
            switches,
            runs: Vec::new(),
            does: SwitchEffect::Undecided,
            failed: None,
            tokens_per_second: None,
            memory: Vec::new(),
            speeds: Vec::new(),
            closed: false,
        });
    }

    fn advance(&mut self) {
        let stops = self.trials.last().is_some_and(|trial| trial.does == SwitchEffect::Stops);
        let last = self.trials.last().map(|trial| trial.switches.clone()).unwrap_or_default();
        match std::mem::replace(&mut self.phase, SurvivalPhase::Together) {
            SurvivalPhase::Alone if stops => self.finish_with(last),
            SurvivalPhase::Alone if self.trials.len() < self.switches => {
                self.phase = SurvivalPhase::Alone;
                self.begin(vec![self.trials.len()]);
            }
            SurvivalPhase::Alone => {
                let all = self.compatible_switches();
                if all.len() < 2 {
                    self.phase = SurvivalPhase::Over(SurvivalOutcome::NotCured);
                } else {
                    self.begin(all);
                }
            }
            SurvivalPhase::Together if stops => self.remove_next(last.clone(), last),
            SurvivalPhase::Together => self.phase = SurvivalPhase::Over(SurvivalOutcome::NotCured),
            SurvivalPhase::Less(_, queue) if stops => self.remove_next(last, queue),
            SurvivalPhase::Less(good, queue) => self.remove_next(good, queue),
            over @ SurvivalPhase::Over(_) => self.phase = over,
        }
    }

    fn remove_next(&mut self, good: Vec<usize>, mut queue: Vec<usize>) {
        while let Some(away) = queue.pop() {
            let rest: Vec<usize> = good.iter().copied().filter(|one| *one != away).collect();
            // Sets of one switch were already tried.
            if rest.len() > 1 && rest.len() < good.len() {
                self.begin(rest);
                self.phase = SurvivalPhase::Less(good, queue);
                return;
            }
        }
        self.finish_with(good);
    }

    fn finish_with(&mut self, cure: Vec<usize>) {
        self.cure = cure;
        self.phase = SurvivalPhase::Over(SurvivalOutcome::Cured);
    }

    /// Returns switches that can be combined and that each let the server start, earlier ones first.
    fn compatible_switches(&self) -> Vec<usize> {
        let mut all: Vec<usize> = Vec::new();
        for one in 0..self.switches {
            let starts = self.trials.iter().all(|trial| trial.switches != [one] || trial.failed.is_none());
            let clashes =
                |other: &usize| self.clashes.iter().any(|pair| pair.contains(&one) && pair.contains(other));
            if starts && !all.iter().any(clashes) {
                all.push(one);
            }
        }
        all
    }

    fn conclude(&self, outcome: SurvivalOutcome) -> SurvivalConclusion {
        let own = self.trials.iter().find(|trial| !self.cure.is_empty() && trial.switches == self.cure);
        let mut trials = self.trials.clone();
        for trial in &mut trials {
            trial.tokens_per_second = median_of(&trial.speeds);
        }
        SurvivalConclusion {
            outcome,
            cure: self.cure.clone(),
            doubt: own.map(|trial| no_effect_probability(&self.without, &trial.runs)),
            without: self.without.clone(),
            tokens_per_second: median_of(&self.speeds),
            trials,
            legs: self.legs,
        }
    }
}

fn median_of(values: &[f64]) -> Option<f64> {
    warden_policies::growth::stats::median(&mut values.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches with a server that dies at its 22nd request unless one of these sets is on.
    fn search(switches: usize, cures: &[&[usize]], broken: &[usize]) -> (SurvivalConclusion, Vec<SwitchSet>) {
        let policy = warden_policies::defaults().diagnose.crash.clone();
        let known = [CrashRun { requests: 22, died: true }; 5];
        let mut search = SurvivalSearch::new(&policy, switches, vec![[0, 1]], &known);
        let mut arms = Vec::new();
        loop {
            let arm = match search.next() {
                SurvivalStep::Done(conclusion) => return (conclusion, arms),
                SurvivalStep::Run(arm) => arm,
            };
            assert_eq!(search.next(), SurvivalStep::Run(arm.clone()), "asking twice changes nothing");
            assert!(!(arm.switches.contains(&0) && arm.switches.contains(&1)), "they clash: {arm:?}");
            let survives = cures.iter().any(|set| set.iter().all(|one| arm.switches.contains(one)));
            let run = if survives {
                CrashRun { requests: 184, died: false }
            } else {
                CrashRun { requests: 22, died: true }
            };
            let seen = if arm.switches.iter().any(|one| broken.contains(one)) {
                SurvivalResult::Nothing("it did not start".into())
            } else {
                SurvivalResult::Run {
                    run,
                    speed: Some(if survives { 80.0 } else { 100.0 }),
                    memory: Vec::new(),
                }
            };
            search.observe(&arm, seen);
            arms.push(arm);
            assert!(arms.len() < 300, "it does not end");
        }
    }

    #[test]
    fn the_switch_that_stops_it_is_found_and_the_useless_ones_cost_a_process_each() {
        let (found, arms) = search(4, &[&[2]], &[1]);
        assert_eq!((&found.outcome, &found.cure), (&SurvivalOutcome::Cured, &vec![2]));
        assert!(arms.len() <= 8, "{arms:?}");
        let most = warden_policies::defaults().diagnose.crash.false_cure;
        assert!(found.doubt.is_some_and(|doubt| doubt <= most), "{found:?}");
        assert_eq!(found.trials[0].does, SwitchEffect::Nothing);
        assert!(found.trials[1].failed.is_some());
        assert_eq!((found.tokens_per_second, found.trials[2].tokens_per_second), (Some(100.0), Some(80.0)));
        assert!(!arms.iter().any(|arm| arm.switches.contains(&3)), "it was not needed");
    }

    #[test]
    fn what_takes_two_is_found_by_taking_away_and_what_nothing_stops_is_told() {
        let (found, _) = search(5, &[&[1, 3]], &[]);
        // 0 comes before 1 and they clash, so no set contains 1.
        assert_eq!((found.outcome, found.cure), (SurvivalOutcome::NotCured, vec![]));
        let (found, _) = search(5, &[&[2, 4]], &[]);
        assert_eq!((found.outcome, found.cure), (SurvivalOutcome::Cured, vec![2, 4]));
        let (found, arms) = search(3, &[], &[]);
        assert_eq!(found.outcome, SurvivalOutcome::NotCured);
        assert_eq!(arms.len(), 4, "each alone, and all that go together");
    }

    #[test]
    fn a_crash_that_did_not_come_again_and_a_server_that_cannot_be_run_end_it() {
        let policy = warden_policies::defaults().diagnose.crash.clone();
        let gone = [CrashRun { requests: 184, died: false }; 2];
        let mut never = SurvivalSearch::new(&policy, 2, Vec::new(), &gone);
        assert!(matches!(
            never.next(),
            SurvivalStep::Done(SurvivalConclusion { outcome: SurvivalOutcome::NotAgain, .. })
        ));
        let mut broken =
            SurvivalSearch::new(&policy, 2, Vec::new(), &[CrashRun { requests: 22, died: true }; 5]);
        let well = SurvivalResult::Run {
            run: CrashRun { requests: 184, died: false },
            speed: None,
            memory: Vec::new(),
        };
        broken.observe(&SwitchSet { switches: vec![0] }, well);
        assert_eq!(broken.interrupt().outcome, SurvivalOutcome::Interrupted);
        for _ in 0..policy.baseline_failures {
            assert_eq!(broken.next(), SurvivalStep::Run(SwitchSet::default()));
            broken.observe(&SwitchSet::default(), SurvivalResult::Nothing("killed".into()));
        }
        assert!(matches!(
            broken.next(),
            SurvivalStep::Done(SurvivalConclusion { outcome: SurvivalOutcome::BaselineFailed { why }, .. }) if why == "killed"
        ));
    }
}
