//! Formats moments for pages: in UTC, with attributes that let a script show them in the viewer's zone.

use jiff::SignedDuration;
use jiff::civil::{DateTime, Time, date};
use maud::{Markup, html};

/// The first second of the year 0, before which no moment is formatted.
const FIRST_SECOND: i64 = -62_167_219_200;

/// A moment in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UtcMoment(DateTime);

impl UtcMoment {
    /// Creates a moment from seconds since 1970. Limited to the years 0 to 9999.
    pub(crate) fn from_unix(unix: i64) -> Self {
        let since_1970 = SignedDuration::from_secs(unix.max(FIRST_SECOND));
        Self(date(1970, 1, 1).at(0, 0, 0, 0).saturating_add(since_1970))
    }

    pub(crate) fn is_midnight(self) -> bool {
        self.0.time() == Time::midnight()
    }

    /// Formats the date as `26 Nov`.
    pub(crate) fn date(self) -> String {
        self.format("%-d %b")
    }

    /// Formats the time as `14:03`.
    pub(crate) fn clock(self) -> String {
        self.format("%H:%M")
    }

    /// Formats the time as `14:03:20`.
    pub(crate) fn clock_with_seconds(self) -> String {
        self.format("%H:%M:%S")
    }

    /// Formats the moment for programs: `2026-11-26T14:03:20Z`.
    pub(crate) fn rfc3339(self) -> String {
        self.format("%Y-%m-%dT%H:%M:%SZ")
    }

    /// Formats the moment for people: `26 Nov 2026 14:03:20 UTC`.
    pub(crate) fn long_text(self) -> String {
        self.format("%-d %b %Y %H:%M:%S UTC")
    }

    fn format(self, format: &str) -> String {
        self.0.strftime(format).to_string()
    }
}

/// Returns a `time` element for seconds since 1970; a script may show it in another time zone.
pub(crate) fn time_element(unix: i64) -> Markup {
    let moment = UtcMoment::from_unix(unix);
    html! {
        time datetime=(moment.rfc3339()) { (moment.long_text()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 86_400;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (unix, stamp) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (1_795_701_800, "2026-11-26T14:03:20Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
            (i64::MAX, "9999-12-31T23:59:59Z"),
            (i64::MIN, "0000-01-01T00:00:00Z"),
        ] {
            assert_eq!(UtcMoment::from_unix(unix).rfc3339(), stamp);
        }
        // Each day of four centuries follows the previous one.
        let mut before = UtcMoment::from_unix(-DAY).0;
        for day in 0..146_097 {
            let now = UtcMoment::from_unix(day * DAY).0;
            let next = now.day() == before.day() + 1 && now.month() == before.month();
            let first = now.day() == 1 && before.day() >= 28 && now.month() == before.month() % 12 + 1;
            assert!(next || first, "{before:?} {now:?}");
            before = now;
        }
        assert_eq!(UtcMoment(before).rfc3339(), "2369-12-31T00:00:00Z");
    }

    #[test]
    fn a_moment_is_told_for_people_and_for_scripts() {
        assert_eq!(
            time_element(1_795_701_800).into_string(),
            "<time datetime=\"2026-11-26T14:03:20Z\">26 Nov 2026 14:03:20 UTC</time>"
        );
    }
}
