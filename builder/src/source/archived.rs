//! Archives as sources. [`examine_archive`] identifies an archive; [`ArchiveTree`] has its files by name.
//!
//! A record is valid for one path, size, change time and inode. A file that was changed just now gets no
//! record: a second change within the granularity of time stamps would not alter the change time.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use warden_patches::{SourceRevision, SourceTree};

use super::tree::{TreeSearch, join_names};
use super::{ExaminedSource, file_sha256, revision};
use crate::archive::{ArchiveEntryKind, ArchiveLimits, entry_read_error, strip_folder, walk_entries};
use crate::clock;
use crate::error::{BuilderError, Result, io_error};
use warden_patches::whole::{self, LossTolerance};

/// Incremented when the record's meaning changes; older records are ignored then.
const RECORD_SCHEMA: u32 = 1;
/// Coarsest time stamp granularity of common file systems, in seconds (FAT: 2 s).
const TIME_GRANULARITY: i64 = 2;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ArchiveRecord {
    schema: u32,
    stamp: ArchiveStamp,
    found: ExaminedSource,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ArchiveStamp {
    size: u64,
    inode: u64,
    changed: (i64, i64),
}

impl ArchiveStamp {
    fn read(path: &Path) -> Result<Self> {
        let metadata = fs::metadata(path).map_err(io_error("reading", path))?;
        // Use the change time: programs can set the modification time back, but not the change time.
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        Ok(Self { size: metadata.len(), inode: metadata.ino(), changed })
    }
}

pub(super) fn examine_archive(
    path: &Path,
    cache: &Path,
    cancel: &CancellationToken,
) -> Result<ExaminedSource> {
    let stamp = ArchiveStamp::read(path)?;
    let record = record_path(cache, path);
    if let Some(found) = read_record(&record, &stamp) {
        return Ok(found);
    }
    let found = read_archive(path, cancel)?;
    let settled = stamp.changed.0 < clock::unix_seconds() - TIME_GRANULARITY;
    if settled && ArchiveStamp::read(path)? == stamp {
        // An unwritable cache only costs time.
        write_record(&record, &ArchiveRecord { schema: RECORD_SCHEMA, stamp, found: found.clone() }).ok();
    }
    Ok(found)
}

fn record_path(cache: &Path, path: &Path) -> PathBuf {
    let name = Sha256::digest(path.as_os_str().as_encoded_bytes());
    cache.join("archives").join(format!("{}.json", hex::encode(&name[..16])))
}

fn read_record(record: &Path, stamp: &ArchiveStamp) -> Option<ExaminedSource> {
    let record: ArchiveRecord = serde_json::from_slice(&fs::read(record).ok()?).ok()?;
    (record.schema == RECORD_SCHEMA && record.stamp == *stamp).then_some(record.found)
}

fn write_record(path: &Path, record: &ArchiveRecord) -> std::io::Result<()> {
    whole::write_atomically(path, &serde_json::to_vec(record)?, LossTolerance::Replaceable)
}

fn read_archive(path: &Path, cancel: &CancellationToken) -> Result<ExaminedSource> {
    let mut search = TreeSearch::default();
    let mut evidence = HashMap::new();
    let mut remark = None;
    walk_entries(path, ArchiveLimits::SOURCE, cancel, &mut |entry| {
        match entry.kind {
            ArchiveEntryKind::Comment(text) => remark = Some(text),
            ArchiveEntryKind::File { .. } => {
                search.add(entry.name, true);
                if revision::is_evidence(entry.name) {
                    let mut text = String::new();
                    // A file that is not text or is cut off is no evidence.
                    if entry.data.take(revision::MAX_EVIDENCE_BYTES).read_to_string(&mut text).is_ok() {
                        evidence.insert(entry.name.to_owned(), text);
                    }
                }
            }
            ArchiveEntryKind::Folder | ArchiveEntryKind::Link(_) | ArchiveEntryKind::Other => {
                search.add(entry.name, false);
            }
        }
        Ok(())
    })?;
    let Some(tree) = search.tree() else {
        return Err(BuilderError::NoLlamaCpp { path: path.to_owned(), top: search.top() });
    };
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let revision =
        revision::find_revision(&tree.root, &name, remark.as_deref(), &|name| evidence.get(name).cloned());
    Ok(ExaminedSource {
        given: path.to_owned(),
        kind: "archive".into(),
        identity: format!("archive-sha256:{}", file_sha256(path, cancel)?),
        root: tree.root,
        server: tree.server.into(),
        revision,
    })
}

/// Folders that patches may touch: their files, some 30 MB, are kept in memory. Others are read on demand.
const KEPT_FOLDERS: [&str; 7] =
    ["ggml/", "src/", "common/", "include/", "tools/server/", "examples/server/", "cmake/"];
/// Maximum bytes of a kept file. Larger ones are data, such as the bundled web interface.
const MAX_KEPT_BYTES: u64 = 2 << 20;

/// A llama.cpp in an archive.
#[derive(Debug)]
pub struct ArchiveTree {
    path: PathBuf,
    root: String,
    revision: SourceRevision,
    kept: HashMap<String, Vec<u8>>,
    /// Names of existing files that are not in memory.
    others: HashSet<String>,
    cancel: CancellationToken,
}

impl ArchiveTree {
    /// Reads the archive once. `root` is llama.cpp's folder in it. Blocks.
    pub(super) fn read_all(
        path: &Path,
        root: &str,
        revision: SourceRevision,
        cancel: &CancellationToken,
    ) -> Result<Self> {
        let (mut kept, mut others) = (HashMap::new(), HashSet::new());
        walk_entries(path, ArchiveLimits::SOURCE, cancel, &mut |entry| {
            let Some(name) = strip_folder(entry.name, root).filter(|name| !name.is_empty()) else {
                return Ok(());
            };
            if !matches!(entry.kind, ArchiveEntryKind::File { .. }) {
                return Ok(());
            }
            if KEPT_FOLDERS.iter().any(|folder| name.starts_with(folder)) {
                let mut content = Vec::new();
                let read = entry.data.take(MAX_KEPT_BYTES + 1).read_to_end(&mut content);
                read.map_err(|source| entry_read_error(path, &source, ArchiveLimits::SOURCE))?;
                if content.len() as u64 <= MAX_KEPT_BYTES {
                    kept.insert(name.to_owned(), content);
                    return Ok(());
                }
            }
            others.insert(name.to_owned());
            Ok(())
        })?;
        let (path, root) = (path.to_owned(), root.to_owned());
        Ok(Self { path, root, revision, kept, others, cancel: cancel.clone() })
    }
}

impl SourceTree for ArchiveTree {
    fn read(&self, name: &str) -> warden_patches::Result<Option<Vec<u8>>> {
        if let Some(content) = self.kept.get(name) {
            return Ok(Some(content.clone()));
        }
        if !self.others.contains(name) {
            return Ok(None);
        }
        let whole = join_names(&self.root, name);
        let mut found = None;
        walk_entries(&self.path, ArchiveLimits::SOURCE, &self.cancel, &mut |entry| {
            if entry.name == whole && matches!(entry.kind, ArchiveEntryKind::File { .. }) {
                let mut content = Vec::new();
                let read = entry.data.read_to_end(&mut content);
                read.map_err(|source| entry_read_error(&self.path, &source, ArchiveLimits::SOURCE))?;
                found = Some(content);
            }
            Ok(())
        })?;
        Ok(found)
    }

    fn revision(&self) -> SourceRevision {
        self.revision.clone()
    }
}
