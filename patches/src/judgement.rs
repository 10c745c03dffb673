//! Results of judging a tree, as values that can be printed, stored and applied.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::edits::TreeEdits;
use crate::prove::SetProof;
use crate::set::fingerprints::SeamSeen;
use crate::set::life::FixStanding;

/// Status of a set or fix in a tree. Ordered: among several, the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PatchStatus {
    /// All hooks and probes hold, and every seam has a known version.
    Verified,
    /// Unverified, but a record of this machine shows that the set works with exactly this code.
    LocallyVerified,
    /// The source does not have the problem.
    NotApplicable,
    /// Upstream fixed the problem.
    Superseded,
    /// Hooks and probes hold; a seam has an unreviewed version.
    Unverified,
    /// A hook or probe does not hold, so the set cannot be applied.
    Refused,
}

impl PatchStatus {
    pub(crate) const fn forbids(self, allow_unverified: bool) -> bool {
        match self {
            Self::Refused => true,
            Self::Unverified => !allow_unverified,
            Self::Verified | Self::LocallyVerified | Self::NotApplicable | Self::Superseded => false,
        }
    }
}

impl fmt::Display for PatchStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Result of judging a set in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetJudgement {
    /// Id of the set.
    pub set: String,
    /// Worst status of the whole set.
    pub status: PatchStatus,
    /// Reasons, worst first. Empty if verified.
    pub reasons: Vec<JudgementReason>,
    /// Fixes in the set's order.
    pub fixes: Vec<FixJudgement>,
    /// Changes to the tree, if the set can be applied.
    pub edits: Option<TreeEdits>,
    /// Seams in this tree, in the set's order.
    pub seams: Vec<SeamSeen>,
    /// Hash of the hooks' lines and the new files; empty if the set cannot be applied.
    pub placed: String,
    /// Record of this machine that makes the set locally verified; `None` for other statuses.
    pub proof: Option<SetProof>,
}

/// Result for a fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FixJudgement {
    /// Id of the fix.
    pub fix: String,
    /// Status of the fix, or of the set if that is worse.
    pub status: PatchStatus,
    /// Reason in one line.
    pub reason: Option<String>,
    /// Needed, superseded or harmful in this tree; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life: Option<FixStanding>,
}

/// A reason against verification of a set. Its `Display` is one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct JudgementReason {
    /// Resulting status of the set or fix.
    pub status: PatchStatus,
    /// Part of the set that gives the reason, such as ``hook `end` ``.
    pub part: String,
    /// The affected fix; `None`: the whole set.
    pub fix: Option<String>,
    /// File in the tree.
    pub file: Option<String>,
    /// Line in the file, from 1.
    pub line: Option<usize>,
    /// Expected and found state.
    pub text: String,
}

impl JudgementReason {
    /// A reason about the whole set, without a place.
    pub(crate) fn new(status: PatchStatus, part: String, text: String) -> Self {
        Self { status, part, fix: None, file: None, line: None, text }
    }

    #[must_use]
    pub(crate) fn at(self, file: &str, line: Option<usize>) -> Self {
        Self { file: Some(file.to_owned()), line, ..self }
    }
}

impl fmt::Display for JudgementReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, self.line) {
            (Some(file), Some(line)) => write!(f, "{file}:{line}: ")?,
            (Some(file), None) => write!(f, "{file}: ")?,
            (None, _) => {}
        }
        write!(f, "{}: {}", self.part, self.text)
    }
}
