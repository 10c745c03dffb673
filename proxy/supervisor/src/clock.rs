//! The only place where wall-clock time enters this crate: the timestamps that people read.
//! Decisions never use it; they use tokio's clock.

/// Now, as RFC 3339 in UTC with milliseconds.
pub(crate) fn wall() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}
