//! Judges if a canary build of llama-server is as good as the serving one, from requests that both builds
//! answer in the same period.
//!
//! ```text
//!  requests of both ─> blocks ─┬─ failures  ─> more often? / not by much?  ┐
//!                              ├─ latency   ─> slower?     / not by much?  ├─> undecided | better or equal | worse
//!                              └─ pace      ─> slower?     / not by much?  │
//!  deaths, symptoms, the detector's verdicts on memory ────────────────────┘
//! ```
//!
//! Each question is a bet that may be checked after every request (`evidence`), so the trial ends once an
//! answer is certain. Speeds are compared by rank. Each conversation counts once for speed, because its
//! requests resemble each other.

mod evidence;
#[cfg(test)]
mod tests;
mod trial;

use serde::{Deserialize, Serialize};

pub use self::trial::CanaryTrial;
use crate::growth::{GrowthVerdict, SeriesGrowth};

/// Settings of canaries. `defaults.toml`, section `[canary]`, gives the reasons.
pub type CanaryConfig = crate::defaults::Canary;

/// Verdict of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum CanaryVerdict {
    /// The evidence suffices neither for "better or equal" nor for "worse".
    Undecided {
        /// Missing evidence in words; if the trial is over, preceded by the reason for its end.
        missing: Vec<String>,
    },
    /// The canary is better, or not worse by more than the declared margins.
    BetterOrEqual,
    /// The canary is worse.
    Worse {
        /// Aspects in which the canary is worse, in words.
        reasons: Vec<String>,
    },
}

impl CanaryVerdict {
    /// Creates an undecided verdict with one reason.
    pub fn undecided(why: impl Into<String>) -> Self {
        Self::Undecided { missing: vec![why.into()] }
    }

    /// Creates a "worse" verdict with one reason.
    pub fn worse(why: impl Into<String>) -> Self {
        Self::Worse { reasons: vec![why.into()] }
    }

    /// Returns the word used in status, metrics and the ledger.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Undecided { .. } => "undecided",
            Self::BetterOrEqual => "better_or_equal",
            Self::Worse { .. } => "worse",
        }
    }

    /// Returns true if the verdict is "better or equal" or "worse".
    pub const fn is_decided(&self) -> bool {
        !matches!(self, Self::Undecided { .. })
    }

    /// Returns the missing evidence, or the reasons of "worse".
    pub fn words(&self) -> &[String] {
        match self {
            Self::Undecided { missing: words } | Self::Worse { reasons: words } => words,
            Self::BetterOrEqual => &[],
        }
    }
}

/// The two builds of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialArm {
    /// The serving build.
    Base,
    /// The canary build.
    Canary,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialExchange {
    /// Build that answered the request.
    pub arm: TrialArm,
    /// Number that identifies the request's conversation.
    pub conversation: u64,
    /// The request failed through its build: the answer had a 5xx status or was aborted.
    pub failed: bool,
    /// Milliseconds from the lease to the first byte of the answer.
    pub latency_ms: Option<f64>,
    /// Milliseconds per token of the answer.
    pub token_ms: Option<f64>,
}

/// Memory of one build's processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArmMemory {
    /// The detector's state of each kind of memory.
    pub growth: Vec<SeriesGrowth>,
    /// Bytes of host memory when the process became ready.
    pub host_at_ready: Option<u64>,
}

/// State of both builds, and the evidence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CanaryReport {
    /// Serving build.
    pub base: ArmReport,
    /// Canary build.
    pub canary: ArmReport,
    /// Evidence for each question.
    pub evidence: Vec<QuestionEvidence>,
}

/// Evidence on one question. Each value starts at 1 and is conclusive once it reaches its threshold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuestionEvidence {
    /// Name of the question: `failures`, `latency` or `pace`.
    pub of: String,
    /// Evidence for "worse".
    pub worse: f64,
    /// Threshold of `worse`.
    pub worse_needs: f64,
    /// Evidence for "not worse by more than the margin".
    pub not_worse: f64,
    /// Threshold of `not_worse`.
    pub not_worse_needs: f64,
}

/// State of one build.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArmReport {
    /// Number of requests that have ended.
    pub requests: u64,
    /// Number of requests that failed through the build.
    pub failures: u64,
    /// Deaths of the build's processes through their own fault.
    pub deaths: u64,
    /// Median milliseconds until an answer begins; `None` before the first answer.
    pub latency_ms: Option<f64>,
    /// Median milliseconds per token; `None` before the first answer with a token count.
    pub token_ms: Option<f64>,
    /// Symptoms of the build's processes, in words.
    pub unwell: Vec<String>,
    /// Host memory of a fresh process, in bytes.
    pub host_at_ready: Option<u64>,
    /// Worst verdict of the leak detector; `None` before the first reading.
    pub growth: Option<GrowthVerdict>,
}
