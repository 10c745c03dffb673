//! View and ledger entry of a canary: another build of llama-server that is tried next to a model's own.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use warden_policies::ModelName;
use warden_policies::canary::{CanaryReport, CanaryVerdict};

/// State of a canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryState {
    /// The process starts; it gets no requests yet.
    Starting,
    /// The canary gets requests.
    Running,
    /// The canary is over; clients use the model's own build alone.
    Ended,
}

impl CanaryState {
    /// Name in status and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Ended => "ended",
        }
    }
}

/// A canary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CanaryView {
    /// Model whose build it may replace.
    pub model: ModelName,
    /// Name of its processes, events and metrics.
    pub name: ModelName,
    /// State.
    pub state: CanaryState,
    /// Path of its binary.
    pub binary: PathBuf,
    /// Id of its build in the store, if it is in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
    /// Share of conversations that it gets; `None` only in entries of earlier versions.
    pub share: Option<f64>,
    /// Start time, RFC 3339.
    pub began_at: String,
    /// Duration in seconds, until its end or now.
    pub seconds: f64,
    /// End time, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
    /// Verdict of the trial.
    #[serde(flatten)]
    pub verdict: CanaryVerdict,
    /// Results of both builds.
    pub report: CanaryReport,
}

/// `kind` of a ledger line about a canary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryKind {
    /// A canary has ended.
    #[default]
    Canary,
}

/// Ledger entry of a canary that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CanaryEntry {
    /// Always `canary`.
    pub kind: CanaryKind,
    /// Entry number, counted together with replacements.
    pub id: u64,
    /// End time, RFC 3339.
    pub at: String,
    /// The canary. The `model` of the entry is its model.
    #[serde(flatten)]
    pub canary: CanaryView,
}
