//! Wall-clock time, for people: it is printed, never compared.

use jiff::Timestamp;

/// Now, RFC 3339 in UTC with seconds.
pub(crate) fn now_text() -> String {
    let now = Timestamp::now();
    now.round(jiff::Unit::Second).unwrap_or(now).to_string()
}

/// Now, RFC 3339 in UTC with microseconds.
pub(crate) fn now_exact_text() -> String {
    format!("{:.6}", Timestamp::now())
}
