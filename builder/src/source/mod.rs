//! Sources: their kinds, their identity, and how they are copied into the work folder.
//!
//! A source is a folder, an archive or a commit with llama.cpp somewhere in it. [`BuildSource::examine`]
//! finds llama.cpp and computes the identity.
//!
//! | source | identity | cost |
//! |---|---|---|
//! | archive | sha256 of its bytes | one read, then cached by path, size, time and inode |
//! | folder | sha256 over sorted names and contents, without files that are no source | one read each time |
//! | commit | its 40 digits | a few look-ups |

mod archived;
mod folder;
mod remembered;
mod revision;
pub(crate) mod tree;

use std::path::{Path, PathBuf};
use std::{fmt, fs};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use warden_patches::{FolderTree, SourceRevision, SourceTree};

pub use archived::ArchiveTree;
pub(crate) use remembered::CachedTree;
pub(crate) use tree::join_names;

use crate::archive::{self, ArchiveLimits};
use crate::error::{BuilderError, Result, check_cancelled, io_error};
use crate::event::EventReporter;
use crate::git::GitRepository;

/// A location of source code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BuildSource {
    /// A folder on disk; llama.cpp may be in a subfolder.
    Directory(PathBuf),
    /// A .tar.gz, .tar.xz or .zip file; llama.cpp may be in a subfolder.
    Archive(PathBuf),
    /// A commit of a repository on this machine; llama.cpp may be in a subfolder.
    Commit {
        /// Folder of the repository: the user's repository, or a cached one.
        repository: PathBuf,
        /// Name of the repository in messages: its folder, or its URL without a password.
        shown: String,
        /// Commit id, 40 hexadecimal digits.
        commit: String,
    },
}

impl BuildSource {
    /// Recognizes a path as a folder or an archive.
    ///
    /// # Errors
    /// Fails if the path does not exist, or is neither a folder nor an archive of a known format.
    pub fn at(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).map_err(io_error("finding", path))?;
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => Ok(Self::Directory(path)),
            Ok(metadata) if metadata.is_file() => archive::detect_format(&path).map(|_| Self::Archive(path)),
            Ok(_) => {
                Err(BuilderError::NotAnArchive { path, why: "it is neither a file nor a folder".into() })
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(BuilderError::SourceMissing { path })
            }
            Err(error) => Err(io_error("finding", path)(error)),
        }
    }

    /// Path of the source; for a commit, the path of its repository.
    pub fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Archive(path) | Self::Commit { repository: path, .. } => path,
        }
    }

    /// Finds llama.cpp and computes the identity. Blocks. `cache` is the folder for facts about archives.
    ///
    /// # Errors
    /// Fails if the source cannot be read, if it has no llama.cpp or several, or on cancellation.
    pub fn examine(&self, cache: &Path, cancel: &CancellationToken) -> Result<ExaminedSource> {
        match self {
            Self::Directory(path) => folder::examine_folder(path, cancel),
            Self::Archive(path) => archived::examine_archive(path, cache, cancel),
            Self::Commit { repository, shown, commit } => examine_commit(repository, shown, commit),
        }
    }

    /// llama.cpp's own folder with its revision; `None` for sources other than folders. Blocks.
    ///
    /// # Errors
    /// Fails if there is no llama.cpp.
    pub fn folder(&self, cancel: &CancellationToken) -> Result<Option<(PathBuf, SourceRevision)>> {
        let Self::Directory(path) = self else { return Ok(None) };
        let (tree, revision) = folder::locate(path, cancel)?;
        // Joining an empty path would append a slash.
        let root = if tree.root.is_empty() { path.clone() } else { path.join(tree.root) };
        Ok(Some((root, revision)))
    }

    /// Returns the files of the source's llama.cpp by name, for patches. Blocks: an archive is read
    /// completely, folders and commits on demand. `cache` is the folder for facts about archives.
    ///
    /// # Errors
    /// Fails if there is no llama.cpp, or if the source cannot be read.
    pub fn tree(&self, cache: &Path, cancel: &CancellationToken) -> Result<Box<dyn SourceTree>> {
        Ok(match self {
            Self::Directory(path) => {
                let (tree, revision) = folder::locate(path, cancel)?;
                Box::new(FolderTree::new(path.join(tree.root), revision))
            }
            Self::Archive(path) => {
                let found = archived::examine_archive(path, cache, cancel)?;
                Box::new(ArchiveTree::read_all(path, &found.root, found.revision, cancel)?)
            }
            Self::Commit { repository, shown, commit } => {
                let repository = GitRepository::open_as(repository, shown.clone())?;
                let revision = repository.revision(commit)?;
                Box::new(repository.tree(commit)?.with_revision(revision))
            }
        })
    }

    /// Writes the tree into an empty folder, without `.git` and models. Reports files left out for other
    /// reasons. Blocks.
    pub(crate) fn write_to(
        &self,
        found: &ExaminedSource,
        into: &Path,
        reporter: &EventReporter,
        cancel: &CancellationToken,
    ) -> Result<()> {
        match self {
            Self::Directory(path) => folder::copy_source(&path.join(&found.root), into, reporter, cancel),
            Self::Archive(path) => {
                archive::unpack(path, &found.root, into, ArchiveLimits::SOURCE, cancel, &is_source)
            }
            Self::Commit { repository, shown, commit } => GitRepository::open_as(repository, shown.clone())?
                .tree(commit)?
                .write_to(into, reporter, cancel),
        }
    }
}

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

fn examine_commit(repository: &Path, shown: &str, commit: &str) -> Result<ExaminedSource> {
    let repository = GitRepository::open_as(repository, shown.to_owned())?;
    let tree = repository.tree(commit)?;
    let Some(located) = tree.located() else {
        return Err(BuilderError::NoLlamaCpp {
            path: format!("{shown} at {commit}").into(),
            top: tree.top_names(),
        });
    };
    Ok(ExaminedSource {
        given: shown.into(),
        kind: "git".into(),
        identity: format!("git-{commit}"),
        root: located.root.clone(),
        server: located.server.into(),
        revision: repository.revision(commit)?,
    })
}

/// Extensions of model files: llama.cpp has some for tests, which are half of an archive's bytes.
const MODEL_EXTENSIONS: [&str; 6] = ["gguf", "safetensors", "pt", "pth", "ckpt", "onnx"];
/// Folders excluded at any depth. git's metadata would make cmake ask git for a version that we know
/// better; npm fetches its modules itself.
const EXCLUDED_FOLDERS: [&str; 2] = [".git", "node_modules"];

/// Returns true if a file, by its name relative to the tree, belongs to the source.
pub(crate) fn is_source(name: &str) -> bool {
    let ending = Path::new(name).extension().and_then(|ending| ending.to_str());
    !ending.is_some_and(|ending| MODEL_EXTENSIONS.contains(&ending))
        && name.split('/').all(|part| !EXCLUDED_FOLDERS.contains(&part))
}

/// sha256 of a file's bytes as hexadecimal digits. Blocks.
pub(crate) fn file_sha256(path: &Path, cancel: &CancellationToken) -> Result<String> {
    use sha2::{Digest, Sha256};
    use std::io::Read;

    let mut file = fs::File::open(path).map_err(io_error("opening", path))?;
    let (mut hash, mut chunk) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        check_cancelled(cancel)?;
        match file.read(&mut chunk).map_err(io_error("reading", path))? {
            0 => return Ok(hex::encode(hash.finalize())),
            count => hash.update(&chunk[..count]),
        }
    }
}

#[cfg(test)]
mod tests;
