//! A source's files with a cache, where reading them is slow.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use warden_patches::{SourceRevision, SourceTree};

use super::{BuildSource, ExaminedSource};
use crate::error::{BuilderError, Result};
use warden_patches::whole::{self, LossTolerance};

/// A source's files, cached on disk if reading them is slow: otherwise each request would unpack the archive.
/// Cache names depend on the archive's hash, so cached files stay valid.
pub(crate) struct CachedTree<'a> {
    source: &'a BuildSource,
    cache: &'a Path,
    cancel: &'a CancellationToken,
    revision: SourceRevision,
    folder: Option<PathBuf>,
    opened: OnceLock<Box<dyn SourceTree>>,
}

/// First byte of a cached file that exists; any other first byte means that the source lacks the file.
const PRESENT_MARK: u8 = b'+';

impl<'a> CachedTree<'a> {
    pub(crate) fn new(
        source: &'a BuildSource,
        found: &ExaminedSource,
        cache: &'a Path,
        cancel: &'a CancellationToken,
    ) -> Self {
        let folder = matches!(source, BuildSource::Archive(_)).then(|| {
            let name = hex::encode(&Sha256::digest(format!("{}\0{}", found.identity, found.root))[..8]);
            cache.join("sources").join("files").join(name)
        });
        Self { source, cache, cancel, revision: found.revision.clone(), folder, opened: OnceLock::new() }
    }

    fn tree(&self) -> Result<&dyn SourceTree> {
        if self.opened.get().is_none() {
            let tree = self.source.tree(self.cache, self.cancel)?;
            // Another thread may have been faster; its tree is equivalent.
            self.opened.set(tree).ok();
        }
        self.opened.get().map(|tree| &**tree).ok_or(BuilderError::Cancelled)
    }
}

impl SourceTree for CachedTree<'_> {
    fn read(&self, path: &str) -> warden_patches::Result<Option<Vec<u8>>> {
        let Some(folder) = &self.folder else { return self.tree()?.read(path) };
        let file = folder.join(hex::encode(&Sha256::digest(path)[..8]));
        if let Ok(mut bytes) = fs::read(&file)
            && !bytes.is_empty()
        {
            let present = bytes.remove(0) == PRESENT_MARK;
            return Ok(present.then_some(bytes));
        }
        let content = self.tree()?.read(path)?;
        let mut bytes = vec![if content.is_some() { PRESENT_MARK } else { b'-' }];
        bytes.extend_from_slice(content.as_deref().unwrap_or_default());
        // After a failed write, the file is read again next time.
        whole::write_atomically(&file, &bytes, LossTolerance::Replaceable).ok();
        Ok(content)
    }

    fn revision(&self) -> SourceRevision {
        self.revision.clone()
    }
}
