//! Memory needs that an experiment has measured, for later processes of the same build, model and arguments.

use serde::{Deserialize, Serialize};

use crate::admission::PromptPrice;
use crate::sample::MemoryKind;

/// Memory needs that an experiment has measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExperimentNeeds {
    /// The cost of a prompt token, memory by memory.
    #[serde(default)]
    pub prices: Vec<PromptPrice>,
    /// The most bytes that a process without a leak holds, memory by memory.
    #[serde(default)]
    pub worst: Vec<(MemoryKind, u64)>,
}

impl ExperimentNeeds {
    /// Whether the experiment measured nothing.
    pub fn is_empty(&self) -> bool {
        self.prices.is_empty() && self.worst.is_empty()
    }

    /// The most bytes of one memory; `None` if that memory was not measured.
    pub fn worst(&self, series: MemoryKind) -> Option<u64> {
        self.worst.iter().find(|(of, _)| *of == series).map(|(_, bytes)| *bytes)
    }
}
