//! The buckets that are not in files yet: incomplete buckets, and complete buckets that wait for the disk. If
//! the disk is unavailable for long, the oldest buckets are dropped. Nothing here blocks.

use std::collections::BTreeMap;

use warden_policies::rollup::{ReadingBucket, RollupReading, RollupTier, SeriesPolicy, SeriesRollup, tiers};

use super::key::SeriesKey;

/// Each series may have this many waiting buckets, however many series there are.
const MIN_WAITING: usize = 16;
/// Limit per series, however few series there are: four hours of the finest tier.
const MAX_WAITING: usize = 1440;

#[derive(Debug)]
struct LiveSeries {
    rollup: SeriesRollup,
    /// Complete buckets by tier and start.
    waiting: BTreeMap<(usize, u64), ReadingBucket>,
    /// In milliseconds since 1970.
    read_at: u64,
}

#[derive(Debug)]
pub(super) struct LiveBuckets {
    policy: SeriesPolicy,
    tiers: Vec<RollupTier>,
    series: BTreeMap<SeriesKey, LiveSeries>,
}

impl LiveBuckets {
    pub(super) fn new(policy: &SeriesPolicy) -> Self {
        Self { policy: *policy, tiers: tiers(policy).to_vec(), series: BTreeMap::new() }
    }

    pub(super) fn add_reading(&mut self, key: &SeriesKey, reading: &RollupReading) {
        let most = self.waiting_limit();
        if !self.series.contains_key(key) {
            while self.series.len() >= self.policy.live.max(1) && self.forget_oldest() {}
            let rollup = SeriesRollup::new(&self.tiers, self.policy.fresh);
            self.series
                .insert(key.clone(), LiveSeries { rollup, waiting: BTreeMap::new(), read_at: reading.at });
        }
        let Some(one) = self.series.get_mut(key) else { return };
        one.read_at = reading.at;
        let done = one.rollup.add(reading);
        one.add_waiting(done, most);
    }

    fn waiting_limit(&self) -> usize {
        (self.policy.waiting / self.series.len().max(1)).clamp(MIN_WAITING, MAX_WAITING)
    }

    fn forget_oldest(&mut self) -> bool {
        let oldest = self.series.iter().min_by_key(|(_, one)| one.read_at).map(|(key, _)| key.clone());
        oldest.is_some_and(|key| self.series.remove(&key).is_some())
    }

    /// Completes the open buckets at the end of the program, so that they are written.
    pub(super) fn close(&mut self) {
        let most = self.waiting_limit();
        for one in self.series.values_mut() {
            let open = one.rollup.close();
            one.add_waiting(open, most);
        }
    }

    pub(super) fn waiting_keys(&self) -> Vec<SeriesKey> {
        let waits = self.series.iter().filter(|(_, one)| !one.waiting.is_empty());
        waits.map(|(key, _)| key.clone()).collect()
    }

    pub(super) fn take_waiting(&mut self, key: &SeriesKey) -> Vec<(usize, ReadingBucket)> {
        let Some(one) = self.series.get_mut(key) else { return Vec::new() };
        let waiting = std::mem::take(&mut one.waiting);
        waiting.into_iter().map(|((tier, _), bucket)| (tier, bucket)).collect()
    }

    pub(super) fn give_back(&mut self, key: &SeriesKey, buckets: Vec<(usize, ReadingBucket)>) {
        let most = self.waiting_limit();
        if let Some(one) = self.series.get_mut(key) {
            one.add_waiting(buckets, most);
        }
    }

    /// Drops series without new readings, once all their buckets are written.
    pub(super) fn forget_quiet(&mut self, now_ms: u64) {
        let fresh = u64::try_from(self.policy.fresh.as_millis()).unwrap_or(0);
        let most = self.waiting_limit();
        let quiet = |one: &LiveSeries| one.read_at.saturating_add(fresh) < now_ms;
        for one in self.series.values_mut().filter(|one| quiet(one)) {
            // No further readings will complete the open buckets.
            let open = one.rollup.close();
            one.add_waiting(open, most);
        }
        self.series.retain(|_, one| !one.waiting.is_empty() || !quiet(one));
    }

    pub(super) fn keys(&self, model: Option<&str>) -> Vec<SeriesKey> {
        let own = self.series.keys().filter(|key| model.is_none_or(|model| key.model.as_str() == model));
        own.cloned().collect()
    }

    /// Returns milliseconds since 1970.
    pub(super) fn read_at(&self, key: &SeriesKey) -> Option<u64> {
        self.series.get(key).map(|one| one.read_at)
    }

    /// Returns buckets in no particular order.
    pub(super) fn buckets(&self, key: &SeriesKey, tier: usize) -> Vec<ReadingBucket> {
        let Some(one) = self.series.get(key) else { return Vec::new() };
        let waiting = one.waiting.range((tier, 0)..=(tier, u64::MAX)).map(|(_, bucket)| bucket);
        waiting.chain(one.rollup.open(tier)).cloned().collect()
    }
}

impl LiveSeries {
    fn add_waiting(&mut self, buckets: Vec<(usize, ReadingBucket)>, most: usize) {
        for (tier, bucket) in buckets {
            match self.waiting.get_mut(&(tier, bucket.start)) {
                Some(known) => known.merge(&bucket),
                None => drop(self.waiting.insert((tier, bucket.start), bucket)),
            }
        }
        while self.waiting.len() > most {
            // Drop the oldest bucket of the tier with the most buckets.
            let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
            self.waiting.keys().for_each(|(tier, _)| *counts.entry(*tier).or_default() += 1);
            let Some((tier, _)) = counts.into_iter().max_by_key(|(tier, count)| (*count, usize::MAX - tier))
            else {
                return;
            };
            let oldest = self.waiting.range((tier, 0)..).next().map(|(key, _)| *key);
            let Some(oldest) = oldest else { return };
            self.waiting.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::rollup::RollupContext;
    use warden_policies::{MemoryKind, ModelName};

    use super::*;

    const DAY: u64 = 1_790_000_400_000;

    fn key(n: usize) -> SeriesKey {
        SeriesKey { model: ModelName::new(format!("m{n}")), replica: 0, memory: MemoryKind::Host }
    }

    fn note(live: &mut LiveBuckets, n: usize, second: u64) {
        live.add_reading(
            &key(n),
            &RollupReading { at: DAY + second * 1000, bytes: second, lines: RollupContext::default() },
        );
    }

    fn live(change: impl FnOnce(&mut SeriesPolicy)) -> LiveBuckets {
        let mut policy = warden_policies::defaults().series;
        change(&mut policy);
        LiveBuckets::new(&policy)
    }

    #[test]
    fn without_a_disk_memory_is_bounded_and_the_widest_view_stays_longest() {
        let mut live = live(|policy| policy.waiting = 100);
        (0..200_000).step_by(5).for_each(|second| note(&mut live, 0, second));
        let count = |tier| live.buckets(&key(0), tier).len();
        assert_eq!(live.series[&key(0)].waiting.len(), 100);
        assert!(count(3) > 20 && count(0) > 10, "{:?}", [count(0), count(1), count(2), count(3)]);
        let last = live.buckets(&key(0), 0).iter().map(|bucket| bucket.last).max();
        assert_eq!(last, Some(199_995), "the newest is there");
    }

    #[test]
    fn a_thousand_models_share_what_may_wait_and_those_read_last_stay() {
        let mut live = live(|policy| (policy.waiting, policy.live) = (3200, 100));
        for second in (0..3000).step_by(10) {
            (0..200).for_each(|n| note(&mut live, n, second));
        }
        assert_eq!(live.series.len(), 100);
        let all: usize = live.series.values().map(|one| one.waiting.len()).sum();
        assert!(all <= 3200, "{all}");
        assert!(live.keys(None).contains(&key(199)));
    }

    #[test]
    fn what_could_not_be_written_is_given_back_and_nothing_counts_twice() {
        let mut live = live(|_| ());
        (0..100).step_by(5).for_each(|second| note(&mut live, 0, second));
        let count =
            |live: &LiveBuckets| live.buckets(&key(0), 0).iter().map(|bucket| bucket.count).sum::<u64>();
        assert_eq!((count(&live), live.waiting_keys().len()), (20, 1));
        let taken = live.take_waiting(&key(0));
        note(&mut live, 0, 101);
        live.give_back(&key(0), taken);
        assert_eq!(count(&live), 21);
        live.close();
        let taken = live.take_waiting(&key(0));
        let fine = taken.iter().filter(|(tier, _)| *tier == 0);
        assert_eq!(fine.map(|(_, bucket)| bucket.count).sum::<u64>(), 21);
        assert_eq!(live.waiting_keys(), []);
    }

    #[test]
    fn a_model_that_is_gone_is_written_to_its_end_and_then_forgotten() {
        let mut live = live(|_| ());
        note(&mut live, 0, 3);
        live.forget_quiet(DAY + 20_000);
        assert_eq!(live.waiting_keys(), [], "it may come again");
        live.forget_quiet(DAY + 60_000);
        assert_eq!(live.waiting_keys(), [key(0)]);
        live.take_waiting(&key(0));
        live.forget_quiet(DAY + 60_000);
        assert_eq!(live.keys(None), []);
    }
}
