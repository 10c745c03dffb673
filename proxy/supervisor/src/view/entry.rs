//! Ledger lines about reclaims, canaries and pins, which are also parts of events and views.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use warden_policies::canary::{CanaryReport, CanaryVerdict};
use warden_policies::reclaim::{ReclaimOutcome, ReclaimedBytes};
use warden_policies::sample::{HostMemory, MemoryKind, VramReading};
use warden_policies::{ByteSize, GenerationId, ModelName, Reason};

/// `kind` of a ledger line about a reclaim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReclaimKind {
    /// A process was asked to give memory back.
    #[default]
    Reclaim,
}

/// Ledger entry for a request to a process to give memory back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReclaimEntry {
    /// Always `reclaim`.
    pub kind: ReclaimKind,
    /// Entry number; all ledger entries share one counter.
    pub id: u64,
    /// Time of completion, RFC 3339.
    pub at: String,
    /// Model.
    pub model: ModelName,
    /// Number of the replica, from 0.
    pub replica: u32,
    /// Generation of the process, which continues to serve.
    pub generation: GenerationId,
    /// Reason for the request.
    pub reason: Reason,
    /// Kind of memory that was the reason; absent if an operator asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<MemoryKind>,
    /// Budget that is exceeded or near, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget_bytes: Option<u64>,
    /// Overall outcome.
    pub outcome: ReclaimOutcome,
    /// Outcome for the heap; absent if the process could not be asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heap: Option<ReclaimOutcome>,
    /// Outcome for CUDA graphs, memory pools and cuBLAS; absent if they could not be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<ReclaimOutcome>,
    /// Memory given back in bytes, as counted by the process.
    pub given: ReclaimedBytes,
    /// Milliseconds that the process needed to give memory back.
    pub ms: u64,
    /// Host memory at the last reading before the request.
    pub host_before: Option<HostMemory>,
    /// Host memory at the first reading after the answer.
    pub host_after: Option<HostMemory>,
    /// VRAM per GPU at the last reading before the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_before: Vec<VramReading>,
    /// VRAM per GPU at the first reading after the answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_after: Vec<VramReading>,
    /// True if the memory shrank far enough; `None` if an operator asked, or the result is unknown.
    pub helped: Option<bool>,
    /// Operator who requested the reclaim, if known: `page, 127.0.0.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl ReclaimEntry {
    /// Creates an entry with default values.
    pub fn new(model: ModelName, replica: u32, generation: GenerationId, reason: Reason) -> Self {
        Self {
            kind: ReclaimKind::Reclaim,
            id: 0,
            at: String::new(),
            model,
            replica,
            generation,
            reason,
            series: None,
            budget_bytes: None,
            outcome: ReclaimOutcome::NoAnswer,
            heap: None,
            cuda: None,
            given: ReclaimedBytes::default(),
            ms: 0,
            host_before: None,
            host_after: None,
            vram_before: Vec::new(),
            vram_after: Vec::new(),
            helped: None,
            by: None,
        }
    }

    /// Description in a sentence, for people.
    pub fn sentence(&self) -> String {
        let bytes = |host: Option<HostMemory>| host.map(|host| ByteSize(host.charged()));
        let mut text = format!("{}: {} given back in {} ms", self.outcome.phrase(), self.given, self.ms);
        if let (Some(before), Some(after)) = (bytes(self.host_before), bytes(self.host_after)) {
            text.extend([format!("; host memory {before} before, {after} after")]);
        }
        for after in &self.vram_after {
            if let Some(before) = self.vram_before.iter().find(|before| before.gpu == after.gpu) {
                let before = ByteSize(before.bytes);
                let gpu = after.gpu.0;
                text.extend([format!("; GPU {gpu} {before} before, {} after", ByteSize(after.bytes))]);
            }
        }
        let parts = [("the heap", self.heap), ("graphs, pools and cuBLAS", self.cuda)];
        for (name, outcome) in parts {
            if let Some(outcome) = outcome.filter(|outcome| *outcome != self.outcome) {
                text.extend([format!("; {name}: {}", outcome.phrase())]);
            }
        }
        text
    }
}

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
    /// Share of the model's conversations for the canary; `None` only in entries of earlier versions.
    pub share: Option<f64>,
    /// Start time, RFC 3339.
    pub began_at: String,
    /// Duration in seconds so far.
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
    /// Entry number; all ledger entries share one counter.
    pub id: u64,
    /// End time, RFC 3339.
    pub at: String,
    /// The canary, whose fields are part of the entry.
    #[serde(flatten)]
    pub canary: CanaryView,
}

/// `kind` of a ledger line about a pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PinKind {
    /// An operator pinned or unpinned a model.
    #[default]
    Pin,
}

/// Ledger entry for an operator's pin command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinEntry {
    /// Always `pin`.
    pub kind: PinKind,
    /// Entry number; all ledger entries share one counter.
    pub id: u64,
    /// Time, RFC 3339.
    pub at: String,
    /// Model.
    pub model: ModelName,
    /// True: the model is never unloaded for another one. False: it may be, despite its configuration.
    pub pinned: bool,
    /// Value of `pin` in the configuration.
    pub configured: bool,
    /// Operator who gave the command, as far as known: `page, 127.0.0.1`.
    pub by: String,
}

impl PinEntry {
    /// Description in a sentence, for people.
    pub fn sentence(&self) -> String {
        let what = if self.pinned {
            "pinned: never unloaded for another model"
        } else {
            "may be unloaded for another model"
        };
        let against = if self.pinned == self.configured { "" } else { ", against its configuration" };
        format!("{what}{against} (by {})", self.by)
    }
}

/// Pin state of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinView {
    /// The model is never unloaded for another one.
    pub pinned: bool,
    /// Operator who set the pin; `None` if the configuration decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::ledger::{LedgerEntry, ReplacementMode};

    #[test]
    fn a_line_about_a_reclaim_is_told_from_one_about_a_replacement() {
        let entry = ReclaimEntry::new(ModelName::new("m"), 0, GenerationId(3), Reason::Operator);
        let line = serde_json::to_string(&entry).unwrap();
        assert!(line.starts_with(r#"{"kind":"reclaim","id":0,"#), "{line}");
        assert_eq!(serde_json::from_str::<ReclaimEntry>(&line).unwrap(), entry);
        assert!(serde_json::from_str::<LedgerEntry>(&line).is_err());
        for absent in ["series", "budget_bytes", "heap\":\"", "vram_before"] {
            assert!(!line.contains(absent), "nothing known, nothing written: {line}");
        }
        let of_replacement =
            LedgerEntry::new(ModelName::new("m"), 0, Reason::Operator, ReplacementMode::Sequential);
        let line = serde_json::to_string(&of_replacement).unwrap();
        assert!(serde_json::from_str::<ReclaimEntry>(&line).is_err(), "{line}");
    }

    #[test]
    fn a_line_about_a_pin_is_told_from_all_others_and_says_what_it_overrules() {
        let entry = PinEntry {
            kind: PinKind::Pin,
            id: 3,
            at: "2026-01-02T03:04:05.678Z".to_owned(),
            model: ModelName::new("m"),
            pinned: true,
            configured: false,
            by: "page, 127.0.0.1".to_owned(),
        };
        let line = serde_json::to_string(&entry).unwrap();
        assert_eq!(serde_json::from_str::<PinEntry>(&line).unwrap(), entry);
        assert!(serde_json::from_str::<LedgerEntry>(&line).is_err());
        assert!(serde_json::from_str::<ReclaimEntry>(&line).is_err());
        let other = PinEntry { pinned: false, ..entry.clone() };
        insta::assert_snapshot!(format!("{}\n{}", entry.sentence(), other.sentence()), @r"
        pinned: never unloaded for another model, against its configuration (by page, 127.0.0.1)
        may be unloaded for another model (by page, 127.0.0.1)
        ");
    }
}
