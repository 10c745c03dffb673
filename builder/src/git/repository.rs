//! Opens a repository on disk, and resolves names in it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use git2::{ErrorCode, ObjectType, Oid};
use warden_patches::SourceRevision;

use super::commit_tree::CommitTree;
use super::fault::{GitError, is_abbreviated};
use crate::error::{BuilderError, Result};

const MAX_SIMILAR_NAMES: usize = 5;

/// A repository opened for reading: with a worktree, bare, a linked worktree, or a cached one.
pub struct GitRepository {
    path: PathBuf,
    shown: String,
    // libgit2's handles may move between threads, but no two threads may use one at once.
    inner: Mutex<git2::Repository>,
}

impl std::fmt::Debug for GitRepository {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GitRepository({})", self.shown)
    }
}

impl GitRepository {
    /// Opens the repository in a folder; a repository that encloses the folder does not count.
    ///
    /// # Errors
    /// Fails if the folder is no repository, or if the repository is not readable.
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        Self::open_as(path, path.display().to_string())
    }

    /// Opens a repository with another name for messages: the cache's folder names mean nothing to users.
    pub(crate) fn open_as(path: &Path, shown: String) -> Result<Arc<Self>> {
        match git2::Repository::open(path) {
            Ok(inner) => Ok(Arc::new(Self { path: path.to_owned(), shown, inner: Mutex::new(inner) })),
            Err(error) => Err(match error.code() {
                ErrorCode::NotFound => GitError::NoRepository { path: shown },
                ErrorCode::Owner => {
                    let why = "it belongs to another user: add it to git's safe.directory".to_owned();
                    GitError::Repository { doing: "opening", repository: shown, why }
                }
                _ => GitError::repository("opening", &shown, &error),
            }
            .into()),
        }
    }

    /// The repository's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Name in messages: the folder or the URL.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, git2::Repository> {
        // Readers leave no inconsistent state, so a poisoned lock is usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Content of a file; `None` if it has more than `most` bytes, which are then not loaded.
    pub(super) fn blob(&self, id: Oid, most: u64) -> std::result::Result<Option<Vec<u8>>, git2::Error> {
        let repo = self.lock();
        let (size, _) = repo.odb()?.read_header(id)?;
        if size as u64 > most {
            return Ok(None);
        }
        Ok(Some(repo.find_blob(id)?.content().to_owned()))
    }

    pub(super) fn failed(&self, doing: &'static str) -> impl Fn(git2::Error) -> BuilderError {
        let repository = self.shown.clone();
        move |error| GitError::repository(doing, &repository, &error).into()
    }

    /// Returns true if the repository is not shallow, so that ancestors can be counted.
    pub fn is_complete(&self) -> bool {
        !self.lock().is_shallow()
    }

    /// Resolves a name to a commit id of 40 hexadecimal digits. Tried in this order: `HEAD`, a tag, a
    /// branch, a remote branch, a commit id or a prefix of one, any of these with steps back (`main~3`),
    /// and upstream's build number `b1234` as the commit whose history on `HEAD` has that many commits.
    ///
    /// # Errors
    /// Fails if the name is unknown.
    pub fn resolve(&self, reference: &str) -> Result<String> {
        if let Some(id) = find_reference(&self.lock(), reference) {
            return Ok(id.to_string());
        }
        if reference.len() == 40 || is_abbreviated(reference) {
            match self.lock().find_commit_by_prefix(reference) {
                Ok(commit) => return Ok(commit.id().to_string()),
                Err(error) if error.code() == ErrorCode::Ambiguous => {
                    let (repository, reference) = (self.shown.clone(), reference.to_owned());
                    return Err(GitError::Ambiguous { repository, reference }.into());
                }
                Err(_) => {}
            }
        }
        if reference.contains(['~', '^'])
            && let Ok(commit) =
                self.lock().revparse_single(reference).and_then(|object| object.peel_to_commit())
        {
            return Ok(commit.id().to_string());
        }
        if let Some(number) = parse_build_tag(reference)
            && let Some(commit) = self.commit_of_build(number)?
        {
            return Ok(commit);
        }
        let repo = self.lock();
        let names = repo.references().map_err(self.failed("listing the branches of"))?;
        let names: Vec<String> =
            names.flatten().filter_map(|known| Some(short_name(known.name().ok()?)?.to_owned())).collect();
        Err(no_such_reference(&self.shown, reference, names.iter().map(String::as_str)).into())
    }

    /// Build numbers by commit, from the build tags.
    pub(super) fn build_tags(&self) -> Result<HashMap<Oid, u32>> {
        let repo = self.lock();
        let tags = repo.references_glob("refs/tags/b*").map_err(self.failed("listing the tags of"))?;
        let mut found = HashMap::new();
        for tag in tags.flatten() {
            let number = tag.name().ok().and_then(|name| parse_build_tag(name.strip_prefix("refs/tags/")?));
            let target = tag.target_peel().or_else(|| tag.target());
            if let (Some(number), Some(mut target)) = (number, target) {
                // libgit2 does not peel an annotated tag whose reference is loose.
                if let Ok(object) = repo
                    .find_object(target, Some(ObjectType::Tag))
                    .and_then(|tag| tag.peel(ObjectType::Commit))
                {
                    target = object.id();
                }
                found.insert(target, number);
            }
        }
        Ok(found)
    }

    /// Returns tag and id of the newest commit whose tag matches a git pattern, such as `b*`.
    ///
    /// # Errors
    /// Fails if the tags cannot be read.
    pub fn newest_tag(&self, pattern: &str) -> Result<Option<(String, String)>> {
        let repo = self.lock();
        let failed = || self.failed("listing the tags of");
        let tags = repo.references_glob(&format!("refs/tags/{pattern}")).map_err(failed())?;
        let dated = tags.flatten().filter_map(|tag| {
            let commit = tag.peel_to_commit().ok()?;
            let name = tag.name().ok().and_then(short_name)?.to_owned();
            // Ties (same commit, or same second): the greater number wins.
            let number = name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().ok();
            Some((commit.time().seconds(), number, name, commit.id().to_string()))
        });
        Ok(dated.max().map(|(_, _, name, commit)| (name, commit)))
    }

    /// The tree of a commit, given by 40 digits.
    ///
    /// # Errors
    /// Fails if the repository lacks the commit.
    pub fn tree(self: &Arc<Self>, commit: &str) -> Result<CommitTree> {
        CommitTree::new(Arc::clone(self), commit)
    }

    /// Returns the revision of a commit. The build number is the length of the commit's history, or in a
    /// shallow history the number of the commit's tag.
    ///
    /// # Errors
    /// Fails if the text is no commit id, or if the repository cannot be read.
    pub fn revision(&self, commit: &str) -> Result<SourceRevision> {
        let id = self.id(commit)?;
        let build_number = match self.build_tags()?.get(&id) {
            Some(number) => Some(*number),
            None => self.count(id)?,
        };
        Ok(SourceRevision { commit: Some(id.to_string()), build_number })
    }

    pub(super) fn id(&self, commit: &str) -> Result<Oid> {
        Oid::from_str(commit).map_err(self.failed("reading a commit's name in"))
    }

    pub(super) fn has(&self, commit: &str) -> bool {
        let repo = self.lock();
        Oid::from_str(commit).and_then(|id| repo.find_commit(id)?.tree().map(drop)).is_ok()
    }
}

fn find_reference(repo: &git2::Repository, reference: &str) -> Option<Oid> {
    let places = ["", "refs/tags/", "refs/heads/", "refs/remotes/origin/", "refs/remotes/"];
    places
        .iter()
        // Try names without a prefix only for `HEAD` and `refs/…`: otherwise libgit2 would read the file
        // `config` as a reference.
        .filter(|place| !place.is_empty() || reference == "HEAD" || reference.starts_with("refs/"))
        .find_map(|place| repo.find_reference(&format!("{place}{reference}")).ok())
        .and_then(|found| found.peel_to_commit().ok())
        .map(|commit| commit.id())
}

/// Parses the number in `b1234`.
pub(crate) fn parse_build_tag(text: &str) -> Option<u32> {
    let digits = text.strip_prefix('b')?;
    digits.starts_with(|first: char| first.is_ascii_digit()).then(|| digits.parse().ok())?
}

pub(super) fn short_name(name: &str) -> Option<&str> {
    ["refs/tags/", "refs/heads/", "refs/remotes/"].iter().find_map(|folder| name.strip_prefix(folder))
}

pub(super) fn no_such_reference<'a>(
    repository: &str,
    reference: &str,
    names: impl Iterator<Item = &'a str>,
) -> GitError {
    let shared = |name: &str| name.bytes().zip(reference.bytes()).take_while(|(a, b)| a == b).count();
    let mut near: Vec<(usize, &str)> =
        names.map(|name| (shared(name), name)).filter(|(score, _)| *score > 1).collect();
    near.sort_by(|a, b| {
        b.0.cmp(&a.0)
            .then(a.1.len().abs_diff(reference.len()).cmp(&b.1.len().abs_diff(reference.len())))
            .then(a.1.cmp(b.1))
    });
    let similar = near.into_iter().take(MAX_SIMILAR_NAMES).map(|(_, name)| name.to_owned()).collect();
    GitError::NoSuchReference { repository: repository.to_owned(), reference: reference.to_owned(), similar }
}
