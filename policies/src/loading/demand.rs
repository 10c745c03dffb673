//! Estimates the time to a model's next request from the rate of earlier ones.

use std::time::Duration;

/// Time constant in seconds of the fading request count.
const MEMORY: f64 = 1800.0;

/// Faded request count of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Request count, exponentially faded.
    count: f64,
    /// Total requests at the last call.
    asked: u64,
    at: Duration,
}

impl Demand {
    /// Records the total number of requests so far.
    pub fn note(&mut self, now: Duration, asked: u64) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        let news = u32::try_from(asked.saturating_sub(self.asked)).unwrap_or(u32::MAX);
        self.count = self.count * (-passed / MEMORY).exp() + f64::from(news);
        (self.asked, self.at) = (asked, now.max(self.at));
    }

    /// Estimates the seconds to the next request: the usual gap, or the present idle time if that is
    /// longer. Infinite for a model without requests.
    pub fn expected(&self, idle_for: Duration) -> f64 {
        if self.count <= 0.0 { f64::INFINITY } else { (MEMORY / self.count).max(idle_for.as_secs_f64()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_asked_often_is_expected_soon_until_he_has_rested_for_long() {
        let secs = Duration::from_secs;
        let (mut busy, mut rare, never) = (Demand::default(), Demand::default(), Demand::default());
        for minute in 0..60 {
            busy.note(secs(minute * 60), (minute + 1) * 10);
            rare.note(secs(minute * 60), minute / 20);
        }
        let idle = secs(5);
        assert!(busy.expected(idle) < 10.0, "{}", busy.expected(idle));
        assert!((300.0..3600.0).contains(&rare.expected(idle)), "{}", rare.expected(idle));
        assert!(never.expected(idle).is_infinite());
        assert!(busy.expected(secs(900)) >= 900.0);
    }
}
