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
//! answer is certain, with the declared error rates. Speeds are compared by rank, without assumptions on
//! their distribution. Each conversation counts once for speed, because its requests resemble each other.
//!
//! | file | part |
//! |---|---|
//! | `blocks` | grouping of requests for comparison |
//! | `evidence` | the bets |
//! | `facts` | input: requests and memory |
//! | `report` | displayed state |
//! | `trial` | state and verdict |

mod blocks;
mod evidence;
mod facts;
mod report;
#[cfg(test)]
mod tests;
mod trial;

use serde::{Deserialize, Serialize};

pub use self::facts::{ArmMemory, TrialArm, TrialExchange};
pub use self::report::{ArmReport, CanaryReport};
pub use self::trial::CanaryTrial;

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
