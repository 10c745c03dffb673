//! Results of checking the files that the next process needs.

use tokio::time::Instant;
use warden_policies::Reason;

use super::recipe::ProcessRecipe;
use crate::process::needs::NeedsCheck;
use crate::process::needs::missing::MissingNeed;

/// Last results of these checks, and a replacement that waits for one.
#[derive(Debug, Default)]
pub(super) struct NeedsState {
    /// A check is running.
    pub(super) is_checking: bool,
    /// A replacement waits for the next result.
    pub(super) is_wanted: bool,
    /// Result for the waiting replacement: time, recipe of the next process, and findings.
    pub(super) for_replacement: Option<(Instant, ProcessRecipe, NeedsCheck)>,
    /// Last result with something missing.
    pub(super) last_missing: Option<NeedsCheck>,
    /// Result because of which a replacement did not begin.
    pub(super) blocking: Option<NeedsCheck>,
    /// Replica and reason of a replacement that begins when the check is done.
    pub(super) pending_replacement: Option<(u32, Reason)>,
}

impl NeedsState {
    /// Missing file or device that keeps the next process from starting, so that the present one stays.
    pub(super) fn missing(&self) -> Option<&MissingNeed> {
        self.blocking.as_ref()?.missing.as_ref()
    }
}
