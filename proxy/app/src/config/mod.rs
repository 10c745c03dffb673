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

pub(crate) mod arguments;
pub(crate) mod binary;
pub(crate) mod cancel;
mod contradictions;
#[cfg(test)]
mod documented;
mod doors;
pub(crate) mod flags;
mod judge;
pub(crate) mod keys;
pub(crate) mod layers;
pub(crate) mod machine;
pub(crate) mod mitigations;
mod places;
pub(crate) mod policy;
pub(crate) mod policy_file;
pub(crate) mod problem;
pub(crate) mod request;
pub(crate) mod resolve;
#[cfg(test)]
mod samples;
pub(crate) mod schema;
pub(crate) mod server_facts;
pub(crate) mod settings;
pub(crate) mod show;
pub(crate) mod store;
mod tls;
pub(crate) mod tree;
mod validate;
mod values;
mod variables;
