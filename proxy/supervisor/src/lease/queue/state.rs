//! State under the queue's lock. Its methods put answers, events and wake-ups into an outbox, which the queue
//! delivers after it has released the lock.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::admission::AdmissionMode;
use warden_policies::conversation_replicas::ConversationReplicas;
use warden_policies::dispatch::{LeaseDispatch, LeaseGrant, LeaseKind, LeasePreference, QueueTicket};
use warden_policies::loading::ModelActivity;
use warden_policies::{GenerationId, QuickMap};

use super::ask::{ExpectedProcess, NextProcess, PromptFacts, QueueLimits};
use super::gate::QueueRefusal;
use super::table::{GenerationCounts, GenerationTable};
use crate::error::LeaseDenied;
use crate::lease::Lease;
use crate::lease::admit::{AdmissionDecision, PromptAdmission};
use crate::lease::cell::GenerationCell;
use crate::view::event::EventKind;

#[derive(Debug)]
pub(crate) struct QueueState {
    pub(in crate::lease) dispatch: LeaseDispatch,
    pub(super) admit: PromptAdmission,
    pub(crate) limits: QueueLimits,
    pub(super) waiters: QuickMap<QueueTicket, QueueWaiter>,
    pub(crate) predecessor: PredecessorQueue,
    pub(crate) table: GenerationTable,
    homes: ConversationReplicas,
    pub(super) refusal: Option<QueueRefusal>,
    pub(super) asked: u64,
    pub(super) queued: u64,
    pub(crate) coming: ExpectedProcess,
}

/// Queue of the previous instance, as last reported.
#[derive(Debug, Default)]
pub(crate) struct PredecessorQueue {
    /// Requests that wait in the previous instance and get their leases there.
    pub(super) waiting: usize,
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

    /// Returns true if a request has arrived, or a generation was closed.
    pub(super) fn replace(&mut self, reported: Self) -> bool {
        // A new request may have replaced one that left, so the number of waiting requests is not enough.
        let instead = reported.waiting > 0 && reported.queued > self.queued;
        let comes = reported.waiting > self.waiting || instead;
        let closed = !self.open.is_subset(&reported.open);
        let hopeless = if comes { 0 } else { self.hopeless.min(reported.waiting) };
        *self = Self { queued: reported.queued.max(self.queued), hopeless, ..reported };
        comes || closed
    }

    /// Starts no process for the requests that now wait in the previous instance.
    pub(crate) fn give_up(&mut self) {
        self.hopeless = self.waiting;
    }
}

type AnswerSender = oneshot::Sender<Result<Lease, LeaseDenied>>;

#[derive(Debug)]
pub(super) struct QueueWaiter {
    answer: AnswerSender,
    pub(super) since: Instant,
    prompt: PromptFacts,
}

pub(super) struct GrantedSlot {
    pub(super) cell: Arc<GenerationCell>,
    pub(super) kind: LeaseKind,
    pub(super) queued_for: Duration,
}

/// Answers and events to send after the lock is released.
#[derive(Default)]
pub(super) struct QueueOutbox {
    pub(super) answers: Vec<(AnswerSender, Result<GrantedSlot, LeaseDenied>)>,
    pub(super) events: Vec<(Option<GenerationId>, EventKind)>,
    pub(super) wake: bool,
}

impl QueueState {
    pub(super) fn new(depth: usize, wait: Duration) -> Self {
        Self {
            dispatch: LeaseDispatch::new(depth),
            admit: PromptAdmission::new(AdmissionMode::Off, warden_policies::defaults().admission.clone()),
            limits: QueueLimits::new(depth, wait),
            waiters: QuickMap::default(),
            predecessor: PredecessorQueue::default(),
            table: GenerationTable::new(),
            homes: ConversationReplicas::default(),
            refusal: None,
            asked: 0,
            queued: 0,
            coming: ExpectedProcess::default(),
        }
    }

    /// Hands out leases and judges prompts that wait for memory, until neither grants more leases.
    pub(super) fn settle(&mut self, grants: Vec<LeaseGrant>, outbox: &mut QueueOutbox) {
        let mut grants = VecDeque::from(grants);
        loop {
            while let Some(grant) = grants.pop_front() {
                grants.extend(self.hand_out(grant, outbox));
            }
            let looked = self.admit.judge_waiting(&mut self.dispatch);
            outbox.wake |= looked.wants_recycle;
            for (generation, action, short) in looked.changed_actions {
                let action = action.to_owned();
                outbox.events.push((Some(generation), EventKind::PromptTooLarge { action, short }));
            }
            for (ticket, generation, kind) in looked.granted {
                grants.extend(self.grant(LeaseGrant { ticket, generation, kind }, outbox));
            }
            for (ticket, short) in looked.refused {
                self.refuse(ticket, short.into(), outbox);
            }
            grants.extend(self.dispatch.hold(&looked.held));
            if grants.is_empty() {
                break;
            }
        }
        self.limits.is_full_logged &= self.dispatch.waiting() >= self.limits.depth;
    }

    /// Hands out a lease, or returns it for others if its prompt does not fit into memory.
    fn hand_out(&mut self, grant: LeaseGrant, outbox: &mut QueueOutbox) -> Vec<LeaseGrant> {
        let LeaseGrant { ticket, generation, kind } = grant;
        let Some(waiter) = self.waiters.get(&ticket) else { return Vec::new() };
        let judged = waiter.prompt.tokens.map_or(AdmissionDecision::Fits, |tokens| {
            self.admit.judge_prompt(&self.dispatch, generation, tokens, true)
        });
        if let Some((action, short)) = judged.action() {
            let enforced = self.admit.holds_prompts();
            let told = if enforced { action } else { "warn" }.to_owned();
            outbox.events.push((Some(generation), EventKind::PromptTooLarge { action: told, short: *short }));
            if enforced {
                // The next judgement grants or refuses a prompt that fits elsewhere or nowhere.
                let stays = matches!(judged, AdmissionDecision::Wait(..) | AdmissionDecision::Recycle(..));
                let depth = self.limits.depth;
                if stays && self.waiting() >= depth {
                    self.refuse(ticket, LeaseDenied::QueueFull { waiting: depth, depth }, outbox);
                } else {
                    self.admit.add_waiting(ticket, kind, action, *short);
                }
                return self.dispatch.release(generation, kind);
            }
        }
        self.grant(grant, outbox)
    }

    fn grant(&mut self, grant: LeaseGrant, outbox: &mut QueueOutbox) -> Vec<LeaseGrant> {
        let LeaseGrant { ticket, generation, kind } = grant;
        let Some(waiter) = self.waiters.remove(&ticket) else {
            return self.dispatch.release(generation, kind);
        };
        self.record_replica(generation, waiter.prompt);
        match self.occupy_slot(generation, kind, waiter.since.elapsed()) {
            Some(granted) => {
                outbox.answers.push((waiter.answer, Ok(granted)));
                Vec::new()
            }
            // Unreachable: the tables contain each waiting request and open generation.
            None => self.dispatch.release(generation, kind),
        }
    }

    pub(super) fn refuse(&mut self, ticket: QueueTicket, denied: LeaseDenied, outbox: &mut QueueOutbox) {
        outbox.answers.extend(self.waiters.remove(&ticket).map(|waiter| (waiter.answer, Err(denied))));
    }

    pub(super) fn add_waiter(
        &mut self,
        ticket: QueueTicket,
        since: Instant,
        prompt: PromptFacts,
    ) -> oneshot::Receiver<Result<Lease, LeaseDenied>> {
        let (answer, receiver) = oneshot::channel();
        self.waiters.insert(ticket, QueueWaiter { answer, since, prompt });
        receiver
    }

    /// Returns the open generation of the conversation's last replica. For a new conversation, returns each
    /// generation's number of conversations.
    pub(super) fn lease_preference(&self, conversation: u64) -> LeasePreference {
        // Skip closed generations: a replaced process has the same replica number.
        let open = self.table.entries.iter().filter(|(id, _)| self.dispatch.is_open(**id));
        let mut replicas = open.map(|(id, entry)| (*id, entry.cell.replica()));
        if let Some(home) = self.homes.replica(conversation) {
            let home = replicas.find(|(_, replica)| *replica == home).map(|(id, _)| id);
            return LeasePreference { home, ..LeasePreference::default() };
        }
        let conversations =
            replicas.map(|(id, replica)| (id, self.homes.count_conversations(replica))).collect();
        LeasePreference { home: None, conversations }
    }

    /// Records the replica of a granted request's conversation.
    pub(super) fn record_replica(&mut self, generation: GenerationId, prompt: PromptFacts) {
        if let Some((conversation, entry)) = prompt.conversation.zip(self.table.entries.get(&generation)) {
            self.homes.record_replica(conversation, entry.cell.replica());
        }
    }

    pub(super) fn occupy_slot(
        &mut self,
        generation: GenerationId,
        kind: LeaseKind,
        queued_for: Duration,
    ) -> Option<GrantedSlot> {
        let cell = self.table.occupy(generation, kind)?;
        if kind == LeaseKind::Slot {
            // This request is the expected retry, or shows that no retry is needed.
            self.coming.retry = None;
        }
        Some(GrantedSlot { cell, kind, queued_for })
    }

    /// Handles the end of a lease. Returns true if the task has to be woken for an idle generation.
    pub(super) fn note_idle(&mut self, generation: GenerationId, last: LeaseKind) -> bool {
        let awaited = self.refusal.is_some() || !self.dispatch.is_open(generation);
        self.dispatch.in_flight(generation) == 0 && self.table.note_idle(generation, last, awaited)
    }

    /// Requests that wait in this instance, for a slot or for memory.
    pub(super) fn waiting(&self) -> usize {
        self.dispatch.waiting() + self.admit.waiting()
    }

    /// All requests so far that had to wait, here or in the previous instance.
    pub(crate) fn queued_total(&self) -> u64 {
        self.queued + self.predecessor.queued
    }

    /// True if a generation has no lease, and the previous instance can grant none on it.
    pub(crate) fn is_unused(&self, generation: GenerationId) -> bool {
        self.dispatch.in_flight(generation) == 0 && !self.predecessor.open.contains(&generation)
    }

    /// Reason for the previous instance to refuse its waiting requests. `None` if none wait there, if a
    /// generation is open here, or if the reason is final.
    pub(crate) fn predecessor_refusal(&self) -> Option<LeaseDenied> {
        let refused = self.predecessor.waiting > 0 && !self.dispatch.any_open();
        let refusal = self.refusal.as_ref().filter(|refusal| refused && !refusal.is_final());
        refusal.map(QueueRefusal::denied)
    }

    /// True if no generation is open although a request waits or a retry is expected.
    pub(super) fn needs_process(&self) -> bool {
        (self.needing_process() > 0 || self.coming.expects_retry()) && !self.dispatch.any_open()
    }

    /// Requests, here or in the previous instance, that need a process.
    fn needing_process(&self) -> usize {
        self.waiting() + self.predecessor.needing_process()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting() == 0 && self.dispatch.in_flight_total() == 0
    }

    pub(super) fn activity(&self) -> ModelActivity {
        let waiting = self.needing_process();
        let in_flight = self.dispatch.in_flight_total();
        let rests = waiting == 0 && in_flight == 0;
        ModelActivity {
            requests: self.asked,
            waiting: waiting.max(usize::from(self.coming.expects_retry())),
            in_flight,
            idle_for: if rests { self.table.last_idle().elapsed() } else { Duration::ZERO },
            ..ModelActivity::default()
        }
    }

    pub(crate) fn generation_counts(&self) -> Vec<GenerationCounts> {
        let counts = self.table.entries.iter().map(|(id, entry)| GenerationCounts {
            generation: *id,
            in_flight: self.dispatch.in_flight(*id),
            work: entry.cell.work(),
            open: self.dispatch.is_open(*id) || self.predecessor.open.contains(id),
        });
        counts.collect()
    }

    pub(crate) fn slot_limit(&self, generation: GenerationId) -> Option<u32> {
        self.dispatch.limit(generation)
    }

    pub(crate) fn open_cells(&self) -> Vec<Arc<GenerationCell>> {
        let open = self.table.entries.iter().filter(|(id, _)| self.dispatch.is_open(**id));
        open.map(|(_, entry)| Arc::clone(&entry.cell)).collect()
    }

    pub(crate) fn set_limits(&mut self, depth: usize, wait: Duration) {
        (self.limits.depth, self.limits.wait) = (depth, wait);
        self.dispatch.set_depth(depth);
    }

    pub(crate) fn refuses_requests(&self) -> bool {
        let is_slow = self.coming.next.least_time_left(Instant::now()) > self.limits.wait;
        !self.dispatch.any_open() && (self.refusal.is_some() || is_slow)
    }

    /// Returns `None` while a process serves.
    pub(crate) fn next_process(&self) -> Option<NextProcess> {
        (!self.dispatch.any_open()).then_some(self.coming.next)
    }
}
