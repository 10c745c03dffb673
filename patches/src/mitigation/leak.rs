//! A leak, or a behaviour that looks like one: its symptoms, affected builds, and cures.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::entry::LeakMemory;
use crate::builds::format_range;
use crate::set::FixEvidence;

/// A known case of growing memory, real or apparent.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct KnownLeak {
    /// Id of the leak.
    pub id: String,
    /// Description in one line.
    pub title: String,
    /// Actual nature of the growth.
    pub kind: LeakKind,
    /// Growing memories.
    pub memory: Vec<LeakMemory>,
    /// Affected backends; empty: all.
    #[serde(default)]
    pub backends: Vec<String>,
    /// First affected build; empty: unknown.
    #[serde(default)]
    pub first: String,
    /// Last affected build; empty: still open, or unknown.
    #[serde(default)]
    pub last: String,
    /// Details about the affected builds, in words.
    #[serde(default)]
    pub range: String,
    /// Symptom.
    pub symptom: String,
    /// Upstream's state.
    #[serde(default)]
    pub upstream: String,
    /// Cures, best first.
    pub cures: Vec<LeakCure>,
    /// Way to distinguish this leak from other leaks.
    #[serde(default)]
    pub detect: String,
    /// Signs by which the program detects the leak; empty: not detectable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signs: Vec<LeakSign>,
    /// Measurements.
    #[serde(default)]
    pub evidence: Vec<FixEvidence>,
    /// Links to reports and changes.
    pub references: Vec<String>,
    /// Confidence in this description.
    pub confidence: String,
}

/// Actual nature of an apparent leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeakKind {
    /// Memory that is never returned.
    Leak,
    /// A cache that fills up to a configured size.
    Cache,
    /// A constant amount.
    Overhead,
    /// A short peak that is not reserved in advance.
    Peak,
    /// An artefact of the measurement.
    Monitoring,
    /// No growth: a crash, a hang, a wrong answer, or builds to avoid.
    Defect,
    /// A diagnostic method.
    Diagnostic,
    /// No leak was found.
    NoneFound,
}

impl LeakKind {
    /// Returns true if memory grows with work. Only these kinds can explain growth.
    pub fn grows(self) -> bool {
        matches!(self, Self::Leak | Self::Cache)
    }
}

/// Pattern of a leak in the readings of a server.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LeakSign {
    /// Memories that all have to grow.
    pub grows: Vec<LeakMemory>,
    /// Memories that must not grow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub still: Vec<LeakMemory>,
    /// Units of work of which one must be blamed: `request`, `image`, `hour` and others. Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub units: Vec<String>,
    /// Flags of llama-server (`-md`, `-sm tensor`) of which the command must have one. Empty: any command.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
    /// Active mitigations that exclude this leak.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unless: Vec<String>,
    /// Likelihood if everything matches, 0 to 1.
    pub confidence: f64,
}

pub(super) const WORK_UNITS: [&str; 6] =
    ["request", "prompt_token", "output_token", "image", "audio", "hour"];

impl fmt::Display for LeakSign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names =
            |all: &[LeakMemory], and: &str| all.iter().map(|one| one.name()).collect::<Vec<_>>().join(and);
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

/// A cure: exactly one field except `note` is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeakCure {
    /// Id of a mitigation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mitigation: Option<String>,
    /// Upgrade to this build or a later one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<String>,
    /// True if the cure is a new process, which llama-warden's policy starts.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub restart: bool,
    /// Quantity to monitor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor: Option<String>,
    /// Other advice in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Remark.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
}

impl LeakCure {
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

    /// Formats the cure in a few words, for a table.
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

impl fmt::Display for LeakCure {
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

impl KnownLeak {
    /// Range of affected builds; empty: see [`Self::range`].
    pub fn builds(&self) -> String {
        format_range(&self.first, &self.last)
    }

    /// Returns true if the leak occurs with this backend.
    pub fn is_for(&self, backend: &str) -> bool {
        self.backends.is_empty() || self.backends.iter().any(|own| own == backend)
    }
}
