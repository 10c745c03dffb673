//! A fix of a patch set, as described to users and to the configuration.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::life::LifeStatement;
use crate::mitigation::LeakMemory;

/// A defect fixed by a set, enabled at run time by environment variables.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SetFix {
    /// Id, unique over all sets, `[a-z0-9-]+`.
    pub id: String,
    /// Description in one line.
    pub title: String,
    /// Symptom of the defect.
    pub symptom: String,
    /// Links to upstream's reports and changes.
    #[serde(default)]
    pub references: Vec<String>,
    /// Affected backends and builds.
    #[serde(default)]
    pub affects: AffectedBuilds,
    /// Affected memories; empty: none, or not stated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<LeakMemory>,
    /// Risk.
    #[serde(default)]
    pub risk: String,
    /// Cost.
    #[serde(default)]
    pub cost: String,
    /// Text in every binary with this fix.
    #[serde(default)]
    pub marker: String,
    /// Upstream's state.
    #[serde(default)]
    pub upstream: UpstreamState,
    /// Revisions in which the fix is needed, superseded or harmful, with the evidence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub life: Vec<LifeStatement>,
    /// Variables of the fix; `mitigations = ["<fix>=<value>"]` sets the first.
    #[serde(default, rename = "variable")]
    pub variables: Vec<FixVariable>,
    /// Measurements.
    #[serde(default)]
    pub evidence: Vec<FixEvidence>,
}

impl SetFix {
    /// The variable with this name.
    pub fn variable(&self, name: &str) -> Option<&FixVariable> {
        self.variables.iter().find(|variable| variable.name == name)
    }
}

/// Backends and builds with a defect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct AffectedBuilds {
    /// Backends; empty: all.
    pub backends: Vec<String>,
    /// First build, such as `b7821`; empty: unknown.
    pub first: String,
    /// Last build; empty: still open.
    pub last: String,
    /// Description in words.
    pub text: String,
}

/// Upstream's state of a defect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamState {
    /// Open or superseded.
    pub status: UpstreamStatus,
    /// Commit or build of upstream's own fix; empty while open.
    pub since: String,
    /// Evidence for this state.
    pub how: String,
}

/// State of a defect in upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpstreamStatus {
    /// Not fixed.
    #[default]
    Open,
    /// Fixed by upstream.
    Superseded,
}

/// An environment variable that a fix reads. If it is unset, the fix is off.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FixVariable {
    /// Name with the prefix `LLAMA_WARDEN_`.
    pub name: String,
    /// Type of the value.
    #[serde(rename = "type")]
    pub kind: VariableKind,
    /// Value if the fix is enabled without one; `None`: the variable stays unset.
    #[serde(default)]
    pub default: Option<FixValue>,
    /// Minimum.
    #[serde(default)]
    pub min: Option<f64>,
    /// Maximum.
    #[serde(default)]
    pub max: Option<f64>,
    /// Unit, such as `graphs` or `MiB`.
    #[serde(default)]
    pub unit: String,
    /// Effect.
    #[serde(default)]
    pub text: String,
}

/// Type of a variable's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VariableKind {
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// `1` for on; unset for off.
    Flag,
    /// Path of a file.
    Path,
}

/// Value of a variable.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum FixValue {
    /// `true` or `false`.
    Flag(bool),
    /// A whole number.
    Integer(i64),
    /// A number.
    Number(f64),
    /// Text.
    Text(String),
}

impl fmt::Display for FixValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(on) => f.write_str(if *on { "1" } else { "" }),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// A measurement.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FixEvidence {
    /// Observed effect.
    pub effect: String,
    /// Hardware.
    #[serde(default)]
    pub hardware: String,
    /// llama.cpp build.
    #[serde(default)]
    pub build: String,
    /// Command to reproduce the measurement.
    #[serde(default)]
    pub command: String,
}

impl FixEvidence {
    /// The measurement in one line.
    pub fn to_line(&self) -> String {
        let with: Vec<&str> = [&self.hardware, &self.build, &self.command]
            .into_iter()
            .filter(|part| !part.is_empty())
            .map(String::as_str)
            .collect();
        if with.is_empty() { self.effect.clone() } else { format!("{} ({})", self.effect, with.join("; ")) }
    }
}
