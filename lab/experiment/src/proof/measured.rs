//! Measurements of one process, and the rulings on them.

use serde::{Deserialize, Serialize};

use super::answers::BuildReply;
use warden_policies::sample::MemoryKind;

/// Settings of a proof. `defaults.toml`, section `[proof]`, gives the reasons.
pub type ProofPolicy = warden_policies::defaults::Proof;

/// Metric of a process; a larger value is worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuildMetric {
    /// Seconds from the spawn until ready.
    Start,
    /// Seconds per prompt token.
    Prefill,
    /// Seconds per generated token.
    Decode,
    /// Seconds from sending a request to the first token of its answer.
    FirstToken,
    /// Bytes of memory when the process is ready.
    AtReady(MemoryKind),
    /// Bytes of memory after the longest prompt.
    AtLongest(MemoryKind),
}

/// Measurements of one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BuildVisit {
    /// Measured metrics, each once.
    pub measured: Vec<(BuildMetric, f64)>,
    /// Answers; empty if no questions were asked.
    pub replies: Vec<BuildReply>,
}

impl BuildVisit {
    pub(crate) fn value_of(&self, metric: BuildMetric) -> Option<f64> {
        let own = self.measured.iter().find(|(own, _)| *own == metric);
        own.map(|(_, value)| *value).filter(|value| value.is_finite() && *value > 0.0)
    }
}

/// Ruling on one aspect of the new build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProofRuling {
    /// The new build is shown to be better.
    Better,
    /// The new build is shown to be equal, or not worse.
    Same,
    /// The measurements do not suffice for a ruling.
    Unknown,
    /// The new build is shown to be worse.
    Worse,
}

impl ProofRuling {
    /// Returns the word used in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Same => "same",
            Self::Unknown => "unknown",
            Self::Worse => "worse",
        }
    }
}
