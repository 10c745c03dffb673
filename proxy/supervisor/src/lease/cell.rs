//! State of one generation that its leases share: address, work, and progress of its requests.

use std::any::{Any, TypeId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::{GenerationId, QuickMap, ServerFacts, WorkDone};

use crate::lease::address::LeaseAddress;
use crate::lease::outcomes::{DecodeSpeed, OutcomeStats, PrefillSpeed};
use crate::lease::pulse::ProgressTracker;
use crate::process::BackendProcess;
use crate::process::needs::AnswerIdentity;
use crate::sync::lock;

/// State of one generation that its leases share.
#[derive(Debug)]
pub(crate) struct GenerationCell {
    pub(crate) id: GenerationId,
    pub(crate) address: LeaseAddress,
    /// The process; empty until it has been created.
    pub(crate) process: OnceLock<Weak<dyn BackendProcess>>,
    born: Instant,
    facts: Mutex<ServerFacts>,
    /// Identity of the process's answers when it started; empty until known.
    pub(crate) kin: OnceLock<AnswerIdentity>,
    /// True if llama-warden chose the slot directory; false if the command names one.
    pub(crate) saves_for_us: AtomicBool,
    pub(super) work: Mutex<WorkDone>,
    /// Time of the last received byte, in microseconds since `born`, plus one; 0 before the first byte.
    progress: AtomicU64,
    pub(crate) pulses: ProgressTracker,
    pub(super) outcomes: Mutex<OutcomeStats>,
    pub(super) attachments: Mutex<QuickMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    /// Time for which the process had hung when we ended it; empty if it had not hung.
    hung_for: OnceLock<Duration>,
    /// True if we have asked the process to end.
    stop_requested: AtomicBool,
    pub(super) revoked: CancellationToken,
}

impl GenerationCell {
    pub(crate) fn new(id: GenerationId, address: impl Into<LeaseAddress>, facts: ServerFacts) -> Self {
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
            pulses: ProgressTracker::new(),
            outcomes: Mutex::default(),
            attachments: Mutex::default(),
            hung_for: OnceLock::new(),
            stop_requested: AtomicBool::new(false),
            revoked: CancellationToken::new(),
        }
    }

    /// Sets facts of a process that this instance took over: the work done before, and who may save its
    /// slots.
    pub(crate) fn inherit(&self, work: WorkDone, saves_for_us: bool) {
        *lock(&self.work) = work;
        self.saves_for_us.store(saves_for_us, Ordering::Relaxed);
    }

    /// Adds work done for requests of another instance.
    pub(crate) fn add_work(&self, work: WorkDone) {
        *lock(&self.work) += work;
    }

    pub(crate) fn work(&self) -> WorkDone {
        *lock(&self.work)
    }

    pub(crate) fn facts(&self) -> ServerFacts {
        *lock(&self.facts)
    }

    /// Updates the facts, which may be measured after the start.
    pub(crate) fn set_facts(&self, facts: ServerFacts) {
        *lock(&self.facts) = facts;
    }

    fn micros(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.born).as_micros()).unwrap_or(u64::MAX - 1)
    }

    pub(super) fn note_progress(&self) {
        self.progress.store(self.micros(Instant::now()) + 1, Ordering::Relaxed);
    }

    /// True if a byte was received at or after this moment.
    pub(crate) fn progressed_since(&self, moment: Instant) -> bool {
        self.progress.load(Ordering::Relaxed) > self.micros(moment)
    }

    /// Records that we end the process because it has hung for `since`. Call before
    /// [`GenerationCell::request_stop`].
    pub(crate) fn note_hung(&self, since: Duration) {
        // Keep the first record.
        let _known = self.hung_for.set(since);
    }

    /// Time for which the process had hung when we ended it; `None` if it had not.
    pub(crate) fn hung_for(&self) -> Option<Duration> {
        self.hung_for.get().copied()
    }

    /// True if we have asked the process to end.
    pub(crate) fn was_stopped(&self) -> bool {
        self.stop_requested.load(Ordering::Acquire)
    }

    /// Records that we ask the process to end, and revokes its leases.
    pub(crate) fn request_stop(&self) {
        self.stop_requested.store(true, Ordering::Release);
        self.revoke();
    }

    /// Revokes the leases because the process is ending. Also drops the attached values, because
    /// llama-server ends sooner without open connections.
    pub(crate) fn revoke(&self) {
        self.revoked.cancel();
        let attachments = std::mem::take(&mut *lock(&self.attachments));
        drop(attachments);
    }
}

/// Health figures from the outcomes of the generation's requests.
impl GenerationCell {
    /// Number of consecutive compute errors up to now.
    pub(crate) fn compute_errors(&self) -> u32 {
        lock(&self.outcomes).compute_errors()
    }

    /// Decoding speeds of answers since the last call, oldest first, at most the latest 256.
    pub(crate) fn take_decodes(&self) -> Vec<DecodeSpeed> {
        lock(&self.outcomes).take_decodes()
    }

    /// Prompt evaluations since the last call, oldest first, at most the latest 256.
    pub(crate) fn take_prefills(&self) -> Vec<PrefillSpeed> {
        lock(&self.outcomes).take_prefills()
    }

    /// Number of tokens of the largest prompt so far, including cached ones.
    pub(crate) fn largest_prompt(&self) -> u64 {
        lock(&self.outcomes).largest_prompt()
    }
}
