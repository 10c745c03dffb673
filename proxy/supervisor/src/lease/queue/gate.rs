//! The side of the model's task: gates are opened and closed, callers turned away.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::Ticket;

use super::refusal::Refusal;
use super::{Entry, Leases, Opened, Outbox, State, hand_over};
use crate::error::Denied;
use crate::lease::cell::Cell;
use crate::sync::lock;

impl Leases {
    /// The generation may take leases from now on.
    pub(crate) fn open(self: &Arc<Self>, cell: &Arc<Cell>, limit: u32) -> Opened {
        let mut state = lock(&self.state);
        let opened = Opened { waiting: state.waiting(), gap: state.gap.take() };
        state.generations.entry(cell.id).or_insert_with(|| Entry {
            cell: Arc::clone(cell),
            idle_since: Some(Instant::now()),
            looks: false,
        });
        if state.refusal.as_ref().is_some_and(|refusal| !refusal.is_final()) {
            state.refusal = None;
        }
        let grants = state.dispatch.open(cell.id, limit);
        let mut outbox = Outbox::default();
        self.settle(&mut state, grants, &mut outbox);
        drop(state);
        self.deliver(outbox);
        opened
    }

    /// The generation takes no more leases. Returns those that it holds.
    pub(crate) fn close(self: &Arc<Self>, generation: GenerationId) -> u32 {
        let mut state = lock(&self.state);
        state.close(generation);
        let in_flight = state.dispatch.in_flight(generation);
        self.look_again(state);
        in_flight
    }

    /// Something changed for those who wait for room. Gives the lock back.
    fn look_again(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.admit.waiting() == 0 {
            return;
        }
        let mut outbox = Outbox::default();
        self.settle(&mut state, Vec::new(), &mut outbox);
        drop(state);
        self.deliver(outbox);
    }

    /// A caller found that the generation takes no connections: closes it and has the task look.
    pub(crate) fn doubt(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        if state.generations.contains_key(&generation) {
            state.close(generation);
            state.doubted.push(generation);
        }
        self.look_again(state);
        self.wake.notify_one();
    }

    /// The generations that were doubted since the last call.
    pub(crate) fn take_doubts(&self) -> Vec<GenerationId> {
        std::mem::take(&mut lock(&self.state).doubted)
    }

    /// The generation's process is gone.
    pub(crate) fn forget(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.close(generation);
        state.dispatch.forget(generation);
        let entry = state.generations.remove(&generation);
        let rested = entry.as_ref().map(|entry| entry.idle_since.unwrap_or_else(Instant::now));
        state.rested = rested.into_iter().chain(state.rested).max();
        self.look_again(state);
        self.moved.notify_waiters();
        drop(entry);
    }

    /// Turns callers away from now on, or no longer. Those who wait and cannot be served are dismissed with the reason;
    /// a final refusal lets those wait on for whom something is open.
    pub(crate) fn refuse(&self, refusal: Option<Refusal>) {
        let mut state = lock(&self.state);
        if state.refusal.as_ref().is_some_and(Refusal::is_final)
            && refusal.as_ref().is_none_or(|refusal| !refusal.is_final())
        {
            return;
        }
        let denied = refusal.as_ref().map(Refusal::denied);
        state.refusal = refusal;
        let dismissed = match denied {
            Some(denied) if !state.dispatch.any_open() => state.dismiss(&denied),
            _ => Vec::new(),
        };
        drop(state);
        hand_over(dismissed);
    }

    /// Turns everybody away who waits.
    pub(crate) fn dismiss(&self, denied: &Denied) {
        let dismissed = lock(&self.state).dismiss(denied);
        hand_over(dismissed);
    }

    /// Turns those away who wait since that moment or longer, unless somebody can serve them.
    pub(crate) fn dismiss_since(&self, denied: &Denied, moment: Instant) {
        let mut state = lock(&self.state);
        if state.dispatch.any_open() {
            return;
        }
        let meant = state.waiters.iter().filter(|(_, waiter)| waiter.since <= moment);
        let meant: Vec<Ticket> = meant.map(|(ticket, _)| *ticket).collect();
        let mut dismissed = Vec::new();
        for ticket in meant {
            let waits = state.dispatch.cancel(ticket) || state.admit.leave(ticket).is_some();
            let waiter = state.waiters.remove(&ticket).filter(|_| waits);
            dismissed.extend(waiter.map(|waiter| (waiter.answer, Err(denied.clone()))));
        }
        state.full_told &= state.waiting() >= state.depth;
        drop(state);
        hand_over(dismissed);
    }

    /// The clock of those who wait stands from now on, or goes on: how long a process drains and stops is not theirs.
    pub(crate) fn stand(&self, stands: bool) {
        let mut state = lock(&self.state);
        state.stood = state.stood();
        state.stands_since = stands.then(Instant::now);
    }

    /// New bounds of the queue.
    pub(crate) fn set_queue(&self, depth: usize, wait: Duration) {
        let mut state = lock(&self.state);
        state.depth = depth;
        state.wait = wait;
        state.dispatch.set_depth(depth);
    }
}
