//! Growth and crashes of two builds, found by a search between revisions with the two builds as its ends.

use serde::{Deserialize, Serialize};

use super::ProofRuling;
use crate::between::{RevisionConclusion, RevisionOutcome};

/// Comparison of growth and crashes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BuildGrowth {
    /// Ruling on growth and crashes.
    pub ruling: ProofRuling,
    /// Conclusion of the search; the old build is revision 0, the new one 1.
    pub conclusion: RevisionConclusion,
}

impl BuildGrowth {
    /// Returns true if a symptom was seen but not attributed to a build. Too few readings alone do not count.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.ruling == ProofRuling::Unknown
            && !matches!(self.conclusion.outcome, RevisionOutcome::NeitherIll { .. })
    }

    /// Evaluates a search whose older end is the old build.
    pub fn from_conclusion(conclusion: RevisionConclusion) -> Self {
        let old_alone = conclusion.ill_is_newer == Some(false);
        let ruling = match &conclusion.outcome {
            // Only the old build has the symptom, seen once or judged twice: the new build is not worse.
            RevisionOutcome::Found { .. } | RevisionOutcome::Interrupted if old_alone => ProofRuling::Better,
            RevisionOutcome::Found { .. } | RevisionOutcome::EndFailed { newer: true, .. } => {
                ProofRuling::Worse
            }
            // Both builds have the symptom, or neither: no change.
            RevisionOutcome::BothIll | RevisionOutcome::NeitherIll { short: false, .. } => ProofRuling::Same,
            _ => ProofRuling::Unknown,
        };
        Self { ruling, conclusion }
    }
}
