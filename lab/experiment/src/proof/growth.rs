//! Growth and crashes of two builds: what a search between two revisions says of its ends.

use serde::{Deserialize, Serialize};

use super::Ruling;
use crate::between::{Conclusion, Outcome};

/// What is known of growth and crashes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// How they stand.
    pub ruling: Ruling,
    /// What the search found; the old build is revision 0, the new one 1.
    pub conclusion: Conclusion,
}

impl Growth {
    /// Whether something was seen, and nobody can say whose it is. Too few readings to see anything are no doubt.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.ruling == Ruling::Unknown && !matches!(self.conclusion.outcome, Outcome::NeitherIll { .. })
    }

    /// Of a search whose older end is the old build.
    pub fn of(conclusion: Conclusion) -> Self {
        let old_alone = conclusion.ill_is_newer == Some(false);
        let ruling = match &conclusion.outcome {
            // Seen once, or judged twice: it is enough to say that the new one is not worse.
            Outcome::Found { .. } | Outcome::Interrupted if old_alone => Ruling::Better,
            Outcome::Found { .. } | Outcome::EndFailed { newer: true, .. } => Ruling::Worse,
            // Both do it, or neither: the new build is no change.
            Outcome::BothIll | Outcome::NeitherIll { short: false, .. } => Ruling::Same,
            _ => Ruling::Unknown,
        };
        Self { ruling, conclusion }
    }
}
