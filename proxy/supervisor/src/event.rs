//! What happens, as typed events: kept in a ring for late listeners and sent to those who listen.

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use warden_policies::restraint::Held;
use warden_policies::{Decision, GenerationId, ModelName, Reason};

use crate::fleet::ApplyReport;
use crate::ledger::{LedgerEntry, Mode};
use crate::view::Failure;

/// Something that happened. As JSON it is one flat object with `id`, `at`, `kind` and what belongs to the kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Grows with every event, from 1.
    pub id: u64,
    /// When, RFC 3339.
    pub at: String,
    /// The model concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelName>,
    /// The generation concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationId>,
    /// What happened.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum EventKind {
    /// A process was created.
    Starting {
        /// Its process id.
        pid: u32,
        /// Which replica.
        replica: u32,
    },
    /// It serves requests.
    Ready {
        /// Milliseconds since its creation.
        start_ms: u64,
        /// Slots that it reported.
        slots: Option<u32>,
    },
    /// Probes are lost: it gets no new requests.
    Suspect,
    /// Probes are answered again.
    Recovered,
    /// It gets no new requests and ends when the running ones have.
    Draining {
        /// Requests running.
        in_flight: u32,
    },
    /// It ended as it was told to.
    Stopped {
        /// How, in words: `exit code 0`.
        exit: String,
    },
    /// It ended by itself, or could not be created.
    Crashed {
        /// Why.
        failure: Failure,
    },
    /// The next start waits.
    Backoff {
        /// For this many milliseconds.
        delay_ms: u64,
        /// After this many failures in a row.
        failures: u32,
    },
    /// It failed too often and stays down.
    Failed {
        /// The last failure.
        failure: Failure,
    },
    /// The policy wants it replaced at the next quiet moment.
    RecycleWanted {
        /// The decision.
        decision: Decision,
        /// Host memory charged to it, in bytes.
        host_bytes: Option<u64>,
    },
    /// A replacement is due and held back.
    RecycleHeld {
        /// The decision.
        decision: Decision,
        /// By what.
        held: Held,
        /// The same in words.
        message: String,
    },
    /// A replacement began.
    RecycleBegan {
        /// Why.
        reason: Reason,
        /// In which way.
        mode: Mode,
        /// Why in this way.
        note: Option<String>,
    },
    /// A replacement is complete, or has failed.
    RecycleDone {
        /// Its entry in the ledger.
        entry: Box<LedgerEntry>,
    },
    /// Replacements did not help, so recycling by policy is off.
    PolicyOff {
        /// What to do, in words.
        message: String,
    },
    /// A configuration was taken over.
    ConfigApplied {
        /// What changed.
        report: ApplyReport,
    },
    /// The queue became full. Told once, until there is room again.
    QueueFull {
        /// Callers waiting.
        waiting: usize,
    },
}

/// The events so far and those to come.
#[derive(Debug)]
pub struct EventTail {
    /// Those kept, oldest first.
    pub events: Vec<Event>,
    /// The next ones, with none missing in between.
    pub receiver: broadcast::Receiver<Event>,
}
