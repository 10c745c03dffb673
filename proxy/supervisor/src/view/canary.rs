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
    /// The canary is over; all requests go to the model's own build.
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

/// A canary: a trial of another build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CanaryView {
    /// Model whose build it may replace.
    pub model: ModelName,
    /// Name under which the canary's processes, events and metrics appear.
    pub name: ModelName,
    /// State of the canary.
    pub state: CanaryState,
    /// Path of its binary.
    pub binary: PathBuf,
    /// Id of its build in the store, if it is in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
    /// Share of the model's conversations that the canary gets; `None` only in entries of earlier versions.
    pub share: Option<f64>,
    /// Start time, RFC 3339.
    pub began_at: String,
    /// Duration in seconds, until the canary's end or, if it still runs, until now.
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
    /// Entry number; all kinds of ledger entries share one counter.
    pub id: u64,
    /// End time, RFC 3339.
    pub at: String,
    /// The canary. Its fields are part of the entry, so `model` is the model whose build it may replace.
    #[serde(flatten)]
    pub canary: CanaryView,
}
