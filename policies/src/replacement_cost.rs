//! What a replacement costs now, and at the next lull: whether a replacement that could wait for a lull should rather happen now, under load.
//!
//! Both ways have a price, in seconds that requests spend waiting:
//!
//! ```text
//!  now        the running answers end (D), the model loads (L); whoever comes meanwhile waits:  a · (D + L)² / 2
//!  at a lull  nothing runs, the model loads:                                                    a · L² / 2
//!  too late   memory ran out first: what runs fails, then the model loads:                      n · F + a · L² / 2
//! ```
//!
//! with `a` arrivals per second, `n` requests in flight and `F` what a failed request is worth. Lulls come at random, one
//! every `G` on average, so memory that lasts for `T` runs out before the next one with the probability `exp(-T/G)`.
//! Now is right when that risk costs more than the lull saves. With overlap a replacement has no gap, so now costs
//! nothing; but a lull costs nothing either, and the old process lives on until its answers end.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::defaults::Moment;
use crate::growth::Forecast;
use crate::units::{exact, span};

/// Lulls come at random, so a stretch of twelve mean times without one happens once in 160,000: an earlier restart only
/// throws away what the process could still have served.
const LULLS_AHEAD: f64 = 12.0;
/// People give up after about a minute, so a request that fails costs as much as one that waits so long.
const FAILED_REQUEST_COST: Duration = Duration::from_secs(60);

/// The numbers. Reasons: `defaults.toml`, section `[moment]`.
pub type ReplacementCostPolicy = Moment;

/// What a replacement meets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// From spawn to ready, as it was the last time; `None` if not known.
    pub load_time: Option<Duration>,
    /// Requests in flight.
    pub requests: u32,
    /// Tokens that they are expected to produce still.
    pub tokens: u64,
    /// Tokens per second, all slots together; `None` if not known.
    pub tokens_per_second: Option<f64>,
    /// Requests that arrive per second; `None` if not known.
    pub arrivals: Option<f64>,
    /// The next process is started before the old one drains.
    pub overlap: bool,
    /// Mean time between lulls ([`Lulls::expected`]); `None` if not known.
    pub lull_every: Option<Duration>,
}

/// Both prices, so that the choice can be printed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weighing {
    /// Whether now is the better moment.
    pub now: bool,
    /// Seconds of waiting that a replacement costs now.
    pub cost_now: f64,
    /// Seconds of waiting that it costs at a lull.
    pub cost_lull: f64,
    /// Seconds of waiting that running out of memory costs.
    pub cost_end: f64,
    /// Probability that memory runs out before the next lull, 0 to 1.
    pub risk: f64,
}

impl std::fmt::Display for Weighing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let time = |seconds: f64| span(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
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

impl Load {
    /// The time before the end of the memory at which the search for a lull has to begin; `None` if the lulls are not
    /// known.
    pub fn lull_search_time(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.lull_every?.as_secs_f64() * LULLS_AHEAD).ok()
    }
}

/// Weighs a replacement now against one at the next lull. `end` is the forecast of the end of the memory; without one
/// there is no hazard, and a lull is always worth waiting for.
pub fn weigh(policy: &ReplacementCostPolicy, load: &Load, end: Option<&Forecast>) -> Weighing {
    let arrivals = load.arrivals.filter(|rate| rate.is_finite() && *rate > 0.0).unwrap_or(0.0);
    let loading = load.load_time.unwrap_or_default().as_secs_f64();
    let draining = drain_seconds(load);
    let queued = |gap: f64| arrivals * gap * gap / 2.0;
    let (cost_now, cost_lull) =
        if load.overlap { (0.0, 0.0) } else { (queued(draining + loading), queued(loading)) };
    let cost_end = f64::from(load.requests) * FAILED_REQUEST_COST.as_secs_f64() + queued(loading);
    let lull = load.lull_every.unwrap_or(policy.first_lull).as_secs_f64().max(1.0);
    // The cautious end of the forecast: being early costs seconds, being late costs requests.
    let left = end.and_then(|end| end.seconds).map(|seconds| seconds.low.max(0.0));
    let risk = left.map_or(0.0, |left| (-left / lull).exp());
    let now = left.is_some() && risk * (cost_end - cost_lull).max(0.0) > cost_now - cost_lull;
    Weighing { now, cost_now, cost_lull, cost_end, risk }
}

fn drain_seconds(load: &Load) -> f64 {
    match load.tokens_per_second {
        Some(speed) if speed > 0.0 && speed.is_finite() => exact(load.tokens) / speed,
        _ => 0.0,
    }
}

/// How often a backend has nothing to do, learnt from its own past.
#[derive(Clone, Debug)]
pub struct Lulls {
    kept: usize,
    first: Duration,
    /// When watching began, or the oldest lull that was forgotten.
    since: Duration,
    begun: VecDeque<Duration>,
}

impl Lulls {
    /// Watches from `now` on (time since the caller's epoch).
    pub fn new(numbers: &Moment, now: Duration) -> Self {
        Self { kept: numbers.lulls.max(1), first: numbers.first_lull, since: now, begun: VecDeque::new() }
    }

    /// The backend has been idle since `since`, long enough to be quiet. The same lull may be told many times.
    pub fn lull(&mut self, since: Duration) {
        // Readings of the clock differ by a little; two lulls are at least a request apart.
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

    /// Mean time between lulls, as it looks at `now`. A drought longer than the mean so far counts as it is.
    pub fn expected(&self, now: Duration) -> Duration {
        let watched = now.saturating_sub(self.since);
        let Some(last) = self.begun.back() else { return watched.max(self.first) };
        let count = u32::try_from(self.begun.len()).unwrap_or(u32::MAX).max(1);
        (watched / count).max(now.saturating_sub(*last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::growth::Interval;
    use proptest::prelude::*;

    fn policy() -> ReplacementCostPolicy {
        crate::defaults().moment
    }

    fn end_in(low: f64) -> Forecast {
        let seconds = Interval { value: low * 1.5, low, high: low * 3.0 };
        let requests = Interval { value: 1.0, low: 1.0, high: 1.0 };
        Forecast { limit: 0, requests, seconds: Some(seconds) }
    }

    fn busy() -> Load {
        Load {
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
        let weighing = weigh(&policy(), &busy(), None);
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
        assert!(weigh(&policy(), &busy(), Some(&end_in(30.0))).now);
        assert!(!weigh(&policy(), &busy(), Some(&end_in(36_000.0))).now);
        let text = weigh(&policy(), &busy(), Some(&end_in(30.0))).to_string();
        assert!(text.ends_with("now") && text.contains("95 %"), "{text}");
    }

    #[test]
    fn a_backend_with_frequent_lulls_waits_for_one_where_a_busy_one_does_not() {
        let often = Load { lull_every: Some(Duration::from_secs(30)), ..busy() };
        assert!(!weigh(&policy(), &often, Some(&end_in(300.0))).now);
        let never = Load { lull_every: Some(Duration::from_secs(86_400)), ..busy() };
        assert!(weigh(&policy(), &never, Some(&end_in(300.0))).now);
    }

    #[test]
    fn a_drain_that_costs_more_than_running_out_is_put_off() {
        let long = Load { tokens: 100_000, requests: 1, ..busy() };
        assert!(!weigh(&policy(), &long, Some(&end_in(1.0))).now);
    }

    #[test]
    fn an_overlap_under_hazard_costs_nothing_and_happens_now() {
        let overlap = Load { overlap: true, ..busy() };
        let weighing = weigh(&policy(), &overlap, Some(&end_in(600.0)));
        assert!(weighing.now && weighing.cost_now == 0.0, "{weighing:?}");
    }

    #[test]
    fn lulls_are_counted_once_and_a_drought_counts_as_it_is() {
        let seconds = Duration::from_secs;
        let mut lulls = Lulls::new(&crate::defaults().moment, seconds(0));
        assert_eq!(lulls.expected(seconds(10)), seconds(3600), "nothing is known yet");
        assert_eq!(lulls.expected(seconds(9000)), seconds(9000), "and it has been busy for so long");
        for begun in [100, 100, 200, 300, 300] {
            lulls.lull(seconds(begun));
        }
        assert_eq!(lulls.expected(seconds(300)), seconds(100));
        assert_eq!(lulls.expected(seconds(5000)), seconds(4700));
    }

    #[test]
    fn old_lulls_are_forgotten() {
        let seconds = Duration::from_secs;
        let mut lulls = Lulls::new(&crate::defaults().moment, seconds(0));
        (1..=10).for_each(|n| lulls.lull(seconds(n * 3600)));
        (1..=40).for_each(|n| lulls.lull(seconds(36_000 + n * 60)));
        assert_eq!(lulls.expected(seconds(36_000 + 2400)), seconds(60));
    }

    proptest! {
        #[test]
        fn less_time_left_never_means_more_patience(a in 0.0f64..1e6, b in 0.0f64..1e6, requests in 0u32..50, lull in 1u64..10_000) {
            let load = Load { requests, lull_every: Some(Duration::from_secs(lull)), ..busy() };
            let (soon, late) = (weigh(&policy(), &load, Some(&end_in(a.min(b)))), weigh(&policy(), &load, Some(&end_in(a.max(b)))));
            prop_assert!(soon.now || !late.now);
            prop_assert!((0.0..=1.0).contains(&soon.risk));
        }

        #[test]
        fn senseless_rates_give_no_senseless_prices(arrivals in prop_oneof![Just(f64::NAN), Just(-1.0), Just(f64::INFINITY)], speed in prop_oneof![Just(f64::NAN), Just(0.0), Just(-5.0)]) {
            let load = Load { arrivals: Some(arrivals), tokens_per_second: Some(speed), ..busy() };
            let weighing = weigh(&policy(), &load, Some(&end_in(10.0)));
            prop_assert!(weighing.cost_now.is_finite() && weighing.cost_end.is_finite());
        }
    }
}
