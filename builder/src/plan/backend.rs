//! What a binary computes on.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What the binary computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The CPU alone.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs, through ROCm.
    Hip,
    /// GPUs with a Vulkan driver.
    Vulkan,
    /// Apple's GPUs.
    Metal,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Cuda, Self::Hip, Self::Vulkan, Self::Metal];

    /// As it is typed, and as patch sets call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
        }
    }

    /// Whether it needs more than compilers for C and C++.
    pub const fn has_gpu(self) -> bool {
        !matches!(self, Self::Cpu)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
