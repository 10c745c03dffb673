//! Reads settings and their sources: the layers of a configuration, from the defaults to the flags.

mod credentials;
pub mod folder;
pub mod layers;
pub(crate) mod other_program;
pub mod policy_file;
pub mod tree;
pub mod variables;
