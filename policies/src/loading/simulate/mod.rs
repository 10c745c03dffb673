//! Simulates the loading decisions of this crate on a [`RequestTrace`], and scores loads and waits.
//!
//! A request holds one of its model's slots until it is answered. A model that is being unloaded accepts no
//! requests and stops after its last answer. There is no randomness: equal traces give equal scores.

mod run;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::run::run;

/// A model of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceModel {
    /// Name of the model.
    pub name: String,
    /// Bytes of memory needed.
    pub bytes: u64,
    /// Time from the model's start to its first answer.
    pub load: Duration,
    /// Number of concurrent requests.
    pub slots: u32,
}

/// A request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceRequest {
    /// Arrival time.
    pub at: Duration,
    /// Index of the requested model.
    pub model: usize,
    /// Time that the answer takes.
    pub duration: Duration,
}

/// Requests for several models that share one memory.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestTrace {
    /// Short description.
    pub name: String,
    /// Bytes of the shared memory.
    pub memory: u64,
    /// Models that share the memory.
    pub models: Vec<TraceModel>,
    /// Requests in order of arrival.
    pub requests: Vec<TraceRequest>,
}

/// Result of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceScore {
    /// Number of loads.
    pub loads: u64,
    /// Bytes loaded.
    pub bytes: u64,
    /// Median wait before an answer began.
    pub median: Duration,
    /// 99th percentile of the waits.
    pub p99: Duration,
    /// Longest wait.
    pub longest: Duration,
    /// Number of requests that were never answered.
    pub unserved: usize,
}
