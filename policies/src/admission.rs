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

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sample::{Sample, Series};

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

/// A learnt price.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Price {
    /// Which memory.
    pub series: Series,
    /// Bytes for each prompt token beyond the largest prompt so far.
    pub bytes_per_token: f64,
    /// Larger prompts that it was learnt from.
    pub evidence: usize,
}

/// Learns bytes per prompt token. It may outlive a generation: the price is the model's, the high-water mark is not.
#[derive(Clone, Debug)]
pub struct PromptCost {
    policy: AdmissionPolicy,
}

impl PromptCost {
    /// Knows nothing yet.
    pub fn new(policy: &AdmissionPolicy) -> Self {
        Self { policy: policy.clone() }
    }

    /// A new generation begins: its memory and its largest prompt start afresh, what was learnt stays.
    pub fn respawned(&mut self) {}

    /// Takes a reading in.
    pub fn observe(&mut self, sample: &Sample) {
        let _ = (sample, &self.policy);
    }

    /// A price from elsewhere: measured by a diagnosis, or of an earlier run of the same build, model and flags.
    pub fn told(&mut self, price: Price) {
        let _ = price;
    }

    /// The price of one memory; `None` while there is not enough evidence.
    pub fn price(&self, series: Series) -> Option<Price> {
        let _ = series;
        None
    }

    /// Bytes in each priced memory that a prompt of `tokens` needs, where the largest so far had `largest`.
    pub fn need(&self, tokens: u64, largest: u64) -> Vec<(Series, u64)> {
        let _ = (tokens, largest);
        Vec::new()
    }
}

/// One memory of an open replica, with what the prompt needs in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Which memory.
    pub series: Series,
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
        series: Series,
    },
    /// It fits into a fresh process of this replica.
    RecycleFirst {
        /// Which replica.
        replica: u32,
        /// Which memory is short.
        series: Series,
    },
    /// It fits into this replica.
    Elsewhere {
        /// Which replica.
        replica: u32,
    },
    /// It fits nowhere.
    Refuse {
        /// Which memory is short.
        series: Series,
        /// Bytes that it needs there, the reserve included.
        needed: u64,
        /// Bytes that a fresh process would have.
        have: u64,
        /// When to try again; `None` if that is pointless.
        retry_after: Option<Duration>,
    },
}

/// Decides for a prompt that would go to `chosen`, one of `replicas`.
pub fn admit(policy: &AdmissionPolicy, chosen: u32, replicas: &[Replica]) -> Admission {
    let _ = (policy, chosen, replicas);
    Admission::Fits
}

/// Tokens of a prompt of so many bytes of text, where the backend was not asked.
pub fn estimate_tokens(policy: &AdmissionPolicy, bytes: u64) -> u64 {
    let _ = policy;
    bytes
}
