//! Input of a trial: ended requests and memory.

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

/// An ended request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrialExchange {
    /// Build that answered it.
    pub arm: TrialArm,
    /// Number that identifies its conversation.
    pub conversation: u64,
    /// Failed through its build: a 5xx answer, or an aborted one.
    pub failed: bool,
    /// Milliseconds from the lease to the first byte of the answer.
    pub latency_ms: Option<f64>,
    /// Milliseconds per token of the answer.
    pub token_ms: Option<f64>,
}

/// Memory of one build's processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArmMemory {
    /// State of each series.
    pub growth: Vec<SeriesGrowth>,
    /// Bytes of host memory when ready.
    pub host_at_ready: Option<u64>,
}
