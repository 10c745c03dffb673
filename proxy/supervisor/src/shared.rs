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
//!
//! A grant for a prompt that has no room in memory is taken back, and its caller waits in [`crate::admit`] instead.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use warden_policies::admission::{AdmissionMode, AdmissionPolicy};
use warden_policies::dispatch::{Answer, Dispatch, Grant, LeaseKind, Ticket};
use warden_policies::sample::Series;
use warden_policies::{GenerationId, ModelName, Work};

use crate::admit::{Admit, Board, Judged, Size, Weighed};
use crate::clock;
use crate::error::{Denied, NoRoom};
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
    /// Prompts are weighed at all, so that nobody takes the lock for it where they are not.
    asks: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    dispatch: Dispatch,
    admit: Admit,
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
    /// Tokens of its prompt, if they are to be weighed.
    tokens: Option<u64>,
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

type Answers = Vec<(oneshot::Sender<Result<Lease, Denied>>, Result<Lease, Denied>)>;

/// What is handed over and told once the lock is free.
#[derive(Default)]
struct Outbox {
    answers: Answers,
    events: Vec<(GenerationId, EventKind)>,
    /// The task has something to look at.
    wake: bool,
}

enum Asked {
    Granted(Lease),
    Queued { ticket: Ticket, answer: oneshot::Receiver<Result<Lease, Denied>>, until: Instant },
}

/// What a place was when it was given up.
enum Was {
    /// In the queue.
    InQueue,
    /// Among those who wait for room in memory, and what was short.
    WithoutRoom(NoRoom),
    /// None any more: an answer is on its way or has been taken.
    Gone,
}

/// A place in the queue. Dropping it gives it up.
struct Place<'a> {
    shared: &'a Arc<Shared>,
    ticket: Ticket,
}

impl Place<'_> {
    /// Gives up the place.
    fn leave(&self) -> Was {
        let mut state = lock(&self.shared.state);
        let channel = state.waiters.remove(&self.ticket);
        if state.dispatch.cancel(self.ticket) {
            drop(state);
            drop(channel);
            return Was::InQueue;
        }
        let Some(short) = state.admit.leave(self.ticket) else { return Was::Gone };
        // Nothing is kept for it any more.
        let mut outbox = Outbox::default();
        self.shared.settle(&mut state, Vec::new(), &mut outbox);
        drop(state);
        drop(channel);
        self.shared.deliver(outbox);
        Was::WithoutRoom(short)
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
            admit: Admit::new(AdmissionMode::Off, warden_policies::defaults().admission.clone()),
            depth,
            wait,
            waiters: HashMap::new(),
            generations: HashMap::new(),
            refusal: None,
            gap: None,
            full_told: false,
            doubted: Vec::new(),
        };
        let asks = AtomicBool::new(false);
        Self { name, journal, wake: Notify::new(), asks, state: Mutex::new(state) }
    }

    pub(crate) fn name(&self) -> &ModelName {
        &self.name
    }

    /// Waits for a lease. See [`crate::Fleet::lease`].
    pub(crate) async fn lease(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, Denied> {
        let asked = Instant::now();
        let (ticket, mut answer, until) = match self.ask(kind, tokens, asked)? {
            Asked::Granted(lease) => return Ok(lease),
            Asked::Queued { ticket, answer, until } => (ticket, answer, until),
        };
        let place = Place { shared: self, ticket };
        match tokio::time::timeout_at(until, &mut answer).await {
            Ok(answer) => answer.unwrap_or(Err(Denied::ShuttingDown)),
            Err(_) => match place.leave() {
                Was::InQueue => Err(Denied::Deadline { waited: asked.elapsed() }),
                Was::WithoutRoom(short) => Err(short.into()),
                // Granted in this very moment: the answer is on its way.
                Was::Gone => answer.await.unwrap_or(Err(Denied::ShuttingDown)),
            },
        }
    }

    fn ask(self: &Arc<Self>, kind: LeaseKind, tokens: Option<u64>, now: Instant) -> Result<Asked, Denied> {
        let mut state = lock(&self.state);
        let open = state.dispatch.any_open();
        if let Some(refusal) = state.refusal.as_ref().filter(|refusal| refusal.is_final() || !open) {
            return Err(refusal.denied());
        }
        let answer = match state.dispatch.request(kind) {
            // Those who wait for room have their places, too: a newcomer does not push one of them out.
            Answer::Queued(ticket) if state.waiting() > state.depth => {
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
                state.waiters.insert(ticket, Waiter { answer: sender, since: now, tokens });
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

    /// A prompt was granted a lease at once: whether it has room there. If not, it waits like everybody else.
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
        let until = clock::after(now, state.wait);
        let mut outbox = Outbox::default();
        self.settle(&mut state, vec![Grant { ticket, generation, kind }], &mut outbox);
        drop(state);
        self.deliver(outbox);
        match answer.try_recv() {
            Ok(Ok(lease)) => Ok(Asked::Granted(lease)),
            Ok(Err(denied)) => Err(denied),
            Err(_) => Ok(Asked::Queued { ticket, answer, until }),
        }
    }

    /// Whether a prompt of this size would find room now. Costs one load where nobody wants to know.
    pub(crate) fn weigh(&self, size: Size) -> Weighed {
        if !self.asks.load(Ordering::Relaxed) {
            return Weighed::Unasked;
        }
        let state = lock(&self.state);
        state.admit.weigh(&state.dispatch, size)
    }

    /// Whether and by which numbers prompts are weighed from now on.
    pub(crate) fn set_admission(self: &Arc<Self>, mode: AdmissionMode, policy: AdmissionPolicy) {
        self.reconsider(|admit| admit.set(mode, policy));
    }

    /// What is known about memory now: after each reading, and when a process becomes ready or goes.
    pub(crate) fn publish_memory(self: &Arc<Self>, board: Board) {
        self.reconsider(|admit| admit.publish(board));
    }

    fn reconsider(self: &Arc<Self>, change: impl FnOnce(&mut Admit)) {
        let mut state = lock(&self.state);
        change(&mut state.admit);
        self.asks.store(state.admit.asks(), Ordering::Relaxed);
        let mut outbox = Outbox::default();
        self.settle(&mut state, Vec::new(), &mut outbox);
        drop(state);
        self.deliver(outbox);
    }

    /// The memory for which a prompt that waits wants a fresh process in the place of this one.
    pub(crate) fn admission_wish(&self, generation: GenerationId) -> Option<Series> {
        lock(&self.state).admit.wish(generation)
    }

    fn lease_on(self: &Arc<Self>, cell: Arc<Cell>, kind: LeaseKind, queued_for: Duration) -> Lease {
        Lease::new(Arc::clone(self), cell, kind, queued_for)
    }

    /// A lease ends.
    pub(crate) fn release(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        let mut state = lock(&self.state);
        let grants = state.dispatch.release(generation, kind);
        let mut outbox = Outbox::default();
        self.settle(&mut state, grants, &mut outbox);
        let idle = state.dispatch.in_flight(generation) == 0;
        if idle && let Some(entry) = state.generations.get_mut(&generation) {
            entry.idle_since = Some(Instant::now());
        }
        drop(state);
        outbox.wake |= idle;
        self.deliver(outbox);
    }

    /// Hands out grants and looks again at those who wait for room, until neither leads to more. Each round serves
    /// somebody or ends, so it ends.
    fn settle(self: &Arc<Self>, state: &mut State, grants: Vec<Grant>, outbox: &mut Outbox) {
        let mut grants = VecDeque::from(grants);
        loop {
            while let Some(grant) = grants.pop_front() {
                grants.extend(self.hand_out(state, &grant, outbox));
            }
            let looked = state.admit.look(&mut state.dispatch);
            outbox.wake |= looked.wished;
            for (generation, action, short) in looked.told {
                let action = action.to_owned();
                outbox.events.push((generation, EventKind::PromptTooLarge { action, short }));
            }
            for (ticket, generation, kind) in looked.granted {
                match (state.waiters.remove(&ticket), state.occupy(generation)) {
                    (Some(waiter), Some(cell)) => {
                        let lease = self.lease_on(cell, kind, waiter.since.elapsed());
                        outbox.answers.push((waiter.answer, Ok(lease)));
                    }
                    // Cannot be: who waits has its entry, and so has what is open.
                    _ => grants.extend(state.dispatch.release(generation, kind)),
                }
            }
            for (ticket, short) in looked.refused {
                let waiter = state.waiters.remove(&ticket);
                outbox.answers.extend(waiter.map(|waiter| (waiter.answer, Err(short.into()))));
            }
            grants.extend(state.dispatch.hold(&looked.held));
            if grants.is_empty() {
                break;
            }
        }
        if state.dispatch.waiting() < state.depth {
            state.full_told = false;
        }
    }

    /// Hands out one grant. If its prompt has no room, the lease goes back, which may be a grant for others.
    fn hand_out(self: &Arc<Self>, state: &mut State, grant: &Grant, outbox: &mut Outbox) -> Vec<Grant> {
        let Grant { ticket, generation, kind } = *grant;
        let Some(waiter) = state.waiters.get(&ticket) else { return Vec::new() };
        let tokens = waiter.tokens.filter(|_| self.asks.load(Ordering::Relaxed));
        let judged = tokens
            .map_or(Judged::Fits, |tokens| state.admit.judge(&state.dispatch, generation, tokens, true));
        if let Some((action, short)) = judged.action() {
            let enforced = state.admit.enforces();
            let told = if enforced { action } else { "warn" }.to_owned();
            outbox.events.push((generation, EventKind::PromptTooLarge { action: told, short: *short }));
            if enforced {
                // Who has room elsewhere, or nowhere, is answered by the next look.
                let stays = matches!(judged, Judged::Wait(..) | Judged::Recycle(..));
                if stays && state.waiting() >= state.depth {
                    let full = Denied::QueueFull { waiting: state.depth, depth: state.depth };
                    let waiter = state.waiters.remove(&ticket);
                    outbox.answers.extend(waiter.map(|waiter| (waiter.answer, Err(full))));
                } else {
                    state.admit.wait(ticket, kind, action, *short);
                }
                return state.dispatch.release(generation, kind);
            }
        }
        if let Some(waiter) = state.waiters.remove(&ticket)
            && let Some(cell) = state.occupy(generation)
        {
            let lease = self.lease_on(cell, kind, waiter.since.elapsed());
            outbox.answers.push((waiter.answer, Ok(lease)));
        }
        Vec::new()
    }

    fn deliver(&self, outbox: Outbox) {
        if outbox.wake {
            self.wake.notify_one();
        }
        for (generation, kind) in outbox.events {
            self.journal.tell(Some(&self.name), Some(generation), kind);
        }
        hand_over(outbox.answers);
    }

    /// The generation may take leases from now on.
    pub(crate) fn open(self: &Arc<Self>, cell: &Arc<Cell>, limit: u32) -> Opened {
        let mut state = lock(&self.state);
        let opened = Opened { waiting: state.waiting(), gap: state.gap.take() };
        state
            .generations
            .entry(cell.id)
            .or_insert_with(|| Entry { cell: Arc::clone(cell), idle_since: Some(Instant::now()) });
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
        self.look_again(state);
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

    /// New bounds of the queue.
    pub(crate) fn set_queue(&self, depth: usize, wait: Duration) {
        let mut state = lock(&self.state);
        state.depth = depth;
        state.wait = wait;
        state.dispatch.set_depth(depth);
    }

    pub(crate) fn waiting(&self) -> usize {
        lock(&self.state).waiting()
    }

    pub(crate) fn any_open(&self) -> bool {
        lock(&self.state).dispatch.any_open()
    }

    /// Whether somebody waits whom nobody can serve.
    pub(crate) fn in_need(&self) -> bool {
        let state = lock(&self.state);
        state.waiting() > 0 && !state.dispatch.any_open()
    }

    /// Whether nobody waits and no lease is held.
    pub(crate) fn is_still(&self) -> bool {
        let state = lock(&self.state);
        state.waiting() == 0 && state.dispatch.in_flight_total() == 0
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
    /// All who wait: for a slot, or for room.
    fn waiting(&self) -> usize {
        self.dispatch.waiting() + self.admit.waiting()
    }

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

    fn dismiss(&mut self, denied: &Denied) -> Answers {
        let mut tickets = self.dispatch.dismiss();
        tickets.extend(self.admit.dismiss());
        self.full_told = false;
        let waiters = tickets.iter().filter_map(|ticket| self.waiters.remove(ticket));
        waiters.map(|waiter| (waiter.answer, Err(denied.clone()))).collect()
    }
}

/// A caller that has left meanwhile sends its lease back by dropping it.
fn hand_over(answers: Answers) {
    for (sender, answer) in answers {
        drop(sender.send(answer));
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
