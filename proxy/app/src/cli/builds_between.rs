//! The builds of `diagnose --between`: in a store of their own, which nobody serves from. A search holds a file of it, so that nothing is
//! taken from under it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use warden_builder::{Keep, Store, Sweep};
use warden_policies::ByteSize;

use super::held;
use crate::exit::Failure;
use crate::out;

/// Where searches have their builds, below the data folder.
pub(super) fn folder(data: &Path) -> PathBuf {
    data.join("between")
}

/// A file of that folder that all who search hold.
pub(super) fn in_use(folder: &Path, how: FlockOperation) -> io::Result<File> {
    held(&folder.join("in-use"), how)
}

/// All that is there, and the lock under which it may go.
pub(super) struct Idle {
    pub(super) store: Store,
    pub(super) sweep: Sweep,
    _lock: Option<File>,
}

impl Idle {
    /// Refuses while a search runs.
    pub(super) fn find(data: &Path) -> Result<Self, Failure> {
        let folder = folder(data);
        let store = Store::new(&folder);
        let all = Keep { newest: 0, ids: Vec::new() };
        if !folder.exists() {
            return Ok(Self { sweep: store.superfluous(&all)?, store, _lock: None });
        }
        let lock = in_use(&folder, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            Failure::hinted(
                format!("nothing was removed: a search runs that holds {} ({error})", folder.display()),
                "wait for `diagnose --between`, or end it: it goes on where it was",
            )
        })?;
        // What is there is looked at under the lock.
        Ok(Self { sweep: store.superfluous(&all)?, store, _lock: Some(lock) })
    }
}

/// That there are some, for whoever looks at the others.
pub(super) fn told(data: &Path) -> Option<String> {
    let store = Store::new(&folder(data));
    let sweep = store.superfluous(&Keep { newest: 0, ids: Vec::new() }).ok().filter(|all| !all.is_empty())?;
    Some(format!(
        "for searches: {} of `diagnose --between`, {}, in {}; `llama-warden builds gc --between` removes them",
        out::counted(sweep.builds.len(), "build"),
        ByteSize(sweep.bytes()),
        store.root().display()
    ))
}
