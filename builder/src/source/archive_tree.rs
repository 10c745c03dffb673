//! The llama.cpp of an archive as files by name, for patches. Reads the archive once and keeps files in
//! memory.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::path::{Path, PathBuf};

use tokio_util::sync::CancellationToken;
use warden_patches::{SourceRevision, SourceTree};

use super::tree::join_names;
use crate::archive::{ArchiveEntryKind, ArchiveLimits, entry_read_error, strip_folder, walk_entries};
use crate::error::Result;

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
