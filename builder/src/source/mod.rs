//! Where the source comes from, what it is, and how it gets into the work folder.
//!
//! A source is a folder or an archive that has llama.cpp somewhere in it. [`Source::examine`] finds it and gives it
//! an identity; that is all a plan needs, and for an archive that was seen before it reads nothing but two small
//! facts from the cache. Git URLs join here as one more variant, with the commit as identity.
//!
//! | source | identity | costs |
//! |---|---|---|
//! | archive | sha256 of its bytes | one read, then remembered by path, size, time and inode |
//! | folder | sha256 over sorted names and contents, without `.git`, models and build folders | one read each time |

mod archive_facts;
mod folder;
mod revision;
mod tree;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

pub use revision::Revision;

use crate::archive::{self, Bounds};
use crate::error::{Error, Result, io_error};

/// A place to take source from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A folder on disk; llama.cpp may lie in a subfolder.
    Directory(PathBuf),
    /// A .tar.gz, .tar.xz or .zip file; llama.cpp may lie in a subfolder.
    Archive(PathBuf),
}

/// What a source turned out to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Path of the source, absolute.
    pub given: PathBuf,
    /// `directory` or `archive`.
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

impl Source {
    /// Takes a path as a folder or as an archive, whichever it is.
    pub fn at(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).map_err(io_error("finding", path))?;
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_dir() => Ok(Self::Directory(path)),
            Ok(metadata) if metadata.is_file() => archive::format(&path).map(|_| Self::Archive(path)),
            Ok(_) => Err(Error::NotAnArchive { path, why: "it is neither a file nor a folder".into() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(Error::SourceMissing { path }),
            Err(error) => Err(io_error("finding", path)(error)),
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Archive(path) => path,
        }
    }

    /// Finds llama.cpp in it and computes its identity. Blocks: reads up to the whole source. `cache` is the folder
    /// for what is remembered about archives.
    pub fn examine(&self, cache: &Path, cancel: &CancellationToken) -> Result<Found> {
        match self {
            Self::Directory(path) => folder::examine(path, cancel),
            Self::Archive(path) => archive_facts::examine(path, cache, cancel),
        }
    }

    /// Writes the tree into an empty folder, without `.git` and models. Blocks.
    pub(crate) fn place(&self, found: &Found, into: &Path, cancel: &CancellationToken) -> Result<()> {
        match self {
            Self::Directory(path) => folder::copy(&path.join(&found.root), into, cancel),
            Self::Archive(path) => {
                archive::unpack(path, &found.root, into, Bounds::SOURCE, cancel, &is_source)
            }
        }
    }
}

/// Whether a file, by its name relative to the tree, belongs to what is built. Git metadata would make cmake ask
/// git for a version that we know better; the models are for tests and are half of an archive's bytes.
fn is_source(name: &str) -> bool {
    let model = Path::new(name).extension().is_some_and(|extension| extension == "gguf");
    !model && name.split('/').all(|part| part != ".git")
}

/// sha256 of a file's bytes, in hexadecimal digits. Blocks.
pub(crate) fn file_sha256(path: &Path, cancel: &CancellationToken) -> Result<String> {
    use sha2::{Digest, Sha256};
    use std::io::Read;

    let mut file = fs::File::open(path).map_err(io_error("opening", path))?;
    let (mut hash, mut chunk) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        match file.read(&mut chunk).map_err(io_error("reading", path))? {
            0 => return Ok(hex::encode(hash.finalize())),
            count => hash.update(&chunk[..count]),
        }
    }
}

#[cfg(test)]
mod tests;
