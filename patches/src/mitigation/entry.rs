//! A mitigation: one entry of the catalogue.

use serde::{Deserialize, Serialize};

use super::value::ValueSpec;
use crate::builds::format_range;
use crate::set::life::{FixStanding, InspectedRevision, LifeStatement};
use crate::set::{FixEvidence, UpstreamState};

/// A mitigation against growing memory, or against a defect that a patch set fixes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MitigationEntry {
    /// Id, as written in the configuration.
    pub id: String,
    /// Description in one line.
    pub title: String,
    /// Effect.
    pub text: String,
    /// Implementation.
    #[serde(flatten)]
    pub action: MitigationAction,
    /// Value after `=`; `None`: no value.
    pub value: Option<ValueSpec>,
    /// Additional variables of a fix, each set by `<id>.<part>=<value>`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<MitigationPart>,
    /// File of a fix of the user's own set. `None`: embedded in this program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own: Option<String>,
    /// Affected memories.
    pub memory: Vec<LeakMemory>,
    /// Affected backends; empty: all.
    pub backends: Vec<String>,
    /// First build that supports the mitigation or has the defect, such as `b8852`; empty: unknown or all.
    pub first: String,
    /// Last build that supports the mitigation or has the defect; empty: the newest.
    pub last: String,
    /// Cost.
    pub cost: String,
    /// Risk.
    pub risk: String,
    /// Confidence that the mitigation helps.
    pub confidence: String,
    /// Measurements.
    pub evidence: Vec<FixEvidence>,
    /// Links to reports and changes.
    pub references: Vec<String>,
    /// Revisions in which the mitigation is needed, superseded or harmful, with the evidence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub life: Vec<LifeStatement>,
    /// For a fix: upstream's state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<UpstreamState>,
    /// Ids of the leaks that the mitigation cures; for a fix, also the symptom in its own description.
    pub cures: Vec<String>,
    /// Symptoms of the problems in `cures`.
    pub symptoms: Vec<String>,
}

/// Implementation of a mitigation.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum MitigationAction {
    /// A fix of a patch set, enabled by a variable.
    Patch {
        /// Id of the set.
        set: String,
        /// Name of the variable.
        variable: Option<String>,
        /// Text in every binary with this fix; may be empty.
        marker: String,
    },
    /// An environment variable.
    Variable {
        /// Name of the variable.
        name: String,
        /// Fixed value; `None`: the value that the user gives.
        fixed: Option<String>,
        /// The presence of the variable has the effect; its value is ignored.
        presence: bool,
    },
    /// Variables that the server must not inherit.
    Unset {
        /// Names of the variables.
        names: Vec<String>,
        /// Flags of llama-server with the same effect as the variables.
        flags: Vec<String>,
    },
    /// Flags of llama-server.
    Flags {
        /// The flags.
        flags: Vec<ServerFlag>,
    },
    /// A build option.
    BuildOption {
        /// Name of the option.
        name: String,
        /// Value of the option.
        setting: String,
    },
}

impl MitigationAction {
    /// The kind as a word, for tables.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Patch { .. } => "patch",
            Self::Variable { .. } => "variable",
            Self::Unset { .. } => "unset",
            Self::Flags { .. } => "flag",
            Self::BuildOption { .. } => "build-option",
        }
    }
}

/// A flag of llama-server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ServerFlag {
    /// The flag to write.
    pub write: String,
    /// The following word: fixed, or `{}` for the user's value; `None`: the flag takes no value.
    #[serde(default)]
    pub value: Option<String>,
    /// All flags with the same or the opposite meaning.
    pub names: Vec<String>,
    /// Variables with which llama-server sets the same flag.
    #[serde(default)]
    pub variables: Vec<String>,
}

/// An additional variable of a fix.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MitigationPart {
    /// Name after the dot.
    pub name: String,
    /// Name of the variable.
    pub variable: String,
    /// Specification of the variable's value; `None`: the variable is only on or off.
    pub value: Option<ValueSpec>,
    /// Effect.
    pub text: String,
}

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeakMemory {
    /// Host memory of the process.
    Host,
    /// GPU memory.
    Vram,
    /// Memory that stays allocated without a process.
    Kernel,
}

impl LeakMemory {
    /// Name in the catalogue.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Vram => "vram",
            Self::Kernel => "kernel",
        }
    }
}

impl MitigationEntry {
    /// Range of affected builds; empty: all, or unknown.
    pub fn builds(&self) -> String {
        format_range(&self.first, &self.last)
    }

    /// Description as a noun phrase: ``the fix of the set `cuda-memory` ``.
    pub(super) fn describe(&self) -> String {
        match &self.action {
            MitigationAction::Patch { set, .. } if self.own.is_some() => format!("a fix of the set `{set}`"),
            MitigationAction::Patch { set, .. } => format!("a fix of the curated set `{set}`"),
            _ => "a mitigation that needs no patch".to_owned(),
        }
    }

    /// Returns true if the mitigation applies to this backend.
    pub fn is_for(&self, backend: &str) -> bool {
        self.backends.is_empty() || self.backends.iter().any(|own| own == backend)
    }

    /// State in a build: needed, superseded or harmful; `None` if unknown. The source is better evidence than
    /// the build's number.
    pub fn state_in(&self, build: Option<u32>, source: &[(String, FixStanding)]) -> Option<FixStanding> {
        let seen = source.iter().find(|(fix, _)| *fix == self.id).map(|(_, standing)| standing.clone());
        seen.or_else(|| FixStanding::from_life(&self.life, &InspectedRevision { build, probes: None }))
    }

    /// Formats the mitigation's id with a placeholder for its value, for a table.
    pub fn usage(&self) -> String {
        let Some(value) = &self.value else { return self.id.clone() };
        let what = value.kind.placeholder();
        if value.default.is_some() { format!("{}[={what}]", self.id) } else { format!("{}={what}", self.id) }
    }

    /// Describes in one line the variables, flags or builds of the mitigation.
    pub fn how(&self) -> String {
        match &self.action {
            MitigationAction::Patch { set, variable: Some(name), .. } => {
                format!("patch set {set}; the variable {name}")
            }
            MitigationAction::Patch { set, variable: None, .. } => format!("patch set {set}"),
            MitigationAction::Variable { name, fixed, presence } => {
                let value = fixed.as_deref().unwrap_or("VALUE");
                let presence = if *presence { "; it acts by being present, whatever its value" } else { "" };
                format!("the variable {name}={value}{presence}")
            }
            MitigationAction::Unset { names, .. } => {
                format!("removes {} from what the process inherits", names.join(", "))
            }
            MitigationAction::Flags { flags } => {
                let all = flags.iter().map(|flag| {
                    let value = flag.value.as_deref().map(|value| value.replace("{}", "VALUE"));
                    std::iter::once(flag.write.clone()).chain(value).collect::<Vec<_>>().join(" ")
                });
                format!("llama-server's `{}`", all.collect::<Vec<_>>().join(" "))
            }
            MitigationAction::BuildOption { name, setting } => format!("a build with -D{name}={setting}"),
        }
    }
}
