//! Wall-clock time for display. Such times are printed, and compared only with other printed times.

use std::cell::Cell;

use jiff::Timestamp;

/// Returns the current time as RFC 3339 in UTC with seconds.
pub fn now_text() -> String {
    let now = Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

/// Formats milliseconds since 1970 as RFC 3339 in UTC with seconds.
pub fn unix_ms_text(ms: u64) -> String {
    let time = i64::try_from(ms / 1000).ok().and_then(|second| Timestamp::from_second(second).ok());
    time.unwrap_or(Timestamp::MAX).to_string()
}

/// Returns the local time in minutes since midnight.
pub fn minute_of_day() -> u16 {
    let now = jiff::Zoned::now();
    u16::try_from(i32::from(now.hour()) * 60 + i32::from(now.minute())).unwrap_or(0)
}

/// Returns the current time.
pub fn now() -> Timestamp {
    Timestamp::now()
}

/// Returns the time as RFC 3339 in UTC with microseconds. Each thread formats a second only once.
pub(crate) fn now_exact() -> [u8; 27] {
    thread_local! {
        static LAST: Cell<(i64, [u8; 27])> = const { Cell::new((i64::MIN, *b"0000-00-00T00:00:00.000000Z")) };
    }
    let now = Timestamp::now();
    let (second, text) = LAST.get();
    let text = if second == now.as_second() { text } else { format_micros(now) };
    LAST.set((now.as_second(), text));
    with_micros(text, now)
}

fn format_micros(now: Timestamp) -> [u8; 27] {
    // The text has 27 characters until the year 9999.
    format!("{now:.6}").into_bytes().try_into().unwrap_or(*b"9999-12-31T23:59:59.999999Z")
}

fn with_micros(mut text: [u8; 27], now: Timestamp) -> [u8; 27] {
    let mut micros = now.subsec_nanosecond() / 1000;
    for digit in text[20..26].iter_mut().rev() {
        *digit = b'0' + u8::try_from(micros % 10).unwrap_or(0);
        micros /= 10;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_that_was_spelled_before_gets_its_own_microseconds() {
        for (micros, text) in [
            (1_767_225_600_000_001, "2026-01-01T00:00:00.000001Z"),
            (1_767_225_600_120_450, "2026-01-01T00:00:00.120450Z"),
            (1_767_225_600_999_999, "2026-01-01T00:00:00.999999Z"),
        ] {
            let now = Timestamp::from_microsecond(micros).unwrap();
            let start = Timestamp::from_microsecond(1_767_225_600_777_777).unwrap();
            assert_eq!(format_micros(now), text.as_bytes());
            assert_eq!(with_micros(format_micros(start), now), text.as_bytes());
        }
        let (earlier, later) = (now_exact(), now_exact());
        assert!(earlier <= later && earlier.ends_with(b"Z"), "{earlier:?} {later:?}");
    }
}
