//! Daily windows in which a backend may be replaced.
//!
//! Windows are written `02:00-05:00`, in local time, with an exclusive end; `22:00-04:00` crosses midnight,
//! and `00:00-24:00` is no restriction. Callers pass the time of the day in minutes. On days on which the
//! clock changes, a window may be an hour longer or shorter, which does no harm.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::words::one_or_several;

/// Minutes in a day.
pub const DAY_MINUTES: u16 = 24 * 60;

/// A window of the day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DayWindow {
    /// First minute of the window, as a minute of the day, 0 to 1439.
    from: u16,
    /// End of the window, exclusive, as a minute of the day, 0 to 1440; differs from `from`.
    to: u16,
}

/// A text that is not a window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is no window of the day: {why}; write it like `02:00-05:00`, or `22:00-04:00` over midnight"
)]
pub struct WindowError {
    text: String,
    why: &'static str,
}

impl DayWindow {
    /// Returns true if the window contains this minute of the day.
    pub const fn contains(self, minute: u16) -> bool {
        if self.from < self.to {
            self.from <= minute && minute < self.to
        } else {
            self.from <= minute || minute < self.to
        }
    }

    const fn is_whole_day(self) -> bool {
        self.from == 0 && self.to == DAY_MINUTES
    }

    /// Returns the minutes until the window opens: 0 to 1439, and 0 if it opens now.
    const fn opens_in(self, minute: u16) -> u16 {
        (self.from + DAY_MINUTES - minute % DAY_MINUTES) % DAY_MINUTES
    }
}

fn parse_clock(text: &str) -> Option<u16> {
    let (hours, minutes) = text.trim().split_once(':')?;
    let digits = |part: &str| !part.is_empty() && part.len() <= 2 && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(hours) || minutes.len() != 2 || !digits(minutes) {
        return None;
    }
    let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
    // `24:00` is the usual notation for the end of the day.
    match (hours, minutes) {
        (24, 0) => Some(DAY_MINUTES),
        (0..=23, 0..=59) => Some(hours * 60 + minutes),
        _ => None,
    }
}

impl FromStr for DayWindow {
    type Err = WindowError;

    fn from_str(text: &str) -> Result<Self, WindowError> {
        let error = |why| WindowError { text: text.to_owned(), why };
        let (from, to) = text.split_once('-').ok_or_else(|| error("it has no `-` between two times"))?;
        let from = parse_clock(from).ok_or_else(|| error("its beginning is no time of the day"))?;
        let to = parse_clock(to).ok_or_else(|| error("its end is no time of the day"))?;
        if from == to || from % DAY_MINUTES == to {
            return Err(error("it begins when it ends"));
        }
        Ok(Self { from: from % DAY_MINUTES, to })
    }
}

impl fmt::Display for DayWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (self.from, self.to);
        write!(f, "{:02}:{:02}-{:02}:{:02}", from / 60, from % 60, to / 60, to % 60)
    }
}

/// Any number of windows; an empty list is no restriction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DayWindows(Vec<DayWindow>);

impl DayWindows {
    /// No restriction.
    pub const ALWAYS: Self = Self(Vec::new());

    /// Creates the windows; an empty list is no restriction.
    pub const fn new(windows: Vec<DayWindow>) -> Self {
        Self(windows)
    }

    /// Returns true if replacements are allowed all day.
    pub fn is_always(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(|window| window.is_whole_day())
    }

    /// Returns the number of minutes of a day in which any window is open: 0 to 1440.
    pub fn open_minutes(&self) -> u16 {
        u16::try_from((0..DAY_MINUTES).filter(|minute| self.is_open(*minute)).count()).unwrap_or(DAY_MINUTES)
    }

    /// Returns true if a backend may be replaced at this minute of the day.
    pub fn is_open(&self, minute: u16) -> bool {
        self.0.is_empty() || self.0.iter().any(|window| window.contains(minute))
    }

    /// Returns the minutes until any window is open; 0 if one is open now.
    pub(crate) fn opens_in(&self, minute: u16) -> u16 {
        if self.is_open(minute) {
            return 0;
        }
        self.0.iter().map(|window| window.opens_in(minute)).min().unwrap_or(0)
    }

    /// Returns the longest closed time between two windows in minutes: 0 to 1439.
    pub fn longest_closed(&self) -> u16 {
        (0..DAY_MINUTES).map(|minute| self.opens_in(minute)).max().unwrap_or(0)
    }

    /// Returns the whole minutes for which a window has been open; `None` if closed, or open all day.
    pub(crate) fn open_for(&self, minute: u16) -> Option<Duration> {
        if self.is_always() || !self.is_open(minute) {
            return None;
        }
        let closed =
            (1..DAY_MINUTES).find(|back| !self.is_open((minute + DAY_MINUTES - back) % DAY_MINUTES))?;
        Some(Duration::from_secs(u64::from(closed - 1) * 60))
    }

    /// Returns true in the last minute of an open window.
    pub fn is_closing(&self, minute: u16) -> bool {
        self.is_open(minute) && !self.is_open((minute + 1) % DAY_MINUTES)
    }

    /// Returns the time until the window after the present one opens; zero if there is no such window.
    pub(crate) fn time_to_next(&self, minute: u16) -> Duration {
        if self.is_always() || !self.is_open(minute) {
            return Duration::ZERO;
        }
        let closed = (1..DAY_MINUTES).find(|ahead| !self.is_open((minute + ahead) % DAY_MINUTES));
        let minutes = closed.map_or(0, |ahead| ahead + self.opens_in((minute + ahead) % DAY_MINUTES));
        Duration::from_secs(u64::from(minutes) * 60)
    }
}

impl fmt::Display for DayWindows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("always");
        }
        for (index, window) in self.0.iter().enumerate() {
            write!(f, "{}{window}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl FromStr for DayWindows {
    type Err = WindowError;

    fn from_str(text: &str) -> Result<Self, WindowError> {
        text.split(',').map(|part| part.trim().parse()).collect::<Result<_, _>>().map(Self)
    }
}

impl Serialize for DayWindows {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(ToString::to_string))
    }
}

impl<'de> Deserialize<'de> for DayWindows {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut windows = Vec::new();
        for text in one_or_several(deserializer)? {
            windows.extend(text.parse::<Self>().map_err(serde::de::Error::custom)?.0);
        }
        Ok(Self(windows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn windows(text: &str) -> DayWindows {
        text.parse().unwrap()
    }

    #[test]
    fn a_window_holds_its_beginning_and_not_its_end() {
        let night = windows("02:00-05:00");
        assert_eq!([119, 120, 299, 300].map(|minute| night.is_open(minute)), [false, true, true, false]);
        assert_eq!((night.opens_in(0), night.opens_in(180), night.opens_in(301)), (120, 0, 1259));
    }

    #[test]
    fn a_window_may_run_over_midnight() {
        let night = windows("22:00-04:00");
        assert_eq!(
            [1319, 1320, 0, 239, 240].map(|minute| night.is_open(minute)),
            [false, true, true, true, false]
        );
        assert_eq!(windows("20:00-24:00").opens_in(0), 20 * 60);
    }

    #[test]
    fn the_whole_day_is_no_restriction() {
        let day = windows("00:00-24:00");
        assert!(day.is_always() && windows("02:00-03:00, 00:00-24:00").is_always());
        assert!(
            (0..DAY_MINUTES)
                .all(|minute| day.is_open(minute) && day.opens_in(minute) == 0 && !day.is_closing(minute))
        );
        assert_eq!(
            (day.open_minutes(), windows("23:00-01:00, 00:30-02:00").open_minutes()),
            (DAY_MINUTES, 180)
        );
        assert_eq!(day.to_string(), "00:00-24:00");
        for text in ["00:00-00:00", "24:00-00:00", "24:00-24:00", "12:00-12:00"] {
            assert!(text.parse::<DayWindows>().is_err(), "{text}");
        }
    }

    #[test]
    fn whoever_misses_this_window_waits_for_the_next() {
        let night = windows("02:00-05:00");
        assert_eq!(night.time_to_next(240), Duration::from_secs(22 * 3600));
        assert_eq!(night.time_to_next(600), Duration::ZERO);
        let two = windows("02:00-05:00, 12:00-13:00");
        assert_eq!(two.time_to_next(240), Duration::from_secs(8 * 3600));
        assert_eq!(DayWindows::ALWAYS.time_to_next(240), Duration::ZERO);
    }

    #[test]
    fn a_window_knows_since_when_it_is_open_and_when_it_closes() {
        let night = windows("22:00-04:00");
        let minutes = |minutes: u64| Some(Duration::from_secs(minutes * 60));
        assert_eq!(
            [1320, 1330, 10, 240].map(|minute| night.open_for(minute)),
            [minutes(0), minutes(10), minutes(130), None]
        );
        assert_eq!([238, 239, 240].map(|minute| night.is_closing(minute)), [false, true, false]);
        assert_eq!((DayWindows::ALWAYS.open_for(5), DayWindows::ALWAYS.is_closing(5)), (None, false));
    }

    #[test]
    fn what_is_no_window_is_named_with_the_reason_and_the_form() {
        for text in ["02:00", "2-5", "25:00-26:00", "02:00-02:00", "02:60-03:00", "", "02:00-", "-1:00-02:00"]
        {
            let error = text.parse::<DayWindow>().expect_err(text).to_string();
            assert!(error.contains(&format!("`{text}`")) && error.contains("02:00-05:00"), "{error}");
        }
    }

    #[test]
    fn a_list_and_a_single_text_are_both_taken() {
        let one: DayWindows = serde_json::from_str("\"02:00-05:00, 22:30-23:00\"").unwrap();
        let list: DayWindows = serde_json::from_str("[\"02:00-05:00\", \"22:30-23:00\"]").unwrap();
        assert_eq!(one, list);
        assert_eq!(one.to_string(), "02:00-05:00, 22:30-23:00");
        assert_eq!(serde_json::from_str::<DayWindows>(&serde_json::to_string(&one).unwrap()).unwrap(), one);
    }

    proptest! {
        #[test]
        fn the_minute_at_which_it_opens_is_open_and_the_ones_before_are_not(
            from in 0u16..DAY_MINUTES, length in 1u16..DAY_MINUTES, minute in 0u16..DAY_MINUTES
        ) {
            let windows = DayWindows::new(vec![DayWindow { from, to: (from + length) % DAY_MINUTES }]);
            let wait = windows.opens_in(minute);
            prop_assert!(windows.is_open((minute + wait) % DAY_MINUTES));
            prop_assert!((0..wait).all(|ahead| !windows.is_open((minute + ahead) % DAY_MINUTES)));
        }
    }
}
