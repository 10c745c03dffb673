//! Wall-clock time for ledger lines and `created` fields; no behaviour depends on it.

#[expect(clippy::disallowed_methods, reason = "ledgers of several processes are compared by wall-clock time")]
pub(crate) fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
