//! Patch sets that keep working while upstream changes: our own source files, placed into a tree by
//! anchored hooks, and guarded by probes and by fingerprints of the code they depend on. Also a list of
//! other mitigations against leaks.
//!
//! ```text
//!  set.toml ──Catalogue──> PatchSet ──┐
//!                                     ├── judge ──> Judgement { status, reasons, edits } ──> apply, export
//!  folder, archive, commit ── Tree ───┘
//! ```
//!
//! The curated sets and the list of mitigations are embedded in the program. Judging writes nothing;
//! changes are a value, [`Edits`]. A hook that does not match exactly once, a failed probe, or an unknown
//! fingerprint is reported as a [`Reason`]; nothing is ever placed by guessing. [`apply`] is the only
//! writer.
//!
//! | module | purpose |
//! |---|---|
//! | [`set`] | content of a set: the curated ones, and the user's own |
//! | [`Tree`], [`Revision`] | source of files, and their llama.cpp revision |
//! | [`scan`] | finds functions and structs in C++ without a full parser |
//! | [`mod@judge`], [`Judgement`] | judges if a set fits a tree |
//! | [`Series`], [`planned`] | several sets on top of each other; the sets of a build |
//! | [`history`] | judges many revisions |
//! | [`apply`], [`export`] | applies and reverses sets in a folder; writes patches for git and patch |
//! | [`prove`] | tests of a set in an unreviewed tree, and their records |
//! | [`marker`], [`binary`] | markers of patches in source and in binaries |
//! | [`mitigation`] | fixes, variables, flags and build options against leaks |

pub mod apply;
pub mod binary;
mod embedded;
mod error;
pub mod export;
pub mod history;
pub mod judge;
mod judgement;
pub mod marker;
pub mod mitigation;
pub mod planned;
pub mod prove;
mod revision;
pub mod scan;
mod series;
pub mod set;
mod tree;

pub use error::{Error, Kind, Refusal, Result};
pub use judge::{Judge, fingerprint, judge};
pub use judgement::{Edits, FileEdit, FixJudgement, Inserted, Judgement, Reason, SeamSeen, Status};
pub use planned::{Planned, PlannedSet};
pub use revision::Revision;
pub use series::Series;
pub use set::{Catalogue, Fix, Hook, PatchSet, Selection, Sets};
pub use tree::{FolderTree, Overlay, Tree};
