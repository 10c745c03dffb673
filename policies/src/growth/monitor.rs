//! Monitors all memory series (host and each GPU) of one process.

use serde::{Deserialize, Serialize};

use crate::growth::forecast::{RequestRate, forecast};
use crate::growth::series::{SeriesWatch, default_policy};
use crate::growth::{GrowthForecast, GrowthPolicy, GrowthVerdict, LeakPrior, SeriesGrowth, VerdictChange};
use crate::sample::{BackendSample, MemoryKind};
use crate::units::as_f64;

/// Monitors all memory series of one process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GrowthMonitor {
    #[serde(skip, default = "default_policy")]
    policy: GrowthPolicy,
    priors: Vec<LeakPrior>,
    declared: Vec<(MemoryKind, u64)>,
    watches: Vec<SeriesWatch>,
    growth: Vec<SeriesGrowth>,
    rate: RequestRate,
    last: Option<(std::time::Duration, u64)>,
}

impl GrowthMonitor {
    /// Creates a monitor for a process that was just spawned.
    pub fn new(policy: &GrowthPolicy) -> Self {
        Self::with_prior(policy, Vec::new())
    }

    /// Creates a monitor that knows the leaks of earlier processes, and reports these after a single test.
    pub fn with_prior(policy: &GrowthPolicy, priors: Vec<LeakPrior>) -> Self {
        Self {
            policy: policy.clone(),
            priors,
            declared: Vec::new(),
            watches: Vec::new(),
            growth: Vec::new(),
            rate: RequestRate::default(),
            last: None,
        }
    }

    /// Restores another monitor's state of the same process; false if unreadable or judged by other rules.
    pub fn resume(&mut self, written: &serde_json::Value) -> bool {
        let Ok(mut other) = Self::deserialize(written) else { return false };
        let whole = other.watches.len() == other.growth.len();
        if !whole || !other.watches.iter_mut().all(|watch| watch.resume_under(&self.policy)) {
            return false;
        }
        other.policy.clone_from(&self.policy);
        *self = other;
        true
    }

    /// Sets the bytes that the server is configured to cache in a series, in place of an earlier value; the
    /// policy's slack is added. With 0, the default, all growth counts.
    pub fn set_allowance(&mut self, series: MemoryKind, bytes: u64) {
        self.declared.retain(|(of, _)| *of != series);
        self.declared.push((series, bytes));
        if let Some(index) = self.watches.iter().position(|watch| watch.growth().series == series) {
            self.watches[index].declare(bytes);
            self.growth[index].clone_from(self.watches[index].growth());
        }
    }

    /// Adds a reading; returns the changed verdicts. Ignores old readings; restarts if counters have fallen.
    pub fn observe(&mut self, sample: &BackendSample) -> Vec<VerdictChange> {
        if let Some((at, requests)) = self.last {
            if sample.at < at {
                return Vec::new();
            }
            if sample.work.requests < requests {
                self.watches.iter_mut().for_each(SeriesWatch::restart);
                self.rate = RequestRate::default();
            }
        }
        self.last = Some((sample.at, sample.work.requests));
        self.rate.observe(sample.at, sample.work.requests, self.policy.rate_half_life);
        let host = sample.host.map(|_| MemoryKind::Host);
        let all: Vec<MemoryKind> =
            host.into_iter().chain(sample.vram.iter().map(|vram| MemoryKind::Vram(vram.gpu))).collect();
        all.into_iter().filter_map(|series| self.observe_one(series, sample)).collect()
    }

    fn observe_one(&mut self, series: MemoryKind, sample: &BackendSample) -> Option<VerdictChange> {
        let index = self.index(series);
        let watch = &mut self.watches[index];
        let before = watch.growth().verdict;
        let turned = watch.observe(sample);
        self.growth[index].clone_from(watch.growth());
        turned.then(|| VerdictChange {
            at: sample.at,
            request: sample.work.requests,
            before,
            growth: watch.growth().clone(),
        })
    }

    fn index(&mut self, series: MemoryKind) -> usize {
        if let Some(index) = self.growth.iter().position(|growth| growth.series == series) {
            return index;
        }
        let declared = self.declared.iter().find(|(of, _)| *of == series).map_or(0, |(_, bytes)| *bytes);
        let prior = self.priors.iter().find(|prior| prior.series == series).cloned();
        let watch = SeriesWatch::new(series, declared, prior, &self.policy);
        let index = self.growth.partition_point(|growth| growth.series < series);
        self.growth.insert(index, watch.growth().clone());
        self.watches.insert(index, watch);
        index
    }

    /// Returns the state of every series that was read at least once, host memory first.
    pub fn growth(&self) -> &[SeriesGrowth] {
        &self.growth
    }

    /// Returns the leaks found, to be passed to [`Self::with_prior`] for the next process.
    pub fn priors(&self) -> Vec<LeakPrior> {
        let leaking = self.growth.iter().filter(|growth| growth.verdict == GrowthVerdict::Leaking);
        let prior = |growth: &SeriesGrowth| {
            let slope = growth.slope?;
            Some(LeakPrior { series: growth.series, slope, blame: growth.blame.clone() })
        };
        leaking.filter_map(prior).collect()
    }

    /// Forecasts when a series reaches a limit, from its latest floor; `None` if the series does not grow.
    pub fn forecast(&self, series: MemoryKind, limit: u64) -> Option<GrowthForecast> {
        let watch = self.watches.iter().find(|watch| watch.growth().series == series)?;
        let growth = watch.growth();
        let slope = growth.slope.filter(|_| growth.verdict >= GrowthVerdict::Bounded)?;
        if growth.verdict == GrowthVerdict::Bounded && slope.low <= 0.0 {
            return None;
        }
        let now = watch.charged_now()?;
        let slope = watch.project_slope((as_f64(limit) - now).max(0.0))?;
        forecast(now, limit, slope, self.rate())
    }

    /// Returns requests per second, averaged with the policy's half-life; `None` before the first request.
    pub fn rate(&self) -> Option<f64> {
        self.rate.per_second()
    }
}
