//! Makes a verified llama-server out of upstream source, and the sample model that it verifies with.
//!
//! This crate prints nothing and reads no settings: folders, limits and pinned versions come in as values, progress
//! goes out as events. It depends on no other crate of the workspace.
//!
//! | module | is for |
//! |---|---|
//! | [`sample_model`] | writes a tiny model with random weights, the same bytes for the same seed |
//! | [`gguf`] | the file format of models, as far as that needs it |

pub mod gguf;
pub mod sample_model;
