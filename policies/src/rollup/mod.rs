//! What memory did, kept small: readings of one memory go in, buckets of several widths come out.
//!
//! ```text
//!  readings   . .. .  .   . .  ..  .      any time, as they come
//!  tier 0    |----|----|----|----|----|   seconds, for hours
//!  tier 1    |---------|---------|----    minutes, for a day
//!  …                                      hours, for a month
//! ```
//!
//! | file | part |
//! |---|---|
//! | `bucket` | what is kept of the readings of a stretch of time, and how two of them become one |
//! | `pick` | which tier answers a question, and how it becomes no more points than were asked for |
//!
//! **What comes out is what was added since it came out last**, to be merged with what is kept of the same stretch. So a clock that is set
//! back, a restart and a second look at the same stretch all end in the same bucket, whatever the order.

mod bucket;
mod pick;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use bucket::{Bucket, Lines, Reading};
pub use pick::{Range, in_range, thin, tier_for};

/// The longest month, and the day before it.
const FOURTH_KEPT_TIME: Duration = Duration::from_secs(32 * 24 * 3600);
/// The same day of the week before.
const THIRD_KEPT_TIME: Duration = Duration::from_secs(8 * 24 * 3600);
/// Yesterday at this time, and some.
const SECOND_KEPT_TIME: Duration = Duration::from_secs(26 * 3600);
/// An hour is what one looks at while something happens, and the one before it to compare with.
const FIRST_KEPT_TIME: Duration = Duration::from_secs(2 * 3600);

/// The numbers of what is kept. Reasons: `defaults.toml`, section `[series]`.
pub type SeriesPolicy = crate::defaults::Series;

/// One width of buckets, and how many of them are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tier {
    /// Seconds of a bucket, 1 or more.
    pub seconds: u64,
    /// How many are kept, 1 or more.
    pub slots: u64,
}

impl Tier {
    /// Buckets of this width for this long; less than a second counts as one, and one bucket is always kept.
    pub fn new(width: Duration, time: Duration) -> Self {
        let seconds = width.as_secs().max(1);
        Self { seconds, slots: (time.as_secs() / seconds).max(1) }
    }

    /// Seconds back from now that are kept.
    pub const fn span(self) -> u64 {
        self.seconds * self.slots
    }

    /// When the bucket begins in which this second is.
    pub const fn start(self, second: u64) -> u64 {
        second - second % self.seconds
    }

    /// The place of a bucket among those that are kept: the one that was there is older by the whole span, or from a time in which the
    /// clock was wrong.
    pub const fn slot(self, start: u64) -> u64 {
        (start / self.seconds) % self.slots
    }
}

/// The tiers of a policy, the finest first.
pub fn tiers(policy: &SeriesPolicy) -> [Tier; 4] {
    [
        Tier::new(policy.first, FIRST_KEPT_TIME),
        Tier::new(policy.second, SECOND_KEPT_TIME),
        Tier::new(policy.third, THIRD_KEPT_TIME),
        Tier::new(policy.fourth, FOURTH_KEPT_TIME),
    ]
}

/// Readings of one memory on their way into buckets.
#[derive(Clone, Debug)]
pub struct Rollup {
    tiers: Vec<Tier>,
    /// A reading says what memory was for so many milliseconds after it.
    fresh: u64,
    open: Vec<Option<Bucket>>,
    before: Option<u64>,
}

impl Rollup {
    /// Nothing was read yet. `fresh`: for how long a reading says what memory is.
    pub fn new(tiers: &[Tier], fresh: Duration) -> Self {
        let fresh = u64::try_from(fresh.as_millis()).unwrap_or(u64::MAX);
        Self { tiers: tiers.to_vec(), fresh, open: vec![None; tiers.len()], before: None }
    }

    /// Takes a reading in. Returns what is complete by it, each with the number of its tier. A reading of an earlier time than the one
    /// before is of a clock that was set back: it counts where it says that it belongs.
    pub fn add(&mut self, reading: &Reading) -> Vec<(usize, Bucket)> {
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
            let mut next = Bucket::of(reading, *tier);
            if let Some(since) = since {
                next.cover(since, reading.at);
            }
            done.extend(open.replace(next).map(|bucket| (number, bucket)));
        }
        done
    }

    /// All that is not complete, which begins anew.
    pub fn close(&mut self) -> Vec<(usize, Bucket)> {
        self.open.iter_mut().enumerate().filter_map(|(number, open)| Some((number, open.take()?))).collect()
    }

    /// What is not complete of a tier.
    pub fn open(&self, tier: usize) -> Option<&Bucket> {
        self.open.get(tier)?.as_ref()
    }
}

/// What a coarse tier lacks because whoever wrote it was killed: `fine` are the buckets of the finest tier, `newest` is when the last reading
/// was made that is in the coarse one, in milliseconds since 1970. To be merged with what is there.
pub fn missing(tier: Tier, newest: u64, fine: &[Bucket]) -> Vec<Bucket> {
    let mut all: Vec<Bucket> = Vec::new();
    for bucket in fine.iter().filter(|bucket| bucket.first_at > newest) {
        let start = tier.start(bucket.start);
        let coarse = Bucket { start, seconds: tier.seconds, ..bucket.clone() };
        match all.iter_mut().find(|known| known.start == start) {
            Some(known) => known.merge(&coarse),
            None => all.push(coarse),
        }
    }
    all.sort_by_key(|bucket| bucket.start);
    all
}
