//! What an experiment finds out about a server's memory.
//!
//! ```text
//!  fresh process ─ ready ─ warm-up ─┬─ request(s) ─ idle ─ reading ─┬─ decided, or the limit ─ stop     one leg
//!                                   └───────────────<───────────────┘
//!  readings ──> Judge ──> Finding: verdict, growth per unit of work, whether it settles
//!  findings ──> across: who pays, over all legs together
//! ```
//!
//! The verdicts are the detector's own ([`warden_policies::growth`]): what an experiment calls a leak, the supervisor would have
//! replaced a backend for. An experiment only sees to it that there is enough of one kind of work, and nothing else.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use warden_policies::growth::{Blame, Interval, Verdict};
use warden_policies::sample::{MemoryKind, Sample, Work};

mod across;
mod attribution;
pub mod between;
pub mod bisect;
pub mod crash;
pub mod headroom;
mod judge;
mod line;
pub mod proof;
pub mod sequential;
mod student;
pub mod survive;
mod trial;
mod workload;

pub use across::blame_across;
pub use attribution::{Attribution, Follows, Trace};
pub use judge::{Judge, Next, fewest_readings};
pub use line::Line;
pub use workload::{Workload, WorkloadError};

/// One reading of a leg, taken when nothing was in flight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// What was read, and the work done by then.
    pub sample: Sample,
    /// Bytes of host memory that the server is told to keep and that nobody measures, as known at that moment.
    pub allowed: u64,
    /// Captured graphs that the server has, by its memory report; `None` without a report, or where it limits them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<u64>,
}

/// How fast a leg was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Tokens generated per second of one slot while it generates; `None` where the server does not tell.
    pub tokens_per_second: Option<f64>,
    /// Median time from sending a request to the first token of its answer.
    #[serde(rename = "first_token_seconds", with = "warden_policies::seconds")]
    pub first_token: Option<Duration>,
    /// Requests that were measured.
    pub requests: u64,
}

/// Whether a memory stops growing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "settles")]
pub enum Settles {
    /// It has stopped.
    Yes {
        /// From this request on it grew no more.
        at_request: u64,
    },
    /// It grew to the end.
    No,
    /// Too short to say, or a cache that was still filling.
    Unknown,
}

/// What one memory did in a leg.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesFinding {
    /// Which memory.
    pub series: MemoryKind,
    /// What the detector says.
    pub verdict: Verdict,
    /// Bytes per request, after the start of the leg, with the ends of a 95 % interval; `None` with too few readings.
    pub per_request: Option<Interval>,
    /// Bytes of that which went into pools that the server keeps on purpose, where those are measured.
    pub pooled_per_request: Option<f64>,
    /// The same growth for each prompt token evaluated; `None` where there were none.
    pub per_prompt_token: Option<f64>,
    /// The same growth for each token generated.
    pub per_output_token: Option<f64>,
    /// The same growth for each image.
    pub per_image: Option<f64>,
    /// Whether it stops.
    pub settles: Settles,
    /// Which unit of work pays; only where it leaks or may leak.
    pub blame: Option<Blame>,
    /// Bytes at the first reading, after the warm-up.
    pub first: u64,
    /// Bytes at the last reading.
    pub last: u64,
    /// The most bytes at any reading between requests.
    pub peak: u64,
    /// The least growth in bytes per request that a leg of this length could have called a leak.
    pub sees: f64,
    /// Captured graphs that become more with the requests and that this memory rises with, by the server's memory report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<Follows>,
}

/// A leg that could only have seen more bytes a request than this was too short to see anything.
const MOST_SEEN: f64 = 1e15;

impl SeriesFinding {
    /// Whether there were too few readings to say anything.
    pub fn is_too_short(&self) -> bool {
        !self.verdict.is_known() || self.sees > MOST_SEEN
    }
}

/// How a leg ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Ended {
    /// All requests were sent.
    Complete,
    /// It was clear before the end.
    Early,
    /// The time for a leg was over.
    OutOfTime,
    /// The machine had hardly any memory left.
    OutOfMemory {
        /// In words.
        why: String,
    },
    /// Somebody asked for an end.
    Interrupted,
    /// The server ended by itself.
    Crashed {
        /// What happened, with the server's last words.
        why: String,
    },
    /// Somebody else ended the server: the kernel for lack of memory, an operator, a limit of time.
    Killed {
        /// What is known of it.
        why: String,
    },
    /// The server runs and does not work: it answered with errors only, or not at all.
    Failed {
        /// What happened.
        why: String,
    },
}

/// What a leg found: one fresh process and one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The work.
    pub workload: Workload,
    /// Readings, which is steps of work.
    pub steps: u64,
    /// Readings that would be enough for a verdict, as far as can be told.
    #[serde(default)]
    pub enough: u64,
    /// Requests that were answered, the warm-up included.
    pub requests: u64,
    /// All work, the warm-up included.
    pub work: Work,
    /// Memory by memory, the host first.
    pub series: Vec<SeriesFinding>,
    /// How fast it was.
    pub speed: Speed,
    /// How it ended.
    pub ended: Ended,
    /// The crash that ended it, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash: Option<crash::Crash>,
    /// A second leg of the same work without the prompt cache, because with it nobody could tell what grows.
    #[serde(default)]
    pub control: bool,
}

impl Finding {
    /// The worst verdict of all memories; `None` if no memory could be read.
    pub fn worst(&self) -> Option<Verdict> {
        self.series.iter().map(|series| series.verdict).max()
    }

    /// What one memory did.
    pub fn of(&self, series: MemoryKind) -> Option<&SeriesFinding> {
        self.series.iter().find(|found| found.series == series)
    }

    /// Whether host memory grew within what the server is told to keep, and nobody measured whether it was that which grew.
    pub fn is_ambiguous(&self) -> bool {
        let host = self.of(MemoryKind::Host);
        host.is_some_and(|host| {
            host.verdict == Verdict::Bounded
                && host.pooled_per_request.is_none()
                && !matches!(host.settles, Settles::Yes { .. })
        })
    }

    /// Whether it leaves open if a memory leaks: too few readings of it, or no memory that could be read.
    pub fn is_too_short(&self) -> bool {
        self.series.is_empty() || self.series.iter().any(SeriesFinding::is_too_short)
    }

    /// Whether the server survived this work; `None` where that is not known.
    pub fn survived(&self) -> Option<crash::Run> {
        if let Some(crash) = &self.crash {
            return Some(crash::Run { requests: crash.at_request, died: true });
        }
        let whole = matches!(self.ended, Ended::Complete | Ended::Early | Ended::OutOfTime);
        whole.then_some(crash::Run { requests: self.requests, died: false })
    }

    /// Whether any memory leaks.
    pub fn leaks(&self) -> bool {
        self.worst() == Some(Verdict::Leaking)
    }
}

#[cfg(test)]
mod tests;
