//! Patch sets that survive upstream: our own source files, placed into a tree by anchored hooks, guarded by probes and
//! by fingerprints of the code they lean on.
//!
//! ```text
//!  set.toml ──Catalogue──> PatchSet ──┐
//!                                     ├── judge ──> Judgement { status, reasons, edits }
//!  folder, archive, commit ── Tree ───┘
//! ```
//!
//! Judging reads and writes nothing: what would change is a value, [`Edits`]. A hook that does not match exactly once, a
//! probe that does not hold, or a fingerprint that nobody has seen is said loudly; nothing is ever placed by guessing.
//!
//! | module | is for |
//! |---|---|
//! | [`catalogue`] | the embedded sets and the user's own |
//! | [`set`], [`fix`] | what a set says |
//! | [`fingerprints`] | versions of upstream's code that were seen and found good |
//! | [`tree`] | where files come from |
//! | [`judgement`] | what was found, as values |
//! | [`mod@judge`] | finds it |
//! | [`mod@scan`] | functions and structs in C++ that no parser likes |
//! | [`mod@diff`] | the user's plain diffs, strictly placed |
//! | [`series`] | several sets, one on top of the other |
//! | [`apply`] | written into a folder and taken out again |
//! | [`history`] | many revisions |
//! | [`export`] | written as patches that git and patch read |
//! | [`normal`] | the text of such a container without comments and layout, and its hash |

pub mod apply;
pub mod catalogue;
pub mod diff;
mod embedded;
pub mod export;
pub mod fingerprints;
pub mod fix;
pub mod history;
pub mod judge;
pub mod judgement;
mod load;
pub mod marker;
pub mod normal;
pub mod scan;
pub mod selection;
pub mod series;
pub mod set;
pub mod tree;

pub use catalogue::Catalogue;
pub use embedded::embedded_file;
pub use fingerprints::{Fingerprints, Known, learn};
pub use fix::{Affects, Evidence, Fix, Upstream, UpstreamStatus, Value, Variable, VariableKind};
pub use judge::{Judge, fingerprint, judge};
pub use judgement::{Edits, FileEdit, FixJudgement, Inserted, Judgement, Reason, SeamSeen, Status};
pub use selection::{Selection, Sets};
pub use series::Series;
pub use set::{
    At, Container, ContainerKind, Diff, Hook, OnFail, Origin, PatchSet, Pattern, Probe, Seam, Sidecar,
};
pub use tree::{FolderTree, Overlay, Tree};
