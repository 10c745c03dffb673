//! Which builds go when the store is to be made smaller.

use std::fs;
use std::path::PathBuf;

use super::{BuildId, INCOMING, Store, clear, name_of, only_ours};
use crate::error::Result;
use crate::owned;

/// What stays.
#[derive(Clone, Debug, Default)]
pub struct Keep {
    /// This many of the newest.
    pub newest: usize,
    /// These, whatever their age: what the configuration names and what runs now.
    pub ids: Vec<BuildId>,
}

/// What would go, or has gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// Builds, newest first, with their bytes.
    pub builds: Vec<(BuildId, u64)>,
    /// What builds that were cut short have left, with its bytes.
    pub leftovers: Vec<(PathBuf, u64)>,
    /// Usable builds that stay.
    pub left: usize,
}

impl Sweep {
    /// Bytes of all that goes.
    pub fn bytes(&self) -> u64 {
        let builds = self.builds.iter().map(|(_, bytes)| bytes);
        builds.chain(self.leftovers.iter().map(|(_, bytes)| bytes)).sum()
    }

    /// Whether there is nothing to remove.
    pub fn is_empty(&self) -> bool {
        self.builds.is_empty() && self.leftovers.is_empty()
    }
}

impl Store {
    /// What [`Self::gc`] would remove. Damaged and foreign folders are never among it.
    ///
    /// # Errors
    ///
    /// The store cannot be read.
    pub fn superfluous(&self, keep: &Keep) -> Result<Sweep> {
        let ids: Vec<BuildId> = self.list()?.builds.into_iter().map(|build| build.id).collect();
        let all = ids.len();
        let going = ids.into_iter().skip(keep.newest).filter(|id| !keep.ids.contains(id));
        let sized = |id: BuildId| {
            let bytes = self.bytes(&id);
            (id, bytes)
        };
        let builds: Vec<_> = going.map(sized).collect();
        Ok(Sweep { left: all - builds.len(), builds, leftovers: self.leftovers() })
    }

    /// Removes what [`Self::superfluous`] found, in its order; `each` is called after each thing. Leftovers go only if
    /// nobody writes at this moment, and they are still the same.
    ///
    /// # Errors
    ///
    /// Something cannot be removed. What was removed before it stays removed.
    pub fn gc(&self, sweep: &Sweep, mut each: impl FnMut(&str, u64)) -> Result<()> {
        for (id, bytes) in &sweep.builds {
            self.remove(id)?;
            each(id.as_str(), *bytes);
        }
        for (path, bytes) in &sweep.leftovers {
            // While we have the lock nobody writes, so whatever is unfinished now will never be finished.
            let _lock = self.lock()?;
            if only_ours(path).is_ok() {
                clear(path)?;
                each(&name_of(path), *bytes);
            }
        }
        Ok(())
    }

    /// Bytes of a build's files.
    pub fn bytes(&self, id: &BuildId) -> u64 {
        owned::bytes(&self.folder(id))
    }

    /// Folders of half a build. One that is being written at this moment is among them; it is gone when we have the lock.
    fn leftovers(&self) -> Vec<(PathBuf, u64)> {
        let entries = fs::read_dir(self.root()).into_iter().flatten().flatten().map(|entry| entry.path());
        let named = |path: &PathBuf| {
            name_of(path).strip_prefix(INCOMING).is_some_and(|id| id.parse::<BuildId>().is_ok())
        };
        let mut found: Vec<(PathBuf, u64)> = entries
            .filter(|path| named(path) && only_ours(path).is_ok())
            .map(|path| {
                let bytes = owned::bytes(&path);
                (path, bytes)
            })
            .collect();
        found.sort();
        found
    }
}
