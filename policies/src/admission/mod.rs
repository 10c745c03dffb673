//! Decides if a prompt fits into the remaining memory, before it is sent.
//!
//! ```text
//!  samples ──> PromptCost ── bytes per token ──┐
//!  prompt ── tokens ───────────────────────────┼──> admit ──> Fits | Wait | RecycleFirst | Elsewhere | Refuse
//!  replicas ── headroom, in flight, fresh ─────┘
//! ```
//!
//! llama-server keeps its buffers for the largest prompt so far. Only a larger prompt needs more memory: a
//! price for each token beyond that size.

mod cost;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use cost::{PromptCost, PromptPrice};

pub use crate::modes::AdmissionMode;
use crate::sample::MemoryKind;
use crate::units::{ByteSize, as_f64, truncate_to_u64};

/// Settings of admission. `defaults.toml`, section `[admission]`, gives the reasons.
pub type AdmissionPolicy = crate::defaults::Admission;

/// Room in one kind of memory of a replica, and the prompt's need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRoom {
    /// Kind of memory.
    pub series: MemoryKind,
    /// Bytes that the prompt needs, given the replica's largest prompt so far.
    pub need: u64,
    /// Bytes left to the limit (a hard budget, or all memory); `None` if unknown: then the prompt fits.
    pub left: Option<u64>,
    /// Bytes that become free when the requests in flight have ended.
    pub returns: u64,
    /// Bytes that the prompt needs in a fresh process.
    pub need_fresh: u64,
    /// Bytes left in a fresh, settled process; `None` if unknown.
    pub left_fresh: Option<u64>,
}

/// State of an open replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaRoom {
    /// Number of the replica.
    pub replica: u32,
    /// Requests in flight.
    pub in_flight: u32,
    /// Time that the prompt would wait for a recycle; `None` if the replica must not be recycled now.
    pub recycle: Option<Duration>,
    /// Memories of the replica; if empty, nothing is known and the prompt fits.
    pub rooms: Vec<MemoryRoom>,
}

/// Decision on a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum AdmitDecision {
    /// The prompt may be sent to the chosen replica.
    Fits,
    /// The prompt fits into the chosen replica once requests in flight have ended.
    Wait {
        /// Memory that is short.
        series: MemoryKind,
    },
    /// The prompt fits into a fresh process of this replica.
    RecycleFirst {
        /// Replica to recycle.
        replica: u32,
        /// Memory that is short.
        series: MemoryKind,
    },
    /// The prompt fits into another replica.
    Elsewhere {
        /// Replica to use.
        replica: u32,
    },
    /// The prompt fits nowhere.
    Refuse {
        /// Memory that is short.
        series: MemoryKind,
        /// Bytes needed in that memory, including the reserve.
        needed: u64,
        /// Bytes that a fresh process would have left.
        have: u64,
        /// Time after which the client may retry; `None` if a retry is pointless.
        retry_after: Option<Duration>,
    },
}

impl std::fmt::Display for AdmitDecision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Fits => f.write_str("it fits"),
            Self::Wait { series } => {
                write!(f, "there is not enough {} for it until running requests have ended", series.noun())
            }
            Self::RecycleFirst { replica, series } => {
                write!(
                    f,
                    "there is enough {} for it only in a fresh process: replica {replica} is replaced first",
                    series.noun()
                )
            }
            Self::Elsewhere { replica } => write!(f, "it fits into replica {replica}"),
            Self::Refuse { series, needed, have, retry_after } => {
                let (needed, have) = (ByteSize(*needed), ByteSize(*have));
                write!(f, "it needs about {needed} of {}, and there are {have}", series.noun())?;
                match retry_after {
                    Some(_) => Ok(()),
                    None => f.write_str(", even in a fresh process: send a shorter prompt"),
                }
            }
        }
    }
}

/// Decides on a prompt for the replica numbered `chosen`, which is among `replicas`.
///
/// Prefers the cheapest way that works: another replica costs a cold cache, a wait costs the rest of the
/// running answers, a recycle costs a load. Unknown memory counts as sufficient: a refusal needs evidence.
pub fn admit(policy: &AdmissionPolicy, chosen: u32, replicas: &[ReplicaRoom]) -> AdmitDecision {
    let reserve = policy.reserve.0;
    let Some(own) = replicas.iter().find(|replica| replica.replica == chosen) else {
        return AdmitDecision::Fits;
    };
    let Some(short) = own.shortest_memory(reserve, MemoryRoom::now) else { return AdmitDecision::Fits };
    if let Some(other) =
        replicas.iter().find(|replica| replica.shortest_memory(reserve, MemoryRoom::now).is_none())
    {
        return AdmitDecision::Elsewhere { replica: other.replica };
    }
    if own.in_flight > 0 && own.shortest_memory(reserve, MemoryRoom::idle).is_none() {
        return AdmitDecision::Wait { series: short.series };
    }
    let fresh = |replica: &&ReplicaRoom| replica.shortest_memory(reserve, MemoryRoom::fresh).is_none();
    let cheapest =
        replicas.iter().filter(fresh).filter_map(|replica| Some((replica.recycle?, replica.replica))).min();
    if let Some((_, replica)) = cheapest {
        return AdmitDecision::RecycleFirst { replica, series: short.series };
    }
    let later = if replicas.iter().any(|replica| fresh(&replica)) {
        // A recycle would help, but is not allowed now.
        Some(policy.retry_most)
    } else {
        let waiting = |replica: &ReplicaRoom| {
            replica.in_flight > 0 && replica.shortest_memory(reserve, MemoryRoom::idle).is_none()
        };
        replicas.iter().any(waiting).then_some(policy.retry_least)
    };
    let (series, needed, have) = if later.is_some() {
        (short.series, short.need, short.left.unwrap_or(0))
    } else {
        let short = own.shortest_memory(reserve, MemoryRoom::fresh).unwrap_or(short);
        (short.series, short.need_fresh, short.left_fresh.unwrap_or(0))
    };
    AdmitDecision::Refuse { series, needed: needed.saturating_add(reserve), have, retry_after: later }
}

impl MemoryRoom {
    fn now(&self) -> (u64, Option<u64>) {
        (self.need, self.left)
    }

    fn idle(&self) -> (u64, Option<u64>) {
        (self.need, self.left.map(|left| left.saturating_add(self.returns)))
    }

    fn fresh(&self) -> (u64, Option<u64>) {
        // If the memory left in a fresh process is unknown, assume as much as in this process.
        (self.need_fresh, self.left_fresh.or(self.left))
    }
}

impl ReplicaRoom {
    fn shortest_memory(
        &self,
        reserve: u64,
        at: impl Fn(&MemoryRoom) -> (u64, Option<u64>),
    ) -> Option<&MemoryRoom> {
        let missing = |room: &MemoryRoom| {
            let (need, left) = at(room);
            // A prompt that needs no new memory is safe at any fill level.
            let left = left.filter(|_| need > 0)?;
            need.saturating_add(reserve).checked_sub(left).filter(|missing| *missing > 0)
        };
        self.rooms
            .iter()
            .filter_map(|room| Some((missing(room)?, room)))
            .max_by_key(|(missing, _)| *missing)
            .map(|(_, room)| room)
    }
}

/// Estimates the tokens of a text from its bytes, rounded up, for a prompt that the backend has not counted.
pub fn estimate_tokens(policy: &AdmissionPolicy, bytes: u64) -> u64 {
    truncate_to_u64((as_f64(bytes) / policy.bytes_per_token.max(0.1)).ceil())
}
