//! What belongs to one generation and is touched by its leases: where it listens, its work, what its requests wait for.

use std::any::{Any, TypeId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::{GenerationId, QuickMap, ServerFacts, Work};

use crate::lease::address::Address;
use crate::lease::outcomes::{Decode, Outcomes, Prefill};
use crate::lease::pulse::Pulses;
use crate::process::Process;
use crate::process::needs::Kin;
use crate::sync::lock;

/// What belongs to one generation and is touched by its leases.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) id: GenerationId,
    pub(crate) address: Address,
    /// Set once it is there.
    pub(crate) process: OnceLock<Weak<dyn Process>>,
    born: Instant,
    facts: Mutex<ServerFacts>,
    /// What it was started from, once that is known.
    pub(crate) kin: OnceLock<Kin>,
    /// Its process was told where to save slots by us, and not by its own command.
    pub(crate) saves_for_us: AtomicBool,
    pub(super) work: Mutex<Work>,
    /// Microseconds from `born` to the last byte seen, plus one; 0 before the first.
    progress: AtomicU64,
    /// What its requests wait for.
    pub(crate) pulses: Pulses,
    pub(super) outcomes: Mutex<Outcomes>,
    pub(super) attachments: Mutex<QuickMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    /// How long the process had hung when it was told to end; empty if it did not hang.
    hung: OnceLock<Duration>,
    /// llama-warden has told the process to end.
    told_to_end: AtomicBool,
    pub(super) revoked: CancellationToken,
}

impl Cell {
    pub(crate) fn new(id: GenerationId, address: impl Into<Address>, facts: ServerFacts) -> Self {
        Self {
            id,
            address: address.into(),
            process: OnceLock::new(),
            born: Instant::now(),
            facts: Mutex::new(facts),
            kin: OnceLock::new(),
            saves_for_us: AtomicBool::new(false),
            work: Mutex::default(),
            progress: AtomicU64::new(0),
            pulses: Pulses::new(),
            outcomes: Mutex::default(),
            attachments: Mutex::default(),
            hung: OnceLock::new(),
            told_to_end: AtomicBool::new(false),
            revoked: CancellationToken::new(),
        }
    }

    /// What it had done and been told before we had it.
    pub(crate) fn inherit(&self, work: Work, saves_for_us: bool) {
        *lock(&self.work) = work;
        self.saves_for_us.store(saves_for_us, Ordering::Relaxed);
    }

    /// Work that another instance had it do.
    pub(crate) fn add_work(&self, work: Work) {
        *lock(&self.work) += work;
    }

    pub(crate) fn work(&self) -> Work {
        *lock(&self.work)
    }

    pub(crate) fn facts(&self) -> ServerFacts {
        *lock(&self.facts)
    }

    /// More is known of its binary than when it was started.
    pub(crate) fn learn(&self, facts: ServerFacts) {
        *lock(&self.facts) = facts;
    }

    fn micros(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.born).as_micros()).unwrap_or(u64::MAX - 1)
    }

    pub(super) fn note_progress(&self) {
        self.progress.store(self.micros(Instant::now()) + 1, Ordering::Relaxed);
    }

    /// Whether a byte was seen at or after this moment.
    pub(crate) fn progressed_since(&self, moment: Instant) -> bool {
        self.progress.load(Ordering::Relaxed) > self.micros(moment)
    }

    /// It is told to end because it hangs, for so long by now. Before [`Cell::tell_to_end`].
    pub(crate) fn note_hung(&self, since: Duration) {
        // What was true first counts.
        let _known = self.hung.set(since);
    }

    /// For how long it had hung when it was told to end, if it had.
    pub(crate) fn hung(&self) -> Option<Duration> {
        self.hung.get().copied()
    }

    /// Whether it was told to end.
    pub(crate) fn was_told_to_end(&self) -> bool {
        self.told_to_end.load(Ordering::Acquire)
    }

    /// Notes that llama-warden tells the process to end, and revokes its leases.
    pub(crate) fn tell_to_end(&self) {
        self.told_to_end.store(true, Ordering::Release);
        self.revoke();
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
