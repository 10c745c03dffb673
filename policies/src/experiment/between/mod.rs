//! Which revision of a line brought what a newer one does, or ended what an older one did: what to run next, and what follows from it.
//!
//! ```text
//!  both ends ── one leaks or dies, the other does not ──> that is the symptom; who has it is ill
//!     v
//!  the healthy end beside the ill one ── it is ill, too ──────────────> nothing to find here
//!     v
//!  halfway between the last healthy and the first ill one ─────────────┐
//!     │ cannot be built, does not start, cannot be told: its neighbour │
//!     ^────────────────────────────────────────────────────────────────┘
//!     v neighbours
//!  both once more, by fresh processes ── as before ───────────────────> found
//!                                     └─ not ─────────────────────────> unsteady
//! ```
//!
//! Each revision is judged beside the ill end, by turns, by the tests that judge a switch: [`sequential`] for growth,
//! [`crash`] for deaths. A revision that leaves so little of it as a cure may leave is healthy; one that has more is ill,
//! so that the first revision with a part of it is found.
//!
//! It never runs anything: whoever has it asks [`Search::next`], runs that, and tells [`Search::observe`]. The same observations lead to
//! the same questions, so a search can be taken up again from what was told.

mod conclusion;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use self::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use super::crash::{self, CrashPolicy, Run};
use super::sequential::{self, CurePolicy, Does, Judgement};
use super::trial::{Leg, Track};
use super::{Ended, Finding, Workload};
use crate::growth::Interval;

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Do all the work with a fresh process of a revision.
    Run(Ask),
    /// Nothing more.
    Done(Conclusion),
}

/// So many that cannot be told between two that can are the end of a search: each is a build.
const UNKNOWN_MOST: usize = 16;

/// What is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Ask {
    /// Which revision, by its place in the line.
    pub revision: usize,
    /// It is an end of which nothing is known yet: everything that tells whether it is ill, repetitions of a crash included.
    pub is_end: bool,
    /// The work has to be done to its end.
    pub whole: bool,
    /// Without the prompt cache.
    pub control: bool,
    /// The only work to be done; `None`: all.
    pub workload: Option<Workload>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// What the process did: one finding, or two where the work was done without the prompt cache, too.
    Findings(Vec<Finding>),
    /// There is no such process: the revision cannot be built, or does not start. Why.
    Cannot(String),
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Newer,
    Older,
    Line,
    /// The neighbours that are judged once more, the next one last.
    Again(Vec<usize>),
    Over(Outcome),
}

/// A revision that is being judged.
#[derive(Clone, Debug)]
struct Open {
    revision: usize,
    legs: Vec<Leg>,
    runs: Vec<Run>,
    judgement: Option<Judgement>,
}

/// The state machine. See the module.
#[derive(Clone, Debug)]
pub struct Search {
    cure: CurePolicy,
    crash: CrashPolicy,
    /// The newer end; the older one is 0.
    last: usize,
    phase: Phase,
    newer: Vec<Finding>,
    older: Vec<Finding>,
    symptom: Option<Symptom>,
    /// The end that has it.
    ill: usize,
    /// Its processes.
    baseline: Vec<Leg>,
    runs: Vec<Run>,
    /// Those in a row that told nothing, and why the last one did not.
    failed: (u32, String),
    /// Processes of others since the last one of the ill end.
    since: u32,
    open: Option<Open>,
    known: BTreeMap<usize, Standing>,
    judged: Vec<Judged>,
    legs: usize,
}

impl Search {
    /// Among the revisions 0 to `last`, the oldest first; at least two.
    pub fn new(cure: &CurePolicy, crash: &CrashPolicy, last: usize) -> Self {
        Self {
            cure: cure.clone(),
            crash: crash.clone(),
            last: last.max(1),
            phase: Phase::Newer,
            newer: Vec::new(),
            older: Vec::new(),
            symptom: None,
            ill: 0,
            baseline: Vec::new(),
            runs: Vec::new(),
            failed: (0, String::new()),
            since: 0,
            open: None,
            known: BTreeMap::new(),
            judged: Vec::new(),
            legs: 0,
        }
    }

    /// What to run now. Asking again without telling anything gives the same.
    #[expect(
        clippy::should_implement_trait,
        reason = "it does not end in None, and asking twice changes nothing"
    )]
    pub fn next(&mut self) -> Step {
        let end = |revision| {
            Step::Run(Ask { revision, is_end: true, whole: false, control: false, workload: None })
        };
        loop {
            match &self.phase {
                Phase::Over(outcome) => return Step::Done(self.conclude(outcome.clone())),
                Phase::Newer => return end(self.last),
                Phase::Older => return end(0),
                Phase::Line | Phase::Again(_) => {}
            }
            if self.wants_baseline() {
                return Step::Run(self.ask(self.ill));
            }
            if let Some(open) = &self.open {
                return Step::Run(self.ask(open.revision));
            }
            self.advance();
        }
    }

    fn ask(&self, revision: usize) -> Ask {
        let whole = matches!(self.symptom, Some(Symptom::Crash { .. }));
        let work = self.symptom.as_ref().map(Symptom::work);
        let (workload, control) = (work.map(|work| work.0), work.is_some_and(|work| work.1));
        Ask { revision, is_end: false, whole, control, workload }
    }

    /// Takes in what came of it.
    pub fn observe(&mut self, ask: Ask, seen: Seen) {
        self.legs += 1;
        match (self.phase.clone(), seen) {
            (Phase::Newer | Phase::Older, Seen::Cannot(why)) => {
                self.phase = Phase::Over(Outcome::EndFailed { newer: ask.revision == self.last, why });
            }
            (Phase::Newer, Seen::Findings(found)) => {
                self.newer = found;
                self.phase = Phase::Older;
            }
            (Phase::Older, Seen::Findings(found)) => {
                self.older = found;
                self.diagnose();
            }
            (Phase::Line | Phase::Again(_), seen) if ask.revision == self.ill => self.take_baseline(seen),
            (Phase::Line | Phase::Again(_), seen) => self.take(ask.revision, seen),
            (Phase::Over(_), _) => {}
        }
    }

    /// Whether both ends were seen and only the older one has the symptom.
    pub const fn only_the_older_is_ill(&self) -> bool {
        self.symptom.is_some() && self.ill == 0
    }

    /// What is known if nothing more is run.
    pub fn interrupt(&self) -> Conclusion {
        match &self.phase {
            Phase::Over(outcome) => self.conclude(outcome.clone()),
            _ => self.conclude(Outcome::Interrupted),
        }
    }

    /// Revisions that may still be it, if the line is being searched.
    pub fn left(&self) -> Option<usize> {
        let (healthy, ill) = self.bounds()?;
        Some(healthy.abs_diff(ill))
    }

    /// Both ends are known: what differs?
    fn diagnose(&mut self) {
        let (symptom, newer) = match Symptom::between(&self.newer, &self.older, self.cure.stops_share) {
            Ok(found) => found,
            Err(outcome) => {
                self.phase = Phase::Over(outcome);
                return;
            }
        };
        let (ill, healthy) = if newer { (self.last, 0) } else { (0, self.last) };
        let (found, other) = if newer { (&self.newer, &self.older) } else { (&self.older, &self.newer) };
        let (found, other) = (symptom.findings(found), symptom.findings(other));
        self.ill = ill;
        self.known.insert(ill, Standing::Ill);
        self.phase = Phase::Line;
        let is_growth = matches!(symptom, Symptom::Growth { .. });
        if is_growth {
            self.baseline.push(Leg::of(&found));
        } else {
            // What made somebody look is no repetition.
            self.runs = found
                .iter()
                .find_map(|one| one.crash.as_ref())
                .map(|crash| crash.runs.clone())
                .unwrap_or_default();
        }
        self.symptom = Some(symptom);
        self.begin(healthy);
        // A survivor counts by its requests, and an experiment ends early; and what had a cache says nothing of what has none.
        if is_growth && !other.is_empty() {
            self.take(healthy, Seen::Findings(other));
        }
    }

    fn wants_baseline(&self) -> bool {
        let growth = matches!(self.symptom, Some(Symptom::Growth { .. }));
        let open = self.open.as_ref();
        if growth && self.baseline.len() < self.cure.baseline_least {
            // Without knowing how much processes differ nothing is said of any.
            return true;
        }
        let waits = open.is_some_and(|open| !open.legs.is_empty() || !open.runs.is_empty());
        waits && self.since > 0 || growth && self.since >= self.cure.baseline_every
    }

    fn take_baseline(&mut self, seen: Seen) {
        let why = match seen {
            Seen::Cannot(why) => Some(why),
            Seen::Findings(found) => self.take_ill(&found).err(),
        };
        match why {
            None => (self.failed.0, self.since) = (0, 0),
            Some(why) => self.failed = (self.failed.0 + 1, why),
        }
        if self.failed.0 >= self.cure.baseline_failures {
            self.phase = Phase::Over(Outcome::IllFailed { why: self.failed.1.clone() });
            return;
        }
        self.look();
    }

    /// One more process of the ill end.
    fn take_ill(&mut self, found: &[Finding]) -> Result<(), String> {
        match self.symptom {
            Some(Symptom::Crash { .. }) => self.runs.push(run_of(found).ok_or_else(|| told_nothing(found))?),
            _ if died(found).is_some() => return Err(told_nothing(found)),
            _ => self.baseline.push(Leg::of(found)),
        }
        Ok(())
    }

    fn take(&mut self, revision: usize, seen: Seen) {
        self.since += 1;
        let is_crash = matches!(self.symptom, Some(Symptom::Crash { .. }));
        let Some(open) = self.open.as_mut().filter(|open| open.revision == revision) else { return };
        match seen {
            Seen::Cannot(why) => self.close(Standing::Unknown { why }),
            Seen::Findings(found) if is_crash => match run_of(&found) {
                Some(run) => {
                    open.runs.push(run);
                    self.look();
                }
                None => self.close(Standing::Unknown { why: told_nothing(&found) }),
            },
            Seen::Findings(found) => {
                if let Some(why) = died(&found) {
                    self.close(Standing::Unknown { why });
                } else {
                    open.legs.push(Leg::of(&found));
                    self.look();
                }
            }
        }
    }

    /// Judges what is open by all that is known.
    fn look(&mut self) {
        let (Some(symptom), Some(open)) = (self.symptom.clone(), self.open.as_mut()) else { return };
        let (does, over) = match symptom {
            Symptom::Crash { .. } if open.runs.is_empty() => return,
            Symptom::Crash { .. } => {
                let does = crash::judge(&self.crash, &self.runs, &open.runs);
                (does, open.runs.len() >= self.crash.runs_most)
            }
            Symptom::Growth { .. } if self.baseline.len() < self.cure.baseline_least => return,
            Symptom::Growth { track, .. } => {
                let rates = |legs: &[Leg]| -> Vec<Interval> {
                    legs.iter().filter_map(|leg| leg.of_track(track).map(|(rate, _)| rate)).collect()
                };
                let kept = self.baseline.len().saturating_sub(self.cure.baseline_kept);
                let judged =
                    sequential::judge(&self.cure, &rates(&self.baseline[kept..]), &rates(&open.legs));
                open.judgement = Some(judged);
                let legs = u32::try_from(open.legs.len()).unwrap_or(u32::MAX);
                // What is named has to have happened twice.
                let few = judged.does == Does::Stops && legs < self.cure.legs_least;
                (if few { Does::Undecided } else { judged.does }, legs >= self.cure.legs_most)
            }
        };
        if does == Does::Undecided && !over {
            return;
        }
        let processes = open.legs.len() + open.runs.len();
        self.close(match does {
            Does::Stops => Standing::Healthy,
            Does::Halves | Does::Nothing => Standing::Ill,
            Does::Undecided => Standing::Unknown { why: format!("{processes} processes of it do not tell") },
        });
    }

    fn begin(&mut self, revision: usize) {
        self.open = Some(Open { revision, legs: Vec::new(), runs: Vec::new(), judgement: None });
    }

    fn close(&mut self, standing: Standing) {
        let Some(Open { revision, legs, runs, judgement }) = self.open.take() else { return };
        let again = matches!(self.phase, Phase::Again(_));
        let legs = legs.len();
        self.judged.push(Judged { revision, standing: standing.clone(), legs, judgement, runs, again });
        if again {
            if self.known.get(&revision) != Some(&standing) {
                self.phase = Phase::Over(Outcome::Unsteady { revision });
            }
        } else {
            self.known.insert(revision, standing);
        }
    }

    /// The healthy revision and the ill one that are closest to each other.
    fn bounds(&self) -> Option<(usize, usize)> {
        let is = |wanted: &Standing| {
            let all = self.known.iter().filter(|(_, standing)| *standing == wanted).map(|(at, _)| *at);
            all.collect::<Vec<_>>()
        };
        let (healthy, ill) = (is(&Standing::Healthy), is(&Standing::Ill));
        let closest = |all: &[usize], ill_is_newer: bool| {
            if ill_is_newer { all.iter().max().copied() } else { all.iter().min().copied() }
        };
        let newer = self.ill == self.last;
        // Of the healthy ones the one that is nearest to the ill end, of the ill ones the one that is farthest from it, unless it lies
        // behind a healthy one: then that was ill before, and is another story.
        let healthy = closest(&healthy, newer)?;
        let beyond: Vec<usize> =
            ill.into_iter().filter(|at| if newer { *at > healthy } else { *at < healthy }).collect();
        Some((healthy, closest(&beyond, !newer)?))
    }

    /// Nothing is open: what comes next.
    fn advance(&mut self) {
        if let Phase::Again(queue) = &mut self.phase {
            if let Some(revision) = queue.pop() {
                self.begin(revision);
            } else {
                let found = self.bounds().map(|(healthy, ill)| Outcome::Found { revision: healthy.max(ill) });
                self.phase = Phase::Over(found.unwrap_or(Outcome::Interrupted));
            }
            return;
        }
        let Some((healthy, ill)) = self.bounds() else {
            let healthy_end = self.last - self.ill;
            self.phase = Phase::Over(match self.known.get(&healthy_end) {
                Some(Standing::Unknown { why }) => {
                    Outcome::EndFailed { newer: healthy_end == self.last, why: why.clone() }
                }
                _ => Outcome::BothIll,
            });
            return;
        };
        let (low, high) = (healthy.min(ill), healthy.max(ill));
        let unknown: Vec<usize> = (low + 1..high).filter(|at| self.known.contains_key(at)).collect();
        match next_between(low, high, &unknown).filter(|_| unknown.len() < UNKNOWN_MOST) {
            Some(revision) => self.begin(revision),
            None if high - low > 1 => {
                self.phase = Phase::Over(Outcome::Among { first: low + 1, last: high });
            }
            None => {
                let again = [ill, healthy].into_iter().filter(|at| *at != self.ill).collect();
                self.phase = Phase::Again(again);
            }
        }
    }

    /// The end that has the symptom, as it was measured.
    fn ill_end(&self) -> Option<Judged> {
        let symptom = self.symptom.as_ref()?;
        let legs = self.baseline.len();
        let judgement = match symptom {
            Symptom::Growth { track, .. } => {
                let rates: Vec<Interval> = self
                    .baseline
                    .iter()
                    .filter_map(|leg| leg.of_track(*track).map(|(rate, _)| rate))
                    .collect();
                Some(sequential::judge(&self.cure, &rates, &rates))
            }
            Symptom::Crash { .. } => None,
        };
        let runs = self.runs.clone();
        Some(Judged { revision: self.ill, standing: Standing::Ill, legs, judgement, runs, again: false })
    }

    fn conclude(&self, outcome: Outcome) -> Conclusion {
        Conclusion {
            outcome,
            symptom: self.symptom.clone(),
            ill_is_newer: self.symptom.as_ref().map(|_| self.ill == self.last),
            bounds: self.bounds(),
            judged: self.judged.iter().cloned().chain(self.ill_end()).collect(),
            newer: self.newer.clone(),
            older: self.older.clone(),
            legs: self.legs,
        }
    }
}

fn run_of(found: &[Finding]) -> Option<Run> {
    found.iter().find_map(Finding::survived)
}

/// Which revision is the next one between two that are known, if these between them cannot be told. One alone is gone around; more of them are
/// a block, whose edges are looked for, because beyond them lies what can be told; and last come those within.
fn next_between(low: usize, high: usize, unknown: &[usize]) -> Option<usize> {
    let middle = low.midpoint(high);
    let (Some(first), Some(last)) = (unknown.first().copied(), unknown.last().copied()) else {
        return Some(middle).filter(|at| *at > low);
    };
    if unknown.len() == 1 {
        let all = (low + 1..high).filter(|at| *at != first);
        return all.min_by_key(|at| (at.abs_diff(middle), *at));
    }
    // The middle of the larger gap, if anything is in it.
    let within = |gaps: &mut dyn Iterator<Item = (usize, usize)>| {
        let gap = gaps.filter(|(from, to)| to - from > 1).max_by_key(|(from, to)| to - from);
        gap.map(|(from, to)| from.midpoint(to))
    };
    within(&mut [(low, first), (last, high)].into_iter())
        .or_else(|| within(&mut unknown.iter().copied().zip(unknown.iter().skip(1).copied())))
}

/// How a process ended that should not have.
fn died(found: &[Finding]) -> Option<String> {
    found.iter().find_map(|finding| match &finding.ended {
        Ended::Crashed { why } | Ended::Killed { why } | Ended::Failed { why } => Some(why.clone()),
        _ => None,
    })
}

fn told_nothing(found: &[Finding]) -> String {
    died(found).unwrap_or_else(|| "its work was cut short".to_owned())
}

/// One memory of one kind of work: what both ends are compared by.
fn tracks(found: &[Finding]) -> impl Iterator<Item = (Track, &Finding)> {
    let all =
        found.iter().flat_map(|finding| finding.series.iter().map(move |series| (finding, series.series)));
    all.map(|(finding, series)| (Track { workload: finding.workload, series }, finding))
}
