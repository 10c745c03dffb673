//! The minimum rate of a request body. A client starts with a credit equal to its longest permitted
//! silence, loses credit while the gateway waits for it, and regains credit with every byte. So a pause is
//! permitted, but not a permanently slow client. A deadline limits the sum of all waiting. Pure: no clock.

use std::time::Duration;

/// Time credit of one body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyRate {
    credit: Duration,
    max_credit: Duration,
    /// Bytes per second. With 0, every byte restores the full credit.
    rate: u64,
    /// Total waiting time left until the deadline.
    total_left: Duration,
}

impl BodyRate {
    /// Starts a body. `max_credit` is the longest silence, `total_left` the longest waiting time in total.
    pub(crate) fn new(max_credit: Duration, rate: u64, total_left: Duration) -> Self {
        Self { credit: max_credit, max_credit, rate, total_left }
    }

    /// Returns how long the next piece may take.
    pub(crate) fn left(&self) -> Duration {
        self.credit.min(self.total_left)
    }

    /// Accounts for a piece that came after `waited`.
    pub(crate) fn note_piece(&mut self, waited: Duration, bytes: usize) {
        let nanos = (bytes as u64).saturating_mul(1_000_000_000).checked_div(self.rate);
        let earned = nanos.map_or(self.max_credit, Duration::from_nanos);
        self.total_left = self.total_left.saturating_sub(waited);
        self.credit = self.credit.saturating_sub(waited).saturating_add(earned).min(self.max_credit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_trickle_runs_out_and_a_fair_pace_does_not() {
        let mut trickle = BodyRate::new(SECOND * 30, 1024, SECOND * 100_000);
        let mut pieces = 0;
        while trickle.left() > SECOND {
            trickle.note_piece(SECOND, 1);
            pieces += 1;
        }
        assert!((29..=30).contains(&pieces), "{pieces}");
        let mut fair = BodyRate::new(SECOND * 30, 1024, SECOND * 100_000);
        for _ in 0..10_000 {
            fair.note_piece(SECOND, 1024);
        }
        assert_eq!(fair.left(), SECOND * 30);
    }

    #[test]
    fn a_pause_is_forgiven_when_the_rest_comes_fast() {
        let mut pace = BodyRate::new(SECOND * 30, 1024, SECOND * 100_000);
        pace.note_piece(SECOND * 29, 1400);
        assert!(pace.left() > SECOND * 2);
        pace.note_piece(SECOND / 100, 100_000);
        assert_eq!(pace.left(), SECOND * 30);
        // Never more than at the beginning, and never negative.
        pace.note_piece(SECOND * 100, 0);
        assert_eq!(pace.left(), Duration::ZERO);
    }

    #[test]
    fn a_fair_pace_has_an_end_too() {
        let mut slow = BodyRate::new(SECOND * 30, 1024, SECOND * 600);
        for passed in 0..600 {
            assert_eq!(slow.left(), (SECOND * 30).min(SECOND * (600 - passed)));
            slow.note_piece(SECOND, 1024);
        }
        assert_eq!(slow.left(), Duration::ZERO);
    }

    #[test]
    fn without_a_rate_only_silence_counts() {
        let mut pace = BodyRate::new(SECOND * 30, 0, SECOND * 100_000);
        for _ in 0..100 {
            pace.note_piece(SECOND * 29, 1);
        }
        assert_eq!(pace.left(), SECOND * 30);
    }
}
