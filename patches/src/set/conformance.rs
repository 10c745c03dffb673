//! What shows that a set keeps its promises in a tree that nobody has looked at: a program of the set's own that is compiled
//! together with the tree's own structs and functions, and scenarios that it plays.
//!
//! ```text
//!  before (ours: what stands in for the rest) + parts (the tree's own text) + sidecars + program (ours)  ──compiled──> scenarios
//! ```

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Pattern;
use crate::scan::Container;

/// A program that shows how a set behaves with a tree's own code.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conformance {
    /// One line for people: on what it is shown.
    pub title: String,
    /// A file of the set that stands before the tree's code.
    pub before: String,
    /// A file of the set that stands behind the sidecars, and has a `main` that takes the id of a scenario.
    pub program: String,
    /// What the compiler is given, one list for each way in which the tree is compiled; each way plays all scenarios.
    #[serde(default)]
    pub flags: Vec<Vec<String>>,
    /// Code of the tree, in the order in which it stands in the program.
    #[serde(rename = "part")]
    pub parts: Vec<Part>,
    /// What is played.
    #[serde(rename = "scenario")]
    pub scenarios: Vec<Scenario>,
    /// The text of `before`.
    #[serde(skip)]
    pub before_text: Vec<u8>,
    /// The text of `program`.
    #[serde(skip)]
    pub program_text: Vec<u8>,
}

/// Code that is taken out of a tree.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Paths from llama.cpp's root; the first that has it counts.
    pub files: Vec<String>,
    /// A function or a struct.
    #[serde(default)]
    pub container: Option<Container>,
    /// Instead of a container: every match of this, each as a line.
    #[serde(default)]
    pub lines: Option<Pattern>,
    /// A macro under which alone it is compiled.
    #[serde(default)]
    pub under: Option<String>,
    /// Whether a tree may lack it.
    #[serde(default)]
    pub optional: bool,
}

/// Something that the program plays.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name, `[a-z0-9-]+`.
    pub id: String,
    /// What is shown when it ends well, as a sentence.
    pub text: String,
    /// Variables; `{folder}` in a value is an empty folder of its own.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// The code by which a program says that the tree has nothing that a scenario is about.
pub const NOT_HERE: i32 = 77;
