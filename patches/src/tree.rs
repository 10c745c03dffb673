//! Access to the files of a llama.cpp: a folder, an archive, a commit, or one of these with edits on top.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{fmt, fs, io};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::edits::TreeEdits;
use crate::error::{Result, io_error};

/// A readable llama.cpp. Paths are relative to its root, with `/` as separator.
pub trait SourceTree: Send + Sync {
    /// A file's content; `None` if the file does not exist.
    ///
    /// # Errors
    /// Fails if an existing file cannot be read.
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>>;

    /// Identifier of a file's content, equal for equal contents; `None` if the file does not exist.
    ///
    /// # Errors
    /// Fails if an existing file cannot be read.
    fn content_id(&self, path: &str) -> Result<Option<String>> {
        Ok(self.read(path)?.map(|content| sha256(&content)))
    }

    /// Revision, as far as the tree's own files show it.
    fn revision(&self) -> SourceRevision;
}

/// Digits of an abbreviated commit; upstream uses nine.
const SHORT_COMMIT_DIGITS: usize = 9;

/// Revision of a tree, as far as its own files show it. Both parts may be unknown.
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

pub(crate) fn sha256(content: &[u8]) -> String {
    hex::encode(Sha256::digest(content))
}

/// A llama.cpp in a folder.
#[derive(Clone, Debug)]
pub struct FolderTree {
    root: PathBuf,
    revision: SourceRevision,
}

impl FolderTree {
    /// The llama.cpp whose root is this folder.
    pub fn new(root: impl Into<PathBuf>, revision: SourceRevision) -> Self {
        Self { root: root.into(), revision }
    }
}

impl SourceTree for FolderTree {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        let file = self.root.join(path);
        // Only regular files: reading a pipe would block until another process writes.
        let content =
            fs::metadata(&file).and_then(|facts| facts.is_file().then(|| fs::read(&file)).transpose());
        match content {
            Ok(content) => Ok(content),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Ok(None)
            }
            Err(error) => Err(io_error("reading", file)(error)),
        }
    }

    fn revision(&self) -> SourceRevision {
        self.revision.clone()
    }
}

/// A tree with edits on top, as later sets of a series see it.
pub struct OverlayTree<'a> {
    base: &'a dyn SourceTree,
    /// Contents by path.
    files: BTreeMap<String, Vec<u8>>,
}

impl<'a> OverlayTree<'a> {
    /// A tree without edits.
    pub fn new(base: &'a dyn SourceTree) -> Self {
        Self { base, files: BTreeMap::new() }
    }

    /// Adds edits on top.
    pub fn add(&mut self, edits: &TreeEdits) {
        for edit in &edits.0 {
            self.put(edit.path.clone(), edit.after.clone());
        }
    }

    pub(crate) fn put(&mut self, path: String, content: Vec<u8>) {
        self.files.insert(path, content);
    }
}

impl SourceTree for OverlayTree<'_> {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        match self.files.get(path) {
            Some(content) => Ok(Some(content.clone())),
            None => self.base.read(path),
        }
    }

    fn content_id(&self, path: &str) -> Result<Option<String>> {
        match self.files.get(path) {
            Some(content) => Ok(Some(sha256(content))),
            None => self.base.content_id(path),
        }
    }

    fn revision(&self) -> SourceRevision {
        self.base.revision()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_are_read_and_links_to_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "text").unwrap();
        fs::create_dir(path("folder")).unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", path("broken")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap();
        assert!(made.success());
        let tree = FolderTree::new(folder.path(), SourceRevision::default());
        for name in ["file", "link"] {
            assert_eq!(tree.read(name).unwrap().as_deref(), Some(&b"text"[..]), "{name}");
        }
        for name in ["folder", "broken", "pipe", "none", "file/below"] {
            assert_eq!(tree.read(name).unwrap(), None, "{name}");
        }
    }
}
