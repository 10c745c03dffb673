//! What is written, and where: the layers of a configuration, from the defaults to the flags.

mod credentials;
pub(crate) mod folder;
pub(crate) mod layers;
pub(crate) mod tree;
mod variables;
