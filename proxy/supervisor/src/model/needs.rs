//! Results of checking the files that the next process needs.

use tokio::time::Instant;
use warden_policies::Reason;

use super::recipe::ProcessRecipe;
use crate::process::needs::NeedsCheck;
use crate::process::needs::missing::MissingNeed;

/// Last results, and who requested the next check.
#[derive(Debug, Default)]
pub(super) struct NeedsState {
    /// A check is running.
    pub(super) looking: bool,
    /// A replacement waits for the next result.
    pub(super) wanted: bool,
    /// Result for that replacement.
    pub(super) seen: Option<(Instant, ProcessRecipe, NeedsCheck)>,
    /// Last result with something missing.
    pub(super) found: Option<NeedsCheck>,
    /// Result that kept a replacement from beginning.
    pub(super) kept: Option<NeedsCheck>,
    /// Replacement that begins when the result is there.
    pub(super) asked: Option<(u32, Reason)>,
}

impl NeedsState {
    /// Missing file or device that keeps the next process from starting, so that the present one stays.
    pub(super) fn missing(&self) -> Option<&MissingNeed> {
        self.kept.as_ref()?.missing.as_ref()
    }
}
