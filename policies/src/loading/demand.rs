//! Estimates the time to a model's next request from the rate of earlier ones.

use std::time::Duration;

/// Time constant in seconds of the fading request count.
const FADE_SECONDS: f64 = 1800.0;

/// Request count of a model, in which older requests count less.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestDemand {
    /// Request count, decaying exponentially with time.
    count: f64,
    /// Total requests at the last call.
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

    /// Estimates the seconds to the next request: the usual gap between requests, or the present idle time if
    /// that is longer. Infinite for a model without requests.
    pub fn expected_gap(&self, idle_for: Duration) -> f64 {
        if self.count <= 0.0 {
            f64::INFINITY
        } else {
            (FADE_SECONDS / self.count).max(idle_for.as_secs_f64())
        }
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
