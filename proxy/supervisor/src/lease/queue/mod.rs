//! Queue, leases and open generations of one model, behind one lock that its requests and its task share.
//!
//! Requests come here directly and not through the model's task, which is woken only when it has work.
//! Under the lock nothing is awaited, sent or dropped that could take the lock again: grants are collected
//! under it and handed over afterwards.
//!
//! ```text
//!     lease() -> granted at once -------------------------------> Lease
//!        |                                                          | drop
//!        +-----> Place in the queue -- granted or dismissed --> answer
//!                    | dropped (client left)
//!                    v
//!             place freed, or the lease on its way is given back
//! ```
//!
//! A grant for a prompt without room in memory is taken back, and the request waits in
//! [`crate::lease::admit`].

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use warden_policies::admission::{AdmissionMode, AdmissionPolicy};
use warden_policies::dispatch::{LeaseDispatch, LeaseGrant, LeaseKind, QueueTicket};
use warden_policies::loading::ModelActivity;
use warden_policies::quarantine::RequestQuarantine;
use warden_policies::sample::MemoryKind;
use warden_policies::{ByteSize, GenerationId, ModelName, QuickMap, WorkDone};

use self::coming::NextProcess;
use crate::error::LeaseDenied;
use crate::lease::Lease;
use crate::lease::admit::{AdmissionDecision, MemoryBoard, PromptAdmission};
use crate::lease::cell::GenerationCell;
use crate::lease::turns::ConversationStore;
use crate::process::settings::{self, ClientSettings};
use crate::sync::lock;
use crate::view::event::{EventJournal, EventKind};

mod ask;
pub(crate) mod coming;
mod gate;
mod refusal;
pub(crate) mod ward;

pub(crate) use refusal::QueueRefusal;

#[derive(Debug)]
pub(crate) struct LeaseQueue {
    name: ModelName,
    journal: Arc<EventJournal>,
    /// Wakes the model's task: a request waits without an open generation, or a generation has become idle.
    pub(crate) wake: Notify,
    /// Prompts are checked; avoids the lock where admission is off.
    checks_prompts: AtomicBool,
    /// Settings that clients made in its processes.
    pub(crate) settings: ClientSettings,
    pub(crate) turns: ConversationStore,
    /// The model is a canary, a build that is tried next to a model's own.
    is_canary: AtomicBool,
    /// The quarantine knows some request; avoids the lock while it knows none.
    has_suspects: AtomicBool,
    /// Wakes requests that wait to be alone, or for the state of a generation.
    changes: Notify,
    born: Instant,
    state: Mutex<QueueState>,
}

/// Queue of the previous instance.
#[derive(Debug, Default)]
pub(crate) struct PredecessorQueue {
    /// Requests waiting there, which get their leases there and have no place in our queue.
    waiting: usize,
    /// Total requests that had to wait there so far.
    queued: u64,
    /// Generations that can still grant leases there.
    open: BTreeSet<GenerationId>,
    /// Waiting requests there that no process can help.
    hopeless: usize,
}

impl PredecessorQueue {
    pub(crate) fn new(waiting: usize, queued: u64, open: BTreeSet<GenerationId>) -> Self {
        Self { waiting, queued, open, hopeless: 0 }
    }

    /// Requests that need a process.
    fn needing_process(&self) -> usize {
        self.waiting.saturating_sub(self.hopeless)
    }
}

/// Requests and work of a generation.
#[derive(Debug)]
pub(crate) struct GenerationCounts {
    pub(crate) generation: GenerationId,
    pub(crate) in_flight: u32,
    /// Total work so far.
    pub(crate) work: WorkDone,
    /// Accepts new leases, here or in the previous instance.
    pub(crate) open: bool,
}

#[derive(Debug)]
struct QueueState {
    dispatch: LeaseDispatch,
    admit: PromptAdmission,
    quarantine: RequestQuarantine,
    depth: usize,
    wait: Duration,
    waiters: QuickMap<QueueTicket, QueueWaiter>,
    predecessor: PredecessorQueue,
    generations: QuickMap<GenerationId, GenerationEntry>,
    refusal: Option<QueueRefusal>,
    /// Requests so far.
    asked: u64,
    /// Requests that had to wait.
    queued: u64,
    /// When the last lease of a removed generation ended.
    last_idle: Option<Instant>,
    /// Since when no generation has been open, after one was.
    gap: Option<Instant>,
    full_told: bool,
    /// Total paused time of the waiting requests' clock, and since when it is paused.
    paused: Duration,
    paused_since: Option<Instant>,
    /// Expectation for the next process, while none serves.
    next_process: NextProcess,
    /// Time until which the retry of a refused request is expected.
    retry_expected: Option<Instant>,
    /// Generations that refused a connection, closed until the task has probed them.
    doubted: Vec<GenerationId>,
}

#[derive(Debug)]
struct QueueWaiter {
    answer: oneshot::Sender<Result<Lease, LeaseDenied>>,
    since: Instant,
    /// Tokens of its prompt, if admission checks them.
    tokens: Option<u64>,
}

#[derive(Debug)]
struct GenerationEntry {
    cell: Arc<GenerationCell>,
    idle_since: Option<Instant>,
    /// The task knows of an idle edge and will look again, so further edges need not wake it.
    task_will_look: bool,
}

/// State found when a generation was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenedGate {
    /// Waiting requests.
    pub(crate) waiting: usize,
    /// Since when no generation had been open; `None` if one was, or never was.
    pub(crate) gap: Option<Instant>,
}

type LeaseAnswers = Vec<(oneshot::Sender<Result<Lease, LeaseDenied>>, Result<Lease, LeaseDenied>)>;

/// Answers and events to send after the lock is released.
#[derive(Default)]
struct QueueOutbox {
    answers: LeaseAnswers,
    events: Vec<(GenerationId, EventKind)>,
    /// The task has work.
    wake: bool,
}

impl LeaseQueue {
    pub(crate) fn new(name: ModelName, journal: Arc<EventJournal>, depth: usize, wait: Duration) -> Self {
        let state = QueueState {
            dispatch: LeaseDispatch::new(depth),
            admit: PromptAdmission::new(AdmissionMode::Off, warden_policies::defaults().admission.clone()),
            quarantine: RequestQuarantine::new(warden_policies::defaults().quarantine),
            depth,
            wait,
            waiters: QuickMap::default(),
            predecessor: PredecessorQueue::default(),
            generations: QuickMap::default(),
            refusal: None,
            asked: 0,
            queued: 0,
            last_idle: None,
            gap: None,
            full_told: false,
            paused: Duration::ZERO,
            paused_since: None,
            next_process: NextProcess::default(),
            retry_expected: None,
            doubted: Vec::new(),
        };
        let (checks_prompts, has_suspects, is_canary) =
            (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let (wake, changes, born) = (Notify::new(), Notify::new(), Instant::now());
        let (settings, turns) = (ClientSettings::default(), ConversationStore::default());
        Self {
            name,
            journal,
            wake,
            checks_prompts,
            settings,
            turns,
            is_canary,
            has_suspects,
            changes,
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

    /// Sets mode and policy of admission.
    pub(crate) fn set_admission(self: &Arc<Self>, mode: AdmissionMode, policy: AdmissionPolicy) {
        self.change_admission(|admit| admit.set_policy(mode, policy));
    }

    /// Publishes memory figures: after each reading, and when a process becomes ready or ends.
    pub(crate) fn publish_memory(self: &Arc<Self>, board: MemoryBoard) {
        self.change_admission(|admit| admit.publish(board));
    }

    fn change_admission(self: &Arc<Self>, change: impl FnOnce(&mut PromptAdmission)) {
        let mut state = lock(&self.state);
        change(&mut state.admit);
        self.checks_prompts.store(state.admit.checks_prompts(), Ordering::Relaxed);
        let mut outbox = QueueOutbox::default();
        self.settle(&mut state, Vec::new(), &mut outbox);
        drop(state);
        self.deliver(outbox);
    }

    /// Records a setting that a process has accepted from a client, to apply it to the model's other and
    /// later processes.
    pub(crate) fn note_setting(&self, generation: GenerationId, path: &str, body: Bytes) {
        if self.settings.set(generation, path, body) {
            self.wake.notify_one();
        } else {
            self.log_lost_setting(generation, path);
        }
    }

    /// Records a setting made in another instance that was too large to be kept there.
    pub(crate) fn lose_setting(&self, generation: GenerationId, path: &str) {
        self.settings.note_too_large(generation, path);
        self.log_lost_setting(generation, path);
    }

    fn log_lost_setting(&self, generation: GenerationId, path: &str) {
        let message = format!(
            "what was set by `POST {path}` is larger than {} and is set in no other process, nor again in the next one",
            ByteSize(settings::MAX_SETTING_BYTES)
        );
        self.journal.record(Some(&self.name), Some(generation), EventKind::SettingLost { message });
    }

    /// Memory for which a waiting prompt needs a fresh process in place of this one.
    pub(crate) fn admission_wish(&self, generation: GenerationId) -> Option<MemoryKind> {
        lock(&self.state).admit.recycle_wish(generation)
    }

    fn make_lease(
        self: &Arc<Self>,
        cell: Arc<GenerationCell>,
        kind: LeaseKind,
        queued_for: Duration,
    ) -> Lease {
        Lease::new(Arc::clone(self), cell, kind, queued_for)
    }

    pub(crate) fn release(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        let mut state = lock(&self.state);
        let grants = state.dispatch.release(generation, kind);
        let mut outbox = QueueOutbox::default();
        self.settle(&mut state, grants, &mut outbox);
        outbox.wake |= kind != LeaseKind::Watch
            && state.dispatch.in_flight(generation) == 0
            && state.note_idle(generation, kind);
        let sought = state.dispatch.has_seekers(generation);
        drop(state);
        if sought {
            self.changes.notify_waiters();
        }
        self.deliver(outbox);
    }

    /// Marks an auxiliary lease as an endless event stream, for which nothing waits.
    pub(crate) fn mark_endless(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.dispatch.convert_to_watch(generation);
        let wake = state.dispatch.in_flight(generation) == 0 && state.note_idle(generation, LeaseKind::Aux);
        drop(state);
        self.deliver(QueueOutbox { wake, ..QueueOutbox::default() });
    }

    /// Watches a generation's idle edges. With `returns` the task will look again by itself. Returns false
    /// if the generation has become idle or busy since `seen`, so that the task has to look once more.
    pub(crate) fn watch_idle(&self, generation: GenerationId, seen: Option<Instant>, returns: bool) -> bool {
        let mut state = lock(&self.state);
        let Some(entry) = state.generations.get_mut(&generation) else { return seen.is_none() };
        entry.task_will_look = returns;
        entry.idle_since == seen
    }

    /// Hands out grants and judges waiting prompts again, until neither leads to more. Each round serves a
    /// request or is the last.
    fn settle(self: &Arc<Self>, state: &mut QueueState, grants: Vec<LeaseGrant>, outbox: &mut QueueOutbox) {
        let mut grants = VecDeque::from(grants);
        loop {
            while let Some(grant) = grants.pop_front() {
                grants.extend(self.hand_out(state, &grant, outbox));
            }
            let looked = state.admit.judge_waiting(&mut state.dispatch);
            outbox.wake |= looked.wants_recycle;
            for (generation, action, short) in looked.changed_actions {
                let action = action.to_owned();
                outbox.events.push((generation, EventKind::PromptTooLarge { action, short }));
            }
            for (ticket, generation, kind) in looked.granted {
                match (state.waiters.remove(&ticket), state.occupy_slot(generation, kind)) {
                    (Some(waiter), Some(cell)) => {
                        let lease = self.make_lease(cell, kind, waiter.since.elapsed());
                        outbox.answers.push((waiter.answer, Ok(lease)));
                    }
                    // Unreachable: a waiting request and an open generation have their entries.
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

    /// Hands out one grant. Without room for its prompt the lease goes back, which may grant it to others.
    fn hand_out(
        self: &Arc<Self>,
        state: &mut QueueState,
        grant: &LeaseGrant,
        outbox: &mut QueueOutbox,
    ) -> Vec<LeaseGrant> {
        let LeaseGrant { ticket, generation, kind } = *grant;
        let Some(waiter) = state.waiters.get(&ticket) else { return Vec::new() };
        let tokens = waiter.tokens.filter(|_| self.checks_prompts.load(Ordering::Relaxed));
        let judged = tokens.map_or(AdmissionDecision::Fits, |tokens| {
            state.admit.judge_prompt(&state.dispatch, generation, tokens, true)
        });
        if let Some((action, short)) = judged.action() {
            let enforced = state.admit.holds_prompts();
            let told = if enforced { action } else { "warn" }.to_owned();
            outbox.events.push((generation, EventKind::PromptTooLarge { action: told, short: *short }));
            if enforced {
                // A prompt with room elsewhere, or nowhere, is answered by the next look.
                let stays = matches!(judged, AdmissionDecision::Wait(..) | AdmissionDecision::Recycle(..));
                if stays && state.waiting() >= state.depth {
                    let full = LeaseDenied::QueueFull { waiting: state.depth, depth: state.depth };
                    let waiter = state.waiters.remove(&ticket);
                    outbox.answers.extend(waiter.map(|waiter| (waiter.answer, Err(full))));
                } else {
                    state.admit.add_waiting(ticket, kind, action, *short);
                }
                return state.dispatch.release(generation, kind);
            }
        }
        if let Some(waiter) = state.waiters.remove(&ticket)
            && let Some(cell) = state.occupy_slot(generation, kind)
        {
            let lease = self.make_lease(cell, kind, waiter.since.elapsed());
            outbox.answers.push((waiter.answer, Ok(lease)));
        }
        Vec::new()
    }

    fn deliver(&self, outbox: QueueOutbox) {
        if outbox.wake {
            self.wake.notify_one();
        }
        for (generation, kind) in outbox.events {
            self.journal.record(Some(&self.name), Some(generation), kind);
        }
        send_answers(outbox.answers);
    }

    /// All waiting requests: for a slot, for room, or in the previous instance.
    pub(crate) fn waiting(&self) -> usize {
        let state = lock(&self.state);
        state.waiting() + state.predecessor.waiting
    }

    /// All requests that had to wait so far, here or in the previous instance.
    pub(crate) fn queued_total(&self) -> u64 {
        let state = lock(&self.state);
        state.queued + state.predecessor.queued
    }

    /// Records the queue of the previous instance. That instance starts no process, and reports with a
    /// delay of some milliseconds.
    pub(crate) fn set_predecessor(&self, elsewhere: PredecessorQueue) {
        let mut state = lock(&self.state);
        let known = &state.predecessor;
        // A request that comes at the moment when another one leaves is new, too.
        let instead = elsewhere.waiting > 0 && elsewhere.queued > known.queued;
        let comes = elsewhere.waiting > known.waiting || instead;
        let closed = !known.open.is_subset(&elsewhere.open);
        // A new request is a reason to try again.
        let hopeless = if comes { 0 } else { known.hopeless.min(elsewhere.waiting) };
        let came = elsewhere.queued.max(known.queued);
        state.predecessor = PredecessorQueue { queued: came, hopeless, ..elsewhere };
        drop(state);
        if comes || closed {
            self.wake.notify_one();
        }
    }

    /// Marks the requests waiting there now as hopeless, so that they cause no start.
    pub(crate) fn give_up_predecessor(&self) {
        let mut state = lock(&self.state);
        state.predecessor.hopeless = state.predecessor.waiting;
    }

    /// True if a generation holds no lease, and the previous instance can grant none.
    pub(crate) fn is_unused(&self, generation: GenerationId) -> bool {
        let state = lock(&self.state);
        state.dispatch.in_flight(generation) == 0 && !state.predecessor.open.contains(&generation)
    }

    /// Reason to refuse requests that wait in the previous instance: the same as for our own.
    pub(crate) fn predecessor_refusal(&self) -> Option<LeaseDenied> {
        let state = lock(&self.state);
        let refused = state.predecessor.waiting > 0 && !state.dispatch.any_open();
        let refusal = state.refusal.as_ref().filter(|refusal| refused && !refusal.is_final());
        refusal.map(QueueRefusal::denied)
    }

    pub(crate) fn any_open(&self) -> bool {
        lock(&self.state).dispatch.any_open()
    }

    /// True if a generation takes leases.
    pub(crate) fn is_open(&self, generation: GenerationId) -> bool {
        lock(&self.state).dispatch.is_open(generation)
    }

    /// True if a request waits, or is expected back, and no generation is open.
    pub(crate) fn needs_process(&self) -> bool {
        let state = lock(&self.state);
        (state.waiting() + state.predecessor.needing_process() > 0 || state.expects())
            && !state.dispatch.any_open()
    }

    /// True if no request waits and no lease is held.
    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.waiting() == 0 && state.dispatch.in_flight_total() == 0
    }

    pub(crate) fn in_flight(&self, generation: GenerationId) -> u32 {
        lock(&self.state).dispatch.in_flight(generation)
    }

    /// State of the model for the loader.
    pub(crate) fn loader_view(&self) -> ModelActivity {
        let state = lock(&self.state);
        let waiting = state.waiting() + state.predecessor.needing_process();
        let in_flight = state.dispatch.in_flight_total();
        let rests = waiting == 0 && in_flight == 0;
        let since = state.generations.values().filter_map(|entry| entry.idle_since).max();
        let since = since.into_iter().chain(state.last_idle).max().unwrap_or(self.born);
        let idle_for = if rests { since.elapsed() } else { Duration::ZERO };
        // An expected retry counts like a waiting request.
        let waiting = waiting.max(usize::from(state.expects()));
        let conversations = self.turns.evaluation_cost();
        ModelActivity { requests: state.asked, waiting, in_flight, idle_for, conversations }
    }

    /// Since when the generation holds no lease; `None` while it holds one, or if it was never opened.
    pub(crate) fn idle_since(&self, generation: GenerationId) -> Option<Instant> {
        lock(&self.state).generations.get(&generation).and_then(|entry| entry.idle_since)
    }

    /// Requests and work of each living generation that was opened.
    pub(crate) fn generation_counts(&self) -> Vec<GenerationCounts> {
        let state = lock(&self.state);
        let count = |(id, entry): (&GenerationId, &GenerationEntry)| GenerationCounts {
            generation: *id,
            in_flight: state.dispatch.in_flight(*id),
            work: entry.cell.work(),
            open: state.dispatch.is_open(*id) || state.predecessor.open.contains(id),
        };
        state.generations.iter().map(count).collect()
    }

    /// Number of slots of a generation.
    pub(crate) fn slot_limit(&self, generation: GenerationId) -> Option<u32> {
        lock(&self.state).dispatch.limit(generation)
    }

    /// Generations that take leases.
    pub(crate) fn open_cells(&self) -> Vec<Arc<GenerationCell>> {
        let state = lock(&self.state);
        let open = state.generations.iter().filter(|(id, _)| state.dispatch.is_open(**id));
        open.map(|(_, entry)| Arc::clone(&entry.cell)).collect()
    }

    /// Work of a living generation that was opened.
    pub(crate) fn work(&self, generation: GenerationId) -> Option<WorkDone> {
        lock(&self.state).generations.get(&generation).map(|entry| entry.cell.work())
    }
}

impl QueueState {
    /// Requests waiting here, for a slot or for room.
    fn waiting(&self) -> usize {
        self.dispatch.waiting() + self.admit.waiting()
    }

    fn occupy_slot(&mut self, generation: GenerationId, kind: LeaseKind) -> Option<Arc<GenerationCell>> {
        let entry = self.generations.get_mut(&generation)?;
        if kind == LeaseKind::Slot {
            // The expected request has come back, or another one was served.
            self.retry_expected = None;
        }
        if !matches!(kind, LeaseKind::Read | LeaseKind::Watch) {
            entry.idle_since = None;
        }
        Some(Arc::clone(&entry.cell))
    }

    /// Total paused time of the waiting requests' clock.
    fn paused_total(&self) -> Duration {
        self.paused + self.paused_since.map(|since| since.elapsed()).unwrap_or_default()
    }

    /// Handles a generation that has become idle with the end of this lease. Returns true if the task has
    /// to be woken, because it waits for this or would not look by itself.
    fn note_idle(&mut self, generation: GenerationId, last: LeaseKind) -> bool {
        let awaited = self.refusal.is_some() || !self.dispatch.is_open(generation);
        let Some(entry) = self.generations.get_mut(&generation) else { return true };
        if last == LeaseKind::Read && entry.idle_since.is_some() {
            return awaited;
        }
        entry.idle_since = Some(Instant::now());
        awaited || !std::mem::replace(&mut entry.task_will_look, true)
    }

    fn close(&mut self, generation: GenerationId) {
        let open = self.dispatch.any_open();
        self.dispatch.close(generation);
        if open && !self.dispatch.any_open() {
            self.gap = Some(Instant::now());
        }
    }

    fn dismiss(&mut self, denied: &LeaseDenied) -> LeaseAnswers {
        let mut tickets = self.dispatch.dismiss();
        tickets.extend(self.admit.remove_all());
        self.retry_expected = None;
        self.full_told = false;
        let waiters = tickets.iter().filter_map(|ticket| self.waiters.remove(ticket));
        waiters.map(|waiter| (waiter.answer, Err(denied.clone()))).collect()
    }
}

/// Sends the answers. A request that has left gives its lease back by the drop.
fn send_answers(answers: LeaseAnswers) {
    for (sender, answer) in answers {
        drop(sender.send(answer));
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod ward_tests;
