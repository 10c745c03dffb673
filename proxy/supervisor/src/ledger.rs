//! The record of replacements: one JSON line each, appended to `ledger.jsonl` in the state directory.

use serde::{Deserialize, Serialize};
use warden_policies::sample::HostMemory;
use warden_policies::{GenerationId, ModelName, Reason, Work};

/// The way a generation was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Drain, stop, start.
    Sequential,
    /// Start, switch, drain, stop.
    Overlap,
}

impl Mode {
    /// The name in the ledger, events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Overlap => "overlap",
        }
    }
}

/// What was known when the replacement was decided.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// Host memory charged to the old generation, in bytes.
    pub host_bytes: Option<u64>,
    /// The budget that was passed, in bytes.
    pub budget_bytes: Option<u64>,
    /// Requests that it had answered.
    pub requests: u64,
    /// All work that it had done.
    pub work: Work,
    /// Seconds since it became ready.
    pub age_s: f64,
    /// Why the replacement took its way, for people.
    pub note: Option<String>,
}

/// One replacement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Grows with every entry of one run of the supervisor, from 1.
    pub id: u64,
    /// When it was complete, RFC 3339.
    pub at: String,
    /// The model.
    pub model: ModelName,
    /// Which of its replicas.
    pub replica: u32,
    /// Why.
    pub reason: Reason,
    /// On what grounds.
    pub evidence: Evidence,
    /// In which way.
    pub mode: Mode,
    /// The old generation; `None` if none ran.
    pub from: Option<GenerationId>,
    /// The new generation; `None` if it did not come to serve.
    pub to: Option<GenerationId>,
    /// Requests that waited in the queue while no generation took leases, and went to the new one.
    pub carried_over: u64,
    /// Requests that were running when the old generation was closed, and ended by themselves before it was stopped.
    pub drained: u64,
    /// Requests that were still running at the drain deadline and were cut.
    pub cut: u64,
    /// Milliseconds in which no generation of the model took leases. 0 in a successful overlap.
    pub gap_ms: u64,
    /// Milliseconds from closing the old generation to its last request's end.
    pub drain_ms: u64,
    /// Milliseconds from the new process's creation to its first good probe.
    pub start_ms: Option<u64>,
    /// Host memory of the old generation at its last sample.
    pub host_before: Option<HostMemory>,
    /// Host memory of the new generation when it had become ready.
    pub host_after: Option<HostMemory>,
    /// For replacements because of memory: whether the new generation holds clearly less and is under the budget.
    pub helped: Option<bool>,
    /// Why it did not succeed; `None` if it did.
    pub failed: Option<String>,
}
