//! How soon a model is likely to be asked again, from how often it was.

use std::time::Duration;

/// What happened longer ago than this counts for little.
const MEMORY: f64 = 1800.0;

/// Requests of a model, the older ones for less.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    /// Requests, faded.
    count: f64,
    /// How many there had been.
    asked: u64,
    at: Duration,
}

impl Demand {
    /// There were so many requests until now.
    pub fn note(&mut self, now: Duration, asked: u64) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        let news = u32::try_from(asked.saturating_sub(self.asked)).unwrap_or(u32::MAX);
        self.count = self.count * (-passed / MEMORY).exp() + f64::from(news);
        (self.asked, self.at) = (asked, now.max(self.at));
    }

    /// Seconds until the next request, as far as can be told: the usual gap between two, or as long as nobody has asked by now if that is
    /// more. Who has never been asked is not expected.
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
