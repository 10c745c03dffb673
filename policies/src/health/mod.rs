//! Detects faults of a backend other than memory growth.
//!
//! | symptom | sign | action |
//! |---|---|---|
//! | wedged | requests wait, no token arrives and the main loop does not turn, for too long | drain; if silent, stop |
//! | compute errors | consecutive compute errors without a success | drain: the server only answers errors |
//! | device fault | an Xid error that ends a process's use of its GPU | drain |
//! | faulty answers | endless repetitions, no text or null, more often than by chance | drain, if allowed |
//! | altered | answers to fixed prompts differ from those of the young process | drain, if allowed |
//! | slow decode | tokens per second and busy slot are far below the earlier speed | recycle when quiet, if allowed |
//!
//! `patience` defines the time limits, from the server's own speed. A drained server that stays silent for as
//! long again is stopped. Latency alone is never a symptom: a busy server is slow and healthy. Causes outside
//! the server do not count: a client that does not read, a stopped process, a wait for the disk, a machine
//! that slept. Comments in an event stream are no progress: another thread of the server sends them.

mod answers;
mod offload;
mod patience;
mod probe_print;
mod speed;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recycle::{Reason, RecycleAction};
use crate::sample::{GpuIndex, MemoryKind};
use crate::units::{as_f64, format_span};
pub use answers::{AnswerFault, AnswerHistory, AnswerKeys, AnswerRuns, AnswerSigns, known_answer_defect};
pub use offload::{GpuOffload, OffloadLoss};
use patience::PromptPace;
pub use patience::{AwaitedWork, LimitBasis, SilenceLimit, TokenGaps};
pub use probe_print::{ProbeBaseline, ProbePrint, TokenChance};
use speed::SpeedTrend;

/// Settings of health. `defaults.toml`, section `[health]`, gives the reasons.
pub type HealthPolicy = crate::defaults::Health;

/// A symptom of illness.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum HealthSymptom {
    /// Requests wait, and the server has made no progress for too long.
    Wedged {
        /// Whole seconds without progress.
        seconds: u64,
        /// Limit that was exceeded.
        limit: SilenceLimit,
    },
    /// Consecutive answers reported that computation failed.
    ComputeErrors {
        /// Number of consecutive answers.
        in_a_row: u32,
    },
    /// Consecutive answers have a fault.
    FaultyAnswers {
        /// The fault.
        fault: AnswerFault,
        /// Conversations with a faulty answer since the last sound answer; for [`AnswerFault::Null`], requests.
        in_a_row: u32,
        /// Earlier answers of the model that could be judged.
        judged: u64,
        /// Answers among them with the fault.
        faulty: u64,
    },
    /// The answer to a fixed prompt differs from the one of the young process.
    Altered {
        /// Largest difference of a log-probability; `None` if one is null.
        distance: Option<f64>,
        /// Largest difference of a sound answer.
        allowed: f64,
    },
    /// Decoding is far below the backend's earlier speed.
    SlowDecode {
        /// Tokens per second and busy slot now.
        now: f64,
        /// Tokens per second and busy slot when the process was young.
        baseline: f64,
    },
    /// The GPU reported a fault.
    DeviceFault {
        /// GPU with the fault.
        gpu: GpuIndex,
        /// Number of the Xid error that the driver reported.
        xid: u64,
    },
}

impl HealthSymptom {
    /// Returns the reason used as a label.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Wedged { .. } => Reason::Wedged,
            Self::ComputeErrors { .. } => Reason::ComputeErrors,
            Self::FaultyAnswers { fault, .. } => match fault {
                AnswerFault::Repeating => Reason::Repeating,
                AnswerFault::Empty => Reason::EmptyAnswers,
                AnswerFault::Null => Reason::NullAnswers,
            },
            Self::Altered { .. } => Reason::Altered,
            Self::SlowDecode { .. } => Reason::SlowDecode,
            Self::DeviceFault { .. } => Reason::DeviceFault,
        }
    }

    /// Returns the action that the symptom requires.
    pub const fn action(&self) -> RecycleAction {
        match self {
            Self::SlowDecode { .. } => RecycleAction::RecycleWhenQuiet,
            Self::Wedged { .. }
            | Self::ComputeErrors { .. }
            | Self::FaultyAnswers { .. }
            | Self::Altered { .. }
            | Self::DeviceFault { .. } => RecycleAction::DrainNow,
        }
    }

    /// Returns the memory of the GPU with the fault; `None` for other symptoms.
    pub const fn series(&self) -> Option<MemoryKind> {
        match self {
            Self::DeviceFault { gpu, .. } => Some(MemoryKind::Vram(*gpu)),
            _ => None,
        }
    }
}

impl std::fmt::Display for HealthSymptom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Wedged { seconds, limit } => {
                let silent = format_span(Duration::from_secs(*seconds));
                write!(f, "requests wait for it and nothing has moved for {silent}: {limit}")
            }
            Self::ComputeErrors { in_a_row } => {
                write!(f, "the last {in_a_row} answers said that computing failed, and none succeeded")
            }
            Self::FaultyAnswers { fault, in_a_row, judged, faulty } => match fault {
                AnswerFault::Repeating => write!(
                    f,
                    "its last {in_a_row} conversations end in endless repetitions; {faulty} of the model's {judged} \
                     earlier answers did"
                ),
                AnswerFault::Empty => write!(
                    f,
                    "its last {in_a_row} conversations got answers without text; {faulty} of the model's {judged} \
                     earlier answers had none"
                ),
                AnswerFault::Null => write!(
                    f,
                    "its answers to the last {in_a_row} different requests have null or all-equal numbers; {faulty} of \
                     the model's {judged} earlier answers had"
                ),
            },
            Self::Altered { distance: Some(distance), allowed } => write!(
                f,
                "its answer to a fixed prompt has changed: a log-probability differs by {distance:.1} from the young \
                 process's, and sound answers differ by {allowed:.1} at most"
            ),
            Self::Altered { distance: None, .. } => {
                f.write_str("its answer to a fixed prompt has changed: a log-probability is null")
            }
            Self::SlowDecode { now, baseline } => {
                write!(f, "it decodes {now:.1} tokens/s per busy slot and once did {baseline:.1}")
            }
            Self::DeviceFault { gpu, xid } => write!(f, "GPU {} reported Xid {xid}", gpu.0),
        }
    }
}

/// Observation of a process. Counters never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HealthObservation {
    /// Time since the caller's epoch; never decreases.
    pub at: Duration,
    /// Requests that the server owes answers to.
    pub awaited: AwaitedWork,
    /// Data events and complete answers since the spawn, of requests that compute something.
    pub moves: u64,
    /// Decode calls since the spawn (`n_decode_total`); `None` if not reported or not answered.
    pub decodes: Option<u64>,
    /// Reported slot state; `None` if not asked or not answered.
    pub slots: Option<SlotActivity>,
    /// A healthy server of this build answers `/slots` or `/metrics`.
    pub tells: bool,
    /// Pauses between the server's tokens so far.
    pub gaps: Option<TokenGaps>,
    /// The process was stopped, or waited for pages from a disk, since the last observation.
    pub hindered: bool,
    /// Time that a reload of the model after a sleep may take; zero if the server does not sleep.
    pub wake: Duration,
    /// Consecutive answers reporting failed computation, without refused, invalid and cancelled requests.
    pub compute_errors: u32,
    /// Symptom of faulty answers, found by [`AnswerRuns`].
    pub faulty_answers: Option<HealthSymptom>,
}

/// Slot state reported by a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotActivity {
    /// Busy slots.
    pub busy: u32,
    /// Value that changes with every token and every prompt batch.
    pub mark: u64,
}

/// Health monitor of one process.
#[derive(Clone, Debug)]
pub struct HealthMonitor {
    policy: HealthPolicy,
    last: HealthObservation,
    /// Time of the last progress, or of the arrival of the first request that waits now.
    progress: Duration,
    /// Time at which the server's main loop last turned: shown by progress, or by an answer from that loop.
    turned: Duration,
    still: u32,
    /// Consecutive observations in which the server's main loop did not turn.
    silent: u32,
    /// The server can answer progress queries. Stays true when a wedged server no longer answers.
    told: bool,
    decodes: Option<u64>,
    mark: Option<u64>,
    pace: PromptPace,
    faults: Vec<(GpuIndex, u64)>,
    /// Speeds by the number of busy slots, because slots slow each other down: 1, 2 to 3, 4 to 7, 8 and more.
    speeds: [SpeedTrend; 4],
}

/// Observations without progress that make a wedge: a sleep of the machine lies between only two.
const WEDGE_OBSERVATIONS: u32 = 3;

impl HealthMonitor {
    /// Creates a monitor for a process that just became ready.
    pub fn new(policy: &HealthPolicy) -> Self {
        Self {
            policy: policy.clone(),
            last: HealthObservation::default(),
            progress: Duration::ZERO,
            turned: Duration::ZERO,
            still: 0,
            silent: 0,
            told: false,
            decodes: None,
            mark: None,
            pace: PromptPace::default(),
            faults: Vec::new(),
            speeds: Default::default(),
        }
    }

    /// Adds an observation.
    pub fn observe(&mut self, look: &HealthObservation) {
        let last = std::mem::replace(&mut self.last, *look);
        let answered = look.decodes.is_some() || look.slots.is_some();
        self.told |= look.tells || answered;
        let mark = look.slots.map(|slots| slots.mark);
        let changed =
            |known: Option<u64>, new: Option<u64>| known.zip(new).is_some_and(|(old, new)| old != new);
        let moved = look.moves != last.moves
            || changed(self.decodes, look.decodes)
            || changed(self.mark, mark)
            // The loop turns and no slot is busy: the request waits for something else, such as a download.
            || look.slots.is_some_and(|slots| slots.busy == 0);
        self.decodes = look.decodes.or(self.decodes);
        self.mark = mark.or(self.mark);
        let since_last = look.at.saturating_sub(last.at);
        if look.awaited.count() == 0 || last.awaited.count() == 0 || moved {
            (self.progress, self.turned, self.still, self.silent) = (look.at, look.at, 0, 0);
            return;
        }
        if look.hindered {
            // The server is not responsible for the time since the last observation.
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

    /// Records an evaluated prompt of `all` tokens, `new` of them not cached, and its time in milliseconds.
    pub fn record_prompt(&mut self, new: u64, all: u64, ms: f64) {
        self.pace.record_prompt(new, all, ms);
    }

    /// Returns true if the server should be asked for its progress: a request waits without any sign of it.
    pub fn needs_query(&self) -> bool {
        self.still > 0
    }

    /// Returns the time without progress and its limit; `None` if no request waits.
    pub fn stalled(&self) -> Option<(Duration, SilenceLimit)> {
        (self.last.awaited.count() > 0).then(|| (self.last.at.saturating_sub(self.progress), self.limit()))
    }

    fn limit(&self) -> SilenceLimit {
        let HealthObservation { awaited, gaps, wake, .. } = &self.last;
        self.pace.limit(awaited, *gaps, self.told, *wake, &self.policy)
    }

    fn find_wedge(&self) -> Option<HealthSymptom> {
        if self.last.awaited.count() == 0 {
            return None;
        }
        let limit = self.limit();
        let since = |moment: Duration| self.last.at.saturating_sub(moment);
        let wedged = |since: Duration, limit| HealthSymptom::Wedged { seconds: since.as_secs(), limit };
        let silent = since(self.turned);
        if self.silent >= WEDGE_OBSERVATIONS && silent.as_secs_f64() >= limit.seconds {
            return Some(wedged(silent, limit));
        }
        let seconds = limit.seconds.max(self.policy.wedged_after.as_secs_f64());
        let still = since(self.progress);
        (self.told && self.still >= WEDGE_OBSERVATIONS && still.as_secs_f64() >= seconds)
            .then(|| wedged(still, SilenceLimit { seconds, basis: LimitBasis::Unmoved }))
    }

    /// Records the speed of one answer. `busy`: requests in flight, including this one.
    pub fn record_speed(&mut self, at: Duration, tokens: u64, seconds: f64, busy: u32) {
        let speed = as_f64(tokens) / seconds;
        if tokens == 0 || !speed.is_finite() || speed <= 0.0 {
            return;
        }
        let bucket = busy.max(1).ilog2().min(3) as usize;
        self.speeds[bucket].add_reading(at, speed);
    }

    /// Records an Xid error on a GPU that the backend uses.
    pub fn record_xid(&mut self, gpu: GpuIndex, xid: u64) {
        if is_fatal(xid) && !self.faults.contains(&(gpu, xid)) {
            self.faults.push((gpu, xid));
        }
    }

    /// Returns the present symptoms, the most serious first.
    pub fn symptoms(&self) -> Vec<HealthSymptom> {
        let fault = self.faults.first().map(|(gpu, xid)| HealthSymptom::DeviceFault { gpu: *gpu, xid: *xid });
        let streak = self.last.compute_errors;
        let errors = (self.policy.compute_errors > 0 && streak >= self.policy.compute_errors)
            .then_some(HealthSymptom::ComputeErrors { in_a_row: streak });
        let faulty = self.last.faulty_answers;
        let slow = self.speeds.iter().find_map(SpeedTrend::symptom);
        [fault, errors, self.find_wedge(), faulty, slow].into_iter().flatten().collect()
    }
}

/// Returns true for an Xid after which no process can continue to use the GPU.
///
/// | Xid | meaning (NVIDIA, "Xid Errors") |
/// |---|---|
/// | 48 | uncorrectable double-bit ECC error |
/// | 62 | the power controller halted |
/// | 64 | remapping of a bad row failed |
/// | 79 | the GPU has fallen off the bus |
/// | 95 | uncontained ECC error |
/// | 119, 120 | the GPU's system processor does not answer, or failed |
/// | 140 | unrecovered ECC error |
///
/// Faults of one program (13, 31, 43, 45, 94) are not fatal, because NVML does not name the process; the
/// backend's own faults show as compute errors or an exit. Notes and corrected errors (63, 92, 154) are not
/// fatal either, nor are link errors (74), because traffic may use another route.
pub(crate) const fn is_fatal(xid: u64) -> bool {
    matches!(xid, 48 | 62 | 64 | 79 | 95 | 119 | 120 | 140)
}
