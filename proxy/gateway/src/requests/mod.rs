//! The requests in flight and the last ended ones, for operators to list and cancel. Never shows contents.
//!
//! ```text
//!   a thread ── its shard: [ in flight ] ── request ends ──> [ admitted | refused ], the last ones of each
//!      │                        │ Arc<RequestEntry>
//!      └ ProgressHandle: writes ┘ <── reads: a lister, which clones a portion at a time and blocks no thread
//! ```
//!
//! Each thread that serves clients has its own shard. Other threads lock a shard only to list or cancel
//! requests. Values that change while a request runs are atomics with relaxed order, because a snapshot need
//! not be consistent. Entries are reused once no lister holds them, so a request costs no allocation.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::{ModelName, defaults};

use self::shard::{ListedRequest, RequestShard, ShardSizes};
use crate::protocol::ConnState;
use crate::{clock, workers};

pub(crate) use self::entry::{ProgressHandle, RequestStart};
pub(crate) use self::shard::ShardTicket;
pub use self::view::{RequestState, RequestView};

mod entry;
mod shard;
mod view;

/// The requests in flight and the last ended ones.
#[derive(Clone, Debug)]
pub struct RequestRegistry(Arc<[Arc<RequestShard>]>);

impl Default for RequestRegistry {
    fn default() -> Self {
        Self::new(1)
    }
}

/// Use of the context by the requests of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextHoldings {
    /// Number of generating requests.
    pub requests: u64,
    /// Known number of tokens of their prompts and answers. For a prompt without a token count, one token per
    /// four bytes of the request is assumed.
    pub tokens: u64,
}

/// A cancelled request.
#[derive(Clone, Debug, PartialEq)]
pub struct CancelledRequest {
    /// State of the request before it was cancelled.
    pub request: RequestView,
    /// True if the request had been cancelled before.
    pub was_cancelled: bool,
}

/// Reason why no request was cancelled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CancelError {
    /// No listed request has that id.
    #[error(
        "there is no request `{id}` in flight or among those that ended last; `llama-warden requests` lists them"
    )]
    Unknown {
        /// The requested id.
        id: String,
    },
    /// The request has ended.
    #[error("the request `{id}` has ended already ({outcome})")]
    Ended {
        /// Id of the request.
        id: String,
        /// Outcome of the request.
        outcome: String,
    },
    /// Several requests have the same id, because clients choose the ids.
    #[error(
        "{} requests in flight have the id `{id}`: say which by its number ({})",
        .numbers.len(), list_numbers(.numbers)
    )]
    Several {
        /// Id of these requests.
        id: String,
        /// Unique numbers of these requests.
        numbers: Vec<u64>,
    },
}

fn list_numbers(numbers: &[u64]) -> String {
    let mut shown: Vec<String> = numbers.iter().take(8).map(u64::to_string).collect();
    if numbers.len() > shown.len() {
        shown.push("...".to_owned());
    }
    shown.join(", ")
}

impl RequestRegistry {
    pub(crate) fn new(threads: usize) -> Self {
        let numbers = &defaults().server;
        let sizes = ShardSizes { ended: numbers.requests_ended, turned_away: numbers.requests_turned_away };
        Self::with_sizes(threads, sizes)
    }

    fn with_sizes(threads: usize, sizes: ShardSizes) -> Self {
        let threads = threads.max(1);
        Self((0..threads).map(|number| Arc::new(RequestShard::new(number, threads, sizes))).collect())
    }

    pub(crate) fn begin(
        &self,
        begun: &RequestStart<'_>,
        conn: &Arc<ConnState>,
    ) -> (ShardTicket, ProgressHandle) {
        let shard = self.0.get(workers::worker_number()).unwrap_or(&self.0[0]);
        RequestShard::begin(shard, begun, conn)
    }

    /// Lists the requests in flight, oldest first, then the ended ones, latest first. A request that stays in
    /// flight is listed exactly once; a request that ends meanwhile, at most once.
    pub fn list(&self) -> Vec<RequestView> {
        let mut all: Vec<ListedRequest> = self.0.iter().flat_map(|shard| shard.list()).collect();
        all.sort_by(ListedRequest::order);
        let now = Instant::now();
        let wall = clock::unix_ms();
        all.iter().map(|seen| seen.view(now, wall)).collect()
    }

    /// Returns the use of the context by model, over the requests that a backend has.
    pub fn context_holdings(&self) -> BTreeMap<ModelName, ContextHoldings> {
        let mut all: BTreeMap<ModelName, ContextHoldings> = BTreeMap::new();
        for entry in self.0.iter().flat_map(|shard| shard.live()).map(|seen| seen.entry) {
            if entry.generates
                && entry.is_on_a_backend()
                && let Some(model) = entry.model.get()
            {
                let holds = all.entry(model.clone()).or_default();
                holds.requests += 1;
                holds.tokens = holds.tokens.saturating_add(entry.held_tokens());
            }
        }
        all
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.0.iter().map(|shard| shard.in_flight()).sum()
    }

    /// Cancels a request: its client gets an error, and its slot is freed as if the client had left. `number`
    /// selects one of several requests with the same id.
    ///
    /// # Errors
    ///
    /// No such request is in flight, or several have the id.
    pub fn cancel(&self, id: &str, number: Option<u64>) -> Result<CancelledRequest, CancelError> {
        let is_meant = |of: &str, its: u64| of == id && number.is_none_or(|number| number == its);
        let mut found = Vec::new();
        for shard in self.0.iter() {
            found.extend(shard.find_places(is_meant).into_iter().map(|place| (shard, place)));
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
            return Err(CancelError::Several { id, numbers });
        }
        let ended = self.0.iter().find_map(|shard| shard.find_outcome(is_meant));
        Err(match ended {
            Some(outcome) => CancelError::Ended { id, outcome: outcome.to_owned() },
            None => CancelError::Unknown { id },
        })
    }
}

#[cfg(test)]
mod tests;
