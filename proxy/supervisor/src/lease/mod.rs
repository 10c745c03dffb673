//! The right to send one request to one generation of one model, and the queue of those who wait for it.
//!
//! | file | job |
//! |---|---|
//! | `cell` | what belongs to one generation and is touched by its leases |
//! | `queue` | queue, leases and open generations of one model, behind one lock |
//! | `admit` | whether a prompt fits into memory, and who waits because it does not |
//! | `outcomes` | what the ends of exchanges tell about a generation's health |
//! | `pulse` | what its requests wait for |
//! | `refused` | turning away who waits in an instance before us |
//! | `turns`, `prints` | the latest conversations, for the process that follows |

pub mod address;
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
use warden_policies::quarantine::{Fingerprint, Standing};
use warden_policies::{GenerationId, ModelName, ServerFacts, Work};

use crate::lease::address::Address;
use crate::lease::cell::Cell;
use crate::lease::outcomes::Outcome;
use crate::lease::pulse::{Asked, Pulse};
use crate::lease::queue::Leases;
use crate::lease::queue::ward::Alone;
use crate::lease::turns::Turn;
use crate::process::needs::Kin;
use crate::sync::lock;

/// The right to send one request to one generation. Dropping it gives it back, so it belongs into whatever ends with the
/// exchange: the response body.
pub struct Lease {
    leases: Arc<Leases>,
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
const ALONE: u8 = 2;
/// It only watches.
const WATCHES: u8 = 3;

impl Lease {
    pub(crate) fn new(leases: Arc<Leases>, cell: Arc<Cell>, kind: LeaseKind, queued_for: Duration) -> Self {
        let pulse = (kind == LeaseKind::Slot).then(|| cell.pulses.begin());
        let no = || AtomicBool::new(false);
        let (over, reads, pauses, beside) = (no(), no(), no(), AtomicU8::new(PLAIN));
        Self { leases, cell, kind, queued_for, pulse, asked: OnceLock::new(), over, reads, pauses, beside }
    }

    /// The model.
    pub fn model(&self) -> &ModelName {
        self.leases.name()
    }

    /// Whether it is one of a build that is tried beside its model's own.
    pub fn is_canary(&self) -> bool {
        self.leases.is_canary()
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
    pub fn address(&self) -> &Address {
        &self.cell.address
    }

    /// Whether its process still runs, as the kernel knows it now: the supervisor may not have heard of its end yet. Some
    /// system calls, none of which waits.
    pub fn is_running(&self) -> bool {
        let process = self.cell.process.get();
        process.is_none_or(|process| process.upgrade().is_some_and(|process| process.is_running()))
    }

    /// Whether llama-warden told its process to end. If not, and the process has ended, it died.
    pub fn was_stopped(&self) -> bool {
        self.cell.was_told_to_end()
    }

    /// What is known now of how the generation's binary behaves. It may become known while the lease is held.
    pub fn facts(&self) -> ServerFacts {
        self.cell.facts()
    }

    /// The same for generations of the same command, binary and model files: of an answer that one of them began, another can
    /// compute the rest. `None`: not known, or something was set in a process of the model while it ran (an adapter's scale), which
    /// an answer that was under way did not follow.
    pub fn kin(&self) -> Option<Kin> {
        self.cell.kin.get().copied().filter(|_| self.leases.settings.are_untouched())
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
        let busy = self.leases.in_flight(self.cell.id);
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
        if self.needs_no_slot() && !self.reads.swap(true, Ordering::Relaxed) {
            self.leases.reads(self.cell.id, true);
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
        self.leases.note_setting(self.cell.id, path, body);
    }

    /// Whether requests and their answers are kept at all, so that nobody makes a [`Turn`] where they are not.
    pub fn keeps_turns(&self) -> bool {
        self.leases.turns.keeps()
    }

    /// The request was answered whole: the process that follows this one may need to know it.
    pub fn note_turn(&self, turn: Turn) {
        self.leases.turns.note(self.cell.id, turn);
    }

    /// Whether the backend saves slots for us alone: the operator has not enabled that for clients.
    pub fn saves_for_us(&self) -> bool {
        self.cell.saves_for_us.load(Ordering::Relaxed)
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
        self.leases.doubt(self.cell.id);
    }

    /// The request that this lease was for was sent whole, and its connection broke before its answer was complete: if
    /// its server turns out to have died by itself, it is a suspect.
    pub fn broke(&self, request: Fingerprint) {
        self.note_done();
        self.leases.broke(self.cell.id, request);
    }

    /// The same for a request whose lease was revoked before its answer was complete: the end of its process may be known
    /// sooner than that of its connection. Nothing, if the process was only told to end, unless it hung.
    pub fn lost(&self, request: Fingerprint) {
        self.note_done();
        if self.cell.hung().is_some() {
            self.leases.broke(self.cell.id, request);
        } else {
            self.leases.lost(self.cell.id, request);
        }
    }

    /// Resolves when it is known what became of the generation after a connection to it broke. It does not hold the
    /// lease.
    pub fn settled(&self) -> impl Future<Output = ()> + Send + 'static {
        let (leases, generation) = (Arc::clone(&self.leases), self.cell.id);
        async move { leases.until_settled(generation).await }
    }

    /// What is known against a request to this model.
    pub fn standing(&self, request: Fingerprint) -> Standing {
        self.leases.standing(request)
    }

    /// A request was refused because of what is known against it.
    pub fn note_refusal(&self, request: Fingerprint) {
        self.leases.note_refusal(request);
    }

    /// Waits until nothing else runs in the slots of the generation; from the call on nobody else gets one there. Called
    /// for a suspect before anything of it is sent that could be executed, once for each lease. What it was granted
    /// ends with [`Lease::join`] or the lease.
    pub async fn alone(&self, request: Fingerprint) -> Alone {
        self.beside.store(SEEKS, Ordering::Relaxed);
        self.leases.seek(self.cell.id, self.kind);
        let waiting = self.leases.until_alone(self.cell.id, self.kind, request, Instant::now());
        let alone = tokio::select! {
            biased;
            () = self.cell.revoked.cancelled() => Alone::Gone,
            alone = waiting => alone,
        };
        if alone == Alone::Granted {
            self.beside.store(ALONE, Ordering::Relaxed);
        } else {
            self.beside.store(PLAIN, Ordering::Relaxed);
            self.leases.unseek(self.cell.id, self.kind);
        }
        alone
    }

    /// Whether it was granted to be alone, and nobody was let in since.
    pub fn is_alone(&self) -> bool {
        self.beside.load(Ordering::Relaxed) == ALONE
    }

    /// For how long a suspect may be alone.
    pub fn alone_for(&self, request: Fingerprint) -> Duration {
        self.leases.alone_for(request)
    }

    /// Lets others in beside it, if it was alone.
    pub fn join(&self) {
        if self.beside.compare_exchange(ALONE, PLAIN, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.leases.join(self.cell.id);
        }
    }

    /// The request, against which something was known, was answered: that is forgotten.
    pub fn survived(&self, request: Fingerprint) {
        self.leases.survived(self.cell.id, request);
    }

    /// The answer is a stream of events without an end, which nobody needs to wait for: a drain goes on without it, and
    /// it is no work.
    pub fn watches(&self) {
        let first = self.beside.compare_exchange(PLAIN, WATCHES, Ordering::Relaxed, Ordering::Relaxed);
        if self.needs_no_slot() && first.is_ok() {
            if self.reads.swap(false, Ordering::Relaxed) {
                self.leases.reads(self.cell.id, false);
            }
            self.leases.watches(self.cell.id);
        }
    }

    fn needs_no_slot(&self) -> bool {
        matches!(self.kind, LeaseKind::Aux | LeaseKind::Read)
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
    /// process is killed. A request cut then has no better end to wait for. Also when the process has ended by itself, which
    /// may be known here before its connection breaks: [`Lease::was_stopped`] tells which.
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
            self.leases.reads(self.cell.id, false);
        }
        let asked = self.asked.get().filter(|asked| !self.over.load(Ordering::Relaxed) && asked.is_whole());
        if let Some(request) = asked.and_then(|asked| asked.print()) {
            // Before it gives back its place, which may be taken at once.
            self.leases.left(self.cell.id, request);
        }
        let kind = match self.beside.load(Ordering::Relaxed) {
            WATCHES if self.needs_no_slot() => LeaseKind::Watch,
            SEEKS => {
                self.leases.unseek(self.cell.id, self.kind);
                self.kind
            }
            ALONE => {
                self.leases.join(self.cell.id);
                self.kind
            }
            _ => self.kind,
        };
        self.leases.release(self.cell.id, kind);
    }
}
