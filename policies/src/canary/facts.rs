//! Input of a trial: requests that have ended, and memory.

use serde::{Deserialize, Serialize};

use crate::growth::SeriesGrowth;

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
