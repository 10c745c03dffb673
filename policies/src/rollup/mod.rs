//! Compact history of memory: readings of one kind of memory go in, buckets of several widths come out.
//!
//! ```text
//!  readings   . .. .  .   . .  ..  .      at any time
//!  tier 0    |----|----|----|----|----|   seconds, for hours
//!  tier 1    |---------|---------|----    minutes, for a day
//!  …                                      hours, for a month
//! ```
//!
//! **A returned bucket contains only readings added since the last output**; the caller merges it with the
//! stored bucket of the same stretch of time. So a clock that is set back, a restart and a repeated stretch
//! all lead to the same stored bucket, in any order.

mod bucket;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use bucket::{ReadingBucket, RollupContext, RollupReading};

/// Time kept in the fourth (coarsest) tier: the longest month and the day before it.
const FOURTH_KEPT_TIME: Duration = Duration::from_secs(32 * 24 * 3600);
/// Time kept in the third tier: includes the same weekday of the previous week.
const THIRD_KEPT_TIME: Duration = Duration::from_secs(8 * 24 * 3600);
/// Time kept in the second tier: includes the same time yesterday, with a margin.
const SECOND_KEPT_TIME: Duration = Duration::from_secs(26 * 3600);
/// Time kept in the first (finest) tier: the present hour, and the previous hour for comparison.
const FIRST_KEPT_TIME: Duration = Duration::from_secs(2 * 3600);

/// Settings of the history. `defaults.toml`, section `[series]`, gives the reasons.
pub type SeriesPolicy = crate::defaults::Series;

/// A bucket width and the number of kept buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RollupTier {
    /// Seconds per bucket, 1 or more.
    pub seconds: u64,
    /// Number of kept buckets, 1 or more.
    pub slots: u64,
}

impl RollupTier {
    /// Creates a tier; a width below a second counts as one second, and at least one bucket is kept.
    pub fn new(width: Duration, time: Duration) -> Self {
        let seconds = width.as_secs().max(1);
        Self { seconds, slots: (time.as_secs() / seconds).max(1) }
    }

    /// Returns the kept time in seconds.
    pub const fn span(self) -> u64 {
        self.seconds * self.slots
    }

    /// Returns the start of the bucket that contains this second.
    pub const fn start(self, second: u64) -> u64 {
        second - second % self.seconds
    }

    /// Returns the position of a bucket in the ring of kept buckets.
    pub const fn slot(self, start: u64) -> u64 {
        (start / self.seconds) % self.slots
    }
}

/// Returns the tiers of a policy, finest first.
pub fn tiers(policy: &SeriesPolicy) -> [RollupTier; 4] {
    [
        RollupTier::new(policy.first, FIRST_KEPT_TIME),
        RollupTier::new(policy.second, SECOND_KEPT_TIME),
        RollupTier::new(policy.third, THIRD_KEPT_TIME),
        RollupTier::new(policy.fourth, FOURTH_KEPT_TIME),
    ]
}

/// Collects readings of one kind of memory into buckets.
#[derive(Clone, Debug)]
pub struct SeriesRollup {
    tiers: Vec<RollupTier>,
    fresh: u64,
    open: Vec<Option<ReadingBucket>>,
    before: Option<u64>,
}

impl SeriesRollup {
    /// Creates an empty collector. `fresh`: time for which a reading counts as the present value.
    pub fn new(tiers: &[RollupTier], fresh: Duration) -> Self {
        let fresh = u64::try_from(fresh.as_millis()).unwrap_or(u64::MAX);
        Self { tiers: tiers.to_vec(), fresh, open: vec![None; tiers.len()], before: None }
    }

    /// Adds a reading; returns the completed buckets, each with its tier's index. A reading from before the
    /// last one (the clock was set back) keeps its own time.
    pub fn add(&mut self, reading: &RollupReading) -> Vec<(usize, ReadingBucket)> {
        let since = self
            .before
            .filter(|before| reading.at.checked_sub(*before).is_some_and(|passed| passed <= self.fresh));
        self.before = Some(reading.at);
        let mut done = Vec::new();
        for (number, (tier, open)) in self.tiers.iter().zip(&mut self.open).enumerate() {
            let start = tier.start(reading.at / 1000);
            if let (Some(bucket), Some(since)) = (open.as_mut(), since) {
                bucket.cover(since, reading.at);
            }
            if let Some(bucket) = open.as_mut().filter(|bucket| bucket.start == start) {
                bucket.add(reading);
                continue;
            }
            let mut next = ReadingBucket::from_reading(reading, *tier);
            if let Some(since) = since {
                next.cover(since, reading.at);
            }
            done.extend(open.replace(next).map(|bucket| (number, bucket)));
        }
        done
    }

    /// Returns all incomplete buckets, and starts new ones.
    pub fn close(&mut self) -> Vec<(usize, ReadingBucket)> {
        self.open.iter_mut().enumerate().filter_map(|(number, open)| Some((number, open.take()?))).collect()
    }

    /// Returns the incomplete bucket of a tier.
    pub fn open(&self, tier: usize) -> Option<&ReadingBucket> {
        self.open.get(tier)?.as_ref()
    }
}

/// Rebuilds the buckets that a coarse tier lacks because the writing process was killed. `fine`: buckets of
/// the finest tier; `newest`: last reading in the coarse tier, in milliseconds since 1970.
pub fn rebuild_missing(tier: RollupTier, newest: u64, fine: &[ReadingBucket]) -> Vec<ReadingBucket> {
    let mut all: Vec<ReadingBucket> = Vec::new();
    for bucket in fine.iter().filter(|bucket| bucket.first_at > newest) {
        let start = tier.start(bucket.start);
        let coarse = ReadingBucket { start, seconds: tier.seconds, ..bucket.clone() };
        match all.iter_mut().find(|known| known.start == start) {
            Some(known) => known.merge(&coarse),
            None => all.push(coarse),
        }
    }
    all.sort_by_key(|bucket| bucket.start);
    all
}

/// A requested time range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointRange {
    /// First second, since 1970.
    pub from: u64,
    /// End in seconds since 1970, exclusive.
    pub to: u64,
    /// Most points, 2 or more.
    pub points: usize,
}

impl PointRange {
    /// Returns the length of the range in seconds, at least one.
    pub fn seconds(self) -> u64 {
        self.to.saturating_sub(self.from).max(1)
    }
}

/// Returns the index of the tier to use: the finest tier that goes back far enough, else the last.
pub fn tier_for(tiers: &[RollupTier], range: PointRange, now: u64) -> usize {
    let back = now.saturating_sub(range.from);
    // Add one bucket: the first may begin before the range, and the oldest is about to be overwritten.
    let reaches = |tier: &RollupTier| tier.span() >= back.saturating_add(tier.seconds);
    tiers.iter().position(reaches).unwrap_or(tiers.len().saturating_sub(1))
}

/// Returns true if a bucket overlaps the range.
pub const fn in_range(bucket: &ReadingBucket, range: PointRange) -> bool {
    bucket.start < range.to && bucket.end() > range.from
}

/// Merges sorted buckets of equal width until at most `points` (at least two) remain. Groups begin at
/// multiples of their width, so any range may contain the boundary of two groups.
pub fn reduce_points(buckets: &[ReadingBucket], points: usize) -> Vec<ReadingBucket> {
    let points = points.max(2);
    let Some(width) = buckets.first().map(|bucket| bucket.seconds.max(1)) else { return Vec::new() };
    if buckets.len() <= points {
        return buckets.to_vec();
    }
    let span = buckets.iter().map(|bucket| bucket.start / width);
    let (first, last) = (span.clone().min().unwrap_or(0), span.max().unwrap_or(0));
    // `points` less one, because the first and the last group may both be partial.
    let groups_most = u64::try_from(points).unwrap_or(u64::MAX).saturating_sub(1).max(1);
    let mut step = (last - first + 1).div_ceil(groups_most).max(1);
    loop {
        let groups = group_buckets(buckets, width, step);
        if groups.len() <= points {
            return groups;
        }
        step += step.div_ceil(8);
    }
}

fn group_buckets(buckets: &[ReadingBucket], width: u64, step: u64) -> Vec<ReadingBucket> {
    let seconds = width.saturating_mul(step);
    let mut groups: Vec<ReadingBucket> = Vec::new();
    for bucket in buckets {
        let start = bucket.start - bucket.start % seconds;
        match groups.last_mut().filter(|group| group.start == start) {
            Some(group) => group.merge(bucket),
            None => groups.push(ReadingBucket { start, seconds, ..bucket.clone() }),
        }
    }
    groups
}
