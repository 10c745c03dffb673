//! The llama.cpp revision of a tree.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Digits of an abbreviated commit; upstream uses nine.
const SHORT_COMMIT_DIGITS: usize = 9;

/// Revision of a tree by its own evidence. Both parts may be unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRevision {
    /// The commit as given, up to 40 hexadecimal digits.
    pub commit: Option<String>,
    /// Upstream's build number, as in the tag `b9976`.
    pub build_number: Option<u32>,
}

impl SourceRevision {
    /// The commit's first nine digits, or `unknown`.
    pub fn short_commit(&self) -> &str {
        self.commit.as_deref().map_or("unknown", |commit| commit.get(..SHORT_COMMIT_DIGITS).unwrap_or(commit))
    }
}

impl fmt::Display for SourceRevision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.build_number {
            Some(number) => write!(f, "build {number}, commit {}", self.short_commit()),
            None => write!(f, "build unknown, commit {}", self.short_commit()),
        }
    }
}
