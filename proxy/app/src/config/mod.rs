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

pub(crate) mod arguments;
pub(crate) mod changes;
mod listing;
pub(crate) mod machine;
pub(crate) mod model_files;
pub(crate) mod named;
pub(crate) mod needs;
pub(crate) mod policy;
pub(crate) mod policy_file;
pub(crate) mod problem;
mod remote;
pub(crate) mod request;
pub(crate) mod resolve;
#[cfg(test)]
pub(crate) mod samples_tests;
pub(crate) mod schema;
pub(crate) mod settings;
pub(crate) mod show;
pub(crate) mod source;
