//! Serde format for times in JSON: seconds as a number, under a name that ends in `_seconds`.
//!
//! Used as `#[serde(rename = "ready_seconds", alias = "ready_for", with = "warden_policies::seconds",
//! default)]`. The format of earlier versions, `{"secs": 1, "nanos": 500000000}`, is read, too.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize as _, Serializer};

/// Serializes seconds with at most three decimals.
///
/// # Errors
/// Errors of the serializer.
pub fn serialize<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    time.map(rounded).serialize(to)
}

/// Deserializes seconds, or the format of earlier versions.
///
/// # Errors
/// Errors of the deserializer; a time that is negative or too large.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    Option::<WrittenTime>::deserialize(from)?.map(WrittenTime::time).transpose()
}

/// Serde format for a time that is always present, not an `Option`.
pub mod known {
    use super::{Deserialize as _, Deserializer, Duration, Serializer, WrittenTime, rounded};

    /// Serializes seconds with at most three decimals.
    ///
    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_f64(rounded(*time))
    }

    /// Deserializes seconds, or the format of earlier versions.
    ///
    /// # Errors
    /// Errors of the deserializer; a time that is negative or too large.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        WrittenTime::deserialize(from)?.time()
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenTime {
    Seconds(f64),
    Parts(Duration),
}

impl WrittenTime {
    fn time<E: serde::de::Error>(self) -> Result<Duration, E> {
        match self {
            Self::Seconds(seconds) => Duration::try_from_secs_f64(seconds).map_err(E::custom),
            Self::Parts(time) => Ok(time),
        }
    }
}

fn rounded(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Serialize, Deserialize, Debug, PartialEq)]
    struct Shown {
        #[serde(rename = "ready_seconds", alias = "ready_for", with = "crate::seconds", default)]
        ready_for: Option<Duration>,
        #[serde(rename = "wait_seconds", alias = "wait", with = "crate::seconds::known")]
        wait: Duration,
    }

    #[test]
    fn times_are_numbers_of_seconds_and_what_earlier_versions_wrote_is_read() {
        let shown = |ready_for| Shown { ready_for, wait: Duration::from_millis(1500) };
        let read = |text: &str| serde_json::from_str::<Shown>(text).unwrap();
        let known = shown(Some(Duration::from_secs(3700)));
        assert_eq!(serde_json::to_string(&known).unwrap(), r#"{"ready_seconds":3700.0,"wait_seconds":1.5}"#);
        assert_eq!(read(r#"{"ready_seconds":3700,"wait_seconds":1.5}"#), known);
        assert_eq!(
            read(r#"{"ready_for":{"secs":3700,"nanos":0},"wait":{"secs":1,"nanos":500000000}}"#),
            known
        );
        assert_eq!(read(r#"{"ready_seconds":null,"wait_seconds":1.5}"#), shown(None));
        assert_eq!(read(r#"{"wait_seconds":1.5}"#), shown(None));
        serde_json::from_str::<Shown>(r#"{"wait_seconds":-1}"#).unwrap_err();
    }
}
