//! Queue functions for requests: asking for a lease, waiting, leaving. A request that would wait too long for
//! the next process is refused.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::dispatch::{LeaseAnswer, LeaseGrant, LeaseKind, QueueTicket};
use warden_policies::{GenerationId, WorkDone};

use super::{LeaseQueue, QueueLimits, QueueState, QueueWaiter};
use crate::clock;
use crate::error::{LeaseDenied, NoRoom};
use crate::lease::Lease;
use crate::lease::admit::{PromptFit, PromptSize};
use crate::sync::lock;
use crate::view::event::EventKind;

/// Estimates for the next process of a model that has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextProcess {
    /// Begin of the start, if it has begun.
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
    fn least_time_left(&self, now: Instant) -> Duration {
        self.fastest.map_or(Duration::ZERO, |took| self.remaining(took, now))
    }

    fn remaining(&self, took: Duration, now: Instant) -> Duration {
        took.saturating_sub(self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since)))
    }
}

enum QueueAnswer {
    Granted(Lease),
    Queued { ticket: QueueTicket, answer: oneshot::Receiver<Result<Lease, LeaseDenied>>, limit: WaitLimit },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LeaseTurn {
    First,
    /// The first lease's generation has died.
    Repeated,
}

#[derive(Clone, Copy)]
struct WaitLimit {
    since: Instant,
    wait: Duration,
    /// Total pause of the time limits when the request came.
    paused: Duration,
}

impl QueueLimits {
    fn for_request(&self, now: Instant) -> WaitLimit {
        WaitLimit { since: now, wait: self.wait, paused: self.paused() }
    }
}

impl WaitLimit {
    /// Returns `None` if the limit is over. `stood`: total pause of the time limits now.
    fn ends_at(self, stood: Duration, now: Instant) -> Option<Instant> {
        let end = clock::after(self.since, self.wait.saturating_add(stood.saturating_sub(self.paused)));
        (end > now).then_some(end)
    }
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
        let mut state = lock(&self.leases.state);
        let channel = state.waiters.remove(&self.ticket);
        if state.dispatch.cancel(self.ticket) {
            drop(state);
            drop(channel);
            return PlaceState::InQueue;
        }
        let Some(short) = state.admit.remove_waiting(self.ticket) else { return PlaceState::Gone };
        // The slots held for this request are free now.
        self.leases.settle_and_deliver(state, Vec::new());
        PlaceState::WithoutRoom(short)
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
        tokens: Option<u64>,
    ) -> Result<Lease, LeaseDenied> {
        self.wait_for_lease(kind, tokens, LeaseTurn::First).await
    }

    /// Waits for another lease after the death of the first one's generation, even in a full queue.
    pub(crate) async fn lease_again(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, LeaseDenied> {
        self.wait_for_lease(kind, tokens, LeaseTurn::Repeated).await
    }

    /// Returns a lease without waiting. A failed attempt does not count as a request.
    pub(crate) fn lease_now(self: &Arc<Self>, kind: LeaseKind, tokens: Option<u64>) -> Option<Lease> {
        let mut state = lock(&self.state);
        if state.refusal.is_some() || !state.dispatch.any_open() {
            return None;
        }
        let generation = match state.dispatch.request(kind) {
            LeaseAnswer::Granted(generation) => generation,
            LeaseAnswer::Queued(ticket) => {
                state.dispatch.cancel(ticket);
                return None;
            }
            LeaseAnswer::Full { .. } => return None,
        };
        let tokens = self.checked_tokens(tokens);
        let fits = tokens.is_none_or(|tokens| {
            let judged = state.admit.judge_prompt(&state.dispatch, generation, tokens, true);
            judged.action().is_none() || !state.admit.holds_prompts()
        });
        if !fits {
            let grants = state.dispatch.release(generation, kind);
            self.settle_and_deliver(state, grants);
            return None;
        }
        if kind == LeaseKind::Slot {
            state.asked += 1;
        }
        let cell = state.occupy_slot(generation, kind)?;
        drop(state);
        Some(self.make_lease(cell, kind, Duration::ZERO))
    }

    /// Takes a slot for a request of another instance, even if none is free.
    pub(crate) fn take_for_another(self: &Arc<Self>, generation: GenerationId) -> Option<Lease> {
        let mut state = lock(&self.state);
        let kind = state.dispatch.count_in(generation)?;
        let cell = state.occupy_slot(generation, kind)?;
        drop(state);
        Some(self.make_lease(cell, kind, Duration::ZERO))
    }

    pub(crate) fn add_work(&self, generation: GenerationId, work: WorkDone) {
        if let Some(entry) = lock(&self.state).table.entries.get(&generation) {
            entry.cell.add_work(work);
        }
    }

    async fn wait_for_lease(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
        turn: LeaseTurn,
    ) -> Result<Lease, LeaseDenied> {
        let asked = Instant::now();
        let (ticket, mut answer, limit) = match self.request_lease(kind, tokens, turn, asked)? {
            QueueAnswer::Granted(lease) => return Ok(lease),
            QueueAnswer::Queued { ticket, answer, limit } => (ticket, answer, limit),
        };
        let place = QueuePlace { leases: self, ticket };
        let mut until = clock::after(asked, limit.wait);
        loop {
            if let Ok(answer) = tokio::time::timeout_at(until, &mut answer).await {
                return answer.unwrap_or(Err(LeaseDenied::ShuttingDown));
            }
            let now = Instant::now();
            let stood = lock(&self.state).limits.paused();
            match limit.ends_at(stood, now) {
                Some(end) => until = end.max(clock::after(now, PAUSED_POLL_INTERVAL)),
                None => break,
            }
        }
        match place.leave() {
            PlaceState::InQueue => Err(LeaseDenied::Deadline { waited: asked.elapsed() }),
            PlaceState::WithoutRoom(short) => Err(short.into()),
            // The lease was granted just now.
            PlaceState::Gone => answer.await.unwrap_or(Err(LeaseDenied::ShuttingDown)),
        }
    }

    fn request_lease(
        self: &Arc<Self>,
        kind: LeaseKind,
        tokens: Option<u64>,
        turn: LeaseTurn,
        now: Instant,
    ) -> Result<QueueAnswer, LeaseDenied> {
        let mut state = lock(&self.state);
        let open = state.dispatch.any_open();
        if let Some(refusal) = state.refusal.as_ref().filter(|refusal| refusal.is_final() || !open) {
            return Err(refusal.denied());
        }
        if kind == LeaseKind::Slot {
            state.asked += 1;
        }
        if !open
            && turn == LeaseTurn::First
            && let Some(denied) = state.refuse_if_slow(now)
        {
            drop(state);
            self.wake.notify_one();
            return Err(denied);
        }
        let answer = match turn {
            LeaseTurn::First => state.dispatch.request(kind),
            LeaseTurn::Repeated => state.dispatch.request_again(kind),
        };
        let answer = match answer {
            // Requests that wait for memory count too.
            LeaseAnswer::Queued(ticket)
                if turn == LeaseTurn::First && state.waiting() > state.limits.depth =>
            {
                state.dispatch.cancel(ticket);
                LeaseAnswer::Full { waiting: state.waiting() }
            }
            answer => answer,
        };
        match answer {
            LeaseAnswer::Granted(generation) => {
                if let Some(tokens) = self.checked_tokens(tokens) {
                    return self.admit_granted(state, generation, kind, tokens, now);
                }
                let cell = state.occupy_slot(generation, kind);
                drop(state);
                match cell {
                    Some(cell) => Ok(QueueAnswer::Granted(self.make_lease(cell, kind, Duration::ZERO))),
                    // Unreachable: the table contains each open generation.
                    None => Err(LeaseDenied::ShuttingDown),
                }
            }
            LeaseAnswer::Queued(ticket) => {
                let (sender, answer) = oneshot::channel();
                state.waiters.insert(ticket, QueueWaiter { answer: sender, since: now, tokens });
                state.queued += 1;
                let limit = state.limits.for_request(now);
                drop(state);
                if !open {
                    self.wake.notify_one();
                }
                Ok(QueueAnswer::Queued { ticket, answer, limit })
            }
            LeaseAnswer::Full { waiting } => {
                let depth = state.limits.depth;
                let first = !std::mem::replace(&mut state.limits.is_full_logged, true);
                drop(state);
                if first {
                    self.journal.record(Some(&self.name), None, EventKind::QueueFull { waiting });
                }
                Err(LeaseDenied::QueueFull { waiting, depth })
            }
        }
    }

    /// Lets a request with a lease wait if its prompt does not fit into memory.
    fn admit_granted(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, QueueState>,
        generation: GenerationId,
        kind: LeaseKind,
        tokens: u64,
        now: Instant,
    ) -> Result<QueueAnswer, LeaseDenied> {
        let (sender, mut answer) = oneshot::channel();
        let ticket = state.dispatch.issue_ticket();
        state.waiters.insert(ticket, QueueWaiter { answer: sender, since: now, tokens: Some(tokens) });
        let limit = state.limits.for_request(now);
        self.settle_and_deliver(state, vec![LeaseGrant { ticket, generation, kind }]);
        match answer.try_recv() {
            Ok(Ok(lease)) => Ok(QueueAnswer::Granted(lease)),
            Ok(Err(denied)) => Err(denied),
            Err(_) => Ok(QueueAnswer::Queued { ticket, answer, limit }),
        }
    }

    /// Costs one atomic load if admission is off.
    pub(crate) fn weigh_prompt(&self, size: PromptSize) -> PromptFit {
        if !self.checks_prompts.load(Ordering::Relaxed) {
            return PromptFit::NotChecked;
        }
        let state = lock(&self.state);
        state.admit.weigh_prompt(&state.dispatch, size)
    }
}

impl QueueState {
    /// Refuses a request that even the fastest start would serve too late. The client learns when to retry,
    /// and the model is loaded for the retry.
    pub(super) fn refuse_if_slow(&mut self, now: Instant) -> Option<LeaseDenied> {
        let wait = self.limits.wait;
        let least = self.coming.next.least_time_left(now);
        if least <= wait {
            return None;
        }
        let left = self.coming.next.time_left(now).unwrap_or(least).max(least);
        self.coming.retry = Some(clock::after(now, left.saturating_add(wait)));
        Some(LeaseDenied::TooSlow { left, wait })
    }

    /// True if a refused client's retry is still expected.
    pub(super) fn expects(&self) -> bool {
        self.coming.retry.is_some_and(|until| until > Instant::now())
    }
}

impl LeaseQueue {
    pub(crate) fn set_next_process(&self, coming: NextProcess) {
        lock(&self.state).coming.next = coming;
    }

    /// Forgets expected retries, because an operator has drained the model.
    pub(crate) fn expect_no_retries(&self) {
        lock(&self.state).coming.retry = None;
    }

    pub(crate) fn refuses_requests(&self) -> bool {
        let state = lock(&self.state);
        let is_shut =
            state.refusal.is_some() || state.coming.next.least_time_left(Instant::now()) > state.limits.wait;
        !state.dispatch.any_open() && is_shut
    }

    /// Returns `None` while a process serves.
    pub(crate) fn next_process(self: &Arc<Self>) -> Option<NextProcess> {
        let state = lock(&self.state);
        (!state.dispatch.any_open()).then_some(state.coming.next)
    }
}
