//! Reads and writes GGUF model files.
//!
//! | file | job |
//! |---|---|
//! | `read` | reads a file's facts about its model, for estimates of what the model needs |
//! | `weight_kind` | number formats of weights, used by the other two |
//! | `write` | writes the sample models |

mod read;
mod weight_kind;
mod write;

pub use read::{GgufError, GgufFacts, TensorInfo, read};
pub use weight_kind::WeightKind;
#[cfg(test)]
pub(crate) use write::ALIGNMENT;
pub(crate) use write::{FillFn, GgufWriter, MetadataValue, write_numbers};
