//! Whether one build may take the place of another: the same requests to both, and what differs.
//!
//! ```text
//!  rounds: a process of the old build, a process of the new one, by turns which comes first ──> Visit, Visit
//!     first round   answers of both                                  ┐
//!     second round  answers of the old one again: what is chance ────┴──> answers
//!     all rounds    start, memory, pace ──> ratios, judged after each round; as many as it takes
//!  growth and crashes: the search between two revisions, of which these are the ends
//!  flags and routes: what vanished
//!                                                                       ──> Proof: a verdict with its reasons
//! ```
//!
//! Nothing here runs anything. A verdict is about the model and the work that it was made with, and about nothing else.

mod answers;
mod faces;
mod growth;
mod ratio;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use self::answers::{Answers, Difference, Reply, Token};
pub(super) use self::answers::{differ, difference, distance};
pub use self::faces::Faces;
pub use self::growth::Growth;
pub use self::ratio::Ratio;
pub(super) use self::ratio::{of_pairs as ratio, pairs};
use warden_policies::sample::MemoryKind;

/// The numbers. Reasons: `defaults.toml`, section `[proof]`.
pub type ProofPolicy = warden_policies::defaults::Proof;

/// What is measured of a process of a build. More of it is worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Seconds from the spawn until it is ready.
    Start,
    /// Seconds for each prompt token.
    Prefill,
    /// Seconds for each token generated.
    Decode,
    /// Seconds from sending to the first token.
    FirstToken,
    /// Bytes when it is ready.
    AtReady(MemoryKind),
    /// Bytes behind the longest prompt.
    AtLongest(MemoryKind),
}

/// What one process showed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Visit {
    /// What could be measured, each metric once.
    pub measured: Vec<(Metric, f64)>,
    /// What it answered, if it was asked.
    pub replies: Vec<Reply>,
}

impl Visit {
    /// A figure, if it could be measured.
    pub(super) fn of(&self, metric: Metric) -> Option<f64> {
        let own = self.measured.iter().find(|(own, _)| *own == metric);
        own.map(|(_, value)| *value).filter(|value| value.is_finite() && *value > 0.0)
    }
}

/// How one aspect of the new build stands beside the old one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ruling {
    /// It is shown to be better.
    Better,
    /// It is shown not to be worse, or equal.
    Same,
    /// It cannot be told.
    Unknown,
    /// It is shown to be worse.
    Worse,
}

impl Ruling {
    /// The word in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Same => "same",
            Self::Unknown => "unknown",
            Self::Worse => "worse",
        }
    }
}

/// Who did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The build that is in use.
    Old,
    /// The one that is to take its place.
    New,
}

/// A build that could not do what was asked of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Which.
    pub side: Side,
    /// What happened.
    pub why: String,
}

/// What comes next.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// A process of this build; with answers, if they are wanted.
    Visit {
        /// Of which.
        side: Side,
        /// Whether the questions are asked, too.
        asks: bool,
    },
    /// Nothing more is measured.
    Done,
}

/// The rounds so far.
#[derive(Clone, Debug)]
pub struct Rounds {
    policy: ProofPolicy,
    old: Vec<Visit>,
    new: Vec<Visit>,
    fault: Option<Fault>,
}

impl Rounds {
    /// Before the first one.
    pub fn new(policy: &ProofPolicy) -> Self {
        Self { policy: policy.clone(), old: Vec::new(), new: Vec::new(), fault: None }
    }

    /// What is to be run next.
    pub fn next(&self) -> Next {
        let (old, new) = (self.old.len(), self.new.len());
        if self.fault.is_some() || (old == new && self.is_decided()) {
            return Next::Done;
        }
        // Which comes first changes with each round, so that a machine that becomes slower wrongs neither.
        let round = old.min(new);
        let first = if round.is_multiple_of(2) { Side::Old } else { Side::New };
        let side = match (old > new, new > old) {
            (true, _) => Side::New,
            (_, true) => Side::Old,
            _ => first,
        };
        Next::Visit { side, asks: round < ROUNDS_WITH_ANSWERS }
    }

    /// What came of it.
    pub fn observe(&mut self, side: Side, visit: Visit) {
        match side {
            Side::Old => self.old.push(visit),
            Side::New => self.new.push(visit),
        }
    }

    /// A build could not do it: nothing more is measured.
    pub fn failed(&mut self, side: Side, why: String) {
        self.fault = Some(Fault { side, why });
    }

    /// Whether all was measured that is wanted, and no build failed at it.
    pub fn are_whole(&self) -> bool {
        self.fault.is_none() && self.next() == Next::Done
    }

    /// Whole rounds so far.
    pub fn count(&self) -> usize {
        self.old.len().min(self.new.len())
    }

    /// How each metric stands.
    pub fn ratios(&self) -> Vec<Ratio> {
        ratio::all(&self.policy, &self.old, &self.new)
    }

    fn is_decided(&self) -> bool {
        let (round, policy) = (self.count(), &self.policy);
        round >= policy.rounds_most
            || (round >= policy.rounds_least
                && self.ratios().iter().all(|ratio| ratio.ruling != Ruling::Unknown))
    }

    /// What they say of the answers.
    pub fn answers(&self) -> Answers {
        let replies = |visits: &[Visit], at: usize| visits.get(at).map(|visit| visit.replies.clone());
        let (old, new) =
            (replies(&self.old, 0).unwrap_or_default(), replies(&self.new, 0).unwrap_or_default());
        answers::judge(&self.policy, &old, &new, replies(&self.old, 1).as_deref())
    }
}

/// The first gives answers to compare, the second says how far those of one build differ from themselves.
const ROUNDS_WITH_ANSWERS: usize = 2;

/// What is known in the end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// What both answered.
    pub answers: Answers,
    /// Start, pace and memory.
    pub ratios: Vec<Ratio>,
    /// Flags and routes.
    pub faces: Faces,
    /// Growth and crashes; `None`: nobody asked.
    pub growth: Option<Growth>,
    /// A build that could not do what was asked of it.
    pub fault: Option<Fault>,
    /// Rounds that were run.
    pub rounds: usize,
    /// It was broken off: nothing is proved.
    pub interrupted: bool,
}

impl Proof {
    /// Of rounds that are over.
    pub fn of(rounds: &Rounds, faces: Faces, growth: Option<Growth>) -> Self {
        Self {
            answers: rounds.answers(),
            ratios: rounds.ratios(),
            faces,
            growth,
            fault: rounds.fault.clone(),
            rounds: rounds.count(),
            interrupted: rounds.fault.is_none() && !rounds.are_whole(),
        }
    }

    /// Whether the new build may take the place of the old one. [`Ruling::Better`] is not said: what is better in one thing and the same in
    /// all others is the same to who has to decide.
    pub fn verdict(&self) -> Ruling {
        // Before the old build was asked twice nobody knows what of a difference is chance.
        let is_early = self.interrupted && self.rounds < ROUNDS_WITH_ANSWERS;
        let answers = if is_early { Ruling::Unknown } else { self.answers.ruling };
        let all = [answers, self.faces.ruling()];
        let all = all.into_iter().chain(self.ratios.iter().map(|ratio| ratio.ruling));
        let all: Vec<Ruling> = all.chain(self.growth.as_ref().map(|growth| growth.ruling)).collect();
        let fault = self.fault.as_ref().map(|fault| fault.side);
        if fault == Some(Side::New) || all.contains(&Ruling::Worse) {
            Ruling::Worse
        } else if fault.is_some()
            || self.interrupted
            || answers == Ruling::Unknown
            || self.growth.as_ref().is_some_and(Growth::is_in_doubt)
        {
            Ruling::Unknown
        } else {
            // A figure that noise hides keeps no build out: it was measured and not shown to be worse. The report has it.
            Ruling::Same
        }
    }
}
