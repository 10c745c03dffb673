//! Queue functions for the model's task: opening and closing generations, and refusing requests.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::QueueTicket;

use super::{GenerationEntry, LeaseQueue, OpenedGate, QueueState, send_answers};
use crate::error::{BackendFailure, LeaseDenied};
use crate::lease::cell::GenerationCell;
use crate::sync::lock;

impl LeaseQueue {
    /// Opens a generation for at most `limit` leases at a time.
    pub(crate) fn open_gate(self: &Arc<Self>, cell: &Arc<GenerationCell>, limit: u32) -> OpenedGate {
        let mut state = lock(&self.state);
        let opened = OpenedGate { waiting: state.waiting(), gap: state.take_gap() };
        state.table.entries.entry(cell.id).or_insert_with(|| GenerationEntry {
            cell: Arc::clone(cell),
            idle_since: Some(Instant::now()),
            task_will_look: false,
        });
        if state.refusal.as_ref().is_some_and(|refusal| !refusal.is_final()) {
            state.refusal = None;
        }
        let grants = state.dispatch.open(cell.id, limit);
        self.settle_and_deliver(state, grants);
        opened
    }

    /// Grants no more leases on a generation. Returns its number of leases.
    pub(crate) fn close_gate(self: &Arc<Self>, generation: GenerationId) -> u32 {
        let mut state = lock(&self.state);
        state.close(generation);
        let in_flight = state.dispatch.in_flight(generation);
        self.judge_waiting(state);
        in_flight
    }

    /// Judges prompts that wait for memory, and releases the lock.
    fn judge_waiting(self: &Arc<Self>, state: MutexGuard<'_, QueueState>) {
        if state.admit.waiting() > 0 {
            self.settle_and_deliver(state, Vec::new());
        }
    }

    /// Closes a generation that refused a connection, and wakes the task to probe it.
    pub(crate) fn doubt_generation(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        if state.table.entries.contains_key(&generation) {
            state.close(generation);
            state.table.doubted.push(generation);
        }
        self.judge_waiting(state);
        self.wake.notify_one();
    }

    pub(crate) fn take_doubts(&self) -> Vec<GenerationId> {
        std::mem::take(&mut lock(&self.state).table.doubted)
    }

    pub(crate) fn remove_generation(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.close(generation);
        state.dispatch.forget(generation);
        let entry = state.table.entries.remove(&generation);
        let rested = entry.as_ref().map(|entry| entry.idle_since.unwrap_or_else(Instant::now));
        state.table.last_idle = rested.into_iter().chain(state.table.last_idle).max();
        self.judge_waiting(state);
        self.changes.notify_waiters();
        drop(entry);
    }

    /// Starts or stops refusing requests, also waiting ones that no process can serve. After a final refusal
    /// (shutdown, removal), an open generation still serves waiting requests.
    pub(crate) fn set_refusal(&self, refusal: Option<QueueRefusal>) {
        let mut state = lock(&self.state);
        if state.refusal.as_ref().is_some_and(QueueRefusal::is_final)
            && refusal.as_ref().is_none_or(|refusal| !refusal.is_final())
        {
            return;
        }
        let denied = refusal.as_ref().map(QueueRefusal::denied);
        state.refusal = refusal;
        let dismissed = match denied {
            Some(denied) if !state.dispatch.any_open() => state.dismiss(&denied),
            _ => Vec::new(),
        };
        drop(state);
        send_answers(dismissed);
    }

    pub(crate) fn refuse_waiting(&self, denied: &LeaseDenied) {
        let dismissed = lock(&self.state).dismiss(denied);
        send_answers(dismissed);
    }

    /// Refuses requests that wait since `moment` or longer, unless a generation is open.
    pub(crate) fn refuse_waiting_since(&self, denied: &LeaseDenied, moment: Instant) {
        let mut state = lock(&self.state);
        if state.dispatch.any_open() {
            return;
        }
        let meant = state.waiters.iter().filter(|(_, waiter)| waiter.since <= moment);
        let meant: Vec<QueueTicket> = meant.map(|(ticket, _)| *ticket).collect();
        let mut dismissed = Vec::new();
        for ticket in meant {
            let waits = state.dispatch.cancel(ticket) || state.admit.remove_waiting(ticket).is_some();
            if let Some(waiter) = state.waiters.remove(&ticket)
                && waits
            {
                dismissed.push((waiter.answer, Err(denied.clone())));
            }
        }
        state.limits.is_full_logged &= state.waiting() >= state.limits.depth;
        drop(state);
        send_answers(dismissed);
    }

    pub(crate) fn pause_clock(&self, stands: bool) {
        lock(&self.state).limits.set_paused(stands);
    }

    pub(crate) fn set_queue_limits(&self, depth: usize, wait: Duration) {
        let mut state = lock(&self.state);
        state.limits.depth = depth;
        state.limits.wait = wait;
        state.dispatch.set_depth(depth);
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QueueRefusal {
    /// Starts fail; time of the next attempt.
    StartFailed(BackendFailure, Instant),
    /// The next start needs a changed flag or file; time of the next attempt without a change.
    Failed(BackendFailure, Instant),
    /// The remote endpoint does not answer; time of the next probe.
    EndpointSilent(BackendFailure, Instant),
    /// The fleet shuts down; new requests are refused even if a process serves.
    ShuttingDown,
    /// The model was removed; new requests are refused even if a process serves.
    Removed,
}

impl QueueRefusal {
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::ShuttingDown | Self::Removed)
    }

    pub(super) fn denied(&self) -> LeaseDenied {
        // Round up, so that clients do not retry too early.
        let left = |at: &Instant| {
            let left = at.saturating_duration_since(Instant::now());
            Duration::from_secs((left.as_secs() + u64::from(left.subsec_nanos() > 0)).max(1))
        };
        match self {
            Self::StartFailed(failure, at) => LeaseDenied::StartFailed(failure.clone(), Some(left(at))),
            Self::Failed(failure, at) => LeaseDenied::Failed(failure.clone(), left(at)),
            Self::EndpointSilent(failure, at) => LeaseDenied::Silent(failure.clone(), left(at)),
            Self::ShuttingDown => LeaseDenied::ShuttingDown,
            Self::Removed => LeaseDenied::Removed,
        }
    }
}
