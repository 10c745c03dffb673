//! What is known about a backend at one moment: memory, and the work that paid for it.

use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Work done by one generation since it was spawned. Counters only grow; `later - earlier` is a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Requests answered, of any kind that the model evaluates.
    pub requests: u64,
    /// Prompt tokens evaluated (cached ones are not counted where the answer tells them apart).
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Images in requests.
    pub images: u64,
    /// Audio clips in requests.
    #[serde(default)]
    pub audio: u64,
}

impl Add for Work {
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

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Work {
    type Output = Self;
    /// Never below zero: counters of one generation only grow, so a negative difference is a mixed-up pair.
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

/// Why a sample was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Edge {
    /// A timer.
    Tick,
    /// The last request in flight just ended: transient buffers are gone, so this is the honest floor.
    Idle,
}

/// Host memory of a backend's process group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    /// `RssAnon`: resident memory that no file backs. The mmap'ed model is not in it.
    pub anon: u64,
    /// `VmSwap`: what the kernel has moved out, which `RssAnon` no longer shows.
    pub swap: u64,
    /// `VmRSS`, for display only: it counts the mmap'ed model and misses swapped pages.
    pub rss: u64,
}

impl HostMemory {
    /// The series that policies judge: anonymous memory, wherever it is.
    pub fn charged(self) -> u64 {
        self.anon.saturating_add(self.swap)
    }
}

/// A GPU's number in the sensors' list of this machine, from 0. It stays the same while the program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuIndex(pub u32);

/// How a figure of VRAM came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VramSource {
    /// The driver told it for the processes of the group.
    Process,
    /// The device's use now less its use before the process was made: an estimate, made only where nobody else is on
    /// the device.
    Estimate,
}

/// VRAM of a backend on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vram {
    /// Which GPU.
    pub gpu: GpuIndex,
    /// Bytes that the process group holds there.
    pub bytes: u64,
    /// Where the figure is from.
    pub source: VramSource,
}

/// What a series of readings is about: one memory of one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryKind {
    /// Anonymous host memory, swapped out or not.
    Host,
    /// VRAM on a GPU.
    Vram(GpuIndex),
}

impl std::fmt::Display for MemoryKind {
    /// `host`, `vram0`, `vram1`, …: the names in status, metrics, ledger and traces.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Vram(gpu) => write!(f, "vram{}", gpu.0),
        }
    }
}

/// `{0}` is no series.
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

/// One reading of one generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Time since the generation was spawned.
    pub at: Duration,
    /// Why now.
    pub edge: Edge,
    /// Host memory; `None` when it could not be read, never a made-up zero.
    pub host: Option<HostMemory>,
    /// VRAM, GPU by GPU; a GPU whose figure is not known is not in it.
    pub vram: Vec<Vram>,
    /// Bytes in pools that the server keeps on purpose, where they were measured (a memory report, its log): growth in
    /// them is no leak.
    pub pools: Vec<(MemoryKind, u64)>,
    /// Requests in flight at the moment of the reading.
    pub in_flight: u32,
    /// Work done since the spawn.
    pub work: Work,
    /// Prompt tokens of the largest prompt so far.
    pub largest_prompt: u64,
    /// How often memory was given back on demand before this reading began.
    #[serde(default, skip_serializing_if = "is_none")]
    pub reclaims: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
const fn is_none(count: &u64) -> bool {
    *count == 0
}

impl Sample {
    /// The figure of one series in bytes, as the driver and the kernel charge it; `None` if it is not known.
    pub fn charged(&self, series: MemoryKind) -> Option<u64> {
        match series {
            MemoryKind::Host => self.host.map(HostMemory::charged),
            MemoryKind::Vram(gpu) => self.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes),
        }
    }

    /// The measured pools of one series in bytes; `None` if nothing measured them.
    pub fn pooled(&self, series: MemoryKind) -> Option<u64> {
        let mut found = self.pools.iter().filter(|(of, _)| *of == series).map(|(_, bytes)| *bytes).peekable();
        found.peek()?;
        Some(found.fold(0, u64::saturating_add))
    }
}
