//! The configuration: reads it in layers, checks it against one schema, and resolves it for each crate.
//!
//! ```text
//!   defaults.toml < file < LLAMA_WARDEN_* < flags    layers    every value carries its source
//!                         |
//!                      validate                      keys, kinds, ranges: all problems, with file and line
//!                         |
//!                      LoadedConfig                  typed, as written
//!                         |
//!                      resolve                       paths, binaries, budgets in bytes; checks across keys
//!                         |
//!                      ResolvedConfig                settings of fleet, gateway and admin
//! ```
//!
//! | folder | task |
//! |---|---|
//! | `source` | reads file, variables and flags into one tree of values with their sources |
//! | `schema` | defines keys and their types; validates a configuration; publishes and documents the keys |
//! | `resolve` | resolves values on this machine: binaries, keys, certificates, mitigations, contradictions |

pub mod advice;
pub mod arguments;
pub mod changes;
mod listing;
pub mod log_filter;
pub mod machine;
pub mod model_files;
pub mod named;
pub mod needs;
pub mod policy;
#[cfg(test)]
#[path = "printed_tests.rs"]
mod printed;
pub mod problem;
mod remote;
pub mod request;
pub mod resolve;
#[cfg(test)]
mod samples_tests;
pub mod schema;
pub mod settings;
pub mod show;
pub mod source;
