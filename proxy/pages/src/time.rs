//! Formats moments for pages: in UTC, with attributes that let a script show them in the viewer's zone.

use crate::html::Html;

const DAY: i64 = 86_400;
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// A moment in UTC, split into its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtcMoment {
    /// The year.
    pub year: i64,
    /// The month, 1 to 12.
    pub month: u32,
    /// The day, 1 to 31.
    pub day: u32,
    /// Hour, 0 to 23.
    pub hour: u32,
    /// Minute, 0 to 59.
    pub minute: u32,
    /// Second, 0 to 59.
    pub second: u32,
}

impl UtcMoment {
    /// Creates a moment from seconds since 1970. Limited to the years 0 to 9999.
    pub fn from_unix(unix: i64) -> Self {
        let unix = unix.clamp(-62_167_219_200, 253_402_300_799);
        let (days, rest) = (unix.div_euclid(DAY), unix.rem_euclid(DAY));
        // An estimate that is too early by some years, because leap days are ignored.
        let mut year = 1970 + days.div_euclid(if days < 0 { 365 } else { 366 });
        while days_before(year + 1) <= days {
            year += 1;
        }
        let mut left = days - days_before(year);
        let mut month = 0;
        while left >= days_of_month(year, month) {
            left -= days_of_month(year, month);
            month += 1;
        }
        let small = |value: i64| u32::try_from(value).unwrap_or(0);
        Self {
            year,
            month: small(month + 1),
            day: small(left + 1),
            hour: small(rest / 3600),
            minute: small(rest / 60 % 60),
            second: small(rest % 60),
        }
    }

    /// Formats the date as `26 Nov`.
    pub fn date(self) -> String {
        let month = usize::try_from(self.month.saturating_sub(1)).unwrap_or(0);
        format!("{} {}", self.day, MONTHS[month.min(11)])
    }

    /// Formats the time as `14:03`.
    pub fn clock(self) -> String {
        format!("{:02}:{:02}", self.hour, self.minute)
    }

    /// Formats the moment for programs: `2026-11-26T14:03:20Z`.
    pub fn rfc3339(self) -> String {
        let Self { year, month, day, hour, minute, second } = self;
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
    }

    /// Formats the moment for people: `26 Nov 2026 14:03:20 UTC`.
    pub fn long_text(self) -> String {
        format!("{} {} {}:{:02} UTC", self.date(), self.year, self.clock(), self.second)
    }
}

/// Returns the days from the beginning of 1970 to the beginning of a year.
const fn days_before(year: i64) -> i64 {
    let past = year - 1;
    let leaps = past.div_euclid(4) - past.div_euclid(100) + past.div_euclid(400);
    // Subtract the 477 leap days before 1970.
    (year - 1970) * 365 + leaps - 477
}

const fn days_of_month(year: i64, month: i64) -> i64 {
    let leap = year.rem_euclid(4) == 0 && (year.rem_euclid(100) != 0 || year.rem_euclid(400) == 0);
    match month {
        1 => 28 + leap as i64,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// Returns a `time` element for seconds since 1970, whose `datetime` a script may show in another time zone.
pub fn time_element(unix: i64) -> String {
    let moment = UtcMoment::from_unix(unix);
    let mut html = Html::new();
    html.element("time", &[("datetime", &moment.rfc3339())], moment.long_text());
    html.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut before = UtcMoment::from_unix(-DAY);
        for day in 0..146_097 {
            let now = UtcMoment::from_unix(day * DAY);
            let next = now.day == before.day + 1 && now.month == before.month;
            let first = now.day == 1 && before.day >= 28 && now.month == before.month % 12 + 1;
            assert!(next || first, "{before:?} {now:?}");
            before = now;
        }
        assert_eq!(before.rfc3339(), "2369-12-31T00:00:00Z");
    }

    #[test]
    fn a_moment_is_told_for_people_and_for_scripts() {
        assert_eq!(
            time_element(1_795_701_800),
            "<time datetime=\"2026-11-26T14:03:20Z\">26 Nov 2026 14:03:20 UTC</time>"
        );
    }
}
