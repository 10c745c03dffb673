//! What is shown of a trial: in `status`, in the ledger, to programs.

use serde::{Deserialize, Serialize};

use crate::growth;

/// Both builds, and how sure it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The build that serves.
    pub base: ArmReport,
    /// The build that is tried.
    pub canary: ArmReport,
    /// How much speaks for each answer.
    pub evidence: Vec<Weight>,
}

/// One question, and what speaks for either answer: both begin with 1, and an answer is sure when its number has reached what it needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weight {
    /// `failures`, `latency` or `pace`.
    pub of: String,
    /// For "worse".
    pub worse: f64,
    /// What that needs.
    pub worse_needs: f64,
    /// For "not worse by more than the margin".
    pub not_worse: f64,
    /// What that needs.
    pub not_worse_needs: f64,
}

/// One build.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArmReport {
    /// Requests that have ended.
    pub requests: u64,
    /// Of these, failed by its fault.
    pub failures: u64,
    /// Deaths of its processes by their own fault.
    pub deaths: u64,
    /// The median of the milliseconds until an answer begins; `None` before there is one.
    pub latency_ms: Option<f64>,
    /// The median of the milliseconds for a token; `None` before there is one.
    pub token_ms: Option<f64>,
    /// Signs of illness, in words.
    pub unwell: Vec<String>,
    /// Host memory of a fresh process, in bytes.
    pub host_at_ready: Option<u64>,
    /// What the detector says of its worst series; `None` before the first reading.
    pub growth: Option<growth::Verdict>,
}
