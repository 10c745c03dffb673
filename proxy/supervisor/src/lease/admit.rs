//! Whether a prompt fits into the memory of the process that it is about to go to, and who waits because it does not.
//!
//! ```text
//!   granted by the queue --> [ fits? ] --yes--> Lease
//!                               | no: the lease goes back
//!                               v
//!                            waiting --- fits here, or on another process ----------> Lease there
//!                               |   \--- short until requests have ended: nobody else gets a slot there
//!                               |   \--- fits into a fresh process: the model's task is asked for one
//!                               +------- fits nowhere, or the deadline --------------> refused, with the numbers
//! ```
//!
//! Prices and headroom are [`Board`]: the model's task publishes it after each reading. Nothing here measures, and nothing
//! here decides: [`warden_policies::admission::admit`] does. Whoever waits is judged again at everything that can change
//! the answer: a lease that ends, a reading, a process that opens or goes. So nobody waits for what has already happened.

use warden_policies::GenerationId;
use warden_policies::admission::{
    self, Admission, AdmissionMode, AdmissionPolicy, PromptCost, Replica, Room,
};
use warden_policies::dispatch::{Dispatch, LeaseKind, Ticket};
use warden_policies::sample::MemoryKind;

use crate::error::{Denied, NoRoom};

/// What the model's task knows about memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Board {
    /// What is left in the open processes. One that is not in the list has just started: everything fits.
    pub(crate) known: Vec<Known>,
}

/// What is left in one process.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) generation: GenerationId,
    /// Tokens of its largest prompt when its memory was read.
    pub(crate) largest: u64,
    /// Requests were in flight when its memory was read, so that some of it may come back.
    pub(crate) busy: bool,
    /// What a recycle of it costs in waiting; `None` if it may not be recycled now.
    pub(crate) recycle: Option<std::time::Duration>,
    /// Its memories that are known.
    pub(crate) left: Vec<Left>,
    /// What a prompt token costs in it.
    pub(crate) cost: PromptCost,
}

/// What is left in one memory of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub(crate) series: MemoryKind,
    /// Bytes until its limit; `None` if not known.
    pub(crate) now: Option<u64>,
    /// Bytes that come back when the requests in flight have ended.
    pub(crate) returns: u64,
    /// The same as `now` in a fresh, settled process.
    pub(crate) fresh: Option<u64>,
}

/// Whether a prompt of a size would find room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weighed {
    /// Nobody asks: admission is off for this model, or nothing was learnt yet.
    Unasked,
    /// It fits.
    Fits {
        /// Its tokens, or a bound.
        tokens: u64,
    },
    /// It does not: worth counting its tokens exactly.
    Unclear {
        /// Its tokens, or a bound.
        tokens: u64,
    },
}

/// The size of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Bytes of text: an upper bound is made of them.
    Bytes(u64),
    /// Tokens, counted.
    Tokens(u64),
}

/// Somebody whose prompt has no room yet.
#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    kind: LeaseKind,
    tokens: u64,
    /// What was said to be done, at the last look.
    action: &'static str,
    /// What is short, at the last look.
    short: NoRoom,
}

impl Waiting {
    /// The answer is this now. True if it is another one than before.
    fn answer(&mut self, judged: &Judged) -> bool {
        let Some((action, short)) = judged.action() else { return false };
        self.short = *short;
        std::mem::replace(&mut self.action, action) != action
    }
}

/// What is to be done about one prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Judged {
    /// It may go to the process that was chosen for it.
    Fits,
    /// It fits into this one.
    Elsewhere(GenerationId, NoRoom),
    /// It fits there when requests have ended.
    Wait(GenerationId, NoRoom),
    /// It fits into a fresh process in the place of this one.
    Recycle(GenerationId, NoRoom),
    /// It fits nowhere.
    Refuse(NoRoom),
}

impl Judged {
    /// What is done, in the words of events; `None` if nothing is.
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

/// What a look at those who wait has changed.
#[derive(Debug, Default)]
pub(crate) struct Looked {
    /// Leases taken for them.
    pub(crate) granted: Vec<(Ticket, GenerationId, LeaseKind)>,
    /// Those who are refused.
    pub(crate) refused: Vec<(Ticket, NoRoom)>,
    /// What is done now about those for whom it was something else.
    pub(crate) told: Vec<(GenerationId, &'static str, NoRoom)>,
    /// Processes on which nobody else may get a slot.
    pub(crate) held: Vec<GenerationId>,
    /// There are new wishes for the model's task.
    pub(crate) wished: bool,
}

/// The state of one model, under its lock.
#[derive(Debug)]
pub(crate) struct Admit {
    mode: AdmissionMode,
    policy: AdmissionPolicy,
    board: Board,
    waiting: Vec<Waiting>,
    wishes: Vec<(GenerationId, MemoryKind)>,
}

impl Admit {
    pub(crate) fn new(mode: AdmissionMode, policy: AdmissionPolicy) -> Self {
        Self { mode, policy, board: Board::default(), waiting: Vec::new(), wishes: Vec::new() }
    }

    pub(crate) fn set(&mut self, mode: AdmissionMode, policy: AdmissionPolicy) {
        (self.mode, self.policy) = (mode, policy);
    }

    pub(crate) fn publish(&mut self, board: Board) {
        self.board = board;
    }

    /// Whether prompts are looked at, at all.
    pub(crate) fn asks(&self) -> bool {
        let priced = |known: &Known| known.left.iter().any(|left| known.cost.price(left.series).is_some());
        self.mode != AdmissionMode::Off && self.board.known.iter().any(priced)
    }

    /// Whether prompts without room are kept from being sent.
    pub(crate) fn enforces(&self) -> bool {
        self.mode == AdmissionMode::Enforce
    }

    /// Whether a prompt of this size would fit somewhere now.
    pub(crate) fn weigh(&self, dispatch: &Dispatch, size: Size) -> Weighed {
        let tokens = match size {
            Size::Bytes(bytes) => admission::estimate_tokens(&self.policy, bytes),
            Size::Tokens(tokens) => tokens,
        };
        match dispatch.open_generations().first() {
            Some(chosen) if self.asks() => match self.judge(dispatch, *chosen, tokens, false) {
                Judged::Fits | Judged::Elsewhere(..) => Weighed::Fits { tokens },
                _ => Weighed::Unclear { tokens },
            },
            _ => Weighed::Unasked,
        }
    }

    /// What becomes of a prompt that would go to `chosen`. With `leased`, it holds a lease there already.
    pub(crate) fn judge(
        &self,
        dispatch: &Dispatch,
        chosen: GenerationId,
        tokens: u64,
        leased: bool,
    ) -> Judged {
        let open = dispatch.open_generations();
        let index = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        let Some(at) = open.iter().position(|id| *id == chosen).filter(|_| self.asks()) else {
            return Judged::Fits;
        };
        let replicas: Vec<Replica> = (0..)
            .zip(&open)
            .map(|(replica, id)| self.replica(dispatch, replica, *id, tokens, leased && *id == chosen))
            .collect();
        // Replicas are named by their places in this list: the one name that admission needs.
        let of = |replica: u32| open.get(replica as usize).copied().unwrap_or(chosen);
        match admission::admit(&self.policy, index(at), &replicas) {
            Admission::Fits => Judged::Fits,
            Admission::Elsewhere { replica } => {
                let short = self.short(tokens, chosen, &replicas[at], None);
                Judged::Elsewhere(of(replica), short)
            }
            Admission::Wait { series } => {
                Judged::Wait(chosen, self.short(tokens, chosen, &replicas[at], Some(series)))
            }
            Admission::RecycleFirst { replica, series } => {
                let place = replicas.get(replica as usize).unwrap_or(&replicas[at]);
                let old = of(replica);
                Judged::Recycle(old, self.short(tokens, old, place, Some(series)))
            }
            Admission::Refuse { series, needed, have, retry_after } => Judged::Refuse(NoRoom {
                needed,
                have,
                retry_after: retry_after.unwrap_or(self.policy.retry_most),
                ..self.short(tokens, chosen, &replicas[at], Some(series))
            }),
        }
    }

    fn known(&self, id: GenerationId) -> Option<&Known> {
        self.board.known.iter().find(|known| known.generation == id)
    }

    fn replica(
        &self,
        dispatch: &Dispatch,
        replica: u32,
        id: GenerationId,
        tokens: u64,
        leased: bool,
    ) -> Replica {
        let running = dispatch.in_flight(id).saturating_sub(u32::from(leased));
        let Some(known) = self.known(id) else {
            return Replica { replica, in_flight: running, recycle: None, rooms: Vec::new() };
        };
        let (now, fresh) = (known.cost.need(tokens, known.largest), known.cost.need(tokens, 0));
        let need = |needs: &[(MemoryKind, u64)], series| {
            needs.iter().find(|(of, _)| *of == series).map_or(0, |(_, bytes)| *bytes)
        };
        let rooms = known.left.iter().map(|left| Room {
            series: left.series,
            need: need(&now, left.series),
            left: left.now,
            returns: left.returns,
            need_fresh: need(&fresh, left.series),
            left_fresh: left.fresh,
        });
        // What was read while requests ran is still their memory until the next reading, though they may have ended.
        let in_flight = running.max(u32::from(known.busy));
        Replica { replica, in_flight, recycle: known.recycle, rooms: rooms.collect() }
    }

    /// The numbers of what is short in a replica: in this memory, or in the first that is.
    fn short(&self, tokens: u64, id: GenerationId, replica: &Replica, series: Option<MemoryKind>) -> NoRoom {
        let lacks = |room: &&Room| {
            room.left.is_some_and(|left| left < room.need.saturating_add(self.policy.reserve.0))
        };
        let room = match series {
            Some(series) => replica.rooms.iter().find(|room| room.series == series),
            None => replica.rooms.iter().find(lacks),
        };
        let series = room.map_or(series.unwrap_or(MemoryKind::Host), |room| room.series);
        let price = self.known(id).and_then(|known| known.cost.price(series));
        NoRoom {
            series,
            tokens,
            needed: room.map_or(0, |room| room.need.saturating_add(self.policy.reserve.0)),
            have: room.and_then(|room| room.left).unwrap_or(0),
            bytes_per_token: price.map_or(0.0, |price| price.bytes_per_token),
            retry_after: replica.recycle.unwrap_or(self.policy.retry_least).max(self.policy.retry_least),
        }
    }

    // --- those who wait ---

    /// Somebody who had his turn waits for room.
    pub(crate) fn wait(&mut self, ticket: Ticket, kind: LeaseKind, action: &'static str, short: NoRoom) {
        self.waiting.push(Waiting { ticket, kind, tokens: short.tokens, action, short });
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Somebody leaves. What he lacked, if he waited here.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> Option<NoRoom> {
        let at = self.waiting.iter().position(|waiting| waiting.ticket == ticket)?;
        Some(self.waiting.remove(at).short)
    }

    /// All leave.
    pub(crate) fn dismiss(&mut self) -> Vec<Ticket> {
        self.wishes.clear();
        self.waiting.drain(..).map(|waiting| waiting.ticket).collect()
    }

    /// The memory for which a prompt wants a fresh process in the place of this one.
    pub(crate) fn wish(&self, generation: GenerationId) -> Option<MemoryKind> {
        self.wishes.iter().find(|(of, _)| *of == generation).map(|(_, series)| *series)
    }

    /// Judges all who wait again, in order. Takes leases for those who fit.
    pub(crate) fn look(&mut self, dispatch: &mut Dispatch) -> Looked {
        let mut looked = Looked::default();
        let mut wishes: Vec<(GenerationId, MemoryKind)> = Vec::new();
        for mut one in std::mem::take(&mut self.waiting) {
            let Some(chosen) = dispatch.open_generations().first().copied() else {
                self.waiting.push(one);
                continue;
            };
            // A mode that keeps nobody waiting any more lets those go who wait.
            let judged =
                if self.enforces() { self.judge(dispatch, chosen, one.tokens, false) } else { Judged::Fits };
            if one.answer(&judged) {
                looked.told.push((chosen, one.action, one.short));
            }
            let on = match judged {
                Judged::Fits => chosen,
                Judged::Elsewhere(other, _) => other,
                Judged::Wait(on, _) => {
                    looked.held.push(on);
                    self.waiting.push(one);
                    continue;
                }
                Judged::Recycle(old, short) => {
                    if !wishes.iter().any(|(of, _)| *of == old) {
                        wishes.push((old, short.series));
                    }
                    self.waiting.push(one);
                    continue;
                }
                Judged::Refuse(short) => {
                    looked.refused.push((one.ticket, short));
                    continue;
                }
            };
            if dispatch.take(on, one.kind) {
                looked.granted.push((one.ticket, on, one.kind));
            } else {
                // The next slot is his.
                looked.held.push(on);
                self.waiting.push(one);
            }
        }
        looked.wished = wishes.iter().any(|wish| !self.wishes.contains(wish));
        self.wishes = wishes;
        looked
    }
}

impl From<NoRoom> for Denied {
    fn from(short: NoRoom) -> Self {
        Self::NoRoom(short)
    }
}

#[cfg(test)]
#[path = "admit_tests.rs"]
mod tests;
