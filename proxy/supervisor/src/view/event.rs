//! Typed events. A ring keeps past events for later listeners.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use warden_policies::cooldown::HoldReason;
use warden_policies::growth::{GrowthVerdict, SeriesGrowth};
use warden_policies::quarantine::RequestFingerprint;
use warden_policies::sample::GpuIndex;
use warden_policies::start_search::StartFinding;
use warden_policies::warmth::{NoFileReason, WarmthReport};
use warden_policies::{GenerationId, ModelName, Reason, RecycleDecision};

use crate::clock;
use crate::error::{BackendFailure, NoRoom};
use crate::sync::lock;
use crate::view::entry::{CanaryEntry, PinEntry, ReclaimEntry};
use crate::view::ledger::{LedgerEntry, ReplacementMode};
use crate::view::log::MAX_LISTENER_LAG;

/// Result of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplyReport {
    /// New models.
    pub added: Vec<ModelName>,
    /// Models that drain and stop.
    pub removed: Vec<ModelName>,
    /// Models whose processes are replaced because the command changed.
    pub restarted: Vec<ModelName>,
    /// Models whose settings changed without a replacement of their processes.
    pub updated: Vec<ModelName>,
    /// Models that did not change.
    pub unchanged: Vec<ModelName>,
    /// Settings that need a restart of the supervisor to take effect.
    pub needs_restart: Vec<String>,
    /// Changed keys of the configuration, also of models that existed before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<String>,
}

/// An event. The JSON is one flat object with `id`, `at`, `kind` and the fields of the kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetEvent {
    /// Sequence number, from 1.
    pub id: u64,
    /// Time, RFC 3339.
    pub at: String,
    /// Model that the event is about, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelName>,
    /// Generation that the event is about, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationId>,
    /// Kind of event, with its fields.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// Kind of event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum EventKind {
    /// A process was created.
    Starting {
        /// PID.
        pid: u32,
        /// Replica that the process serves, from 0.
        replica: u32,
    },
    /// This instance of the program has taken over the process.
    TakenOver {
        /// PID.
        pid: u32,
        /// Number of the replica, from 0.
        replica: u32,
    },
    /// The process serves requests.
    Ready {
        /// Milliseconds since its creation.
        start_ms: u64,
        /// Number of slots that the process reported.
        slots: Option<u32>,
    },
    /// The process may be dead. It gets no new requests before it answers a probe.
    Suspect {
        /// True: the process refused or broke a connection. False: it does not answer its probes.
        #[serde(default)]
        refused: bool,
        /// Crash message logged since the last answered probe.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        crash: Option<String>,
    },
    /// The process answers probes again.
    Recovered,
    /// The process gets no new requests, and ends after its running requests.
    Draining {
        /// Running requests.
        in_flight: u32,
    },
    /// The model had no requests and is unloaded; its next request loads it again.
    Unloaded {
        /// The model's `ttl` in milliseconds.
        idle_ms: u64,
    },
    /// The model is unloaded for another one; its next request loads it again.
    MakesRoom {
        /// Model that needs the memory.
        wanted: ModelName,
    },
    /// With its new settings, the model does not fit into memory: it is unloaded, and loaded again when there
    /// is room.
    LoadsAnew {
        /// Needed and available memory, in words.
        message: String,
    },
    /// The model does not fit into memory as configured, and starts with its fallback arguments.
    FallsBack {
        /// The arguments and the reason, for people.
        message: String,
    },
    /// The process died repeatedly while loading: a search begins for an option with which it starts.
    StartSearchBegan {
        /// Consecutive deaths with the configured command.
        deaths: u32,
        /// Number of options to try.
        switches: usize,
    },
    /// The search for an option with which the process starts is over.
    StartSearched {
        /// Result of the search.
        finding: StartFinding,
    },
    /// The model is needed and waits for memory.
    WaitsForRoom {
        /// Needed and available memory, in words.
        message: String,
    },
    /// The process ended as requested.
    Stopped {
        /// Exit in words: `exit code 0`.
        exit: String,
    },
    /// The process ended by itself, or could not be created.
    Crashed {
        /// Reason of the end, or of the failed creation.
        failure: BackendFailure,
        /// True if an operator, a time limit or the kernel's OOM killer ended the process.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        outside: bool,
    },
    /// The next start is delayed.
    Backoff {
        /// Delay in milliseconds.
        delay_ms: u64,
        /// Consecutive failures.
        failures: u32,
    },
    /// The process cannot start until a flag or file changes. Such a change triggers the next start.
    Failed {
        /// Last failure.
        failure: BackendFailure,
    },
    /// The process has ended unexpectedly many times in a short period. It is still restarted.
    CrashLoop {
        /// Number of times that the process ended unexpectedly.
        ends: u32,
        /// Length in seconds of the period in which the process ended so often.
        within_s: u64,
        /// Last failure.
        failure: BackendFailure,
    },
    /// The policy wants the process replaced at the next quiet moment.
    RecycleWanted {
        /// Decision of the policy.
        decision: RecycleDecision,
        /// Host memory charged to the process, in bytes.
        host_bytes: Option<u64>,
        /// Bytes of the memory in `decision.series`, if any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        series_bytes: Option<u64>,
    },
    /// The policy wants a replacement, but something holds it back.
    RecycleHeld {
        /// Decision of the policy.
        decision: RecycleDecision,
        /// Reason for holding it back.
        held: HoldReason,
        /// The reason in words.
        message: String,
    },
    /// A replacement began.
    RecycleBegan {
        /// Reason for the replacement.
        reason: Reason,
        /// Replacement mode.
        mode: ReplacementMode,
        /// Reason for choosing this mode.
        note: Option<String>,
    },
    /// A replacement is complete, or has failed.
    RecycleDone {
        /// Ledger entry.
        entry: Box<LedgerEntry>,
    },
    /// A process was asked to give memory back; it continues to serve.
    Reclaimed {
        /// Ledger entry.
        entry: Box<ReclaimEntry>,
    },
    /// An unloaded model is loaded again, with its conversations.
    CameBack {
        /// Conversations carried over so far. A later `warmed` event reports the remaining prompts.
        warmth: WarmthReport,
    },
    /// The conversations of an ending process were saved to disk (`warm = "disk"`), or could not be.
    ConversationsStored {
        /// Number of the process's conversations on disk.
        conversations: u64,
        /// Number of these whose slot is on disk.
        slots: u64,
        /// Bytes written by this save.
        bytes: u64,
        /// Milliseconds spent saving.
        took_ms: u64,
        /// Reason why slots are missing.
        #[serde(skip_serializing_if = "Option::is_none")]
        no_file: Option<NoFileReason>,
        /// Reason why they could not be saved.
        #[serde(skip_serializing_if = "Option::is_none")]
        failed: Option<String>,
    },
    /// Prompts that a replacement left for later were evaluated or dropped.
    Warmed {
        /// Result for these prompts, which the ledger entry counts as due.
        warmth: WarmthReport,
    },
    /// The growth verdict on one kind of memory has changed.
    Verdict {
        /// Kind of memory, new verdict, growth rate, and the work that causes the growth.
        growth: Box<SeriesGrowth>,
        /// Previous verdict.
        before: GrowthVerdict,
        /// Requests answered by the generation so far.
        request: u64,
        /// The change in words.
        message: String,
    },
    /// A process shows a symptom although it answers probes.
    Unwell {
        /// Symptom: `wedged`, `compute_errors`, `repeating`, `empty_answers`, `null_answers`, `altered`,
        /// `slow_decode`, `device_fault`.
        reason: Reason,
        /// Observations of the symptom, in words.
        message: String,
    },
    /// A setting made by a client (`POST /lora-adapters`, `POST /props`) could not be applied to a process.
    SettingLost {
        /// The setting, and why it could not be applied, in words.
        message: String,
    },
    /// The remote endpoint answers; requests are sent to it.
    EndpointAnswers {
        /// Address of the endpoint.
        url: String,
    },
    /// The remote endpoint does not answer, or refuses requests. Clients get an error meanwhile.
    EndpointSilent {
        /// Reason of the failure.
        failure: BackendFailure,
    },
    /// VRAM of a process is unknown, so no policy acts on its VRAM.
    VramUnknown {
        /// Reason in words.
        message: String,
    },
    /// Memory stayed in use after a process had ended. More restarts would worsen this leak of the driver.
    DriverLeak {
        /// GPU whose memory is missing; `None` for host memory.
        gpu: Option<GpuIndex>,
        /// Missing bytes.
        bytes: u64,
        /// Explanation in words.
        message: String,
    },
    /// Replacements did not help, so the policy no longer replaces the model's processes.
    PolicyOff {
        /// Advice for an operator, in words.
        message: String,
    },
    /// A canary has begun.
    CanaryBegan {
        /// Path of its binary.
        binary: std::path::PathBuf,
        /// Share of the model's conversations for the canary; `None` only in entries of earlier versions.
        share: Option<f64>,
    },
    /// A canary has ended.
    CanaryEnded {
        /// Ledger entry.
        entry: Box<CanaryEntry>,
    },
    /// An operator requested an action.
    Asked {
        /// Action, such as `restart`, `drain`, `unload`, `reclaim`, `load`, `release`, `stay` or `upgrade`.
        action: String,
        /// Operator who requested the action, as far as known: `page, 127.0.0.1`.
        by: String,
    },
    /// An operator pinned or unpinned a model.
    Pinned {
        /// Ledger entry.
        entry: Box<PinEntry>,
    },
    /// A configuration was applied.
    ConfigApplied {
        /// Changes that the configuration made.
        report: ApplyReport,
    },
    /// A prompt does not fit into the available memory.
    PromptTooLarge {
        /// Action taken: `warn` (the prompt is sent anyway), `wait`, `elsewhere`, `recycle` or `refuse`.
        action: String,
        /// Numbers of the shortage.
        #[serde(serialize_with = "NoRoom::serialize_for_event")]
        short: NoRoom,
    },
    /// A process ended by itself while it ran these requests. Each of them now runs without other requests.
    RequestsSuspected {
        /// Fingerprints of the requests.
        fingerprints: Vec<RequestFingerprint>,
    },
    /// A process ended while it ran only this request: the request is refused from now on.
    RequestQuarantined {
        /// Fingerprint of the request.
        fingerprint: RequestFingerprint,
        /// Duration of the refusal in seconds.
        seconds: u64,
    },
    /// An operator released suspected or refused requests.
    RequestsReleased {
        /// Number of requests.
        count: usize,
    },
    /// An operator cancelled a request.
    RequestCancelled {
        /// `X-Request-Id` of the request.
        request: String,
        /// Progress at that time: `queued`, `prefill`, `generating` and others.
        state: String,
        /// Operator who cancelled the request, in words.
        by: String,
    },
    /// The queue became full. Recorded again only after there was room.
    QueueFull {
        /// Number of waiting requests.
        waiting: usize,
    },
}

/// Past events, and a receiver for new ones.
#[derive(Debug)]
pub struct EventTail {
    /// Events still kept, oldest first.
    pub events: Vec<FleetEvent>,
    /// Receiver for the events after `events`, without a gap.
    pub receiver: broadcast::Receiver<FleetEvent>,
}

#[derive(Debug)]
pub(crate) struct EventJournal {
    keep: usize,
    kept: Mutex<JournalState>,
    sender: broadcast::Sender<FleetEvent>,
}

#[derive(Debug, Default)]
struct JournalState {
    last: u64,
    events: VecDeque<FleetEvent>,
}

impl EventJournal {
    pub(crate) fn new(keep: usize) -> Self {
        let keep = keep.max(1);
        Self { keep, kept: Mutex::default(), sender: broadcast::Sender::new(keep.min(MAX_LISTENER_LAG)) }
    }

    /// Keeps and sends an event.
    pub(crate) fn record(
        &self,
        model: Option<&ModelName>,
        generation: Option<GenerationId>,
        kind: EventKind,
    ) {
        let mut kept = lock(&self.kept);
        kept.last += 1;
        let event =
            FleetEvent { id: kept.last, at: clock::wall_time(), model: model.cloned(), generation, kind };
        if kept.events.len() >= self.keep {
            kept.events.pop_front();
        }
        kept.events.push_back(event.clone());
        // Send under the lock, so that a new listener neither misses an event nor gets it twice.
        drop(self.sender.send(event));
    }

    pub(crate) fn last_number(&self) -> u64 {
        lock(&self.kept).last
    }

    pub(crate) fn tail(&self) -> EventTail {
        let kept = lock(&self.kept);
        EventTail { events: kept.events.iter().cloned().collect(), receiver: self.sender.subscribe() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_flat_object() {
        let journal = EventJournal::new(1);
        journal.record(None, None, EventKind::Suspect { refused: false, crash: None });
        let model = ModelName::new("m");
        journal.record(Some(&model), Some(GenerationId(3)), EventKind::Draining { in_flight: 2 });
        let events = journal.tail().events;
        assert_eq!(events.len(), 1, "only the last one is kept");
        let json = serde_json::to_value(&events[0]).unwrap();
        assert_eq!(
            (&json["id"], &json["kind"], &json["model"]),
            (&2.into(), &"draining".into(), &"m".into())
        );
        assert_eq!((&json["generation"], &json["in_flight"]), (&3.into(), &2.into()));
        assert_eq!(serde_json::from_value::<FleetEvent>(json).unwrap(), events[0]);
    }
}
