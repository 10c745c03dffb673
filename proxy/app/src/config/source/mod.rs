//! What is written, and where: the layers of a configuration, from the defaults to the flags.

pub(crate) mod folder;
pub(crate) mod layers;
pub(crate) mod tree;
mod variables;
