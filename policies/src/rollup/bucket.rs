//! Buckets: summaries of the readings in a stretch of time.

use serde::{Deserialize, Serialize};

use super::RollupTier;
use crate::growth::{GrowthLine, GrowthVerdict};
use crate::units::{as_f64, truncate_to_u64};

/// A reading with its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RollupReading {
    /// Time in milliseconds since 1970 (UTC).
    pub at: u64,
    /// Bytes of the process.
    pub bytes: u64,
    /// Other values at the time of the reading, drawn next to it in charts.
    pub lines: RollupContext,
}

/// Values drawn next to readings. A bucket keeps only the last values, because these change seldom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RollupContext {
    /// Number of the process (generation); 0 without a process.
    pub generation: u64,
    /// Verdict of the leak detector.
    pub verdict: GrowthVerdict,
    /// Line that the leak detector fits to the growth, with its band.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub law: Option<GrowthLine>,
    /// Range of the declared caches in bytes: the settled size, and that size plus all declared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<(u64, u64)>,
    /// Soft budget in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft: Option<u64>,
    /// Hard budget in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hard: Option<u64>,
}

/// Summary of at least one reading in a stretch of time.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadingBucket {
    /// Start in seconds since 1970 (UTC); a multiple of `seconds`.
    pub start: u64,
    /// Length in seconds.
    pub seconds: u64,
    /// Number of readings.
    pub count: u64,
    /// Smallest reading in bytes.
    pub min: u64,
    /// Largest reading in bytes.
    pub max: u64,
    /// Last reading in bytes.
    pub last: u64,
    /// Mean of all readings in bytes.
    pub mean: f64,
    /// Time of the first reading, in milliseconds since 1970.
    pub first_at: u64,
    /// Time of the last reading, in milliseconds since 1970.
    pub last_at: u64,
    /// Milliseconds of the bucket in which a reading counted as the present value.
    pub covered: u64,
    /// Values drawn next to the last reading.
    pub lines: RollupContext,
}

/// Percent of a bucket's time that readings must cover for the bucket to be complete.
const WHOLE_PERCENT: u64 = 90;

impl ReadingBucket {
    /// Creates a bucket from its first reading.
    pub fn from_reading(reading: &RollupReading, tier: RollupTier) -> Self {
        Self {
            start: tier.start(reading.at / 1000),
            seconds: tier.seconds,
            count: 1,
            min: reading.bytes,
            max: reading.bytes,
            last: reading.bytes,
            mean: as_f64(reading.bytes),
            first_at: reading.at,
            last_at: reading.at,
            covered: 0,
            lines: reading.lines,
        }
    }

    /// Adds a reading of the same stretch.
    pub fn add(&mut self, reading: &RollupReading) {
        let tier = RollupTier { seconds: self.seconds, slots: 1 };
        self.merge(&Self::from_reading(reading, tier));
    }

    /// Merges a bucket of the same or a neighbouring stretch.
    pub fn merge(&mut self, other: &Self) {
        let (own, others) = (as_f64(self.count), as_f64(other.count));
        let mean = (self.mean * own + other.mean * others) / (own + others).max(1.0);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        // Rounding must not move the mean out of the range of the readings.
        self.mean = mean.clamp(as_f64(self.min), as_f64(self.max));
        self.count = self.count.saturating_add(other.count);
        self.first_at = self.first_at.min(other.first_at);
        // If two readings have the same time, the one added later becomes the last reading.
        if other.last_at >= self.last_at {
            (self.last_at, self.last, self.lines) = (other.last_at, other.last, other.lines);
        }
        self.covered = self.covered.saturating_add(other.covered).min(self.seconds.saturating_mul(1000));
    }

    /// Counts as covered the part of this bucket between two times, in milliseconds since 1970.
    pub(super) fn cover(&mut self, from: u64, to: u64) {
        let (start, end) = (self.start.saturating_mul(1000), self.end().saturating_mul(1000));
        let inside = to.min(end).saturating_sub(from.max(start));
        self.covered = self.covered.saturating_add(inside).min(end - start);
    }

    /// Returns the end of the bucket in seconds since 1970.
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.seconds)
    }

    /// Returns true if readings cover the bucket's time almost completely.
    pub const fn is_whole(&self) -> bool {
        self.covered >= self.seconds.saturating_mul(1000) / 100 * WHOLE_PERCENT
    }

    /// Returns the mean in whole bytes.
    pub const fn mean_bytes(&self) -> u64 {
        truncate_to_u64(self.mean)
    }
}
