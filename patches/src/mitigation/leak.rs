//! A leak, or what looks like one: how it is noticed, which builds have it, what cures it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::entry::{Memory, range};
use crate::set::Evidence;

/// Memory that grows, or seems to.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Leak {
    /// Its name.
    pub id: String,
    /// One line for people.
    pub title: String,
    /// What it really is.
    pub kind: LeakKind,
    /// The memory that grows.
    pub memory: Vec<Memory>,
    /// Backends that have it; empty: all.
    #[serde(default)]
    pub backends: Vec<String>,
    /// The first build that has it; empty: unknown.
    #[serde(default)]
    pub first: String,
    /// The last build that has it; empty: still open, or unknown.
    #[serde(default)]
    pub last: String,
    /// More about the range, in words.
    #[serde(default)]
    pub range: String,
    /// How it is noticed.
    pub symptom: String,
    /// What upstream did.
    #[serde(default)]
    pub upstream: String,
    /// What helps, best first.
    pub cures: Vec<Cure>,
    /// How it is told from others.
    #[serde(default)]
    pub detect: String,
    /// How a program recognizes it; none: it cannot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signs: Vec<Sign>,
    /// What was measured.
    #[serde(default)]
    pub evidence: Vec<Evidence>,
    /// Reports and changes.
    pub references: Vec<String>,
    /// How sure it is.
    pub confidence: String,
}

/// What it really is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeakKind {
    /// Memory that does not come back.
    Leak,
    /// A cache that fills up to a declared size.
    Cache,
    /// A constant amount.
    Overhead,
    /// A short need that nothing has reserved.
    Peak,
    /// A matter of how one looks.
    Monitoring,
    /// No growth: a crash, a wedge, a wrong answer, or builds to stay away from.
    Defect,
    /// A way to look.
    Diagnostic,
    /// Searched for, not found.
    NoneFound,
}

impl LeakKind {
    /// Whether memory grows with work. Growth is never put down to anything else.
    pub fn grows(self) -> bool {
        matches!(self, Self::Leak | Self::Cache)
    }
}

/// What a leak looks like in the readings of one server.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Sign {
    /// Memories that grow, all of them.
    pub grows: Vec<Memory>,
    /// Memories that do not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub still: Vec<Memory>,
    /// Units of work of which one pays (`request`, `prompt_token`, `output_token`, `image`, `audio`, `hour`); none: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub units: Vec<String>,
    /// Flags of llama-server of which one has to be given, alone (`-md`) or with a value (`-sm tensor`); none: any
    /// command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
    /// Mitigations with which it is something else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unless: Vec<String>,
    /// How sure it is when all of that fits, 0 to 1.
    pub confidence: f64,
}

/// Units of work as a sign names them.
pub(super) const UNITS: [&str; 6] = ["request", "prompt_token", "output_token", "image", "audio", "hour"];

impl fmt::Display for Sign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names =
            |all: &[Memory], and: &str| all.iter().map(|one| one.name()).collect::<Vec<_>>().join(and);
        write!(f, "{} grow{}", names(&self.grows, " and "), if self.grows.len() == 1 { "s" } else { "" })?;
        if !self.still.is_empty() {
            write!(f, ", {} does not", names(&self.still, " and "))?;
        }
        if !self.units.is_empty() {
            write!(f, ", by {}", self.units.join(" or ").replace('_', " "))?;
        }
        if !self.flags.is_empty() {
            write!(f, ", with {}", self.flags.join(" or "))?;
        }
        if !self.unless.is_empty() {
            write!(f, ", without {}", self.unless.join(", "))?;
        }
        write!(f, " ({:.0} %)", self.confidence * 100.0)
    }
}

/// What helps: exactly one of the fields but `note` is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cure {
    /// A mitigation of the list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mitigation: Option<String>,
    /// This build or a later one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<String>,
    /// A new process, which llama-warden's policy sees to.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub restart: bool,
    /// What to watch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor: Option<String>,
    /// Something else, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// More about it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl Cure {
    /// Whether exactly one thing is said.
    pub(super) fn is_one_thing(&self) -> bool {
        let said = [
            self.mitigation.is_some(),
            self.upgrade.is_some(),
            self.restart,
            self.monitor.is_some(),
            self.advice.is_some(),
        ];
        said.iter().filter(|said| **said).count() == 1
    }

    /// In a word or two, for a table.
    pub fn short(&self) -> String {
        match self {
            Self { mitigation: Some(id), .. } => id.clone(),
            Self { upgrade: Some(build), .. } => format!("upgrade to {build}"),
            Self { restart: true, .. } => "restart".to_owned(),
            Self { monitor: Some(_), .. } => "monitor".to_owned(),
            _ => "advice".to_owned(),
        }
    }
}

impl fmt::Display for Cure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { mitigation: Some(id), .. } => f.write_str(id)?,
            Self { upgrade: Some(build), .. } => write!(f, "upgrade to {build} or later")?,
            Self { restart: true, .. } => f.write_str("restart (`policy` of the model)")?,
            Self { monitor: Some(what), .. } => write!(f, "watch: {what}")?,
            Self { advice, .. } => f.write_str(advice.as_deref().unwrap_or_default())?,
        }
        if self.note.is_empty() { Ok(()) } else { write!(f, " ({})", self.note) }
    }
}

impl Leak {
    /// The builds that have it, in short; empty: see [`Self::range`].
    pub fn builds(&self) -> String {
        range(&self.first, &self.last)
    }

    /// Whether it has to do with this backend.
    pub fn is_for(&self, backend: &str) -> bool {
        self.backends.is_empty() || self.backends.iter().any(|own| own == backend)
    }
}
