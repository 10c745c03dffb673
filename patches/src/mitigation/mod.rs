//! One list of everything that can be done about memory that grows: the fixes of the patch sets, and the variables,
//! flags and build options that need no patch; with the leaks that they are for.
//!
//! ```text
//!  patches/mitigations.toml ──┐
//!                             ├── Catalogue ── resolve(["graph-cache-cap=64", …]) ──> Resolution { effects, findings }
//!  fixes of the patch sets ───┘                                                            |
//!                                                             Effect::fit(BuildFacts) ──> Fit: does this build do it?
//! ```
//!
//! Resolving is pure. Only [`Effect::fit`] may read a file: a binary that we did not build is searched for the text
//! that a fix leaves in it.

mod advise;
mod build;
mod catalogue;
mod document;
mod entry;
mod item;
mod leak;
mod load;
mod resolve;
mod value;

pub use advise::{Advice, Seen};
pub use build::{BuildFacts, Fit, ProvenanceFacts};
pub use catalogue::Catalogue;
pub use document::markdown;
pub use entry::{Action, Flag, Memory, Mitigation, Part};
pub use leak::{Cure, Leak, LeakKind, Sign};
pub use resolve::{Effect, Finding, FlagUse, Need, Resolution};
pub use value::{ChoiceLimit, ValueKind, ValueSpec};

#[cfg(test)]
mod tests;
