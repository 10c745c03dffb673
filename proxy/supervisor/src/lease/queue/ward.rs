//! Requests that may have killed their server: who is suspected, who is tried alone, who is refused. What follows from
//! what is decided in [`warden_policies::quarantine`]; here it meets leases and processes, under their lock.
//!
//! ```text
//!   a connection broke (gateway) --> broke --+
//!                                            +--> died (its process ended) --> suspects, or the one on trial is refused
//!   its client left ----------> left --------+
//!   alone (gateway waits) --> trial ---------+--> lives (a probe was answered) --> nobody
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{Death, Fingerprint, QuarantinePolicy, Standing};

use super::{Leases, Outbox, State};
use crate::clock;
use crate::lease::cell::Cell;
use crate::sync::lock;
use crate::view::QuarantineView;
use crate::view::event::EventKind;

/// What became of a wish to be alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// Nobody else runs anything in a slot of the generation, until it is told otherwise.
    Granted,
    /// Others were still running when the time was over: the request may be sent beside them.
    InCompany,
    /// The generation is told to end, or has ended. Nothing was sent.
    Gone,
    /// Meanwhile the request is refused, for this long.
    Refused(Duration),
}

enum Tried {
    /// Until something moves, or for so long.
    Wait(Option<Duration>),
    Is(Alone),
}

/// How a process ended, as far as requests are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By itself, or hung so long that it had to be ended.
    OfItself,
    /// The kernel ended it because memory was short.
    OutOfMemory,
    /// We, or somebody else, stopped it.
    Stopped,
}

impl Leases {
    fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Notes whether anything is known against any request, and wakes those who wait for what becomes of something.
    fn settled(&self, state: &State) {
        self.knows.store(!state.quarantine.is_empty(), Ordering::Relaxed);
        self.moved.notify_waiters();
    }

    pub(crate) fn set_quarantine(&self, policy: QuarantinePolicy) {
        let mut state = lock(&self.state);
        state.quarantine.set(policy);
        self.settled(&state);
    }

    /// What is to be done with a request. Costs one load where nothing is known against any.
    pub(crate) fn standing(&self, request: Fingerprint) -> Standing {
        if !self.knows.load(Ordering::Relaxed) {
            return Standing::Clear;
        }
        let mut state = lock(&self.state);
        let standing = state.quarantine.standing(request, self.now());
        self.knows.store(!state.quarantine.is_empty(), Ordering::Relaxed);
        standing
    }

    /// A request was refused because of what is known against it.
    pub(crate) fn note_refusal(&self, request: Fingerprint) {
        lock(&self.state).quarantine.note_refusal(request);
    }

    /// The connection of a request that was sent whole broke before its answer was.
    pub(crate) fn broke(&self, generation: GenerationId, request: Fingerprint) {
        let mut state = lock(&self.state);
        let suspect = state.quarantine.broke(generation, request, self.now());
        if state.generations.contains_key(&generation) {
            // In the same step: no probe that was answered before this is taken for a sign of life after it.
            state.close(generation);
            state.doubted.push(generation);
        }
        self.settled(&state);
        drop(state);
        self.wake.notify_one();
        if suspect {
            self.tell_suspects(generation, vec![request]);
        }
    }

    /// The same, where not the connection told it but the end of the generation: that may have been ours, or asked for.
    pub(crate) fn lost(&self, generation: GenerationId, request: Fingerprint) {
        let has_ended = lock(&self.state).quarantine.has_ended(generation);
        if has_ended {
            self.broke(generation, request);
        }
    }

    /// The client of a request that was sent whole has left before the answer was whole.
    pub(crate) fn left(&self, generation: GenerationId, request: Fingerprint) {
        let mut state = lock(&self.state);
        let suspect = state.quarantine.left(generation, request, self.now());
        if suspect {
            self.settled(&state);
            drop(state);
            self.tell_suspects(generation, vec![request]);
        }
    }

    /// A lease only reads, or one that did has ended.
    pub(crate) fn reads(&self, generation: GenerationId, begins: bool) {
        lock(&self.state).dispatch.reads(generation, begins);
    }

    fn tell_suspects(&self, generation: GenerationId, fingerprints: Vec<Fingerprint>) {
        self.journal.tell(Some(&self.name), Some(generation), EventKind::RequestsSuspected { fingerprints });
    }

    /// The generation answered a probe.
    pub(crate) fn lives(&self, generation: GenerationId) {
        if !self.knows.load(Ordering::Relaxed) {
            return;
        }
        let mut state = lock(&self.state);
        if state.doubted.contains(&generation) {
            // The probe may have been answered before that.
            return;
        }
        state.quarantine.lives(generation);
        self.settled(&state);
    }

    /// The generation's process has ended.
    pub(crate) fn ended(&self, cell: &Cell, ending: Ending) {
        let mut state = lock(&self.state);
        if !state.generations.contains_key(&cell.id) {
            return;
        }
        // Nobody is let in any more, so nobody comes to be in flight after this count.
        state.close(cell.id);
        let state = &mut *state;
        if ending == Ending::Stopped {
            state.quarantine.stopped(cell.id);
            return self.settled(state);
        }
        let death = Death {
            others: state.dispatch.company(cell.id),
            hung: cell.hung().unwrap_or_default(),
            proves: ending == Ending::OfItself,
        };
        let found = state.quarantine.died(cell.id, death, self.now());
        let refuse_for = state.quarantine.policy().refuse_for;
        self.settled(state);
        if !found.suspects.is_empty() {
            self.tell_suspects(cell.id, found.suspects);
        }
        if let Some(fingerprint) = found.refused {
            let seconds = refuse_for.as_secs();
            let kind = EventKind::RequestQuarantined { fingerprint, seconds };
            self.journal.tell(Some(&self.name), Some(cell.id), kind);
        }
    }

    /// Whether the generation died of a request that is refused from now on.
    pub(crate) fn was_felled(&self, generation: GenerationId) -> bool {
        lock(&self.state).quarantine.was_felled(generation)
    }

    /// Resolves when it is known what became of a generation whose connection broke.
    pub(crate) async fn until_settled(&self, generation: GenerationId) {
        loop {
            let mut moved = std::pin::pin!(self.moved.notified());
            moved.as_mut().enable();
            if lock(&self.state).quarantine.is_settled(generation) {
                return;
            }
            moved.await;
        }
    }

    /// The holder of a lease wants to be alone from now on.
    pub(crate) fn seek(&self, generation: GenerationId, kind: LeaseKind) {
        lock(&self.state).dispatch.seek(generation, kind);
    }

    /// It does not want that any more.
    pub(crate) fn unseek(self: &Arc<Self>, generation: GenerationId, kind: LeaseKind) {
        let mut state = lock(&self.state);
        let grants = state.dispatch.unseek(generation, kind);
        let mut outbox = Outbox::default();
        self.settle(&mut state, grants, &mut outbox);
        drop(state);
        self.moved.notify_waiters();
        self.deliver(outbox);
    }

    /// Others may join the one that is alone, or it ends.
    pub(crate) fn join(self: &Arc<Self>, generation: GenerationId) {
        let mut state = lock(&self.state);
        state.quarantine.end_trial(generation);
        let grants = state.dispatch.join(generation);
        let mut outbox = Outbox::default();
        self.settle(&mut state, grants, &mut outbox);
        drop(state);
        self.moved.notify_waiters();
        self.deliver(outbox);
    }

    /// A request against which something was known was answered.
    pub(crate) fn survived(&self, generation: GenerationId, request: Fingerprint) {
        let mut state = lock(&self.state);
        state.quarantine.survived(generation, request);
        self.settled(&state);
    }

    /// Waits until a lease that seeks is alone.
    pub(crate) async fn until_alone(
        &self,
        generation: GenerationId,
        kind: LeaseKind,
        request: Fingerprint,
        since: Instant,
    ) -> Alone {
        loop {
            let mut moved = std::pin::pin!(self.moved.notified());
            moved.as_mut().enable();
            let (tried, wait) = {
                let mut state = lock(&self.state);
                let wait = state.quarantine.patience(request);
                (self.try_alone(&mut state, generation, kind, request), wait)
            };
            let look = match tried {
                Tried::Is(alone) => return alone,
                Tried::Wait(look) => look,
            };
            let end = clock::after(since, wait);
            let until = look.map_or(end, |look| clock::after(Instant::now(), look).min(end));
            if tokio::time::timeout_at(until, moved).await.is_err() && Instant::now() >= end {
                return Alone::InCompany;
            }
        }
    }

    fn try_alone(
        &self,
        state: &mut State,
        generation: GenerationId,
        kind: LeaseKind,
        request: Fingerprint,
    ) -> Tried {
        if state.quarantine.has_ended(generation) || !state.generations.contains_key(&generation) {
            return Tried::Is(Alone::Gone);
        }
        // A generation whose connections break is likely to be dead: who is sent there is blamed for another's deed.
        if !state.quarantine.is_settled(generation) {
            return Tried::Wait(None);
        }
        // Nor is anybody to be blamed for what one does whose client left a moment ago.
        let lingers = state.quarantine.lingers(generation, request, self.now());
        match state.quarantine.standing(request, self.now()) {
            Standing::Refused { left } => Tried::Is(Alone::Refused(left)),
            // Released meanwhile: it may run like everybody else.
            Standing::Clear => Tried::Is(Alone::InCompany),
            Standing::Suspect if lingers.is_some() => Tried::Wait(lingers),
            Standing::Suspect if state.dispatch.try_alone(generation, kind) => {
                state.quarantine.begin_trial(generation, request);
                Tried::Is(Alone::Granted)
            }
            Standing::Suspect => Tried::Wait(None),
        }
    }

    /// For how long it may be alone.
    pub(crate) fn alone_for(&self, request: Fingerprint) -> Duration {
        lock(&self.state).quarantine.solitude(request)
    }

    /// What is known, for people.
    pub(crate) fn quarantine(&self) -> QuarantineView {
        let state = lock(&self.state);
        let (quarantined, refusals) = state.quarantine.counts();
        QuarantineView { requests: state.quarantine.list(self.now()), quarantined, refusals }
    }

    /// Forgets requests, all or those whose fingerprint begins so; returns how many.
    pub(crate) fn release_requests(&self, which: Option<&str>) -> usize {
        let mut state = lock(&self.state);
        let released = state.quarantine.release(which);
        self.settled(&state);
        drop(state);
        if released > 0 {
            self.journal.tell(Some(&self.name), None, EventKind::RequestsReleased { count: released });
        }
        released
    }
}
