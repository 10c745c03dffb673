//! Queue, leases and open generations of one model, behind one lock.
//!
//! Requests use the queue directly, and wake the model's task only for its work. Code under the lock awaits
//! nothing, and sends or drops no value that could take the lock again: it collects grants for later.
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
//! A granted lease is taken back if its prompt does not fit into memory. The request then waits in
//! [`crate::lease::admit`].

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
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

use self::ask::NextProcess;
pub(crate) use self::gate::QueueRefusal;
use crate::error::LeaseDenied;
use crate::lease::Lease;
use crate::lease::admit::{AdmissionDecision, ProcessHeadroom, PromptAdmission};
use crate::lease::cell::GenerationCell;
use crate::lease::turns::ConversationStore;
use crate::process::settings::{self, ClientSettings};
use crate::sync::lock;
use crate::view::event::{EventJournal, EventKind};

pub(crate) mod ask;
mod gate;
pub(crate) mod ward;

#[derive(Debug)]
pub(crate) struct LeaseQueue {
    name: ModelName,
    journal: Arc<EventJournal>,
    /// Wakes the model's task: a request needs a process, or a generation has become idle.
    pub(crate) wake: Notify,
    /// True if admission is on and prompt prices are known. Requests read this flag without the lock.
    checks_prompts: AtomicBool,
    pub(crate) settings: ClientSettings,
    pub(crate) turns: ConversationStore,
    is_canary: AtomicBool,
    /// True if the quarantine knows any request. Requests read this flag without the lock.
    has_suspects: AtomicBool,
    /// Wakes requests that wait for solitude, or for news of a generation.
    changes: Notify,
    born: Instant,
    state: Mutex<QueueState>,
}

/// Queue of the previous instance, as last reported.
#[derive(Debug, Default)]
pub(crate) struct PredecessorQueue {
    /// Requests that wait in the previous instance and get their leases there.
    waiting: usize,
    /// All requests so far that had to wait in the previous instance.
    queued: u64,
    /// Generations on which the previous instance can still grant leases.
    open: BTreeSet<GenerationId>,
    /// Requests waiting in the previous instance for which starting a process is pointless.
    hopeless: usize,
}

impl PredecessorQueue {
    pub(crate) fn new(waiting: usize, queued: u64, open: BTreeSet<GenerationId>) -> Self {
        Self { waiting, queued, open, hopeless: 0 }
    }

    /// Requests waiting in the previous instance that need a process.
    fn needing_process(&self) -> usize {
        self.waiting.saturating_sub(self.hopeless)
    }
}

#[derive(Debug)]
pub(crate) struct GenerationCounts {
    pub(crate) generation: GenerationId,
    pub(crate) in_flight: u32,
    pub(crate) work: WorkDone,
    pub(crate) open: bool,
}

#[derive(Debug)]
struct QueueState {
    dispatch: LeaseDispatch,
    admit: PromptAdmission,
    quarantine: RequestQuarantine,
    limits: QueueLimits,
    waiters: QuickMap<QueueTicket, QueueWaiter>,
    predecessor: PredecessorQueue,
    table: GenerationTable,
    refusal: Option<QueueRefusal>,
    asked: u64,
    queued: u64,
    coming: ExpectedProcess,
}

#[derive(Debug)]
struct QueueLimits {
    depth: usize,
    wait: Duration,
    is_full_logged: bool,
    /// Total duration of the earlier pauses.
    paused_before: Duration,
    paused_since: Option<Instant>,
}

impl QueueLimits {
    fn paused(&self) -> Duration {
        self.paused_before + self.paused_since.map(|since| since.elapsed()).unwrap_or_default()
    }

    fn set_paused(&mut self, is_paused: bool) {
        if is_paused != self.paused_since.is_some() {
            self.paused_before = self.paused();
            self.paused_since = is_paused.then(Instant::now);
        }
    }
}

#[derive(Debug, Default)]
struct ExpectedProcess {
    /// Estimates, valid while no process serves.
    next: NextProcess,
    /// End of the time in which a refused client is expected to retry.
    retry: Option<Instant>,
}

#[derive(Debug, Default)]
struct GenerationTable {
    entries: QuickMap<GenerationId, GenerationEntry>,
    /// Closed generations that the task has to probe, because they refused a connection.
    doubted: Vec<GenerationId>,
    /// End of the last lease on a generation that was removed later.
    last_idle: Option<Instant>,
    /// Begin of the time without an open generation; `None` while one is open, or if none ever was.
    gap: Option<Instant>,
}

#[derive(Debug)]
struct QueueWaiter {
    answer: oneshot::Sender<Result<Lease, LeaseDenied>>,
    since: Instant,
    tokens: Option<u64>,
}

#[derive(Debug)]
struct GenerationEntry {
    cell: Arc<GenerationCell>,
    idle_since: Option<Instant>,
    /// True if the task will check an idle generation again without being woken.
    task_will_look: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenedGate {
    pub(crate) waiting: usize,
    /// Begin of the time without an open generation. Before the first one, this is the moment when the oldest
    /// request began to wait. `None` if one was open.
    pub(crate) gap: Option<Instant>,
}

type LeaseAnswers = Vec<(oneshot::Sender<Result<Lease, LeaseDenied>>, Result<Lease, LeaseDenied>)>;

/// Answers and events to send after the lock is released.
#[derive(Default)]
struct QueueOutbox {
    answers: LeaseAnswers,
    events: Vec<(GenerationId, EventKind)>,
    wake: bool,
}

impl LeaseQueue {
    pub(crate) fn new(name: ModelName, journal: Arc<EventJournal>, depth: usize, wait: Duration) -> Self {
        let state = QueueState {
            dispatch: LeaseDispatch::new(depth),
            admit: PromptAdmission::new(AdmissionMode::Off, warden_policies::defaults().admission.clone()),
            quarantine: RequestQuarantine::new(warden_policies::defaults().quarantine),
            limits: QueueLimits {
                depth,
                wait,
                is_full_logged: false,
                paused_before: Duration::ZERO,
                paused_since: None,
            },
            waiters: QuickMap::default(),
            predecessor: PredecessorQueue::default(),
            table: GenerationTable::default(),
            refusal: None,
            asked: 0,
            queued: 0,
            coming: ExpectedProcess::default(),
        };
        Self {
            name,
            journal,
            wake: Notify::new(),
            checks_prompts: AtomicBool::new(false),
            settings: ClientSettings::default(),
            turns: ConversationStore::default(),
            is_canary: AtomicBool::new(false),
            has_suspects: AtomicBool::new(false),
            changes: Notify::new(),
            born: Instant::now(),
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

    pub(crate) fn set_admission(self: &Arc<Self>, mode: AdmissionMode, policy: AdmissionPolicy) {
        self.change_admission(|admit| admit.set_policy(mode, policy));
    }

    pub(crate) fn publish_memory(self: &Arc<Self>, headroom: Vec<ProcessHeadroom>) {
        self.change_admission(|admit| admit.publish(headroom));
    }

    fn change_admission(self: &Arc<Self>, change: impl FnOnce(&mut PromptAdmission)) {
        let mut state = lock(&self.state);
        change(&mut state.admit);
        self.checks_prompts.store(state.admit.checks_prompts(), Ordering::Relaxed);
        self.settle_and_deliver(state, Vec::new());
    }

    /// Hands out `grants`, and sends the answers after the lock is released.
    fn settle_and_deliver(self: &Arc<Self>, mut state: MutexGuard<'_, QueueState>, grants: Vec<LeaseGrant>) {
        let mut outbox = QueueOutbox::default();
        self.settle(&mut state, grants, &mut outbox);
        drop(state);
        self.deliver(outbox);
    }

    fn checked_tokens(&self, tokens: Option<u64>) -> Option<u64> {
        if self.checks_prompts.load(Ordering::Relaxed) { tokens } else { None }
    }

    pub(crate) fn note_setting(&self, generation: GenerationId, path: &str, body: Bytes) {
        if self.settings.set(generation, path, body) {
            self.wake.notify_one();
        } else {
            self.log_lost_setting(generation, path);
        }
    }

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

    /// Memory for which a waiting prompt needs a new process.
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

    /// Marks a lease without a slot as an endless event stream, which drains ignore.
    pub(crate) fn mark_endless(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.dispatch.convert_to_watch(generation);
        let wake = state.dispatch.in_flight(generation) == 0 && state.note_idle(generation, LeaseKind::Aux);
        drop(state);
        self.deliver(QueueOutbox { wake, ..QueueOutbox::default() });
    }

    /// Requests a wake-up of the task when a generation becomes idle. `returns`: the task checks again by
    /// itself. Returns false if the generation became idle or busy after `seen`: check again now.
    pub(crate) fn watch_idle(&self, generation: GenerationId, seen: Option<Instant>, returns: bool) -> bool {
        let mut state = lock(&self.state);
        let Some(entry) = state.table.entries.get_mut(&generation) else { return seen.is_none() };
        entry.task_will_look = returns;
        entry.idle_since == seen
    }

    /// Hands out leases and judges prompts that wait for memory, until neither grants more leases.
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
                    // Unreachable: the tables contain each waiting request and open generation.
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
        if state.dispatch.waiting() < state.limits.depth {
            state.limits.is_full_logged = false;
        }
    }

    /// Hands out a lease, or returns it for others if its prompt does not fit into memory.
    fn hand_out(
        self: &Arc<Self>,
        state: &mut QueueState,
        grant: &LeaseGrant,
        outbox: &mut QueueOutbox,
    ) -> Vec<LeaseGrant> {
        let LeaseGrant { ticket, generation, kind } = *grant;
        let Some(waiter) = state.waiters.get(&ticket) else { return Vec::new() };
        let tokens = self.checked_tokens(waiter.tokens);
        let judged = tokens.map_or(AdmissionDecision::Fits, |tokens| {
            state.admit.judge_prompt(&state.dispatch, generation, tokens, true)
        });
        if let Some((action, short)) = judged.action() {
            let enforced = state.admit.holds_prompts();
            let told = if enforced { action } else { "warn" }.to_owned();
            outbox.events.push((generation, EventKind::PromptTooLarge { action: told, short: *short }));
            if enforced {
                // The next judgement grants or refuses a prompt that fits elsewhere or nowhere.
                let stays = matches!(judged, AdmissionDecision::Wait(..) | AdmissionDecision::Recycle(..));
                if stays && state.waiting() >= state.limits.depth {
                    let full =
                        LeaseDenied::QueueFull { waiting: state.limits.depth, depth: state.limits.depth };
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

    /// Requests waiting for a slot, for memory, or in the previous instance.
    pub(crate) fn waiting(&self) -> usize {
        let state = lock(&self.state);
        state.waiting() + state.predecessor.waiting
    }

    /// All requests so far that had to wait, here or in the previous instance.
    pub(crate) fn queued_total(&self) -> u64 {
        let state = lock(&self.state);
        state.queued + state.predecessor.queued
    }

    /// Records the queue of the previous instance, some milliseconds old. This instance starts processes for
    /// its requests.
    pub(crate) fn set_predecessor(&self, elsewhere: PredecessorQueue) {
        let mut state = lock(&self.state);
        let known = &state.predecessor;
        // A new request may have replaced one that left, so the number of waiting requests is not enough.
        let instead = elsewhere.waiting > 0 && elsewhere.queued > known.queued;
        let comes = elsewhere.waiting > known.waiting || instead;
        let closed = !known.open.is_subset(&elsewhere.open);
        let hopeless = if comes { 0 } else { known.hopeless.min(elsewhere.waiting) };
        let came = elsewhere.queued.max(known.queued);
        state.predecessor = PredecessorQueue { queued: came, hopeless, ..elsewhere };
        drop(state);
        if comes || closed {
            self.wake.notify_one();
        }
    }

    /// Starts no process for the requests that now wait in the previous instance.
    pub(crate) fn give_up_predecessor(&self) {
        let mut state = lock(&self.state);
        state.predecessor.hopeless = state.predecessor.waiting;
    }

    /// True if a generation has no lease, and the previous instance can grant none on it.
    pub(crate) fn is_unused(&self, generation: GenerationId) -> bool {
        let state = lock(&self.state);
        state.dispatch.in_flight(generation) == 0 && !state.predecessor.open.contains(&generation)
    }

    /// Reason for the previous instance to refuse its waiting requests. `None` if none wait there, if a
    /// generation is open here, or if the reason is final.
    pub(crate) fn predecessor_refusal(&self) -> Option<LeaseDenied> {
        let state = lock(&self.state);
        let refused = state.predecessor.waiting > 0 && !state.dispatch.any_open();
        let refusal = state.refusal.as_ref().filter(|refusal| refused && !refusal.is_final());
        refusal.map(QueueRefusal::denied)
    }

    pub(crate) fn any_open(&self) -> bool {
        lock(&self.state).dispatch.any_open()
    }

    pub(crate) fn is_open(&self, generation: GenerationId) -> bool {
        lock(&self.state).dispatch.is_open(generation)
    }

    /// True if no generation is open although a request waits or a retry is expected.
    pub(crate) fn needs_process(&self) -> bool {
        let state = lock(&self.state);
        (state.waiting() + state.predecessor.needing_process() > 0 || state.expects())
            && !state.dispatch.any_open()
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.waiting() == 0 && state.dispatch.in_flight_total() == 0
    }

    pub(crate) fn in_flight(&self, generation: GenerationId) -> u32 {
        lock(&self.state).dispatch.in_flight(generation)
    }

    pub(crate) fn loader_view(&self) -> ModelActivity {
        let state = lock(&self.state);
        let waiting = state.waiting() + state.predecessor.needing_process();
        let in_flight = state.dispatch.in_flight_total();
        let rests = waiting == 0 && in_flight == 0;
        let since = state.table.entries.values().filter_map(|entry| entry.idle_since).max();
        let since = since.into_iter().chain(state.table.last_idle).max().unwrap_or(self.born);
        let idle_for = if rests { since.elapsed() } else { Duration::ZERO };
        let waiting = waiting.max(usize::from(state.expects()));
        let conversations = self.turns.evaluation_cost();
        ModelActivity { requests: state.asked, waiting, in_flight, idle_for, conversations }
    }

    /// Begin of the time without a lease; `None` while there is one, or before the generation opens.
    pub(crate) fn idle_since(&self, generation: GenerationId) -> Option<Instant> {
        lock(&self.state).table.entries.get(&generation).and_then(|entry| entry.idle_since)
    }

    /// Counts of each generation that was opened and whose process is not gone.
    pub(crate) fn generation_counts(&self) -> Vec<GenerationCounts> {
        let state = lock(&self.state);
        let count = |(id, entry): (&GenerationId, &GenerationEntry)| GenerationCounts {
            generation: *id,
            in_flight: state.dispatch.in_flight(*id),
            work: entry.cell.work(),
            open: state.dispatch.is_open(*id) || state.predecessor.open.contains(id),
        };
        state.table.entries.iter().map(count).collect()
    }

    pub(crate) fn slot_limit(&self, generation: GenerationId) -> Option<u32> {
        lock(&self.state).dispatch.limit(generation)
    }

    pub(crate) fn open_cells(&self) -> Vec<Arc<GenerationCell>> {
        let state = lock(&self.state);
        let open = state.table.entries.iter().filter(|(id, _)| state.dispatch.is_open(**id));
        open.map(|(_, entry)| Arc::clone(&entry.cell)).collect()
    }

    /// Returns `None` for a generation that was not opened or whose process is gone.
    pub(crate) fn work(&self, generation: GenerationId) -> Option<WorkDone> {
        lock(&self.state).table.entries.get(&generation).map(|entry| entry.cell.work())
    }
}

impl QueueState {
    /// Requests that wait in this instance, for a slot or for memory.
    fn waiting(&self) -> usize {
        self.dispatch.waiting() + self.admit.waiting()
    }

    fn occupy_slot(&mut self, generation: GenerationId, kind: LeaseKind) -> Option<Arc<GenerationCell>> {
        let entry = self.table.entries.get_mut(&generation)?;
        if kind == LeaseKind::Slot {
            // This request is the expected retry, or proves that none is needed.
            self.coming.retry = None;
        }
        if !matches!(kind, LeaseKind::Read | LeaseKind::Watch) {
            entry.idle_since = None;
        }
        Some(Arc::clone(&entry.cell))
    }

    /// Handles the end of a generation's last lease. Returns true if the task has to be woken: it waits for
    /// an idle generation, or would not check again by itself.
    fn note_idle(&mut self, generation: GenerationId, last: LeaseKind) -> bool {
        let awaited = self.refusal.is_some() || !self.dispatch.is_open(generation);
        let Some(entry) = self.table.entries.get_mut(&generation) else { return true };
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
            self.table.gap = Some(Instant::now());
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

    fn dismiss(&mut self, denied: &LeaseDenied) -> LeaseAnswers {
        let mut tickets = self.dispatch.dismiss();
        tickets.extend(self.admit.remove_all());
        self.coming.retry = None;
        self.limits.is_full_logged = false;
        let waiters = tickets.iter().filter_map(|ticket| self.waiters.remove(ticket));
        waiters.map(|waiter| (waiter.answer, Err(denied.clone()))).collect()
    }
}

/// If a request has left, dropping its lease returns it.
fn send_answers(answers: LeaseAnswers) {
    for (sender, answer) in answers {
        drop(sender.send(answer));
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod ward_tests;
