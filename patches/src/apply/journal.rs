//! The journal of a patched tree: what was applied, and everything that undoing or finishing it takes.
//!
//! It is written before the first file changes and removed after the last one is restored, so a crash in between
//! leaves a tree whose every file is known: as it was, or as it was to become.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::path::Path;

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::change::{self, Change};
use super::disk::Disk;
use super::fault::refused;
use super::splice::{self, Splice};
use crate::error::{Result, io_error};

/// Its name, in llama.cpp's own folder.
pub(crate) const JOURNAL: &str = ".llama-warden-patches.json";
/// Raised when older programs could no longer restore a tree with it.
const SCHEMA: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Journal {
    schema: u32,
    writer: String,
    /// The applied sets, in order.
    pub(super) sets: Vec<AppliedSet>,
    /// Folders that were made for new files, parents first.
    pub(super) folders: Vec<String>,
    pub(super) files: Vec<JournalFile>,
}

/// What every version of the journal begins with.
#[derive(Deserialize)]
struct Head {
    schema: u32,
}

/// A set as it was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppliedSet {
    /// Its id.
    pub id: String,
    /// Twelve hexadecimal digits over the edits that it made.
    pub hash: String,
    /// Whether everything that it touches was a known version.
    pub verified: bool,
}

impl fmt::Display for AppliedSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.hash)
    }
}

/// A file before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JournalFile {
    pub(super) path: String,
    /// sha256 of the original; absent for a file that was created.
    before: Option<String>,
    /// sha256 of the patched file.
    after: String,
    /// What makes the patched file of the original.
    splices: Vec<Splice>,
    /// The original itself: zlib, in hexadecimal digits.
    original: Option<String>,
}

/// In which state a file of a journal is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Original,
    Patched,
    /// Neither: somebody else was here. With what is there, if anything.
    Foreign(Option<Vec<u8>>),
}

impl Journal {
    pub(super) fn new(sets: Vec<AppliedSet>, folders: Vec<String>, changes: &[Change]) -> Result<Self> {
        let writer = concat!("llama-warden ", env!("CARGO_PKG_VERSION")).to_owned();
        let files = changes.iter().map(JournalFile::new).collect::<Result<_>>()?;
        Ok(Self { schema: SCHEMA, writer, sets, folders, files })
    }

    /// Reads the journal of a tree, if it has one.
    pub(super) fn read(root: &Path) -> Result<Option<Self>> {
        let Some(bytes) = change::read(root, JOURNAL)? else { return Ok(None) };
        let damaged = |why: String| {
            refused(
                &root.join(JOURNAL),
                format!("the journal of the applied patches cannot be used: {why}"),
                "restore the patched files from where they came from (their lines of ours end with `// llama-warden:`), \
                 then remove the journal",
            )
        };
        let head: Head = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if head.schema != SCHEMA {
            return Err(damaged(format!(
                "it has the schema {}, this program knows {SCHEMA}: use the program that wrote it",
                head.schema
            )));
        }
        let journal: Self = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        for folder in &journal.folders {
            change::inside(root, folder)?;
        }
        for file in &journal.files {
            change::inside(root, &file.path)?;
            file.states().ok_or_else(|| damaged(format!("what it says of {} fits no file", file.path)))?;
        }
        Ok(Some(journal))
    }

    /// Writes it, whole or not at all.
    pub(super) fn write(&self, disk: &dyn Disk, root: &Path) -> Result<()> {
        let path = root.join(JOURNAL);
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|error| io_error("writing", &path)(error.into()))?;
        text.push(b'\n');
        let new = change::beside(&path);
        let written = disk
            .write_new(&new, &text, None)
            .and_then(|()| disk.rename(&new, &path))
            .and_then(|()| disk.sync_folder(root));
        written.map_err(|error| {
            // Nothing else was touched yet; a leftover would be swept next time.
            drop(disk.remove(&new));
            drop(disk.remove(&path));
            io_error("writing", &path)(error)
        })
    }

    /// Removes it: the tree is nobody's again.
    pub(super) fn remove(disk: &dyn Disk, root: &Path) -> Result<()> {
        let path = root.join(JOURNAL);
        disk.remove(&path).and_then(|()| disk.sync_folder(root)).map_err(io_error("removing", path))
    }
}

impl JournalFile {
    fn new(change: &Change) -> Result<Self> {
        let (before, after) = (change.from.as_deref(), change.to.as_deref().unwrap_or_default());
        let original = before.map(pack).transpose().map_err(io_error("packing", &change.path))?;
        Ok(Self {
            path: change.path.clone(),
            before: before.map(sha256),
            after: sha256(after),
            splices: splice::between(before.unwrap_or_default(), after),
            original,
        })
    }

    /// The original (`None`: there was no file) and the patched file; nothing if the journal contradicts itself.
    pub(super) fn states(&self) -> Option<(Option<Vec<u8>>, Vec<u8>)> {
        let original = match (&self.before, &self.original) {
            (None, None) => None,
            (Some(hash), Some(packed)) => Some(unpack(packed).filter(|bytes| sha256(bytes) == *hash)?),
            _ => return None,
        };
        let patched = splice::apply(original.as_deref().unwrap_or_default(), &self.splices)?;
        (sha256(&patched) == self.after).then_some((original, patched))
    }

    /// Looks at the file on disk.
    pub(super) fn seen(&self, root: &Path) -> Result<Seen> {
        let found = change::read(root, &self.path)?;
        let hash = found.as_deref().map(sha256);
        Ok(if hash == self.before {
            Seen::Original
        } else if hash.as_ref() == Some(&self.after) {
            Seen::Patched
        } else {
            Seen::Foreign(found)
        })
    }

    /// sha256 of the patched file.
    pub(super) fn after(&self) -> &str {
        &self.after
    }
}

/// sha256 in hexadecimal digits.
pub(super) fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

fn pack(bytes: &[u8]) -> std::io::Result<String> {
    let mut packer = ZlibEncoder::new(Vec::new(), Compression::best());
    packer.write_all(bytes)?;
    Ok(hex::encode(packer.finish()?))
}

fn unpack(packed: &str) -> Option<Vec<u8>> {
    let packed = hex::decode(packed).ok()?;
    let mut bytes = Vec::new();
    ZlibDecoder::new(packed.as_slice()).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}
