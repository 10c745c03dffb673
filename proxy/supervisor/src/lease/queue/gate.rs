//! Queue functions for the model's task: opening and closing generations, and refusing requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::QueueTicket;

use super::state::{QueueOutbox, QueueState};
use super::{LeaseQueue, OpenedGate};
use crate::error::{BackendFailure, LeaseDenied};
use crate::lease::cell::GenerationCell;

impl LeaseQueue {
    /// Opens a generation for at most `limit` leases at a time.
    pub(crate) fn open_gate(self: &Arc<Self>, cell: &Arc<GenerationCell>, limit: u32) -> OpenedGate {
        self.update(|state, outbox| {
            let opened = OpenedGate { waiting: state.waiting(), gap: state.take_gap() };
            state.table.add(cell);
            self.has_replicas.store(state.table.has_replicas(), Ordering::Relaxed);
            state.refusal.take_if(|refusal| !refusal.is_final());
            let grants = state.dispatch.open(cell.id, limit);
            state.settle(grants, outbox);
            opened
        })
    }

    /// Grants no more leases on a generation. Returns its number of leases.
    pub(crate) fn close_gate(self: &Arc<Self>, generation: GenerationId) -> u32 {
        self.update(|state, outbox| {
            state.close(generation);
            let in_flight = state.dispatch.in_flight(generation);
            state.judge_waiting(outbox);
            in_flight
        })
    }

    /// Closes a generation that refused a connection, and wakes the task to probe it.
    pub(crate) fn doubt_generation(self: &Arc<Self>, generation: GenerationId) {
        self.update(|state, outbox| {
            state.doubt(generation);
            state.judge_waiting(outbox);
            outbox.wake = true;
        });
    }

    pub(crate) fn remove_generation(self: &Arc<Self>, generation: GenerationId) {
        let _removed = self.update(|state, outbox| {
            state.close(generation);
            state.dispatch.forget(generation);
            let entry = state.table.remove(generation);
            state.judge_waiting(outbox);
            entry
        });
        self.ward.changes.notify_waiters();
    }

    /// Starts or stops refusing requests, also waiting ones that no process can serve. After a final refusal
    /// (shutdown, removal), an open generation still serves waiting requests.
    pub(crate) fn set_refusal(self: &Arc<Self>, refusal: Option<QueueRefusal>) {
        self.update(|state, outbox| {
            let is_final =
                |refusal: &Option<QueueRefusal>| refusal.as_ref().is_some_and(QueueRefusal::is_final);
            if is_final(&state.refusal) && !is_final(&refusal) {
                return;
            }
            let denied = refusal.as_ref().map(QueueRefusal::denied);
            state.refusal = refusal;
            if let Some(denied) = denied.filter(|_| !state.dispatch.any_open()) {
                state.dismiss(&denied, outbox);
            }
        });
    }

    pub(crate) fn refuse_waiting(self: &Arc<Self>, denied: &LeaseDenied) {
        self.update(|state, outbox| state.dismiss(denied, outbox));
    }

    /// Refuses requests that wait since `moment` or longer, unless a generation is open.
    pub(crate) fn refuse_waiting_since(self: &Arc<Self>, denied: &LeaseDenied, moment: Instant) {
        self.update(|state, outbox| {
            if state.dispatch.any_open() {
                return;
            }
            let meant = state.waiters.iter().filter(|(_, waiter)| waiter.since <= moment);
            for ticket in meant.map(|(ticket, _)| *ticket).collect::<Vec<QueueTicket>>() {
                if state.dispatch.cancel(ticket) || state.admit.remove_waiting(ticket).is_some() {
                    state.refuse(ticket, denied.clone(), outbox);
                }
            }
            state.limits.is_full_logged &= state.waiting() >= state.limits.depth;
        });
    }
}

impl QueueState {
    pub(super) fn close(&mut self, generation: GenerationId) {
        let open = self.dispatch.any_open();
        self.dispatch.close(generation);
        if open && !self.dispatch.any_open() {
            self.table.gap = Some(Instant::now());
        }
    }

    pub(super) fn doubt(&mut self, generation: GenerationId) {
        if self.table.entries.contains_key(&generation) {
            self.close(generation);
            self.table.doubted.push(generation);
        }
    }

    /// Ends the time without an open generation, and returns the moment when the time began.
    fn take_gap(&mut self) -> Option<Instant> {
        if self.dispatch.any_open() {
            return None;
        }
        // No generation has been open yet if the first start hung and was replaced.
        self.table.gap.take().or_else(|| self.waiters.values().map(|waiter| waiter.since).min())
    }

    fn judge_waiting(&mut self, outbox: &mut QueueOutbox) {
        if self.admit.waiting() > 0 {
            self.settle(Vec::new(), outbox);
        }
    }

    fn dismiss(&mut self, denied: &LeaseDenied, outbox: &mut QueueOutbox) {
        let mut tickets = self.dispatch.dismiss();
        tickets.extend(self.admit.remove_all());
        self.coming.retry = None;
        self.limits.is_full_logged = false;
        for ticket in tickets {
            self.refuse(ticket, denied.clone(), outbox);
        }
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
