//! Means of tests that a machine may lack: a network, a registry, a browser.

use tokio::sync::OnceCell;

use crate::Trouble;

/// Means that one test obtains for all tests of its program. A failure is kept, too: without a network, each
/// further attempt would take minutes.
#[derive(Debug, Default)]
pub struct SharedMeans<T>(OnceCell<Result<T, String>>);

impl<T: Clone> SharedMeans<T> {
    /// Means that no test has tried to obtain.
    pub const fn new() -> Self {
        Self(OnceCell::const_new())
    }

    /// Obtains the means unless a test has tried before.
    ///
    /// # Errors
    /// The first attempt failed.
    pub async fn get(&self, obtain: impl AsyncFnOnce() -> Result<T, Trouble>) -> Result<T, Trouble> {
        let attempt = self.0.get_or_init(|| async { obtain().await.map_err(|trouble| trouble.to_string()) });
        attempt.await.clone().map_err(Trouble::new)
    }
}

/// Prints a line and returns `None` if a means is missing and not required.
///
/// # Errors
/// The means is missing, and this environment variable is set, as in CI.
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn what_could_not_be_obtained_is_not_tried_again() {
        let (means, attempts) = (SharedMeans::<u8>::new(), AtomicU32::new(0));
        for _ in 0..3 {
            let obtained = means.get(async || {
                attempts.fetch_add(1, Ordering::Relaxed);
                Err(Trouble::new("no network"))
            });
            assert_eq!(
                obtained.await.err().map(|trouble| trouble.to_string()).as_deref(),
                Some("no network")
            );
        }
        assert_eq!(attempts.load(Ordering::Relaxed), 1);
    }
}
