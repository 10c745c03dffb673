//! Means of tests that a machine may lack: a network, a registry, a browser.

use crate::Trouble;

/// Returns `None`, and prints a line that says why, if a means is missing and need not be there.
///
/// # Errors
/// The means is missing, and this environment variable is set: in CI.
pub fn or_skipped<T>(
    missing: &str,
    required_variable: &str,
    means: Result<T, Trouble>,
) -> Result<Option<T>, Trouble> {
    match means {
        Ok(means) => Ok(Some(means)),
        Err(trouble) if std::env::var_os(required_variable).is_some() => Err(trouble),
        Err(trouble) => {
            say(&format!("SKIPPED: {missing}: {trouble}"));
            Ok(None)
        }
    }
}

#[expect(clippy::print_stderr, reason = "a test that did nothing must say so")]
fn say(line: &str) {
    eprintln!("{line}");
}
