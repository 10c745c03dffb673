//! Compute backends of a binary.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Compute backend of a binary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeBackend {
    /// CPU only.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs, through ROCm.
    Hip,
    /// GPUs with a Vulkan driver.
    Vulkan,
    /// Apple GPUs.
    Metal,
}

impl ComputeBackend {
    /// All backends.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Cuda, Self::Hip, Self::Vulkan, Self::Metal];

    /// The name in options and in patch sets.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
        }
    }

    /// Returns true for all backends except the CPU; they need a toolkit besides the C and C++ compilers.
    pub const fn has_gpu(self) -> bool {
        !matches!(self, Self::Cpu)
    }
}

impl fmt::Display for ComputeBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
