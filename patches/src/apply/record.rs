//! The record in a patched folder: the applied sets, and the original of each changed file.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::write::{file_inside, place_new_file, read_file};
use crate::error::{Result, content_error, io_error};
use crate::tree::sha256;

pub(super) const RECORD_FILE: &str = ".llama-warden-patches.json";
/// Incremented when older programs could not restore a folder from the record any more.
const RECORD_SCHEMA: u32 = 2;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PatchRecord {
    schema: u32,
    writer: String,
    pub(super) sets: Vec<AppliedSet>,
    pub(super) files: Vec<RecordedFile>,
}

/// The first field, common to all versions of the record.
#[derive(Deserialize)]
struct RecordHead {
    schema: u32,
}

/// An applied set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppliedSet {
    /// Id of the set.
    pub id: String,
    /// Hash of the set's edits, twelve hexadecimal digits.
    pub hash: String,
}

impl fmt::Display for AppliedSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.hash)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RecordedFile {
    pub(super) path: String,
    /// The original bytes as hexadecimal digits, since a file need not be text; `None` for a created file.
    original: Option<String>,
    pub(super) patched: String,
}

impl PatchRecord {
    pub(super) fn new(sets: Vec<AppliedSet>, files: Vec<RecordedFile>) -> Self {
        let writer = concat!("llama-warden ", env!("CARGO_PKG_VERSION")).to_owned();
        Self { schema: RECORD_SCHEMA, writer, sets, files }
    }

    pub(super) fn read(root: &Path) -> Result<Option<Self>> {
        let Some(bytes) = read_file(root, RECORD_FILE)? else { return Ok(None) };
        let head: RecordHead = serde_json::from_slice(&bytes).map_err(|error| damaged_record(root, error))?;
        if head.schema != RECORD_SCHEMA {
            let why = format!(
                "its schema is {}, this program knows {RECORD_SCHEMA}: use the program that wrote it",
                head.schema
            );
            return Err(damaged_record(root, why));
        }
        let record: Self = serde_json::from_slice(&bytes).map_err(|error| damaged_record(root, error))?;
        for file in &record.files {
            file_inside(root, &file.path)?;
            file.original(root)?;
        }
        Ok(Some(record))
    }

    pub(super) fn write(&self, root: &Path) -> Result<()> {
        let path = root.join(RECORD_FILE);
        let text =
            serde_json::to_vec_pretty(self).map_err(|error| io_error("writing", &path)(error.into()))?;
        place_new_file(&path, &text)
    }

    pub(super) fn remove(root: &Path) -> Result<()> {
        let path = root.join(RECORD_FILE);
        fs::remove_file(&path).map_err(io_error("removing", path))
    }
}

impl RecordedFile {
    pub(super) fn new(path: &str, original: Option<&[u8]>, patched: &[u8]) -> Self {
        Self { path: path.to_owned(), original: original.map(hex::encode), patched: sha256(patched) }
    }

    pub(super) fn original(&self, root: &Path) -> Result<Option<Vec<u8>>> {
        let bytes = self.original.as_ref().map(hex::decode).transpose();
        bytes.map_err(|error| damaged_record(root, format!("the original of {}: {error}", self.path)))
    }
}

fn damaged_record(root: &Path, why: impl fmt::Display) -> crate::PatchError {
    content_error(
        &root.join(RECORD_FILE),
        format!("the record of the applied patches cannot be used: {why}"),
        "copy edits of your own, restore the patched files from where they came from (lines of patches end with \
         `// llama-warden:`), then remove the record",
    )
}
