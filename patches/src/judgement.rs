//! What judging a tree found, as values that can be printed, stored and applied.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::prove::Proof;
use crate::set::life::Standing;

/// Whether a set, or a fix of it, can be had in a tree. Ordered: the greater one speaks for several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// Every hook and probe holds and every seam is a known version.
    Verified,
    /// As unverified, and this machine has a record that it was shown to be good for just this code.
    LocallyVerified,
    /// There is nothing to cure.
    NotApplicable,
    /// Upstream cured it.
    Superseded,
    /// Hooks and probes hold; a seam is a version that nobody has looked at.
    Unverified,
    /// A hook or a probe does not hold: the set cannot be applied.
    Refused,
}

impl Status {
    /// Whether a set of this status may not be applied.
    pub(crate) const fn forbids(self, allow_unverified: bool) -> bool {
        match self {
            Self::Refused => true,
            Self::Unverified => !allow_unverified,
            Self::Verified | Self::LocallyVerified | Self::NotApplicable | Self::Superseded => false,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Verified => "verified",
            Self::LocallyVerified => "locally-verified",
            Self::NotApplicable => "not-applicable",
            Self::Superseded => "superseded",
            Self::Unverified => "unverified",
            Self::Refused => "refused",
        })
    }
}

/// What was found about a set and a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The set's id.
    pub set: String,
    /// The worst of what was found for the whole set.
    pub status: Status,
    /// Why, worst first. Empty when verified.
    pub reasons: Vec<Reason>,
    /// The set's fixes, in its order.
    pub fixes: Vec<FixJudgement>,
    /// What would change in the tree; present when it can be applied.
    pub edits: Option<Edits>,
    /// The seams as they are in this tree, in the set's order.
    pub seams: Vec<SeamSeen>,
    /// A hash of what is placed in this tree: the hooks' lines, and the files that are new. Empty when it cannot be applied.
    pub placed: String,
    /// What was shown for this code, if that is why it is locally verified.
    pub proof: Option<Proof>,
}

/// What was found about one fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FixJudgement {
    /// The fix's id.
    pub fix: String,
    /// Its own status, or the set's where that is worse.
    pub status: Status,
    /// Why, in one line.
    pub reason: Option<String>,
    /// Whether it is needed in this tree, superseded or harmful; none: nothing is known of that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life: Option<Standing>,
}

/// One thing that keeps a set from being verified. Its `Display` is one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// What it makes of the set or of the fix.
    pub status: Status,
    /// Which part of the set says so, such as ``hook `end` ``.
    pub part: String,
    /// The only fix that it concerns.
    pub fix: Option<String>,
    /// The file of the tree.
    pub file: Option<String>,
    /// The line in it, from 1.
    pub line: Option<usize>,
    /// What was expected and what was found.
    pub text: String,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, self.line) {
            (Some(file), Some(line)) => write!(f, "{file}:{line}: ")?,
            (Some(file), None) => write!(f, "{file}: ")?,
            (None, _) => {}
        }
        write!(f, "{}: {}", self.part, self.text)
    }
}

/// A seam as it is in a tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SeamSeen {
    /// The seam's id.
    pub seam: String,
    /// The file that it was found in.
    pub file: Option<String>,
    /// First and last line of the container (of the first one of several), from 1.
    pub lines: Option<(usize, usize)>,
    /// 16 hexadecimal digits, or `absent`.
    pub hash: String,
    /// A hash of 8 hexadecimal digits for each piece of the container.
    #[serde(skip)]
    pub statements: Vec<String>,
    /// The label of the known version that it is; none: it is new.
    pub known: Option<String>,
}

/// What would change in a tree, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edits(pub Vec<FileEdit>);

/// One file of a tree, before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEdit {
    /// From llama.cpp's root.
    pub path: String,
    /// What it was; none: there was no such file.
    pub before: Option<Vec<u8>>,
    /// What it becomes.
    pub after: Vec<u8>,
    /// The lines that hooks put into it, from top to bottom.
    pub inserted: Vec<Inserted>,
}

/// One line that a hook put into a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// Its number in the edited file, from 1.
    pub line: usize,
    /// The line as it stands there, without its ending.
    pub text: String,
    /// The hook's id.
    pub hook: String,
}
