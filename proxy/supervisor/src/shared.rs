//! One model's queue, leases and open generations, behind one lock: what its callers and its task both touch.
//!
//! Callers come straight here, without a detour over the model's task; the task is only woken when it has something to
//! do. Nothing is awaited, sent or dropped under the lock that could come back for it: grants are collected under it and
//! handed over after it.
//!
//! ```text
//!   lease() -> granted at once -------------------------------> Lease
//!      |                                                          | drop
//!      +-----> Place in the queue -- granted or dismissed --> answer
//!                    | dropped (client left)
//!                    v
//!             place freed, or the lease that was on its way is given back
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use warden_policies::dispatch::{Answer, Dispatch, Grant, LeaseKind, Ticket};
use warden_policies::{GenerationId, ModelName, Work};

use crate::clock;
use crate::error::Denied;
use crate::event::{EventKind, Journal};
use crate::lease::{Cell, Lease};
use crate::sync::lock;
use crate::view::Failure;

/// Why callers are turned away at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The process does not start; the next attempt is at this time.
    StartFailed(Failure, Instant),
    /// It stays down.
    Failed(Failure),
    /// Nobody new is let in, whatever is open.
    ShuttingDown,
    /// Nobody new is let in, whatever is open.
    Removed,
}

impl Refusal {
    fn is_final(&self) -> bool {
        matches!(self, Self::ShuttingDown | Self::Removed)
    }

    fn denied(&self) -> Denied {
        match self {
            Self::StartFailed(failure, at) => {
                let left = at.saturating_duration_since(Instant::now());
                let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
                Denied::StartFailed(failure.clone(), Some(Duration::from_secs(seconds.max(1))))
            }
            Self::Failed(failure) => Denied::Failed(failure.clone()),
            Self::ShuttingDown => Denied::ShuttingDown,
            Self::Removed => Denied::Removed,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    name: ModelName,
    journal: Arc<Journal>,
    /// Wakes the model's task: somebody waits and nothing is open, or a generation has become idle.
    pub(crate) wake: Notify,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    dispatch: Dispatch,
    depth: usize,
    wait: Duration,
    waiters: HashMap<Ticket, Waiter>,
    generations: HashMap<GenerationId, Entry>,
    refusal: Option<Refusal>,
    /// Since when nothing is open, after something was.
    gap: Option<Instant>,
    full_told: bool,
    /// Generations that were found deaf and are closed until the task has looked.
    doubted: Vec<GenerationId>,
}

#[derive(Debug)]
struct Waiter {
    answer: oneshot::Sender<Result<Lease, Denied>>,
    since: Instant,
}

#[derive(Debug)]
struct Entry {
    cell: Arc<Cell>,
    idle_since: Option<Instant>,
}

/// What opening a generation found.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Opened {
    /// Callers that were waiting.
    pub(crate) waiting: usize,
    /// Since when nothing had been open; `None` if something was, or nothing ever.
    pub(crate) gap: Option<Instant>,
}

/// Answers that are handed over once the lock is free.
type Outbox = Vec<(oneshot::Sender<Result<Lease, Denied>>, Result<Lease, Denied>)>;

enum Asked {
    Granted(Lease),
    Queued { ticket: Ticket, answer: oneshot::Receiver<Result<Lease, Denied>>, until: Instant },
}

/// A place in the queue. Dropping it gives it up.
struct Place<'a> {
    shared: &'a Shared,
    ticket: Ticket,
}

impl Place<'_> {
    /// Gives up the place. False if there is none any more: an answer is on its way or has been taken.
    fn leave(&self) -> bool {
        let mut state = lock(&self.shared.state);
        let channel = state.waiters.remove(&self.ticket);
        let had_place = state.dispatch.cancel(self.ticket);
        drop(state);
        drop(channel);
        had_place
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Shared {
    pub(crate) fn new(name: ModelName, journal: Arc<Journal>, depth: usize, wait: Duration) -> Self {
        let state = State {
            dispatch: Dispatch::new(depth),
            depth,
            wait,
            waiters: HashMap::new(),
            generations: HashMap::new(),
            refusal: None,
            gap: None,
            full_told: false,
            doubted: Vec::new(),
        };
        Self { name, journal, wake: Notify::new(), state: Mutex::new(state) }
    }

    pub(crate) fn name(&self) -> &ModelName {
        &self.name
    }

    /// Waits for a lease. See [`crate::Fleet::lease`].
    pub(crate) async fn lease(self: &Arc<Self>, kind: LeaseKind) -> Result<Lease, Denied> {
        let asked = Instant::now();
        let (ticket, mut answer, until) = match self.ask(kind, asked)? {
            Asked::Granted(lease) => return Ok(lease),
            Asked::Queued { ticket, answer, until } => (ticket, answer, until),
        };
        let place = Place { shared: self, ticket };
        match tokio::time::timeout_at(until, &mut answer).await {
            Ok(answer) => answer.unwrap_or(Err(Denied::ShuttingDown)),
            Err(_) if place.leave() => Err(Denied::Deadline { waited: asked.elapsed() }),
            // Granted in this very moment: the answer is on its way.
            Err(_) => answer.await.unwrap_or(Err(Denied::ShuttingDown)),
        }
    }

    fn ask(self: &Arc<Self>, kind: LeaseKind, now: Instant) -> Result<Asked, Denied> {
        let mut state = lock(&self.state);
        let open = state.dispatch.any_open();
        if let Some(refusal) = state.refusal.as_ref().filter(|refusal| refusal.is_final() || !open) {
            return Err(refusal.denied());
        }
        match state.dispatch.request(kind) {
            Answer::Granted(generation) => {
                let cell = state.occupy(generation);
                drop(state);
                match cell {
                    Some(cell) => Ok(Asked::Granted(self.lease_on(cell, kind, Duration::ZERO))),
                    // Cannot be: what is open has its entry.
                    None => Err(Denied::ShuttingDown),
                }
            }
            Answer::Queued(ticket) => {
                let (sender, answer) = oneshot::channel();
                state.waiters.insert(ticket, Waiter { answer: sender, since: now });
                let until = clock::after(now, state.wait);
                drop(state);
                if !open {
                    self.wake.notify_one();
                }
                Ok(Asked::Queued { ticket, answer, until })
            }
            Answer::Full { waiting } => {
                let depth = state.depth;
                let first = !std::mem::replace(&mut state.full_told, true);
                drop(state);
                if first {
                    self.journal.tell(Some(&self.name), None, EventKind::QueueFull { waiting });
                }
                Err(Denied::QueueFull { waiting, depth })
            }
        }
    }

    fn lease_on(self: &Arc<Self>, cell: Arc<Cell>, kind: LeaseKind, queued_for: Duration) -> Lease {
        Lease::new(Arc::clone(self), cell, kind, queued_for)
    }

    /// A lease ends.
    pub(crate) fn release(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        let mut state = lock(&self.state);
        let grants = state.dispatch.release(generation, kind);
        let outbox = self.hand_out(&mut state, grants);
        let idle = state.dispatch.in_flight(generation) == 0;
        if idle && let Some(entry) = state.generations.get_mut(&generation) {
            entry.idle_since = Some(Instant::now());
        }
        drop(state);
        if idle {
            self.wake.notify_one();
        }
        deliver(outbox);
    }

    fn hand_out(self: &Arc<Self>, state: &mut State, grants: Vec<Grant>) -> Outbox {
        let mut outbox = Vec::with_capacity(grants.len());
        for grant in grants {
            let (Some(waiter), Some(cell)) =
                (state.waiters.remove(&grant.ticket), state.occupy(grant.generation))
            else {
                continue;
            };
            let lease = self.lease_on(cell, grant.kind, waiter.since.elapsed());
            outbox.push((waiter.answer, Ok(lease)));
        }
        if state.dispatch.waiting() < state.depth {
            state.full_told = false;
        }
        outbox
    }

    /// The generation may take leases from now on.
    pub(crate) fn open(self: &Arc<Self>, cell: &Arc<Cell>, limit: u32) -> Opened {
        let mut state = lock(&self.state);
        let opened = Opened { waiting: state.dispatch.waiting(), gap: state.gap.take() };
        state
            .generations
            .entry(cell.id)
            .or_insert_with(|| Entry { cell: Arc::clone(cell), idle_since: Some(Instant::now()) });
        if state.refusal.as_ref().is_some_and(|refusal| !refusal.is_final()) {
            state.refusal = None;
        }
        let grants = state.dispatch.open(cell.id, limit);
        let outbox = self.hand_out(&mut state, grants);
        drop(state);
        deliver(outbox);
        opened
    }

    /// The generation takes no more leases. Returns those that it holds.
    pub(crate) fn close(&self, generation: GenerationId) -> u32 {
        let mut state = lock(&self.state);
        state.close(generation);
        state.dispatch.in_flight(generation)
    }

    /// A caller found that the generation takes no connections: closes it and has the task look.
    pub(crate) fn doubt(&self, generation: GenerationId) {
        let mut state = lock(&self.state);
        if state.generations.contains_key(&generation) {
            state.close(generation);
            state.doubted.push(generation);
        }
        drop(state);
        self.wake.notify_one();
    }

    /// The generations that were doubted since the last call.
    pub(crate) fn take_doubts(&self) -> Vec<GenerationId> {
        std::mem::take(&mut lock(&self.state).doubted)
    }

    /// The generation's process is gone.
    pub(crate) fn forget(&self, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.close(generation);
        state.dispatch.forget(generation);
        let entry = state.generations.remove(&generation);
        drop(state);
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
        deliver(dismissed);
    }

    /// Turns everybody away who waits.
    pub(crate) fn dismiss(&self, denied: &Denied) {
        let dismissed = lock(&self.state).dismiss(denied);
        deliver(dismissed);
    }

    /// New bounds of the queue.
    pub(crate) fn set_queue(&self, depth: usize, wait: Duration) {
        let mut state = lock(&self.state);
        state.depth = depth;
        state.wait = wait;
        state.dispatch.set_depth(depth);
    }

    pub(crate) fn waiting(&self) -> usize {
        lock(&self.state).dispatch.waiting()
    }

    pub(crate) fn any_open(&self) -> bool {
        lock(&self.state).dispatch.any_open()
    }

    /// Whether somebody waits whom nobody can serve.
    pub(crate) fn in_need(&self) -> bool {
        let state = lock(&self.state);
        state.dispatch.waiting() > 0 && !state.dispatch.any_open()
    }

    /// Whether nobody waits and no lease is held.
    pub(crate) fn is_still(&self) -> bool {
        let state = lock(&self.state);
        state.dispatch.waiting() == 0 && state.dispatch.in_flight_total() == 0
    }

    pub(crate) fn in_flight(&self, generation: GenerationId) -> u32 {
        lock(&self.state).dispatch.in_flight(generation)
    }

    /// Since when the generation holds no lease; `None` while it holds one, or was never opened.
    pub(crate) fn idle_since(&self, generation: GenerationId) -> Option<Instant> {
        lock(&self.state).generations.get(&generation).and_then(|entry| entry.idle_since)
    }

    /// Work done by a generation that was opened and lives.
    pub(crate) fn work(&self, generation: GenerationId) -> Option<Work> {
        lock(&self.state).generations.get(&generation).map(|entry| entry.cell.work())
    }
}

impl State {
    fn occupy(&mut self, generation: GenerationId) -> Option<Arc<Cell>> {
        let entry = self.generations.get_mut(&generation)?;
        entry.idle_since = None;
        Some(Arc::clone(&entry.cell))
    }

    fn close(&mut self, generation: GenerationId) {
        let open = self.dispatch.any_open();
        self.dispatch.close(generation);
        if open && !self.dispatch.any_open() {
            self.gap = Some(Instant::now());
        }
    }

    fn dismiss(&mut self, denied: &Denied) -> Outbox {
        let tickets = self.dispatch.dismiss();
        self.full_told = false;
        let waiters = tickets.iter().filter_map(|ticket| self.waiters.remove(ticket));
        waiters.map(|waiter| (waiter.answer, Err(denied.clone()))).collect()
    }
}

/// A caller that has left meanwhile sends its lease back by dropping it.
fn deliver(outbox: Outbox) {
    for (sender, answer) in outbox {
        drop(sender.send(answer));
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
