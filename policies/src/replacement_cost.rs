//! Compares the cost of a replacement now with the cost at the next lull in traffic.
//!
//! All costs are in seconds that requests spend waiting:
//!
//! ```text
//!  now        running answers end (D), the model loads (L); new requests wait meanwhile:        a · (D + L)² / 2
//!  at a lull  nothing runs, the model loads:                                                    a · L² / 2
//!  too late   memory was exhausted first: running requests fail, then the model loads:          n · F + a · L² / 2
//! ```
//!
//! with `a` arrivals per second, `n` requests in flight and `F` the cost of a failed request. Lulls come at
//! random, one every `G` on average, so memory that lasts for `T` is exhausted before the next lull with
//! probability `exp(-T/G)`. A replacement now is better if that risk costs more than waiting for a lull
//! saves. A replacement with overlap costs nothing at any time.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::defaults::Moment;
use crate::growth::GrowthForecast;
use crate::units::{as_f64, format_span};

/// Multiple of the mean time between lulls that is reserved for finding one; a longer search happens once in
/// 160,000 cases.
const LULL_SEARCH_FACTOR: f64 = 12.0;
/// Cost of a failed request in waiting time: people give up after about a minute.
const FAILED_REQUEST_COST: Duration = Duration::from_secs(60);

/// Settings for choosing the moment. `defaults.toml`, section `[moment]`, gives the reasons.
pub type ReplacementCostPolicy = Moment;

/// Circumstances of a replacement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplacementLoad {
    /// Time that the last start took from spawn to ready; `None` if unknown.
    pub load_time: Option<Duration>,
    /// Number of requests in flight.
    pub requests: u32,
    /// Estimated tokens that the requests in flight will still produce.
    pub tokens: u64,
    /// Tokens per second of all slots together; `None` if unknown.
    pub tokens_per_second: Option<f64>,
    /// Requests that arrive per second; `None` if unknown.
    pub arrivals: Option<f64>,
    /// The next process starts before the old one drains.
    pub overlap: bool,
    /// Mean time between lulls ([`LullHistory::expected_interval`]); `None` if unknown.
    pub lull_every: Option<Duration>,
}

/// Costs of a replacement now and at a lull, so that the choice can be printed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplacementCosts {
    /// True if now is the better moment.
    pub now: bool,
    /// Cost of a replacement now, in seconds of waiting.
    pub cost_now: f64,
    /// Cost of a replacement at a lull, in seconds of waiting.
    pub cost_lull: f64,
    /// Cost of exhausted memory, in seconds of waiting.
    pub cost_end: f64,
    /// Probability that memory is exhausted before the next lull, 0 to 1.
    pub risk: f64,
}

impl std::fmt::Display for ReplacementCosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let time = |seconds: f64| format_span(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        write!(
            f,
            "now it costs {} of waiting, at the next lull {}; with {:.0} % memory runs out before, which costs {}: {}",
            time(self.cost_now),
            time(self.cost_lull),
            self.risk * 100.0,
            time(self.cost_end),
            if self.now { "now" } else { "wait" }
        )
    }
}

impl ReplacementLoad {
    /// Returns the time before memory is exhausted at which the search for a lull must begin.
    pub fn lull_search_time(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.lull_every?.as_secs_f64() * LULL_SEARCH_FACTOR).ok()
    }
}

/// Compares a replacement now with one at the next lull. `end`: forecast for the exhaustion of memory;
/// without it, waiting for a lull is always better.
pub fn weigh_replacement(
    policy: &ReplacementCostPolicy,
    load: &ReplacementLoad,
    end: Option<&GrowthForecast>,
) -> ReplacementCosts {
    let arrivals = load.arrivals.filter(|rate| rate.is_finite() && *rate > 0.0).unwrap_or(0.0);
    let loading = load.load_time.unwrap_or_default().as_secs_f64();
    let draining = drain_seconds(load);
    let queued = |gap: f64| arrivals * gap * gap / 2.0;
    let (cost_now, cost_lull) =
        if load.overlap { (0.0, 0.0) } else { (queued(draining + loading), queued(loading)) };
    let cost_end = f64::from(load.requests) * FAILED_REQUEST_COST.as_secs_f64() + queued(loading);
    let lull = load.lull_every.unwrap_or(policy.first_lull).as_secs_f64().max(1.0);
    // Use the early end of the forecast: too early costs seconds, too late costs requests.
    let left = end.and_then(|end| end.seconds).map(|seconds| seconds.low.max(0.0));
    let risk = left.map_or(0.0, |left| (-left / lull).exp());
    let now = left.is_some() && risk * (cost_end - cost_lull).max(0.0) > cost_now - cost_lull;
    ReplacementCosts { now, cost_now, cost_lull, cost_end, risk }
}

fn drain_seconds(load: &ReplacementLoad) -> f64 {
    match load.tokens_per_second {
        Some(speed) if speed > 0.0 && speed.is_finite() => as_f64(load.tokens) / speed,
        _ => 0.0,
    }
}

/// Statistics of a backend's lulls in traffic.
#[derive(Clone, Debug)]
pub struct LullHistory {
    kept: usize,
    first: Duration,
    /// Start of the observation, or the beginning of the latest lull that was forgotten.
    since: Duration,
    begun: VecDeque<Duration>,
}

impl LullHistory {
    /// Creates statistics that start at `now` (time since the caller's epoch).
    pub fn new(numbers: &Moment, now: Duration) -> Self {
        Self { kept: numbers.lulls.max(1), first: numbers.first_lull, since: now, begun: VecDeque::new() }
    }

    /// Records that the backend has been idle since `since`. The same lull may be reported repeatedly.
    pub fn record_lull(&mut self, since: Duration) {
        // Two clock readings for one lull differ slightly; two lulls differ by at least one request.
        if self.begun.back().is_some_and(|last| since <= last.saturating_add(Duration::from_millis(1))) {
            return;
        }
        self.begun.push_back(since);
        if self.begun.len() > self.kept
            && let Some(oldest) = self.begun.pop_front()
        {
            self.since = oldest;
        }
    }

    /// Returns the mean time between lulls at `now`, or the time since the last lull if that is longer.
    pub fn expected_interval(&self, now: Duration) -> Duration {
        let watched = now.saturating_sub(self.since);
        let Some(last) = self.begun.back() else { return watched.max(self.first) };
        let count = u32::try_from(self.begun.len()).unwrap_or(u32::MAX).max(1);
        (watched / count).max(now.saturating_sub(*last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::growth::IntervalEstimate;
    use proptest::prelude::*;

    fn policy() -> ReplacementCostPolicy {
        crate::defaults().moment
    }

    fn end_in(low: f64) -> GrowthForecast {
        let seconds = IntervalEstimate { value: low * 1.5, low, high: low * 3.0 };
        let requests = IntervalEstimate { value: 1.0, low: 1.0, high: 1.0 };
        GrowthForecast { limit: 0, requests, seconds: Some(seconds) }
    }

    fn busy() -> ReplacementLoad {
        ReplacementLoad {
            load_time: Some(Duration::from_secs(10)),
            requests: 4,
            tokens: 800,
            tokens_per_second: Some(100.0),
            arrivals: Some(2.0),
            overlap: false,
            lull_every: Some(Duration::from_secs(600)),
        }
    }

    #[test]
    fn without_a_forecast_a_lull_is_always_worth_waiting_for() {
        let weighing = weigh_replacement(&policy(), &busy(), None);
        assert!(!weighing.now && weighing.risk == 0.0);
        // 8 s until the answers end and 10 s to load at 2 requests a second, against the load alone.
        assert!(
            (weighing.cost_now - 324.0).abs() < 1e-9 && (weighing.cost_lull - 100.0).abs() < 1e-9,
            "{weighing:?}"
        );
        assert!((weighing.cost_end - 340.0).abs() < 1e-9, "{weighing:?}");
    }

    #[test]
    fn memory_that_ends_before_the_next_lull_makes_now_the_moment() {
        assert!(weigh_replacement(&policy(), &busy(), Some(&end_in(30.0))).now);
        assert!(!weigh_replacement(&policy(), &busy(), Some(&end_in(36_000.0))).now);
        let text = weigh_replacement(&policy(), &busy(), Some(&end_in(30.0))).to_string();
        assert!(text.ends_with("now") && text.contains("95 %"), "{text}");
    }

    #[test]
    fn a_backend_with_frequent_lulls_waits_for_one_where_a_busy_one_does_not() {
        let often = ReplacementLoad { lull_every: Some(Duration::from_secs(30)), ..busy() };
        assert!(!weigh_replacement(&policy(), &often, Some(&end_in(300.0))).now);
        let never = ReplacementLoad { lull_every: Some(Duration::from_secs(86_400)), ..busy() };
        assert!(weigh_replacement(&policy(), &never, Some(&end_in(300.0))).now);
    }

    #[test]
    fn a_drain_that_costs_more_than_running_out_is_put_off() {
        let long = ReplacementLoad { tokens: 100_000, requests: 1, ..busy() };
        assert!(!weigh_replacement(&policy(), &long, Some(&end_in(1.0))).now);
    }

    #[test]
    fn an_overlap_under_hazard_costs_nothing_and_happens_now() {
        let overlap = ReplacementLoad { overlap: true, ..busy() };
        let weighing = weigh_replacement(&policy(), &overlap, Some(&end_in(600.0)));
        assert!(weighing.now && weighing.cost_now == 0.0, "{weighing:?}");
    }

    #[test]
    fn lulls_are_counted_once_and_a_drought_counts_as_it_is() {
        let seconds = Duration::from_secs;
        let mut lulls = LullHistory::new(&crate::defaults().moment, seconds(0));
        assert_eq!(lulls.expected_interval(seconds(10)), seconds(3600), "nothing is known yet");
        assert_eq!(lulls.expected_interval(seconds(9000)), seconds(9000), "and it has been busy for so long");
        for begun in [100, 100, 200, 300, 300] {
            lulls.record_lull(seconds(begun));
        }
        assert_eq!(lulls.expected_interval(seconds(300)), seconds(100));
        assert_eq!(lulls.expected_interval(seconds(5000)), seconds(4700));
    }

    #[test]
    fn old_lulls_are_forgotten() {
        let seconds = Duration::from_secs;
        let mut lulls = LullHistory::new(&crate::defaults().moment, seconds(0));
        (1..=10).for_each(|n| lulls.record_lull(seconds(n * 3600)));
        (1..=40).for_each(|n| lulls.record_lull(seconds(36_000 + n * 60)));
        assert_eq!(lulls.expected_interval(seconds(36_000 + 2400)), seconds(60));
    }

    proptest! {
        #[test]
        fn less_time_left_never_means_more_patience(a in 0.0f64..1e6, b in 0.0f64..1e6, requests in 0u32..50, lull in 1u64..10_000) {
            let load = ReplacementLoad { requests, lull_every: Some(Duration::from_secs(lull)), ..busy() };
            let (soon, late) = (weigh_replacement(&policy(), &load, Some(&end_in(a.min(b)))), weigh_replacement(&policy(), &load, Some(&end_in(a.max(b)))));
            prop_assert!(soon.now || !late.now);
            prop_assert!((0.0..=1.0).contains(&soon.risk));
        }

        #[test]
        fn senseless_rates_give_no_senseless_prices(arrivals in prop_oneof![Just(f64::NAN), Just(-1.0), Just(f64::INFINITY)], speed in prop_oneof![Just(f64::NAN), Just(0.0), Just(-5.0)]) {
            let load = ReplacementLoad { arrivals: Some(arrivals), tokens_per_second: Some(speed), ..busy() };
            let weighing = weigh_replacement(&policy(), &load, Some(&end_in(10.0)));
            prop_assert!(weighing.cost_now.is_finite() && weighing.cost_end.is_finite());
        }
    }
}
