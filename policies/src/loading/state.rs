//! Loading state of each model.

use std::time::Duration;

use super::amounts::MemoryAmounts;
use super::facts::{LoadSpec, ModelReading};

/// Time constant in seconds of the fading request count.
const FADE_SECONDS: f64 = 1800.0;

/// Request count of a model, in which older requests count less.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestDemand {
    /// Request count, decaying exponentially with time.
    count: f64,
    asked: u64,
    at: Duration,
}

impl RequestDemand {
    /// Records the total number of requests so far.
    pub fn record_total(&mut self, now: Duration, asked: u64) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        let news = u32::try_from(asked.saturating_sub(self.asked)).unwrap_or(u32::MAX);
        self.count = self.count * (-passed / FADE_SECONDS).exp() + f64::from(news);
        (self.asked, self.at) = (asked, now.max(self.at));
    }

    /// Estimates the seconds to the next request: the usual gap, or the idle time if longer. Can be infinite.
    pub fn expected_gap(&self, idle_for: Duration) -> f64 {
        if self.count <= 0.0 {
            f64::INFINITY
        } else {
            (FADE_SECONDS / self.count).max(idle_for.as_secs_f64())
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelLoadState {
    Out,
    /// The model was called as a companion, but has not asked to be loaded yet.
    Called {
        since: Duration,
    },
    Wants {
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

#[derive(Debug)]
pub(super) struct LoadedModel {
    pub(super) spec: LoadSpec,
    pub(super) state: ModelLoadState,
    pub(super) demand: RequestDemand,
    pub(super) admitted: AdmittedMemory,
    pub(super) measured: ModelMeasurement,
    pub(super) places: Vec<Vec<usize>>,
    pub(super) renewal: SettingsRenewal,
    pub(super) load_time: Duration,
    /// The model was still being unloaded when another model called it as a companion.
    pub(super) call_pending: bool,
    pub(super) reclaim: ReclaimCall,
    pub(super) raised: RaisedNeeds,
}

/// Memory that a model was admitted with.
#[derive(Debug, Default)]
pub(super) struct AdmittedMemory {
    /// Memory that is reserved for the model.
    pub(super) promised: MemoryAmounts,
    /// Mapped bytes of the model file, which the kernel counts as free memory.
    pub(super) mapped: u64,
    /// The model was admitted although predicted to be too large; all memory is promised to it.
    pub(super) alone: bool,
}

#[derive(Debug)]
pub(super) struct ModelMeasurement {
    pub(super) reading: Option<ModelReading>,
    /// Deadline for the first reading of a newly loaded or renewed model, whose memory is unknown until then.
    pub(super) deadline: Option<Duration>,
    /// The next reading is the first with the present settings.
    pub(super) is_due: bool,
}

impl ModelMeasurement {
    pub(super) const UNREAD: Self = Self { reading: None, deadline: None, is_due: true };
}

/// Change of the settings of a loaded model.
#[derive(Debug, Default)]
pub(super) struct SettingsRenewal {
    /// Time of the last change, if the decision on it is pending.
    pub(super) asked: Option<Duration>,
    /// Promise with the new settings, if processes with earlier settings still run.
    pub(super) promise: Option<MemoryAmounts>,
    pub(super) until: Duration,
}

#[derive(Debug, Default)]
pub(super) struct ReclaimCall {
    /// The model was asked to reclaim memory, and has not answered.
    pub(super) pending: bool,
    pub(super) last: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct RaisedNeeds {
    /// Factor on the model's needs, raised when a start runs out of memory.
    pub(super) factor: f64,
    pub(super) at: Duration,
}

impl LoadedModel {
    pub(super) fn new(spec: LoadSpec) -> Self {
        Self {
            spec,
            state: ModelLoadState::Out,
            demand: RequestDemand::default(),
            admitted: AdmittedMemory::default(),
            measured: ModelMeasurement::UNREAD,
            places: Vec::new(),
            renewal: SettingsRenewal::default(),
            load_time: Duration::ZERO,
            call_pending: false,
            reclaim: ReclaimCall::default(),
            raised: RaisedNeeds { factor: 1.0, at: Duration::ZERO },
        }
    }

    /// Returns true if the memory taken by the model shows only as a decrease of free memory.
    pub(super) const fn is_taking(&self) -> bool {
        matches!(self.state, ModelLoadState::Comes { .. }) || self.measured.deadline.is_some()
    }

    pub(super) const fn is_there(&self) -> bool {
        matches!(
            self.state,
            ModelLoadState::Comes { .. } | ModelLoadState::Serves { .. } | ModelLoadState::Leaves
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_asked_often_is_expected_soon_until_he_has_rested_for_long() {
        let secs = Duration::from_secs;
        let (mut busy, mut rare, never) =
            (RequestDemand::default(), RequestDemand::default(), RequestDemand::default());
        for minute in 0..60 {
            busy.record_total(secs(minute * 60), (minute + 1) * 10);
            rare.record_total(secs(minute * 60), minute / 20);
        }
        let idle = secs(5);
        assert!(busy.expected_gap(idle) < 10.0, "{}", busy.expected_gap(idle));
        assert!((300.0..3600.0).contains(&rare.expected_gap(idle)), "{}", rare.expected_gap(idle));
        assert!(never.expected_gap(idle).is_infinite());
        assert!(busy.expected_gap(secs(900)) >= 900.0);
    }
}
