//! Results of checking the files that the next process needs.

use tokio::time::Instant;
use warden_policies::Reason;

use super::recipe::Recipe;
use crate::process::needs::Sight;
use crate::process::needs::missing::Missing;

/// Last results, and who requested the next check.
#[derive(Debug, Default)]
pub(super) struct Needs {
    /// A check is running.
    pub(super) looking: bool,
    /// A replacement waits for the next result.
    pub(super) wanted: bool,
    /// Result for that replacement.
    pub(super) seen: Option<(Instant, Recipe, Sight)>,
    /// Last result with something missing.
    pub(super) found: Option<Sight>,
    /// Result that kept a replacement from beginning.
    pub(super) kept: Option<Sight>,
    /// Replacement that begins when the result is there.
    pub(super) asked: Option<(u32, Reason)>,
}

impl Needs {
    /// Missing file or device that keeps the next process from starting, so that the present one stays.
    pub(super) fn missing(&self) -> Option<&Missing> {
        self.kept.as_ref()?.missing.as_ref()
    }
}
