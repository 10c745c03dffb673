//! Leases, each the right to send one request to one generation, and the queue of requests for them.
//!
//! | file | job |
//! |---|---|
//! | `cell` | state of one generation that its leases share |
//! | `queue` | queue, leases and open generations of one model, behind one lock |
//! | `admit` | prompts that have to fit into memory |
//! | `outcomes` | health figures from the ends of exchanges |
//! | `pulse` | progress of requests |
//! | `refused` | refusals of requests that wait in the previous instance |
//! | `turns`, `prints` | latest conversations, for the next process |

pub(crate) mod admit;
pub(crate) mod cell;
pub(crate) mod outcomes;
mod prints;
pub(crate) mod pulse;
pub(crate) mod queue;
pub mod refused;
pub(crate) mod turns;

use std::any::{Any, TypeId};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use warden_policies::dispatch::LeaseKind;
use warden_policies::health::{AnswerKeys, AnswerSigns};
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_policies::{GenerationId, ModelName, ServerFacts, WorkDone};

use crate::lease::cell::{GenerationCell, LeaseAddress};
use crate::lease::outcomes::ExchangeOutcome;
use crate::lease::pulse::{RequestProgress, SentRequest};
use crate::lease::queue::LeaseQueue;
use crate::lease::queue::ward::SolitudeResult;
use crate::lease::turns::ConversationTurn;
use crate::process::needs::AnswerIdentity;
use crate::sync::lock;

/// Right to send one request to one generation. Dropping it returns the right, so keep it in the response
/// body.
pub struct Lease {
    leases: Arc<LeaseQueue>,
    cell: Arc<GenerationCell>,
    kind: LeaseKind,
    queued_for: Duration,
    pulse: Option<Arc<RequestProgress>>,
    request: OnceLock<Arc<dyn SentRequest>>,
    /// True after a complete answer or a reported break. If false when the lease is dropped, the client left.
    is_settled: AtomicBool,
    reads: AtomicBool,
    /// True if the server stops computing for this request.
    pauses: AtomicBool,
    /// State of the request's solitude, as one of the constants below.
    solitude: AtomicU8,
}

const NO_SOLITUDE: u8 = 0;
const SEEKS_SOLITUDE: u8 = 1;
const HAS_SOLITUDE: u8 = 2;
/// No solitude: the answer is an endless event stream ([`Lease::mark_endless`]).
const WATCHES_EVENTS: u8 = 3;

impl Lease {
    pub(crate) fn new(
        leases: Arc<LeaseQueue>,
        cell: Arc<GenerationCell>,
        kind: LeaseKind,
        queued_for: Duration,
    ) -> Self {
        let pulse = (kind == LeaseKind::Slot).then(|| cell.pulses.begin());
        Self {
            leases,
            cell,
            kind,
            queued_for,
            pulse,
            request: OnceLock::new(),
            is_settled: AtomicBool::new(false),
            reads: AtomicBool::new(false),
            pauses: AtomicBool::new(false),
            solitude: AtomicU8::new(NO_SOLITUDE),
        }
    }

    /// Name of the model.
    pub fn model(&self) -> &ModelName {
        self.leases.name()
    }

    /// True for a lease on a canary: a trial of another build.
    pub fn is_canary(&self) -> bool {
        self.leases.is_canary.load(Ordering::Relaxed)
    }

    /// Generation to which the request goes.
    pub fn generation(&self) -> GenerationId {
        self.cell.id
    }

    /// Kind of the request.
    pub fn kind(&self) -> LeaseKind {
        self.kind
    }

    /// Address to which to send the request.
    pub fn address(&self) -> &LeaseAddress {
        &self.cell.address
    }

    /// True if the kernel reports a running process. The supervisor may notice its end later. Never blocks.
    pub fn is_running(&self) -> bool {
        let process = self.cell.process.get();
        process.is_none_or(|process| process.upgrade().is_some_and(|process| process.is_running()))
    }

    /// True if the supervisor has stopped the process; otherwise an ended process has ended by itself.
    pub fn was_stopped(&self) -> bool {
        self.cell.was_stopped()
    }

    /// Known facts about the binary; more may be learned later.
    pub fn server_facts(&self) -> ServerFacts {
        self.cell.facts()
    }

    /// Identity of the process's answers. A generation with the same identity can continue an answer. `None`
    /// if unknown, or after a client changed a setting: running answers of other processes may not follow it.
    pub fn kin(&self) -> Option<AnswerIdentity> {
        if self.leases.settings.are_untouched() { self.cell.kin.get().copied() } else { None }
    }

    /// Time for which the request waited for the lease.
    pub fn queued_for(&self) -> Duration {
        self.queued_for
    }

    /// Adds work that the answer reports.
    pub fn add_work(&self, work: WorkDone) {
        self.cell.add_work(work);
    }

    /// Records the reported outcome. Call it once, unless the client left.
    pub fn note_outcome(&self, outcome: &ExchangeOutcome) {
        let busy = self.leases.in_flight(self.cell.id);
        lock(&self.cell.outcomes).note(outcome, busy);
    }

    /// True if answers are to be judged.
    pub fn watches_answers(&self) -> bool {
        self.leases.answers.is_watched.load(Ordering::Relaxed)
    }

    /// Records what the answer shows about faults.
    pub fn record_answer(&self, signs: AnswerSigns, keys: AnswerKeys) {
        self.leases.answers.record_answer(&mut lock(&self.cell.outcomes), signs, keys);
    }

    /// Records received bytes: the backend is alive, but may not be computing. Cheap enough for every chunk.
    pub fn note_progress(&self) {
        self.cell.pulses.note_received();
    }

    /// Records that the request was sent. `streams`: the client asked for an event stream. Once the body is
    /// complete, the backend has to send next.
    pub fn note_sent(&self, asked: Arc<dyn SentRequest>, streams: bool) {
        // A retry on another connection is the same request.
        drop(self.request.set(Arc::clone(&asked)));
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_sent(pulse, asked, streams);
        }
    }

    /// Records a complete answer. Without this, [`Lease::report_broken`] or [`Lease::report_lost`], a dropped
    /// lease means that the client has left, and the backend may still work on the request.
    pub fn note_done(&self) {
        self.is_settled.store(true, Ordering::Relaxed);
    }

    /// Marks the request as read-only (a `GET`): it is never suspected of killing the server.
    pub fn mark_read_only(&self) {
        if self.needs_no_slot() && !self.reads.swap(true, Ordering::Relaxed) {
            self.leases.count_reader(self.cell.id, true);
        }
    }

    /// Records the head of the answer.
    pub fn note_answered(&self, streams: bool, succeeds: bool) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_answered(pulse, streams, succeeds);
        }
    }

    /// Records since when the client waits for more data. Cheap enough for every read.
    pub fn note_waiting(&self, since: Instant) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_waiting(pulse, since);
        }
    }

    /// Records events with data, without comments that keep a connection open. Cheap enough for every chunk.
    pub fn note_events(&self, events: u64) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_events(pulse, events);
        }
    }

    /// Records a setting that the backend has accepted, for later processes.
    pub fn note_setting(&self, path: &str, body: Bytes) {
        self.leases.note_setting(self.cell.id, path, body);
    }

    /// True if [`Lease::note_turn`] has an effect.
    pub fn keeps_turns(&self) -> bool {
        self.leases.turns.is_enabled()
    }

    /// Records a request and its complete answer, for warming the next process.
    pub fn note_turn(&self, turn: ConversationTurn) {
        self.leases.turns.note_turn(self.cell.id, turn);
    }

    /// True if only llama-warden may save slots of the backend, because the operator has not enabled saving.
    pub fn saves_for_us(&self) -> bool {
        self.cell.saves_for_us.load(Ordering::Relaxed)
    }

    /// Records that the backend stops computing, because it saves or restores a slot.
    pub fn note_pause(&self) {
        if !self.pauses.swap(true, Ordering::Relaxed) {
            self.cell.pulses.note_pause(true);
        }
    }

    /// Reports a refused or broken connection. The backend is probed at once and gets no lease before its
    /// answer, so no other request reaches a dead process.
    pub fn report_refused(&self) {
        self.leases.doubt_generation(self.cell.id);
    }

    /// Reports that the connection broke after the whole request was sent. If the server is found to have
    /// died by itself, the request becomes a suspect.
    pub fn report_broken(&self, request: RequestFingerprint) {
        self.note_done();
        self.leases.note_broken(self.cell.id, request);
    }

    /// Like [`Lease::report_broken`], for a revoked lease: the end of a process may be known before its
    /// connections break. Ignored if the supervisor stopped a process that had not hung.
    pub fn report_lost(&self, request: RequestFingerprint) {
        self.note_done();
        if self.cell.hung_for().is_some() || self.leases.ward.has_ended(self.cell.id) {
            self.leases.note_broken(self.cell.id, request);
        }
    }

    /// Resolves when a generation with a broken connection is known to live or to have ended. Does not hold
    /// the lease.
    pub fn until_settled(&self) -> impl Future<Output = ()> + Send + 'static {
        let leases = Arc::clone(&self.leases);
        let generation = self.cell.id;
        async move { leases.ward.until_settled(generation).await }
    }

    /// Quarantine status of a request.
    pub fn request_standing(&self, request: RequestFingerprint) -> RequestStanding {
        self.leases.ward.standing(request)
    }

    /// Records that the quarantine refused a request.
    pub fn note_refusal(&self, request: RequestFingerprint) {
        self.leases.ward.note_refusal(request);
    }

    /// Waits until no other request runs in the slots of the generation, and keeps other requests out. Call
    /// it before sending a suspected request; a lease that is alone already stays so. [`Lease::end_solitude`] or
    /// the drop ends the solitude.
    pub async fn wait_alone(&self, request: RequestFingerprint) -> SolitudeResult {
        if self.is_alone() {
            return SolitudeResult::Granted;
        }
        self.solitude.store(SEEKS_SOLITUDE, Ordering::Relaxed);
        self.leases.with_state(|queue| queue.dispatch.seek_alone(self.cell.id, self.kind));
        let waiting = self.leases.until_alone(self.cell.id, self.kind, request, Instant::now());
        let alone = tokio::select! {
            biased;
            () = self.cell.revoked.cancelled() => SolitudeResult::Gone,
            alone = waiting => alone,
        };
        if alone == SolitudeResult::Granted {
            self.solitude.store(HAS_SOLITUDE, Ordering::Relaxed);
        } else {
            self.solitude.store(NO_SOLITUDE, Ordering::Relaxed);
            self.leases.stop_seeking(self.cell.id, self.kind);
        }
        alone
    }

    /// True while this lease keeps other requests out.
    pub fn is_alone(&self) -> bool {
        self.solitude.load(Ordering::Relaxed) == HAS_SOLITUDE
    }

    /// Maximum time for which a suspected request may keep other requests out.
    pub fn solitude_limit(&self, request: RequestFingerprint) -> Duration {
        self.leases.ward.solitude_limit(request)
    }

    /// Lets other requests run again.
    pub fn end_solitude(&self) {
        if self
            .solitude
            .compare_exchange(HAS_SOLITUDE, NO_SOLITUDE, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            self.leases.end_solitude(self.cell.id);
        }
    }

    /// Clears a suspected request that was answered.
    pub fn note_survival(&self, request: RequestFingerprint) {
        self.leases.ward.note_survival(self.cell.id, request);
    }

    /// Marks the answer as an endless event stream: drains ignore it, and it is no work.
    pub fn mark_endless(&self) {
        let first =
            self.solitude.compare_exchange(NO_SOLITUDE, WATCHES_EVENTS, Ordering::Relaxed, Ordering::Relaxed);
        if self.needs_no_slot() && first.is_ok() {
            if self.reads.swap(false, Ordering::Relaxed) {
                self.leases.count_reader(self.cell.id, false);
            }
            self.leases.mark_endless(self.cell.id);
        }
    }

    fn needs_no_slot(&self) -> bool {
        matches!(self.kind, LeaseKind::Aux | LeaseKind::Read)
    }

    /// Value attached to the generation, one per type, such as the gateway's connection pool. It is dropped
    /// when the process is asked to end. `init` runs under a lock: it must not block or use leases.
    pub fn attachment<T: Any + Send + Sync>(&self, init: impl FnOnce() -> T) -> Arc<T> {
        let mut attachments = lock(&self.cell.attachments);
        let known = attachments.get(&TypeId::of::<T>()).cloned();
        if let Some(Ok(known)) = known.map(Arc::downcast) {
            return known;
        }
        let made = Arc::new(init());
        let stored: Arc<dyn Any + Send + Sync> = Arc::<T>::clone(&made);
        attachments.insert(TypeId::of::<T>(), stored);
        made
    }

    /// Resolves when the generation ends despite this lease: after its drain deadline, after a kill, or by
    /// itself. [`Lease::was_stopped`] tells the last case apart.
    pub async fn until_revoked(&self) {
        self.cell.revoked.cancelled().await;
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({}, {}, {:?})", self.model(), self.generation(), self.kind)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.end(pulse);
        }
        if self.pauses.load(Ordering::Relaxed) {
            self.cell.pulses.note_pause(false);
        }
        if self.reads.load(Ordering::Relaxed) {
            self.leases.count_reader(self.cell.id, false);
        }
        let asked =
            self.request.get().filter(|asked| !self.is_settled.load(Ordering::Relaxed) && asked.is_whole());
        if let Some(request) = asked.and_then(|asked| asked.fingerprint()) {
            // Another request may take the returned slot at once.
            self.leases.ward.note_left(self.cell.id, request);
        }
        let kind = match self.solitude.load(Ordering::Relaxed) {
            WATCHES_EVENTS if self.needs_no_slot() => LeaseKind::Watch,
            SEEKS_SOLITUDE => {
                self.leases.stop_seeking(self.cell.id, self.kind);
                self.kind
            }
            HAS_SOLITUDE => {
                self.leases.end_solitude(self.cell.id);
                self.kind
            }
            _ => self.kind,
        };
        self.leases.release(self.cell.id, kind);
    }
}
