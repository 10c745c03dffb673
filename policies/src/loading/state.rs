//! Loading state of each model.

use std::time::Duration;

use super::demand::RequestDemand;
use super::facts::{LoadSpec, ModelReading};
use super::room::MemoryAmounts;

/// Life-cycle state of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelLoadState {
    Out,
    /// Called as a companion, and has not asked to be loaded yet.
    Called {
        since: Duration,
    },
    Wants {
        /// Position in the queue.
        place: u64,
        /// Others are unloaded for it even without waiting requests.
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
    /// Promised memory.
    pub(super) promised: MemoryAmounts,
    /// Mapped bytes of the model file; the kernel counts them as free.
    pub(super) mapped: u64,
    pub(super) reading: Option<ModelReading>,
    /// Deadline for the first reading of a newly loaded or renewed model; until then its memory is unknown.
    pub(super) reading_deadline: Option<Duration>,
    /// The next reading is the first one under the present settings.
    pub(super) unread: bool,
    /// GPUs of each process.
    pub(super) places: Vec<Vec<usize>>,
    /// Time of the last change of settings, while the decision on it is pending.
    pub(super) renewal_asked: Option<Duration>,
    /// Promise under the new settings, while processes with earlier ones remain.
    pub(super) renewed_promise: Option<MemoryAmounts>,
    /// Deadline for `renewed`.
    pub(super) renewed_until: Duration,
    /// Admitted although too large by the book: the promise is all memory.
    pub(super) alone: bool,
    pub(super) load_time: Duration,
    /// Was being unloaded when another model called it as a companion.
    pub(super) call_pending: bool,
    /// Was asked to reclaim memory, and has not answered.
    pub(super) reclaiming: bool,
    /// Time of the last reclaim request.
    pub(super) last_reclaim: Option<Duration>,
    /// Factor on its needs after a start ran out of memory.
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

    /// Returns true while its taken memory shows only as a decrease of free memory.
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
