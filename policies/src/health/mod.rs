//! Whether a backend is ill in other ways than by its memory.
//!
//! | symptom | sign | what it calls for |
//! |---|---|---|
//! | wedged | work in flight, no token counted and no byte streamed for long | drain, which ends by its deadline |
//! | compute errors | errors of the computation in a row, not one success between them | drain: it answers nothing but errors |
//! | device fault | an Xid that ends a process's use of its GPU | drain |
//! | slow decode | tokens per second and busy slot fall far below the backend's own | when quiet, if the mode allows |
//!
//! A server that tells no counter (`--metrics`) may write a long answer that is not streamed: it gets more time.
//!
//! It never looks at latency alone: a busy server is slow and sound.

mod speed;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recycle::{Action, Reason};
use crate::sample::{GpuIndex, Series};
use speed::Speed;

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

/// One look at a generation. Counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// Time since the caller's epoch; never goes back.
    pub at: Duration,
    /// Requests in flight.
    pub in_flight: u32,
    /// Bytes of answers that it has streamed since its spawn.
    pub bytes_streamed: u64,
    /// Its count of decodes since its spawn (`n_decode_total`); `None` if it does not tell.
    pub decodes: Option<u64>,
    /// Answers in a row, up to now, that said that computing failed. Refusals, bad requests and clients that leave neither
    /// count nor end the streak.
    pub compute_errors: u32,
}

/// Watches one generation.
#[derive(Clone, Debug)]
pub struct Health {
    policy: HealthPolicy,
    last: Look,
    /// When something moved last, or when the first of the present requests came.
    progress: Duration,
    /// Looks in a row without progress.
    still: u32,
    /// It tells its count of decodes, or once did: one that is wedged may not even answer that.
    counts: bool,
    faults: Vec<(GpuIndex, u64)>,
    /// By the number of busy slots: 1, 2 and 3, 4 to 7, 8 and more. A slot among eight is slower than a lonely one.
    speeds: [Speed; 4],
}

/// Looks without progress that a wedge needs: a machine that slept has a long pause between two looks.
const STILL_LOOKS: u32 = 3;

impl Health {
    /// For a generation that has just become ready.
    pub fn new(policy: &HealthPolicy) -> Self {
        Self {
            policy: policy.clone(),
            last: Look::default(),
            progress: Duration::ZERO,
            still: 0,
            counts: false,
            faults: Vec::new(),
            speeds: Default::default(),
        }
    }

    /// Takes a look in.
    pub fn observe(&mut self, look: &Look) {
        let last = std::mem::replace(&mut self.last, *look);
        self.counts |= look.decodes.is_some();
        let moved = look.bytes_streamed > last.bytes_streamed || look.decodes > last.decodes;
        if look.in_flight == 0 || last.in_flight == 0 || moved {
            (self.progress, self.still) = (look.at, 0);
        } else {
            self.still = self.still.saturating_add(1);
        }
    }

    /// Takes the speed of one answer in: tokens generated, the seconds that this took, and the requests in flight beside
    /// it, itself included.
    #[expect(clippy::cast_precision_loss, reason = "tokens of one answer")]
    pub fn speed(&mut self, at: Duration, tokens: u64, seconds: f64, busy: u32) {
        let speed = tokens as f64 / seconds;
        if tokens == 0 || !speed.is_finite() || speed <= 0.0 {
            return;
        }
        let bucket = busy.max(1).ilog2().min(3) as usize;
        self.speeds[bucket].take(at, speed, &self.policy);
    }

    /// The driver reported a fault on a GPU that the backend uses.
    pub fn xid(&mut self, gpu: GpuIndex, xid: u64) {
        if is_fatal(xid) && !self.faults.contains(&(gpu, xid)) {
            self.faults.push((gpu, xid));
        }
    }

    /// What it suffers from now, the weightiest first.
    pub fn symptoms(&self) -> Vec<Symptom> {
        let fault = self.faults.first().map(|(gpu, xid)| Symptom::DeviceFault { gpu: *gpu, xid: *xid });
        let streak = self.last.compute_errors;
        let errors = (self.policy.compute_errors > 0 && streak >= self.policy.compute_errors)
            .then_some(Symptom::ComputeErrors { in_a_row: streak });
        let since = self.last.at.saturating_sub(self.progress);
        let patience = if self.counts { self.policy.wedged_after } else { self.policy.wedged_unseen };
        let wedged = (self.last.in_flight > 0 && self.still >= STILL_LOOKS && since >= patience)
            .then_some(Symptom::Wedged { seconds: since.as_secs() });
        let slow = self.speeds.iter().find_map(|speed| speed.symptom(&self.policy));
        [fault, errors, wedged, slow].into_iter().flatten().collect()
    }
}

/// Whether an Xid means that no process can go on with the GPU as it is.
///
/// | Xid | what (NVIDIA, "Xid Errors") |
/// |---|---|
/// | 48 | uncorrectable double-bit ECC error |
/// | 62 | the power controller halted |
/// | 64 | remapping of a bad row failed |
/// | 79 | the GPU has fallen off the bus |
/// | 95 | uncontained ECC error |
/// | 119, 120 | the GPU's system processor does not answer, or failed |
/// | 140 | unrecovered ECC error |
///
/// Not fatal here: faults of one program (13, 31, 43, 45, 94), which NVML does not tie to a process; if it was ours,
/// errors of the computation or an exit show it. Nor notes and corrected errors (63, 92, 154) and links (74), which
/// traffic may route around.
pub const fn is_fatal(xid: u64) -> bool {
    matches!(xid, 48 | 62 | 64 | 79 | 95 | 119 | 120 | 140)
}
