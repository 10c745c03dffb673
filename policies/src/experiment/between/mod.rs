//! Which revision of a line brought what a newer one does, or ended what an older one did: what to run next, and what follows from it.
//!
//! ```text
//!  both ends ── one leaks, dies, is slower or answers otherwise, the other not ──> that is the symptom; who has it is ill
//!     v
//!  the healthy end beside the ill one ── it is ill, too ──────────────> nothing to find here
//!     v
//!  halfway between the last healthy and the first ill one ─────────────┐
//!     │ cannot be built, does not start, cannot be told: its neighbour │
//!     ^────────────────────────────────────────────────────────────────┘
//!     v neighbours, or nothing between them that can be told
//!  both once more, by fresh processes ── as before ───────────────────> found, or a range
//!                                     └─ not ─────────────────────────> unsteady
//! ```
//!
//! Where on the line is looked is the same for every symptom. How the ends differ, and how a revision stands beside them, is a
//! judge's business: `work` for growth and deaths under some work, `pace` for speed, `replies` for answers.
//! The first revision with a part of the symptom is the one that is looked for, also where later ones added more.
//!
//! It never runs anything: whoever has it asks [`Search::next`], runs that, and tells [`Search::observe`]. The same observations lead to
//! the same questions, so a search can be taken up again from what was told.

mod conclusion;
mod judge;
mod pace;
mod replies;
#[cfg(test)]
mod tests;
mod work;

use std::collections::BTreeMap;

pub use self::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use self::judge::{Ends, Heard, Judge};
pub use self::pace::Pace;
pub use self::replies::{Otherwise, Said};
use super::crash::CrashPolicy;
use super::proof::{ProofPolicy, Visit};
use super::sequential::CurePolicy;
use super::{Finding, Workload};

/// What is looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    /// Growth of a memory, or a crash, under workloads.
    #[default]
    Growth,
    /// Prompts, tokens or the first token take longer.
    Slowdown,
    /// The same questions are answered otherwise.
    Answers,
}

impl Aim {
    /// Whether workloads show it.
    pub const fn is_growth(&self) -> bool {
        matches!(self, Self::Growth)
    }
}

/// By which numbers revisions are judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// Of growth. The number of failures in a row that an end is forgiven counts for all.
    pub cure: &'a CurePolicy,
    /// Of crashes.
    pub crash: &'a CrashPolicy,
    /// Of speed and answers.
    pub proof: &'a ProofPolicy,
}

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
    /// Instead of work: to be timed, or to be asked questions.
    #[serde(default, skip_serializing_if = "Aim::is_growth")]
    pub aim: Aim,
}

impl Ask {
    /// A visit of a process: it is timed, or asked questions.
    const fn visit(aim: Aim, revision: usize, is_end: bool) -> Self {
        Self { revision, is_end, whole: false, control: false, workload: None, aim }
    }
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// What the process did: one finding, or two where the work was done without the prompt cache, too.
    Findings(Vec<Finding>),
    /// What it was timed at, or answered.
    Visit(Visit),
    /// There is no such process: the revision cannot be built, or does not start. Why.
    Cannot(String),
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Ends,
    Line,
    /// The neighbours that are judged once more, the next one last.
    Again(Vec<usize>),
    Over(Outcome),
}

/// Who judges.
#[derive(Clone, Debug)]
enum Kind {
    Work(work::ByWork),
    Pace(pace::ByPace),
    Replies(replies::ByReplies),
}

impl Kind {
    const fn aim(&self) -> Aim {
        match self {
            Self::Work(_) => Aim::Growth,
            Self::Pace(_) => Aim::Slowdown,
            Self::Replies(_) => Aim::Answers,
        }
    }

    fn judge(&self) -> &dyn Judge {
        match self {
            Self::Work(judge) => judge,
            Self::Pace(judge) => judge,
            Self::Replies(judge) => judge,
        }
    }

    fn judge_mut(&mut self) -> &mut dyn Judge {
        match self {
            Self::Work(judge) => judge,
            Self::Pace(judge) => judge,
            Self::Replies(judge) => judge,
        }
    }
}

/// The state machine. See the module.
#[derive(Clone, Debug)]
pub struct Search {
    kind: Kind,
    /// The newer end; the older one is 0.
    last: usize,
    phase: Phase,
    symptom: Option<Symptom>,
    /// The end that has it.
    ill: usize,
    known: BTreeMap<usize, Standing>,
    judged: Vec<Judged>,
    legs: usize,
}

impl Search {
    /// Among the revisions 0 to `last`, the oldest first; at least two.
    pub fn new(rules: Rules<'_>, aim: Aim, last: usize) -> Self {
        let last = last.max(1);
        let kind = match aim {
            Aim::Growth => Kind::Work(work::ByWork::new(rules, last)),
            Aim::Slowdown => Kind::Pace(pace::ByPace::new(rules, last)),
            Aim::Answers => Kind::Replies(replies::ByReplies::new(rules, last)),
        };
        Self {
            kind,
            last,
            phase: Phase::Ends,
            symptom: None,
            ill: 0,
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
        loop {
            match &self.phase {
                Phase::Over(outcome) => return Step::Done(self.conclude(outcome.clone())),
                Phase::Ends => return Step::Run(self.kind.judge().end()),
                Phase::Line | Phase::Again(_) => {}
            }
            if let Some(ask) = self.kind.judge().next() {
                return Step::Run(ask);
            }
            self.advance();
        }
    }

    /// Takes in what came of it.
    pub fn observe(&mut self, ask: Ask, seen: Seen) {
        self.legs += 1;
        match (&self.phase, seen) {
            (Phase::Ends, Seen::Cannot(why)) => {
                self.phase = Phase::Over(Outcome::EndFailed { newer: ask.revision == self.last, why });
            }
            (Phase::Ends, seen) => match self.kind.judge_mut().take_end(ask, seen) {
                Ends::More => {}
                Ends::Over(outcome) => self.phase = Phase::Over(outcome),
                Ends::Differ { symptom, is_newer, healthy } => {
                    self.ill = if is_newer { self.last } else { 0 };
                    self.known.insert(self.ill, Standing::Ill);
                    self.symptom = Some(symptom);
                    self.phase = Phase::Line;
                    self.hear(healthy);
                }
            },
            (Phase::Line | Phase::Again(_), seen) => {
                let heard = self.kind.judge_mut().take(ask, seen);
                self.hear(heard);
            }
            (Phase::Over(_), _) => {}
        }
    }

    fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::More => {}
            Heard::Over(outcome) => self.phase = Phase::Over(outcome),
            Heard::Stands(judged) => self.close(*judged),
        }
    }

    fn close(&mut self, judged: Judged) {
        let again = matches!(self.phase, Phase::Again(_));
        let (revision, standing) = (judged.revision, judged.standing.clone());
        self.judged.push(Judged { again, ..judged });
        if !again {
            self.known.insert(revision, standing);
        } else if self.known.get(&revision) != Some(&standing) {
            self.phase = Phase::Over(Outcome::Unsteady { revision });
        }
    }

    fn begin(&mut self, revision: usize) {
        let again = matches!(self.phase, Phase::Again(_));
        self.kind.judge_mut().begin(revision, again);
    }

    /// Whether both ends were seen and only the older one has the symptom.
    pub const fn only_the_older_is_ill(&self) -> bool {
        self.symptom.is_some() && self.ill == 0
    }

    /// Whether nothing is half done: processes that are compared with each other run one behind the other, and whoever goes on later begins
    /// with the first of them.
    pub fn is_whole(&self) -> bool {
        self.kind.judge().is_whole()
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
                let found = self.bounds().map(|(healthy, ill)| {
                    let (low, high) = (healthy.min(ill), healthy.max(ill));
                    let is_one = high - low == 1;
                    if is_one {
                        Outcome::Found { revision: high }
                    } else {
                        Outcome::Among { first: low + 1, last: high }
                    }
                });
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
        let next = next_between(low, high, &unknown).filter(|_| unknown.len() < UNKNOWN_MOST);
        if let Some(revision) = next {
            self.begin(revision);
        } else {
            let again = [ill, healthy].into_iter().filter(|at| *at != self.ill).collect();
            self.phase = Phase::Again(again);
        }
    }

    fn conclude(&self, outcome: Outcome) -> Conclusion {
        let mut conclusion = Conclusion {
            outcome,
            aim: self.kind.aim(),
            symptom: self.symptom.clone(),
            ill_is_newer: self.symptom.as_ref().map(|_| self.ill == self.last),
            bounds: self.bounds(),
            judged: self.judged.clone(),
            newer: Vec::new(),
            older: Vec::new(),
            ratios: Vec::new(),
            differences: Vec::new(),
            legs: self.legs,
        };
        self.kind.judge().tell(&mut conclusion);
        conclusion
    }
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
