//! Repositories as sources: commits of a server, kept in a cache, or of a repository on disk, read in place.
//!
//! ```text
//!  name, URL or path --Named::parse--> Location + reference
//!                                          |
//!                                       obtain          whole commit in the cache, or a path: no network
//!                                          |            else fetched, shallow where no history is asked for
//!                                          v
//!                              Repository + commit --> CommitTree: files by name (patches), written out (builds)
//!                                   |
//!                                   +--> range: commits of A..B, oldest first
//! ```
//!
//! | question | answer |
//! |---|---|
//! | what is a commit's identity as a source? | `git-<40 digits>`; llama.cpp's folder in it is part of the plan too |
//! | when is a server asked? | for tags and branches always (they move), for a whole commit only if it is not here |
//! | and when it does not answer? | then what the cache last saw is taken, with a note; else it is an error |
//! | how much is fetched? | one commit with its files; all of history for ranges and where the cache has it already |
//! | what of an interrupted fetch? | nothing is harmed, the next one begins again |
//! | who talks to the server? | the user's `git`, with their credentials, proxies and certificates; nothing is asked for, stored or shown |
//!
//! Nothing is written into a repository that is not ours: no worktree is registered, no reference set.

mod cache;
mod check;
mod commit_tree;
pub(crate) mod fault;
mod fetch;
mod history;
mod location;
mod obtain;
mod place;
mod program;
mod repository;

pub use check::check_range;
pub use commit_tree::CommitTree;
pub use fault::Fault;
pub use history::{RelativeAge, RevisionInfo};
pub use location::{Location, Named};
pub(crate) use obtain::obtain;
pub use obtain::{Obtained, Request};
pub use repository::Repository;

#[cfg(test)]
mod tests;
