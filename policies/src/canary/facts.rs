//! What a trial learns of each request, and of memory.

use serde::{Deserialize, Serialize};

use crate::growth::Growth;

/// Which of the two builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// The one that serves.
    Base,
    /// The one that is tried.
    Canary,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// Whose it was.
    pub arm: Arm,
    /// What its conversation is known by.
    pub conversation: u64,
    /// It failed by the fault of its build: an answer of 5xx, or one that broke off.
    pub failed: bool,
    /// Milliseconds from the lease to the first byte of the answer.
    pub latency_ms: Option<f64>,
    /// Milliseconds for each token of the answer.
    pub token_ms: Option<f64>,
}

/// What the memory of one build's processes does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// Each series.
    pub growth: Vec<Growth>,
    /// Bytes of host memory when it had become ready.
    pub host_at_ready: Option<u64>,
}
