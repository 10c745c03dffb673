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

mod ahead;
mod at_a_time;
mod conclusion;
mod judge;
mod pace;
mod places;
mod replies;
#[cfg(test)]
mod tests;
mod work;

pub use self::ahead::Ahead;
pub use self::at_a_time::{Machine, Split, Takes, Wanted, at_a_time};
pub use self::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use self::judge::{Ends, Heard, Judge};
pub use self::pace::Pace;
use self::places::Places;
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
    places: Places,
    phase: Phase,
    symptom: Option<Symptom>,
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
            places: Places::new(last),
            phase: Phase::Ends,
            symptom: None,
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
                self.phase =
                    Phase::Over(Outcome::EndFailed { newer: ask.revision == self.places.last(), why });
            }
            (Phase::Ends, seen) => match self.kind.judge_mut().take_end(ask, seen) {
                Ends::More => {}
                Ends::Over(outcome) => self.phase = Phase::Over(outcome),
                Ends::Differ { symptom, is_newer, healthy } => {
                    self.places.differ(is_newer);
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

    /// An end cannot be run, as is known before it is asked for. Says nothing once the ends are known.
    pub fn end_failed(&mut self, revision: usize, why: String) {
        if self.phase == Phase::Ends && (revision == 0 || revision == self.places.last()) {
            self.phase = Phase::Over(Outcome::EndFailed { newer: revision == self.places.last(), why });
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
            self.places.set(revision, standing);
        } else if self.places.of(revision) != Some(&standing) {
            self.phase = Phase::Over(Outcome::Unsteady { revision });
        }
    }

    fn begin(&mut self, revision: usize) {
        let again = matches!(self.phase, Phase::Again(_));
        self.kind.judge_mut().begin(revision, again);
    }

    /// Whether both ends were seen and only the older one has the symptom.
    pub const fn only_the_older_is_ill(&self) -> bool {
        self.symptom.is_some() && self.places.ill() == 0
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
        let (healthy, ill) = self.places.bounds()?;
        Some(healthy.abs_diff(ill))
    }

    /// Nothing is open: what comes next.
    fn advance(&mut self) {
        if let Phase::Again(queue) = &mut self.phase {
            if let Some(revision) = queue.pop() {
                self.begin(revision);
            } else {
                let found = self.places.bounds().map(|(healthy, ill)| {
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
        let Some((healthy, ill)) = self.places.bounds() else {
            let healthy_end = self.places.healthy();
            self.phase = Phase::Over(match self.places.of(healthy_end) {
                Some(Standing::Unknown { why }) => {
                    Outcome::EndFailed { newer: healthy_end == self.places.last(), why: why.clone() }
                }
                _ => Outcome::BothIll,
            });
            return;
        };
        if let Some(revision) = self.places.next() {
            self.begin(revision);
        } else {
            let again = [ill, healthy].into_iter().filter(|at| *at != self.places.ill()).collect();
            self.phase = Phase::Again(again);
        }
    }

    fn conclude(&self, outcome: Outcome) -> Conclusion {
        let mut conclusion = Conclusion {
            outcome,
            aim: self.kind.aim(),
            symptom: self.symptom.clone(),
            ill_is_newer: self.symptom.as_ref().map(|_| self.places.ill() == self.places.last()),
            bounds: self.places.bounds(),
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
