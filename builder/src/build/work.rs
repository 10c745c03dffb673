//! The folder of a running build, `work/<BuildId>/{src,build}` under the cache folder. The folder is removed
//! when the build ends, after success and failure.
//!
//! A build killed by SIGKILL leaves its folder behind. The next build removes such a folder if it has our
//! mark ([`crate::owned`]), and if no living process holds the lock of its build.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::error::{Result, io_error};
use crate::lock::FileLock;
use crate::owned;
use crate::store::BuildId;

/// Attempts to remove a folder: a dying compiler may still create a file in it.
const REMOVE_ATTEMPTS: usize = 5;

#[derive(Debug)]
pub(super) struct WorkFolder {
    folder: PathBuf,
}

impl WorkFolder {
    /// Creates an empty work folder. The caller holds the build's lock.
    pub(super) fn create(cache: &Path, id: &BuildId) -> Result<Self> {
        let folder = cache.join("work").join(id.as_str());
        remove_folder(&folder).map_err(io_error("removing", &folder))?;
        owned::create(&folder).map_err(io_error("creating", &folder))?;
        let work = Self { folder };
        for part in [work.source(), work.build()] {
            fs::create_dir_all(&part).map_err(io_error("creating", part))?;
        }
        Ok(work)
    }

    pub(super) fn path(&self) -> &Path {
        &self.folder
    }

    /// The source tree, always next to the build folder, so that a compiler cache sees the same layout.
    pub(super) fn source(&self) -> PathBuf {
        self.folder.join("src")
    }

    pub(super) fn build(&self) -> PathBuf {
        self.folder.join("build")
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        if let Err(error) = remove_folder(&self.folder) {
            tracing::warn!(folder = %self.folder.display(), %error, "a work folder could not be removed");
        }
    }
}

/// The lock of a build, held while the build has files in the work folder or installs into the store.
pub(super) fn lock_path(cache: &Path, id: &str) -> PathBuf {
    cache.join("locks").join(format!("build-{id}.lock"))
}

pub(super) fn remove_abandoned(cache: &Path) {
    let Ok(entries) = fs::read_dir(cache.join("work")) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.parse::<BuildId>().is_err() || !owned::is_ours(&entry.path()) {
            continue;
        }
        if let Ok(Some(_lock)) = FileLock::try_take(&lock_path(cache, &name))
            && let Err(error) = remove_folder(&entry.path())
        {
            tracing::warn!(folder = %entry.path().display(), %error, "an old work folder could not be removed");
        }
    }
}

fn remove_folder(folder: &Path) -> io::Result<()> {
    let mut last = Ok(());
    for _ in 0..REMOVE_ATTEMPTS {
        last = owned::remove(folder);
        if last.is_ok() {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_folder_is_empty_at_first_and_gone_at_last() {
        let cache = tempfile::tempdir().unwrap();
        let id: BuildId = "0123456789abcdef".parse().unwrap();
        let old = cache.path().join("work/0123456789abcdef/src/old");
        owned::create(&cache.path().join("work/0123456789abcdef")).unwrap();
        fs::create_dir_all(&old).unwrap();
        let work = WorkFolder::create(cache.path(), &id).unwrap();
        assert!(work.build().is_dir() && !old.exists());
        drop(work);
        assert_eq!(fs::read_dir(cache.path().join("work")).unwrap().count(), 0);
    }

    #[test]
    fn sweeping_spares_what_is_locked() {
        let cache = tempfile::tempdir().unwrap();
        let names = ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"];
        let folder = |name: &str| cache.path().join("work").join(name);
        for name in &names {
            owned::create(&folder(name)).unwrap();
        }
        let _lock = FileLock::try_take(&lock_path(cache.path(), names[0])).unwrap().unwrap();
        remove_abandoned(cache.path());
        assert!(folder(names[0]).exists() && !folder(names[1]).exists());
    }

    #[test]
    fn work_of_somebody_else_is_neither_swept_nor_taken() {
        let cache = tempfile::tempdir().unwrap();
        let theirs = ["work/thesis", "work/0123456789abcdef"].map(|name| cache.path().join(name));
        for folder in &theirs {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join("keep"), "mine").unwrap();
        }
        remove_abandoned(cache.path());
        let id: BuildId = "0123456789abcdef".parse().unwrap();
        let error = WorkFolder::create(cache.path(), &id).unwrap_err().to_string();
        assert!(error.contains("did not make it"), "{error}");
        assert!(theirs.iter().all(|folder| folder.join("keep").exists()));
    }
}
