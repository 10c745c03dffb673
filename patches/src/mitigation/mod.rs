//! The catalogue of mitigations against growing memory: fixes of patch sets, and variables, flags and build
//! options without a patch; with the leaks that they cure.
//!
//! Only [`MitigationEffect::fit`] may read a file, to search a binary for the marker of an unlisted fix.

mod advise;
mod build;
mod catalogue;
mod entry;
mod leak;
mod load;
mod resolve;
mod value;

pub use advise::{LeakAdvice, ServerObservations};
pub use build::{BuildFacts, MitigationFit, ProvenanceFacts};
pub use catalogue::MitigationCatalogue;
pub use entry::{LeakMemory, MitigationAction, MitigationEntry, MitigationPart, ServerFlag};
pub use leak::{KnownLeak, LeakCure, LeakKind, LeakSign};
pub use resolve::{BuildNeed, FlagUse, MitigationEffect, MitigationFinding, MitigationResolution};
pub use value::{ChoiceLimit, ValueKind, ValueSpec};

#[cfg(test)]
mod document_tests;
#[cfg(test)]
mod tests;
