//! The store for builds of `diagnose --between`. `serve` never uses these builds. A running search holds a
//! lock on a file in the store, so that its builds are not removed.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use warden_builder::{BuildId, BuildStore, GcKeep, GcPlan};
use warden_policies::ByteSize;

use super::builds_in_use::BuildsInUse;
use super::open_locked;
use crate::exit::CommandError;
use crate::out;

/// The folder with the builds of searches, below the data folder.
pub(super) fn search_store_dir(data: &Path) -> PathBuf {
    data.join("between")
}

/// Opens and locks the file that every running search holds.
pub(super) fn lock_in_use_file(folder: &Path, how: FlockOperation) -> io::Result<File> {
    open_locked(&folder.join("in-use"), how)
}

/// The store of searches. While this value exists, no search can start.
pub(super) struct IdleSearchStore {
    pub(super) store: BuildStore,
    _lock: Option<File>,
}

impl IdleSearchStore {
    /// Refuses while a search runs, and if the folder is a link to the served store.
    pub(super) fn find(data: &Path, served: &BuildStore) -> Result<Self, CommandError> {
        let folder = search_store_dir(data);
        let store = BuildStore::new(&folder);
        if !folder.exists() {
            return Ok(Self { store, _lock: None });
        }
        let real = |store: &BuildStore| store.root().canonicalize().ok();
        if real(&store).is_some_and(|own| Some(own) == real(served)) {
            return Err(CommandError::hinted(
                format!(
                    "nothing was removed: {} leads to the builds that are served",
                    store.root().display()
                ),
                "remove that link",
            ));
        }
        let lock =
            lock_in_use_file(&folder, FlockOperation::NonBlockingLockExclusive).map_err(
                |error| match error.kind() {
                    io::ErrorKind::WouldBlock => CommandError::hinted(
                        format!("nothing was removed: a search runs that holds {}", folder.display()),
                        "wait for `diagnose --between`, or end it: it continues where it was",
                    ),
                    _ => CommandError::failed(format!(
                        "nothing was removed: {} cannot be held: {error}",
                        folder.display()
                    )),
                },
            )?;
        Ok(Self { store, _lock: Some(lock) })
    }

    /// All builds and leftovers in the store.
    pub(super) fn sweep_all(&self) -> Result<GcPlan, CommandError> {
        self.sweep_except(Vec::new())
    }

    /// Builds and leftovers that no running instance needs.
    pub(super) fn sweep_unused(&self, in_use: &BuildsInUse) -> Result<GcPlan, CommandError> {
        self.sweep_except(in_use.builds.iter().map(|(id, _)| id.clone()).collect())
    }

    fn sweep_except(&self, ids: Vec<BuildId>) -> Result<GcPlan, CommandError> {
        Ok(self.store.plan_gc(&GcKeep { newest: 0, ids })?)
    }
}

/// Says that searches have left builds, for commands that show the main store.
pub(super) fn describe_leftovers(data: &Path) -> Option<String> {
    let store = BuildStore::new(&search_store_dir(data));
    let sweep = store.plan_gc(&GcKeep { newest: 0, ids: Vec::new() }).ok().filter(|all| !all.is_empty())?;
    Some(format!(
        "for searches: {} of `diagnose --between`, {}, in {}; `llama-warden builds gc --between` removes them",
        out::count_noun(sweep.builds.len(), "build"),
        ByteSize(sweep.bytes()),
        store.root().display()
    ))
}
