//! The crate's only access to the wall clock: dates in records, ages of files.

use jiff::Timestamp;

/// The current time as RFC 3339 in UTC, to the second.
pub(crate) fn utc_now() -> String {
    let now = Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

pub(crate) fn unix_seconds() -> i64 {
    Timestamp::now().as_second()
}
