//! Parses the level or filter of the log before logging starts.

use tracing_subscriber::EnvFilter;

/// Parses `log.level`.
///
/// # Errors
/// The text is neither a level nor a filter.
pub fn log_filter(level: &str) -> Result<EnvFilter, String> {
    let hint = "write a level (`error`, `warn`, `info`, `debug`, `trace`) or a filter like `info,access=off`";
    EnvFilter::try_new(level).map_err(|problem| format!("`{level}` is not a log level: {problem}; {hint}"))
}
