//! Bisection of a line of revisions: which one brought what a newer one does, or ended what an older one did.
//!
//! ```text
//!  both ends ── one leaks, dies, is slower or answers otherwise, the other not ──> that is the symptom; a revision with it is ill
//!     v
//!  the healthy end compared with the ill one ── it is ill, too ─────────> nothing to find here
//!     v
//!  halfway between the last healthy and the first ill one ───────────────┐
//!     │ cannot be built, does not start, cannot be judged: its neighbour │
//!     ^──────────────────────────────────────────────────────────────────┘
//!     v neighbours, or nothing between them that can be judged
//!  both once more, by fresh processes ── as before ─────────────────────> found, or a range
//!                                     └─ not ───────────────────────────> unsteady
//! ```
//!
//! The order of revisions is the same for every symptom. A judge knows how the ends differ, and how a revision compares with them: `work` for
//! growth and deaths under some work, `pace` for speed, `replies` for answers.
//! The search is for the first revision with a part of the symptom, also where later ones added more.
//!
//! Nothing here runs anything: the caller asks [`Search::next`], runs that, and gives the result to [`Search::observe`]. The same results lead
//! to the same questions, so a search can be resumed from its results.

mod conclusion;
mod judge;
mod pace;
mod places;
mod replies;
#[cfg(test)]
mod tests;
mod work;

pub use self::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use self::judge::{Heard, Judge};
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
    /// Of growth. The number of failures in a row that end a search counts for all symptoms.
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
    /// Why there is no such process: the revision cannot be built, or does not start.
    Cannot(String),
}

/// The state machine. See the module.
#[derive(Debug)]
pub struct Search {
    aim: Aim,
    judge: Box<dyn Judge>,
    places: Places,
    symptom: Option<Symptom>,
    judged: Vec<Judged>,
    legs: usize,
    /// Once the line is searched: the neighbours that are judged once more, the next one last.
    again: Option<Vec<usize>>,
    over: Option<Outcome>,
}

impl Search {
    /// Among the revisions 0 to `last`, the oldest first; at least two.
    pub fn new(rules: Rules<'_>, aim: Aim, last: usize) -> Self {
        let last = last.max(1);
        let judge: Box<dyn Judge> = match aim {
            Aim::Growth => Box::new(work::ByWork::new(rules, last)),
            Aim::Slowdown => Box::new(pace::ByPace::new(rules, last)),
            Aim::Answers => Box::new(replies::ByReplies::new(rules, last)),
        };
        Self {
            aim,
            judge,
            places: Places::new(last),
            symptom: None,
            judged: Vec::new(),
            legs: 0,
            again: None,
            over: None,
        }
    }

    /// What to run now. Asking again without an observation gives the same.
    #[expect(
        clippy::should_implement_trait,
        reason = "it does not end in None, and asking twice changes nothing"
    )]
    pub fn next(&mut self) -> Step {
        loop {
            if let Some(outcome) = &self.over {
                return Step::Done(self.conclude(outcome.clone()));
            }
            if let Some(ask) = self.judge.next() {
                return Step::Run(ask);
            }
            self.advance();
        }
    }

    /// Takes in what came of it.
    pub fn observe(&mut self, ask: Ask, seen: Seen) {
        self.legs += 1;
        let heard = match seen {
            _ if self.over.is_some() => return,
            Seen::Cannot(why) if self.symptom.is_none() => {
                Heard::Over(Outcome::EndFailed { newer: ask.revision == self.places.last, why })
            }
            seen => self.judge.take(ask, seen),
        };
        self.hear(heard);
    }

    fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::More => {}
            Heard::Over(outcome) => self.over = Some(outcome),
            Heard::Differ { symptom, is_newer } => {
                self.places.differ(is_newer);
                self.symptom = Some(symptom);
                self.begin(self.places.healthy());
            }
            Heard::Stands(judged) => {
                let (revision, standing) = (judged.revision, judged.standing.clone());
                let again = self.again.is_some();
                self.judged.push(Judged { again, ..*judged });
                if !again {
                    self.places.set(revision, standing);
                } else if self.places.standing(revision) != Some(&standing) {
                    self.over = Some(Outcome::Unsteady { revision });
                }
            }
        }
    }

    fn begin(&mut self, revision: usize) {
        let heard = self.judge.begin(revision, self.again.is_some());
        self.hear(heard);
    }

    /// Whether both ends were seen and only the older one has the symptom.
    pub const fn only_the_older_is_ill(&self) -> bool {
        self.symptom.is_some() && self.places.ill == 0
    }

    /// Whether no round is incomplete. Its processes run one after the other, so a resumed search repeats such a round.
    pub fn is_whole(&self) -> bool {
        self.judge.is_whole()
    }

    /// What is known if nothing more is run.
    pub fn interrupt(&self) -> Conclusion {
        self.conclude(self.over.clone().unwrap_or(Outcome::Interrupted))
    }

    /// Revisions that may still be it, if the line is being searched.
    pub fn left(&self) -> Option<usize> {
        let (healthy, ill) = self.places.bounds()?;
        Some(healthy.abs_diff(ill))
    }

    /// Begins the next revision after one is judged, or ends the search.
    fn advance(&mut self) {
        let Some((healthy, ill)) = self.places.bounds() else {
            let healthy_end = self.places.healthy();
            self.over = Some(match self.places.standing(healthy_end) {
                Some(Standing::Unknown { why }) => {
                    Outcome::EndFailed { newer: healthy_end == self.places.last, why: why.clone() }
                }
                _ => Outcome::BothIll,
            });
            return;
        };
        if let Some(queue) = &mut self.again {
            let (before, last) = (healthy.min(ill), healthy.max(ill));
            match queue.pop() {
                Some(revision) => self.begin(revision),
                None if last - before == 1 => self.over = Some(Outcome::Found { revision: last }),
                None => self.over = Some(Outcome::Among { first: before + 1, last }),
            }
        } else if let Some(revision) = self.places.next() {
            self.begin(revision);
        } else {
            self.again = Some([ill, healthy].into_iter().filter(|at| *at != self.places.ill).collect());
        }
    }

    fn conclude(&self, outcome: Outcome) -> Conclusion {
        let mut conclusion = Conclusion {
            outcome,
            aim: self.aim,
            symptom: self.symptom.clone(),
            ill_is_newer: self.symptom.as_ref().map(|_| self.places.ill == self.places.last),
            bounds: self.places.bounds(),
            judged: self.judged.clone(),
            newer: Vec::new(),
            older: Vec::new(),
            ratios: Vec::new(),
            differences: Vec::new(),
            legs: self.legs,
        };
        self.judge.describe_ends(&mut conclusion);
        conclusion
    }
}
