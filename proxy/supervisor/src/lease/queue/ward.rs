//! Requests that may have killed their server are suspected, tried without other requests, or refused.
//! [`warden_policies::quarantine`] decides; this module applies the decisions.
//!
//! ```text
//!     a connection broke (gateway) --> broke --+
//!                                              +--> died (process ended) --> suspects, or a refusal
//!     its client left ----------> left --------+                             after a trial
//!     alone (gateway waits) --> trial ---------+--> lives (a probe was answered) --> no suspects
//! ```
//!
//! The ward has its own lock. A step that also needs the queue locks the queue first, then the ward once, so
//! that all steps appear one after the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::{LeaseDispatch, LeaseKind};
use warden_policies::quarantine::{
    QuarantinePolicy, RequestFingerprint, RequestQuarantine, RequestStanding, ServerDeath,
};

use super::{LeaseQueue, ModelJournal};
use crate::clock;
use crate::lease::cell::GenerationCell;
use crate::sync::lock;
use crate::view::QuarantineView;
use crate::view::event::EventKind;

/// Result of waiting for other requests to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SolitudeResult {
    /// No other request runs or gets a slot until the solitude ends.
    Granted,
    /// Other requests still ran at the time limit: the request may run next to them.
    Shared,
    /// The generation ends or has ended; the request was not sent.
    Gone,
    /// The request is quarantined, so it is refused; the quarantine ends after this time.
    Refused(Duration),
}

enum SolitudeStep {
    /// Wait for a change, for this time at most.
    Wait(Option<Duration>),
    Decided(SolitudeResult),
}

/// End of a process, as its requests see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    /// By itself, or ended by the supervisor because it hung.
    ByItself,
    /// Killed by the kernel for lack of memory.
    OutOfMemory,
    /// Stopped by the supervisor or another program.
    Stopped,
}

/// Quarantine of one model, with its clock and the requests that wait for its changes.
#[derive(Debug)]
pub(crate) struct RequestWard {
    journal: ModelJournal,
    /// True if the quarantine knows any request. Requests read this flag without the lock.
    has_suspects: AtomicBool,
    /// Wakes requests that wait for solitude, or for news of a generation.
    pub(super) changes: Notify,
    born: Instant,
    quarantine: Mutex<RequestQuarantine>,
}

impl RequestWard {
    pub(super) fn new(journal: ModelJournal) -> Self {
        Self {
            journal,
            has_suspects: AtomicBool::new(false),
            changes: Notify::new(),
            born: Instant::now(),
            quarantine: Mutex::new(RequestQuarantine::new(warden_policies::defaults().quarantine)),
        }
    }

    fn now(&self) -> Duration {
        self.born.elapsed()
    }

    fn change<T>(&self, change: impl FnOnce(&mut RequestQuarantine) -> T) -> T {
        let mut quarantine = lock(&self.quarantine);
        let result = change(&mut quarantine);
        self.has_suspects.store(!quarantine.is_empty(), Ordering::Relaxed);
        drop(quarantine);
        self.changes.notify_waiters();
        result
    }

    pub(crate) fn set_policy(&self, policy: QuarantinePolicy) {
        self.change(|quarantine| quarantine.set_policy(policy));
    }

    /// Costs one atomic load while the quarantine knows no request.
    pub(crate) fn standing(&self, request: RequestFingerprint) -> RequestStanding {
        if !self.has_suspects.load(Ordering::Relaxed) {
            return RequestStanding::Clear;
        }
        let mut quarantine = lock(&self.quarantine);
        let standing = quarantine.standing(request, self.now());
        self.has_suspects.store(!quarantine.is_empty(), Ordering::Relaxed);
        standing
    }

    pub(crate) fn note_refusal(&self, request: RequestFingerprint) {
        lock(&self.quarantine).count_refusal(request);
    }

    /// Records that a client left after its whole request was sent.
    pub(crate) fn note_left(&self, generation: GenerationId, request: RequestFingerprint) {
        if self.change(|quarantine| quarantine.record_abandoned(generation, request, self.now())) {
            self.log_suspects(generation, vec![request]);
        }
    }

    fn log_suspects(&self, generation: GenerationId, fingerprints: Vec<RequestFingerprint>) {
        self.journal.record(Some(generation), EventKind::RequestsSuspected { fingerprints });
    }

    /// Records that a process died by itself, and logs the suspects or the refused request.
    fn note_death(&self, generation: GenerationId, death: ServerDeath) {
        let (found, refuse_for) = self.change(|quarantine| {
            (quarantine.record_death(generation, death, self.now()), quarantine.policy().refuse_for)
        });
        if !found.suspects.is_empty() {
            self.log_suspects(generation, found.suspects);
        }
        if let Some(fingerprint) = found.refused {
            let seconds = refuse_for.as_secs();
            self.journal.record(Some(generation), EventKind::RequestQuarantined { fingerprint, seconds });
        }
    }

    pub(crate) fn has_ended(&self, generation: GenerationId) -> bool {
        lock(&self.quarantine).has_ended(generation)
    }

    /// True if a request killed the generation and is refused since.
    pub(crate) fn was_killed_by_request(&self, generation: GenerationId) -> bool {
        lock(&self.quarantine).was_killed_by_request(generation)
    }

    pub(crate) async fn until_settled(&self, generation: GenerationId) {
        loop {
            let mut moved = std::pin::pin!(self.changes.notified());
            moved.as_mut().enable();
            if lock(&self.quarantine).is_settled(generation) {
                return;
            }
            moved.await;
        }
    }

    /// Clears a suspected request that was answered.
    pub(crate) fn note_survival(&self, generation: GenerationId, request: RequestFingerprint) {
        self.change(|quarantine| quarantine.record_survival(generation, request));
    }

    /// `known`: the generation was opened and its process is not gone. Returns the time limit of the wait too.
    fn try_solitude(
        &self,
        dispatch: &mut LeaseDispatch,
        known: bool,
        generation: GenerationId,
        kind: LeaseKind,
        request: RequestFingerprint,
    ) -> (SolitudeStep, Duration) {
        let mut quarantine = lock(&self.quarantine);
        let wait = quarantine.alone_wait(request);
        if quarantine.has_ended(generation) || !known {
            return (SolitudeStep::Decided(SolitudeResult::Gone), wait);
        }
        // A generation with a broken connection is probably dead, and this request would be blamed.
        if !quarantine.is_settled(generation) {
            return (SolitudeStep::Wait(None), wait);
        }
        // The request of a client that just left may still run and kill the process.
        let lingers = quarantine.lingering_time(generation, request, self.now());
        let step = match quarantine.standing(request, self.now()) {
            RequestStanding::Refused { left } => SolitudeStep::Decided(SolitudeResult::Refused(left)),
            // A cleared request runs like any other.
            RequestStanding::Clear => SolitudeStep::Decided(SolitudeResult::Shared),
            RequestStanding::Suspect if lingers.is_some() => SolitudeStep::Wait(lingers),
            RequestStanding::Suspect if dispatch.try_alone(generation, kind) => {
                quarantine.begin_trial(generation, request);
                SolitudeStep::Decided(SolitudeResult::Granted)
            }
            RequestStanding::Suspect => SolitudeStep::Wait(None),
        };
        (step, wait)
    }

    /// Maximum solitude of this request.
    pub(crate) fn solitude_limit(&self, request: RequestFingerprint) -> Duration {
        lock(&self.quarantine).alone_time(request)
    }

    pub(crate) fn view(&self) -> QuarantineView {
        let quarantine = lock(&self.quarantine);
        let (quarantined, refusals) = quarantine.counts();
        QuarantineView { requests: quarantine.list(self.now()), quarantined, refusals }
    }

    /// Clears suspected and refused requests that begin with `which`, or all; returns their number.
    pub(crate) fn release(&self, which: Option<&str>) -> usize {
        let released = self.change(|quarantine| quarantine.release(which));
        if released > 0 {
            self.journal.record(None, EventKind::RequestsReleased { count: released });
        }
        released
    }
}

impl LeaseQueue {
    /// Records a connection that broke after the whole request was sent.
    pub(crate) fn note_broken(&self, generation: GenerationId, request: RequestFingerprint) {
        let suspect = self.with_state(|state| {
            // Close in the same step: an answer to an earlier probe does not show that the process lives.
            state.doubt(generation);
            self.ward.change(|quarantine| quarantine.record_break(generation, request, self.ward.now()))
        });
        self.wake.notify_one();
        if suspect {
            self.ward.log_suspects(generation, vec![request]);
        }
    }

    pub(crate) fn note_alive(&self, generation: GenerationId) {
        if !self.ward.has_suspects.load(Ordering::Relaxed) {
            return;
        }
        self.with_state(|state| {
            // The answer may be older than the broken connection of a doubted generation.
            if !state.table.doubted.contains(&generation) {
                self.ward.change(|quarantine| quarantine.record_alive(generation));
            }
        });
    }

    pub(crate) fn note_ended(&self, cell: &GenerationCell, ending: ProcessEnd) {
        self.with_state(|state| {
            if !state.table.entries.contains_key(&cell.id) {
                return;
            }
            // After closing, no more requests join those counted here.
            state.close(cell.id);
            if ending == ProcessEnd::Stopped {
                return self.ward.change(|quarantine| quarantine.record_stop(cell.id));
            }
            let death = ServerDeath {
                others: state.dispatch.other_leases(cell.id),
                hung: cell.hung_for().unwrap_or_default(),
                proves: ending == ProcessEnd::ByItself,
            };
            self.ward.note_death(cell.id, death);
        });
    }

    pub(crate) fn count_reader(&self, generation: GenerationId, begins: bool) {
        self.with_state(|state| state.dispatch.count_reader(generation, begins));
    }

    pub(crate) fn stop_seeking(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        self.update(|state, outbox| {
            let grants = state.dispatch.stop_seeking(generation, kind);
            state.settle(grants, outbox);
        });
        self.ward.changes.notify_waiters();
    }

    /// Ends the solitude of this lease's request.
    pub(crate) fn end_solitude(self: &Arc<Self>, generation: GenerationId) {
        self.update(|state, outbox| {
            lock(&self.ward.quarantine).end_trial(generation);
            let grants = state.dispatch.end_alone(generation);
            state.settle(grants, outbox);
        });
        self.ward.changes.notify_waiters();
    }

    /// Waits for solitude in the lease's generation, or for the time limit.
    pub(crate) async fn until_alone(
        &self,
        generation: GenerationId,
        kind: LeaseKind,
        request: RequestFingerprint,
        since: Instant,
    ) -> SolitudeResult {
        loop {
            let mut moved = std::pin::pin!(self.ward.changes.notified());
            moved.as_mut().enable();
            let (tried, wait) = self.with_state(|state| {
                let known = state.table.entries.contains_key(&generation);
                self.ward.try_solitude(&mut state.dispatch, known, generation, kind, request)
            });
            let look = match tried {
                SolitudeStep::Decided(alone) => return alone,
                SolitudeStep::Wait(look) => look,
            };
            let end = clock::after(since, wait);
            let until = look.map_or(end, |look| clock::after(Instant::now(), look).min(end));
            if tokio::time::timeout_at(until, moved).await.is_err() && Instant::now() >= end {
                return SolitudeResult::Shared;
            }
        }
    }
}
