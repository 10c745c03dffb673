//! What was fetched from servers, and stays: bare repositories in the cache folder.
//!
//! Of one URL there may be two, `<name>-<hash of the URL>.git` and `...-history.git`. The first one is shallow: a commit
//! and its files each, a tenth of the bytes. The second one has all of history, for ranges and for counting; where it
//! exists, it is used for everything. They are kept apart because deepening a shallow repository changes what it says
//! about itself before the commits arrive, so that an interruption would leave it wrong.
//!
//! # Interruptions
//!
//! A repository is made beside its place and renamed. A fetch writes its pack under a temporary name, then renames it,
//! then sets references; whatever ends it in between leaves a temporary file, which the next one removes. It takes the
//! pack from its beginning again: git's protocol cannot go on in the middle. A repository that was damaged otherwise is
//! noticed by the next fetch, and made anew.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::fault::Fault;
use super::location::redacted;
use super::repository::Repository;
use crate::error::{Result, io_error};
use crate::owned;

/// Bytes of the hash that tells URLs apart.
const HASH: usize = 6;
/// How the names of git's temporary files begin.
const TEMPORARY: [&str; 2] = ["tmp_", ".tmp-"];

/// A place in the cache for one URL.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) folder: PathBuf,
    /// The URL without a password.
    pub(super) shown: String,
    /// Whether all of history is kept there.
    pub(super) history: bool,
}

/// The place for a URL: that with all of history if it is asked for or there already.
pub(super) fn place(cache: &Path, url: &str, history: bool) -> Place {
    let shown = redacted(url);
    let bare = shown.trim_end_matches('/').trim_end_matches(".git");
    let last = bare.rsplit('/').next().unwrap_or(bare);
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let name: String = last.chars().filter(|letter| plain(*letter)).take(40).collect();
    let hash = hex::encode(&Sha256::digest(bare.as_bytes())[..HASH]);
    let folder = cache.join("git");
    let whole = folder.join(format!("{name}-{hash}-history.git"));
    let history = history || whole.exists();
    let folder = if history { whole } else { folder.join(format!("{name}-{hash}.git")) };
    Place { folder, shown, history }
}

impl Place {
    /// Held by whoever writes there.
    pub(super) fn lock_path(&self) -> PathBuf {
        self.folder.with_extension("lock")
    }

    /// The repository, if anything was fetched there.
    pub(super) fn open(&self) -> Result<Option<Arc<Repository>>> {
        if !self.folder.exists() {
            return Ok(None);
        }
        Repository::open_as(&self.folder, self.shown.clone()).map(Some)
    }

    /// Whether it is there and cannot be used any more: no repository, or its references lead to nothing. Another user's
    /// is not damaged.
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

    /// Puts it where the next [`Place::create`] removes it. The caller holds the lock.
    pub(super) fn discard(&self) -> Result<()> {
        if !owned::is_ours(&self.folder) {
            let why =
                "it is damaged, and was not made by this llama-warden: move it away, and it is fetched again";
            return Err(io_error("removing", &self.folder)(std::io::Error::other(why)));
        }
        self.clear()?;
        fs::rename(&self.folder, self.beside()).map_err(io_error("removing", &self.folder))
    }

    /// Where it is made, before it takes its place.
    fn beside(&self) -> PathBuf {
        self.folder.with_extension("new")
    }

    fn clear(&self) -> Result<()> {
        owned::remove(&self.beside()).map_err(io_error("removing", self.beside()))
    }

    /// Makes the repository if it is not there. The caller holds the lock.
    pub(super) fn create(&self) -> Result<()> {
        if self.folder.exists() {
            return Ok(());
        }
        self.clear()?;
        let beside = self.beside();
        owned::create(&beside).map_err(io_error("creating", &beside))?;
        let mut options = git2::RepositoryInitOptions::new();
        // No templates: a user's hooks have no place here.
        options.bare(true).external_template(false);
        git2::Repository::init_opts(&beside, &options).map_err(|error| Fault::Repository {
            doing: "creating the cache of",
            repository: self.shown.clone(),
            why: error.message().to_owned(),
        })?;
        fs::rename(&beside, &self.folder).map_err(io_error("creating", &self.folder))
    }

    /// Removes what an interrupted fetch left. The caller holds the lock.
    pub(super) fn sweep(&self) {
        if !owned::is_ours(&self.folder) {
            return;
        }
        for folder in ["objects/pack", ""] {
            let Ok(entries) = fs::read_dir(self.folder.join(folder)) else { continue };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                // `shallow.lock` and its like: nobody else writes here, so whoever made it is gone.
                let left = TEMPORARY.iter().any(|begin| name.starts_with(begin))
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
        let folder = |url| place("/cache".as_ref(), url, false).folder;
        let one = folder("https://example.org/a/llama.cpp");
        assert!(one.to_string_lossy().starts_with("/cache/git/llama.cpp-"), "{}", one.display());
        assert_eq!(folder("https://example.org/a/llama.cpp.git"), one);
        assert_eq!(folder("https://me:secret@example.org/a/llama.cpp"), one);
        assert_ne!(folder("https://example.org/b/llama.cpp"), one);
    }

    #[test]
    fn a_repository_is_made_once_and_leftovers_are_swept() {
        let cache = tempfile::tempdir().unwrap();
        let place = place(cache.path(), "https://example.org/a", false);
        assert!(place.open().unwrap().is_none());
        // As if an earlier attempt was killed.
        owned::create(&place.folder.with_extension("new")).unwrap();
        fs::create_dir_all(place.folder.with_extension("new").join("objects")).unwrap();
        place.create().unwrap();
        let left = place.folder.join("objects/pack/tmp_pack_abc123");
        fs::write(&left, "half").unwrap();
        fs::write(place.folder.join("shallow.lock"), "").unwrap();
        fs::write(place.folder.join("objects/pack/pack-1.pack"), "whole").unwrap();
        place.create().unwrap();
        place.sweep();
        assert!(!left.exists() && !place.folder.join("shallow.lock").exists());
        assert!(place.folder.join("objects/pack/pack-1.pack").exists() && place.folder.join("HEAD").exists());
        assert_eq!(place.open().unwrap().unwrap().shown(), "https://example.org/a");
    }
}
