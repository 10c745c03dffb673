//! Clock functions. Only this module of the crate reads the wall clock; decisions use tokio's clock.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::backoff::DELAY_LEAST;

/// Present time: RFC 3339 in UTC, with milliseconds.
pub(crate) fn wall_time() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}

/// Milliseconds since 1970 (UTC). A past moment counts as now.
pub(crate) fn unix_ms(moment: Instant) -> u64 {
    let left = moment.saturating_duration_since(Instant::now());
    unix_now_ms().saturating_add(u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
}

/// Present time in milliseconds since 1970 (UTC).
pub(crate) fn unix_now_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}

/// Local time in minutes of the day, for daily time windows.
pub(crate) fn minute_of_day() -> Option<u16> {
    let now = jiff::Zoned::now();
    u16::try_from(i32::from(now.hour()) * 60 + i32::from(now.minute())).ok()
}

/// `moment + by`, at most some 30 years later.
pub(crate) fn after(moment: Instant, by: Duration) -> Instant {
    const MAX_OFFSET: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
    moment.checked_add(by.min(MAX_OFFSET)).unwrap_or(moment)
}

/// Like [`after`], but with a minimum pause, so that a configured pause of 0 does not occupy a CPU core.
pub(crate) fn after_pause(moment: Instant, pause: Duration) -> Instant {
    after(moment, pause.max(DELAY_LEAST))
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Time since the machine's boot (`CLOCK_MONOTONIC`), which all its processes share.
pub(crate) fn monotonic_now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or_default(),
        u32::try_from(now.tv_nsec).unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_stamp_has_milliseconds_and_a_zone() {
        let text = wall_time();
        assert!(text.len() == "2026-01-02T03:04:05.678Z".len() && text.ends_with('Z'), "{text}");
    }

    #[test]
    fn absurd_times_do_not_overflow_and_pauses_are_never_zero() {
        let now = Instant::now();
        assert!(after(now, Duration::MAX) > now);
        assert!(after_pause(now, Duration::ZERO) > now);
    }
}
