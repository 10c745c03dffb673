//! The requests that are in flight, and those that ended last: what an operator sees of them, and how one is cancelled. Never what
//! they say.
//!
//! ```text
//!   a thread ── its shard: [ in flight ] ── ends ──> [ let in | turned away ], the last so many of each
//!      │                        │ Arc<Entry>
//!      └ Progress: stores ──────┘ <── loads: whoever lists; it clones a portion at a time and holds up nobody
//! ```
//!
//! Each thread that serves clients has a shard of its own, so its lock is taken by nobody else but who lists or cancels. What changes
//! while a request runs is an atomic, stored without any order: a picture of something that moves. Entries are used again once nobody
//! looks at them, so that a request costs no allocation.

mod entry;
mod shard;
mod view;

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::{ModelName, defaults};

pub(crate) use self::entry::{Begun, Progress};
pub(crate) use self::shard::Ticket;
use self::shard::{Seen, Shard, Sizes};
pub use self::view::{RequestState, RequestView};
use crate::protocol::conn_state::ConnState;
use crate::{clock, workers};

/// The requests in flight and those that ended last. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Requests(Arc<[Arc<Shard>]>);

/// Those of a gateway of one thread, of which there is none yet.
impl Default for Requests {
    fn default() -> Self {
        Self::new(1)
    }
}

/// What the requests of one model hold of its context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// How many generate.
    pub requests: u64,
    /// Tokens of their prompts and answers so far, as far as they are known. A prompt that nobody has counted is taken for a token for
    /// each four bytes of its request.
    pub tokens: u64,
}

/// A request was told to end.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// As it was then.
    pub request: RequestView,
    /// It had been told before.
    pub again: bool,
}

/// Why no request was cancelled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NotCancelled {
    /// None has that id, or not any more.
    #[error(
        "there is no request `{id}` in flight or among those that ended last; `llama-warden requests` lists them"
    )]
    Unknown {
        /// As it was asked for.
        id: String,
    },
    /// It is over.
    #[error("the request `{id}` has ended already ({outcome})")]
    Ended {
        /// Its id.
        id: String,
        /// How it ended.
        outcome: String,
    },
    /// Clients may give several the same id.
    #[error("{} requests in flight have the id `{id}`: say which by its number ({})", .numbers.len(), listed(.numbers))]
    Several {
        /// Their id.
        id: String,
        /// Their numbers, which nobody else has.
        numbers: Vec<u64>,
    },
}

fn listed(numbers: &[u64]) -> String {
    let mut shown: Vec<String> = numbers.iter().take(8).map(u64::to_string).collect();
    if numbers.len() > shown.len() {
        shown.push("...".to_owned());
    }
    shown.join(", ")
}

impl Requests {
    pub(crate) fn new(threads: usize) -> Self {
        let numbers = &defaults().server;
        let sizes = Sizes { ended: numbers.requests_ended, turned_away: numbers.requests_turned_away };
        Self::of(threads, sizes)
    }

    fn of(threads: usize, sizes: Sizes) -> Self {
        let threads = threads.max(1);
        Self((0..threads).map(|number| Arc::new(Shard::new(number, threads, sizes))).collect())
    }

    /// A request begins on this thread.
    pub(crate) fn begin(&self, begun: &Begun<'_>, conn: &Arc<ConnState>) -> (Ticket, Progress) {
        let shard = self.0.get(workers::number()).unwrap_or(&self.0[0]);
        Shard::begin(shard, begun, conn)
    }

    /// Those in flight, the oldest first, and then those that ended, the last one first. A request that runs all the time is in
    /// it once, and one that ends meanwhile at most once.
    pub fn list(&self) -> Vec<RequestView> {
        let mut all: Vec<Seen> = self.0.iter().flat_map(|shard| shard.list()).collect();
        all.sort_by(Seen::order);
        let (now, wall) = (Instant::now(), clock::unix_ms());
        all.iter().map(|seen| seen.view(now, wall)).collect()
    }

    /// What those that a backend has hold of its context, by model.
    pub fn held(&self) -> BTreeMap<ModelName, Holds> {
        let mut all: BTreeMap<ModelName, Holds> = BTreeMap::new();
        for entry in self.0.iter().flat_map(|shard| shard.live()).map(|seen| seen.entry) {
            if let Some(model) = entry.model.get().filter(|_| entry.generates && entry.is_on_a_backend()) {
                let holds = all.entry(model.clone()).or_default();
                holds.requests += 1;
                holds.tokens = holds.tokens.saturating_add(entry.held());
            }
        }
        all
    }

    /// How many are in flight.
    pub fn in_flight(&self) -> usize {
        self.0.iter().map(|shard| shard.in_flight()).sum()
    }

    /// Tells a request to end: its client gets an error, and its slot is given back as if the client had left. Where clients
    /// gave several the same id, `number` says which.
    ///
    /// # Errors
    ///
    /// There is no such request, it has ended, or there are several.
    pub fn cancel(&self, id: &str, number: Option<u64>) -> Result<Told, NotCancelled> {
        let is_meant = |of: &str, its: u64| of == id && number.is_none_or(|number| number == its);
        let mut found = Vec::new();
        for shard in self.0.iter() {
            found.extend(shard.places(is_meant).into_iter().map(|place| (shard, place)));
        }
        if let [(shard, place)] = found[..]
            && let Some(told) = shard.cancel(place)
        {
            return Ok(told);
        }
        let id = id.to_owned();
        if found.len() > 1 {
            let mut numbers: Vec<u64> = found.into_iter().map(|(_, place)| place.number).collect();
            numbers.sort_unstable();
            return Err(NotCancelled::Several { id, numbers });
        }
        let ended = self.0.iter().find_map(|shard| shard.outcome(is_meant));
        Err(match ended {
            Some(outcome) => NotCancelled::Ended { id, outcome: outcome.to_owned() },
            None => NotCancelled::Unknown { id },
        })
    }
}

#[cfg(test)]
mod tests;
