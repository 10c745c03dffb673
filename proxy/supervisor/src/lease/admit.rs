//! Checks that a prompt fits into the memory of its process, and keeps the queue of prompts that do not fit
//! yet.
//!
//! ```text
//!     granted by the queue --> [ fits? ] --yes--> Lease
//!                                | no: the lease goes back
//!                                v
//!                             waiting --- fits here, or on another process -------> Lease there
//!                                |   \--- too little until requests end: slots there are held for it
//!                                |   \--- fits into a fresh process: the model's task is asked for one
//!                                +------- fits nowhere, or deadline passed --------> refused, with numbers
//! ```
//!
//! The model's task publishes prices and headroom as a [`MemoryBoard`] after each reading. This module measures
//! nothing, and [`warden_policies::admission::admit`] makes the decisions. Waiting prompts are judged again
//! at each event that can change the answer: a lease that ends, a reading, a process that opens or ends.

use warden_policies::GenerationId;
use warden_policies::admission::{
    self, AdmissionMode, AdmissionPolicy, AdmitDecision, MemoryRoom, PromptCost, ReplicaRoom,
};
use warden_policies::dispatch::{LeaseDispatch, LeaseKind, QueueTicket};
use warden_policies::sample::MemoryKind;

use crate::error::{LeaseDenied, NoRoom};

/// Memory figures published by the model's task.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryBoard {
    /// Headroom of the open processes. A missing process has just started, and everything fits.
    pub(crate) known: Vec<ProcessHeadroom>,
}

/// Headroom of one process.
#[derive(Clone, Debug)]
pub(crate) struct ProcessHeadroom {
    pub(crate) generation: GenerationId,
    /// Tokens of its largest prompt, at the reading.
    pub(crate) largest: u64,
    /// Requests were in flight at the reading, so some memory may come back.
    pub(crate) busy: bool,
    /// Waiting time that a recycle costs; `None` if it may not be recycled now.
    pub(crate) recycle: Option<std::time::Duration>,
    /// Headroom of each known memory.
    pub(crate) left: Vec<MemoryHeadroom>,
    pub(crate) cost: PromptCost,
}

/// Headroom in one memory of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryHeadroom {
    pub(crate) series: MemoryKind,
    /// Bytes until its limit; `None` if unknown.
    pub(crate) now: Option<u64>,
    /// Bytes that come back when the requests in flight have ended.
    pub(crate) coming_back: u64,
    /// Same as `now`, in a fresh, settled process.
    pub(crate) fresh: Option<u64>,
}

/// Answer to the question if a prompt of a size would fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptFit {
    /// Not checked: admission is off for this model, or no prices are known yet.
    NotChecked,
    /// Fits.
    Fits {
        /// Tokens of the prompt, or a bound.
        tokens: u64,
    },
    /// Does not fit by this bound, so an exact count is useful.
    Unclear {
        /// Tokens of the prompt, or a bound.
        tokens: u64,
    },
}

/// Size of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptSize {
    /// Bytes of text, from which a bound is computed.
    Bytes(u64),
    /// Exact tokens.
    Tokens(u64),
}

/// Waiting prompt without room.
#[derive(Debug)]
struct WaitingPrompt {
    ticket: QueueTicket,
    kind: LeaseKind,
    tokens: u64,
    /// Action at the last look.
    action: &'static str,
    /// Shortage at the last look.
    short: NoRoom,
}

impl WaitingPrompt {
    /// Updates the action. Returns true if it has changed.
    fn update_action(&mut self, judged: &AdmissionDecision) -> bool {
        let Some((action, short)) = judged.action() else { return false };
        self.short = *short;
        std::mem::replace(&mut self.action, action) != action
    }
}

/// Decision about one prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AdmissionDecision {
    /// Fits into the process that was chosen for it.
    Fits,
    /// Fits into this process.
    Elsewhere(GenerationId, NoRoom),
    /// Fits there when requests have ended.
    Wait(GenerationId, NoRoom),
    /// Fits into a fresh process in place of this one.
    Recycle(GenerationId, NoRoom),
    /// Fits nowhere.
    Refuse(NoRoom),
}

impl AdmissionDecision {
    /// Name of the action in events; `None` if it just fits.
    pub(crate) fn action(&self) -> Option<(&'static str, &NoRoom)> {
        match self {
            Self::Fits => None,
            Self::Elsewhere(_, short) => Some(("elsewhere", short)),
            Self::Wait(_, short) => Some(("wait", short)),
            Self::Recycle(_, short) => Some(("recycle", short)),
            Self::Refuse(short) => Some(("refuse", short)),
        }
    }
}

/// Changes found by judging the waiting prompts.
#[derive(Debug, Default)]
pub(crate) struct AdmissionChanges {
    /// Leases taken for them.
    pub(crate) granted: Vec<(QueueTicket, GenerationId, LeaseKind)>,
    /// Prompts that are refused.
    pub(crate) refused: Vec<(QueueTicket, NoRoom)>,
    /// Changed actions.
    pub(crate) changed_actions: Vec<(GenerationId, &'static str, NoRoom)>,
    /// Processes whose slots are held for a waiting prompt.
    pub(crate) held: Vec<GenerationId>,
    /// The model's task has new requests for a fresh process.
    pub(crate) wants_recycle: bool,
}

/// Admission state of one model, under its lock.
#[derive(Debug)]
pub(crate) struct PromptAdmission {
    mode: AdmissionMode,
    policy: AdmissionPolicy,
    board: MemoryBoard,
    waiting: Vec<WaitingPrompt>,
    recycle_wishes: Vec<(GenerationId, MemoryKind)>,
}

impl PromptAdmission {
    pub(crate) fn new(mode: AdmissionMode, policy: AdmissionPolicy) -> Self {
        Self { mode, policy, board: MemoryBoard::default(), waiting: Vec::new(), recycle_wishes: Vec::new() }
    }

    pub(crate) fn set_policy(&mut self, mode: AdmissionMode, policy: AdmissionPolicy) {
        (self.mode, self.policy) = (mode, policy);
    }

    pub(crate) fn publish(&mut self, board: MemoryBoard) {
        self.board = board;
    }

    /// True if prompts are checked at all.
    pub(crate) fn checks_prompts(&self) -> bool {
        let priced =
            |known: &ProcessHeadroom| known.left.iter().any(|left| known.cost.price(left.series).is_some());
        self.mode != AdmissionMode::Off && self.board.known.iter().any(priced)
    }

    /// True if prompts without room have to wait.
    pub(crate) fn holds_prompts(&self) -> bool {
        self.mode == AdmissionMode::Enforce
    }

    /// Checks if a prompt of this size would fit somewhere now.
    pub(crate) fn weigh_prompt(&self, dispatch: &LeaseDispatch, size: PromptSize) -> PromptFit {
        let tokens = match size {
            PromptSize::Bytes(bytes) => admission::estimate_tokens(&self.policy, bytes),
            PromptSize::Tokens(tokens) => tokens,
        };
        match dispatch.open_generations().first() {
            Some(chosen) if self.checks_prompts() => {
                match self.judge_prompt(dispatch, *chosen, tokens, false) {
                    AdmissionDecision::Fits | AdmissionDecision::Elsewhere(..) => PromptFit::Fits { tokens },
                    _ => PromptFit::Unclear { tokens },
                }
            }
            _ => PromptFit::NotChecked,
        }
    }

    /// Decides about a prompt for process `chosen`. `leased`: it holds a lease there already.
    pub(crate) fn judge_prompt(
        &self,
        dispatch: &LeaseDispatch,
        chosen: GenerationId,
        tokens: u64,
        leased: bool,
    ) -> AdmissionDecision {
        let open = dispatch.open_generations();
        let index = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        let Some(at) = open.iter().position(|id| *id == chosen).filter(|_| self.checks_prompts()) else {
            return AdmissionDecision::Fits;
        };
        let replicas: Vec<ReplicaRoom> = (0..)
            .zip(&open)
            .map(|(replica, id)| self.replica_facts(dispatch, replica, *id, tokens, leased && *id == chosen))
            .collect();
        // Replicas are identified by their places in this list, which is all that admission needs.
        let of = |replica: u32| open.get(replica as usize).copied().unwrap_or(chosen);
        match admission::admit(&self.policy, index(at), &replicas) {
            AdmitDecision::Fits => AdmissionDecision::Fits,
            AdmitDecision::Elsewhere { replica } => {
                let short = self.shortage(tokens, chosen, &replicas[at], None);
                AdmissionDecision::Elsewhere(of(replica), short)
            }
            AdmitDecision::Wait { series } => {
                AdmissionDecision::Wait(chosen, self.shortage(tokens, chosen, &replicas[at], Some(series)))
            }
            AdmitDecision::RecycleFirst { replica, series } => {
                let place = replicas.get(replica as usize).unwrap_or(&replicas[at]);
                let old = of(replica);
                AdmissionDecision::Recycle(old, self.shortage(tokens, old, place, Some(series)))
            }
            AdmitDecision::Refuse { series, needed, have, retry_after } => {
                AdmissionDecision::Refuse(NoRoom {
                    needed,
                    have,
                    retry_after: retry_after.unwrap_or(self.policy.retry_most),
                    ..self.shortage(tokens, chosen, &replicas[at], Some(series))
                })
            }
        }
    }

    fn headroom_of(&self, id: GenerationId) -> Option<&ProcessHeadroom> {
        self.board.known.iter().find(|known| known.generation == id)
    }

    fn replica_facts(
        &self,
        dispatch: &LeaseDispatch,
        replica: u32,
        id: GenerationId,
        tokens: u64,
        leased: bool,
    ) -> ReplicaRoom {
        let running = dispatch.in_flight(id).saturating_sub(u32::from(leased));
        let Some(known) = self.headroom_of(id) else {
            return ReplicaRoom { replica, in_flight: running, recycle: None, rooms: Vec::new() };
        };
        let (now, fresh) =
            (known.cost.needed_bytes(tokens, known.largest), known.cost.needed_bytes(tokens, 0));
        let need = |needs: &[(MemoryKind, u64)], series| {
            needs.iter().find(|(of, _)| *of == series).map_or(0, |(_, bytes)| *bytes)
        };
        let rooms = known.left.iter().map(|left| MemoryRoom {
            series: left.series,
            need: need(&now, left.series),
            left: left.now,
            returns: left.coming_back,
            need_fresh: need(&fresh, left.series),
            left_fresh: left.fresh,
        });
        // Memory read while requests ran counts as theirs until the next reading, even if they have ended.
        let in_flight = running.max(u32::from(known.busy));
        ReplicaRoom { replica, in_flight, recycle: known.recycle, rooms: rooms.collect() }
    }

    /// Shortage in a replica: in this memory, or in the first one that is short.
    fn shortage(
        &self,
        tokens: u64,
        id: GenerationId,
        replica: &ReplicaRoom,
        series: Option<MemoryKind>,
    ) -> NoRoom {
        let lacks = |room: &&MemoryRoom| {
            room.left.is_some_and(|left| left < room.need.saturating_add(self.policy.reserve.0))
        };
        let room = match series {
            Some(series) => replica.rooms.iter().find(|room| room.series == series),
            None => replica.rooms.iter().find(lacks),
        };
        let series = room.map_or(series.unwrap_or(MemoryKind::Host), |room| room.series);
        let price = self.headroom_of(id).and_then(|known| known.cost.price(series));
        NoRoom {
            series,
            tokens,
            needed: room.map_or(0, |room| room.need.saturating_add(self.policy.reserve.0)),
            have: room.and_then(|room| room.left).unwrap_or(0),
            bytes_per_token: price.map_or(0.0, |price| price.bytes_per_token),
            retry_after: replica.recycle.unwrap_or(self.policy.retry_least).max(self.policy.retry_least),
        }
    }

    // --- waiting prompts ---

    /// Adds a prompt that had its turn in the queue.
    pub(crate) fn add_waiting(
        &mut self,
        ticket: QueueTicket,
        kind: LeaseKind,
        action: &'static str,
        short: NoRoom,
    ) {
        self.waiting.push(WaitingPrompt { ticket, kind, tokens: short.tokens, action, short });
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Removes a request. Returns its shortage, if it waited here.
    pub(crate) fn remove_waiting(&mut self, ticket: QueueTicket) -> Option<NoRoom> {
        let at = self.waiting.iter().position(|waiting| waiting.ticket == ticket)?;
        Some(self.waiting.remove(at).short)
    }

    /// Removes all requests.
    pub(crate) fn remove_all(&mut self) -> Vec<QueueTicket> {
        self.recycle_wishes.clear();
        self.waiting.drain(..).map(|waiting| waiting.ticket).collect()
    }

    /// Memory for which a prompt needs a fresh process in place of this one.
    pub(crate) fn recycle_wish(&self, generation: GenerationId) -> Option<MemoryKind> {
        self.recycle_wishes.iter().find(|(of, _)| *of == generation).map(|(_, series)| *series)
    }

    /// Judges all waiting prompts again, in order. Takes leases for those that fit.
    pub(crate) fn judge_waiting(&mut self, dispatch: &mut LeaseDispatch) -> AdmissionChanges {
        let mut looked = AdmissionChanges::default();
        let mut wishes: Vec<(GenerationId, MemoryKind)> = Vec::new();
        for mut one in std::mem::take(&mut self.waiting) {
            let Some(chosen) = dispatch.open_generations().first().copied() else {
                self.waiting.push(one);
                continue;
            };
            // In a mode that keeps no prompt waiting, release those that wait.
            let judged = if self.holds_prompts() {
                self.judge_prompt(dispatch, chosen, one.tokens, false)
            } else {
                AdmissionDecision::Fits
            };
            if one.update_action(&judged) {
                looked.changed_actions.push((chosen, one.action, one.short));
            }
            let on = match judged {
                AdmissionDecision::Fits => chosen,
                AdmissionDecision::Elsewhere(other, _) => other,
                AdmissionDecision::Wait(on, _) => {
                    looked.held.push(on);
                    self.waiting.push(one);
                    continue;
                }
                AdmissionDecision::Recycle(old, short) => {
                    if !wishes.iter().any(|(of, _)| *of == old) {
                        wishes.push((old, short.series));
                    }
                    self.waiting.push(one);
                    continue;
                }
                AdmissionDecision::Refuse(short) => {
                    looked.refused.push((one.ticket, short));
                    continue;
                }
            };
            if dispatch.take(on, one.kind) {
                looked.granted.push((one.ticket, on, one.kind));
            } else {
                // The next free slot is for this prompt.
                looked.held.push(on);
                self.waiting.push(one);
            }
        }
        looked.wants_recycle = wishes.iter().any(|wish| !self.recycle_wishes.contains(wish));
        self.recycle_wishes = wishes;
        looked
    }
}

impl From<NoRoom> for LeaseDenied {
    fn from(short: NoRoom) -> Self {
        Self::NoRoom(short)
    }
}

#[cfg(test)]
#[path = "admit_tests.rs"]
mod tests;
