//! Displayed state of a trial, for `status`, the ledger and the API.

use serde::{Deserialize, Serialize};

use crate::growth;

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

/// Evidence on one question. Each of the two evidence values starts at 1 and is conclusive once it reaches
/// its threshold.
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
    pub growth: Option<growth::GrowthVerdict>,
}
