//! Leases on the backends of one model: granting, queueing, refusing.
//!
//! ```text
//!             request                       release / open
//!   caller ------------> [ room on an open generation? ] --yes--> granted
//!                               | no
//!                               v
//!                        [ FIFO queue, bounded ] --full--> LeaseAnswer::Full
//!                               | cancel (client left, deadline)
//!                               v
//!                             gone
//! ```
//!
//! A generation (one process of the model) is *open* if it takes leases, and *closed* if it drains. An open
//! generation may be *held*: the queue gets none of its slots, because a caller whose turn has come waits
//! for memory there ([`LeaseDispatch::hold`], [`LeaseDispatch::take`]). The queue is strictly FIFO within a
//! class: a newcomer never overtakes an earlier caller. The owner keeps this value under one lock.
//!
//! The holder of a lease may seek to be *alone* on its generation ([`LeaseDispatch::seek_alone`],
//! [`LeaseDispatch::try_alone`]). From then on no other request gets a slot there, and the holder is alone
//! once the running requests have ended. Seekers run nothing, so two of them never block each other.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::names::GenerationId;

/// Purpose of a lease. Only [`LeaseKind::Slot`] counts against a generation's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseKind {
    /// The request occupies a slot while it runs: completions, embeddings, rerank, audio.
    Slot,
    /// The request needs no slot (tokenize, props, health, metrics), but delays a drain.
    Aux,
    /// The request needs no slot and only reads (`/metrics`, `/slots`), so the model's idle time continues.
    Read,
    /// The answer is an endless stream of events, which a drain does not wait for.
    /// [`LeaseDispatch::convert_to_watch`] converts a lease to this kind.
    Watch,
}

impl LeaseKind {
    /// Returns the queue class; leases of one class never overtake each other.
    fn class(self) -> usize {
        usize::from(self != Self::Slot)
    }
}

/// Identifies one waiting caller. Never reused within a [`LeaseDispatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueueTicket(u64);

/// A lease handed to a waiting caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseGrant {
    /// Ticket of the caller.
    pub ticket: QueueTicket,
    /// Generation of the lease.
    pub generation: GenerationId,
    /// Purpose of the lease.
    pub kind: LeaseKind,
}

/// Answer to a request for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// Granted on this generation.
    Granted(GenerationId),
    /// Queued; a [`LeaseGrant`] with this ticket follows if the caller does not cancel.
    Queued(QueueTicket),
    /// The queue is full.
    Full {
        /// Callers waiting now.
        waiting: usize,
    },
}

/// Largest excess of the home's load over the lowest load, in thousandths of the limit of leases. Beyond it,
/// evaluating the prompt elsewhere is assumed to be faster.
const MAX_HOME_EXCESS: u64 = 500;

/// Preferences of one request among the open generations.
#[derive(Clone, Debug, Default)]
pub struct LeasePreference {
    /// Generation of the conversation's last replica, preferred unless it is much busier than another.
    pub home: Option<GenerationId>,
    /// Number of conversations of each generation. At equal load, the one with the fewest is preferred.
    pub conversations: BTreeMap<GenerationId, usize>,
}

#[derive(Clone, Debug, Default)]
struct OpenGeneration {
    open: bool,
    held: bool,
    limit: u32,
    slots: u32,
    aux: u32,
    watch: u32,
    /// Leases that wait to be alone; `seeking_slots` of them hold a slot.
    seeking: u32,
    seeking_slots: u32,
    /// Leases without a slot that only read.
    readers: u32,
    alone: bool,
}

impl OpenGeneration {
    fn has_room(&self, kind: LeaseKind) -> bool {
        self.open && (kind != LeaseKind::Slot || (!self.held && self.has_slot()))
    }

    fn has_slot(&self) -> bool {
        !self.alone && self.seeking == 0 && self.slots < self.limit
    }

    fn count(&mut self, kind: LeaseKind) -> &mut u32 {
        match kind {
            LeaseKind::Slot => &mut self.slots,
            LeaseKind::Aux | LeaseKind::Read => &mut self.aux,
            LeaseKind::Watch => &mut self.watch,
        }
    }

    fn stop_seeking(&mut self, kind: LeaseKind) {
        self.seeking = self.seeking.saturating_sub(1);
        if kind == LeaseKind::Slot {
            self.seeking_slots = self.seeking_slots.saturating_sub(1);
        }
    }
}

/// Leases and queue of one model.
#[derive(Clone, Debug)]
pub struct LeaseDispatch {
    depth: usize,
    next_ticket: u64,
    generations: BTreeMap<GenerationId, OpenGeneration>,
    queue: VecDeque<(QueueTicket, LeaseKind)>,
}

impl LeaseDispatch {
    /// Creates an empty dispatch whose queue holds at most `depth` callers.
    pub fn new(depth: usize) -> Self {
        Self { depth, next_ticket: 0, generations: BTreeMap::new(), queue: VecDeque::new() }
    }

    /// Changes the limit of the queue. Callers who already wait stay, even beyond the limit.
    pub fn set_depth(&mut self, depth: usize) {
        self.depth = depth;
    }

    /// Requests a lease on the open generation with the lowest relative load; at a tie, on the older one.
    pub fn request(&mut self, kind: LeaseKind) -> LeaseAnswer {
        self.request_with_preference(kind, &LeasePreference::default())
    }

    /// Requests a lease, if possible on the preferred generation.
    pub fn request_with_preference(&mut self, kind: LeaseKind, preference: &LeasePreference) -> LeaseAnswer {
        match self.grant_at_once(kind, preference) {
            Some(generation) => LeaseAnswer::Granted(generation),
            None if self.queue.len() >= self.depth => LeaseAnswer::Full { waiting: self.queue.len() },
            None => self.enqueue(kind),
        }
    }

    /// Requests a lease, even in a full queue, for a caller whose previous lease became void.
    pub fn request_again(&mut self, kind: LeaseKind, preference: &LeasePreference) -> LeaseAnswer {
        self.grant_at_once(kind, preference).map_or_else(|| self.enqueue(kind), LeaseAnswer::Granted)
    }

    fn grant_at_once(&mut self, kind: LeaseKind, preference: &LeasePreference) -> Option<GenerationId> {
        let overtakes = self.queue.iter().any(|(_, waiting)| waiting.class() == kind.class());
        if overtakes { None } else { self.place_lease(kind, preference) }
    }

    fn enqueue(&mut self, kind: LeaseKind) -> LeaseAnswer {
        let ticket = self.issue_ticket();
        self.queue.push_back((ticket, kind));
        LeaseAnswer::Queued(ticket)
    }

    /// Cancels a waiting caller. Returns false if a lease was granted meanwhile: the caller must release it.
    pub fn cancel(&mut self, ticket: QueueTicket) -> bool {
        let before = self.queue.len();
        self.queue.retain(|(waiting, _)| *waiting != ticket);
        self.queue.len() < before
    }

    /// Dismisses every waiting caller because the model cannot start; returns their tickets in order.
    pub fn dismiss(&mut self) -> Vec<QueueTicket> {
        self.queue.drain(..).map(|(ticket, _)| ticket).collect()
    }

    /// Ends a lease; returns leases for waiting callers. Leases of unknown generations are already void.
    pub fn release(&mut self, generation: GenerationId, kind: LeaseKind) -> Vec<LeaseGrant> {
        if let Some(known) = self.generations.get_mut(&generation) {
            let count = known.count(kind);
            *count = count.saturating_sub(1);
        }
        self.serve_queue()
    }

    /// Opens a generation for leases, with at most `limit` of [`LeaseKind::Slot`] at a time.
    pub fn open(&mut self, generation: GenerationId, limit: u32) -> Vec<LeaseGrant> {
        let entry = self.generations.entry(generation).or_default();
        entry.open = true;
        entry.limit = limit.max(1);
        self.serve_queue()
    }

    /// Closes a generation for new leases; its present ones continue.
    pub fn close(&mut self, generation: GenerationId) {
        if let Some(known) = self.generations.get_mut(&generation) {
            known.open = false;
        }
    }

    /// Forgets a generation whose process is gone; its leases are void.
    pub fn forget(&mut self, generation: GenerationId) {
        self.generations.remove(&generation);
    }

    /// Issues a ticket outside the queue, for a caller who is next but still waits for memory.
    pub fn issue_ticket(&mut self) -> QueueTicket {
        let ticket = QueueTicket(self.next_ticket);
        self.next_ticket += 1;
        ticket
    }

    /// Holds exactly these generations and no others: only [`LeaseDispatch::take`] gives slots on them.
    pub fn hold(&mut self, held: &[GenerationId]) -> Vec<LeaseGrant> {
        for (id, generation) in &mut self.generations {
            generation.held = held.contains(id);
        }
        self.serve_queue()
    }

    /// Takes a lease on one generation, bypassing queue and hold. Returns false if that is impossible.
    pub fn take(&mut self, generation: GenerationId, kind: LeaseKind) -> bool {
        let Some(known) = self.generations.get_mut(&generation).filter(|known| known.open) else {
            return false;
        };
        if kind == LeaseKind::Slot && !known.has_slot() {
            return false;
        }
        *known.count(kind) += 1;
        true
    }

    /// Counts a request taken over from the previous llama-warden, even on a closed generation.
    pub fn count_in(&mut self, generation: GenerationId) -> Option<LeaseKind> {
        let known = self.generations.get_mut(&generation)?;
        let kind = if known.has_slot() { LeaseKind::Slot } else { LeaseKind::Aux };
        *known.count(kind) += 1;
        Some(kind)
    }

    /// Makes a lease wait to be alone on its generation. Until then its holder runs nothing, and no other
    /// request gets a slot there.
    pub fn seek_alone(&mut self, generation: GenerationId, kind: LeaseKind) {
        if let Some(known) = self.generations.get_mut(&generation) {
            known.seeking += 1;
            known.seeking_slots += u32::from(kind == LeaseKind::Slot);
        }
    }

    /// Returns true if no other request runs in a slot there. Then the holder no longer seeks, and is alone
    /// until it calls [`LeaseDispatch::end_alone`].
    pub fn try_alone(&mut self, generation: GenerationId, kind: LeaseKind) -> bool {
        let Some(known) = self.generations.get_mut(&generation) else { return false };
        if known.alone || known.slots > known.seeking_slots {
            return false;
        }
        known.alone = true;
        known.stop_seeking(kind);
        true
    }

    /// Stops waiting to be alone.
    pub fn stop_seeking(&mut self, generation: GenerationId, kind: LeaseKind) -> Vec<LeaseGrant> {
        if let Some(known) = self.generations.get_mut(&generation) {
            known.stop_seeking(kind);
        }
        self.serve_queue()
    }

    /// Ends the exclusive use of a generation: its holder has finished, or accepts other requests.
    pub fn end_alone(&mut self, generation: GenerationId) -> Vec<LeaseGrant> {
        if let Some(known) = self.generations.get_mut(&generation) {
            known.alone = false;
        }
        self.serve_queue()
    }

    /// Returns true if a lease there waits to be alone.
    pub fn has_seekers(&self, generation: GenerationId) -> bool {
        self.generations.get(&generation).is_some_and(|known| known.seeking > 0)
    }

    /// Counts a lease that only reads (a `GET`) and is left out of `other_leases`. `begins`: true at the
    /// start of the lease, false at its end.
    pub fn count_reader(&mut self, generation: GenerationId, begins: bool) {
        if let Some(known) = self.generations.get_mut(&generation) {
            known.readers = if begins { known.readers + 1 } else { known.readers.saturating_sub(1) };
        }
    }

    /// Returns the leases that may run work next to the exclusive one, without seekers and readers.
    pub fn other_leases(&self, generation: GenerationId) -> u32 {
        let idle = |known: &OpenGeneration| known.seeking + known.readers + u32::from(known.alone);
        self.generations
            .get(&generation)
            .map_or(0, |known| (known.slots + known.aux).saturating_sub(idle(known)))
    }

    /// Converts an auxiliary lease whose answer is an endless event stream to [`LeaseKind::Watch`].
    pub fn convert_to_watch(&mut self, generation: GenerationId) {
        if let Some(known) = self.generations.get_mut(&generation) {
            known.aux = known.aux.saturating_sub(1);
            known.watch += 1;
        }
    }

    /// Returns the open generations, least loaded first; at a tie, the older one first.
    pub fn open_generations(&self) -> Vec<GenerationId> {
        let mut open: Vec<_> = self.generations.iter().filter(|(_, known)| known.open).collect();
        open.sort_by_key(|(_, known)| relative_load(known));
        open.into_iter().map(|(id, _)| *id).collect()
    }

    /// Returns the number of leases on a generation, watchers excluded.
    pub fn in_flight(&self, generation: GenerationId) -> u32 {
        self.generations.get(&generation).map_or(0, |known| known.slots + known.aux)
    }

    /// Returns the number of leases on all generations, watchers excluded.
    pub fn in_flight_total(&self) -> u32 {
        self.generations.values().map(|known| known.slots + known.aux).sum()
    }

    /// Returns the number of waiting callers.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns the limit of slot leases on a generation.
    pub fn limit(&self, generation: GenerationId) -> Option<u32> {
        self.generations.get(&generation).map(|known| known.limit)
    }

    /// Returns true if this generation takes leases.
    pub fn is_open(&self, generation: GenerationId) -> bool {
        self.generations.get(&generation).is_some_and(|known| known.open)
    }

    /// Returns true if any generation takes leases.
    pub fn any_open(&self) -> bool {
        self.generations.values().any(|known| known.open)
    }

    fn place_lease(&mut self, kind: LeaseKind, preference: &LeasePreference) -> Option<GenerationId> {
        let with_room = || self.generations.iter().filter(|(_, known)| known.has_room(kind));
        let rank = |id: &GenerationId, known: &OpenGeneration| {
            (relative_load(known), preference.conversations.get(id).copied().unwrap_or(0))
        };
        let (least, first) = with_room().map(|(id, known)| (rank(id, known), *id)).min()?;
        let home = preference.home.filter(|home| {
            let is_near = |known: &OpenGeneration| relative_load(known) <= least.0 + MAX_HOME_EXCESS;
            with_room().any(|(id, known)| id == home && is_near(known))
        });
        let id = home.unwrap_or(first);
        *self.generations.get_mut(&id)?.count(kind) += 1;
        Some(id)
    }

    fn serve_queue(&mut self) -> Vec<LeaseGrant> {
        // A waiting caller takes the slot that has become free.
        let preference = LeasePreference::default();
        let mut grants = Vec::new();
        let mut blocked = [false; 2];
        let mut index = 0;
        while index < self.queue.len() && !(blocked[0] && blocked[1]) {
            let (ticket, kind) = self.queue[index];
            let class = kind.class();
            if let Some(generation) = (!blocked[class]).then(|| self.place_lease(kind, &preference)).flatten()
            {
                self.queue.remove(index);
                grants.push(LeaseGrant { ticket, generation, kind });
            } else {
                blocked[class] = true;
                index += 1;
            }
        }
        grants
    }
}

/// Returns the load of a generation, comparable across limits: leases per thousand of the limit.
fn relative_load(generation: &OpenGeneration) -> u64 {
    (u64::from(generation.slots) + u64::from(generation.aux)) * 1000 / u64::from(generation.limit.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const A: GenerationId = GenerationId(1);
    const B: GenerationId = GenerationId(2);

    #[test]
    fn callers_wait_in_order_until_a_generation_opens() {
        let mut dispatch = LeaseDispatch::new(2);
        let LeaseAnswer::Queued(first) = dispatch.request(LeaseKind::Slot) else { panic!("queued") };
        let LeaseAnswer::Queued(second) = dispatch.request(LeaseKind::Slot) else { panic!("queued") };
        assert_eq!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Full { waiting: 2 });
        let grants = dispatch.open(A, 1);
        assert_eq!(grants, [LeaseGrant { ticket: first, generation: A, kind: LeaseKind::Slot }]);
        let grants = dispatch.release(A, LeaseKind::Slot);
        assert_eq!(grants, [LeaseGrant { ticket: second, generation: A, kind: LeaseKind::Slot }]);
    }

    #[test]
    fn what_runs_in_another_instance_counts_even_where_nobody_is_let_in_any_more() {
        let mut dispatch = LeaseDispatch::new(2);
        assert_eq!(dispatch.count_in(A), None, "not known");
        dispatch.open(A, 1);
        dispatch.close(A);
        assert!(!dispatch.take(A, LeaseKind::Slot), "closed");
        assert_eq!(dispatch.count_in(A), Some(LeaseKind::Slot));
        assert_eq!(dispatch.count_in(A), Some(LeaseKind::Aux), "one too many");
        assert_eq!(dispatch.in_flight(A), 2);
        for kind in [LeaseKind::Slot, LeaseKind::Aux] {
            assert_eq!(dispatch.release(A, kind), []);
        }
        assert_eq!(dispatch.in_flight(A), 0);
    }

    #[test]
    fn who_seeks_to_be_alone_keeps_newcomers_out_and_is_alone_when_those_before_it_have_ended() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 4);
        for _ in 0..3 {
            assert_eq!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Granted(A));
        }
        // Two of the three wait to be alone: they run nothing, so they do not wait for each other.
        dispatch.seek_alone(A, LeaseKind::Slot);
        dispatch.seek_alone(A, LeaseKind::Slot);
        let LeaseAnswer::Queued(newcomer) = dispatch.request(LeaseKind::Slot) else { panic!("queued") };
        assert_eq!(dispatch.request(LeaseKind::Aux), LeaseAnswer::Granted(A), "needs no slot");
        assert!(!dispatch.try_alone(A, LeaseKind::Slot) && !dispatch.take(A, LeaseKind::Slot));
        assert_eq!(dispatch.release(A, LeaseKind::Slot), []);
        assert!(dispatch.try_alone(A, LeaseKind::Slot) && !dispatch.try_alone(A, LeaseKind::Slot));
        assert_eq!(dispatch.other_leases(A), 1, "the other one that seeks is none");
        assert_eq!(dispatch.end_alone(A), [], "the other one still waits to be alone");
        assert_eq!(dispatch.release(A, LeaseKind::Slot), []);
        assert!(dispatch.try_alone(A, LeaseKind::Slot) && !dispatch.has_seekers(A));
        assert_eq!(dispatch.other_leases(A), 1, "what needs no slot");
        dispatch.count_reader(A, true);
        assert_eq!(dispatch.other_leases(A), 0, "what only reads");
        dispatch.count_reader(A, false);
        assert_eq!(dispatch.other_leases(A), 1);
        let grants = dispatch.end_alone(A);
        assert_eq!(grants, [LeaseGrant { ticket: newcomer, generation: A, kind: LeaseKind::Slot }]);
    }

    #[test]
    fn who_gives_up_being_alone_lets_newcomers_in_and_who_watches_is_not_in_flight() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 2);
        assert_eq!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Granted(A));
        dispatch.seek_alone(A, LeaseKind::Slot);
        let LeaseAnswer::Queued(ticket) = dispatch.request(LeaseKind::Slot) else { panic!("queued") };
        let grants = dispatch.stop_seeking(A, LeaseKind::Slot);
        assert_eq!(grants, [LeaseGrant { ticket, generation: A, kind: LeaseKind::Slot }]);
        assert_eq!(dispatch.request(LeaseKind::Aux), LeaseAnswer::Granted(A));
        assert_eq!(dispatch.in_flight(A), 3);
        dispatch.convert_to_watch(A);
        assert_eq!(dispatch.in_flight(A), 2);
        dispatch.release(A, LeaseKind::Watch);
        assert_eq!((dispatch.in_flight(A), dispatch.in_flight_total()), (2, 2));
    }

    #[test]
    fn a_closed_generation_keeps_its_leases_and_takes_no_more() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 4);
        assert_eq!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Granted(A));
        dispatch.close(A);
        assert!(matches!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Queued(_)));
        assert_eq!(dispatch.in_flight(A), 1);
        assert_eq!(dispatch.open(B, 4).len(), 1);
        dispatch.release(A, LeaseKind::Slot);
        assert_eq!((dispatch.in_flight(A), dispatch.in_flight(B)), (0, 1));
    }

    #[test]
    fn auxiliary_requests_do_not_wait_for_a_slot() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 1);
        assert_eq!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Granted(A));
        assert!(matches!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Queued(_)));
        assert_eq!(dispatch.request(LeaseKind::Aux), LeaseAnswer::Granted(A));
        assert_eq!(dispatch.in_flight(A), 2);
    }

    #[test]
    fn leases_go_to_the_emptier_replica() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 4);
        dispatch.open(B, 4);
        let granted: Vec<_> = (0..4).map(|_| dispatch.request(LeaseKind::Slot)).collect();
        assert_eq!(
            granted,
            [
                LeaseAnswer::Granted(A),
                LeaseAnswer::Granted(B),
                LeaseAnswer::Granted(A),
                LeaseAnswer::Granted(B)
            ]
        );
    }

    #[test]
    fn a_conversation_returns_to_its_home_unless_that_is_much_busier() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 4);
        dispatch.open(B, 4);
        let home = LeasePreference { home: Some(B), ..LeasePreference::default() };
        let granted: Vec<_> =
            (0..6).map(|_| dispatch.request_with_preference(LeaseKind::Slot, &home)).collect();
        let on = LeaseAnswer::Granted;
        assert_eq!(granted, [on(B), on(B), on(B), on(A), on(B), on(A)], "2 of 4 slots more, then A");
        dispatch.close(B);
        assert_eq!(dispatch.request_with_preference(LeaseKind::Slot, &home), on(A), "the home is closed");
    }

    #[test]
    fn new_conversations_spread_over_idle_replicas() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 4);
        dispatch.open(B, 4);
        let with = |a, b| LeasePreference { home: None, conversations: BTreeMap::from([(A, a), (B, b)]) };
        assert_eq!(dispatch.request_with_preference(LeaseKind::Slot, &with(2, 1)), LeaseAnswer::Granted(B));
        assert_eq!(
            dispatch.request_with_preference(LeaseKind::Slot, &with(9, 1)),
            LeaseAnswer::Granted(A),
            "B is busier"
        );
        assert_eq!(
            dispatch.request_with_preference(LeaseKind::Slot, &with(1, 1)),
            LeaseAnswer::Granted(A),
            "the older one"
        );
    }

    #[test]
    fn a_held_generation_is_kept_for_the_one_who_takes_it() {
        let mut dispatch = LeaseDispatch::new(8);
        dispatch.open(A, 2);
        dispatch.open(B, 1);
        assert_eq!(dispatch.hold(&[A]), []);
        assert_eq!(dispatch.request(LeaseKind::Slot), LeaseAnswer::Granted(B));
        assert_eq!(dispatch.request(LeaseKind::Aux), LeaseAnswer::Granted(A), "no slot, no memory");
        let LeaseAnswer::Queued(next) = dispatch.request(LeaseKind::Slot) else { panic!("queued") };
        assert_eq!(dispatch.open_generations(), [A, B]);
        assert!(dispatch.take(A, LeaseKind::Slot));
        assert_eq!(dispatch.in_flight(A), 2);
        let grants = dispatch.hold(&[]);
        assert_eq!(grants, [LeaseGrant { ticket: next, generation: A, kind: LeaseKind::Slot }]);
        assert!(!dispatch.take(A, LeaseKind::Slot), "no room");
        dispatch.close(B);
        assert!(!dispatch.take(B, LeaseKind::Aux), "not open");
        assert!(!dispatch.cancel(dispatch.clone().issue_ticket()), "in no queue");
    }

    #[derive(Clone, Debug)]
    enum Op {
        /// Auxiliary or not, and the home.
        Request(bool, u64),
        Cancel(usize),
        Release(usize),
        Open(u64, u32),
        Close(u64),
        Forget(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            5 => (any::<bool>(), 0u64..5).prop_map(|(aux, home)| Op::Request(aux, home)),
            1 => any::<usize>().prop_map(Op::Cancel),
            4 => any::<usize>().prop_map(Op::Release),
            2 => (0u64..4, 0u32..4).prop_map(|(g, n)| Op::Open(g, n)),
            1 => (0u64..4).prop_map(Op::Close),
            1 => (0u64..4).prop_map(Op::Forget),
        ]
    }

    proptest! {
        /// The dispatch agrees with a simple model that stores every lease and every waiting caller.
        #[test]
        fn every_caller_is_granted_once_in_order_or_still_waits(ops in proptest::collection::vec(op(), 1..200)) {
            let mut dispatch = LeaseDispatch::new(5);
            let mut open: BTreeMap<u64, u32> = BTreeMap::new();
            let mut leases: Vec<(GenerationId, LeaseKind)> = Vec::new();
            let mut waiting: Vec<(QueueTicket, LeaseKind)> = Vec::new();
            let mut seen: BTreeSet<QueueTicket> = BTreeSet::new();
            for op in ops {
                let grants = match op {
                    Op::Request(aux, home) => {
                        let kind = if aux { LeaseKind::Aux } else { LeaseKind::Slot };
                        let preference = LeasePreference { home: Some(GenerationId(home)), ..LeasePreference::default() };
                        match dispatch.request_with_preference(kind, &preference) {
                            LeaseAnswer::Granted(generation) => {
                                prop_assert!(open.contains_key(&generation.0), "a lease on a closed generation");
                                prop_assert!(!waiting.iter().any(|(_, k)| *k == kind), "overtook a waiting caller");
                                leases.push((generation, kind));
                            }
                            LeaseAnswer::Queued(ticket) => {
                                prop_assert!(seen.insert(ticket), "a ticket was reused");
                                waiting.push((ticket, kind));
                            }
                            LeaseAnswer::Full { waiting: n } => prop_assert_eq!(n, 5),
                        }
                        Vec::new()
                    }
                    Op::Cancel(n) if !waiting.is_empty() => {
                        let (ticket, _) = waiting.remove(n % waiting.len());
                        prop_assert!(dispatch.cancel(ticket));
                        prop_assert!(!dispatch.cancel(ticket));
                        Vec::new()
                    }
                    Op::Release(n) if !leases.is_empty() => {
                        let (generation, kind) = leases.remove(n % leases.len());
                        dispatch.release(generation, kind)
                    }
                    Op::Open(g, limit) => {
                        open.insert(g, limit.max(1));
                        dispatch.open(GenerationId(g), limit)
                    }
                    Op::Close(g) => { open.remove(&g); dispatch.close(GenerationId(g)); Vec::new() }
                    Op::Forget(g) => {
                        open.remove(&g);
                        leases.retain(|(generation, _)| generation.0 != g);
                        dispatch.forget(GenerationId(g));
                        Vec::new()
                    }
                    Op::Cancel(_) | Op::Release(_) => Vec::new(),
                };
                for grant in grants {
                    prop_assert!(open.contains_key(&grant.generation.0));
                    let first = waiting.iter().position(|(_, k)| *k == grant.kind);
                    prop_assert_eq!(first.map(|i| waiting.remove(i).0), Some(grant.ticket), "out of order");
                    leases.push((grant.generation, grant.kind));
                }
                prop_assert_eq!(dispatch.waiting(), waiting.len());
                prop_assert_eq!(dispatch.in_flight_total() as usize, leases.len());
                for (g, limit) in &open {
                    let held = |kind| leases.iter().filter(|(x, k)| x.0 == *g && *k == kind).count();
                    prop_assert_eq!(dispatch.in_flight(GenerationId(*g)) as usize, held(LeaseKind::Slot) + held(LeaseKind::Aux));
                    // A waiting caller means that no open generation has room for it.
                    if waiting.iter().any(|(_, k)| *k == LeaseKind::Slot) {
                        prop_assert!(held(LeaseKind::Slot) >= *limit as usize, "room left while a caller waits");
                    }
                    prop_assert!(!waiting.iter().any(|(_, k)| *k == LeaseKind::Aux), "aux waits at an open generation");
                }
            }
        }
    }
}
