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
//! A grant for a prompt that has no room in memory is taken back, and its caller waits in [`crate::lease::admit`] instead.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use warden_policies::admission::{AdmissionMode, AdmissionPolicy};
use warden_policies::dispatch::{Dispatch, Grant, LeaseKind, Ticket};
use warden_policies::loading::Seen;
use warden_policies::quarantine::Quarantine;
use warden_policies::sample::MemoryKind;
use warden_policies::{ByteSize, GenerationId, ModelName, QuickMap, Work};

use self::coming::Coming;
use crate::error::Denied;
use crate::lease::Lease;
use crate::lease::admit::{Admit, Board, Judged};
use crate::lease::cell::Cell;
use crate::lease::turns::Turns;
use crate::process::settings::{self, Settings};
use crate::sync::lock;
use crate::view::event::{EventKind, Journal};

mod ask;
pub(crate) mod coming;
mod gate;
mod refusal;
pub(crate) mod ward;

pub(crate) use refusal::Refusal;

#[derive(Debug)]
pub(crate) struct Leases {
    name: ModelName,
    journal: Arc<Journal>,
    /// Wakes the model's task: somebody waits and nothing is open, or a generation has become idle.
    pub(crate) wake: Notify,
    /// Prompts are weighed at all, so that nobody takes the lock for it where they are not.
    asks: AtomicBool,
    /// What clients have set in its processes.
    pub(crate) settings: Settings,
    /// The latest conversations.
    pub(crate) turns: Turns,
    /// It is a build that is tried beside a model's own.
    is_canary: AtomicBool,
    /// Something is known against some request, so that nobody takes the lock for it where nothing is.
    knows: AtomicBool,
    /// Wakes those who wait to be alone, or for what becomes of a generation.
    moved: Notify,
    born: Instant,
    state: Mutex<State>,
}

/// How it is in the instance before us.
#[derive(Debug, Default)]
pub(crate) struct Elsewhere {
    /// Callers who wait there, and get their leases there. They have no place in our queue.
    waiting: usize,
    /// All callers who have had to wait there so far.
    came: u64,
    /// Generations that may be given to somebody there.
    open: BTreeSet<GenerationId>,
    /// How many of those who wait cannot be helped.
    hopeless: usize,
}

impl Elsewhere {
    pub(crate) fn new(waiting: usize, came: u64, open: BTreeSet<GenerationId>) -> Self {
        Self { waiting, came, open, hopeless: 0 }
    }

    /// Who needs a process.
    fn needy(&self) -> usize {
        self.waiting.saturating_sub(self.hopeless)
    }
}

/// What a generation has to do.
#[derive(Debug)]
pub(crate) struct Tally {
    pub(crate) generation: GenerationId,
    pub(crate) in_flight: u32,
    /// All that was done so far.
    pub(crate) work: Work,
    /// It may be given to somebody: here, or in the instance before us.
    pub(crate) open: bool,
}

#[derive(Debug)]
struct State {
    dispatch: Dispatch,
    admit: Admit,
    quarantine: Quarantine,
    depth: usize,
    wait: Duration,
    waiters: QuickMap<Ticket, Waiter>,
    elsewhere: Elsewhere,
    generations: QuickMap<GenerationId, Entry>,
    refusal: Option<Refusal>,
    /// Callers so far.
    asked: u64,
    /// Those of them who had to wait.
    queued: u64,
    /// When the last of those generations that are gone had its last lease.
    rested: Option<Instant>,
    /// Since when nothing is open, after something was.
    gap: Option<Instant>,
    full_told: bool,
    /// For how long the clock of those who wait has stood, and since when it does.
    stood: Duration,
    stands_since: Option<Instant>,
    /// When the next process will serve, while none does.
    coming: Coming,
    /// Until when we expect a caller that was refused with a time to come back at.
    expects: Option<Instant>,
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
    /// The task knows of an idle edge and will look again by itself: until then further ones need not wake it.
    looks: bool,
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

impl Leases {
    pub(crate) fn new(name: ModelName, journal: Arc<Journal>, depth: usize, wait: Duration) -> Self {
        let state = State {
            dispatch: Dispatch::new(depth),
            admit: Admit::new(AdmissionMode::Off, warden_policies::defaults().admission.clone()),
            quarantine: Quarantine::new(warden_policies::defaults().quarantine),
            depth,
            wait,
            waiters: QuickMap::default(),
            elsewhere: Elsewhere::default(),
            generations: QuickMap::default(),
            refusal: None,
            asked: 0,
            queued: 0,
            rested: None,
            gap: None,
            full_told: false,
            stood: Duration::ZERO,
            stands_since: None,
            coming: Coming::default(),
            expects: None,
            doubted: Vec::new(),
        };
        let (asks, knows, is_canary) =
            (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let (wake, moved, born) = (Notify::new(), Notify::new(), Instant::now());
        let (settings, turns) = (Settings::default(), Turns::default());
        Self {
            name,
            journal,
            wake,
            asks,
            settings,
            turns,
            is_canary,
            knows,
            moved,
            born,
            state: Mutex::new(state),
        }
    }

    pub(crate) fn name(&self) -> &ModelName {
        &self.name
    }

    pub(crate) fn set_canary(&self, is_canary: bool) {
        self.is_canary.store(is_canary, Ordering::Relaxed);
    }

    pub(crate) fn is_canary(&self) -> bool {
        self.is_canary.load(Ordering::Relaxed)
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

    /// A process has taken what a client has set in it. It is set in the others of the model, too, and again in those that
    /// follow.
    pub(crate) fn note_setting(&self, generation: GenerationId, path: &str, body: Bytes) {
        if self.settings.set(generation, path, body) {
            self.wake.notify_one();
        } else {
            self.tell_lost(generation, path);
        }
    }

    /// A process has taken something in another instance that was too large to be kept there.
    pub(crate) fn lose_setting(&self, generation: GenerationId, path: &str) {
        self.settings.lose(generation, path);
        self.tell_lost(generation, path);
    }

    fn tell_lost(&self, generation: GenerationId, path: &str) {
        let message = format!(
            "what was set by `POST {path}` is larger than {} and is set in no other process, nor again in the next one",
            ByteSize(settings::MOST)
        );
        self.journal.tell(Some(&self.name), Some(generation), EventKind::SettingLost { message });
    }

    /// The memory for which a prompt that waits wants a fresh process in the place of this one.
    pub(crate) fn admission_wish(&self, generation: GenerationId) -> Option<MemoryKind> {
        lock(&self.state).admit.wish(generation)
    }

    fn lease_on(self: &Arc<Self>, cell: Arc<Cell>, kind: LeaseKind, queued_for: Duration) -> Lease {
        Lease::new(Arc::clone(self), cell, kind, queued_for)
    }

    pub(crate) fn release(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        let mut state = lock(&self.state);
        let grants = state.dispatch.release(generation, kind);
        let mut outbox = Outbox::default();
        self.settle(&mut state, grants, &mut outbox);
        outbox.wake |= kind != LeaseKind::Watch
            && state.dispatch.in_flight(generation) == 0
            && state.idle(generation, kind);
        let sought = state.dispatch.has_seekers(generation);
        drop(state);
        if sought {
            self.moved.notify_waiters();
        }
        self.deliver(outbox);
    }

    /// An auxiliary lease turns out to watch events without an end: nothing waits for it from now on.
    pub(crate) fn watches(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.dispatch.watches(generation);
        let wake = state.dispatch.in_flight(generation) == 0 && state.idle(generation, LeaseKind::Aux);
        drop(state);
        self.deliver(Outbox { wake, ..Outbox::default() });
    }

    /// The task looks whether the generation is idle and, with `returns`, will look again by itself. False if it has become
    /// idle or busy since `seen`, which is what the task knows: then it has to look once more.
    pub(crate) fn watch_idle(&self, generation: GenerationId, seen: Option<Instant>, returns: bool) -> bool {
        let mut state = lock(&self.state);
        let Some(entry) = state.generations.get_mut(&generation) else { return seen.is_none() };
        entry.looks = returns;
        entry.idle_since == seen
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
                match (state.waiters.remove(&ticket), state.occupy(generation, kind)) {
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
            && let Some(cell) = state.occupy(generation, kind)
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

    /// All who wait: for a slot, for room, or in the instance before us.
    pub(crate) fn waiting(&self) -> usize {
        let state = lock(&self.state);
        state.waiting() + state.elsewhere.waiting
    }

    /// All who have had to wait so far, here or in the instance before us.
    pub(crate) fn came(&self) -> u64 {
        let state = lock(&self.state);
        state.queued + state.elsewhere.came
    }

    /// Notes what the instance before us says of itself. It starts no process any more, and it says what it does some milliseconds after it
    /// has done it.
    pub(crate) fn set_elsewhere(&self, elsewhere: Elsewhere) {
        let mut state = lock(&self.state);
        let known = &state.elsewhere;
        // Who comes in the moment in which another one leaves is one more, too.
        let instead = elsewhere.waiting > 0 && elsewhere.came > known.came;
        let comes = elsewhere.waiting > known.waiting || instead;
        let closed = !known.open.is_subset(&elsewhere.open);
        // One more is a reason to try again.
        let hopeless = if comes { 0 } else { known.hopeless.min(elsewhere.waiting) };
        let came = elsewhere.came.max(known.came);
        state.elsewhere = Elsewhere { came, hopeless, ..elsewhere };
        drop(state);
        if comes || closed {
            self.wake.notify_one();
        }
    }

    /// Those who wait there now are no reason to start anything: it would not help them.
    pub(crate) fn give_up_elsewhere(&self) {
        let mut state = lock(&self.state);
        state.elsewhere.hopeless = state.elsewhere.waiting;
    }

    /// Whether a generation holds no lease, and the instance before us can give none for it.
    pub(crate) fn is_unused(&self, generation: GenerationId) -> bool {
        let state = lock(&self.state);
        state.dispatch.in_flight(generation) == 0 && !state.elsewhere.open.contains(&generation)
    }

    /// What those are told who wait in the instance before us: the same as our own callers, while those are turned away.
    pub(crate) fn refusal_elsewhere(&self) -> Option<Denied> {
        let state = lock(&self.state);
        let refused = state.elsewhere.waiting > 0 && !state.dispatch.any_open();
        let refusal = state.refusal.as_ref().filter(|refusal| refused && !refusal.is_final());
        refusal.map(Refusal::denied)
    }

    pub(crate) fn any_open(&self) -> bool {
        lock(&self.state).dispatch.any_open()
    }

    /// Whether a generation takes leases.
    pub(crate) fn is_open(&self, generation: GenerationId) -> bool {
        lock(&self.state).dispatch.is_open(generation)
    }

    /// Whether somebody waits whom nobody can serve, or is expected back.
    pub(crate) fn in_need(&self) -> bool {
        let state = lock(&self.state);
        (state.waiting() + state.elsewhere.needy() > 0 || state.expects()) && !state.dispatch.any_open()
    }

    /// Whether nobody waits and no lease is held.
    pub(crate) fn is_still(&self) -> bool {
        let state = lock(&self.state);
        state.waiting() == 0 && state.dispatch.in_flight_total() == 0
    }

    pub(crate) fn in_flight(&self, generation: GenerationId) -> u32 {
        lock(&self.state).dispatch.in_flight(generation)
    }

    /// What is seen of the model from outside.
    pub(crate) fn seen(&self) -> Seen {
        let state = lock(&self.state);
        let waiting = state.waiting() + state.elsewhere.needy();
        let in_flight = state.dispatch.in_flight_total();
        let rests = waiting == 0 && in_flight == 0;
        let since = state.generations.values().filter_map(|entry| entry.idle_since).max();
        let since = since.into_iter().chain(state.rested).max().unwrap_or(self.born);
        let idle_for = if rests { since.elapsed() } else { Duration::ZERO };
        // A caller that we expect back counts like one that waits.
        let waiting = waiting.max(usize::from(state.expects()));
        let conversations = self.turns.cost();
        Seen { asked: state.asked, waiting, in_flight, idle_for, conversations }
    }

    /// Since when the generation holds no lease; `None` while it holds one, or was never opened.
    pub(crate) fn idle_since(&self, generation: GenerationId) -> Option<Instant> {
        lock(&self.state).generations.get(&generation).and_then(|entry| entry.idle_since)
    }

    /// What runs of each generation that was opened and lives, and what it has done.
    pub(crate) fn counts(&self) -> Vec<Tally> {
        let state = lock(&self.state);
        let count = |(id, entry): (&GenerationId, &Entry)| Tally {
            generation: *id,
            in_flight: state.dispatch.in_flight(*id),
            work: entry.cell.work(),
            open: state.dispatch.is_open(*id) || state.elsewhere.open.contains(id),
        };
        state.generations.iter().map(count).collect()
    }

    /// How many slots a generation has.
    pub(crate) fn limit(&self, generation: GenerationId) -> Option<u32> {
        lock(&self.state).dispatch.limit(generation)
    }

    /// The generations that take leases.
    pub(crate) fn open_cells(&self) -> Vec<Arc<Cell>> {
        let state = lock(&self.state);
        let open = state.generations.iter().filter(|(id, _)| state.dispatch.is_open(**id));
        open.map(|(_, entry)| Arc::clone(&entry.cell)).collect()
    }

    /// Work done by a generation that was opened and lives.
    pub(crate) fn work(&self, generation: GenerationId) -> Option<Work> {
        lock(&self.state).generations.get(&generation).map(|entry| entry.cell.work())
    }
}

impl State {
    /// All who wait here: for a slot, or for room.
    fn waiting(&self) -> usize {
        self.dispatch.waiting() + self.admit.waiting()
    }

    fn occupy(&mut self, generation: GenerationId, kind: LeaseKind) -> Option<Arc<Cell>> {
        let entry = self.generations.get_mut(&generation)?;
        if kind == LeaseKind::Slot {
            // The caller that we expected has come back, or another one was served.
            self.expects = None;
        }
        if !matches!(kind, LeaseKind::Read | LeaseKind::Watch) {
            entry.idle_since = None;
        }
        Some(Arc::clone(&entry.cell))
    }

    /// For how long the clock of those who wait has stood until now.
    fn stood(&self) -> Duration {
        self.stood + self.stands_since.map(|since| since.elapsed()).unwrap_or_default()
    }

    /// A generation has become idle with the end of this lease. True if the task has to be woken for it: when it
    /// waits for just that, or would not look by itself.
    fn idle(&mut self, generation: GenerationId, last: LeaseKind) -> bool {
        let awaited = self.refusal.is_some() || !self.dispatch.is_open(generation);
        let Some(entry) = self.generations.get_mut(&generation) else { return true };
        if last == LeaseKind::Read && entry.idle_since.is_some() {
            return awaited;
        }
        entry.idle_since = Some(Instant::now());
        awaited || !std::mem::replace(&mut entry.looks, true)
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
        self.expects = None;
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
mod tests;
#[cfg(test)]
mod ward_tests;
