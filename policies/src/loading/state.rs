//! Loading state of each model.

use std::time::Duration;

use super::demand::RequestDemand;
use super::facts::{LoadSpec, ModelReading};
use super::room::MemoryAmounts;

/// State of a model with respect to loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelLoadState {
    Out,
    /// The model was called as a companion, but has not asked to be loaded yet.
    Called {
        since: Duration,
    },
    Wants {
        /// Position in the queue.
        place: u64,
        /// Others may be unloaded for this model even if no request waits for it.
        urgent: bool,
    },
    Comes {
        since: Duration,
    },
    Serves {
        since: Duration,
    },
    Leaves,
}

#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
#[derive(Debug)]
pub(super) struct LoadedModel {
    pub(super) spec: LoadSpec,
    pub(super) state: ModelLoadState,
    pub(super) demand: RequestDemand,
    /// Memory that the model was admitted with and that is reserved for it.
    pub(super) promised: MemoryAmounts,
    /// Mapped bytes of the model file, which the kernel counts as free memory.
    pub(super) mapped: u64,
    pub(super) reading: Option<ModelReading>,
    /// Deadline for the first reading of a newly loaded or renewed model, whose memory is unknown until then.
    pub(super) reading_deadline: Option<Duration>,
    /// The next reading is the first with the present settings.
    pub(super) unread: bool,
    /// GPUs of each process.
    pub(super) places: Vec<Vec<usize>>,
    /// Time of the last change of settings, if the decision on it is pending.
    pub(super) renewal_asked: Option<Duration>,
    /// Promise with the new settings, if processes with earlier settings still run.
    pub(super) renewed_promise: Option<MemoryAmounts>,
    /// Time until which `renewed_promise` is valid.
    pub(super) renewed_until: Duration,
    /// The model was admitted although predicted to be too large; all memory is promised to it.
    pub(super) alone: bool,
    pub(super) load_time: Duration,
    /// The model was still being unloaded when another model called it as a companion.
    pub(super) call_pending: bool,
    /// The model was asked to reclaim memory, and has not answered.
    pub(super) reclaiming: bool,
    /// Time of the last reclaim request.
    pub(super) last_reclaim: Option<Duration>,
    /// Factor on the model's needs, raised when a start runs out of memory.
    pub(super) raised: f64,
    /// Time at which `raised` was set.
    pub(super) raised_at: Duration,
}

impl LoadedModel {
    pub(super) fn new(spec: LoadSpec) -> Self {
        Self {
            spec,
            state: ModelLoadState::Out,
            demand: RequestDemand::default(),
            promised: MemoryAmounts::none(),
            mapped: 0,
            reading: None,
            reading_deadline: None,
            unread: true,
            places: Vec::new(),
            renewal_asked: None,
            renewed_promise: None,
            renewed_until: Duration::ZERO,
            alone: false,
            load_time: Duration::ZERO,
            call_pending: false,
            reclaiming: false,
            last_reclaim: None,
            raised: 1.0,
            raised_at: Duration::ZERO,
        }
    }

    /// Returns true if the memory taken by the model shows only as a decrease of free memory.
    pub(super) const fn is_taking(&self) -> bool {
        matches!(self.state, ModelLoadState::Comes { .. }) || self.reading_deadline.is_some()
    }

    pub(super) const fn is_there(&self) -> bool {
        matches!(
            self.state,
            ModelLoadState::Comes { .. } | ModelLoadState::Serves { .. } | ModelLoadState::Leaves
        )
    }
}
