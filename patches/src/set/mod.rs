//! A patch set, as loaded from its `set.toml` and validated.
//!
//! The fields are those of the file; `docs/patches.md` explains them to authors of sets.

use std::fmt;
use std::path::PathBuf;

mod catalogue;
pub mod conformance;
pub(crate) mod diff;
pub mod fingerprints;
mod fix;
pub mod life;
pub(crate) mod load;

use serde::Deserialize;

use crate::scan::CodeContainer;
use conformance::ConformanceSpec;
use fingerprints::SeamFingerprints;

pub use catalogue::{SelectedSets, SetCatalogue, SetSelection};
pub use fix::{
    AffectedBuilds, FixEvidence, FixValue, FixVariable, SetFix, UpstreamState, UpstreamStatus, VariableKind,
};

/// A folder of patches: insertions into a tree, and conditions on that tree. Read from its `set.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PatchSet {
    schema: u32,
    /// Id, the folder's name, `[a-z0-9-]+`.
    pub id: String,
    /// Description in one line.
    pub title: String,
    /// Supported backends; empty: all.
    #[serde(default)]
    pub backends: Vec<String>,
    /// First supported upstream build, such as `b4881`. Documentation only, never a condition.
    #[serde(default)]
    pub first: Option<String>,
    /// Our own source files.
    #[serde(default, rename = "sidecar")]
    pub sidecars: Vec<SetSidecar>,
    /// Lines inserted into upstream's files.
    #[serde(default, rename = "hook")]
    pub hooks: Vec<SetHook>,
    /// Facts that must hold.
    #[serde(default, rename = "probe")]
    pub probes: Vec<SetProbe>,
    /// Containers whose text must be a known version.
    #[serde(default, rename = "seam")]
    pub seams: Vec<SetSeam>,
    /// Defects that the set fixes.
    #[serde(default, rename = "fix")]
    pub fixes: Vec<SetFix>,
    /// Plain diffs, applied strictly.
    #[serde(default, rename = "diff")]
    pub diffs: Vec<SetDiff>,
    /// Program that tests the set with a tree's own code.
    #[serde(default)]
    pub conformance: Option<ConformanceSpec>,
    /// Hash over the set's files except known versions of upstream's code, in hexadecimal digits.
    #[serde(skip)]
    pub digest: String,
    /// Known versions of the seams.
    #[serde(skip)]
    pub fingerprints: SeamFingerprints,
    /// Origin of the set.
    #[serde(skip)]
    pub origin: SetOrigin,
}

impl PatchSet {
    /// Returns true if the set supports this backend, such as `cuda`.
    pub fn is_for(&self, backend: &str) -> bool {
        self.backends.is_empty() || self.backends.iter().any(|known| known == backend)
    }

    /// The fix with this id.
    pub fn fix(&self, id: &str) -> Option<&SetFix> {
        self.fixes.iter().find(|fix| fix.id == id)
    }

    /// The hook with this id.
    pub fn hook(&self, id: &str) -> Option<&SetHook> {
        self.hooks.iter().find(|hook| hook.id == id)
    }
}

/// Origin of a set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SetOrigin {
    /// Embedded in this program.
    #[default]
    Embedded,
    /// A set of the user, in this folder.
    Folder(PathBuf),
}

impl fmt::Display for SetOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str("built in"),
            Self::Folder(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Our own source file, copied into the tree.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetSidecar {
    /// File name, in the set's folder and in the tree.
    pub file: String,
    /// Id of a hook: our file is copied into the folder of that hook's file.
    pub beside: String,
    /// Content.
    #[serde(skip)]
    pub content: Vec<u8>,
}

/// Our lines with the unique place where they are inserted.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetHook {
    /// Id in the set, `[a-z0-9-]+`.
    pub id: String,
    /// Paths relative to llama.cpp's root; the first one that exists counts.
    pub files: Vec<String>,
    /// Container in which the lines are inserted; `None`: anywhere in the file, which requires an anchor.
    /// `#include "log.h"` may be that anchor, because the scanner keeps the names of included files.
    #[serde(default)]
    pub container: Option<CodeContainer>,
    /// Side of the container or anchor.
    pub at: HookPosition,
    /// Literal that occurs exactly once in the container; `None` for [`HookPosition::BeforeContainer`].
    #[serde(default)]
    pub anchor: Option<String>,
    /// Lines without indentation.
    pub insert: Vec<String>,
    /// `true`: a tree without the container needs no such lines; `false`: such a tree is refused.
    #[serde(default)]
    pub optional: bool,
    /// The lines are needed only if the container matches this pattern; `None`: always needed.
    #[serde(default)]
    pub when: Option<CodePattern>,
    /// Text of the lines that the binary must contain as evidence that they were compiled.
    #[serde(default)]
    pub marker: Option<String>,
}

/// Position of a hook's lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HookPosition {
    /// As separate lines before the container's first line.
    BeforeContainer,
    /// As separate lines before the line where the anchor begins.
    Before,
    /// As separate lines after the line where the anchor ends.
    After,
}

/// A fact about the tree.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetProbe {
    /// Id in the set, `[a-z0-9-]+`.
    pub id: String,
    /// Paths relative to llama.cpp's root; the first one that exists counts. A missing file or container
    /// counts as no match.
    pub files: Vec<String>,
    /// Container to search; `None`: the whole file.
    #[serde(default)]
    pub container: Option<CodeContainer>,
    /// Functions and structs to skip; missing ones are ignored. Cannot be combined with `container`.
    #[serde(default)]
    pub outside: Vec<CodeContainer>,
    /// Hooks whose containers are not searched if the hook is placed. Cannot be combined with `container`.
    #[serde(default)]
    pub guarded: Vec<String>,
    /// Pattern to count, in text with blanked comments and strings.
    pub pattern: CodePattern,
    /// Pattern that must occur in the file for the probe to be meaningful: otherwise a probe for zero
    /// matches would hold forever after upstream renames something.
    #[serde(default)]
    pub finds: Option<CodePattern>,
    /// Exact count.
    #[serde(default)]
    pub count: Option<usize>,
    /// Minimum count; 1 if no count is given.
    #[serde(default)]
    pub min: Option<usize>,
    /// Maximum count.
    #[serde(default)]
    pub max: Option<usize>,
    /// Meaning of a failed probe, for maintainers.
    pub why: String,
    /// Consequence of a failed probe for the set or fix.
    #[serde(default)]
    pub on_fail: ProbeConsequence,
    /// The affected fix; `None`: the whole set.
    #[serde(default)]
    pub fix: Option<String>,
    /// Macro defined in the sidecars if the probe holds.
    #[serde(default)]
    pub define: Option<String>,
}

impl SetProbe {
    /// Minimum and maximum count with which the probe holds.
    pub fn bounds(&self) -> (usize, usize) {
        match (self.count, self.min, self.max) {
            (Some(count), ..) => (count, count),
            (None, None, None) => (1, usize::MAX),
            (None, min, max) => (min.unwrap_or(0), max.unwrap_or(usize::MAX)),
        }
    }
}

/// Meaning of a failed probe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeConsequence {
    /// The set or fix would not work.
    #[default]
    Refused,
    /// The source does not have the problem.
    NotApplicable,
    /// Upstream fixed the problem.
    Superseded,
    /// No consequence: the probe only controls a `define`.
    Ignore,
}

/// A container whose text must be a reviewed version.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetSeam {
    /// Id in the set and in `fingerprints.json`, `[a-z0-9_-]+`.
    pub id: String,
    /// Paths relative to llama.cpp's root; the first one that exists counts.
    pub files: Vec<String>,
    /// Container to fingerprint.
    pub container: CodeContainer,
    /// The container may be absent.
    #[serde(default)]
    pub optional: bool,
    /// The name may have several definitions; all are hashed in order.
    #[serde(default)]
    pub overloads: bool,
}

/// A plain diff of the user.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetDiff {
    /// File name in the set's folder.
    pub file: String,
    /// First build that the diff is for, such as `b8000`.
    #[serde(default)]
    pub first: Option<String>,
    /// Last build that the diff is for.
    #[serde(default)]
    pub last: Option<String>,
    /// Commits that the diff is for, each with at least seven hexadecimal digits.
    #[serde(default)]
    pub commits: Vec<String>,
    /// Content.
    #[serde(skip)]
    pub content: Vec<u8>,
}

/// A regular expression, compiled while the set is loaded.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct CodePattern(pub regex::Regex);

impl PartialEq for CodePattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for CodePattern {}

impl TryFrom<String> for CodePattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        regex::RegexBuilder::new(&text)
            .multi_line(true)
            .build()
            .map(Self)
            .map_err(|error| format!("not a regular expression: {}", join_lines(&error.to_string())))
    }
}

impl fmt::Display for CodePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

pub(crate) fn join_lines(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
