//! What a patch set says, as it was read from its `set.toml` and found to be sound.
//!
//! The fields are those of the file; `docs/patches.md` explains them to somebody who writes a set.

use std::fmt;
use std::path::PathBuf;

mod catalogue;
pub mod conformance;
pub(crate) mod diff;
pub mod fingerprints;
mod fix;
pub mod life;
pub(crate) mod load;
mod names;
mod selection;

use serde::Deserialize;

use crate::scan::Container;
use conformance::Conformance;
use fingerprints::Fingerprints;

pub use catalogue::Catalogue;
pub use fix::{Affects, Evidence, Fix, Upstream, UpstreamStatus, Value, Variable, VariableKind};
pub use selection::{Selection, Sets};

/// What a `set.toml` says.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stated {
    pub(super) schema: u32,
    pub(super) id: String,
    pub(super) title: String,
    #[serde(default)]
    pub(super) backends: Vec<String>,
    #[serde(default)]
    pub(super) first: Option<String>,
    #[serde(default, rename = "sidecar")]
    pub(super) sidecars: Vec<Sidecar>,
    #[serde(default, rename = "hook")]
    pub(super) hooks: Vec<Hook>,
    #[serde(default, rename = "probe")]
    pub(super) probes: Vec<Probe>,
    #[serde(default, rename = "seam")]
    pub(super) seams: Vec<Seam>,
    #[serde(default, rename = "fix")]
    pub(super) fixes: Vec<Fix>,
    #[serde(default, rename = "diff")]
    pub(super) diffs: Vec<Diff>,
    #[serde(default)]
    pub(super) conformance: Option<Conformance>,
}

/// One folder of patches: what is placed into a tree, and what must be true of that tree.
#[derive(Clone, Debug)]
pub struct PatchSet {
    /// The folder's name, `[a-z0-9-]+`.
    pub id: String,
    /// One line for people.
    pub title: String,
    /// The backends that it is for; empty: all.
    pub backends: Vec<String>,
    /// The first upstream build for which it is promised, such as `b4881`. Documentation, never the gate.
    pub first: Option<String>,
    /// Our own source files.
    pub sidecars: Vec<Sidecar>,
    /// Lines that are placed into upstream's files.
    pub hooks: Vec<Hook>,
    /// Facts that must hold.
    pub probes: Vec<Probe>,
    /// Containers whose text must be a known version.
    pub seams: Vec<Seam>,
    /// What the set cures.
    pub fixes: Vec<Fix>,
    /// Plain diffs, strictly applied.
    pub diffs: Vec<Diff>,
    /// What shows how it behaves with a tree's own code.
    pub conformance: Option<Conformance>,
    /// A hash over its files but for what is known of upstream's code, in hexadecimal digits.
    pub digest: String,
    /// The known versions of the seams.
    pub fingerprints: Fingerprints,
    /// Where it was read.
    pub origin: Origin,
}

impl PatchSet {
    /// Whether it is for builds for this backend, such as `cuda`.
    pub fn is_for(&self, backend: &str) -> bool {
        self.backends.is_empty() || self.backends.iter().any(|known| known == backend)
    }

    /// The fix of this id.
    pub fn fix(&self, id: &str) -> Option<&Fix> {
        self.fixes.iter().find(|fix| fix.id == id)
    }

    /// The hook of this id.
    pub fn hook(&self, id: &str) -> Option<&Hook> {
        self.hooks.iter().find(|hook| hook.id == id)
    }
}

/// Where a set was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It is part of this program.
    Embedded,
    /// The user's own, in this folder.
    Folder(PathBuf),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedded => f.write_str("built in"),
            Self::Folder(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A source file of ours that is copied into the tree.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sidecar {
    /// Its name, in the set's folder and in the tree.
    pub file: String,
    /// The hook beside whose file it is copied.
    pub beside: String,
    /// Its text.
    #[serde(skip)]
    pub content: Vec<u8>,
}

/// Lines of ours and the one place where they go.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hook {
    /// Its name in the set, `[a-z0-9-]+`.
    pub id: String,
    /// Paths from llama.cpp's root; the first that exists is meant.
    pub files: Vec<String>,
    /// Where in the file; none: anywhere in it, and then there must be an anchor. (For `#include` lines: the scanner
    /// must leave the file name in them unmasked, so that `#include "log.h"` can be an anchor.)
    #[serde(default)]
    pub container: Option<Container>,
    /// Which side of what.
    pub at: At,
    /// A literal inside of the container that occurs exactly once there; none for [`At::BeforeContainer`].
    #[serde(default)]
    pub anchor: Option<String>,
    /// The lines, without indentation.
    pub insert: Vec<String>,
    /// Whether a tree without the container needs no such lines; else it is refused.
    #[serde(default)]
    pub optional: bool,
    /// What the container has in it where it needs such lines; none: they are always needed.
    #[serde(default)]
    pub when: Option<Pattern>,
    /// Text in the lines that the built program must have in it: else the lines are not compiled.
    #[serde(default)]
    pub marker: Option<String>,
}

/// Where a hook's lines go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum At {
    /// On lines of their own before the container's first line.
    BeforeContainer,
    /// On lines of their own before the line on which the anchor begins.
    Before,
    /// On lines of their own after the line on which the anchor ends.
    After,
}

/// A fact about the tree.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Its name in the set, `[a-z0-9-]+`.
    pub id: String,
    /// Paths from llama.cpp's root; the first that exists is meant. A file that does not exist, and a container that is
    /// not in it, count as no match.
    pub files: Vec<String>,
    /// Where in the file; none: everywhere.
    #[serde(default)]
    pub container: Option<Container>,
    /// Functions and structs in which it is not counted; those that are not there do not matter. Instead of a container.
    #[serde(default)]
    pub outside: Vec<Container>,
    /// Hooks in whose containers it is not counted either, each where it is placed: where a hook has no place, what it would
    /// guard counts. Instead of a container.
    #[serde(default)]
    pub guarded: Vec<String>,
    /// What is counted, in text whose comments and strings are blanked.
    pub pattern: Pattern,
    /// What must be in the file, so that the probe can find anything there: a probe that holds when it finds nothing would
    /// else hold for ever once the names have changed.
    #[serde(default)]
    pub finds: Option<Pattern>,
    /// How often exactly.
    #[serde(default)]
    pub count: Option<usize>,
    /// How often at least; 1 when nothing else is said.
    #[serde(default)]
    pub min: Option<usize>,
    /// How often at most.
    #[serde(default)]
    pub max: Option<usize>,
    /// What it means for a maintainer when it does not hold.
    pub why: String,
    /// What becomes of the set, or of the fix, when it does not hold.
    #[serde(default)]
    pub on_fail: OnFail,
    /// The only fix that it concerns.
    #[serde(default)]
    pub fix: Option<String>,
    /// A macro that the sidecars see when it holds.
    #[serde(default)]
    pub define: Option<String>,
}

impl Probe {
    /// The least and the greatest count with which it holds.
    pub fn bounds(&self) -> (usize, usize) {
        match (self.count, self.min, self.max) {
            (Some(count), ..) => (count, count),
            (None, None, None) => (1, usize::MAX),
            (None, min, max) => (min.unwrap_or(0), max.unwrap_or(usize::MAX)),
        }
    }
}

/// What a probe that does not hold means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFail {
    /// The set, or the fix, would not work there.
    #[default]
    Refused,
    /// There is nothing to cure.
    NotApplicable,
    /// Upstream cured it.
    Superseded,
    /// Nothing: it only decides on a `define`.
    Ignore,
}

/// A container whose text must be a version that somebody looked at.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seam {
    /// Its name in the set and in `fingerprints.json`, `[a-z0-9_-]+`.
    pub id: String,
    /// Paths from llama.cpp's root; the first that exists is meant.
    pub files: Vec<String>,
    /// What is fingerprinted.
    pub container: Container,
    /// It may be absent.
    #[serde(default)]
    pub optional: bool,
    /// The name may have several definitions; all are hashed, in their order.
    #[serde(default)]
    pub overloads: bool,
}

/// A plain diff of the user's own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Diff {
    /// Its name in the set's folder.
    pub file: String,
    /// The first build that it is for, such as `b8000`.
    #[serde(default)]
    pub first: Option<String>,
    /// The last build that it is for.
    #[serde(default)]
    pub last: Option<String>,
    /// The commits that it is for, each at least seven hexadecimal digits.
    #[serde(default)]
    pub commits: Vec<String>,
    /// Its text.
    #[serde(skip)]
    pub content: Vec<u8>,
}

/// A regular expression that was compiled when the set was read.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(pub regex::Regex);

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        regex::RegexBuilder::new(&text)
            .multi_line(true)
            .build()
            .map(Self)
            .map_err(|error| format!("not a regular expression: {}", one_line(&error.to_string())))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

/// A message of several lines as one.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
