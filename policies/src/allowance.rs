//! What a server is told to keep: caches that fill up by design, so that growth inside them is no leak.
//!
//! ```text
//!  arguments, environment, build ──> declared ─┐
//!  lines of its log ───────────────> learnt ───┴──> bytes, measured, words
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a line of the log told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Learned {
    /// The prompt cache holds so many bytes.
    CacheState {
        /// Bytes.
        bytes: u64,
    },
    /// The prompt cache may hold so many bytes; `None` for any number.
    CacheLimit {
        /// Bytes.
        bytes: Option<u64>,
    },
    /// The prompt cache is off.
    CacheOff,
    /// One checkpoint of a context takes so many bytes, and a slot may have so many.
    Checkpoint {
        /// Bytes.
        bytes: u64,
        /// Checkpoints per slot.
        of: u32,
    },
    /// It has so many slots.
    Slots {
        /// Slots.
        slots: u32,
    },
}

/// What one server is told to keep in host memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Allowance {}

impl Allowance {
    /// Nothing is kept.
    pub const NONE: Self = Self {};

    /// From what it is started with. `env` holds the variables that the process gets; `build` is llama.cpp's build number,
    /// if known. Slots are told by [`Allowance::slots`] or the log.
    pub fn declared(args: &[String], env: &BTreeMap<String, String>, build: Option<u32>) -> Self {
        let _ = (args, env, build);
        Self::default()
    }

    /// It has so many slots (`/props`).
    pub fn slots(&mut self, slots: u32) {
        let _ = slots;
    }

    /// On a machine with so much memory: what has no bound of its own is reckoned with half of what is available.
    pub fn available(&mut self, bytes: u64) {
        let _ = bytes;
    }

    /// Takes a line of the log in. `None` if it says nothing about this.
    pub fn learn(&mut self, line: &str) -> Option<Learned> {
        let _ = line;
        None
    }

    /// Bytes of host memory that it may keep.
    pub fn bytes(&self) -> u64 {
        0
    }

    /// Bytes that it keeps now, where its log tells: the host's part of [`crate::sample::Sample::pools`].
    pub fn measured(&self) -> Option<u64> {
        None
    }

    /// Where each number comes from, one sentence each, for status.
    pub fn words(&self) -> Vec<String> {
        Vec::new()
    }
}
