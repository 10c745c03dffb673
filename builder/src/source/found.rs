//! What a source turned out to be.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use warden_patches::Revision;

/// What a source turned out to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Path of the source, absolute; for a commit that was fetched, the URL.
    pub given: PathBuf,
    /// `directory`, `archive` or `git`.
    pub kind: String,
    /// The content's hash with its kind in front, such as `archive-sha256:832d...`.
    pub identity: String,
    /// llama.cpp's folder inside of the source; empty when the source is it.
    pub root: String,
    /// The server's folder inside of that: `tools/server` or `examples/server`.
    pub server: String,
    /// Which revision it believes it is.
    pub revision: Revision,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "llama.cpp, {}, in {}", self.revision, self.given.display())?;
        if self.root.is_empty() { Ok(()) } else { write!(f, " ({})", self.root) }
    }
}
