//! Reads and writes GGUF model files.

mod read;
mod weight_kind;
mod write;

pub use read::{GgufError, GgufFacts, TensorInfo, read};
pub use weight_kind::WeightKind;
#[cfg(test)]
pub(crate) use write::ALIGNMENT;
pub(crate) use write::{GgufWriter, MetadataValue, write_numbers};
