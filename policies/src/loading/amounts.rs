//! Amounts of memory: host memory, and that of each GPU.

use crate::sample::{GpuIndex, MemoryKind};

/// Bytes of host memory and of each GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryAmounts {
    /// Bytes of host memory.
    pub host: u64,
    /// Bytes of each GPU; unlisted GPUs have none.
    pub gpus: Vec<u64>,
}

impl MemoryAmounts {
    /// Returns no memory.
    pub const fn none() -> Self {
        Self { host: 0, gpus: Vec::new() }
    }

    /// Returns unlimited host memory, but no GPU.
    pub const fn everything() -> Self {
        Self { host: u64::MAX, gpus: Vec::new() }
    }

    /// Returns the bytes of one memory.
    pub fn bytes_of(&self, memory: MemoryKind) -> u64 {
        match memory {
            MemoryKind::Host => self.host,
            MemoryKind::Vram(gpu) => self.gpus.get(gpu_position(gpu)).copied().unwrap_or(0),
        }
    }

    /// Adds bytes to one memory.
    pub fn add(&mut self, memory: MemoryKind, bytes: u64) {
        let of = match memory {
            MemoryKind::Host => &mut self.host,
            MemoryKind::Vram(gpu) => {
                let index = gpu_position(gpu);
                self.gpus.resize(self.gpus.len().max(index + 1), 0);
                &mut self.gpus[index]
            }
        };
        *of = of.saturating_add(bytes);
    }

    fn combine(&self, other: &Self, of: impl Fn(u64, u64) -> u64) -> Self {
        let count = self.gpus.len().max(other.gpus.len());
        let at = |gpus: &[u64], index: usize| gpus.get(index).copied().unwrap_or(0);
        Self {
            host: of(self.host, other.host),
            gpus: (0..count).map(|index| of(at(&self.gpus, index), at(&other.gpus, index))).collect(),
        }
    }

    pub(super) fn plus(&self, other: &Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    pub(super) fn minus(&self, other: &Self) -> Self {
        self.combine(other, u64::saturating_sub)
    }

    pub(super) fn divided_by(&self, of: u64) -> Self {
        Self { host: self.host / of, gpus: self.gpus.iter().map(|bytes| bytes / of).collect() }
    }

    pub(super) fn max(&self, other: &Self) -> Self {
        self.combine(other, u64::max)
    }

    /// Returns two flags: the host amount, or the largest GPU amount, exceeds that of `left`.
    pub fn exceeds(&self, left: &Self) -> (bool, bool) {
        (self.host > left.host, self.gpus.iter().max() > left.gpus.iter().max())
    }

    /// Returns true if any amount of a requested kind (host, GPUs) is above zero.
    pub(super) fn is_any_of(&self, (host, gpus): (bool, bool)) -> bool {
        host && self.host > 0 || gpus && self.gpus.iter().any(|bytes| *bytes > 0)
    }

    pub(super) fn min(&self, other: &Self) -> Self {
        self.combine(other, u64::min)
    }

    pub(super) fn is_within(&self, other: &Self) -> bool {
        *self == self.min(other)
    }
}

fn gpu_position(gpu: GpuIndex) -> usize {
    usize::try_from(gpu.0).unwrap_or(usize::MAX)
}
