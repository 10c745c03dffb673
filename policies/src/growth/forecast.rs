//! Forecasts the work and the time left until a limit is reached.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::growth::floors::FloorPoint;
use crate::growth::shape::StretchFinding;
use crate::growth::stats;
use crate::growth::{GrowthForecast, IntervalEstimate};
use crate::units::as_f64;

/// A random walk is measured over a quarter of the floors: noise hides shorter walks, longer ones are too
/// few.
const WALK_LAG_DIVISOR: usize = 4;

/// Requests per second, averaged with a half-life, so that recent traffic counts most.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct RequestRate {
    last: Option<(Duration, u64)>,
    requests: f64,
    seconds: f64,
}

impl RequestRate {
    /// Records the total of answered requests at the time `at`; ignored if earlier than the last record.
    pub(super) fn observe(&mut self, at: Duration, requests: u64, half_life: Duration) {
        if let Some((before, had)) = self.last {
            let Some(passed) = at.checked_sub(before).map(|passed| passed.as_secs_f64()) else { return };
            let kept = 0.5_f64.powf(passed / half_life.as_secs_f64().max(1e-3));
            self.requests = self.requests * kept + as_f64(requests.saturating_sub(had));
            self.seconds = self.seconds * kept + passed;
        }
        self.last = Some((at, requests));
    }

    /// Returns requests per second; `None` before the first request.
    pub(super) fn per_second(&self) -> Option<f64> {
        (self.requests > 0.0 && self.seconds > 0.0).then(|| self.requests / self.seconds)
    }
}

/// Uncertainty of a fitted line beyond its last floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LineUncertainty {
    seen: f64,
    floors: f64,
    /// Deviation of floors about the line, in bytes.
    scatter: f64,
    /// Variance that the growth gains per request, in square bytes: some requests cost more than others.
    walk: f64,
}

impl LineUncertainty {
    /// Measures floors against their line; `None` if the floors have fewer than two different work counts.
    pub(super) fn from_floors<'a>(
        floors: impl Iterator<Item = &'a FloorPoint>,
        line: &StretchFinding,
    ) -> Option<Self> {
        let (xs, rests): (Vec<f64>, Vec<f64>) = floors
            .map(|floor| {
                (as_f64(floor.work.requests), floor.level - line.slope.value * as_f64(floor.work.requests))
            })
            .unzip();
        let seen = xs.last()? - xs.first()?;
        let lag = (xs.len() / WALK_LAG_DIVISOR).max(1);
        let moved = rests.iter().zip(rests.iter().skip(lag)).map(|(from, to)| (to - from).powi(2));
        let moved: Vec<f64> = moved.collect();
        let count = stats::length_as_f64(moved.len().max(1));
        let each = seen * stats::length_as_f64(lag) / (stats::length_as_f64(xs.len()) - 1.0).max(1.0);
        let walk = moved.iter().sum::<f64>() / count / each.max(1.0);
        (seen > 0.0).then_some(Self {
            seen,
            floors: stats::length_as_f64(xs.len()),
            scatter: line.scatter,
            walk,
        })
    }

    /// Returns the slope over the next `left` bytes, with `z` deviations to each side. Its variance sums the
    /// errors of the line and of a floor, and the difference between future and past requests.
    pub(super) fn project_slope(&self, slope: IntervalEstimate, left: f64, z: f64) -> IntervalEstimate {
        if left <= 0.0 {
            return slope;
        }
        let ahead = (left / slope.value.max(f64::MIN_POSITIVE)).max(1.0);
        let noise = self.scatter.powi(2);
        let line = 12.0 * noise / (self.floors * self.seen.powi(2));
        let variance = self.walk * (1.0 / self.seen + 1.0 / ahead) + line + 2.0 * noise / ahead.powi(2);
        // The limit is crossed by a whole request, which adds one request of uncertainty.
        let half = z * variance.sqrt() + slope.value / ahead;
        IntervalEstimate {
            value: slope.value,
            low: slope.low.min(slope.value - half),
            high: slope.high.max(slope.value + half),
        }
    }
}

/// Forecasts from `now` to `limit` bytes at a slope in bytes per request; `None` if the slope does not rise.
pub(super) fn forecast(
    now: f64,
    limit: u64,
    slope: IntervalEstimate,
    rate: Option<f64>,
) -> Option<GrowthForecast> {
    if slope.value <= 0.0 {
        return None;
    }
    let left = (as_f64(limit) - now).max(0.0);
    let at = |slope: f64| if slope > 0.0 { (left / slope).min(f64::MAX) } else { f64::MAX };
    let requests = IntervalEstimate { value: at(slope.value), low: at(slope.high), high: at(slope.low) };
    let seconds = rate.filter(|rate| *rate > 0.0).map(|rate| {
        let at = |requests: f64| (requests / rate).min(f64::MAX);
        IntervalEstimate { value: at(requests.value), low: at(requests.low), high: at(requests.high) }
    });
    Some(GrowthForecast { limit, requests, seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate_of(readings: &[(u64, u64)]) -> Option<f64> {
        let mut rate = RequestRate::default();
        for (at, requests) in readings {
            rate.observe(Duration::from_secs(*at), *requests, Duration::from_secs(100));
        }
        rate.per_second()
    }

    #[test]
    fn the_present_rate_counts_most() {
        let mut readings: Vec<(u64, u64)> = (0..100).map(|i| (i * 10, i * 100)).collect();
        assert!((rate_of(&readings).unwrap() - 10.0).abs() < 1e-9);
        readings.extend((1..100).map(|i| (990 + i * 10, 9900 + i * 10)));
        let rate = rate_of(&readings).unwrap();
        assert!((1.0..1.2).contains(&rate), "{rate}");
        assert_eq!(rate_of(&[(0, 0), (10, 0)]), None, "no request, no rate");
        assert!(rate_of(&[(0, 0), (10, 5), (5, 9), (10, 5)]).is_some(), "time that runs back is passed over");
    }

    #[test]
    fn the_interval_of_the_slope_is_that_of_the_forecast() {
        let slope = IntervalEstimate { value: 10.0, low: 5.0, high: 20.0 };
        let forecast = forecast(400.0, 1000, slope, Some(2.0)).unwrap();
        assert_eq!(forecast.requests, IntervalEstimate { value: 60.0, low: 30.0, high: 120.0 });
        assert_eq!(forecast.seconds, Some(IntervalEstimate { value: 30.0, low: 15.0, high: 60.0 }));
    }

    #[test]
    fn a_slope_that_may_be_flat_has_no_far_end_and_one_that_falls_no_forecast() {
        let slope = IntervalEstimate { value: 1.0, low: -1.0, high: 2.0 };
        let forecast_of = |slope| forecast(0.0, 100, slope, None);
        assert!(forecast_of(slope).unwrap().requests.high >= f64::MAX);
        assert_eq!(forecast_of(slope).unwrap().seconds, None);
        assert_eq!(forecast_of(IntervalEstimate { value: -1.0, ..slope }), None);
        let past = forecast(500.0, 100, IntervalEstimate { low: 1.0, ..slope }, None).unwrap();
        assert!(past.requests.value.abs() < 1e-9);
    }
}
