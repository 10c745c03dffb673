//! Patch sets that survive upstream: our own source files, placed into a tree by anchored hooks, guarded by probes and
//! by fingerprints of the code they lean on. And everything else that can be done about memory that grows.
//!
//! ```text
//!  set.toml ──Catalogue──> PatchSet ──┐
//!                                     ├── judge ──> Judgement { status, reasons, edits } ──> apply, export
//!  folder, archive, commit ── Tree ───┘
//! ```
//!
//! The curated sets and the list of mitigations lie beside this crate's source and are part of the program. Judging
//! reads and writes nothing: what would change is a value, [`Edits`]. A hook that does not match exactly once, a probe that
//! does not hold, or a fingerprint that nobody has seen is reported as a [`Reason`]; nothing is ever placed by guessing.
//! [`apply`] is the only writer.
//!
//! | module | is for |
//! |---|---|
//! | [`set`] | what a set says: the curated ones, and the user's own |
//! | [`Tree`], [`Revision`] | where files come from, and which llama.cpp they are of |
//! | [`scan`] | functions and structs in C++ that no parser likes |
//! | [`mod@judge`], [`Judgement`] | whether a set fits a tree |
//! | [`Series`], [`planned`] | several sets, one on top of the other; those of a build |
//! | [`history`] | many revisions |
//! | [`apply`], [`export`] | written into a folder and taken out again; written as patches that git and patch read |
//! | [`prove`] | what is shown for a set in a tree that nobody has looked at, and the record of it |
//! | [`marker`], [`binary`] | the traces that patches leave in source and in binaries |
//! | [`mitigation`] | fixes, variables, flags and build options against leaks, and whether a build has them |

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
