//! The result of examining a source.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use warden_patches::SourceRevision;

/// The result of examining a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExaminedSource {
    /// Absolute path of the source; the URL for a fetched commit.
    pub given: PathBuf,
    /// `directory`, `archive` or `git`.
    pub kind: String,
    /// Hash of the content with its kind as prefix, such as `archive-sha256:832d...`.
    pub identity: String,
    /// llama.cpp's folder inside the source; empty for the source itself.
    pub root: String,
    /// The server's folder inside llama.cpp: `tools/server` or `examples/server`.
    pub server: String,
    /// Revision by the source's own evidence.
    pub revision: SourceRevision,
}

impl fmt::Display for ExaminedSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "llama.cpp, {}, in {}", self.revision, self.given.display())?;
        if self.root.is_empty() { Ok(()) } else { write!(f, " ({})", self.root) }
    }
}
