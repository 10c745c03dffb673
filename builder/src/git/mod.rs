//! Repositories as sources: cached commits of a server, or a repository on disk, read in place.
//!
//! | question | answer |
//! |---|---|
//! | identity of a commit as a source | `git-<40 digits>`; the plan adds the path of llama.cpp's folder |
//! | when a server is contacted | for tags and branches always (they move), for a full id if not cached |
//! | if the server does not respond | the last cached state is used, with a note; without one, an error |
//! | amount fetched | one commit with its files; all of history for ranges, or if it is cached |
//! | interrupted fetch | harmless; the next fetch starts over |
//! | client of the server | the user's `git` with their credentials, proxies, certificates; we store none |
//!
//! Repositories that are not ours are never written to: no worktree is registered, no reference set.

mod cache;
mod commit_tree;
pub(crate) mod fault;
mod fetch;
mod history;
mod location;
mod obtain;
mod place;
mod program;
mod repository;

pub use commit_tree::CommitTree;
pub use fault::GitError;
pub use history::{RelativeAge, RevisionInfo, check_range};
pub use location::{GitLocation, GitSource};
pub(crate) use obtain::obtain;
pub use obtain::{CommitRequest, ObtainedCommit};
pub use repository::GitRepository;
pub(crate) use repository::parse_build_tag;

#[cfg(test)]
mod tests;
