//! The right to send one request to one generation of one model.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{Fingerprint, Standing};
use warden_policies::{GenerationId, ModelName, ServerFacts, Work};

pub use crate::outcomes::Outcome;
use crate::outcomes::{Decode, Outcomes, Prefill};
use crate::process::Process;
pub use crate::pulse::Asked;
use crate::pulse::{Pulse, Pulses};
use crate::shared::{Alone, Shared};
use crate::sync::lock;

/// Where a generation listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A Unix socket: other users of the machine cannot reach the backend.
    Unix(PathBuf),
    /// A port of the loopback interface: any user of the machine can connect to it.
    Tcp(SocketAddr),
}

/// The right to send one request to one generation. Dropping it gives it back, so it belongs into whatever ends with the
/// exchange: the response body.
pub struct Lease {
    shared: Arc<Shared>,
    cell: Arc<Cell>,
    kind: LeaseKind,
    queued_for: Duration,
    /// What its request waits for; none if it computes nothing.
    pulse: Option<Arc<Pulse>>,
    /// What was sent for it.
    asked: OnceLock<Arc<dyn Asked>>,
    /// Its server is not at work on it any more, or it is known otherwise what became of it.
    over: AtomicBool,
    /// It only reads.
    reads: AtomicBool,
    /// The server stops computing for it.
    pauses: AtomicBool,
    /// What it has beside its place: see [`Lease::alone`] and [`Lease::watches`].
    beside: AtomicU8,
}

/// Nothing.
const PLAIN: u8 = 0;
/// It waits to be alone.
const SEEKS: u8 = 1;
/// It is alone.
const ALONE: u8 = 2;
/// It only watches.
const WATCHES: u8 = 3;

impl Lease {
    pub(crate) fn new(shared: Arc<Shared>, cell: Arc<Cell>, kind: LeaseKind, queued_for: Duration) -> Self {
        let pulse = (kind == LeaseKind::Slot).then(|| cell.pulses.begin());
        let no = || AtomicBool::new(false);
        let (over, reads, pauses, beside) = (no(), no(), no(), AtomicU8::new(PLAIN));
        Self { shared, cell, kind, queued_for, pulse, asked: OnceLock::new(), over, reads, pauses, beside }
    }

    /// The model.
    pub fn model(&self) -> &ModelName {
        self.shared.name()
    }

    /// The generation.
    pub fn generation(&self) -> GenerationId {
        self.cell.id
    }

    /// What it is for.
    pub fn kind(&self) -> LeaseKind {
        self.kind
    }

    /// Where to send the request.
    pub fn endpoint(&self) -> &Endpoint {
        &self.cell.endpoint
    }

    /// Whether its process still runs, as the kernel knows it now: the supervisor may not have heard of its end yet. Some
    /// system calls, none of which waits.
    pub fn is_running(&self) -> bool {
        let process = self.cell.process.get();
        process.is_none_or(|process| process.upgrade().is_some_and(|process| process.is_running()))
    }

    /// What is known now of how the generation's binary behaves. It may become known while the lease is held.
    pub fn facts(&self) -> ServerFacts {
        self.cell.facts()
    }

    /// How long the caller waited for it.
    pub fn queued_for(&self) -> Duration {
        self.queued_for
    }

    /// Adds work that this request caused, as the answer told it. May be called more than once.
    pub fn add_work(&self, work: Work) {
        *lock(&self.cell.work) += work;
    }

    /// How the exchange ended, as far as the answer told: what error streaks and the speed of decoding are judged by.
    /// Called once, before the lease is dropped; never for a request whose client left.
    pub fn note_outcome(&self, outcome: &Outcome) {
        let busy = self.shared.in_flight(self.cell.id);
        lock(&self.cell.outcomes).note(outcome, busy);
    }

    /// Bytes of an answer came from the backend, or its head: it lives, whatever its probes say, though it need not work.
    /// Cheap enough for every chunk.
    pub fn note_progress(&self) {
        self.cell.note_progress();
    }

    /// The request goes to the backend, and asks for a stream of events or for one answer. Until its answer begins the next
    /// word is the backend's, once it has the whole of it.
    pub fn note_asked(&self, asked: Arc<dyn Asked>, streams: bool) {
        // What is sent a second time on another connection is the same.
        drop(self.asked.set(Arc::clone(&asked)));
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.asks(pulse, asked, streams);
        }
    }

    /// The answer came whole: the backend is at work on it no more. A lease of a request that was sent whole, given back without
    /// this and without [`Lease::broke`], is that of a client that has left: the backend goes on with it for a while.
    pub fn note_done(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// The request only reads (a `GET`): what happens to the backend meanwhile is not its doing. Once for each lease, or more.
    pub fn reads(&self) {
        if self.kind == LeaseKind::Aux && !self.reads.swap(true, Ordering::Relaxed) {
            self.shared.reads(self.cell.id, true);
        }
    }

    /// The head of the answer is here: events follow, or one answer, and it is a success or not.
    pub fn note_answered(&self, streams: bool, succeeds: bool) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.answers(pulse, streams, succeeds);
        }
    }

    /// Since this moment the client has everything and wants more. Cheap enough for every time that nothing is there.
    pub fn note_waiting(&self, since: Instant) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.waits(pulse, since);
        }
    }

    /// So many events with data came: comments, which keep a connection open, are none. Cheap enough for every chunk.
    pub fn note_events(&self, events: u64) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.events(pulse, events);
        }
    }

    /// The backend has taken what a client has set in it beside requests: it is set again in the processes that follow.
    pub fn note_setting(&self, path: &str, body: Bytes) {
        self.shared.note_setting(self.cell.id, path, body);
    }

    /// The backend stops computing for as long as this request takes: it saves or restores a slot.
    pub fn note_pause(&self) {
        if !self.pauses.swap(true, Ordering::Relaxed) {
            self.cell.pulses.pauses(true);
        }
    }

    /// The backend refused a connection, or broke one before its answer was complete. No more leases are granted on it
    /// until it has answered a probe, which is sent at once; if it is dead, that is found out meanwhile. So neither the
    /// caller's next lease nor that of whoever waits for this one meets the same corpse. A backend that lives pays with
    /// the milliseconds of one probe.
    pub fn refused(&self) {
        self.shared.doubt(self.cell.id);
    }

    /// The request that this lease was for was sent whole, and its connection broke before its answer was complete: if
    /// its server turns out to have died by itself, it is a suspect.
    pub fn broke(&self, request: Fingerprint) {
        self.note_done();
        self.shared.broke(self.cell.id, request);
    }

    /// The same for a request whose lease was revoked before its answer was complete: the end of its process may be known
    /// sooner than that of its connection. Nothing, if the process was only told to end, unless it hung.
    pub fn lost(&self, request: Fingerprint) {
        self.note_done();
        if self.cell.hung().is_some() {
            self.shared.broke(self.cell.id, request);
        } else {
            self.shared.lost(self.cell.id, request);
        }
    }

    /// Resolves when it is known what became of the generation after a connection to it broke. It does not hold the
    /// lease.
    pub fn settled(&self) -> impl Future<Output = ()> + Send + 'static {
        let (shared, generation) = (Arc::clone(&self.shared), self.cell.id);
        async move { shared.until_settled(generation).await }
    }

    /// What is known against a request to this model.
    pub fn standing(&self, request: Fingerprint) -> Standing {
        self.shared.standing(request)
    }

    /// A request was refused because of what is known against it.
    pub fn note_refusal(&self, request: Fingerprint) {
        self.shared.note_refusal(request);
    }

    /// Waits until nothing else runs in the slots of the generation; from the call on nobody else gets one there. Called
    /// for a suspect before anything of it is sent that could be executed, once for each lease. What it was granted
    /// ends with [`Lease::join`] or the lease.
    pub async fn alone(&self, request: Fingerprint) -> Alone {
        self.beside.store(SEEKS, Ordering::Relaxed);
        self.shared.seek(self.cell.id, self.kind);
        let waiting = self.shared.until_alone(self.cell.id, self.kind, request, Instant::now());
        let alone = tokio::select! {
            biased;
            () = self.cell.revoked.cancelled() => Alone::Gone,
            alone = waiting => alone,
        };
        if alone == Alone::Granted {
            self.beside.store(ALONE, Ordering::Relaxed);
        } else {
            self.beside.store(PLAIN, Ordering::Relaxed);
            self.shared.unseek(self.cell.id, self.kind);
        }
        alone
    }

    /// Whether it was granted to be alone, and nobody was let in since.
    pub fn is_alone(&self) -> bool {
        self.beside.load(Ordering::Relaxed) == ALONE
    }

    /// For how long a suspect may be alone.
    pub fn alone_for(&self, request: Fingerprint) -> Duration {
        self.shared.alone_for(request)
    }

    /// Lets others in beside it, if it was alone.
    pub fn join(&self) {
        if self.beside.compare_exchange(ALONE, PLAIN, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.shared.join(self.cell.id);
        }
    }

    /// The request, against which something was known, was answered: that is forgotten.
    pub fn survived(&self, request: Fingerprint) {
        self.shared.survived(self.cell.id, request);
    }

    /// The answer is a stream of events without an end, which nobody needs to wait for: a drain goes on without it, and
    /// it is no work.
    pub fn watches(&self) {
        let first = self.beside.compare_exchange(PLAIN, WATCHES, Ordering::Relaxed, Ordering::Relaxed);
        if self.kind == LeaseKind::Aux && first.is_ok() {
            if self.reads.swap(false, Ordering::Relaxed) {
                self.shared.reads(self.cell.id, false);
            }
            self.shared.watches(self.cell.id);
        }
    }

    /// One value per generation and type, made at the first call and dropped when the process is told to end: the
    /// gateway's pool of connections. `init` runs under a lock: it must not block and must not take or drop a lease.
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

    /// Resolves when the generation is told to end although this lease is held: the drain deadline has passed, or the
    /// process is killed. A request cut then has no better end to wait for.
    pub async fn revoked(&self) {
        self.cell.revoked.cancelled().await;
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (model, generation) = (self.model(), self.generation());
        write!(f, "Lease({model}, {generation}, {:?})", self.kind)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(pulse) = &self.pulse {
            self.cell.pulses.end(pulse);
        }
        if self.pauses.load(Ordering::Relaxed) {
            self.cell.pulses.pauses(false);
        }
        if self.reads.load(Ordering::Relaxed) {
            self.shared.reads(self.cell.id, false);
        }
        let asked = self.asked.get().filter(|asked| !self.over.load(Ordering::Relaxed) && asked.is_whole());
        if let Some(request) = asked.and_then(|asked| asked.print()) {
            // Before it gives back its place, which may be taken at once.
            self.shared.left(self.cell.id, request);
        }
        let kind = match self.beside.load(Ordering::Relaxed) {
            WATCHES if self.kind == LeaseKind::Aux => LeaseKind::Watch,
            SEEKS => {
                self.shared.unseek(self.cell.id, self.kind);
                self.kind
            }
            ALONE => {
                self.shared.join(self.cell.id);
                self.kind
            }
            _ => self.kind,
        };
        self.shared.release(self.cell.id, kind);
    }
}

/// What belongs to one generation and is touched by its leases.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) id: GenerationId,
    pub(crate) endpoint: Endpoint,
    /// Set once it is there.
    pub(crate) process: OnceLock<Weak<dyn Process>>,
    born: Instant,
    facts: Mutex<ServerFacts>,
    work: Mutex<Work>,
    /// Microseconds from `born` to the last byte seen, plus one; 0 before the first.
    progress: AtomicU64,
    /// What its requests wait for.
    pub(crate) pulses: Pulses,
    outcomes: Mutex<Outcomes>,
    attachments: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    /// Set when the process hung and was told to end: for how long it had hung.
    hung: OnceLock<Duration>,
    revoked: CancellationToken,
}

impl Cell {
    pub(crate) fn new(id: GenerationId, endpoint: Endpoint, facts: ServerFacts) -> Self {
        Self {
            id,
            endpoint,
            process: OnceLock::new(),
            born: Instant::now(),
            facts: Mutex::new(facts),
            work: Mutex::default(),
            progress: AtomicU64::new(0),
            pulses: Pulses::new(),
            outcomes: Mutex::default(),
            attachments: Mutex::default(),
            hung: OnceLock::new(),
            revoked: CancellationToken::new(),
        }
    }

    pub(crate) fn work(&self) -> Work {
        *lock(&self.work)
    }

    fn facts(&self) -> ServerFacts {
        *lock(&self.facts)
    }

    /// More is known of its binary than when it was started.
    pub(crate) fn learn(&self, facts: ServerFacts) {
        *lock(&self.facts) = facts;
    }

    fn micros(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.born).as_micros()).unwrap_or(u64::MAX - 1)
    }

    fn note_progress(&self) {
        self.progress.store(self.micros(Instant::now()) + 1, Ordering::Relaxed);
    }

    /// Whether a byte was seen at or after this moment.
    pub(crate) fn progressed_since(&self, moment: Instant) -> bool {
        self.progress.load(Ordering::Relaxed) > self.micros(moment)
    }

    /// It is told to end because it hangs, for so long by now. Before [`Cell::revoke`].
    pub(crate) fn note_hung(&self, since: Duration) {
        // What was true first counts.
        let _known = self.hung.set(since);
    }

    /// For how long it had hung when it was told to end, if it had.
    pub(crate) fn hung(&self) -> Option<Duration> {
        self.hung.get().copied()
    }

    /// Whether it was told to end.
    pub(crate) fn is_revoked(&self) -> bool {
        self.revoked.is_cancelled()
    }

    /// The process is told to end, or has ended: its leases are told, and what was attached is dropped, because
    /// llama-server ends sooner when nobody keeps a connection open.
    pub(crate) fn revoke(&self) {
        self.revoked.cancel();
        let attachments = std::mem::take(&mut *lock(&self.attachments));
        drop(attachments);
    }
}

/// What the ends of its exchanges told, for whoever judges its health.
impl Cell {
    /// Compute errors in a row, up to now.
    pub(crate) fn compute_errors(&self) -> u32 {
        lock(&self.outcomes).compute_errors()
    }

    /// Speeds of the answers that ended since the last call, oldest first; the latest 256 of them.
    pub(crate) fn take_decodes(&self) -> Vec<Decode> {
        lock(&self.outcomes).take_decodes()
    }

    /// What prompts took since the last call, oldest first; the latest 256 of them.
    pub(crate) fn take_prefills(&self) -> Vec<Prefill> {
        lock(&self.outcomes).take_prefills()
    }

    /// Tokens of the largest prompt so far, cached ones included.
    pub(crate) fn largest_prompt(&self) -> u64 {
        lock(&self.outcomes).largest_prompt()
    }
}
