//! Chooses the tier for a time range, and reduces its buckets to the requested number of points.

use super::{ReadingBucket, RollupTier};

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

/// Merges sorted buckets of equal width until at most `points` remain, but at least two are allowed: groups
/// begin at multiples of their width, so any range may contain the boundary of two groups.
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
