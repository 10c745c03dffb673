//! Growth and crashes of two builds, as a search between two revisions finds them at its ends.

use serde::{Deserialize, Serialize};

use super::Ruling;
use crate::between::{Conclusion, Outcome};

/// Comparison of growth and crashes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// Ruling on growth and crashes.
    pub ruling: Ruling,
    /// Conclusion of the search; the old build is revision 0, the new one 1.
    pub conclusion: Conclusion,
}

impl Growth {
    /// Returns true if a symptom was seen but not attributed. Too few readings are no doubt.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.ruling == Ruling::Unknown && !matches!(self.conclusion.outcome, Outcome::NeitherIll { .. })
    }

    /// Evaluates a search whose older end is the old build.
    pub fn of(conclusion: Conclusion) -> Self {
        let old_alone = conclusion.ill_is_newer == Some(false);
        let ruling = match &conclusion.outcome {
            // Seen once or judged twice: either shows that the new build is not worse.
            Outcome::Found { .. } | Outcome::Interrupted if old_alone => Ruling::Better,
            Outcome::Found { .. } | Outcome::EndFailed { newer: true, .. } => Ruling::Worse,
            // Both builds have the symptom, or neither: no change.
            Outcome::BothIll | Outcome::NeitherIll { short: false, .. } => Ruling::Same,
            _ => Ruling::Unknown,
        };
        Self { ruling, conclusion }
    }
}
