//! Queue functions for requests: asking for a lease, waiting, leaving. A request that would wait too long for
//! the next process is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::{LeaseAnswer, LeaseGrant, LeaseKind, QueueTicket};

use super::LeaseQueue;
use super::state::{GrantedSlot, QueueOutbox, QueueState};
use crate::clock;
use crate::error::{LeaseDenied, NoRoom};
use crate::lease::Lease;
use crate::lease::admit::{PromptFit, PromptSize};
use crate::view::event::EventKind;

/// Estimates for the next process of a model that has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextProcess {
    /// Moment at which the start began, if it has begun.
    pub since: Option<Instant>,
    /// Duration of the last start in this run.
    pub took: Option<Duration>,
    /// Duration of the fastest start with this command.
    pub fastest: Option<Duration>,
    /// True if the model waits for memory.
    pub waits_for_room: bool,
}

impl NextProcess {
    /// Time left if the start takes as long as the last one.
    pub fn time_left(&self, now: Instant) -> Option<Duration> {
        self.took.map(|took| self.remaining(took, now))
    }

    /// Time left if the start takes as long as the fastest one.
    pub(super) fn least_time_left(&self, now: Instant) -> Duration {
        self.fastest.map_or(Duration::ZERO, |took| self.remaining(took, now))
    }

    fn remaining(&self, took: Duration, now: Instant) -> Duration {
        took.saturating_sub(self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)))
    }
}

#[derive(Debug)]
pub(crate) struct QueueLimits {
    pub(super) depth: usize,
    pub(super) wait: Duration,
    pub(super) is_full_logged: bool,
    /// Total duration of the earlier pauses.
    paused_before: Duration,
    paused_since: Option<Instant>,
}

impl QueueLimits {
    pub(super) fn new(depth: usize, wait: Duration) -> Self {
        Self { depth, wait, is_full_logged: false, paused_before: Duration::ZERO, paused_since: None }
    }

    fn paused(&self) -> Duration {
        self.paused_before + self.paused_since.map(|since| since.elapsed()).unwrap_or_default()
    }

    pub(crate) fn set_paused(&mut self, is_paused: bool) {
        if is_paused != self.paused_since.is_some() {
            self.paused_before = self.paused();
            self.paused_since = is_paused.then(Instant::now);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct ExpectedProcess {
    /// Estimates, valid while no process serves.
    pub(crate) next: NextProcess,
    /// End of the time in which a refused client is expected to retry.
    pub(crate) retry: Option<Instant>,
}

impl ExpectedProcess {
    /// Refuses a request that even the fastest start would serve too late. The client learns when to retry,
    /// and the model is loaded for the retry.
    fn refuse_if_slow(&mut self, wait: Duration, now: Instant) -> Option<LeaseDenied> {
        let least = self.next.least_time_left(now);
        if least <= wait {
            return None;
        }
        let left = self.next.time_left(now).unwrap_or(least).max(least);
        self.retry = Some(clock::after(now, left.saturating_add(wait)));
        Some(LeaseDenied::TooSlow { left, wait })
    }

    /// True if a refused client's retry is still expected.
    pub(super) fn expects_retry(&self) -> bool {
        self.retry.is_some_and(|until| until > Instant::now())
    }
}

/// Facts about a request's prompt that decide where and when it may run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptFacts {
    /// Number of tokens, if known. Admission depends on it.
    pub tokens: Option<u64>,
    /// Conversation key: hash of the client's identifier or of the conversation's beginning, if computed.
    pub conversation: Option<u64>,
}

enum QueueAnswer {
    Granted(GrantedSlot),
    /// `paused`: total pause of the time limits when the request arrived.
    Queued {
        ticket: QueueTicket,
        answer: oneshot::Receiver<Result<Lease, LeaseDenied>>,
        wait: Duration,
        paused: Duration,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaseTurn {
    First,
    /// The first lease's generation has died.
    Repeated,
}

const PAUSED_POLL_INTERVAL: Duration = Duration::from_millis(100);

enum PlaceState {
    InQueue,
    /// The request waited for memory.
    WithoutRoom(NoRoom),
    /// The request was answered, or its answer is on the way.
    Gone,
}

/// Place of a request in the queue. Dropping it removes the request.
struct QueuePlace<'a> {
    leases: &'a Arc<LeaseQueue>,
    ticket: QueueTicket,
}

impl QueuePlace<'_> {
    fn leave(&self) -> PlaceState {
        self.leases.update(|state, outbox| {
            state.waiters.remove(&self.ticket);
            if state.dispatch.cancel(self.ticket) {
                return PlaceState::InQueue;
            }
            let Some(short) = state.admit.remove_waiting(self.ticket) else { return PlaceState::Gone };
            // The slots held for this request are free now.
            state.settle(Vec::new(), outbox);
            PlaceState::WithoutRoom(short)
        })
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl LeaseQueue {
    pub(crate) async fn lease(
        self: &Arc<Self>,
        kind: LeaseKind,
        prompt: PromptFacts,
    ) -> Result<Lease, LeaseDenied> {
        self.wait_for_lease(kind, prompt, LeaseTurn::First).await
    }

    /// Waits for another lease after the death of the first one's generation, even in a full queue.
    pub(crate) async fn lease_again(
        self: &Arc<Self>,
        kind: LeaseKind,
        prompt: PromptFacts,
    ) -> Result<Lease, LeaseDenied> {
        self.wait_for_lease(kind, prompt, LeaseTurn::Repeated).await
    }

    /// Returns a lease without waiting. A failed attempt does not count as a request.
    pub(crate) fn lease_now(self: &Arc<Self>, kind: LeaseKind, tokens: Option<u64>) -> Option<Lease> {
        let granted = self.update(|state, outbox| state.grant_now(kind, tokens, outbox))?;
        Some(self.make_lease(granted))
    }

    /// Takes a slot for a request of another instance, even if none is free.
    pub(crate) fn take_for_another(self: &Arc<Self>, generation: GenerationId) -> Option<Lease> {
        let granted = self.with_state(|state| {
            let kind = state.dispatch.count_in(generation)?;
            state.occupy_slot(generation, kind, Duration::ZERO)
        })?;
        Some(self.make_lease(granted))
    }

    async fn wait_for_lease(
        self: &Arc<Self>,
        kind: LeaseKind,
        prompt: PromptFacts,
        turn: LeaseTurn,
    ) -> Result<Lease, LeaseDenied> {
        let asked = Instant::now();
        let requested = self.update(|state, outbox| state.request(kind, prompt, turn, asked, outbox));
        let (ticket, mut answer, wait, paused) = match requested? {
            QueueAnswer::Granted(granted) => return Ok(self.make_lease(granted)),
            QueueAnswer::Queued { ticket, answer, wait, paused } => (ticket, answer, wait, paused),
        };
        if let Ok(answer) = answer.try_recv() {
            return answer;
        }
        let place = QueuePlace { leases: self, ticket };
        let mut until = clock::after(asked, wait);
        loop {
            if let Ok(answer) = tokio::time::timeout_at(until, &mut answer).await {
                return answer.unwrap_or(Err(LeaseDenied::ShuttingDown));
            }
            let now = Instant::now();
            let paused = self.with_state(|state| state.limits.paused()).saturating_sub(paused);
            let end = clock::after(asked, wait.saturating_add(paused));
            if end <= now {
                break;
            }
            until = end.max(clock::after(now, PAUSED_POLL_INTERVAL));
        }
        match place.leave() {
            PlaceState::InQueue => Err(LeaseDenied::Deadline { waited: asked.elapsed() }),
            PlaceState::WithoutRoom(short) => Err(short.into()),
            // The lease was granted just now.
            PlaceState::Gone => answer.await.unwrap_or(Err(LeaseDenied::ShuttingDown)),
        }
    }

    /// Costs one atomic load if admission is off.
    pub(crate) fn weigh_prompt(&self, size: PromptSize) -> PromptFit {
        if !self.checks_prompts.load(Ordering::Relaxed) {
            return PromptFit::NotChecked;
        }
        self.with_state(|state| state.admit.weigh_prompt(&state.dispatch, size))
    }
}

impl QueueState {
    fn grant_now(
        &mut self,
        kind: LeaseKind,
        tokens: Option<u64>,
        outbox: &mut QueueOutbox,
    ) -> Option<GrantedSlot> {
        if self.refusal.is_some() || !self.dispatch.any_open() {
            return None;
        }
        let generation = match self.dispatch.request(kind) {
            LeaseAnswer::Granted(generation) => generation,
            LeaseAnswer::Queued(ticket) => {
                self.dispatch.cancel(ticket);
                return None;
            }
            LeaseAnswer::Full { .. } => return None,
        };
        let fits = tokens.is_none_or(|tokens| {
            let judged = self.admit.judge_prompt(&self.dispatch, generation, tokens, true);
            judged.action().is_none() || !self.admit.holds_prompts()
        });
        if !fits {
            let grants = self.dispatch.release(generation, kind);
            self.settle(grants, outbox);
            return None;
        }
        self.asked += u64::from(kind == LeaseKind::Slot);
        self.occupy_slot(generation, kind, Duration::ZERO)
    }

    fn request(
        &mut self,
        kind: LeaseKind,
        prompt: PromptFacts,
        turn: LeaseTurn,
        now: Instant,
        outbox: &mut QueueOutbox,
    ) -> Result<QueueAnswer, LeaseDenied> {
        let open = self.dispatch.any_open();
        if let Some(refusal) = self.refusal.as_ref().filter(|refusal| refusal.is_final() || !open) {
            return Err(refusal.denied());
        }
        self.asked += u64::from(kind == LeaseKind::Slot);
        if !open
            && turn == LeaseTurn::First
            && let Some(denied) = self.coming.refuse_if_slow(self.limits.wait, now)
        {
            outbox.wake = true;
            return Err(denied);
        }
        let depth = self.limits.depth;
        let preference = prompt.conversation.map(|key| self.lease_preference(key)).unwrap_or_default();
        let answer = match turn {
            LeaseTurn::First => self.dispatch.request_with_preference(kind, &preference),
            LeaseTurn::Repeated => self.dispatch.request_again(kind, &preference),
        };
        let answer = match answer {
            // Requests that wait for memory count too.
            LeaseAnswer::Queued(ticket) if turn == LeaseTurn::First && self.waiting() > depth => {
                self.dispatch.cancel(ticket);
                LeaseAnswer::Full { waiting: self.waiting() }
            }
            answer => answer,
        };
        let (wait, paused) = (self.limits.wait, self.limits.paused());
        match answer {
            LeaseAnswer::Granted(generation) => {
                if prompt.tokens.is_none() || !self.admit.checks_prompts() {
                    self.record_replica(generation, prompt);
                    let granted = self.occupy_slot(generation, kind, Duration::ZERO);
                    // Unreachable: the table contains each open generation.
                    return granted.map(QueueAnswer::Granted).ok_or(LeaseDenied::ShuttingDown);
                }
                // The request waits if its prompt does not fit into memory.
                let ticket = self.dispatch.issue_ticket();
                let answer = self.add_waiter(ticket, now, prompt);
                self.settle(vec![LeaseGrant { ticket, generation, kind }], outbox);
                Ok(QueueAnswer::Queued { ticket, answer, wait, paused })
            }
            LeaseAnswer::Queued(ticket) => {
                outbox.wake = !open;
                self.queued += 1;
                let answer = self.add_waiter(ticket, now, prompt);
                Ok(QueueAnswer::Queued { ticket, answer, wait, paused })
            }
            LeaseAnswer::Full { waiting } => {
                if !std::mem::replace(&mut self.limits.is_full_logged, true) {
                    outbox.events.push((None, EventKind::QueueFull { waiting }));
                }
                Err(LeaseDenied::QueueFull { waiting, depth })
            }
        }
    }
}
