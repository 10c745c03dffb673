//! What is known about a backend at one moment: memory, and the work that paid for it.

use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::names::GenerationId;

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
}

impl Add for Work {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
            images: self.images.saturating_add(other.images),
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

/// One reading of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Time since the generation was spawned.
    pub at: Duration,
    /// Which child.
    pub generation: GenerationId,
    /// Why now.
    pub edge: Edge,
    /// Host memory; `None` when it could not be read, never a made-up zero.
    pub host: Option<HostMemory>,
    /// Requests in flight at the moment of the reading.
    pub in_flight: u32,
    /// Work done since the spawn.
    pub work: Work,
}
