//! Reading of a backend: its memory, and the work that it has done so far.

use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Work done by one process since its spawn. Counters never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkDone {
    /// Number of answered requests that the model evaluated.
    pub requests: u64,
    /// Evaluated prompt tokens; cached tokens are left out if the answer reports their number.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// Images in requests.
    pub images: u64,
    /// Audio clips in requests.
    #[serde(default)]
    pub audio: u64,
}

impl Add for WorkDone {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
            images: self.images.saturating_add(other.images),
            audio: self.audio.saturating_add(other.audio),
        }
    }
}

impl AddAssign for WorkDone {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for WorkDone {
    type Output = Self;
    /// Saturates at zero: counters of a process never decrease, so a negative difference means a wrong pair.
    fn sub(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(other.requests),
            prompt_tokens: self.prompt_tokens.saturating_sub(other.prompt_tokens),
            output_tokens: self.output_tokens.saturating_sub(other.output_tokens),
            images: self.images.saturating_sub(other.images),
            audio: self.audio.saturating_sub(other.audio),
        }
    }
}

/// Occasion of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleEdge {
    /// A timer expired.
    Tick,
    /// The last request in flight has just ended, so transient buffers are freed and memory is at its lowest.
    Idle,
}

/// Host memory of a backend's process group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    /// `RssAnon`: resident memory not backed by a file, so without the mmap'ed model.
    pub anon: u64,
    /// `VmSwap`: swapped-out memory, which `RssAnon` does not include.
    pub swap: u64,
    /// `VmRSS`, for display only: includes the mmap'ed model, but not swapped-out pages.
    pub rss: u64,
}

impl HostMemory {
    /// Returns the bytes that policies judge: anonymous memory, resident or swapped.
    pub fn charged(self) -> u64 {
        self.anon.saturating_add(self.swap)
    }

    /// Returns the memory of two groups of processes together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            anon: self.anon.saturating_add(other.anon),
            swap: self.swap.saturating_add(other.swap),
            rss: self.rss.saturating_add(other.rss),
        }
    }
}

/// Index of a GPU in this machine's list of GPUs, from 0. Stable while the program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuIndex(pub u32);

/// Source of a VRAM value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VramSource {
    /// Reported by the driver for the processes of the group.
    Process,
    /// Estimate: present use of the GPU minus its use before the spawn, if no other program uses the GPU.
    Estimate,
}

/// VRAM of a backend on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VramReading {
    /// GPU that was read.
    pub gpu: GpuIndex,
    /// Bytes held by the process group.
    pub bytes: u64,
    /// Source of the figure.
    pub source: VramSource,
}

/// Kind of memory of a backend; each kind has its own series of readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// Anonymous host memory, swapped out or not.
    #[default]
    Host,
    /// VRAM on a GPU.
    Vram(GpuIndex),
}

impl MemoryKind {
    pub(crate) fn noun(self) -> String {
        match self {
            Self::Host => "host memory".to_owned(),
            Self::Vram(gpu) => format!("VRAM on GPU {}", gpu.0),
        }
    }
}

impl std::fmt::Display for MemoryKind {
    /// Formats `host`, `vram0`, `vram1`, …: the names in status, metrics, ledger and traces.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Vram(gpu) => write!(f, "vram{}", gpu.0),
        }
    }
}

/// A text that names no kind of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no series of readings: they are `host`, `vram0`, `vram1`, …")]
pub struct MemoryKindError(String);

impl std::str::FromStr for MemoryKind {
    type Err = MemoryKindError;

    fn from_str(text: &str) -> Result<Self, MemoryKindError> {
        if text == "host" {
            return Ok(Self::Host);
        }
        let number = text.strip_prefix("vram").and_then(|number| number.parse().ok());
        number.map(|number| Self::Vram(GpuIndex(number))).ok_or_else(|| MemoryKindError(text.to_owned()))
    }
}

impl Serialize for MemoryKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemoryKind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Reading of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendSample {
    /// Time since the process was spawned.
    pub at: Duration,
    /// Occasion of the reading.
    pub edge: SampleEdge,
    /// Host memory; `None` if it could not be read, never a made-up zero.
    pub host: Option<HostMemory>,
    /// VRAM by GPU; GPUs with unknown values are left out.
    pub vram: Vec<VramReading>,
    /// Bytes in pools of known size that the server keeps on purpose: growth in these pools is no leak.
    pub pools: Vec<(MemoryKind, u64)>,
    /// Number of requests in flight at the time of the reading.
    pub in_flight: u32,
    /// Work done since the spawn.
    pub work: WorkDone,
    /// Prompt tokens of the largest prompt so far.
    pub largest_prompt: u64,
    /// Number of completed reclaims before this reading began.
    #[serde(default, skip_serializing_if = "is_none")]
    pub reclaims: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
const fn is_none(count: &u64) -> bool {
    *count == 0
}

impl BackendSample {
    /// Returns the bytes of one kind of memory as charged by driver and kernel; `None` if unknown.
    pub fn charged(&self, series: MemoryKind) -> Option<u64> {
        match series {
            MemoryKind::Host => self.host.map(HostMemory::charged),
            MemoryKind::Vram(gpu) => self.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes),
        }
    }

    /// Returns the bytes of measured pools in one kind of memory; `None` if not measured.
    pub fn pooled(&self, series: MemoryKind) -> Option<u64> {
        let mut found = self.pools.iter().filter(|(of, _)| *of == series).map(|(_, bytes)| *bytes).peekable();
        found.peek()?;
        Some(found.fold(0, u64::saturating_add))
    }
}
