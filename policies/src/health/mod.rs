//! Whether a backend is ill in other ways than by its memory.
//!
//! | symptom | sign | what it calls for |
//! |---|---|---|
//! | wedged | requests wait for it, no token comes and its loop does not turn, for longer than its own pace explains | drain; what is still silent after the same time again is ended |
//! | compute errors | errors of the computation in a row, not one success between them | drain: it answers nothing but errors |
//! | device fault | an Xid that ends a process's use of its GPU | drain |
//! | slow decode | tokens per second and busy slot fall far below the backend's own | when quiet, if the mode allows |
//!
//! How long is too long: `patience`. It never looks at latency alone: a busy server is slow and sound. What is no fault of
//! the server's does not count: a client that does not read, a process that is stopped or waits for the disk, a machine
//! that slept. Nor does what only looks like work: comments that keep a stream open come from another thread than tokens.

mod offload;
mod patience;
mod speed;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recycle::{Action, Reason};
use crate::sample::{GpuIndex, MemoryKind};
use crate::units::{exact, span};
pub use offload::{Lost, Offload};
use patience::Pace;
pub use patience::{Awaited, Basis, Gaps, Limit};
use speed::Speed;

/// The numbers. Reasons: `defaults.toml`, section `[health]`.
pub type HealthPolicy = crate::defaults::Health;

/// A sign of illness.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Symptom {
    /// Requests wait for it and nothing has moved for so many seconds.
    Wedged {
        /// Whole seconds without progress.
        seconds: u64,
        /// How long that would have been sound.
        limit: Limit,
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
    pub const fn series(&self) -> Option<MemoryKind> {
        match self {
            Self::DeviceFault { gpu, .. } => Some(MemoryKind::Vram(*gpu)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Symptom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Wedged { seconds, limit } => {
                let silent = span(Duration::from_secs(*seconds));
                write!(f, "requests wait for it and nothing has moved for {silent}: {limit}")
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Look {
    /// Time since the caller's epoch; never goes back.
    pub at: Duration,
    /// What it owes.
    pub awaited: Awaited,
    /// Events with data, and whole answers, of requests that compute, since its spawn.
    pub moves: u64,
    /// Its count of decodes since its spawn (`n_decode_total`); `None` if it does not tell, or does not answer.
    pub decodes: Option<u64>,
    /// What it says of its slots; `None` if it was not asked, or does not answer.
    pub slots: Option<Slots>,
    /// It is known to answer one of these questions when it is well.
    pub tells: bool,
    /// Pauses between its tokens so far.
    pub gaps: Option<Gaps>,
    /// Since the last look it was stopped, or waited for pages of memory from a disk.
    pub hindered: bool,
    /// How long it may take to load its model again after a sleep; zero if it does not sleep.
    pub wake: Duration,
    /// Answers in a row, up to now, that said that computing failed. Refusals, bad requests and clients that leave neither
    /// count nor end the streak.
    pub compute_errors: u32,
}

/// What a server says of its slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slots {
    /// Slots that work.
    pub busy: u32,
    /// Changes with every token and every batch of a prompt.
    pub mark: u64,
}

/// Watches one generation.
#[derive(Clone, Debug)]
pub struct Health {
    policy: HealthPolicy,
    last: Look,
    /// When something moved last, or when the first of the present requests came.
    progress: Duration,
    /// When its loop was last seen to turn: by progress, or by an answer that the loop gives.
    turned: Duration,
    /// Looks in a row without progress.
    still: u32,
    /// Looks in a row in which its loop was not seen to turn.
    silent: u32,
    /// It answers questions about its work, or once did: one that is wedged does not.
    told: bool,
    decodes: Option<u64>,
    mark: Option<u64>,
    pace: Pace,
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
            turned: Duration::ZERO,
            still: 0,
            silent: 0,
            told: false,
            decodes: None,
            mark: None,
            pace: Pace::default(),
            faults: Vec::new(),
            speeds: Default::default(),
        }
    }

    /// Takes a look in.
    pub fn observe(&mut self, look: &Look) {
        let last = std::mem::replace(&mut self.last, *look);
        let answered = look.decodes.is_some() || look.slots.is_some();
        self.told |= look.tells || answered;
        let mark = look.slots.map(|slots| slots.mark);
        let changed =
            |known: Option<u64>, new: Option<u64>| known.zip(new).is_some_and(|(old, new)| old != new);
        let moved = look.moves != last.moves
            || changed(self.decodes, look.decodes)
            || changed(self.mark, mark)
            // Its loop turns and has nothing to do: whoever waits, waits for something else, as a download.
            || look.slots.is_some_and(|slots| slots.busy == 0);
        self.decodes = look.decodes.or(self.decodes);
        self.mark = mark.or(self.mark);
        let since_last = look.at.saturating_sub(last.at);
        if look.awaited.count() == 0 || last.awaited.count() == 0 || moved {
            (self.progress, self.turned, self.still, self.silent) = (look.at, look.at, 0, 0);
            return;
        }
        if look.hindered {
            // That time is not the server's.
            self.progress = self.progress.saturating_add(since_last);
            self.turned = self.turned.saturating_add(since_last);
            return;
        }
        self.still = self.still.saturating_add(1);
        self.silent = self.silent.saturating_add(1);
        if answered {
            (self.turned, self.silent) = (look.at, 0);
        }
    }

    /// A prompt was evaluated: so many new tokens, of so many in all, in so many milliseconds.
    pub fn prompt(&mut self, new: u64, all: u64, ms: f64) {
        self.pace.prompt(new, all, ms);
    }

    /// Whether the server should be asked how far it is: somebody waits, and nothing else shows it.
    pub fn asks(&self) -> bool {
        self.still > 0
    }

    /// For how long nothing has moved although somebody waits, and how long that would be sound; `None` if nobody waits.
    pub fn stalled(&self) -> Option<(Duration, Limit)> {
        (self.last.awaited.count() > 0).then(|| (self.last.at.saturating_sub(self.progress), self.limit()))
    }

    fn limit(&self) -> Limit {
        let Look { awaited, gaps, wake, .. } = &self.last;
        self.pace.limit(awaited, *gaps, self.told, *wake, &self.policy)
    }

    fn wedged(&self) -> Option<Symptom> {
        if self.last.awaited.count() == 0 {
            return None;
        }
        let limit = self.limit();
        let since = |moment: Duration| self.last.at.saturating_sub(moment);
        let wedged = |since: Duration, limit| Symptom::Wedged { seconds: since.as_secs(), limit };
        let silent = since(self.turned);
        if self.silent >= STILL_LOOKS && silent.as_secs_f64() >= limit.seconds {
            return Some(wedged(silent, limit));
        }
        let seconds = limit.seconds.max(self.policy.wedged_after.as_secs_f64());
        let still = since(self.progress);
        (self.told && self.still >= STILL_LOOKS && still.as_secs_f64() >= seconds)
            .then(|| wedged(still, Limit { seconds, basis: Basis::Unmoved }))
    }

    /// Takes the speed of one answer in: tokens generated, the seconds that this took, and the requests in flight beside
    /// it, itself included.
    pub fn speed(&mut self, at: Duration, tokens: u64, seconds: f64, busy: u32) {
        let speed = exact(tokens) / seconds;
        if tokens == 0 || !speed.is_finite() || speed <= 0.0 {
            return;
        }
        let bucket = busy.max(1).ilog2().min(3) as usize;
        self.speeds[bucket].take(at, speed);
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
        let slow = self.speeds.iter().find_map(Speed::symptom);
        [fault, errors, self.wedged(), slow].into_iter().flatten().collect()
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
pub(crate) const fn is_fatal(xid: u64) -> bool {
    matches!(xid, 48 | 62 | 64 | 79 | 95 | 119 | 120 | 140)
}
