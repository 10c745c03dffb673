//! Checks that a prompt fits into the memory of its process, and keeps prompts that wait for memory.
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
//! After each reading, the model's task publishes a [`ProcessHeadroom`] of each process.
//! [`warden_policies::admission::admit`] makes the decisions. Waiting prompts are judged again when a lease
//! ends, after a reading, and when a process becomes ready or ends.

use warden_policies::GenerationId;
use warden_policies::admission::{
    self, AdmissionMode, AdmissionPolicy, AdmitDecision, MemoryRoom, PromptCost, ReplicaRoom,
};
use warden_policies::dispatch::{LeaseDispatch, LeaseKind, QueueTicket};
use warden_policies::sample::MemoryKind;

use crate::error::{LeaseDenied, NoRoom};

/// Headroom of a serving process. Every prompt fits into a process without one: it has just started.
#[derive(Clone, Debug)]
pub(crate) struct ProcessHeadroom {
    pub(crate) generation: GenerationId,
    /// Tokens of the largest prompt at the last reading.
    pub(crate) largest: u64,
    /// True if requests ran at the reading, so that some memory may become free.
    pub(crate) busy: bool,
    /// Time that requests would wait during a replacement; `None` if no replacement is possible now.
    pub(crate) recycle: Option<std::time::Duration>,
    pub(crate) left: Vec<MemoryHeadroom>,
    pub(crate) cost: PromptCost,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryHeadroom {
    pub(crate) series: MemoryKind,
    /// Bytes left until the limit; `None` if unknown.
    pub(crate) now: Option<u64>,
    /// Bytes that running requests will free.
    pub(crate) coming_back: u64,
    /// Bytes left in a new process after it has settled; `None` if unknown.
    pub(crate) fresh: Option<u64>,
}

/// Result of checking a prompt against the available memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptFit {
    /// Admission is off for this model, or no prices are known yet.
    NotChecked,
    /// The prompt fits.
    Fits {
        /// Tokens of the prompt, or an upper bound.
        tokens: u64,
    },
    /// The prompt does not fit. An exact count is useful if the tokens are an upper bound.
    Unclear {
        /// Tokens of the prompt, or an upper bound.
        tokens: u64,
    },
}

/// Size of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptSize {
    /// Bytes of text, which give an upper bound of the tokens.
    Bytes(u64),
    /// Exact number of tokens.
    Tokens(u64),
}

#[derive(Debug)]
struct WaitingPrompt {
    ticket: QueueTicket,
    kind: LeaseKind,
    action: &'static str,
    short: NoRoom,
}

impl WaitingPrompt {
    fn update_action(&mut self, judged: &AdmissionDecision) -> bool {
        let Some((action, short)) = judged.action() else { return false };
        self.short = *short;
        std::mem::replace(&mut self.action, action) != action
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AdmissionDecision {
    /// The prompt fits into the chosen process.
    Fits,
    /// The prompt fits into this other process.
    Elsewhere(GenerationId, NoRoom),
    /// The prompt fits into this process after running requests have ended.
    Wait(GenerationId, NoRoom),
    /// The prompt fits into a new process in place of this one.
    Recycle(GenerationId, NoRoom),
    Refuse(NoRoom),
}

impl AdmissionDecision {
    /// Action for events, and the shortage; `None` if the prompt fits.
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

#[derive(Debug, Default)]
pub(crate) struct AdmissionChanges {
    pub(crate) granted: Vec<(QueueTicket, GenerationId, LeaseKind)>,
    pub(crate) refused: Vec<(QueueTicket, NoRoom)>,
    /// Process, new action and shortage of waiting prompts whose decision has changed.
    pub(crate) changed_actions: Vec<(GenerationId, &'static str, NoRoom)>,
    pub(crate) held: Vec<GenerationId>,
    pub(crate) wants_recycle: bool,
}

/// Admission state of one model, under the lock of its queue.
#[derive(Debug)]
pub(crate) struct PromptAdmission {
    mode: AdmissionMode,
    policy: AdmissionPolicy,
    headroom: Vec<ProcessHeadroom>,
    waiting: Vec<WaitingPrompt>,
    recycle_wishes: Vec<(GenerationId, MemoryKind)>,
}

impl PromptAdmission {
    pub(crate) fn new(mode: AdmissionMode, policy: AdmissionPolicy) -> Self {
        Self { mode, policy, headroom: Vec::new(), waiting: Vec::new(), recycle_wishes: Vec::new() }
    }

    pub(crate) fn set_policy(&mut self, mode: AdmissionMode, policy: AdmissionPolicy) {
        (self.mode, self.policy) = (mode, policy);
    }

    pub(crate) fn publish(&mut self, headroom: Vec<ProcessHeadroom>) {
        self.headroom = headroom;
    }

    pub(crate) fn checks_prompts(&self) -> bool {
        let priced =
            |known: &ProcessHeadroom| known.left.iter().any(|left| known.cost.price(left.series).is_some());
        self.mode != AdmissionMode::Off && self.headroom.iter().any(priced)
    }

    pub(crate) fn holds_prompts(&self) -> bool {
        self.mode == AdmissionMode::Enforce
    }

    /// Checks whether a prompt of this size fits into some process now.
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

    /// `leased`: the request already holds a lease on `chosen`.
    pub(crate) fn judge_prompt(
        &self,
        dispatch: &LeaseDispatch,
        chosen: GenerationId,
        tokens: u64,
        leased: bool,
    ) -> AdmissionDecision {
        let open = dispatch.open_generations();
        let Some(at) = open.iter().position(|id| *id == chosen) else { return AdmissionDecision::Fits };
        if !self.checks_prompts() {
            return AdmissionDecision::Fits;
        }
        let replicas: Vec<ReplicaRoom> = (0..)
            .zip(&open)
            .map(|(replica, id)| self.replica_facts(dispatch, replica, *id, tokens, leased && *id == chosen))
            .collect();
        // Admission needs no replica numbers, so use positions in this list.
        let of = |replica: u32| open.get(replica as usize).copied().unwrap_or(chosen);
        match admission::admit(&self.policy, u32::try_from(at).unwrap_or(u32::MAX), &replicas) {
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
        self.headroom.iter().find(|known| known.generation == id)
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
        let now = known.cost.needed_bytes(tokens, known.largest);
        let fresh = known.cost.needed_bytes(tokens, 0);
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
        // The memory of requests that ran at the reading is in the figures until the next reading, so count
        // one request as running.
        let in_flight = running.max(u32::from(known.busy));
        ReplicaRoom { replica, in_flight, recycle: known.recycle, rooms: rooms.collect() }
    }

    /// Shortage of the given memory, or of the first memory that is short.
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

    // --- prompts that wait for memory ---

    /// Adds a prompt that does not fit, after its turn in the queue.
    pub(crate) fn add_waiting(
        &mut self,
        ticket: QueueTicket,
        kind: LeaseKind,
        action: &'static str,
        short: NoRoom,
    ) {
        self.waiting.push(WaitingPrompt { ticket, kind, action, short });
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the shortage of the prompt, if it was waiting here.
    pub(crate) fn remove_waiting(&mut self, ticket: QueueTicket) -> Option<NoRoom> {
        let at = self.waiting.iter().position(|waiting| waiting.ticket == ticket)?;
        Some(self.waiting.remove(at).short)
    }

    pub(crate) fn remove_all(&mut self) -> Vec<QueueTicket> {
        self.recycle_wishes.clear();
        self.waiting.drain(..).map(|waiting| waiting.ticket).collect()
    }

    /// Memory for which a waiting prompt needs a new process.
    pub(crate) fn recycle_wish(&self, generation: GenerationId) -> Option<MemoryKind> {
        self.recycle_wishes.iter().find(|(of, _)| *of == generation).map(|(_, series)| *series)
    }

    /// Judges waiting prompts again in order, and takes leases for those that fit.
    pub(crate) fn judge_waiting(&mut self, dispatch: &mut LeaseDispatch) -> AdmissionChanges {
        let mut looked = AdmissionChanges::default();
        let mut wishes: Vec<(GenerationId, MemoryKind)> = Vec::new();
        for mut one in std::mem::take(&mut self.waiting) {
            let Some(chosen) = dispatch.open_generations().first().copied() else {
                self.waiting.push(one);
                continue;
            };
            // Release the waiting prompts if the new mode keeps none waiting.
            let judged = if self.holds_prompts() {
                self.judge_prompt(dispatch, chosen, one.short.tokens, false)
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
                // Hold the next free slot of the process for this prompt.
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
