//! A source's files with a cache, where reading them is slow.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use warden_patches::{Revision, Tree};

use super::{Found, Source};
use crate::error::{Error, Result};
use crate::whole::{self, Loss};

/// A source's files, cached on disk if reading them is slow: an archive would have to be unpacked for each
/// look, while a build that is in the store should take no time. Cache names contain the archive's hash, so
/// they stay valid.
pub(crate) struct Remembered<'a> {
    source: &'a Source,
    cache: &'a Path,
    cancel: &'a CancellationToken,
    revision: Revision,
    /// Folder of the cached files; `None` for sources that are quick to read.
    folder: Option<PathBuf>,
    opened: OnceLock<Box<dyn Tree>>,
}

/// First byte of a cached file that exists; any other first byte means that the source lacks the file.
const PRESENT: u8 = b'+';

impl<'a> Remembered<'a> {
    pub(crate) fn new(
        source: &'a Source,
        found: &Found,
        cache: &'a Path,
        cancel: &'a CancellationToken,
    ) -> Self {
        let folder = matches!(source, Source::Archive(_)).then(|| {
            let name = hex::encode(&Sha256::digest(format!("{}\0{}", found.identity, found.root))[..8]);
            cache.join("sources").join("files").join(name)
        });
        Self { source, cache, cancel, revision: found.revision.clone(), folder, opened: OnceLock::new() }
    }

    fn tree(&self) -> Result<&dyn Tree> {
        if self.opened.get().is_none() {
            let tree = self.source.tree(self.cache, self.cancel)?;
            // Another thread may have been faster; its tree is equivalent.
            self.opened.set(tree).ok();
        }
        self.opened.get().map(|tree| &**tree).ok_or(Error::Cancelled)
    }
}

impl Tree for Remembered<'_> {
    fn read(&self, path: &str) -> warden_patches::Result<Option<Vec<u8>>> {
        let Some(folder) = &self.folder else { return self.tree()?.read(path) };
        let file = folder.join(hex::encode(&Sha256::digest(path)[..8]));
        if let Ok(mut bytes) = fs::read(&file)
            && !bytes.is_empty()
        {
            let present = bytes.remove(0) == PRESENT;
            return Ok(present.then_some(bytes));
        }
        let content = self.tree()?.read(path)?;
        let mut bytes = vec![if content.is_some() { PRESENT } else { b'-' }];
        bytes.extend_from_slice(content.as_deref().unwrap_or_default());
        // After a failed write, the file is read again next time.
        whole::write(&file, &bytes, Loss::Bearable).ok();
        Ok(content)
    }

    fn revision(&self) -> Revision {
        self.revision.clone()
    }
}
