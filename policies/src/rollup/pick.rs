//! Which tier answers a question, and how its buckets become no more points than were asked for.

use super::{Bucket, Tier};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// From this second on, since 1970.
    pub from: u64,
    /// Up to this one.
    pub to: u64,
    /// Points at most, 2 or more.
    pub points: usize,
}

impl Range {
    /// Seconds of it, at least one.
    pub fn seconds(self) -> u64 {
        self.to.saturating_sub(self.from).max(1)
    }
}

/// The number of the tier that answers: the finest that goes back as far, else the one that goes back farthest.
pub fn tier_for(tiers: &[Tier], range: Range, now: u64) -> usize {
    let back = now.saturating_sub(range.from);
    // The first bucket of a range may have begun before it, and the last slot is about to be written anew.
    let reaches = |tier: &Tier| tier.span() >= back.saturating_add(tier.seconds);
    tiers.iter().position(reaches).unwrap_or(tiers.len().saturating_sub(1))
}

/// Whether a bucket has a part in the range.
pub const fn in_range(bucket: &Bucket, range: Range) -> bool {
    bucket.start < range.to && bucket.end() > range.from
}

/// Puts buckets of one width, in the order of time, together until there are no more of them than points were asked for. Two are the
/// least: groups begin at round times, and any stretch may have one in its middle.
pub fn thin(buckets: &[Bucket], points: usize) -> Vec<Bucket> {
    let points = points.max(2);
    let Some(width) = buckets.first().map(|bucket| bucket.seconds.max(1)) else { return Vec::new() };
    if buckets.len() <= points {
        return buckets.to_vec();
    }
    let span = buckets.iter().map(|bucket| bucket.start / width);
    let (first, last) = (span.clone().min().unwrap_or(0), span.max().unwrap_or(0));
    // One less, because groups begin at round times and so the first and the last may be parts.
    let groups_most = u64::try_from(points).unwrap_or(u64::MAX).saturating_sub(1).max(1);
    let mut step = (last - first + 1).div_ceil(groups_most).max(1);
    loop {
        let groups = grouped(buckets, width, step);
        if groups.len() <= points {
            return groups;
        }
        step += step.div_ceil(8);
    }
}

fn grouped(buckets: &[Bucket], width: u64, step: u64) -> Vec<Bucket> {
    let seconds = width.saturating_mul(step);
    let mut groups: Vec<Bucket> = Vec::new();
    for bucket in buckets {
        let start = bucket.start - bucket.start % seconds;
        match groups.last_mut().filter(|group| group.start == start) {
            Some(group) => group.merge(bucket),
            None => groups.push(Bucket { start, seconds, ..bucket.clone() }),
        }
    }
    groups
}
