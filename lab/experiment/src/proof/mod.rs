//! Proves that one build may replace another: sends both the same requests and compares.
//!
//! ```text
//!  rounds: a process of the old build and one of the new build, alternating order ──> Visit, Visit
//!     first round   answers of both                             ┐
//!     second round  answers of the old build again: noise ──────┴──> answers
//!     all rounds    start, memory, speed ──> ratios, judged after each round; as many as needed
//!  growth and crashes: the search between two revisions, with the builds as ends
//!  flags and routes: removals
//!                                                                      ──> Proof: a verdict with its reasons
//! ```
//!
//! This module runs nothing. A verdict holds only for the measured model and work.

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

/// Settings of a proof. `defaults.toml`, section `[proof]`, gives the reasons.
pub type ProofPolicy = warden_policies::defaults::Proof;

/// Metric of a process; larger is worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Seconds from the spawn until ready.
    Start,
    /// Seconds per prompt token.
    Prefill,
    /// Seconds per generated token.
    Decode,
    /// Seconds from sending to the first token.
    FirstToken,
    /// Bytes when ready.
    AtReady(MemoryKind),
    /// Bytes after the longest prompt.
    AtLongest(MemoryKind),
}

/// Measurements of one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Visit {
    /// Measured metrics, each once.
    pub measured: Vec<(Metric, f64)>,
    /// Answers, if it was asked questions.
    pub replies: Vec<Reply>,
}

impl Visit {
    /// Returns a metric, if it could be measured.
    pub(super) fn of(&self, metric: Metric) -> Option<f64> {
        let own = self.measured.iter().find(|(own, _)| *own == metric);
        own.map(|(_, value)| *value).filter(|value| value.is_finite() && *value > 0.0)
    }
}

/// Ruling on one aspect of the new build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ruling {
    /// Shown to be better.
    Better,
    /// Shown to be equal, or not worse.
    Same,
    /// Unknown.
    Unknown,
    /// Shown to be worse.
    Worse,
}

impl Ruling {
    /// Returns the word used in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Same => "same",
            Self::Unknown => "unknown",
            Self::Worse => "worse",
        }
    }
}

/// The two builds of a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The build in use.
    Old,
    /// The candidate for replacing it.
    New,
}

/// A build that failed at its task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Build that failed.
    pub side: Side,
    /// Reason.
    pub why: String,
}

/// Next step of a proof.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Run a process of one build.
    Visit {
        /// Build to run.
        side: Side,
        /// Ask the questions, too.
        asks: bool,
    },
    /// All measurements are done.
    Done,
}

/// Rounds of a proof so far.
#[derive(Clone, Debug)]
pub struct Rounds {
    policy: ProofPolicy,
    old: Vec<Visit>,
    new: Vec<Visit>,
    fault: Option<Fault>,
}

impl Rounds {
    /// Creates an empty set of rounds.
    pub fn new(policy: &ProofPolicy) -> Self {
        Self { policy: policy.clone(), old: Vec::new(), new: Vec::new(), fault: None }
    }

    /// Returns the next step.
    pub fn next(&self) -> Next {
        let (old, new) = (self.old.len(), self.new.len());
        if self.fault.is_some() || (old == new && self.is_decided()) {
            return Next::Done;
        }
        // The first build alternates with each round, so that a machine that slows down affects both alike.
        let round = old.min(new);
        let first = if round.is_multiple_of(2) { Side::Old } else { Side::New };
        let side = match (old > new, new > old) {
            (true, _) => Side::New,
            (_, true) => Side::Old,
            _ => first,
        };
        Next::Visit { side, asks: round < ROUNDS_WITH_ANSWERS }
    }

    /// Adds the result of a process.
    pub fn observe(&mut self, side: Side, visit: Visit) {
        match side {
            Side::Old => self.old.push(visit),
            Side::New => self.new.push(visit),
        }
    }

    /// Records that a build failed; ends the measurements.
    pub fn failed(&mut self, side: Side, why: String) {
        self.fault = Some(Fault { side, why });
    }

    /// Returns true if all measurements are done and no build failed.
    pub fn are_whole(&self) -> bool {
        self.fault.is_none() && self.next() == Next::Done
    }

    /// Returns the number of complete rounds.
    pub fn count(&self) -> usize {
        self.old.len().min(self.new.len())
    }

    /// Compares all metrics.
    pub fn ratios(&self) -> Vec<Ratio> {
        ratio::all(&self.policy, &self.old, &self.new)
    }

    fn is_decided(&self) -> bool {
        let (round, policy) = (self.count(), &self.policy);
        round >= policy.rounds_most
            || (round >= policy.rounds_least
                && self.ratios().iter().all(|ratio| ratio.ruling != Ruling::Unknown))
    }

    /// Compares the answers.
    pub fn answers(&self) -> Answers {
        let replies = |visits: &[Visit], at: usize| visits.get(at).map(|visit| visit.replies.clone());
        let (old, new) =
            (replies(&self.old, 0).unwrap_or_default(), replies(&self.new, 0).unwrap_or_default());
        answers::judge(&self.policy, &old, &new, replies(&self.old, 1).as_deref())
    }
}

/// Rounds that ask questions: the first compares the builds, the second measures the old build's own
/// variation.
const ROUNDS_WITH_ANSWERS: usize = 2;

/// Result of a proof.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proof {
    /// Comparison of answers.
    pub answers: Answers,
    /// Ratios of start, speed and memory.
    pub ratios: Vec<Ratio>,
    /// Comparison of flags and routes.
    pub faces: Faces,
    /// Comparison of growth and crashes; `None` if not requested.
    pub growth: Option<Growth>,
    /// Build that failed at its task.
    pub fault: Option<Fault>,
    /// Number of rounds.
    pub rounds: usize,
    /// The proof was interrupted, so it proves nothing.
    pub interrupted: bool,
}

impl Proof {
    /// Builds the result from finished rounds.
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

    /// Returns the ruling on the replacement, never [`Ruling::Better`]: better in one aspect and equal in
    /// all others means `Same` for the decision.
    pub fn verdict(&self) -> Ruling {
        // Before the old build was asked twice, a difference may be chance.
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
            // A metric lost in noise does not reject the build: it was measured and not shown to be worse.
            // The report shows it.
            Ruling::Same
        }
    }
}
