//! Durations with units, as in configurations.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// Parses a duration such as `300s`, `30ms`, `12h`, `10m`.
///
/// # Errors
/// The text is no number with a unit, or more than a duration can hold.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let error = || DurationError { text: text.to_owned() };
    let trimmed = text.trim();
    let mut total = Duration::ZERO;
    let mut rest = trimmed;
    if rest.is_empty() {
        return Err(error());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(error)?;
        let number: f64 = rest[..digits].parse().map_err(|_| error())?;
        let unit_end = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |i| digits + i);
        let seconds = match rest[digits..unit_end].trim() {
            "ms" => 0.001,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return Err(error()),
        };
        let part = Duration::try_from_secs_f64(number * seconds).map_err(|_| error())?;
        total = total.checked_add(part).ok_or_else(error)?;
        rest = &rest[unit_end..];
    }
    Ok(total)
}

/// A text that is no duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a duration: write a number and a unit, like `300s`, `30ms`, `12h` or `1h30m`")]
pub struct DurationError {
    text: String,
}

pub(super) fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse_duration(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_people_write_them() {
        for (text, ms) in [
            ("300s", 300_000),
            ("30ms", 30),
            ("1h30m", 5_400_000),
            ("1.5s", 1500),
            ("2 min", 120_000),
            ("0s", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "s", "5 years", "-1s", "1s2"] {
            let error = parse_duration(text).expect_err(text).to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }
}
