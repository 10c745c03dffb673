//! The one place where wall-clock time enters: `created` in the list of models, how far away a
//! start is, and when a request in a trace began.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "this is the clock module")]
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Nanoseconds since 1970.
#[expect(clippy::disallowed_methods, reason = "this is the clock module")]
pub(crate) fn unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Milliseconds since 1970.
#[expect(clippy::disallowed_methods, reason = "this is the clock module")]
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
