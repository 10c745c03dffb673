//! Input of a recycle decision.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::policy::{MemoryBudget, RecyclePolicy};
use crate::growth::{GrowthForecast, GrowthMonitor, SeriesGrowth};
use crate::health::HealthSymptom;
use crate::replacement_cost::ReplacementLoad;
use crate::sample::{MemoryKind, WorkDone};
use crate::share::SharedChoice;

/// Latest reading of one kind of memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeriesReading {
    /// Kind of memory that was read.
    pub series: MemoryKind,
    /// Bytes charged to the process group; `None` if unknown, which disables the rules of this series.
    pub charged: Option<u64>,
    /// Bytes at the previous reading, some seconds ago; `None` if unknown.
    pub before: Option<u64>,
    /// Bytes when the process became ready; `None` if unknown.
    pub at_ready: Option<u64>,
    /// True if `charged` is an estimate.
    pub estimated: bool,
    /// Total bytes of the machine or the GPU.
    pub total: Option<u64>,
    /// Available bytes of the machine, or free bytes of the GPU.
    pub free: Option<u64>,
    /// Bytes of declared caches, without measured pools.
    pub allowance: u64,
}

/// Facts about one kind of memory of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeriesFacts {
    /// Kind of memory.
    pub series: MemoryKind,
    /// Bytes charged to the process group; `None` if unknown, which disables the rules of this series.
    pub charged: Option<u64>,
    /// True if the memory grew since the previous reading; false if unknown.
    pub rising: bool,
    /// Bytes when the process became ready; `None` if unknown.
    pub at_ready: Option<u64>,
    /// True if `charged` is an estimate. Budgets apply to estimates, but no process is killed for one.
    pub estimated: bool,
    /// Total bytes of the machine or the GPU.
    pub total: Option<u64>,
    /// Available bytes of the machine, or free bytes of the GPU.
    pub free: Option<u64>,
    /// Declared caches in bytes.
    pub allowance: u64,
    /// State of the memory according to the leak detector.
    pub growth: Option<SeriesGrowth>,
    /// Work and time until the soft budget is reached.
    pub to_soft: Option<GrowthForecast>,
    /// Work and time until the hard budget is reached.
    pub to_hard: Option<GrowthForecast>,
    /// Work and time until the memory is exhausted.
    pub to_end: Option<GrowthForecast>,
    /// Budgets in bytes.
    #[serde(default)]
    pub budget: MemoryBudget,
}

impl SeriesFacts {
    /// Creates facts from a reading only.
    pub fn from_bytes(series: MemoryKind, charged: Option<u64>) -> Self {
        Self { series, charged, ..Self::default() }
    }

    /// Combines a reading with the detector's state.
    pub fn gather(policy: &RecyclePolicy, monitor: &GrowthMonitor, reading: &SeriesReading) -> Self {
        let SeriesReading { series, charged, before, at_ready, estimated, total, free, allowance } = *reading;
        let mut facts = Self {
            rising: charged.zip(before).is_some_and(|(now, before)| now > before),
            at_ready,
            estimated,
            total,
            free,
            allowance,
            growth: monitor.growth().iter().find(|growth| growth.series == series).cloned(),
            ..Self::from_bytes(series, charged)
        };
        let budget = policy.budget(&facts);
        facts.budget = budget;
        let until = |limit: Option<u64>| limit.and_then(|limit| monitor.forecast(series, limit));
        facts.to_soft = until(budget.soft);
        facts.to_hard = until(budget.hard);
        facts.to_end = until(charged.zip(free).map(|(charged, free)| charged.saturating_add(free)));
        facts
    }

    /// Returns the bytes of a fresh, settled process: the detector's baseline, or the size when it was ready.
    pub fn fresh(&self) -> Option<u64> {
        self.growth.as_ref().and_then(|growth| growth.baseline).or(self.at_ready)
    }

    /// Returns the bytes that a recycle would free; `None` if unknown.
    pub fn gain(&self) -> Option<u64> {
        Some(self.charged?.saturating_sub(self.fresh()?))
    }
}

/// Facts about a process at the moment of the decision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecycleFacts {
    /// Known kinds of memory; the rules for all others are disabled.
    pub series: Vec<SeriesFacts>,
    /// Symptoms of faults ([`crate::health::HealthMonitor`]).
    pub symptoms: Vec<HealthSymptom>,
    /// Set if this process was chosen because a shared budget is exceeded ([`crate::share`]).
    pub shared: Option<SharedChoice>,
    /// Kind of memory in which a waiting prompt fits only into a fresh process ([`crate::admission`]).
    pub admission: Option<MemoryKind>,
    /// Time since the process became ready.
    pub age: Duration,
    /// Work done since the spawn.
    pub work: WorkDone,
    /// Time without a request in flight; `None` if one is in flight now.
    pub idle_for: Option<Duration>,
    /// Time for which a replacement has been wanted; `None` if it was not wanted before.
    pub wanted_for: Option<Duration>,
    /// Time for which the process has drained with [`super::RecycleAction::DrainNow`] or above; `None`
    /// otherwise. A drain that lasts too long becomes a kill.
    pub urgent_for: Option<Duration>,
    /// Local time in minutes of the day; `None` if unknown: then no window is closed.
    pub minute: Option<u16>,
    /// Cost of a replacement now.
    pub load: ReplacementLoad,
    /// Random number in `[0, 1)`, drawn once for each process.
    pub unit: f64,
}

impl RecycleFacts {
    /// Returns the bytes of one kind of memory; `None` if unknown.
    pub fn charged(&self, series: Option<MemoryKind>) -> Option<u64> {
        self.series.iter().find(|facts| Some(facts.series) == series)?.charged
    }
}
