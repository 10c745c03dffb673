//! The conformance program of a set, which tests the set in an unreviewed tree: the set's own program
//! compiled together with the tree's own structs and functions, and the scenarios that it runs.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::CodePattern;
use crate::scan::CodeContainer;

/// A program that tests a set's behaviour with a tree's own code.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConformanceSpec {
    /// Description in one line.
    pub title: String,
    /// File of the set that precedes the tree's code.
    pub before: String,
    /// File of the set that follows the sidecars; its `main` takes the id of a scenario.
    pub program: String,
    /// Compiler flags, one list per compiled variant; each variant runs all scenarios.
    #[serde(default)]
    pub flags: Vec<Vec<String>>,
    /// Code of the tree, in the order of inclusion.
    #[serde(rename = "part")]
    pub parts: Vec<ConformancePart>,
    /// Scenarios to run.
    #[serde(rename = "scenario")]
    pub scenarios: Vec<ConformanceScenario>,
    /// Text of `before`.
    #[serde(skip)]
    pub before_text: Vec<u8>,
    /// Text of `program`.
    #[serde(skip)]
    pub program_text: Vec<u8>,
}

/// Code extracted from a tree.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConformancePart {
    /// Paths relative to llama.cpp's root; the first one with the code counts.
    pub files: Vec<String>,
    /// Function or struct to extract.
    #[serde(default)]
    pub container: Option<CodeContainer>,
    /// Instead of a container: extracts every match of this pattern, each as a line.
    #[serde(default)]
    pub lines: Option<CodePattern>,
    /// Macro that must be defined for this code.
    #[serde(default)]
    pub under: Option<String>,
    /// The tree may lack this code.
    #[serde(default)]
    pub optional: bool,
}

/// A scenario that the program runs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConformanceScenario {
    /// Id, `[a-z0-9-]+`.
    pub id: String,
    /// Property shown by success, as a sentence.
    pub text: String,
    /// Environment variables; `{folder}` in a value is replaced by a new empty folder.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

/// Exit code of a program if a scenario does not concern the tree.
pub const NOT_HERE_STATUS: i32 = 77;
