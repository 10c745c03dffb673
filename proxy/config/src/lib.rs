//! The configuration: read in layers, checked against one schema, and turned into what each crate is told.
//!
//! ```text
//!   defaults.toml < file < LLAMA_WARDEN_* < flags      layers    every value remembers where it was written
//!                         |
//!                      validate                        keys, kinds, ranges: all problems at once, with file and line
//!                         |
//!                      Loaded                          typed, as written
//!                         |
//!                      resolve                         paths, binaries, budgets in bytes; what the values mean together
//!                         |
//!                      Resolved                        what fleet, gateway and admin are told
//! ```
//!
//! | folder | job |
//! |---|---|
//! | `source` | what is written where: file, variables, flags, one tree of values that know their place |
//! | `schema` | which keys there are, what each takes, how that is checked, published and documented |
//! | `resolve` | what it comes to on this machine: binaries, keys, certificates, mitigations, contradictions |

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
pub mod policy_file;
pub mod printed;
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
