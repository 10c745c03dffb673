//! Whether a prompt fits into the memory that is left, before it is sent.
//!
//! ```text
//!  samples ──> PromptCost ── bytes per token ──┐
//!  prompt ── tokens ───────────────────────────┼──> admit ──> Fits | Wait | RecycleFirst | Elsewhere | Refuse
//!  replicas ── headroom, in flight, fresh ─────┘
//! ```
//!
//! llama-server takes buffers for the largest prompt so far and keeps them: memory has a high-water mark. So only a prompt
//! larger than all before it can need more, and what it needs is a price per token on top of the mark.

mod cost;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use cost::{Price, PromptCost};

use crate::sample::MemoryKind;
use crate::units::{ByteSize, exact, whole};

/// What is done about a prompt for which there is not enough memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionMode {
    /// Nothing, and nothing is computed.
    #[default]
    Off,
    /// It is told, and the prompt is sent.
    Warn,
    /// It waits, goes elsewhere, or is refused.
    Enforce,
}

impl AdmissionMode {
    /// All of them, for schemas and messages.
    pub const ALL: [Self; 3] = [Self::Off, Self::Warn, Self::Enforce];

    /// The name in the configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Warn => "warn",
            Self::Enforce => "enforce",
        }
    }
}

/// The numbers. Reasons: `defaults.toml`, section `[admission]`.
pub type AdmissionPolicy = crate::defaults::Admission;

/// One memory of an open replica, with what the prompt needs in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Which memory.
    pub series: MemoryKind,
    /// Bytes that the prompt needs here, the replica's largest prompt so far considered.
    pub need: u64,
    /// Bytes left until the limit (a hard budget, or the end of the memory); `None` if not known: then it fits.
    pub left: Option<u64>,
    /// Bytes that come back when the requests in flight have ended.
    pub returns: u64,
    /// Bytes that the prompt needs in a fresh process.
    pub need_fresh: u64,
    /// Bytes that a fresh, settled process has left; `None` if not known.
    pub left_fresh: Option<u64>,
}

/// An open replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replica {
    /// Which one.
    pub replica: u32,
    /// Requests in flight.
    pub in_flight: u32,
    /// Seconds of waiting that a recycle of it costs; `None` if it may not be recycled now.
    pub recycle: Option<Duration>,
    /// Its memories. None at all: nothing is known, so it fits.
    pub rooms: Vec<Room>,
}

/// What becomes of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Admission {
    /// It may be sent to the replica that was chosen for it.
    Fits,
    /// It fits there once requests in flight have ended.
    Wait {
        /// Which memory is short.
        series: MemoryKind,
    },
    /// It fits into a fresh process of this replica.
    RecycleFirst {
        /// Which replica.
        replica: u32,
        /// Which memory is short.
        series: MemoryKind,
    },
    /// It fits into this replica.
    Elsewhere {
        /// Which replica.
        replica: u32,
    },
    /// It fits nowhere.
    Refuse {
        /// Which memory is short.
        series: MemoryKind,
        /// Bytes that it needs there, the reserve included.
        needed: u64,
        /// Bytes that a fresh process would have.
        have: u64,
        /// When to try again; `None` if that is pointless.
        retry_after: Option<Duration>,
    },
}

impl Admission {
    /// What is done about it in this mode: only [`AdmissionMode::Enforce`] keeps a prompt from being sent.
    #[must_use]
    pub fn under(self, mode: AdmissionMode) -> Self {
        if mode == AdmissionMode::Enforce { self } else { Self::Fits }
    }
}

impl std::fmt::Display for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let memory = |series: &MemoryKind| match series {
            MemoryKind::Host => "host memory".to_owned(),
            MemoryKind::Vram(gpu) => format!("VRAM on GPU {}", gpu.0),
        };
        match self {
            Self::Fits => f.write_str("it fits"),
            Self::Wait { series } => {
                write!(f, "there is not enough {} for it until running requests have ended", memory(series))
            }
            Self::RecycleFirst { replica, series } => {
                write!(
                    f,
                    "there is enough {} for it only in a fresh process: replica {replica} is replaced first",
                    memory(series)
                )
            }
            Self::Elsewhere { replica } => write!(f, "it fits into replica {replica}"),
            Self::Refuse { series, needed, have, retry_after } => {
                let (needed, have) = (ByteSize(*needed), ByteSize(*have));
                write!(f, "it needs about {needed} of {}, and there are {have}", memory(series))?;
                match retry_after {
                    Some(_) => Ok(()),
                    None => f.write_str(", even in a fresh process: send a shorter prompt"),
                }
            }
        }
    }
}

/// Decides for a prompt that would go to `chosen`, one of `replicas`.
///
/// The cheapest way that works is taken: another replica costs nothing but a cold cache, waiting costs the rest of the
/// running answers, a recycle the time of a load. What is not known is taken to fit: refusing needs evidence.
pub fn admit(policy: &AdmissionPolicy, chosen: u32, replicas: &[Replica]) -> Admission {
    let reserve = policy.reserve.0;
    let Some(own) = replicas.iter().find(|replica| replica.replica == chosen) else { return Admission::Fits };
    let Some(short) = own.short(reserve, Room::now) else { return Admission::Fits };
    if let Some(other) = replicas.iter().find(|replica| replica.short(reserve, Room::now).is_none()) {
        return Admission::Elsewhere { replica: other.replica };
    }
    if own.in_flight > 0 && own.short(reserve, Room::idle).is_none() {
        return Admission::Wait { series: short.series };
    }
    let fresh = |replica: &&Replica| replica.short(reserve, Room::fresh).is_none();
    let cheapest =
        replicas.iter().filter(fresh).filter_map(|replica| Some((replica.recycle?, replica.replica))).min();
    if let Some((_, replica)) = cheapest {
        return Admission::RecycleFirst { replica, series: short.series };
    }
    let later = if replicas.iter().any(|replica| fresh(&replica)) {
        // A recycle would do and is not allowed at the moment.
        Some(policy.retry_most)
    } else {
        let waiting =
            |replica: &Replica| replica.in_flight > 0 && replica.short(reserve, Room::idle).is_none();
        replicas.iter().any(waiting).then_some(policy.retry_least)
    };
    let (needed, have) = if later.is_some() {
        (short.need, short.left.unwrap_or(0))
    } else {
        let short = own.short(reserve, Room::fresh).unwrap_or(short);
        (short.need_fresh, short.left_fresh.unwrap_or(0))
    };
    let series =
        if later.is_some() { short.series } else { own.short(reserve, Room::fresh).unwrap_or(short).series };
    Admission::Refuse { series, needed: needed.saturating_add(reserve), have, retry_after: later }
}

impl Room {
    fn now(&self) -> (u64, Option<u64>) {
        (self.need, self.left)
    }

    fn idle(&self) -> (u64, Option<u64>) {
        (self.need, self.left.map(|left| left.saturating_add(self.returns)))
    }

    fn fresh(&self) -> (u64, Option<u64>) {
        // Where nothing is known of a fresh process it is no better than this one.
        (self.need_fresh, self.left_fresh.or(self.left))
    }
}

impl Replica {
    /// The memory that is shortest for the prompt, if one is too short.
    fn short(&self, reserve: u64, at: impl Fn(&Room) -> (u64, Option<u64>)) -> Option<&Room> {
        let missing = |room: &Room| {
            let (need, left) = at(room);
            // A prompt that needs nothing new is no danger, however little is left.
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

/// Tokens of a prompt of so many bytes of text, where the backend was not asked; rounded up.
pub fn estimate_tokens(policy: &AdmissionPolicy, bytes: u64) -> u64 {
    whole((exact(bytes) / policy.bytes_per_token.max(0.1)).ceil())
}
