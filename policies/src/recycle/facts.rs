//! Input of a decision.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::policy::{MemoryBudget, RecyclePolicy};
use crate::growth::{GrowthForecast, GrowthMonitor, SeriesGrowth};
use crate::health::HealthSymptom;
use crate::replacement_cost::ReplacementLoad;
use crate::sample::{MemoryKind, WorkDone};
use crate::share::SharedChoice;

/// Latest reading of one memory of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeriesReading {
    /// Memory that was read.
    pub series: MemoryKind,
    /// Bytes charged to the process group; `None` if unknown, which disables the rules of this series.
    pub charged: Option<u64>,
    /// Bytes at the previous reading, some seconds ago; `None` if unknown.
    pub before: Option<u64>,
    /// Bytes when ready; `None` if unknown.
    pub at_ready: Option<u64>,
    /// True if `charged` is an estimate.
    pub estimated: bool,
    /// Total bytes of the machine or the device.
    pub total: Option<u64>,
    /// Available bytes of the machine, or free bytes of the device.
    pub free: Option<u64>,
    /// Declared caches in bytes, beyond the measured pools.
    pub allowance: u64,
    /// Most bytes of such a process in an experiment with its largest prompts; `None` without one.
    pub worst: Option<u64>,
}

/// Facts about one memory of a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesFacts {
    /// Memory in question.
    pub series: MemoryKind,
    /// Bytes charged to the process group; `None` if unknown, which disables the rules of this series.
    pub charged: Option<u64>,
    /// True if it grew since the previous reading; false if unknown.
    pub rising: bool,
    /// Bytes when ready; `None` if unknown.
    pub at_ready: Option<u64>,
    /// True if `charged` is an estimate. Budgets apply to estimates, too, but no process is killed because
    /// of one.
    pub estimated: bool,
    /// Total bytes of the machine or the device.
    pub total: Option<u64>,
    /// Available bytes of the machine, or free bytes of the device.
    pub free: Option<u64>,
    /// Declared caches in bytes.
    pub allowance: u64,
    /// Most bytes of such a process in an experiment with its largest prompts; `None` without one.
    #[serde(default)]
    pub worst: Option<u64>,
    /// State of the series by the detector.
    pub growth: Option<SeriesGrowth>,
    /// Forecast to the soft budget.
    pub to_soft: Option<GrowthForecast>,
    /// Forecast to the hard budget.
    pub to_hard: Option<GrowthForecast>,
    /// Forecast to the exhaustion of the memory.
    pub to_end: Option<GrowthForecast>,
    /// Budgets in bytes.
    #[serde(default)]
    pub budget: MemoryBudget,
}

impl SeriesFacts {
    /// Creates a series with only a reading.
    pub const fn from_bytes(series: MemoryKind, charged: Option<u64>) -> Self {
        Self {
            series,
            charged,
            rising: false,
            at_ready: None,
            estimated: false,
            total: None,
            free: None,
            allowance: 0,
            worst: None,
            growth: None,
            to_soft: None,
            to_hard: None,
            to_end: None,
            budget: MemoryBudget { soft: None, hard: None },
        }
    }

    /// Combines a reading with the detector's state. The supervisor, `policy replay` and the simulation all
    /// use this function.
    pub fn gather(policy: &RecyclePolicy, monitor: &GrowthMonitor, reading: &SeriesReading) -> Self {
        let SeriesReading { series, charged, before, at_ready, estimated, total, free, allowance, worst } =
            *reading;
        let mut facts = Self {
            rising: charged.zip(before).is_some_and(|(now, before)| now > before),
            at_ready,
            estimated,
            total,
            free,
            allowance,
            worst,
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

    /// Returns the bytes of a fresh, settled process: the detector's baseline, or its size when ready.
    pub fn fresh(&self) -> Option<u64> {
        self.growth.as_ref().and_then(|growth| growth.baseline).or(self.at_ready)
    }

    /// Returns the bytes that a recycle would free; `None` if unknown.
    pub fn gain(&self) -> Option<u64> {
        Some(self.charged?.saturating_sub(self.fresh()?))
    }
}

/// Facts about a generation at the moment of the decision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecycleFacts {
    /// Known memories; the rules of others are disabled.
    pub series: Vec<SeriesFacts>,
    /// Symptoms of illness ([`crate::health::HealthMonitor`]).
    pub symptoms: Vec<HealthSymptom>,
    /// Choice of this generation by a shared budget ([`crate::share`]).
    pub shared: Option<SharedChoice>,
    /// Memory for which a prompt waits for a fresh process, because it would not fit into the present one
    /// ([`crate::admission`]).
    pub admission: Option<MemoryKind>,
    /// Time since ready.
    pub age: Duration,
    /// Work done.
    pub work: WorkDone,
    /// Time without a request in flight; `None` while one is.
    pub idle_for: Option<Duration>,
    /// Time for which a replacement has been wanted; `None` if only now.
    pub wanted_for: Option<Duration>,
    /// Time for which it has drained with [`super::RecycleAction::DrainNow`] or more; `None` if only now, or if it
    /// does not drain. A draining process is judged, too: so a drain that lasts too long becomes a kill.
    pub urgent_for: Option<Duration>,
    /// Local time, in minutes of the day; `None` if unknown, which closes no window.
    pub minute: Option<u16>,
    /// Cost of a replacement now.
    pub load: ReplacementLoad,
    /// Random number of this generation in `[0, 1)`, drawn once.
    pub unit: f64,
}

impl RecycleFacts {
    /// Returns the bytes of one memory; `None` if unknown.
    pub fn charged(&self, series: Option<MemoryKind>) -> Option<u64> {
        self.series.iter().find(|facts| Some(facts.series) == series)?.charged
    }
}
