//! Reads a commit as a tree of files: the folder of llama.cpp in it, and its files by name.

use std::path::Path;
use std::sync::Arc;

use git2::{ErrorCode, ObjectType, Oid};
use warden_patches::{SourceRevision, SourceTree};

use super::fault::GitError;
use super::repository::GitRepository;
use crate::error::{BuilderError, Result};
use crate::source::tree::{MAX_ROOT_DEPTH, TreeLocation, TreeSearch, join_names};

pub(super) const LINK_MODE: i32 = 0o120_000;
/// Largest file that is read, in bytes; llama.cpp's largest source file has 1 MiB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The llama.cpp tree of a commit. Objects are read on demand, so a partial clone may suffice.
#[derive(Debug)]
pub struct CommitTree {
    repository: Arc<GitRepository>,
    commit: String,
    top: Oid,
    located: Option<TreeLocation>,
    revision: SourceRevision,
}

impl CommitTree {
    pub(super) fn new(repository: Arc<GitRepository>, commit: &str) -> Result<Self> {
        let id = repository.id(commit)?;
        let top = {
            let repo = repository.lock();
            let tree = repo.find_commit(id).and_then(|commit| commit.tree());
            tree.map_err(repository.failed("reading a commit of"))?.id()
        };
        let revision = SourceRevision { commit: Some(id.to_string()), build_number: None };
        let mut tree = Self { repository, commit: id.to_string(), top, located: None, revision };
        tree.located = tree.locate();
        Ok(tree)
    }

    /// Sets a known revision, which saves counting all of history for the build number.
    #[must_use]
    pub(crate) fn with_revision(self, revision: SourceRevision) -> Self {
        Self { revision, ..self }
    }

    /// The commit's id, 40 hexadecimal digits.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// llama.cpp's folder in the repository, empty for the top; `None` if no llama.cpp can be built.
    pub fn root(&self) -> Option<&str> {
        self.located.as_ref().map(|located| located.root.as_str())
    }

    pub(crate) fn located(&self) -> Option<&TreeLocation> {
        self.located.as_ref()
    }

    pub(super) fn repository(&self) -> &Arc<GitRepository> {
        &self.repository
    }

    pub(super) fn root_tree(&self) -> Option<(Oid, &str)> {
        match self.root().unwrap_or_default() {
            "" => Some((self.top, "")),
            root => self.entry_at(root).map(|(id, _)| (id, root)),
        }
    }

    /// Names in the top folder, for the error message about a repository without llama.cpp.
    pub(crate) fn top_names(&self) -> Vec<String> {
        let repo = self.repository.lock();
        let Ok(tree) = repo.find_tree(self.top) else { return Vec::new() };
        tree.iter().map(|entry| String::from_utf8_lossy(entry.name_bytes()).into_owned()).collect()
    }

    /// Most commits are llama.cpp itself, which three look-ups show. Otherwise searches all folders near the
    /// top.
    fn locate(&self) -> Option<TreeLocation> {
        let here = |name: &str| self.entry_at(name).is_some();
        let mut search = TreeSearch::default();
        let near = [
            "CMakeLists.txt",
            "ggml/CMakeLists.txt",
            "tools/server/CMakeLists.txt",
            "examples/server/CMakeLists.txt",
        ];
        for name in near.into_iter().filter(|name| here(name)) {
            search.add(name, true);
        }
        search.tree().or_else(|| {
            let mut search = TreeSearch::default();
            let repo = self.repository.lock();
            search_folder(&repo, self.top, "", 0, &mut search);
            search.tree()
        })
    }

    fn entry_at(&self, path: &str) -> Option<(Oid, Option<ObjectType>)> {
        let repo = self.repository.lock();
        let entry = repo.find_tree(self.top).ok()?.get_path(Path::new(path)).ok()?;
        (entry.filemode() != LINK_MODE).then(|| (entry.id(), entry.kind()))
    }

    fn blob_id(&self, path: &str) -> Option<Oid> {
        let whole = join_names(self.root().unwrap_or_default(), path);
        self.entry_at(&whole).filter(|(_, kind)| *kind == Some(ObjectType::Blob)).map(|(id, _)| id)
    }
}

fn search_folder(repo: &git2::Repository, tree: Oid, name: &str, depth: usize, search: &mut TreeSearch) {
    // A folder missing from a partial clone cannot be built, so it counts as absent.
    let Ok(tree) = repo.find_tree(tree) else { return };
    for entry in &tree {
        let Ok(file_name) = entry.name() else { continue };
        let below = join_names(name, file_name);
        match entry.kind() {
            Some(ObjectType::Blob) => search.add(&below, entry.filemode() != LINK_MODE),
            Some(ObjectType::Tree) => {
                search.add(&below, false);
                // Search two levels below the deepest possible root, to find its `tools/server`.
                if depth < MAX_ROOT_DEPTH + 2 {
                    search_folder(repo, entry.id(), &below, depth + 1, search);
                }
            }
            _ => {}
        }
    }
}

impl SourceTree for CommitTree {
    fn read(&self, path: &str) -> warden_patches::Result<Option<Vec<u8>>> {
        let Some(id) = self.blob_id(path) else { return Ok(None) };
        match self.repository.blob(id, MAX_FILE_BYTES) {
            Ok(Some(content)) => Ok(Some(content)),
            Ok(None) => {
                let (commit, entry) =
                    (self.commit.clone(), join_names(self.root().unwrap_or_default(), path));
                let why = "is larger than any file of a source (64 MiB)";
                Err(BuilderError::from(GitError::Unsafe { commit, entry, why }).into())
            }
            Err(error) if error.code() == ErrorCode::NotFound => {
                Err(BuilderError::from(self.missing(&join_names(self.root().unwrap_or_default(), path)))
                    .into())
            }
            Err(error) => Err(self.repository.failed("reading a file of")(error).into()),
        }
    }

    fn content_id(&self, path: &str) -> warden_patches::Result<Option<String>> {
        Ok(self.blob_id(path).map(|id| id.to_string()))
    }

    fn revision(&self) -> SourceRevision {
        self.revision.clone()
    }
}

impl CommitTree {
    pub(super) fn missing(&self, path: &str) -> GitError {
        GitError::Missing {
            repository: self.repository.shown().to_owned(),
            path: path.to_owned(),
            commit: self.commit.clone(),
        }
    }
}
