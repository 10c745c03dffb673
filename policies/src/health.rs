//! Whether a backend is ill in other ways than by its memory.
//!
//! | symptom | sign | what it calls for |
//! |---|---|---|
//! | wedged | work in flight, no token counted and no byte streamed for long | drain, which ends by its deadline |
//! | compute errors | errors of the computation in a row, not one success between them | drain: it answers nothing but errors |
//! | device fault | an Xid that ends a process's use of its GPU | drain |
//! | slow decode | tokens per second and busy slot fall far below the backend's own | when quiet, if the mode allows |
//!
//! It never looks at latency alone: a busy server is slow and sound.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recycle::{Action, Reason};
use crate::sample::{GpuIndex, Series};

/// The numbers. Reasons: `defaults.toml`, section `[health]`.
pub type HealthPolicy = crate::defaults::Health;

/// A sign of illness.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Symptom {
    /// Work is in flight and nothing has moved for so many seconds.
    Wedged {
        /// Whole seconds without progress.
        seconds: u64,
    },
    /// So many answers in a row said that computing failed.
    ComputeErrors {
        /// Answers in a row.
        in_a_row: u32,
    },
    /// It decodes at this share of its own speed.
    SlowDecode {
        /// Tokens per second and busy slot now.
        now: f64,
        /// And when it was young.
        baseline: f64,
    },
    /// Its GPU reported a fault.
    DeviceFault {
        /// Which GPU.
        gpu: GpuIndex,
        /// The driver's number of the fault.
        xid: u64,
    },
}

impl Symptom {
    /// The label of it.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Wedged { .. } => Reason::Wedged,
            Self::ComputeErrors { .. } => Reason::ComputeErrors,
            Self::SlowDecode { .. } => Reason::SlowDecode,
            Self::DeviceFault { .. } => Reason::DeviceFault,
        }
    }

    /// What it calls for.
    pub const fn action(&self) -> Action {
        match self {
            Self::SlowDecode { .. } => Action::RecycleWhenQuiet,
            Self::Wedged { .. } | Self::ComputeErrors { .. } | Self::DeviceFault { .. } => Action::DrainNow,
        }
    }

    /// The GPU that it is about, if one is.
    pub const fn series(&self) -> Option<Series> {
        match self {
            Self::DeviceFault { gpu, .. } => Some(Series::Vram(*gpu)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Symptom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Wedged { seconds } => {
                write!(f, "requests are in flight and nothing has moved for {seconds} s")
            }
            Self::ComputeErrors { in_a_row } => {
                write!(f, "the last {in_a_row} answers said that computing failed, and none succeeded")
            }
            Self::SlowDecode { now, baseline } => {
                write!(f, "it decodes {now:.1} tokens/s per busy slot and once did {baseline:.1}")
            }
            Self::DeviceFault { gpu, xid } => write!(f, "GPU {} reported Xid {xid}", gpu.0),
        }
    }
}

/// One look at a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Look {
    /// Time since the caller's epoch; never goes back.
    pub at: Duration,
    /// Requests in flight.
    pub in_flight: u32,
    /// Bytes of answers that it has streamed since its spawn.
    pub bytes_streamed: u64,
    /// Its count of decodes since its spawn (`n_decode_total`); `None` if it does not tell.
    pub decodes: Option<u64>,
    /// Tokens generated per second and busy slot since the last look; `None` if nothing was generated.
    pub speed: Option<f64>,
}

/// How an answer ended, as far as health is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was computed.
    Computed,
    /// It said that computing failed ([`is_compute_error`]).
    ComputeError,
}

/// Watches one generation.
#[derive(Clone, Debug)]
pub struct Health {
    policy: HealthPolicy,
}

impl Health {
    /// For a generation that has just become ready.
    pub fn new(policy: &HealthPolicy) -> Self {
        Self { policy: policy.clone() }
    }

    /// Takes a look in.
    pub fn observe(&mut self, look: &Look) {
        let _ = (look, &self.policy);
    }

    /// Takes the end of an answer in. Refusals, bad requests and clients that leave are no answers.
    pub fn answered(&mut self, answer: Answer) {
        let _ = answer;
    }

    /// The driver reported a fault on a GPU that the backend uses.
    pub fn xid(&mut self, gpu: GpuIndex, xid: u64) {
        let _ = (gpu, xid);
    }

    /// What it suffers from now, the weightiest first.
    pub fn symptoms(&self) -> Vec<Symptom> {
        Vec::new()
    }
}

/// Whether an Xid ends a process's use of the GPU.
pub const fn is_fatal(xid: u64) -> bool {
    let _ = xid;
    false
}

/// Whether an answer says that computing failed, as against a bad request or an overloaded server.
pub fn is_compute_error(status: u16, body: &str) -> bool {
    let _ = (status, body);
    false
}
