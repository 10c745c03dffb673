//! The store for builds of `diagnose --between`, which `serve` never uses. A running search locks a file in
//! this store, so that other commands do not remove its builds.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use warden_builder::{BuildId, BuildStore, GcKeep, GcPlan};
use warden_policies::ByteSize;

use super::shared::open_locked;
use crate::exit::CommandError;
use crate::out;

pub(super) fn search_store_dir(data: &Path) -> PathBuf {
    data.join("between")
}

pub(super) fn lock_in_use_file(folder: &Path, how: FlockOperation) -> io::Result<File> {
    open_locked(&folder.join("in-use"), how)
}

/// The store of searches, locked so that no search can start while this value exists.
pub(super) struct IdleSearchStore {
    pub(super) store: BuildStore,
    _lock: Option<File>,
}

impl IdleSearchStore {
    /// Fails while a search runs, or if the folder is a link to the served store.
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
        let shown = folder.display();
        match lock_in_use_file(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(lock) => Ok(Self { store, _lock: Some(lock) }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(CommandError::hinted(
                format!("nothing was removed: a search runs that holds {shown}"),
                "wait for `diagnose --between`, or end it: it continues where it was",
            )),
            Err(error) => {
                Err(CommandError::failed(format!("nothing was removed: {shown} cannot be held: {error}")))
            }
        }
    }

    /// Plans the removal of all builds except `ids`, and of all leftovers.
    pub(super) fn sweep_except(&self, ids: Vec<BuildId>) -> Result<GcPlan, CommandError> {
        Ok(self.store.plan_gc(&GcKeep { newest: 0, ids })?)
    }
}

pub(super) fn describe_leftovers(data: &Path) -> Option<String> {
    let store = BuildStore::new(&search_store_dir(data));
    let sweep = store.plan_gc(&GcKeep { newest: 0, ids: Vec::new() }).ok()?;
    if sweep.is_empty() {
        return None;
    }
    Some(format!(
        "for searches: {} of `diagnose --between`, {}, in {}; `llama-warden builds gc --between` removes them",
        out::count_noun(sweep.builds.len(), "build"),
        ByteSize(sweep.bytes()),
        store.root().display()
    ))
}
