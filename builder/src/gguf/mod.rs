//! GGUF files: what a model file is made of.
//!
//! | file | job |
//! |---|---|
//! | `read` | what a file says of its model, for those who want to know what it needs |
//! | `write` | the sample models |

mod read;
mod write;

pub use read::{Facts, GgufError, Tensor, read};
#[cfg(test)]
pub(crate) use write::ALIGNMENT;
pub(crate) use write::{Fill, Gguf, Number, Value};
