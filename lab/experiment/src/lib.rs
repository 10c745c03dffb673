//! Experiments: measure a server's memory under controlled work.
//!
//! ```text
//!  fresh process ─ ready ─ warm-up ─┬─ request(s) ─ idle ─ reading ─┬─ decided, or the limit ─ stop     one leg
//!                                   └───────────────<───────────────┘
//!  readings ──> LegJudge ──> LegFinding: verdict, growth per unit of work, end of the growth
//!  readings ──> blame_across: the unit of work that causes the growth, over all legs together
//! ```
//!
//! Verdicts come from the leak detector ([`warden_policies::growth`]): in service, llama-warden would replace
//! a backend for each leak found here. An experiment only provides enough work of one kind.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use warden_policies::growth::{GrowthBlame, GrowthVerdict, IntervalEstimate};
use warden_policies::sample::{BackendSample, MemoryKind, WorkDone};

mod attribution;
pub mod between;
pub mod bisect;
pub mod crash;
pub mod isolation;
mod judge;
pub mod proof;
pub mod sequential;
mod student;
pub mod survive;
mod trial;
mod workload;

pub use attribution::{CorrelatedHandles, GrowthAttribution, TracedMoment};
pub use judge::{LegDecision, LegJudge, blame_across, fewest_readings};
pub use workload::{Workload, WorkloadError};

/// Reading of a leg, taken when no request is in flight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LegReading {
    /// Memory, and the work done so far.
    pub sample: BackendSample,
    /// Bytes of host memory that the server may cache, by its settings, and that are not measured.
    pub allowed: u64,
    /// Number of captured CUDA graphs in the server's memory report; `None` without a report, or if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<u64>,
}

/// Speed of the server during a leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LegSpeed {
    /// Tokens per second of one generating slot; `None` if the server does not report them.
    pub tokens_per_second: Option<f64>,
    /// Median time from sending a request to the first token of its answer.
    #[serde(rename = "first_token_seconds", with = "warden_policies::seconds")]
    pub first_token: Option<Duration>,
    /// Number of measured requests.
    pub requests: u64,
}

/// Answer to the question if the growth of memory ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "settles")]
pub enum GrowthEnd {
    /// Growth has stopped.
    Yes {
        /// Last request at which memory grew.
        at_request: u64,
    },
    /// Memory grew up to the end of the leg.
    No,
    /// The leg was too short to say, or a cache was still filling.
    Unknown,
}

/// Finding on one kind of memory in a leg.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesFinding {
    /// Kind of memory.
    pub series: MemoryKind,
    /// Verdict of the leak detector.
    pub verdict: GrowthVerdict,
    /// Growth in bytes per request after the start of the leg, with a 95 % interval.
    pub per_request: Option<IntervalEstimate>,
    /// Bytes per request that went into measured pools, which the server keeps on purpose.
    pub pooled_per_request: Option<f64>,
    /// Growth in bytes per evaluated prompt token; `None` without prompt tokens.
    pub per_prompt_token: Option<f64>,
    /// Growth in bytes per generated token; `None` without generated tokens.
    pub per_output_token: Option<f64>,
    /// Growth in bytes per image; `None` without images.
    pub per_image: Option<f64>,
    /// End of the growth, if it ended.
    pub settles: GrowthEnd,
    /// Unit of work that causes the growth; only for a certain or suspected leak.
    pub blame: Option<GrowthBlame>,
    /// Bytes at the first reading after the warm-up.
    pub first: u64,
    /// Bytes at the last reading.
    pub last: u64,
    /// Most bytes at any reading between requests.
    pub peak: u64,
    /// Smallest growth, in bytes per request, that a leg of this length can show to be a leak.
    pub sees: f64,
    /// Captured CUDA graphs, if their number grows with requests and memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<CorrelatedHandles>,
}

/// Bytes per request above which a leg was too short to detect anything.
const DETECTION_LIMIT_MOST: f64 = 1e15;

impl SeriesFinding {
    /// Returns true if there were too few readings for any statement.
    pub fn is_too_short(&self) -> bool {
        !self.verdict.is_known() || self.sees > DETECTION_LIMIT_MOST
    }
}

/// Reason for the end of a leg.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum LegEnd {
    /// All requests were sent.
    Complete,
    /// The result was clear before the last request.
    Early,
    /// The time limit of a leg was reached.
    OutOfTime,
    /// The machine had almost no memory left.
    OutOfMemory {
        /// Description.
        why: String,
    },
    /// The operator interrupted the leg.
    Interrupted,
    /// The server exited by itself.
    Crashed {
        /// Description, with the server's last lines.
        why: String,
    },
    /// Another party ended the server: the kernel for lack of memory, an operator, a time limit.
    Killed {
        /// Description.
        why: String,
    },
    /// The server still runs, but answered only with errors, or not at all.
    Failed {
        /// Description.
        why: String,
    },
}

impl LegEnd {
    pub(crate) fn failure(&self) -> Option<&String> {
        match self {
            Self::Crashed { why } | Self::Killed { why } | Self::Failed { why } => Some(why),
            _ => None,
        }
    }
}

/// Findings on a leg: one fresh process under one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LegFinding {
    /// Workload of the leg.
    pub workload: Workload,
    /// Number of readings; one follows each step of work.
    pub steps: u64,
    /// Estimated number of readings that a verdict needs.
    #[serde(default)]
    pub enough: u64,
    /// Number of answered requests, including the warm-up.
    pub requests: u64,
    /// Work done, including the warm-up.
    pub work: WorkDone,
    /// Finding on each kind of memory, host memory first.
    pub series: Vec<SeriesFinding>,
    /// Speed of the leg.
    pub speed: LegSpeed,
    /// Reason for the end of the leg.
    pub ended: LegEnd,
    /// Crash that ended the leg, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash: Option<crash::WorkloadCrash>,
    /// True if the work was repeated without the prompt cache, to tell a leak from a filling cache.
    #[serde(default)]
    pub control: bool,
}

impl LegFinding {
    /// Returns the worst verdict on any kind of memory; `None` if no memory could be read.
    pub fn worst(&self) -> Option<GrowthVerdict> {
        self.series.iter().map(|series| series.verdict).max()
    }

    /// Returns the finding on one kind of memory.
    pub fn series_of(&self, series: MemoryKind) -> Option<&SeriesFinding> {
        self.series.iter().find(|found| found.series == series)
    }

    /// Returns true if host memory grew within caches that the server may fill and that are not measured.
    pub fn is_ambiguous(&self) -> bool {
        let host = self.series_of(MemoryKind::Host);
        host.is_some_and(|host| {
            host.verdict == GrowthVerdict::Bounded
                && host.pooled_per_request.is_none()
                && !matches!(host.settles, GrowthEnd::Yes { .. })
        })
    }

    /// Returns true if some kind of memory has too few readings, or none was read.
    pub fn is_too_short(&self) -> bool {
        self.series.is_empty() || self.series.iter().any(SeriesFinding::is_too_short)
    }

    /// Returns the leg as a crash run; `None` if the leg does not show if the server survived.
    pub fn as_crash_run(&self) -> Option<crash::CrashRun> {
        if let Some(crash) = &self.crash {
            return Some(crash::CrashRun { requests: crash.at_request, died: true });
        }
        let whole = matches!(self.ended, LegEnd::Complete | LegEnd::Early | LegEnd::OutOfTime);
        whole.then_some(crash::CrashRun { requests: self.requests, died: false })
    }

    /// Returns true if any kind of memory leaks.
    pub fn leaks(&self) -> bool {
        self.worst() == Some(GrowthVerdict::Leaking)
    }
}

#[cfg(test)]
mod tests;
