//! Functions and structs by name, as the scanner searches for them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A named piece of a source file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodeContainer {
    /// Kind of container.
    pub kind: ContainerKind,
    /// Name, possibly qualified as in `A::b` or `A::~A`.
    pub name: String,
}

impl fmt::Display for CodeContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ContainerKind::Function => write!(f, "function `{}`", self.name),
            ContainerKind::Struct => write!(f, "struct `{}`", self.name),
        }
    }
}

/// Kinds of container that the scanner finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContainerKind {
    /// A function definition, from its return type to its closing brace.
    Function,
    /// A struct, class or union definition, from that keyword to its closing brace.
    Struct,
}
