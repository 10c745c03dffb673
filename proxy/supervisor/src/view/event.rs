//! What happens, as typed events: kept in a ring for late listeners and sent to those who listen.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use warden_policies::cooldown::Held;
use warden_policies::growth::{Growth, Verdict};
use warden_policies::quarantine::Fingerprint;
use warden_policies::sample::GpuIndex;
use warden_policies::start_search::StartFinding;
use warden_policies::warmth::Warmth;
use warden_policies::{Decision, GenerationId, ModelName, Reason};

use crate::clock;
use crate::error::{Failure, NoRoom};
use crate::sync::lock;
use crate::view::canary::CanaryEntry;
use crate::view::ledger::{LedgerEntry, Mode};
use crate::view::log::LISTENERS_LAG;
use crate::view::pin_entry::PinEntry;
use crate::view::reclaim_entry::ReclaimEntry;

/// What a reload changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplyReport {
    /// New models.
    pub added: Vec<ModelName>,
    /// Models that drain and stop.
    pub removed: Vec<ModelName>,
    /// Models whose processes are replaced, because their command changed.
    pub restarted: Vec<ModelName>,
    /// Models whose other settings changed, in place.
    pub updated: Vec<ModelName>,
    /// Models that did not change.
    pub unchanged: Vec<ModelName>,
    /// Settings that need a restart of the supervisor to take effect.
    pub needs_restart: Vec<String>,
    /// Keys of the configuration that differ, those of models included that were there before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<String>,
}

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
    /// The instance goes on in another program, and with a process that there was.
    TakenOver {
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
    /// It may be dead: it gets no new requests until a probe is answered.
    Suspect {
        /// It refused or broke a connection; else its probes are lost.
        #[serde(default)]
        refused: bool,
        /// What it logged that looks like a crash, since it answered a probe last.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        crash: Option<String>,
    },
    /// Probes are answered again.
    Recovered,
    /// It gets no new requests and ends when the running ones have.
    Draining {
        /// Requests running.
        in_flight: u32,
    },
    /// Nobody has asked for the model: it is unloaded, and loaded again by its next request.
    Unloaded {
        /// For this many milliseconds.
        idle_ms: u64,
    },
    /// It is unloaded so that another model can be loaded, and loaded again by its next request.
    MakesRoom {
        /// That model.
        wanted: ModelName,
    },
    /// What it is by its new settings does not fit where it is loaded: it is unloaded, and loaded again when there is room.
    LoadsAnew {
        /// What it needs, and what there is, in words.
        message: String,
    },
    /// It does not fit into memory as it is configured, and is started with its fallback arguments.
    FallsBack {
        /// Which, and why, for people.
        message: String,
    },
    /// It died while it loaded, again and again: a switch is looked for with which it starts.
    StartSearchBegan {
        /// So often, as configured.
        deaths: u32,
        /// So many switches can be tried.
        switches: usize,
    },
    /// That search has ended.
    StartSearched {
        /// What it found.
        finding: StartFinding,
    },
    /// It is wanted, and has to wait for memory.
    WaitsForRoom {
        /// What it needs, and what there is, in words.
        message: String,
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
        /// It was ended by somebody else: an operator, a limit of time, the kernel for lack of memory.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        outside: bool,
    },
    /// The next start waits.
    Backoff {
        /// For this many milliseconds.
        delay_ms: u64,
        /// After this many failures in a row.
        failures: u32,
    },
    /// It cannot start before something changes: a flag, a file. That change starts it.
    Failed {
        /// The last failure.
        failure: Failure,
    },
    /// It ends again and again. Starts go on.
    CrashLoop {
        /// So many unexpected ends ...
        ends: u32,
        /// ... within so many seconds.
        within_s: u64,
        /// The last failure.
        failure: Failure,
    },
    /// The policy wants it replaced at the next quiet moment.
    RecycleWanted {
        /// The decision.
        decision: Decision,
        /// Host memory charged to it, in bytes.
        host_bytes: Option<u64>,
        /// Bytes of the memory that is the reason, if one is: `decision.series`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        series_bytes: Option<u64>,
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
    /// A process was asked to give memory back, and serves on.
    Reclaimed {
        /// Its entry in the ledger.
        entry: Box<ReclaimEntry>,
    },
    /// A model that was unloaded is there again, and conversations go on from where they were.
    CameBack {
        /// What became of the conversations. A later `warmed` reports those that are still to be evaluated.
        warmth: Warmth,
    },
    /// Prompts that were due behind the gate of a process that followed another are evaluated, or will not be.
    Warmed {
        /// What became of them: none is counted in the entry of the replacement but as due.
        warmth: Warmth,
    },
    /// A series of readings says something else than before.
    Verdict {
        /// Which memory, the new verdict, slope, blame.
        growth: Box<Growth>,
        /// The verdict before.
        before: Verdict,
        /// At which request of the generation.
        request: u64,
        /// The same in words.
        message: String,
    },
    /// A process that answers probes shows that it is not well.
    Unwell {
        /// How: `wedged`, `compute_errors`, `slow_decode`, `device_fault`.
        reason: Reason,
        /// The grounds, in words.
        message: String,
    },
    /// What a client had set in a process (`POST /lora-adapters`, `POST /props`) is not set in the one that follows.
    SettingLost {
        /// Which, and why, in words.
        message: String,
    },
    /// Somebody else's endpoint answers: requests go there.
    EndpointAnswers {
        /// Its address.
        url: String,
    },
    /// Somebody else's endpoint does not answer, or refuses us: requests for its model are refused until it does.
    EndpointSilent {
        /// Why.
        failure: Failure,
    },
    /// VRAM of a process is not known, so its policy is off.
    VramUnknown {
        /// Why, in words.
        message: String,
    },
    /// Memory did not come back when a process had ended: a matter of the driver, which more restarts would make worse.
    DriverLeak {
        /// Of which GPU; `None` for the host's.
        gpu: Option<GpuIndex>,
        /// How much, in bytes.
        bytes: u64,
        /// What it means, in words.
        message: String,
    },
    /// Replacements did not help, so recycling by policy is off.
    PolicyOff {
        /// What to do, in words.
        message: String,
    },
    /// Another build is tried beside the model's own.
    CanaryBegan {
        /// Its binary.
        binary: std::path::PathBuf,
        /// The share of conversations that it gets; `None` only in entries of earlier versions.
        share: Option<f64>,
    },
    /// That is over.
    CanaryEnded {
        /// Its entry in the ledger.
        entry: Box<CanaryEntry>,
    },
    /// An operator asked for something.
    Asked {
        /// For what: `restart`, `drain`, `reclaim`, `load`, `release`.
        action: String,
        /// Who, as far as we can tell: `page, 127.0.0.1`.
        by: String,
    },
    /// Somebody said whether a model may leave for another one.
    Pinned {
        /// Its entry in the ledger.
        entry: Box<PinEntry>,
    },
    /// A configuration was taken over.
    ConfigApplied {
        /// What changed.
        report: ApplyReport,
    },
    /// A prompt does not fit into the memory that is left.
    PromptTooLarge {
        /// What is done about it: `warn` (it is sent all the same), `wait`, `elsewhere`, `recycle` or `refuse`.
        action: String,
        /// The numbers.
        #[serde(serialize_with = "NoRoom::show")]
        short: NoRoom,
    },
    /// A process ended by itself with these requests in flight: each is tried alone if it is sent again.
    RequestsSuspected {
        /// Which.
        fingerprints: Vec<Fingerprint>,
    },
    /// A process ended while this request ran there alone: it is refused from now on.
    RequestQuarantined {
        /// Which.
        fingerprint: Fingerprint,
        /// For how long, in seconds.
        seconds: u64,
    },
    /// An operator released requests that were suspected or refused.
    RequestsReleased {
        /// How many.
        count: usize,
    },
    /// An operator cancelled a request.
    RequestCancelled {
        /// Its `X-Request-Id`.
        request: String,
        /// How far it had come: `queued`, `prefill`, `generating` and others.
        state: String,
        /// Who, in words.
        by: String,
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

/// Where events are told.
#[derive(Debug)]
pub(crate) struct Journal {
    keep: usize,
    kept: Mutex<Kept>,
    sender: broadcast::Sender<Event>,
}

#[derive(Debug, Default)]
struct Kept {
    last: u64,
    events: VecDeque<Event>,
}

impl Journal {
    /// A journal that keeps `keep` events, 1 or more.
    pub(crate) fn new(keep: usize) -> Self {
        let keep = keep.max(1);
        Self { keep, kept: Mutex::default(), sender: broadcast::Sender::new(keep.min(LISTENERS_LAG)) }
    }

    /// Keeps and sends an event. What concerns an operator is also logged.
    pub(crate) fn tell(&self, model: Option<&ModelName>, generation: Option<GenerationId>, kind: EventKind) {
        log(model, generation, &kind);
        let mut kept = lock(&self.kept);
        kept.last += 1;
        let event = Event { id: kept.last, at: clock::wall(), model: model.cloned(), generation, kind };
        if kept.events.len() >= self.keep {
            kept.events.pop_front();
        }
        kept.events.push_back(event.clone());
        // Under the lock, so that a tail's snapshot and its receiver join without a gap or a repetition.
        drop(self.sender.send(event));
    }

    pub(crate) fn last(&self) -> u64 {
        lock(&self.kept).last
    }

    pub(crate) fn tail(&self) -> EventTail {
        let kept = lock(&self.kept);
        EventTail { events: kept.events.iter().cloned().collect(), receiver: self.sender.subscribe() }
    }
}

fn log(model: Option<&ModelName>, generation: Option<GenerationId>, kind: &EventKind) {
    let model = model.map_or("-", ModelName::as_str);
    let generation = generation.map_or_else(|| "-".to_owned(), |generation| generation.to_string());
    match kind {
        EventKind::Starting { pid, .. } => tracing::info!(model, generation, pid, "starting"),
        EventKind::TakenOver { pid, .. } => tracing::info!(model, generation, pid, "taken over"),
        EventKind::Ready { start_ms, .. } => tracing::info!(model, generation, start_ms, "ready"),
        EventKind::Suspect { crash: Some(line), .. } => {
            let line = warden_policies::secrets::text(line);
            tracing::warn!(model, generation, "suspect: it logged what looks like a crash: {line}");
        }
        EventKind::Suspect { refused: true, .. } => {
            tracing::info!(
                model,
                generation,
                "suspect: it refused or broke a connection; a probe is on its way"
            );
        }
        EventKind::Suspect { .. } => tracing::warn!(model, generation, "suspect: it does not answer probes"),
        EventKind::Recovered => tracing::info!(model, generation, "it answers probes again"),
        EventKind::Draining { in_flight } => tracing::info!(model, generation, in_flight, "draining"),
        EventKind::Unloaded { idle_ms } => {
            tracing::info!(model, idle_ms, "unloaded: nobody has asked for it");
        }
        EventKind::MakesRoom { wanted } => tracing::info!(model, %wanted, "unloaded: it makes room"),
        EventKind::WaitsForRoom { message } => tracing::info!(model, "waits for room: {message}"),
        EventKind::LoadsAnew { message } => {
            tracing::info!(model, "unloaded, to be loaded with its new settings: {message}");
        }
        EventKind::FallsBack { message } => tracing::warn!(model, "falls back: {message}"),
        EventKind::StartSearchBegan { deaths, switches } => {
            tracing::warn!(
                model,
                deaths,
                switches,
                "died while loading; searching for a switch that starts it"
            );
        }
        EventKind::StartSearched { finding } => {
            tracing::warn!(model, "search for a switch that starts it: {}", finding.advice());
        }
        EventKind::Stopped { exit } => tracing::info!(model, generation, exit, "stopped"),
        EventKind::Crashed { failure, .. } => {
            tracing::error!(model, generation, kind = ?failure.kind, "crashed: {}", failure.message);
        }
        EventKind::Backoff { delay_ms, failures } => {
            tracing::warn!(model, delay_ms, failures, "the next start waits");
        }
        EventKind::Failed { failure } => {
            tracing::error!(
                model,
                "cannot start before something changes; a change of its files or settings starts it: {}",
                failure.message
            );
        }
        EventKind::CrashLoop { ends, within_s, failure } => {
            tracing::error!(model, ends, within_s, "crash loop; still restarting: {}", failure.message);
        }
        EventKind::RecycleWanted { decision, series_bytes, .. } => {
            let series = decision.series.map(tracing::field::display);
            let reason = decision.reason.map(tracing::field::display);
            tracing::info!(model, generation, reason, series, series_bytes, "to be replaced when quiet");
        }
        EventKind::RecycleHeld { message, .. } => {
            tracing::warn!(model, generation, "not replaced: {message}");
        }
        EventKind::RecycleBegan { reason, mode, note } => {
            tracing::info!(model, generation, %reason, mode = mode.as_str(), note, "replacement began");
        }
        EventKind::RecycleDone { entry } => match &entry.failed {
            None => {
                let warm = entry.warm.as_ref().map(ToString::to_string);
                tracing::info!(
                    model, reason = %entry.reason, gap_ms = entry.gap_ms, carried_over = entry.carried_over,
                    cut = entry.cut, warm, "replaced"
                );
            }
            Some(why) if entry.given_up => {
                tracing::info!(model, reason = %entry.reason, "replacement given up: {why}");
            }
            Some(failed) => tracing::error!(model, reason = %entry.reason, "not replaced: {failed}"),
        },
        EventKind::Reclaimed { entry } => {
            tracing::info!(model, generation, reason = %entry.reason, helped = entry.helped, "asked to give memory back: {}", entry.words());
        }
        EventKind::CameBack { warmth } => tracing::info!(model, generation, "loaded again: {warmth}"),
        EventKind::Warmed { warmth } => tracing::info!(model, generation, "behind the gate: {warmth}"),
        EventKind::Verdict { growth, message, .. } => match growth.verdict {
            Verdict::Suspected | Verdict::Leaking => tracing::warn!(model, generation, "{message}"),
            _ => tracing::info!(model, generation, "{message}"),
        },
        EventKind::PromptTooLarge { action, short } => tracing::warn!(model, generation, action, "{short}"),
        EventKind::SettingLost { message } => tracing::warn!(model, generation, "{message}"),
        EventKind::EndpointAnswers { url } => {
            tracing::info!(model, generation, "the endpoint `{url}` answers");
        }
        EventKind::EndpointSilent { failure } => tracing::warn!(model, generation, "{}", failure.message),
        EventKind::Unwell { reason, message } => tracing::warn!(model, generation, %reason, "{message}"),
        EventKind::VramUnknown { message } => tracing::warn!(model, generation, "{message}"),
        EventKind::DriverLeak { message, .. } => tracing::error!(model, generation, "{message}"),
        EventKind::PolicyOff { message } => tracing::error!(model, "{message}"),
        EventKind::CanaryBegan { binary, share } => {
            tracing::info!(model, binary = %binary.display(), share, "a canary begins");
        }
        EventKind::CanaryEnded { entry } => {
            tracing::info!(model, verdict = entry.canary.verdict.as_str(), "the canary has ended");
        }
        EventKind::Asked { action, by } => tracing::info!(model, action, by, "an operator asks"),
        EventKind::Pinned { entry } => {
            tracing::info!(model, pinned = entry.pinned, by = entry.by, "said by hand");
        }
        EventKind::ConfigApplied { report } => tracing::info!(?report, "configuration applied"),
        EventKind::RequestsSuspected { fingerprints } => {
            let count = fingerprints.len();
            tracing::warn!(
                model,
                generation,
                count,
                "requests in flight at its end are tried alone if they come again"
            );
        }
        EventKind::RequestQuarantined { fingerprint, seconds } => tracing::error!(
            model, generation, %fingerprint, seconds, "a request that ran alone ended its server: it is refused"
        ),
        EventKind::RequestsReleased { count } => tracing::info!(model, count, "requests released"),
        EventKind::RequestCancelled { request, state, by } => {
            tracing::info!(model, generation, request, state, by, "request cancelled");
        }
        EventKind::QueueFull { waiting } => tracing::warn!(model, waiting, "the queue is full"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_flat_object() {
        let journal = Journal::new(1);
        journal.tell(None, None, EventKind::Suspect { refused: false, crash: None });
        let model = ModelName::new("m");
        journal.tell(Some(&model), Some(GenerationId(3)), EventKind::Draining { in_flight: 2 });
        let events = journal.tail().events;
        assert_eq!(events.len(), 1, "only the last one is kept");
        let json = serde_json::to_value(&events[0]).unwrap();
        assert_eq!(
            (&json["id"], &json["kind"], &json["model"]),
            (&2.into(), &"draining".into(), &"m".into())
        );
        assert_eq!((&json["generation"], &json["in_flight"]), (&3.into(), &2.into()));
        assert_eq!(serde_json::from_value::<Event>(json).unwrap(), events[0]);
    }
}
