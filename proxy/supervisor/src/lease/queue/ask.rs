//! The requests' side of the queue: asking for a lease, waiting for it, leaving.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::dispatch::{Answer, Grant, LeaseKind, Ticket};
use warden_policies::{GenerationId, Work};

use super::{Leases, Outbox, State, Waiter};
use crate::clock;
use crate::error::{Denied, NoRoom};
use crate::lease::Lease;
use crate::lease::admit::{Size, Weighed};
use crate::sync::lock;
use crate::view::event::EventKind;

enum Asked {
    Granted(Lease),
    Queued { ticket: Ticket, answer: oneshot::Receiver<Result<Lease, Denied>>, limit: Limit },
}

/// Distinguishes a first lease from a repeated one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    First,
    /// The generation of its first lease died with its work.
    Again,
}

/// Time limit for waiting.
#[derive(Clone, Copy)]
struct Limit {
    since: Instant,
    wait: Duration,
    /// Total paused time of the clock when the request came.
    stood: Duration,
}

impl Limit {
    /// End of the time limit, if the clock is not paused any longer; `None` if it has passed.
    fn ends(self, stood: Duration, now: Instant) -> Option<Instant> {
        let end = clock::after(self.since, self.wait.saturating_add(stood.saturating_sub(self.stood)));
        (end > now).then_some(end)
    }
}

/// Interval for checking the time limit while the clock is paused.
const STANDS: Duration = Duration::from_millis(100);

/// State of a place when it was given up.
enum Was {
    InQueue,
    /// Waited for room in memory, with the shortage.
    WithoutRoom(NoRoom),
    /// Already answered, or its answer is on the way.
    Gone,
}

/// A place in the queue. Dropping it gives it up.
struct Place<'a> {
    leases: &'a Arc<Leases>,
    ticket: Ticket,
}

impl Place<'_> {
    fn leave(&self) -> Was {
        let mut state = lock(&self.leases.state);
        let channel = state.waiters.remove(&self.ticket);
        if state.dispatch.cancel(self.ticket) {
            drop(state);
            drop(channel);
            return Was::InQueue;
        }
        let Some(short) = state.admit.leave(self.ticket) else { return Was::Gone };
        // Release slots that were held for it.
        let mut outbox = Outbox::default();
        self.leases.settle(&mut state, Vec::new(), &mut outbox);
        drop(state);
        drop(channel);
        self.leases.deliver(outbox);
        Was::WithoutRoom(short)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Leases {
    /// Waits for a lease. See [`crate::Fleet::lease`].
    pub(crate) async fn lease(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, Denied> {
        self.wait_for(kind, tokens, Turn::First).await
    }

    /// Waits for another lease after a generation has died. A full queue does not refuse it.
    pub(crate) async fn lease_again(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, Denied> {
        self.wait_for(kind, tokens, Turn::Again).await
    }

    /// Lease that is available at once, or `None`. A failure is not counted as a request.
    pub(crate) fn lease_now(self: &Arc<Self>, kind: LeaseKind, tokens: Option<u64>) -> Option<Lease> {
        let mut state = lock(&self.state);
        if state.refusal.is_some() || !state.dispatch.any_open() {
            return None;
        }
        let generation = match state.dispatch.request(kind) {
            Answer::Granted(generation) => generation,
            Answer::Queued(ticket) => {
                state.dispatch.cancel(ticket);
                return None;
            }
            Answer::Full { .. } => return None,
        };
        let tokens = tokens.filter(|_| self.asks.load(Ordering::Relaxed));
        let fits = tokens.is_none_or(|tokens| {
            let judged = state.admit.judge(&state.dispatch, generation, tokens, true);
            judged.action().is_none() || !state.admit.enforces()
        });
        if !fits {
            let grants = state.dispatch.release(generation, kind);
            let mut outbox = Outbox::default();
            self.settle(&mut state, grants, &mut outbox);
            drop(state);
            self.deliver(outbox);
            return None;
        }
        if kind == LeaseKind::Slot {
            state.asked += 1;
        }
        let cell = state.occupy(generation, kind)?;
        drop(state);
        Some(self.lease_on(cell, kind, Duration::ZERO))
    }

    /// Takes a slot for a request that runs in another instance, even beyond the limit.
    pub(crate) fn take_for_another(self: &Arc<Self>, generation: GenerationId) -> Option<Lease> {
        let mut state = lock(&self.state);
        let kind = state.dispatch.count_in(generation)?;
        let cell = state.occupy(generation, kind)?;
        drop(state);
        Some(self.lease_on(cell, kind, Duration::ZERO))
    }

    /// Adds work that another instance requested of a process.
    pub(crate) fn add_work(&self, generation: GenerationId, work: Work) {
        if let Some(entry) = lock(&self.state).generations.get(&generation) {
            entry.cell.add_work(work);
        }
    }

    async fn wait_for(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
        turn: Turn,
    ) -> Result<Lease, Denied> {
        let asked = Instant::now();
        let (ticket, mut answer, limit) = match self.ask(kind, tokens, turn, asked)? {
            Asked::Granted(lease) => return Ok(lease),
            Asked::Queued { ticket, answer, limit } => (ticket, answer, limit),
        };
        let place = Place { leases: self, ticket };
        let mut until = clock::after(asked, limit.wait);
        loop {
            if let Ok(answer) = tokio::time::timeout_at(until, &mut answer).await {
                return answer.unwrap_or(Err(Denied::ShuttingDown));
            }
            let now = Instant::now();
            let stood = lock(&self.state).stood();
            match limit.ends(stood, now) {
                Some(end) => until = end.max(clock::after(now, STANDS)),
                None => break,
            }
        }
        match place.leave() {
            Was::InQueue => Err(Denied::Deadline { waited: asked.elapsed() }),
            Was::WithoutRoom(short) => Err(short.into()),
            // Granted at this very moment: the answer is on its way.
            Was::Gone => answer.await.unwrap_or(Err(Denied::ShuttingDown)),
        }
    }

    fn ask(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
        turn: Turn,
        now: Instant,
    ) -> Result<Asked, Denied> {
        let mut state = lock(&self.state);
        let open = state.dispatch.any_open();
        if let Some(refusal) = state.refusal.as_ref().filter(|refusal| refusal.is_final() || !open) {
            return Err(refusal.denied());
        }
        if kind == LeaseKind::Slot {
            state.asked += 1;
        }
        if let Some(denied) = (!open && turn == Turn::First).then(|| state.too_slow(now)).flatten() {
            drop(state);
            self.wake.notify_one();
            return Err(denied);
        }
        let answer = match turn {
            Turn::First => state.dispatch.request(kind),
            Turn::Again => state.dispatch.request_again(kind),
        };
        let answer = match answer {
            // Requests that wait for room keep their places: a new request does not push them out.
            Answer::Queued(ticket) if turn == Turn::First && state.waiting() > state.depth => {
                state.dispatch.cancel(ticket);
                Answer::Full { waiting: state.waiting() }
            }
            answer => answer,
        };
        match answer {
            Answer::Granted(generation) => {
                if let Some(tokens) = tokens.filter(|_| self.asks.load(Ordering::Relaxed)) {
                    return self.weighed(state, generation, kind, tokens, now);
                }
                let cell = state.occupy(generation, kind);
                drop(state);
                match cell {
                    Some(cell) => Ok(Asked::Granted(self.lease_on(cell, kind, Duration::ZERO))),
                    // Unreachable: an open generation has its entry.
                    None => Err(Denied::ShuttingDown),
                }
            }
            Answer::Queued(ticket) => {
                let (sender, answer) = oneshot::channel();
                state.waiters.insert(ticket, Waiter { answer: sender, since: now, tokens });
                state.queued += 1;
                let limit = Limit { since: now, wait: state.wait, stood: state.stood() };
                drop(state);
                if !open {
                    self.wake.notify_one();
                }
                Ok(Asked::Queued { ticket, answer, limit })
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

    /// Checks the room for a prompt that was granted a lease at once. Without room it waits like others.
    fn weighed(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        generation: GenerationId,
        kind: LeaseKind,
        tokens: u64,
        now: Instant,
    ) -> Result<Asked, Denied> {
        let (sender, mut answer) = oneshot::channel();
        let ticket = state.dispatch.issue();
        state.waiters.insert(ticket, Waiter { answer: sender, since: now, tokens: Some(tokens) });
        let limit = Limit { since: now, wait: state.wait, stood: state.stood() };
        let mut outbox = Outbox::default();
        self.settle(&mut state, vec![Grant { ticket, generation, kind }], &mut outbox);
        drop(state);
        self.deliver(outbox);
        match answer.try_recv() {
            Ok(Ok(lease)) => Ok(Asked::Granted(lease)),
            Ok(Err(denied)) => Err(denied),
            Err(_) => Ok(Asked::Queued { ticket, answer, limit }),
        }
    }

    /// Checks if a prompt of this size would fit now. Costs one load if admission is off.
    pub(crate) fn weigh(&self, size: Size) -> Weighed {
        if !self.asks.load(Ordering::Relaxed) {
            return Weighed::Unasked;
        }
        let state = lock(&self.state);
        state.admit.weigh(&state.dispatch, size)
    }
}
