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

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;
use warden_policies::dispatch::LeaseKind;
use warden_policies::health::{AnswerHistory, AnswerKeys, AnswerSigns};
use warden_policies::loading::ModelActivity;
use warden_policies::sample::MemoryKind;
use warden_policies::{ByteSize, GenerationId, ModelName};

pub(crate) use self::gate::QueueRefusal;
pub(crate) use self::state::PredecessorQueue;
use self::state::{GrantedSlot, QueueOutbox, QueueState};
pub(crate) use self::table::{GenerationCounts, OpenedGate};
use self::ward::RequestWard;
use crate::lease::Lease;
use crate::lease::admit::PromptAdmission;
use crate::lease::outcomes::OutcomeStats;
use crate::lease::turns::ConversationStore;
use crate::process::settings::{self, ClientSettings};
use crate::sync::lock;
use crate::view::event::{EventJournal, EventKind};

pub(crate) mod ask;
mod gate;
mod state;
mod table;
pub(crate) mod ward;

#[derive(Debug)]
pub(crate) struct LeaseQueue {
    journal: ModelJournal,
    /// Wakes the model's task: a request needs a process, or a generation has become idle.
    pub(crate) wake: Notify,
    /// True if admission is on and prompt prices are known. Requests read this flag without the lock.
    checks_prompts: AtomicBool,
    /// True once a second replica has opened. Requests read this flag without the lock.
    pub(super) has_replicas: AtomicBool,
    pub(crate) settings: ClientSettings,
    pub(crate) turns: ConversationStore,
    pub(crate) is_canary: AtomicBool,
    pub(crate) ward: RequestWard,
    pub(crate) answers: ModelAnswers,
    state: Mutex<QueueState>,
}

#[derive(Clone, Debug)]
struct ModelJournal {
    model: ModelName,
    journal: Arc<EventJournal>,
}

impl ModelJournal {
    fn record(&self, generation: Option<GenerationId>, kind: EventKind) {
        self.journal.record(Some(&self.model), generation, kind);
    }
}

/// Judged answers of all processes of a model.
#[derive(Debug, Default)]
pub(crate) struct ModelAnswers {
    history: Mutex<AnswerHistory>,
    /// True if the latest judged answer has a fault.
    is_faulty: AtomicBool,
    /// True if answers are judged.
    pub(super) is_watched: AtomicBool,
}

impl ModelAnswers {
    /// Records a judged answer of a process.
    pub(crate) fn record_answer(&self, outcomes: &mut OutcomeStats, signs: AnswerSigns, keys: AnswerKeys) {
        let mut history = lock(&self.history);
        outcomes.answers.record_answer(signs, keys, &mut history);
        let is_faulty = outcomes.answers.is_faulty();
        self.is_faulty.store(is_faulty, Ordering::Relaxed);
        outcomes.faulty_answers = outcomes.answers.symptom(&history);
        outcomes.are_unusual = is_faulty && outcomes.answers.is_unusual(&history);
    }

    /// Returns true if the latest judged answer has a fault.
    pub(crate) fn is_faulty(&self) -> bool {
        self.is_faulty.load(Ordering::Relaxed)
    }

    /// Sets whether answers are judged.
    pub(crate) fn set_watched(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Relaxed);
    }
}

impl LeaseQueue {
    pub(crate) fn new(model: ModelName, journal: Arc<EventJournal>, depth: usize, wait: Duration) -> Self {
        let journal = ModelJournal { model, journal };
        Self {
            wake: Notify::new(),
            checks_prompts: AtomicBool::new(false),
            has_replicas: AtomicBool::new(false),
            settings: ClientSettings::default(),
            turns: ConversationStore::default(),
            is_canary: AtomicBool::new(false),
            ward: RequestWard::new(journal.clone()),
            answers: ModelAnswers::default(),
            state: Mutex::new(QueueState::new(depth, wait)),
            journal,
        }
    }

    pub(crate) fn name(&self) -> &ModelName {
        &self.journal.model
    }

    /// For questions, and for changes that give no lease and answer no request.
    pub(crate) fn with_state<T>(&self, apply: impl FnOnce(&mut QueueState) -> T) -> T {
        apply(&mut lock(&self.state))
    }

    /// Changes the state, and delivers the outbox after the lock is released.
    fn update<T>(self: &Arc<Self>, change: impl FnOnce(&mut QueueState, &mut QueueOutbox) -> T) -> T {
        let mut outbox = QueueOutbox::default();
        let result = self.with_state(|state| change(state, &mut outbox));
        if outbox.wake {
            self.wake.notify_one();
        }
        for (generation, kind) in outbox.events {
            self.journal.record(generation, kind);
        }
        for (sender, answer) in outbox.answers {
            // If the request has left, dropping its lease returns it.
            drop(sender.send(answer.map(|granted| self.make_lease(granted))));
        }
        result
    }

    fn make_lease(self: &Arc<Self>, granted: GrantedSlot) -> Lease {
        Lease::new(Arc::clone(self), granted.cell, granted.kind, granted.queued_for)
    }

    pub(crate) fn change_admission(self: &Arc<Self>, change: impl FnOnce(&mut PromptAdmission)) {
        self.update(|state, outbox| {
            change(&mut state.admit);
            self.checks_prompts.store(state.admit.checks_prompts(), Ordering::Relaxed);
            state.settle(Vec::new(), outbox);
        });
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
        self.journal.record(Some(generation), EventKind::SettingLost { message });
    }

    /// Memory for which a waiting prompt needs a new process.
    pub(crate) fn admission_wish(&self, generation: GenerationId) -> Option<MemoryKind> {
        self.with_state(|state| state.admit.recycle_wish(generation))
    }

    pub(crate) fn release(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        let sought = self.update(|state, outbox| {
            let grants = state.dispatch.release(generation, kind);
            state.settle(grants, outbox);
            outbox.wake |= kind != LeaseKind::Watch && state.note_idle(generation, kind);
            state.dispatch.has_seekers(generation)
        });
        if sought {
            self.ward.changes.notify_waiters();
        }
    }

    /// Marks a lease without a slot as an endless event stream, which drains ignore.
    pub(crate) fn mark_endless(self: &Arc<Self>, generation: GenerationId) {
        self.update(|state, outbox| {
            state.dispatch.convert_to_watch(generation);
            outbox.wake = state.note_idle(generation, LeaseKind::Aux);
        });
    }

    /// Requests waiting for a slot, for memory, or in the previous instance.
    pub(crate) fn waiting(&self) -> usize {
        self.with_state(|state| state.waiting() + state.predecessor.waiting)
    }

    /// Records the queue of the previous instance, some milliseconds old. This instance starts processes for
    /// its requests.
    pub(crate) fn set_predecessor(&self, reported: PredecessorQueue) {
        if self.with_state(|state| state.predecessor.replace(reported)) {
            self.wake.notify_one();
        }
    }

    /// Returns true if requests need a conversation key: for the choice of a replica, or because answers have
    /// a fault.
    pub(crate) fn needs_conversation_key(&self) -> bool {
        self.has_replicas.load(Ordering::Relaxed) || self.answers.is_faulty()
    }

    pub(crate) fn any_open(&self) -> bool {
        self.with_state(|state| state.dispatch.any_open())
    }

    pub(crate) fn is_open(&self, generation: GenerationId) -> bool {
        self.with_state(|state| state.dispatch.is_open(generation))
    }

    pub(crate) fn needs_process(&self) -> bool {
        self.with_state(|state| state.needs_process())
    }

    pub(crate) fn in_flight(&self, generation: GenerationId) -> u32 {
        self.with_state(|state| state.dispatch.in_flight(generation))
    }

    /// Moment since which there is no lease; `None` while there is one, or before the generation opens.
    pub(crate) fn idle_since(&self, generation: GenerationId) -> Option<Instant> {
        self.with_state(|state| state.table.idle_since(generation))
    }

    pub(crate) fn loader_view(&self) -> ModelActivity {
        let conversations = self.turns.evaluation_cost();
        ModelActivity { conversations, ..self.with_state(|state| state.activity()) }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod ward_tests;
