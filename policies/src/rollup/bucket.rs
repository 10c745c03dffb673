//! What is kept of the readings of a stretch of time.

use serde::{Deserialize, Serialize};

use super::Tier;
use crate::growth::{Law, Verdict};
use crate::units::{exact, whole};

/// One reading, with what was known when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// When, in milliseconds since 1970 (UTC).
    pub at: u64,
    /// Bytes that the process held.
    pub bytes: u64,
    /// What is drawn beside it.
    pub lines: Lines,
}

/// What is drawn beside readings: it changes seldom, so of a stretch of time the last is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lines {
    /// The number of the process; 0 if it has none.
    pub generation: u64,
    /// What the detector says.
    pub verdict: Verdict,
    /// The line that it sees, with its band.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub law: Option<Law>,
    /// What the server is told to keep: from its settled size in bytes to that and all that is declared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<(u64, u64)>,
    /// The soft budget in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft: Option<u64>,
    /// The hard budget in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hard: Option<u64>,
}

/// The readings of a stretch of time: at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket {
    /// When it begins, in seconds since 1970 (UTC): a multiple of `seconds`.
    pub start: u64,
    /// Its length in seconds.
    pub seconds: u64,
    /// Readings in it.
    pub count: u64,
    /// The least of them in bytes.
    pub min: u64,
    /// The largest.
    pub max: u64,
    /// The last one.
    pub last: u64,
    /// Their mean, each counted once.
    pub mean: f64,
    /// When the first was made, in milliseconds since 1970.
    pub first_at: u64,
    /// When the last was made.
    pub last_at: u64,
    /// For how many milliseconds of it a reading says what memory was.
    pub covered: u64,
    /// What was known at the last reading.
    pub lines: Lines,
}

/// A bucket is whole if readings cover this much of it, in percent: what begins in its last seconds does not count.
const WHOLE: u64 = 90;

impl Bucket {
    /// Of its first reading.
    pub fn of(reading: &Reading, tier: Tier) -> Self {
        Self {
            start: tier.start(reading.at / 1000),
            seconds: tier.seconds,
            count: 1,
            min: reading.bytes,
            max: reading.bytes,
            last: reading.bytes,
            mean: exact(reading.bytes),
            first_at: reading.at,
            last_at: reading.at,
            covered: 0,
            lines: reading.lines,
        }
    }

    /// One more reading of the same stretch.
    pub fn add(&mut self, reading: &Reading) {
        let tier = Tier { seconds: self.seconds, slots: 1 };
        self.merge(&Self::of(reading, tier));
    }

    /// Other readings of the same stretch, or of one beside it. The latest one's figure is the last.
    pub fn merge(&mut self, other: &Self) {
        let (own, others) = (exact(self.count), exact(other.count));
        let mean = (self.mean * own + other.mean * others) / (own + others).max(1.0);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        // What rounding does must not lead out of what was read.
        self.mean = mean.clamp(exact(self.min), exact(self.max));
        self.count = self.count.saturating_add(other.count);
        self.first_at = self.first_at.min(other.first_at);
        // Of two that were made in the same moment, the one that came later.
        if other.last_at >= self.last_at {
            (self.last_at, self.last, self.lines) = (other.last_at, other.last, other.lines);
        }
        self.covered = self.covered.saturating_add(other.covered).min(self.seconds.saturating_mul(1000));
    }

    /// Memory is known from one moment to another, both in milliseconds since 1970: what of that is in this stretch counts.
    pub(super) fn cover(&mut self, from: u64, to: u64) {
        let (start, end) = (self.start.saturating_mul(1000), self.end().saturating_mul(1000));
        let inside = to.min(end).saturating_sub(from.max(start));
        self.covered = self.covered.saturating_add(inside).min(end - start);
    }

    /// When it ends, in seconds since 1970.
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.seconds)
    }

    /// Whether readings cover it from its start to its end.
    pub const fn is_whole(&self) -> bool {
        self.covered >= self.seconds.saturating_mul(1000) / 100 * WHOLE
    }

    /// The mean in whole bytes.
    pub const fn middle(&self) -> u64 {
        whole(self.mean)
    }
}
