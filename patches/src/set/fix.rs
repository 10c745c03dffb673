//! A fix: what a set cures, for people and for the configuration.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::life::Life;
use crate::mitigation::Memory;

/// Something that a set cures, switched on at run time by environment variables.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Fix {
    /// Its name, unique over all sets, `[a-z0-9-]+`.
    pub id: String,
    /// One line for people.
    pub title: String,
    /// How one notices the defect.
    pub symptom: String,
    /// Reports and changes upstream.
    #[serde(default)]
    pub references: Vec<String>,
    /// What has the defect.
    #[serde(default)]
    pub affects: Affects,
    /// The memory that it is about; none: it is about something else, or nobody said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<Memory>,
    /// What could go wrong with it.
    #[serde(default)]
    pub risk: String,
    /// What it costs.
    #[serde(default)]
    pub cost: String,
    /// Text that a binary with this fix contains.
    #[serde(default)]
    pub marker: String,
    /// Whether upstream cured it.
    #[serde(default)]
    pub upstream: Upstream,
    /// In which revisions it is needed, superseded or harmful, and what says so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub life: Vec<Life>,
    /// What sets it; the first is the one that `mitigations = ["<fix>=<value>"]` sets.
    #[serde(default, rename = "variable")]
    pub variables: Vec<Variable>,
    /// What was measured.
    #[serde(default)]
    pub evidence: Vec<Evidence>,
}

impl Fix {
    /// The variable of this name.
    pub fn variable(&self, name: &str) -> Option<&Variable> {
        self.variables.iter().find(|variable| variable.name == name)
    }
}

/// What has a defect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Affects {
    /// Backends; empty: all.
    pub backends: Vec<String>,
    /// The first build, such as `b7821`; empty: unknown.
    pub first: String,
    /// The last build; empty: still open.
    pub last: String,
    /// In words.
    pub text: String,
}

/// What upstream did about a defect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Upstream {
    /// Open or cured.
    pub status: UpstreamStatus,
    /// The commit or build since which it is cured; empty while open.
    pub since: String,
    /// How that was seen.
    pub how: String,
}

/// Whether upstream cured a defect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpstreamStatus {
    /// Not yet.
    #[default]
    Open,
    /// Yes.
    Superseded,
}

/// An environment variable that a fix reads. Unset: the fix is off.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Variable {
    /// Its name, beginning with `LLAMA_WARDEN_`.
    pub name: String,
    /// What it holds.
    #[serde(rename = "type")]
    pub kind: VariableKind,
    /// The value that it gets when the fix is switched on without saying more; none: it stays unset.
    #[serde(default)]
    pub default: Option<Value>,
    /// The least value.
    #[serde(default)]
    pub min: Option<f64>,
    /// The greatest value.
    #[serde(default)]
    pub max: Option<f64>,
    /// What is counted, such as `graphs` or `MiB`.
    #[serde(default)]
    pub unit: String,
    /// What it does.
    #[serde(default)]
    pub text: String,
}

/// What a variable holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VariableKind {
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// `1` for on; unset for off.
    Flag,
    /// The path of a file.
    Path,
}

/// A value of a variable.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// `true` or `false`.
    Flag(bool),
    /// A whole number.
    Integer(i64),
    /// A number.
    Number(f64),
    /// Text.
    Text(String),
}

impl fmt::Display for Value {
    /// As the environment holds it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(on) => f.write_str(if *on { "1" } else { "" }),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// Something that was measured.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// What was seen.
    pub effect: String,
    /// On what.
    #[serde(default)]
    pub hardware: String,
    /// With which llama.cpp.
    #[serde(default)]
    pub build: String,
    /// How to see it again.
    #[serde(default)]
    pub command: String,
}
