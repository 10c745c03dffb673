//! Memory needs measured by an experiment, for later processes of the same build, model and arguments.

use serde::{Deserialize, Serialize};

use crate::admission::PromptPrice;
use crate::sample::MemoryKind;

/// Memory needs that an experiment has measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExperimentNeeds {
    /// Cost of a prompt token in each kind of memory.
    #[serde(default)]
    pub prices: Vec<PromptPrice>,
    /// Most bytes that a process without a leak holds in each kind of memory.
    #[serde(default)]
    pub worst: Vec<(MemoryKind, u64)>,
}

impl ExperimentNeeds {
    /// Returns true if the experiment measured nothing.
    pub fn is_empty(&self) -> bool {
        self.prices.is_empty() && self.worst.is_empty()
    }

    /// Returns the most bytes in one kind of memory; `None` if not measured.
    pub fn worst(&self, series: MemoryKind) -> Option<u64> {
        self.worst.iter().find(|(of, _)| *of == series).map(|(_, bytes)| *bytes)
    }
}
