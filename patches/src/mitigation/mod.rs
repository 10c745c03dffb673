//! The catalogue of mitigations against growing memory: fixes of patch sets, and variables, flags and build
//! options without a patch; with the leaks that they cure.
//!
//! ```text
//!  patches/mitigations.toml ──┐
//!                             ├── Catalogue ── resolve(["graph-cache-cap=64", …]) ──> Resolution { effects, findings }
//!  fixes of the patch sets ───┘                                                            |
//!                                                             Effect::fit(BuildFacts) ──> Fit: supported?
//! ```
//!
//! Resolving is pure. Only [`Effect::fit`] may read a file: it searches a binary that we did not build for
//! the marker of a fix.

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
