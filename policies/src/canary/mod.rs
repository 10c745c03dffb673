//! Whether another build of llama-server is as good as the one that serves, by what both did over the same time.
//!
//! ```text
//!  requests of both ─> blocks ─┬─ failures  ─> more often? / not by much?  ┐
//!                              ├─ latency   ─> slower?     / not by much?  ├─> undecided | better or equal | worse
//!                              └─ pace      ─> slower?     / not by much?  │
//!  deaths, symptoms, the detector's verdicts on memory ────────────────────┘
//! ```
//!
//! Each question is a bet that may be looked at after every request (`evidence`), so the trial ends as soon as either answer is sure, and
//! the declared errors hold all the same. Speeds are compared by rank, so that nothing is assumed of how they are distributed, and
//! each conversation counts once there: its requests are alike, whichever build they meet.
//!
//! | file | part |
//! |---|---|
//! | `blocks` | which requests are compared with each other |
//! | `evidence` | the bets |
//! | `facts` | what a trial learns of each request and of memory |
//! | `report` | what is shown |
//! | `trial` | all of it |

mod blocks;
mod evidence;
mod facts;
mod report;
#[cfg(test)]
mod tests;
mod trial;

use serde::{Deserialize, Serialize};

pub use self::facts::{Arm, Exchange, Memory};
pub use self::report::{ArmReport, Report};
pub use self::trial::Trial;

/// The numbers. Reasons: `defaults.toml`, section `[canary]`.
pub type Numbers = crate::defaults::Canary;

/// What is made of a trial.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// Neither is sure.
    Undecided {
        /// What is missing, or what ended it, in words.
        missing: Vec<String>,
    },
    /// It is as good within the declared margins, or better.
    BetterOrEqual,
    /// It is worse.
    Worse {
        /// In what, in words.
        reasons: Vec<String>,
    },
}

impl Verdict {
    /// Undecided for one reason.
    pub fn undecided(why: impl Into<String>) -> Self {
        Self::Undecided { missing: vec![why.into()] }
    }

    /// Worse for one reason.
    pub fn worse(why: impl Into<String>) -> Self {
        Self::Worse { reasons: vec![why.into()] }
    }

    /// The word in status, metrics and the ledger.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Undecided { .. } => "undecided",
            Self::BetterOrEqual => "better_or_equal",
            Self::Worse { .. } => "worse",
        }
    }

    /// Whether it says which build is better.
    pub const fn is_decided(&self) -> bool {
        !matches!(self, Self::Undecided { .. })
    }

    /// What is missing, or in what it is worse.
    pub fn words(&self) -> &[String] {
        match self {
            Self::Undecided { missing: words } | Self::Worse { reasons: words } => words,
            Self::BetterOrEqual => &[],
        }
    }
}
