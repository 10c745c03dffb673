//! GGUF files: what a model file is made of.
//!
//! | file | job |
//! |---|---|
//! | `read` | what a file says of its model, for those who want to know what it needs |
//! | `weight_kind` | the forms of numbers in both |
//! | `write` | the sample models |

mod read;
mod weight_kind;
mod write;

pub use read::{Facts, GgufError, Tensor, read};
pub use weight_kind::WeightKind;
#[cfg(test)]
pub(crate) use write::ALIGNMENT;
pub(crate) use write::{Fill, Gguf, Value, write_numbers};
