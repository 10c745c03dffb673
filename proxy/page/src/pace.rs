//! Computes rates from counters: requests and tokens per second over the last seconds, and times to first
//! token over the last minutes. Pure; the caller passes the time.

use std::collections::BTreeMap;
use std::time::Duration;

use warden_admin::metrics::request_counts::{CounterValues, increase_since, quantile};

/// Minimum time over which rates are computed, unless the instance has run for less.
const RATE_WINDOW: Duration = Duration::from_secs(10);
/// Most samples kept; there is at most one a second.
const MAX_SAMPLES: usize = 16;
/// Window of the times to first token, which cover the last one to two windows: enough times for the 99th
/// percentile, and no old ones.
const FIRST_TOKEN_WINDOW: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RequestRates {
    pub(crate) requests: f64,
    /// Requests per second that failed through a fault of the server.
    pub(crate) failed: f64,
    pub(crate) output_tokens: f64,
    pub(crate) prompt_tokens: f64,
    /// Time to first token of streams.
    pub(crate) first_p50: Option<Duration>,
    pub(crate) first_p99: Option<Duration>,
}

pub(crate) type ModelCounters = BTreeMap<String, CounterValues>;

#[derive(Debug, Default)]
pub(crate) struct RateTracker {
    /// Samples, oldest first: a time since a fixed beginning, and the counters at that time.
    samples: Vec<(Duration, ModelCounters)>,
    /// Start of the current window, and the counters at the start of the previous and of the current window.
    windows: Option<(Duration, ModelCounters, ModelCounters)>,
}

impl RateTracker {
    /// Adds a sample. First drops the latest sample if it came less than a second after the one before it.
    pub(crate) fn add_sample(&mut self, at: Duration, now: ModelCounters) {
        let too_close =
            |older: Duration, newer: Duration| newer.saturating_sub(older) < Duration::from_millis(950);
        if let [.., (before, _), (last, _)] = self.samples.as_slice()
            && too_close(*before, *last)
        {
            self.samples.pop();
        }
        match &mut self.windows {
            None => self.windows = Some((at, ModelCounters::new(), now.clone())),
            Some((began, old, new)) if at.saturating_sub(*began) >= FIRST_TOKEN_WINDOW => {
                *began = at;
                *old = std::mem::replace(new, now.clone());
            }
            Some(_) => {}
        }
        self.samples.push((at, now));
        // Keep one sample that is old enough to span the window; drop earlier samples.
        let old = |(when, _): &(Duration, ModelCounters)| at.saturating_sub(*when) >= RATE_WINDOW;
        if let Some(last_old) = self.samples.iter().rposition(old) {
            self.samples.drain(..last_old);
        }
        if self.samples.len() > MAX_SAMPLES {
            self.samples.remove(1);
        }
    }

    pub(crate) fn current_rates(&self) -> BTreeMap<String, RequestRates> {
        let (Some((from, before)), Some((to, last))) = (self.samples.first(), self.samples.last()) else {
            return BTreeMap::new();
        };
        let seconds = to.saturating_sub(*from).as_secs_f64();
        let nothing = CounterValues::default();
        let one = |(model, counted): (&String, &CounterValues)| {
            let lately = increase_since(counted, before.get(model).unwrap_or(&nothing));
            let rate = |count: u64| {
                if seconds > 0.0 { warden_policies::units::as_f64(count) / seconds } else { 0.0 }
            };
            let old = self.windows.as_ref().and_then(|(_, old, _)| old.get(model)).unwrap_or(&nothing);
            let first = increase_since(counted, old).first;
            let pace = RequestRates {
                requests: rate(lately.requests),
                failed: rate(lately.failed),
                output_tokens: rate(lately.output_tokens),
                prompt_tokens: rate(lately.prompt_tokens),
                first_p50: quantile(&first, 0.5),
                first_p99: quantile(&first, 0.99),
            };
            (model.clone(), pace)
        };
        last.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(requests: u64) -> ModelCounters {
        let one = CounterValues { requests, output_tokens: requests * 10, ..CounterValues::default() };
        ModelCounters::from([("m".to_owned(), one)])
    }

    #[test]
    fn rates_are_those_of_the_last_seconds_however_often_it_is_looked() {
        for step in [100, 333, 1000, 5000] {
            let mut paces = RateTracker::default();
            let mut at = 0;
            while at < 60_000 {
                // Ten requests a second, and then none.
                paces.add_sample(Duration::from_millis(at), counted((at / 100).min(300)));
                assert!(paces.samples.len() <= MAX_SAMPLES, "{step}: {}", paces.samples.len());
                let pace = paces.current_rates()["m"];
                if (1..=30_000).contains(&at) {
                    assert!((pace.requests - 10.0).abs() < 1.0, "{step} ms, at {at}: {pace:?}");
                    assert!((pace.output_tokens - 100.0).abs() < 10.0, "{step} ms, at {at}: {pace:?}");
                }
                at += step;
            }
            assert!(paces.current_rates()["m"].requests < 1e-9, "{step} ms: it is quiet");
        }
    }

    #[test]
    fn a_model_that_is_new_counts_from_nothing_and_one_that_is_gone_is_forgotten() {
        let mut paces = RateTracker::default();
        paces.add_sample(Duration::ZERO, ModelCounters::new());
        paces.add_sample(Duration::from_secs(10), counted(50));
        assert!((paces.current_rates()["m"].requests - 5.0).abs() < 1e-9);
        paces.add_sample(Duration::from_secs(20), ModelCounters::new());
        assert!(paces.current_rates().is_empty());
    }

    #[test]
    fn first_tokens_of_long_ago_are_forgotten() {
        let mut paces = RateTracker::default();
        let with = |slow: u32, fast: u32| {
            let mut one = CounterValues::default();
            (one.first[60], one.first[20]) = (slow, fast);
            ModelCounters::from([("m".to_owned(), one)])
        };
        paces.add_sample(Duration::ZERO, with(100, 0));
        assert!(paces.current_rates()["m"].first_p50 > Some(Duration::from_secs(1)));
        for minute in 1..30 {
            paces.add_sample(Duration::from_secs(60 * minute), with(100, 10));
        }
        paces.add_sample(Duration::from_secs(1801), with(100, 20));
        assert!(
            paces.current_rates()["m"].first_p99 < Some(Duration::from_secs(1)),
            "{:?}",
            paces.current_rates()
        );
    }
}
