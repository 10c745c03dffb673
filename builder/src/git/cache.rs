//! Cached bare repositories with the commits fetched from servers.
//!
//! A URL may have two cached repositories. `<name>-<hash of the URL>.git` is shallow: single commits with
//! their files, a tenth of the bytes. `...-history.git` has all of history, for ranges and build numbers;
//! once it exists, it serves every request. Deepening the shallow one instead would change its metadata
//! before the commits arrive, so an interruption would leave it inconsistent.
//!
//! An interrupted fetch leaves a temporary file, which the next fetch removes. The next fetch downloads the
//! whole pack again, because git's protocol cannot resume. A repository damaged in other ways is replaced.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::fault::GitError;
use super::location::redact_url;
use super::repository::GitRepository;
use crate::error::{Result, io_error};
use crate::owned;

const URL_HASH_BYTES: usize = 6;
const TEMPORARY_PREFIXES: [&str; 2] = ["tmp_", ".tmp-"];

#[derive(Clone, Debug)]
pub(super) struct CacheSlot {
    pub(super) folder: PathBuf,
    /// The URL without a password.
    pub(super) shown: String,
    pub(super) history: bool,
}

pub(super) fn cache_slot(cache: &Path, url: &str, history: bool) -> CacheSlot {
    let shown = redact_url(url);
    let bare = shown.trim_end_matches('/').trim_end_matches(".git");
    let last = bare.rsplit('/').next().unwrap_or(bare);
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let name: String = last.chars().filter(|letter| plain(*letter)).take(40).collect();
    let hash = hex::encode(&Sha256::digest(bare.as_bytes())[..URL_HASH_BYTES]);
    let folder = cache.join("git");
    let whole = folder.join(format!("{name}-{hash}-history.git"));
    let history = history || whole.exists();
    let folder = if history { whole } else { folder.join(format!("{name}-{hash}.git")) };
    CacheSlot { folder, shown, history }
}

impl CacheSlot {
    pub(super) fn lock_path(&self) -> PathBuf {
        self.folder.with_extension("lock")
    }

    /// Opens the repository; `None` if nothing was fetched yet.
    pub(super) fn open(&self) -> Result<Option<Arc<GitRepository>>> {
        if !self.folder.exists() {
            return Ok(None);
        }
        GitRepository::open_as(&self.folder, self.shown.clone()).map(Some)
    }

    /// Returns true if the folder exists, but is no repository or has references to missing objects. Another
    /// user's repository does not count as damaged.
    pub(super) fn is_damaged(&self) -> bool {
        let leads_nowhere = |repo: &git2::Repository, reference: &git2::Reference<'_>| {
            let target = reference.target().map(|id| repo.find_object(id, None));
            target.is_some_and(|found| match found {
                Ok(object) => object.as_commit().is_some_and(|commit| commit.tree().is_err()),
                Err(_) => true,
            })
        };
        match git2::Repository::open_bare(&self.folder) {
            Ok(repo) => repo.references().map_or(true, |mut all| {
                all.any(|found| found.map_or(true, |reference| leads_nowhere(&repo, &reference)))
            }),
            Err(error) => self.folder.exists() && error.code() != git2::ErrorCode::Owner,
        }
    }

    /// Renames the repository to the temporary name, under which the next [`CacheSlot::create`] removes it.
    /// The caller holds the lock.
    pub(super) fn discard(&self) -> Result<()> {
        if !owned::is_ours(&self.folder) {
            let why =
                "it is damaged, and was not made by this llama-warden: move it away, and it is fetched again";
            return Err(io_error("removing", &self.folder)(std::io::Error::other(why)));
        }
        self.remove_temporary()?;
        fs::rename(&self.folder, self.temporary_path()).map_err(io_error("removing", &self.folder))
    }

    fn temporary_path(&self) -> PathBuf {
        self.folder.with_extension("new")
    }

    fn remove_temporary(&self) -> Result<()> {
        owned::remove(&self.temporary_path()).map_err(io_error("removing", self.temporary_path()))
    }

    /// Creates the repository if it does not exist. The caller holds the lock.
    pub(super) fn create(&self) -> Result<()> {
        if self.folder.exists() {
            return Ok(());
        }
        self.remove_temporary()?;
        let beside = self.temporary_path();
        owned::create(&beside).map_err(io_error("creating", &beside))?;
        let mut options = git2::RepositoryInitOptions::new();
        // No templates: they would install the user's hooks.
        options.bare(true).external_template(false);
        git2::Repository::init_opts(&beside, &options)
            .map_err(|error| GitError::repository("creating the cache of", &self.shown, &error))?;
        fs::rename(&beside, &self.folder).map_err(io_error("creating", &self.folder))
    }

    /// Removes files of an interrupted fetch. The caller holds the lock.
    pub(super) fn remove_leftovers(&self) {
        if !owned::is_ours(&self.folder) {
            return;
        }
        for folder in ["objects/pack", ""] {
            let Ok(entries) = fs::read_dir(self.folder.join(folder)) else { continue };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                // A lock file such as `shallow.lock` has no living owner: we hold the only write lock.
                let left = TEMPORARY_PREFIXES.iter().any(|begin| name.starts_with(begin))
                    || Path::new(&name).extension().is_some_and(|end| end == "lock");
                if left && let Err(error) = fs::remove_file(entry.path()) {
                    tracing::warn!(file = %entry.path().display(), %error, "a leftover could not be removed");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_places_of_their_own_and_passwords_are_no_part_of_them() {
        let folder = |url| cache_slot("/cache".as_ref(), url, false).folder;
        let one = folder("https://example.org/a/llama.cpp");
        assert!(one.to_string_lossy().starts_with("/cache/git/llama.cpp-"), "{}", one.display());
        assert_eq!(folder("https://example.org/a/llama.cpp.git"), one);
        assert_eq!(folder("https://me:secret@example.org/a/llama.cpp"), one);
        assert_ne!(folder("https://example.org/b/llama.cpp"), one);
    }

    #[test]
    fn a_repository_is_made_once_and_leftovers_are_swept() {
        let cache = tempfile::tempdir().unwrap();
        let place = cache_slot(cache.path(), "https://example.org/a", false);
        assert!(place.open().unwrap().is_none());
        // Simulates an earlier attempt that was killed.
        owned::create(&place.folder.with_extension("new")).unwrap();
        fs::create_dir_all(place.folder.with_extension("new").join("objects")).unwrap();
        place.create().unwrap();
        let left = place.folder.join("objects/pack/tmp_pack_abc123");
        fs::write(&left, "half").unwrap();
        fs::write(place.folder.join("shallow.lock"), "").unwrap();
        fs::write(place.folder.join("objects/pack/pack-1.pack"), "whole").unwrap();
        place.create().unwrap();
        place.remove_leftovers();
        assert!(!left.exists() && !place.folder.join("shallow.lock").exists());
        assert!(place.folder.join("objects/pack/pack-1.pack").exists() && place.folder.join("HEAD").exists());
        assert_eq!(place.open().unwrap().unwrap().shown(), "https://example.org/a");
    }
}
