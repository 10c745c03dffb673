//! The one place that writes to standard output and standard error. It never fails: a closed pipe is not our affair.

use std::io::Write as _;

/// Writes one line to standard error, where llama-server writes its log.
pub(crate) fn err(line: &str) {
    let _ignored = writeln!(std::io::stderr(), "{line}");
}

/// Writes one line to standard output.
pub(crate) fn out(line: &str) {
    let _ignored = writeln!(std::io::stdout(), "{line}");
}
