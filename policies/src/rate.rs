//! Rate limits such as `60/min`. Unused units are saved for up to one full period (token bucket).
//!
//! The state is a single number, the time up to which the rate is used up (generic cell rate algorithm, ITU-T
//! I.371). Times are nanoseconds since the caller's epoch.
//!
//! ```text
//!        now                    used up to           now + per
//!   ------|=========================|--------------------|------> time
//!         |<-- must not exceed per: the rest up to it is left -->|
//! ```

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::defaults::parse_duration;

/// At most `count` units in the time `per`; after a pause, all of them may be taken at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    count: u64,
    per: Duration,
}

/// A time or a duration in nanoseconds.
pub type RateNanos = u64;

impl RateLimit {
    /// Creates a rate of `count` (at least 1) per `per` (above zero).
    pub fn new(count: u64, per: Duration) -> Option<Self> {
        (count > 0 && !per.is_zero()).then_some(Self { count, per })
    }

    fn per(self) -> RateNanos {
        as_nanos(self.per)
    }

    /// Returns the time that `units` use up, rounded up, so that at most `count` units fit into `per`.
    fn time_for(self, units: u64) -> RateNanos {
        let span = (u128::from(units) * self.per.as_nanos()).div_ceil(u128::from(self.count));
        RateNanos::try_from(span).unwrap_or(RateNanos::MAX)
    }

    /// Takes one unit at `now`. `used` is the time up to which the rate is used up; returns its new value.
    ///
    /// # Errors
    /// The rate is used up; returns the time until one unit is available.
    pub fn take_unit(self, used: RateNanos, now: RateNanos) -> Result<RateNanos, Duration> {
        let next = used.max(now).saturating_add(self.time_for(1));
        let room = now.saturating_add(self.per());
        if next > room { Err(Duration::from_nanos(next - room)) } else { Ok(next) }
    }

    /// Checks that one unit is available at `now`, without taking it.
    ///
    /// # Errors
    /// See [`Self::take_unit`].
    pub fn check(self, used: RateNanos, now: RateNanos) -> Result<(), Duration> {
        self.take_unit(used, now).map(drop)
    }

    /// Charges units whose number is known only afterwards; units above the rate become a debt.
    pub fn charge(self, used: RateNanos, now: RateNanos, units: u64) -> RateNanos {
        used.max(now).saturating_add(self.time_for(units))
    }
}

/// Converts to nanoseconds, saturating above 500 years.
pub fn as_nanos(span: Duration) -> RateNanos {
    RateNanos::try_from(span.as_nanos()).unwrap_or(RateNanos::MAX)
}

/// A text that is not a rate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a rate: write a number from 1 and a time, like `60/min`, `5/s` or `100/10m`")]
pub struct RateError {
    text: String,
}

impl FromStr for RateLimit {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Self, RateError> {
        let error = || RateError { text: text.to_owned() };
        let (count, per) = text.split_once('/').ok_or_else(error)?;
        let count = count.trim().parse().map_err(|_| error())?;
        let per = match per.trim() {
            "s" | "sec" | "second" => Duration::from_secs(1),
            "m" | "min" | "minute" => Duration::from_secs(60),
            "h" | "hour" => Duration::from_secs(3600),
            "d" | "day" => Duration::from_secs(86_400),
            span => parse_duration(span).map_err(|_| error())?,
        };
        Self::new(count, per).ok_or_else(error)
    }
}

impl fmt::Display for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.per.as_secs() {
            1 if self.per.subsec_nanos() == 0 => write!(f, "{}/s", self.count),
            60 if self.per.subsec_nanos() == 0 => write!(f, "{}/min", self.count),
            3600 if self.per.subsec_nanos() == 0 => write!(f, "{}/h", self.count),
            86_400 if self.per.subsec_nanos() == 0 => write!(f, "{}/d", self.count),
            _ => write!(f, "{}/{:?}", self.count, self.per),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: RateNanos = 1_000_000_000;

    #[test]
    fn a_rate_is_a_number_and_a_time() {
        for (text, count, seconds, shown) in [
            ("60/min", 60, 60, "60/min"),
            (" 5 / s ", 5, 1, "5/s"),
            ("1000/hour", 1000, 3600, "1000/h"),
            ("7/d", 7, 86_400, "7/d"),
            ("100/10m", 100, 600, "100/600s"),
        ] {
            let rate: RateLimit = text.parse().unwrap();
            assert_eq!(Some(rate), RateLimit::new(count, Duration::from_secs(seconds)), "{text}");
            assert_eq!(rate.to_string(), shown);
        }
        for text in ["", "60", "0/min", "-1/s", "60/", "60/0s", "1.5/s", "60/fortnight", "x/min"] {
            let error = text.parse::<RateLimit>().unwrap_err().to_string();
            assert!(error.contains("`60/min`"), "{error}");
        }
    }

    #[test]
    fn a_burst_passes_and_then_one_at_a_time() {
        let rate: RateLimit = "60/min".parse().unwrap();
        let mut used = 0;
        for _ in 0..60 {
            used = rate.take_unit(used, 5).unwrap();
        }
        let wait = rate.take_unit(used, 5).unwrap_err();
        assert_eq!(wait, Duration::from_secs(1), "one unit comes back each second");
        let later = 5 + SECOND;
        used = rate.take_unit(used, later).unwrap();
        assert_eq!(rate.take_unit(used, later).unwrap_err(), Duration::from_secs(1));
        assert_eq!(rate.check(used, later + SECOND), Ok(()));
    }

    #[test]
    fn what_was_spent_beyond_the_room_is_owed() {
        let rate: RateLimit = "100/s".parse().unwrap();
        assert_eq!(rate.check(0, 0), Ok(()));
        let used = rate.charge(0, 0, 250);
        let wait = rate.check(used, 0).unwrap_err();
        assert_eq!(wait, Duration::from_millis(1510), "until one hundredth of a second's worth is free");
        assert_eq!(rate.check(used, 1_510_000_000), Ok(()));
    }

    proptest! {
        /// Over any span, never more than one full bucket plus the inflow.
        #[test]
        fn never_more_than_the_rate(count in 1_u64..50, per_ms in 1_u64..5000, gaps in proptest::collection::vec(0_u64..2_000_000_000, 1..200)) {
            let rate = RateLimit::new(count, Duration::from_millis(per_ms)).unwrap();
            let (mut used, mut now, mut granted) = (0, 0, 0_u128);
            for gap in gaps {
                now += gap;
                match rate.take_unit(used, now) {
                    Ok(next) => { used = next; granted += 1; }
                    Err(wait) => {
                        // The returned wait is exact to the nanosecond.
                        let due = now + as_nanos(wait);
                        prop_assert!(rate.check(used, due).is_ok());
                        prop_assert!(rate.check(used, due - 1).is_err());
                    }
                }
                let inflow = u128::from(now) * u128::from(count) / u128::from(per_ms * 1_000_000);
                prop_assert!(granted <= u128::from(count) + inflow);
            }
        }
    }
}
