//! Patch sets that keep working while upstream changes: our own source files, placed into a tree by anchored
//! hooks, and guarded by probes and by fingerprints of the code they depend on. Also lists other mitigations.
//!
//! ```text
//!  set.toml ──SetCatalogue──> PatchSet ─────┐
//!                                           ├── judge ──> SetJudgement ──> apply, export
//!  folder, archive, commit ── SourceTree ───┘
//! ```
//!
//! The curated sets and the list of mitigations are embedded in the program. Judging writes nothing and
//! returns [`TreeEdits`]; [`apply`] is the only writer. A hook that does not match exactly once, a failed
//! probe, or an unknown fingerprint is reported as a [`JudgementReason`]; nothing is placed by guessing.
//!
//! | module | purpose |
//! |---|---|
//! | [`set`] | content of a set: the curated ones, and the user's own |
//! | [`SourceTree`], [`SourceRevision`] | source of files, and their llama.cpp revision |
//! | [`scan`] | finds functions and structs in C++ without a full parser |
//! | [`mod@judge`], [`SetJudgement`] | judges if a set fits a tree |
//! | [`PatchSeries`], [`planned`] | several sets on top of each other; the sets of a build |
//! | [`history`] | judges many revisions |
//! | [`apply`], [`export`] | writes sets into a folder; writes patches for git and patch |
//! | [`prove`] | tests of a set in an unreviewed tree, and their records |
//! | [`marker`], [`binary`] | markers of patches in source and in binaries |
//! | [`whole`] | writes files as a whole |
//! | [`mitigation`] | fixes, variables, flags and build options against leaks |

pub mod apply;
pub mod binary;
mod builds;
mod edits;
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
pub mod scan;
mod series;
pub mod set;
mod tree;
pub mod whole;

pub use edits::{FileEdit, InsertedLine, TreeEdits};
pub use error::{PatchError, PatchErrorClass, Result, SetRefusal};
pub use judge::{CachingJudge, fingerprint, judge};
pub use judgement::{FixJudgement, JudgementReason, PatchStatus, SetJudgement};
pub use planned::{PlannedSeries, PlannedSet};
pub use series::PatchSeries;
pub use set::fingerprints::SeamSeen;
pub use set::{PatchSet, SelectedSets, SetCatalogue, SetFix, SetHook, SetSelection};
pub use tree::{FolderTree, OverlayTree, SourceRevision, SourceTree};
