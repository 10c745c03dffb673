//! Requests that may have killed their server are suspected, tried without other requests, or refused.
//! [`warden_policies::quarantine`] decides; this module applies the decisions under the queue's lock.
//!
//! ```text
//!     a connection broke (gateway) --> broke --+
//!                                              +--> died (process ended) --> suspects, or a refusal
//!     its client left ----------> left --------+                             after a trial
//!     alone (gateway waits) --> trial ---------+--> lives (a probe was answered) --> no suspects
//! ```

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::{LeaseGrant, LeaseKind};
use warden_policies::quarantine::{QuarantinePolicy, RequestFingerprint, RequestStanding, ServerDeath};

use super::{LeaseQueue, QueueOutbox, QueueState};
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

impl LeaseQueue {
    fn now(&self) -> Duration {
        self.born.elapsed()
    }

    fn note_change(&self, state: &QueueState) {
        self.has_suspects.store(!state.quarantine.is_empty(), Ordering::Relaxed);
        self.changes.notify_waiters();
    }

    pub(crate) fn set_quarantine(&self, policy: QuarantinePolicy) {
        let mut state = lock(&self.state);
        state.quarantine.set_policy(policy);
        self.note_change(&state);
    }

    /// Costs one atomic load while the quarantine knows no request.
    pub(crate) fn request_standing(&self, request: RequestFingerprint) -> RequestStanding {
        if !self.has_suspects.load(Ordering::Relaxed) {
            return RequestStanding::Clear;
        }
        let mut state = lock(&self.state);
        let standing = state.quarantine.standing(request, self.now());
        self.has_suspects.store(!state.quarantine.is_empty(), Ordering::Relaxed);
        standing
    }

    pub(crate) fn note_refusal(&self, request: RequestFingerprint) {
        lock(&self.state).quarantine.count_refusal(request);
    }

    /// Records a connection that broke after the whole request was sent.
    pub(crate) fn note_broken(&self, generation: GenerationId, request: RequestFingerprint) {
        let mut state = lock(&self.state);
        let suspect = state.quarantine.record_break(generation, request, self.now());
        if state.table.entries.contains_key(&generation) {
            // Close in the same step: an answer to an earlier probe does not show that the process lives.
            state.close(generation);
            state.table.doubted.push(generation);
        }
        self.note_change(&state);
        drop(state);
        self.wake.notify_one();
        if suspect {
            self.log_suspects(generation, vec![request]);
        }
    }

    pub(crate) fn note_lost(&self, generation: GenerationId, request: RequestFingerprint) {
        let has_ended = lock(&self.state).quarantine.has_ended(generation);
        if has_ended {
            self.note_broken(generation, request);
        }
    }

    /// Records that a client left after its whole request was sent.
    pub(crate) fn note_left(&self, generation: GenerationId, request: RequestFingerprint) {
        let mut state = lock(&self.state);
        let suspect = state.quarantine.record_abandoned(generation, request, self.now());
        if suspect {
            self.note_change(&state);
            drop(state);
            self.log_suspects(generation, vec![request]);
        }
    }

    pub(crate) fn note_read_only(&self, generation: GenerationId, begins: bool) {
        lock(&self.state).dispatch.count_reader(generation, begins);
    }

    fn log_suspects(&self, generation: GenerationId, fingerprints: Vec<RequestFingerprint>) {
        self.journal.record(
            Some(&self.name),
            Some(generation),
            EventKind::RequestsSuspected { fingerprints },
        );
    }

    pub(crate) fn note_alive(&self, generation: GenerationId) {
        if !self.has_suspects.load(Ordering::Relaxed) {
            return;
        }
        let mut state = lock(&self.state);
        if state.table.doubted.contains(&generation) {
            // The answer may be older than the broken connection.
            return;
        }
        state.quarantine.record_alive(generation);
        self.note_change(&state);
    }

    pub(crate) fn note_ended(&self, cell: &GenerationCell, ending: ProcessEnd) {
        let mut state = lock(&self.state);
        if !state.table.entries.contains_key(&cell.id) {
            return;
        }
        // After closing, no more requests join those counted here.
        state.close(cell.id);
        let state = &mut *state;
        if ending == ProcessEnd::Stopped {
            state.quarantine.record_stop(cell.id);
            return self.note_change(state);
        }
        let death = ServerDeath {
            others: state.dispatch.other_leases(cell.id),
            hung: cell.hung_for().unwrap_or_default(),
            proves: ending == ProcessEnd::ByItself,
        };
        let found = state.quarantine.record_death(cell.id, death, self.now());
        let refuse_for = state.quarantine.policy().refuse_for;
        self.note_change(state);
        if !found.suspects.is_empty() {
            self.log_suspects(cell.id, found.suspects);
        }
        if let Some(fingerprint) = found.refused {
            let seconds = refuse_for.as_secs();
            let kind = EventKind::RequestQuarantined { fingerprint, seconds };
            self.journal.record(Some(&self.name), Some(cell.id), kind);
        }
    }

    /// True if a request killed the generation and is refused since.
    pub(crate) fn was_killed_by_request(&self, generation: GenerationId) -> bool {
        lock(&self.state).quarantine.was_killed_by_request(generation)
    }

    pub(crate) async fn until_settled(&self, generation: GenerationId) {
        loop {
            let mut moved = std::pin::pin!(self.changes.notified());
            moved.as_mut().enable();
            if lock(&self.state).quarantine.is_settled(generation) {
                return;
            }
            moved.await;
        }
    }

    pub(crate) fn seek_solitude(&self, generation: GenerationId, kind: LeaseKind) {
        lock(&self.state).dispatch.seek_alone(generation, kind);
    }

    pub(crate) fn stop_seeking(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        let mut state = lock(&self.state);
        let grants = state.dispatch.stop_seeking(generation, kind);
        self.settle_and_wake(state, grants);
    }

    fn settle_and_wake(self: &Arc<Self>, mut state: MutexGuard<'_, QueueState>, grants: Vec<LeaseGrant>) {
        let mut outbox = QueueOutbox::default();
        self.settle(&mut state, grants, &mut outbox);
        drop(state);
        self.changes.notify_waiters();
        self.deliver(outbox);
    }

    /// Ends the solitude of this lease's request.
    pub(crate) fn end_solitude(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.quarantine.end_trial(generation);
        let grants = state.dispatch.end_alone(generation);
        self.settle_and_wake(state, grants);
    }

    /// Clears a suspected request that was answered.
    pub(crate) fn note_survival(&self, generation: GenerationId, request: RequestFingerprint) {
        let mut state = lock(&self.state);
        state.quarantine.record_survival(generation, request);
        self.note_change(&state);
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
            let mut moved = std::pin::pin!(self.changes.notified());
            moved.as_mut().enable();
            let (tried, wait) = {
                let mut state = lock(&self.state);
                let wait = state.quarantine.alone_wait(request);
                (self.try_solitude(&mut state, generation, kind, request), wait)
            };
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

    fn try_solitude(
        &self,
        state: &mut QueueState,
        generation: GenerationId,
        kind: LeaseKind,
        request: RequestFingerprint,
    ) -> SolitudeStep {
        if state.quarantine.has_ended(generation) || !state.table.entries.contains_key(&generation) {
            return SolitudeStep::Decided(SolitudeResult::Gone);
        }
        // A generation with a broken connection is probably dead, and this request would be blamed.
        if !state.quarantine.is_settled(generation) {
            return SolitudeStep::Wait(None);
        }
        // The request of a client that just left may still run and kill the process.
        let lingers = state.quarantine.lingering_time(generation, request, self.now());
        match state.quarantine.standing(request, self.now()) {
            RequestStanding::Refused { left } => SolitudeStep::Decided(SolitudeResult::Refused(left)),
            // A cleared request runs like any other.
            RequestStanding::Clear => SolitudeStep::Decided(SolitudeResult::Shared),
            RequestStanding::Suspect if lingers.is_some() => SolitudeStep::Wait(lingers),
            RequestStanding::Suspect if state.dispatch.try_alone(generation, kind) => {
                state.quarantine.begin_trial(generation, request);
                SolitudeStep::Decided(SolitudeResult::Granted)
            }
            RequestStanding::Suspect => SolitudeStep::Wait(None),
        }
    }

    /// Maximum solitude of this request.
    pub(crate) fn solitude_limit(&self, request: RequestFingerprint) -> Duration {
        lock(&self.state).quarantine.alone_time(request)
    }

    pub(crate) fn quarantine_view(&self) -> QuarantineView {
        let state = lock(&self.state);
        let (quarantined, refusals) = state.quarantine.counts();
        QuarantineView { requests: state.quarantine.list(self.now()), quarantined, refusals }
    }

    /// Clears suspected and refused requests that begin with `which`, or all; returns their number.
    pub(crate) fn release_requests(&self, which: Option<&str>) -> usize {
        let mut state = lock(&self.state);
        let released = state.quarantine.release(which);
        self.note_change(&state);
        drop(state);
        if released > 0 {
            self.journal.record(Some(&self.name), None, EventKind::RequestsReleased { count: released });
        }
        released
    }
}
