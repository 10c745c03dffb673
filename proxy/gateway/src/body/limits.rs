//! Limits of a request body: its size and its minimum rate.

use std::time::Duration;

use warden_policies::defaults::Server;

use crate::config::GatewayConfig;
use crate::refusal::{BodyError, RequestRefusal};
use crate::route::BodySize;

#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// Maximum size of the whole body, in bytes.
    pub(crate) bytes: u64,
    /// Configuration key of the size limit, for the refusal.
    pub(crate) key: &'static str,
    pub(crate) rate: BodyRate,
    /// True if a slot waits for the body: the budget had no room to hold it first.
    pub(crate) in_slot: bool,
}

impl BodyLimits {
    pub(crate) fn for_size(config: &GatewayConfig, size: BodySize) -> Self {
        let (bytes, key) = match size {
            BodySize::Prompt => (config.server.body_bytes, "server.body_bytes"),
            BodySize::Audio => (config.server.audio_body_bytes, "server.audio_body_bytes"),
            BodySize::Text => (config.server.text_body_bytes, "server.text_body_bytes"),
            BodySize::Control => (config.server.control_body_bytes, "server.control_body_bytes"),
        };
        let narrower = matches!(size, BodySize::Text | BodySize::Control) && config.server.body_bytes < bytes;
        let (bytes, key) =
            if narrower { (config.server.body_bytes, "server.body_bytes") } else { (bytes, key) };
        let rate =
            BodyRate::new(config.server.body_timeout, config.server.body_rate.0, config.server.body_deadline);
        Self { bytes: bytes.0, key, rate, in_slot: false }
    }

    /// Returns these limits with the stricter rate for a body that a slot waits for.
    pub(crate) fn while_in_slot(self, config: &Server) -> Self {
        let rate = BodyRate::new(config.slot_body_pause, config.slot_body_rate.0, config.body_deadline);
        Self { rate, in_slot: true, ..self }
    }

    pub(crate) fn refusal(self, fault: BodyError) -> RequestRefusal {
        match fault {
            BodyError::TooLarge => RequestRefusal::BodyTooLarge { limit: self.bytes, key: self.key },
            // The gateway was too full to hold the body; otherwise it would have accepted a slow body.
            BodyError::TooSlow if self.in_slot => RequestRefusal::Busy,
            BodyError::TooSlow => RequestRefusal::BodyTooSlow,
            BodyError::Undecodable => RequestRefusal::BodyUndecodable,
            BodyError::TooDense => RequestRefusal::BodyTooDense,
            BodyError::TwoModels => RequestRefusal::TwoModels,
            // The code that sends bodies reports `Quarantined` and `Stopped` in more detail.
            BodyError::Broken | BodyError::Quarantined | BodyError::Stopped => RequestRefusal::BodyBroken,
        }
    }
}

/// Minimum rate of a request body. A client starts with a credit equal to the longest permitted silence. It
/// loses credit while the gateway waits, and regains credit with every byte: pauses are permitted, a
/// permanently slow client is not. A deadline limits the total wait. Uses no clock.
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
    /// Starts a body. `max_credit` is the longest silence, `total_left` the longest total wait.
    pub(crate) fn new(max_credit: Duration, rate: u64, total_left: Duration) -> Self {
        Self { credit: max_credit, max_credit, rate, total_left }
    }

    /// Returns the time limit for the next piece.
    pub(crate) fn left(&self) -> Duration {
        self.credit.min(self.total_left)
    }

    /// Accounts for a piece that took the time `waited` to arrive.
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
        // The credit never exceeds its initial value and is never negative.
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
