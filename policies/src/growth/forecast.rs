//! How much work, and how much time, is left until a limit.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::growth::{Forecast, Interval};
use crate::units::exact;

/// Requests per second, averaged with a half-life, so that the present counts most.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Rate {
    last: Option<(Duration, u64)>,
    requests: f64,
    seconds: f64,
}

impl Rate {
    /// Takes in how many requests were answered by a moment. A moment before the last one is passed over.
    pub(super) fn observe(&mut self, at: Duration, requests: u64, half_life: Duration) {
        if let Some((before, had)) = self.last {
            let Some(passed) = at.checked_sub(before).map(|passed| passed.as_secs_f64()) else { return };
            let kept = 0.5_f64.powf(passed / half_life.as_secs_f64().max(1e-3));
            self.requests = self.requests * kept + exact(requests.saturating_sub(had));
            self.seconds = self.seconds * kept + passed;
        }
        self.last = Some((at, requests));
    }

    /// Requests per second; `None` before the first request.
    pub(super) fn per_second(&self) -> Option<f64> {
        (self.requests > 0.0 && self.seconds > 0.0).then(|| self.requests / self.seconds)
    }
}

/// From `now` to `limit` bytes at a slope in bytes per request; `None` if the slope does not rise.
pub(super) fn forecast(now: f64, limit: u64, slope: Interval, rate: Option<f64>) -> Option<Forecast> {
    if slope.value <= 0.0 {
        return None;
    }
    let left = (exact(limit) - now).max(0.0);
    let at = |slope: f64| if slope > 0.0 { (left / slope).min(f64::MAX) } else { f64::MAX };
    let requests = Interval { value: at(slope.value), low: at(slope.high), high: at(slope.low) };
    let seconds = rate.filter(|rate| *rate > 0.0).map(|rate| {
        let at = |requests: f64| (requests / rate).min(f64::MAX);
        Interval { value: at(requests.value), low: at(requests.low), high: at(requests.high) }
    });
    Some(Forecast { limit, requests, seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate_of(readings: &[(u64, u64)]) -> Option<f64> {
        let mut rate = Rate::default();
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
        let slope = Interval { value: 10.0, low: 5.0, high: 20.0 };
        let forecast = forecast(400.0, 1000, slope, Some(2.0)).unwrap();
        assert_eq!(forecast.requests, Interval { value: 60.0, low: 30.0, high: 120.0 });
        assert_eq!(forecast.seconds, Some(Interval { value: 30.0, low: 15.0, high: 60.0 }));
    }

    #[test]
    fn a_slope_that_may_be_flat_has_no_far_end_and_one_that_falls_no_forecast() {
        let slope = Interval { value: 1.0, low: -1.0, high: 2.0 };
        let forecast_of = |slope| forecast(0.0, 100, slope, None);
        assert!(forecast_of(slope).unwrap().requests.high >= f64::MAX);
        assert_eq!(forecast_of(slope).unwrap().seconds, None);
        assert_eq!(forecast_of(Interval { value: -1.0, ..slope }), None);
        let past = forecast(500.0, 100, Interval { low: 1.0, ..slope }, None).unwrap();
        assert!(past.requests.value.abs() < 1e-9);
    }
}
