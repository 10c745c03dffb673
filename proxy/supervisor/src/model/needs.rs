//! What is known of what the next process needs.

use tokio::time::Instant;
use warden_policies::Reason;

use super::recipe::Recipe;
use crate::process::needs::Sight;
use crate::process::needs::missing::Missing;

/// What was seen last, and who asked for the next look.
#[derive(Debug, Default)]
pub(super) struct Needs {
    /// A helper is at it.
    pub(super) looking: bool,
    /// A replacement wants the next look.
    pub(super) wanted: bool,
    /// What it found, for that replacement.
    pub(super) seen: Option<(Instant, Recipe, Sight)>,
    /// The last look that found something missing.
    pub(super) found: Option<Sight>,
    /// A replacement did not begin because of what this look found.
    pub(super) kept: Option<Sight>,
    /// A replacement that begins when the look is there.
    pub(super) asked: Option<(u32, Reason)>,
}

impl Needs {
    /// What keeps the next process from starting, so that the present one stays.
    pub(super) fn missing(&self) -> Option<&Missing> {
        self.kept.as_ref()?.missing.as_ref()
    }
}
