//! Functions of the queue for the model's task: opening and closing generations, and refusing requests.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::QueueTicket;

use super::refusal::QueueRefusal;
use super::{GenerationEntry, LeaseQueue, OpenedGate, QueueOutbox, QueueState, send_answers};
use crate::error::LeaseDenied;
use crate::lease::cell::GenerationCell;
use crate::sync::lock;

impl LeaseQueue {
    /// Opens a generation: leases on it may be granted, at most `limit` at a time.
    pub(crate) fn open_gate(self: &Arc<Self>, cell: &Arc<GenerationCell>, limit: u32) -> OpenedGate {
        let mut state = lock(&self.state);
        let opened = OpenedGate { waiting: state.waiting(), gap: state.gap.take() };
        state.generations.entry(cell.id).or_insert_with(|| GenerationEntry {
            cell: Arc::clone(cell),
            idle_since: Some(Instant::now()),
            task_will_look: false,
        });
        if state.refusal.as_ref().is_some_and(|refusal| !refusal.is_final()) {
            state.refusal = None;
        }
        let grants = state.dispatch.open(cell.id, limit);
        let mut outbox = QueueOutbox::default();
        self.settle(&mut state, grants, &mut outbox);
        drop(state);
        self.deliver(outbox);
        opened
    }

    /// Closes a generation: no more leases on it are granted. Returns the number of leases that it still
    /// has.
    pub(crate) fn close_gate(self: &Arc<Self>, generation: GenerationId) -> u32 {
        let mut state = lock(&self.state);
        state.close(generation);
        let in_flight = state.dispatch.in_flight(generation);
        self.judge_waiting(state);
        in_flight
    }

    /// Judges prompts that wait for memory again, and then releases the lock.
    fn judge_waiting(self: &Arc<Self>, mut state: MutexGuard<'_, QueueState>) {
        if state.admit.waiting() == 0 {
            return;
        }
        let mut outbox = QueueOutbox::default();
        self.settle(&mut state, Vec::new(), &mut outbox);
        drop(state);
        self.deliver(outbox);
    }

    /// Closes a generation that refused a connection, and wakes the model's task to probe it.
    pub(crate) fn doubt_generation(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        if state.generations.contains_key(&generation) {
            state.close(generation);
            state.doubted.push(generation);
        }
        self.judge_waiting(state);
        self.wake.notify_one();
    }

    /// Returns the generations that refused a connection since the last call.
    pub(crate) fn take_doubts(&self) -> Vec<GenerationId> {
        std::mem::take(&mut lock(&self.state).doubted)
    }

    /// Removes a generation whose process is gone.
    pub(crate) fn remove_generation(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.close(generation);
        state.dispatch.forget(generation);
        let entry = state.generations.remove(&generation);
        let rested = entry.as_ref().map(|entry| entry.idle_since.unwrap_or_else(Instant::now));
        state.last_idle = rested.into_iter().chain(state.last_idle).max();
        self.judge_waiting(state);
        self.changes.notify_waiters();
        drop(entry);
    }

    /// Starts or stops refusing new requests. Waiting requests that no process can serve are refused, too.
    /// After a final refusal (shutdown, removal), waiting requests stay if a generation is open.
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

    /// Refuses all waiting requests.
    pub(crate) fn refuse_waiting(&self, denied: &LeaseDenied) {
        let dismissed = lock(&self.state).dismiss(denied);
        send_answers(dismissed);
    }

    /// Refuses requests that have been waiting since `moment` or longer, unless a generation is open.
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
            let waiter = state.waiters.remove(&ticket).filter(|_| waits);
            dismissed.extend(waiter.map(|waiter| (waiter.answer, Err(denied.clone()))));
        }
        state.full_told &= state.waiting() >= state.depth;
        drop(state);
        send_answers(dismissed);
    }

    /// Pauses or resumes the time limits of waiting requests. They are paused while a process drains and
    /// stops.
    pub(crate) fn pause_clock(&self, stands: bool) {
        let mut state = lock(&self.state);
        state.paused = state.paused_total();
        state.paused_since = stands.then(Instant::now);
    }

    /// Sets the maximum number of waiting requests and their time limit.
    pub(crate) fn set_queue_limits(&self, depth: usize, wait: Duration) {
        let mut state = lock(&self.state);
        state.depth = depth;
        state.wait = wait;
        state.dispatch.set_depth(depth);
    }
}
