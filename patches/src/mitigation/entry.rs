//! One thing that can be done.

use serde::{Deserialize, Serialize};

use super::value::ValueSpec;
use crate::set::life::{Life, Looked, Standing};
use crate::set::{Evidence, Upstream};

/// One thing that can be done about memory, or about a defect that a patch set cures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mitigation {
    /// Its name, as the configuration writes it.
    pub id: String,
    /// One line for people.
    pub title: String,
    /// What it does.
    pub text: String,
    /// How it is done.
    #[serde(flatten)]
    pub action: Action,
    /// What it takes after `=`; none: nothing.
    pub value: Option<ValueSpec>,
    /// Further variables of a fix, each switched on by `<id>.<part>=<value>`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// For a fix of a set of the user's own: where it was read. None: it is part of this program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own: Option<String>,
    /// The memory that it is about.
    pub memory: Vec<Memory>,
    /// The backends that it is for; empty: all.
    pub backends: Vec<String>,
    /// The first build that understands it, or has the defect that a fix cures, such as `b8852`; empty: unknown or all.
    pub first: String,
    /// The last such build; empty: the newest.
    pub last: String,
    /// What it costs.
    pub cost: String,
    /// What could go wrong.
    pub risk: String,
    /// How sure it is.
    pub confidence: String,
    /// What was measured.
    pub evidence: Vec<Evidence>,
    /// Reports and changes.
    pub references: Vec<String>,
    /// In which revisions it is needed, superseded or harmful, and what says so.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub life: Vec<Life>,
    /// For a fix: what upstream did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<Upstream>,
    /// The leaks that it cures, by id; and the symptom that a fix names itself.
    pub cures: Vec<String>,
    /// How one notices what it cures.
    pub symptoms: Vec<String>,
}

/// How something is done.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Action {
    /// A fix of a patch set, switched on by a variable.
    Patch {
        /// The set.
        set: String,
        /// The variable.
        variable: Option<String>,
        /// Text that a binary with this fix contains; may be empty.
        marker: String,
    },
    /// An environment variable.
    Variable {
        /// Its name.
        name: String,
        /// Its fixed value; none: the one that is given.
        fixed: Option<String>,
        /// Whether it acts by being present, whatever its value.
        presence: bool,
    },
    /// Variables that must not be inherited.
    Unset {
        /// Their names.
        names: Vec<String>,
        /// Flags of llama-server that would do the same.
        flags: Vec<String>,
    },
    /// Flags of llama-server.
    Flags {
        /// All of them.
        flags: Vec<Flag>,
    },
    /// An option of the build.
    BuildOption {
        /// Its name.
        name: String,
        /// Its value.
        setting: String,
    },
}

impl Action {
    /// One word for tables.
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
pub struct Flag {
    /// The flag that is written.
    pub write: String,
    /// The word after it: fixed, or `{}` for the value that is given; none: it takes none.
    #[serde(default)]
    pub value: Option<String>,
    /// Everything that says the same or the opposite on a command line.
    pub names: Vec<String>,
    /// Variables that llama-server reads for it.
    #[serde(default)]
    pub variables: Vec<String>,
}

/// A further variable of a fix.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// Its name behind the dot.
    pub name: String,
    /// The variable.
    pub variable: String,
    /// What it takes; none: it is on or off.
    pub value: Option<ValueSpec>,
    /// What it does.
    pub text: String,
}

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Memory {
    /// The process's own memory.
    Host,
    /// The GPU's.
    Vram,
    /// Memory that belongs to no process any more.
    Kernel,
}

impl Memory {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Vram => "vram",
            Self::Kernel => "kernel",
        }
    }
}

/// `b8832..b10587`, `to b8862`, `from b8832`, or nothing when neither end is known.
pub(super) fn range(first: &str, last: &str) -> String {
    match (first, last) {
        ("", "") => String::new(),
        ("", last) => format!("to {last}"),
        (first, "") => format!("from {first}"),
        (first, last) => format!("{first}..{last}"),
    }
}

impl Mitigation {
    /// The builds that it is for, in short; empty: all, or unknown.
    pub fn builds(&self) -> String {
        range(&self.first, &self.last)
    }

    /// What it is, in a sentence about somebody else: ``the fix of the set `cuda-memory` ``.
    pub(super) fn of(&self) -> String {
        match &self.action {
            Action::Patch { set, .. } if self.own.is_some() => format!("a fix of the set `{set}`"),
            Action::Patch { set, .. } => format!("a fix of the curated set `{set}`"),
            _ => "a mitigation that needs no patch".to_owned(),
        }
    }

    /// Whether it has to do with this backend.
    pub fn is_for(&self, backend: &str) -> bool {
        self.backends.is_empty() || self.backends.iter().any(|own| own == backend)
    }

    /// Whether it is needed in a build, superseded or harmful there; `None`: nothing is known of that. What the build's
    /// provenance says of its source counts before its number.
    pub fn standing(&self, build: Option<u32>, source: &[(String, Standing)]) -> Option<Standing> {
        let seen = source.iter().find(|(fix, _)| *fix == self.id).map(|(_, standing)| standing.clone());
        seen.or_else(|| Standing::of(&self.life, &Looked { build, probes: None }))
    }

    /// What it takes after `=`, in short, for a table.
    pub fn usage(&self) -> String {
        let Some(value) = &self.value else { return self.id.clone() };
        let what = value.kind.placeholder();
        if value.default.is_some() { format!("{}[={what}]", self.id) } else { format!("{}={what}", self.id) }
    }
}
