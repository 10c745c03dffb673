//! Locks between processes: files held with flock(2). The kernel releases a lock when its holder ends.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;

use crate::error::{BuilderError, Result, io_error};

/// Interval between attempts to take a lock held by another process; a user does not notice this delay.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// A held lock, released on drop. The file stays: after a removal, two processes could lock different files
/// of the same name.
#[derive(Debug)]
pub(crate) struct FileLock {
    _file: File,
}

impl FileLock {
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(io_error("locking", path)(error.into())),
        }
    }

    /// Blocks until the lock is free. For locks that are held briefly.
    pub(crate) fn wait(path: &Path) -> Result<Self> {
        let file = open(path)?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Self { _file: file }),
                Err(Errno::INTR) => {}
                Err(error) => return Err(io_error("locking", path)(error.into())),
            }
        }
    }

    /// Waits for the lock; calls `waiting` once if it is not free at first.
    pub(crate) async fn take(
        path: &Path,
        cancel: &CancellationToken,
        waiting: impl FnOnce(),
    ) -> Result<Self> {
        if let Some(lock) = Self::try_take(path)? {
            return Ok(lock);
        }
        waiting();
        loop {
            tokio::select! {
                () = cancel.cancelled() => return Err(BuilderError::Cancelled),
                () = tokio::time::sleep(RETRY_INTERVAL) => {}
            }
            if let Some(lock) = Self::try_take(path)? {
                return Ok(lock);
            }
        }
    }
}

fn open(path: &Path) -> Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(io_error("creating", folder))?;
    }
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).open(path).map_err(io_error("opening", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_held_by_one_and_passed_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("locks/x.lock");
        let cancel = CancellationToken::new();
        let first = FileLock::take(&path, &cancel, || unreachable!("it is free")).await.unwrap();
        assert!(FileLock::try_take(&path).unwrap().is_none());
        let mut waited = false;
        let second = FileLock::take(&path, &cancel, || {
            waited = true;
            drop(first);
        });
        second.await.unwrap();
        assert!(waited);
    }

    #[tokio::test]
    async fn waiting_can_be_cancelled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.lock");
        let _held = FileLock::try_take(&path).unwrap().unwrap();
        let cancel = CancellationToken::new();
        let failed = FileLock::take(&path, &cancel, || cancel.cancel()).await.unwrap_err();
        assert!(matches!(failed, BuilderError::Cancelled));
    }
}
