//! What the scanner looks for: a function or a struct, by its name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A named piece of a source file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Container {
    /// What it is.
    pub kind: ContainerKind,
    /// Its name, which may be qualified as in `A::b` or `A::~A`.
    pub name: String,
}

impl fmt::Display for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ContainerKind::Function => write!(f, "function `{}`", self.name),
            ContainerKind::Struct => write!(f, "struct `{}`", self.name),
        }
    }
}

/// The kinds of container that the scanner finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContainerKind {
    /// The definition of a function, from its return type to its closing brace.
    Function,
    /// The definition of a struct, class or union, from that word to its closing brace.
    Struct,
}
