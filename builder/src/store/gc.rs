//! Removes builds to reduce the size of the store.

use std::fs;
use std::path::PathBuf;

use super::{BuildId, BuildStore, INCOMING_PREFIX, check_only_ours, file_name, remove_files};
use crate::error::Result;
use crate::owned;

/// Builds to keep.
#[derive(Clone, Debug, Default)]
pub struct GcKeep {
    /// Number of newest builds to keep.
    pub newest: usize,
    /// Builds to keep at any age: configured and running ones.
    pub ids: Vec<BuildId>,
}

/// Parts of the store to remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcPlan {
    /// Builds, newest first, with their bytes.
    pub builds: Vec<(BuildId, u64)>,
    /// Leftovers of interrupted builds, with their bytes.
    pub leftovers: Vec<(PathBuf, u64)>,
    /// Number of usable builds that stay.
    pub left: usize,
}

impl GcPlan {
    /// Total bytes to remove.
    pub fn bytes(&self) -> u64 {
        let builds = self.builds.iter().map(|(_, bytes)| bytes);
        builds.chain(self.leftovers.iter().map(|(_, bytes)| bytes)).sum()
    }

    /// Returns true if there is nothing to remove.
    pub fn is_empty(&self) -> bool {
        self.builds.is_empty() && self.leftovers.is_empty()
    }
}

impl BuildStore {
    /// Determines what [`Self::gc`] would remove. Damaged and foreign folders are never included.
    ///
    /// # Errors
    /// Fails if the store cannot be read.
    pub fn plan_gc(&self, keep: &GcKeep) -> Result<GcPlan> {
        let mut ids: Vec<BuildId> = self.list()?.builds.into_iter().map(|build| build.id).collect();
        let all = ids.len();
        ids.retain(|id| !self.is_bundled(id));
        let going = ids.into_iter().skip(keep.newest).filter(|id| !keep.ids.contains(id));
        let sized = |id: BuildId| {
            let bytes = self.bytes(&id);
            (id, bytes)
        };
        let builds: Vec<_> = going.map(sized).collect();
        Ok(GcPlan { left: all - builds.len(), builds, leftovers: self.leftovers() })
    }

    /// Removes a plan's items in order, and calls `each` after each one. Leftovers are removed under the
    /// store's lock, and only if they contain nothing but a build's files.
    ///
    /// # Errors
    /// Fails if an item cannot be removed; items before it stay removed.
    pub fn gc(&self, sweep: &GcPlan, mut each: impl FnMut(&str, u64)) -> Result<()> {
        for (id, bytes) in &sweep.builds {
            self.remove(id)?;
            each(id.as_str(), *bytes);
        }
        for (path, bytes) in &sweep.leftovers {
            // We hold the lock, so no process writes, and any unfinished build was abandoned.
            let _lock = self.lock()?;
            if check_only_ours(path).is_ok() {
                remove_files(path)?;
                each(&file_name(path), *bytes);
            }
        }
        Ok(())
    }

    /// Bytes of a build's files.
    pub fn bytes(&self, id: &BuildId) -> u64 {
        owned::folder_bytes(&self.folder(id))
    }

    /// Includes a folder that another process writes now: under our lock, that build is complete or gone.
    fn leftovers(&self) -> Vec<(PathBuf, u64)> {
        let entries = fs::read_dir(self.root()).into_iter().flatten().flatten().map(|entry| entry.path());
        let named = |path: &PathBuf| {
            file_name(path).strip_prefix(INCOMING_PREFIX).is_some_and(|id| id.parse::<BuildId>().is_ok())
        };
        let mut found: Vec<(PathBuf, u64)> = entries
            .filter(|path| named(path) && check_only_ours(path).is_ok())
            .map(|path| {
                let bytes = owned::folder_bytes(&path);
                (path, bytes)
            })
            .collect();
        found.sort();
        found
    }
}
