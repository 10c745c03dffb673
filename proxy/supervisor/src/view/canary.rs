//! What is shown and kept of a canary: another build of llama-server that is tried beside the one of a model.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use warden_policies::ModelName;
use warden_policies::canary::{Report, Verdict};

/// Where a canary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryState {
    /// Its process starts; it gets nothing yet.
    Starting,
    /// It is tried.
    Running,
    /// It is over; clients meet the model's own build alone.
    Ended,
}

impl CanaryState {
    /// The word in status and metrics.
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
    /// The model whose place it is to take.
    pub model: ModelName,
    /// Under which name its processes, events and metrics stand.
    pub name: ModelName,
    /// Where it is.
    pub state: CanaryState,
    /// Its binary.
    pub binary: PathBuf,
    /// Its build in the store, if it is one of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
    /// The share of conversations that it gets; `None` only in entries of earlier versions.
    pub share: Option<f64>,
    /// When it began, RFC 3339.
    pub began_at: String,
    /// Seconds since then, until its end if it has one.
    pub seconds: f64,
    /// When it ended, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
    /// What is made of it.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// What both builds did meanwhile.
    pub report: Report,
}

/// The `kind` of a line of the ledger about a canary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryKind {
    /// A canary has ended.
    #[default]
    Canary,
}

/// A canary that has ended, as the ledger has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CanaryEntry {
    /// Always `canary`.
    pub kind: CanaryKind,
    /// Of the same numbers as those of replacements.
    pub id: u64,
    /// When it was over, RFC 3339.
    pub at: String,
    /// All of it. The `model` of the entry is the one of the canary.
    #[serde(flatten)]
    pub canary: CanaryView,
}
