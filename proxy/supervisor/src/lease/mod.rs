//! Leases: the right to send one request to one generation, and the queue of requests that wait for a lease.
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
/// body, which is dropped when the request is over.
pub struct Lease {
    leases: Arc<LeaseQueue>,
    cell: Arc<GenerationCell>,
    kind: LeaseKind,
    queued_for: Duration,
    pulse: Option<Arc<RequestProgress>>,
    request: OnceLock<Arc<dyn SentRequest>>,
    /// True after a complete answer or a reported broken connection. If it is false when the lease is
    /// dropped, the client of a sent request has left.
    is_settled: AtomicBool,
    reads: AtomicBool,
    /// True if the server stops computing during the request.
    pauses: AtomicBool,
    /// Special state of the lease: see [`Lease::wait_alone`] and [`Lease::mark_endless`].
    solitude: AtomicU8,
}

const NO_SOLITUDE: u8 = 0;
/// The lease waits until no other request runs.
const SEEKS_SOLITUDE: u8 = 1;
const HAS_SOLITUDE: u8 = 2;
/// The lease is for an endless event stream.
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

    /// True if this lease is on a canary: another build that is tried next to a model's own.
    pub fn is_canary(&self) -> bool {
        self.leases.is_canary()
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

    /// True if the kernel reports that the process runs now; the supervisor may learn of its end later.
    /// Makes some system calls that do not block.
    pub fn is_running(&self) -> bool {
        let process = self.cell.process.get();
        process.is_none_or(|process| process.upgrade().is_some_and(|process| process.is_running()))
    }

    /// True if llama-warden has asked the process to end. If false, a process that has ended ended by
    /// itself.
    pub fn was_stopped(&self) -> bool {
        self.cell.was_stopped()
    }

    /// Known facts about the binary; more may be measured while the lease is held.
    pub fn server_facts(&self) -> ServerFacts {
        self.cell.facts()
    }

    /// Identity of the process's answers. Identities are equal for generations with the same command,
    /// binary and model files: one of them can continue an answer that another began. `None` if unknown, or
    /// if a setting (an adapter's scale) was changed in a process of the model, because running answers of
    /// other processes did not follow the change.
    pub fn kin(&self) -> Option<AnswerIdentity> {
        if self.leases.settings.are_untouched() { self.cell.kin.get().copied() } else { None }
    }

    /// Time for which the request waited for the lease.
    pub fn queued_for(&self) -> Duration {
        self.queued_for
    }

    /// Adds work done for this request, as reported by the answer. May be called repeatedly.
    pub fn add_work(&self, work: WorkDone) {
        self.cell.add_work(work);
    }

    /// Records the outcome reported by the answer, for counts of errors and decoding speeds. Call it once
    /// before the lease is dropped, but not if the client left.
    pub fn note_outcome(&self, outcome: &ExchangeOutcome) {
        let busy = self.leases.in_flight(self.cell.id);
        lock(&self.cell.outcomes).note(outcome, busy);
    }

    /// Records that bytes were received: the backend is alive even if it answers no probes, though it may
    /// not be computing. Cheap enough to call for every chunk.
    pub fn note_progress(&self) {
        self.cell.pulses.note_received();
    }

    /// Records that the request was sent. `streams`: the request asks for an event stream. From the moment
    /// when the body is complete until the answer begins, the backend is expected to send next.
    pub fn note_sent(&self, asked: Arc<dyn SentRequest>, streams: bool) {
        // If the request is sent again on another connection, it is the same request: keep the first.
        drop(self.request.set(Arc::clone(&asked)));
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_sent(pulse, asked, streams);
        }
    }

    /// Records a complete answer. If a lease whose request was sent whole is dropped without this call,
    /// [`Lease::report_broken`] or [`Lease::report_lost`], the client has left. The backend may then still
    /// work on the request for a while.
    pub fn note_done(&self) {
        self.is_settled.store(true, Ordering::Relaxed);
    }

    /// Marks the request as read-only (a `GET`), so that it is never suspected of killing the server. May
    /// be called repeatedly.
    pub fn mark_read_only(&self) {
        if self.needs_no_slot() && !self.reads.swap(true, Ordering::Relaxed) {
            self.leases.note_read_only(self.cell.id, true);
        }
    }

    /// Records the head of the answer: event stream or single answer, success or failure.
    pub fn note_answered(&self, streams: bool, succeeds: bool) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_answered(pulse, streams, succeeds);
        }
    }

    /// Records that since this moment the client has received everything and waits for more. Cheap enough
    /// to call at every empty read.
    pub fn note_waiting(&self, since: Instant) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_waiting(pulse, since);
        }
    }

    /// Records events with data; comments that keep a connection open do not count. Cheap enough to call
    /// for every chunk.
    pub fn note_events(&self, events: u64) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.note_events(pulse, events);
        }
    }

    /// Records a setting that the backend has accepted from a client, so that later processes get it, too.
    pub fn note_setting(&self, path: &str, body: Bytes) {
        self.leases.note_setting(self.cell.id, path, body);
    }

    /// True if conversations are kept. If false, callers need not call [`Lease::note_turn`].
    pub fn keeps_turns(&self) -> bool {
        self.leases.turns.is_enabled()
    }

    /// Records a request with its complete answer, for warming the next process.
    pub fn note_turn(&self, turn: ConversationTurn) {
        self.leases.turns.note_turn(self.cell.id, turn);
    }

    /// True if only llama-warden may save slots of the backend: the operator has not enabled saving for
    /// clients.
    pub fn saves_for_us(&self) -> bool {
        self.cell.saves_for_us.load(Ordering::Relaxed)
    }

    /// Records that the backend stops computing during this request, because it saves or restores a slot.
    pub fn note_pause(&self) {
        if !self.pauses.swap(true, Ordering::Relaxed) {
            self.cell.pulses.note_pause(true);
        }
    }

    /// Reports that the backend refused or broke a connection. The backend gets no more leases until it
    /// answers a probe, which is sent at once. So no other request reaches a dead process, and a healthy
    /// backend is unavailable only for the milliseconds of one probe.
    pub fn report_refused(&self) {
        self.leases.doubt_generation(self.cell.id);
    }

    /// Reports that the connection broke after the whole request was sent and before its answer was
    /// complete. If the server is found to have died by itself, the request becomes a suspect.
    pub fn report_broken(&self, request: RequestFingerprint) {
        self.note_done();
        self.leases.note_broken(self.cell.id, request);
    }

    /// Reports a broken connection like [`Lease::report_broken`], for a lease that was revoked: the end of
    /// a process may be known before its connections break. Without effect if the process was stopped and
    /// had not hung.
    pub fn report_lost(&self, request: RequestFingerprint) {
        self.note_done();
        if self.cell.hung_for().is_some() {
            self.leases.note_broken(self.cell.id, request);
        } else {
            self.leases.note_lost(self.cell.id, request);
        }
    }

    /// Resolves when, after a broken connection, the generation is known to live or to have ended. Does not
    /// hold the lease.
    pub fn until_settled(&self) -> impl Future<Output = ()> + Send + 'static {
        let leases = Arc::clone(&self.leases);
        let generation = self.cell.id;
        async move { leases.until_settled(generation).await }
    }

    /// Status of a request in the quarantine.
    pub fn request_standing(&self, request: RequestFingerprint) -> RequestStanding {
        self.leases.request_standing(request)
    }

    /// Records that a request was refused by the quarantine.
    pub fn note_refusal(&self, request: RequestFingerprint) {
        self.leases.note_refusal(request);
    }

    /// Waits until no other request runs in the slots of the generation; from the call on, no other request
    /// gets a slot. Call it once per lease, before sending a suspected request. The solitude ends with
    /// [`Lease::end_solitude`] or when the lease is dropped.
    pub async fn wait_alone(&self, request: RequestFingerprint) -> SolitudeResult {
        self.solitude.store(SEEKS_SOLITUDE, Ordering::Relaxed);
        self.leases.seek_solitude(self.cell.id, self.kind);
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

    /// True while no other request gets a slot because of this lease.
    pub fn is_alone(&self) -> bool {
        self.solitude.load(Ordering::Relaxed) == HAS_SOLITUDE
    }

    /// Maximum time for which no other request may run next to a suspected one.
    pub fn solitude_limit(&self, request: RequestFingerprint) -> Duration {
        self.leases.solitude_limit(request)
    }

    /// Lets other requests run again, if [`Lease::wait_alone`] had kept them out.
    pub fn end_solitude(&self) {
        if self
            .solitude
            .compare_exchange(HAS_SOLITUDE, NO_SOLITUDE, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            self.leases.end_solitude(self.cell.id);
        }
    }

    /// Clears a suspected request, because it was answered.
    pub fn note_survival(&self, request: RequestFingerprint) {
        self.leases.note_survival(self.cell.id, request);
    }

    /// Marks the answer as an endless event stream: drains do not wait for it, and it does not count as
    /// work.
    pub fn mark_endless(&self) {
        let first =
            self.solitude.compare_exchange(NO_SOLITUDE, WATCHES_EVENTS, Ordering::Relaxed, Ordering::Relaxed);
        if self.needs_no_slot() && first.is_ok() {
            if self.reads.swap(false, Ordering::Relaxed) {
                self.leases.note_read_only(self.cell.id, false);
            }
            self.leases.mark_endless(self.cell.id);
        }
    }

    fn needs_no_slot(&self) -> bool {
        matches!(self.kind, LeaseKind::Aux | LeaseKind::Read)
    }

    /// Value attached to the generation, one per type, such as the gateway's connection pool. The value is
    /// made by `init` at the first call, and dropped when the process is asked to end. `init` runs under a
    /// lock: it must not block, and must not take or drop a lease.
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

    /// Resolves when the generation is ended despite this lease, because its drain deadline has passed or
    /// the process is killed. Also resolves when the process has ended by itself, which may be known before
    /// the connection breaks; [`Lease::was_stopped`] tells the two apart.
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
            self.leases.note_read_only(self.cell.id, false);
        }
        let asked =
            self.request.get().filter(|asked| !self.is_settled.load(Ordering::Relaxed) && asked.is_whole());
        if let Some(request) = asked.and_then(|asked| asked.fingerprint()) {
            // Record this before the slot is returned, because another request may take the slot at once.
            self.leases.note_left(self.cell.id, request);
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
