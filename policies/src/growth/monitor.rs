//! All series of one generation together.
//!
//! It sorts readings by series and keeps the rate of requests; each series is judged by its own watch.

use serde::{Deserialize, Serialize};

use crate::growth::forecast::{Rate, forecast};
use crate::growth::series::{Watch, usual};
use crate::growth::{Forecast, Growth, GrowthPolicy, Prior, Verdict, VerdictChange};
use crate::sample::{MemoryKind, Sample};
use crate::units::exact;

/// Watches all series of one generation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Monitor {
    #[serde(skip, default = "usual")]
    policy: GrowthPolicy,
    priors: Vec<Prior>,
    declared: Vec<(MemoryKind, u64)>,
    watches: Vec<Watch>,
    growth: Vec<Growth>,
    rate: Rate,
    last: Option<(std::time::Duration, u64)>,
}

impl Monitor {
    /// A monitor for a generation that has just been spawned.
    pub fn new(policy: &GrowthPolicy) -> Self {
        Self::with_prior(policy, Vec::new())
    }

    /// A monitor that knows what leaked in earlier generations of the same build, model and flags: the same growth is
    /// called a leak at its first sign instead of after several. It is never called one without a sign of its own.
    pub fn with_prior(policy: &GrowthPolicy, priors: Vec<Prior>) -> Self {
        Self {
            policy: policy.clone(),
            priors,
            declared: Vec::new(),
            watches: Vec::new(),
            growth: Vec::new(),
            rate: Rate::default(),
            last: None,
        }
    }

    /// Goes on with what another one of the same generation had seen, which was written down as JSON. False, and nothing is
    /// changed, if it cannot be read, or judged otherwise than this one does: then it begins anew.
    pub fn resume(&mut self, written: &serde_json::Value) -> bool {
        let Ok(mut other) = Self::deserialize(written) else { return false };
        let whole = other.watches.len() == other.growth.len();
        if !whole || !other.watches.iter_mut().all(|watch| watch.resumes(&self.policy)) {
            return false;
        }
        other.policy.clone_from(&self.policy);
        *self = other;
        true
    }

    /// What the server is told to keep in a series, in bytes, beyond the slack of the policy. May be called again when
    /// more becomes known (a log line tells the size of a checkpoint); the last call counts. With 0, the default,
    /// nothing is declared: all growth counts, and there is no slack.
    pub fn allow(&mut self, series: MemoryKind, bytes: u64) {
        self.declared.retain(|(of, _)| *of != series);
        self.declared.push((series, bytes));
        if let Some(index) = self.watches.iter().position(|watch| watch.growth().series == series) {
            self.watches[index].declare(bytes);
            self.growth[index].clone_from(self.watches[index].growth());
        }
    }

    /// Takes a reading in. Returns the changes of verdict that it causes. A reading that is older than the last one is
    /// passed over; counters that fall begin everything anew.
    pub fn observe(&mut self, sample: &Sample) -> Vec<VerdictChange> {
        if let Some((at, requests)) = self.last {
            if sample.at < at {
                return Vec::new();
            }
            if sample.work.requests < requests {
                self.watches.iter_mut().for_each(Watch::restart);
                self.rate = Rate::default();
            }
        }
        self.last = Some((sample.at, sample.work.requests));
        self.rate.observe(sample.at, sample.work.requests, self.policy.rate_half_life);
        let host = sample.host.map(|_| MemoryKind::Host);
        let all: Vec<MemoryKind> =
            host.into_iter().chain(sample.vram.iter().map(|vram| MemoryKind::Vram(vram.gpu))).collect();
        all.into_iter().filter_map(|series| self.observe_one(series, sample)).collect()
    }

    fn observe_one(&mut self, series: MemoryKind, sample: &Sample) -> Option<VerdictChange> {
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
        let watch = Watch::new(series, declared, prior, &self.policy);
        let index = self.growth.partition_point(|growth| growth.series < series);
        self.growth.insert(index, watch.growth().clone());
        self.watches.insert(index, watch);
        index
    }

    /// The present picture, series by series: those that were read at least once, the host first.
    pub fn growth(&self) -> &[Growth] {
        &self.growth
    }

    /// What to remember for the next generation: the series that leak.
    pub fn priors(&self) -> Vec<Prior> {
        let leaking = self.growth.iter().filter(|growth| growth.verdict == Verdict::Leaking);
        let prior = |growth: &Growth| {
            let slope = growth.slope?;
            Some(Prior { series: growth.series, slope, blame: growth.blame.clone() })
        };
        leaking.filter_map(prior).collect()
    }

    /// What is left until a series reaches a limit, counted from its latest floor; `None` while it does not grow.
    pub fn forecast(&self, series: MemoryKind, limit: u64) -> Option<Forecast> {
        let watch = self.watches.iter().find(|watch| watch.growth().series == series)?;
        let growth = watch.growth();
        let slope = growth.slope.filter(|_| growth.verdict >= Verdict::Bounded)?;
        if growth.verdict == Verdict::Bounded && slope.low <= 0.0 {
            return None;
        }
        let now = watch.charged_now()?;
        let slope = watch.ahead((exact(limit) - now).max(0.0))?;
        forecast(now, limit, slope, self.rate())
    }

    /// Requests per second, averaged with a half-life of the policy; `None` before the first request.
    pub fn rate(&self) -> Option<f64> {
        self.rate.per_second()
    }
}
