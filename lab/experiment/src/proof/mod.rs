//! Proves that a build may replace another: sends the same requests to both and compares the results.
//!
//! ```text
//!  rounds: a process of the old build and one of the new build, alternating order ──> BuildVisit each
//!     first round   answers of both                             ┐
//!     second round  answers of the old build again: noise ──────┴──> answers
//!     all rounds    start, memory, speed ──> ratios, judged after each round; as many as needed
//!  growth and crashes: the search between two revisions, with the builds as ends
//!  flags and routes: removals
//!                                                                 ──> BuildProof: a verdict with its reasons
//! ```
//!
//! This module runs nothing. A verdict holds only for the measured model and work.

pub(crate) mod answers;
mod measured;
pub(crate) mod ratio;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use self::answers::{AnswerComparison, AnswerDifference, BuildReply, ReplyToken};
pub use self::measured::{BuildMetric, BuildVisit, ProofPolicy, ProofRuling};
pub use self::ratio::MetricRatio;
use crate::between::{RevisionConclusion, RevisionOutcome};

/// The two builds of a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuildSide {
    /// The build in use.
    Old,
    /// The candidate for replacing it.
    New,
}

/// Failure that ends a proof, such as a build that does not start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildFailure {
    /// Build that failed.
    pub side: BuildSide,
    /// Reason.
    pub why: String,
}

/// Next step of a proof.
#[derive(Clone, Debug, PartialEq)]
pub enum BuildProofStep {
    /// Run a process of one build.
    Visit {
        /// Build to run.
        side: BuildSide,
        /// True if the process is also asked the questions.
        asks: bool,
    },
    /// All measurements are done.
    Done,
}

/// Rounds of a proof so far.
#[derive(Clone, Debug)]
pub struct ProofRounds {
    policy: ProofPolicy,
    old: Vec<BuildVisit>,
    new: Vec<BuildVisit>,
    fault: Option<BuildFailure>,
}

impl ProofRounds {
    /// Creates an empty set of rounds.
    pub fn new(policy: &ProofPolicy) -> Self {
        Self { policy: policy.clone(), old: Vec::new(), new: Vec::new(), fault: None }
    }

    /// Returns the next step.
    pub fn next(&self) -> BuildProofStep {
        let (old, new) = (self.old.len(), self.new.len());
        if self.fault.is_some() || (old == new && self.is_decided()) {
            return BuildProofStep::Done;
        }
        // The first build alternates, so that a machine that slows down affects both alike.
        let round = old.min(new);
        let first = if round.is_multiple_of(2) { BuildSide::Old } else { BuildSide::New };
        let side = match (old > new, new > old) {
            (true, _) => BuildSide::New,
            (_, true) => BuildSide::Old,
            _ => first,
        };
        BuildProofStep::Visit { side, asks: round < ROUNDS_WITH_ANSWERS }
    }

    /// Adds the result of a process.
    pub fn observe(&mut self, side: BuildSide, visit: BuildVisit) {
        match side {
            BuildSide::Old => self.old.push(visit),
            BuildSide::New => self.new.push(visit),
        }
    }

    /// Records that a build failed; ends the measurements.
    pub fn record_failure(&mut self, side: BuildSide, why: String) {
        self.fault = Some(BuildFailure { side, why });
    }

    /// Returns true if all measurements are done and no build failed.
    pub fn is_complete(&self) -> bool {
        self.fault.is_none() && self.next() == BuildProofStep::Done
    }

    /// Returns the number of complete rounds.
    pub fn count(&self) -> usize {
        self.old.len().min(self.new.len())
    }

    /// Compares all metrics.
    pub fn ratios(&self) -> Vec<MetricRatio> {
        ratio::compare_all(&self.policy, &self.old, &self.new)
    }

    fn is_decided(&self) -> bool {
        let (round, policy) = (self.count(), &self.policy);
        round >= policy.rounds_most
            || (round >= policy.rounds_least
                && self.ratios().iter().all(|ratio| ratio.ruling != ProofRuling::Unknown))
    }

    /// Compares the answers.
    pub fn answers(&self) -> AnswerComparison {
        let replies = |visits: &[BuildVisit], at: usize| visits.get(at).map(|visit| visit.replies.clone());
        let (old, new) =
            (replies(&self.old, 0).unwrap_or_default(), replies(&self.new, 0).unwrap_or_default());
        answers::judge(&self.policy, &old, &new, replies(&self.old, 1).as_deref())
    }
}

/// Flags and routes that were removed or added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceComparison {
    /// Flags that only the old build has.
    pub flags_gone: Vec<String>,
    /// Flags missing in the new build that the present command uses.
    pub flags_missed: Vec<String>,
    /// Flags that only the new build has.
    pub flags_new: Vec<String>,
    /// Routes that only the old build has.
    pub routes_gone: Vec<String>,
    /// Routes that only the new build has.
    pub routes_new: Vec<String>,
}

impl InterfaceComparison {
    /// Compares flags and routes, each given as (old, new). `used` are flags of the present command.
    pub fn compare(flags: (&[String], &[String]), routes: (&[String], &[String]), used: &[String]) -> Self {
        let without = |these: &[String], those: &[String]| -> Vec<String> {
            let mut rest: Vec<String> = these.iter().filter(|one| !those.contains(one)).cloned().collect();
            rest.sort();
            rest.dedup();
            rest
        };
        let flags_gone = without(flags.0, flags.1);
        Self {
            flags_missed: flags_gone.iter().filter(|flag| used.contains(flag)).cloned().collect(),
            flags_gone,
            flags_new: without(flags.1, flags.0),
            routes_gone: without(routes.0, routes.1),
            routes_new: without(routes.1, routes.0),
        }
    }

    /// Returns `Worse` if the new build lacks a route or a used flag.
    pub fn ruling(&self) -> ProofRuling {
        if self.flags_missed.is_empty() && self.routes_gone.is_empty() {
            ProofRuling::Same
        } else {
            ProofRuling::Worse
        }
    }
}

/// Comparison of growth and crashes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BuildGrowth {
    /// Ruling on growth and crashes.
    pub ruling: ProofRuling,
    /// Conclusion of the search; the old build is revision 0, the new one 1.
    pub conclusion: RevisionConclusion,
}

impl BuildGrowth {
    /// Returns true if a symptom was seen but not attributed to a build.
    fn is_in_doubt(&self) -> bool {
        self.ruling == ProofRuling::Unknown
            && !matches!(self.conclusion.outcome, RevisionOutcome::NeitherIll { .. })
    }

    /// Evaluates a search whose older end is the old build.
    pub fn from_conclusion(conclusion: RevisionConclusion) -> Self {
        let old_alone = conclusion.ill_is_newer == Some(false);
        let ruling = match &conclusion.outcome {
            // Only the old build has the symptom: the new build is not worse.
            RevisionOutcome::Found { .. } | RevisionOutcome::Interrupted if old_alone => ProofRuling::Better,
            RevisionOutcome::Found { .. } | RevisionOutcome::EndFailed { newer: true, .. } => {
                ProofRuling::Worse
            }
            RevisionOutcome::BothIll | RevisionOutcome::NeitherIll { short: false, .. } => ProofRuling::Same,
            _ => ProofRuling::Unknown,
        };
        Self { ruling, conclusion }
    }
}

/// The first round compares the builds; the second shows how much the old build's answers vary.
const ROUNDS_WITH_ANSWERS: usize = 2;

/// Result of a proof.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BuildProof {
    /// Comparison of answers.
    pub answers: AnswerComparison,
    /// Ratios of start, speed and memory.
    pub ratios: Vec<MetricRatio>,
    /// Comparison of flags and routes.
    pub faces: InterfaceComparison,
    /// Comparison of growth and crashes; `None` if not requested.
    pub growth: Option<BuildGrowth>,
    /// Failure that ended the proof; `None` if there was none.
    pub fault: Option<BuildFailure>,
    /// Number of rounds.
    pub rounds: usize,
    /// The proof was interrupted, so it proves nothing.
    pub interrupted: bool,
}

impl BuildProof {
    /// Builds the result from finished rounds.
    pub fn from_rounds(
        rounds: &ProofRounds,
        faces: InterfaceComparison,
        growth: Option<BuildGrowth>,
    ) -> Self {
        Self {
            answers: rounds.answers(),
            ratios: rounds.ratios(),
            faces,
            growth,
            fault: rounds.fault.clone(),
            rounds: rounds.count(),
            interrupted: rounds.fault.is_none() && !rounds.is_complete(),
        }
    }

    /// Returns the ruling on the replacement; `Same` even if the new build is better in all aspects.
    pub fn verdict(&self) -> ProofRuling {
        // A difference may be chance until the old build answered twice.
        let is_early = self.interrupted && self.rounds < ROUNDS_WITH_ANSWERS;
        let answers = if is_early { ProofRuling::Unknown } else { self.answers.ruling };
        let all = [answers, self.faces.ruling()];
        let all = all.into_iter().chain(self.ratios.iter().map(|ratio| ratio.ruling));
        let all: Vec<ProofRuling> = all.chain(self.growth.as_ref().map(|growth| growth.ruling)).collect();
        let fault = self.fault.as_ref().map(|fault| fault.side);
        if fault == Some(BuildSide::New) || all.contains(&ProofRuling::Worse) {
            ProofRuling::Worse
        } else if fault.is_some()
            || self.interrupted
            || answers == ProofRuling::Unknown
            || self.growth.as_ref().is_some_and(BuildGrowth::is_in_doubt)
        {
            ProofRuling::Unknown
        } else {
            // Noise in a metric does not reject the build, because nothing was shown to be worse.
            ProofRuling::Same
        }
    }
}
