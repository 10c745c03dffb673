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

use serde::{Deserialize, Serialize};

use super::sequential::CurePolicy;
use super::trial::{Leg, Trial};
use super::{Ended, Finding};
use crate::growth::Verdict;

mod sets;

pub use super::trial::{Arm, Beside, Cost, Track, TrialReport};

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Start a fresh process with these switches, do all the work, and tell what was found.
    Run(Arm),
    /// Nothing more.
    Done(Conclusion),
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Outcome {
    /// Without any switch nothing leaks.
    NothingToCure,
    /// Everything that leaked is stopped.
    Cured,
    /// Some of it is stopped.
    PartlyCured,
    /// Nothing is stopped.
    NotCured,
    /// The server cannot do the work without any switch.
    BaselineFailed {
        /// Why.
        why: String,
    },
    /// It was broken off.
    Interrupted,
}

/// What was found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conclusion {
    /// How it ended.
    pub outcome: Outcome,
    /// Memories that leak without any switch.
    pub leaking: Vec<Track>,
    /// The smallest set that was found to stop what can be stopped, as indices of the switches.
    pub cure: Vec<usize>,
    /// What it stops.
    pub stopped: Vec<Track>,
    /// For each memory that something stops: the smallest set that was seen to.
    pub by_track: Vec<(Track, Vec<usize>)>,
    /// All that was tried, in order.
    pub trials: Vec<TrialReport>,
    /// Processes that were run, those without switches included.
    pub legs: usize,
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
    /// Baseline legs that failed in a row, and why the last did.
    failed: (u32, String),
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
            failed: (0, String::new()),
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
        self.legs += 1;
        let crash = findings.iter().find_map(|finding| match &finding.ended {
            Ended::Crashed { why } => Some(why.clone()),
            _ => None,
        });
        if arm.is_baseline() {
            if let Some(why) = crash {
                self.failed = (self.failed.0 + 1, why);
            } else {
                self.failed.0 = 0;
                self.since = 0;
                self.baseline.push(Leg::of(findings));
            }
            if self.failed.0 >= self.policy.baseline_failures {
                self.phase = Phase::Over(Outcome::BaselineFailed { why: self.failed.1.clone() });
                return;
            }
            self.look();
            return;
        }
        self.since += 1;
        let Some(trial) = self.trials.last_mut().filter(|trial| !trial.closed && trial.arm == *arm) else {
            return;
        };
        match crash {
            Some(why) => {
                trial.crashed = Some(why);
                trial.closed = true;
            }
            None => trial.legs.push(Leg::of(findings)),
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
            _ => {}
        }
        match self.trials.last() {
            // Each leg with a switch that left something open is followed by one without.
            Some(open) if !open.closed => !open.legs.is_empty() && self.since > 0,
            _ => self.phase != Phase::Baseline && self.since >= self.policy.baseline_every,
        }
    }

    /// The first leg alone does not say whether anything leaks.
    fn unclear(&self) -> bool {
        let all = || self.baseline.iter().flat_map(|leg| &leg.tracks).map(|(.., verdict)| *verdict);
        !all().any(|verdict| verdict == Verdict::Leaking)
            && all().any(|verdict| matches!(verdict, Verdict::Suspected | Verdict::Warming))
    }

    /// Memories that leak, or were suspected in two legs.
    fn find_leaks(&self) -> Vec<Track> {
        let mut tracks: Vec<Track> = Vec::new();
        for (track, ..) in self.baseline.iter().flat_map(|leg| &leg.tracks) {
            let verdicts: Vec<Verdict> = self
                .baseline
                .iter()
                .filter_map(|leg| leg.of_track(*track).map(|(_, verdict)| verdict))
                .collect();
            let suspect = verdicts.iter().filter(|verdict| **verdict >= Verdict::Suspected).count();
            let leaks = verdicts.contains(&Verdict::Leaking) || suspect > 1;
            if leaks && !tracks.contains(track) {
                tracks.push(*track);
            }
        }
        tracks
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

    /// Nothing is open: what comes next.
    fn advance(&mut self) {
        match std::mem::replace(&mut self.phase, Phase::Baseline) {
            Phase::Baseline => {
                self.leaking = self.find_leaks();
                self.targets.clone_from(&self.leaking);
                self.phase = match (self.leaking.is_empty(), self.switches) {
                    (true, _) => Phase::Over(Outcome::NothingToCure),
                    (false, 0) => Phase::Over(Outcome::NotCured),
                    (false, _) => {
                        self.begin(vec![0]);
                        Phase::Alone
                    }
                };
            }
            Phase::Alone => self.phase = self.after_one(),
            Phase::Together => self.phase = self.after_all(),
            Phase::Sets(size, queue) => self.phase = self.after_set(size, queue),
            Phase::Reduce(good, queue) => self.phase = self.after_less(good, queue),
            over @ Phase::Over(_) => self.phase = over,
        }
    }

    fn after_one(&mut self) -> Phase {
        let best = self.best_alone();
        let dear = |trial: &Trial| trial.cost(&self.baseline).is_dear(self.policy.dear);
        let enough = best.is_some_and(|trial| !dear(&self.trials[trial]));
        // Alone, every switch has one trial, so their number is that of the next one.
        let next = self.trials.len();
        if next < self.switches && !enough {
            self.begin(vec![next]);
            return Phase::Alone;
        }
        if let Some(best) = best {
            return self.over(self.trials[best].arm.switches.clone());
        }
        let all = self.compatible();
        if all.len() < 2 {
            return self.settle_for_alone();
        }
        self.begin(all);
        Phase::Together
    }

    fn after_all(&mut self) -> Phase {
        let Some(all) = self.trials.last() else { return Phase::Over(Outcome::NotCured) };
        let started = all.crashed.is_none();
        if started {
            let stopped = |track: &Track| self.trials.iter().any(|trial| trial.stops(*track));
            self.targets = self.leaking.iter().copied().filter(|track| stopped(track)).collect();
        }
        if self.targets.is_empty() {
            return Phase::Over(Outcome::NotCured);
        }
        // With what cannot be stopped out of the way, one switch may be enough.
        if let Some(best) = self.best_alone() {
            return self.over(self.trials[best].arm.switches.clone());
        }
        self.after_set(1, Vec::new())
    }

    fn after_set(&mut self, size: usize, mut queue: Vec<Vec<usize>>) -> Phase {
        if size > 1
            && let Some(trial) = self.trials.last().filter(|trial| trial.stops_all(&self.targets))
        {
            return self.over(trial.arm.switches.clone());
        }
        let mut size = size;
        while self.sets < self.policy.sets_most {
            while let Some(set) = queue.pop() {
                if !self.fails(&set) {
                    self.sets += 1;
                    self.begin(set);
                    return Phase::Sets(size, queue);
                }
            }
            size += 1;
            if size >= self.switches || size > self.policy.set_size {
                break;
            }
            queue = self.plausible(size);
        }
        // Taking away needs a set that does it.
        let good = self.trials.iter().find(|trial| trial.stops_all(&self.targets));
        match good.map(|trial| trial.arm.switches.clone()) {
            Some(good) => {
                let queue = self.spare(&good);
                self.after_less(good, queue)
            }
            None => self.settle_for_alone(),
        }
    }

    fn after_less(&mut self, mut good: Vec<usize>, mut queue: Vec<Vec<usize>>) -> Phase {
        if let Some(trial) = self.trials.last()
            && trial.stops_all(&self.targets)
            && trial.arm.switches.len() < good.len()
        {
            good.clone_from(&trial.arm.switches);
        }
        while let Some(away) = queue.pop() {
            let less: Vec<usize> = good.iter().copied().filter(|one| !away.contains(one)).collect();
            if less.is_empty() || less.len() == good.len() || self.fails(&less) {
                continue;
            }
            self.begin(less);
            return Phase::Reduce(good, queue);
        }
        self.over(good)
    }

    /// The cheapest switch that alone stops all targets.
    fn best_alone(&self) -> Option<usize> {
        let does = |trial: &&(usize, &Trial)| {
            trial.1.arm.switches.len() == 1 && trial.1.closed && trial.1.stops_all(&self.targets)
        };
        let price = |trial: &Trial| trial.cost(&self.baseline).lost();
        let all: Vec<(usize, &Trial)> = self.trials.iter().enumerate().collect();
        let cheapest = all.iter().filter(does).min_by(|a, b| price(a.1).total_cmp(&price(b.1)));
        // Between those that cost next to nothing the order decides, not the noise of the clock.
        let least = price(cheapest?.1) + self.policy.dear;
        all.iter().filter(does).find(|trial| price(trial.1) <= least).map(|trial| trial.0)
    }

    /// No set does it all: the switches that stop a memory alone, without repetition.
    fn settle_for_alone(&mut self) -> Phase {
        let mut chosen: Vec<usize> = Vec::new();
        for track in self.leaking.clone() {
            let stops = |one: &usize| self.alone(*one).is_some_and(|trial| trial.stops(track));
            if chosen.iter().any(stops) {
                continue;
            }
            let free = |one: &usize| chosen.iter().all(|other| !self.clash(*one, *other));
            if let Some(one) = (0..self.switches).filter(stops).find(free) {
                chosen.push(one);
            }
        }
        // Only what was seen to work is told: several together were not.
        chosen.truncate(1);
        self.over(chosen)
    }

    fn over(&mut self, cure: Vec<usize>) -> Phase {
        self.cure = cure;
        let stopped = self.stopped();
        Phase::Over(if stopped.is_empty() {
            Outcome::NotCured
        } else if self.leaking.iter().all(|track| stopped.contains(track)) {
            Outcome::Cured
        } else {
            Outcome::PartlyCured
        })
    }

    /// What the cure stops.
    fn stopped(&self) -> Vec<Track> {
        let own = self.trials.iter().find(|trial| trial.arm.switches == self.cure);
        let Some(own) = own else { return Vec::new() };
        self.leaking.iter().copied().filter(|track| own.stops(*track)).collect()
    }

    fn conclude(&self, outcome: Outcome) -> Conclusion {
        let mut by_track = Vec::new();
        for track in &self.leaking {
            let stops = self.trials.iter().filter(|trial| trial.stops(*track));
            if let Some(least) = stops.min_by_key(|trial| trial.arm.switches.len()) {
                by_track.push((*track, least.arm.switches.clone()));
            }
        }
        Conclusion {
            outcome,
            leaking: self.leaking.clone(),
            cure: self.cure.clone(),
            stopped: self.stopped(),
            by_track,
            trials: self.trials.iter().map(|trial| trial.report(&self.baseline)).collect(),
            legs: self.legs,
        }
    }
}

#[cfg(test)]
#[path = "bisect_tests.rs"]
mod tests;
