//! Buckets never contain more than the readings, for any clock and any order.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::growth::GrowthVerdict;

const NOON: u64 = 1_790_000_000;

fn small() -> Vec<RollupTier> {
    vec![
        RollupTier { seconds: 10, slots: 60 },
        RollupTier { seconds: 60, slots: 60 },
        RollupTier { seconds: 600, slots: 24 },
    ]
}

const FRESH: Duration = Duration::from_secs(30);

fn reading(at: u64, bytes: u64) -> RollupReading {
    RollupReading { at, bytes, lines: RollupContext { generation: at / 60_000, ..RollupContext::default() } }
}

/// Stored buckets, by tier and start.
type Kept = BTreeMap<(usize, u64), ReadingBucket>;

fn keep(kept: &mut Kept, all: Vec<(usize, ReadingBucket)>) {
    for (tier, bucket) in all {
        match kept.get_mut(&(tier, bucket.start)) {
            Some(known) => known.merge(&bucket),
            None => drop(kept.insert((tier, bucket.start), bucket)),
        }
    }
}

fn rolled(readings: &[RollupReading]) -> Kept {
    let mut rollup = SeriesRollup::new(&small(), FRESH);
    let mut kept = Kept::new();
    for reading in readings {
        keep(&mut kept, rollup.add(reading));
    }
    keep(&mut kept, rollup.close());
    kept
}

fn of_tier(kept: &Kept, tier: usize) -> Vec<ReadingBucket> {
    kept.iter().filter(|((number, _), _)| *number == tier).map(|(_, bucket)| bucket.clone()).collect()
}

#[test]
fn a_bucket_says_what_was_read_in_it_and_whether_that_is_all_of_it() {
    let all: Vec<RollupReading> = (0..14).map(|n| reading((NOON + n * 5) * 1000, 100 + n)).collect();
    let kept = rolled(&all);
    let fine = of_tier(&kept, 0);
    let second = &fine[1];
    assert_eq!((second.start, second.end(), second.count), (NOON + 10, NOON + 20, 2));
    assert_eq!((second.min, second.max, second.last, second.mean_bytes()), (102, 103, 103, 102));
    assert!(second.is_whole(), "{second:?}");
    assert!(!fine.last().unwrap().is_whole(), "it has only begun: {fine:?}");
    let coarse = of_tier(&kept, 1);
    assert_eq!(coarse.iter().map(|bucket| bucket.count).sum::<u64>(), 14);
    // The first reading came 20 s after the start of its minute.
    let first = &coarse[0];
    assert!(
        first.start < NOON && !first.is_whole() && first.covered == (first.end() - NOON) * 1000,
        "{first:?}"
    );
}

#[test]
fn a_gap_is_no_part_of_what_is_known() {
    let times = [0, 5, 300, 305];
    let all: Vec<RollupReading> = times.iter().map(|time| reading((NOON + time) * 1000, 7)).collect();
    let kept = rolled(&all);
    let covered: u64 = of_tier(&kept, 2).iter().map(|bucket| bucket.covered).sum();
    assert_eq!(covered, 10_000);
    assert_eq!(of_tier(&kept, 0).len(), 2, "nothing is made up for the time between");
}

#[test]
fn a_clock_that_is_set_back_and_on_again_loses_nothing() {
    let times = [0, 5, 10, 15, 3, 8, 20, 25, 1_000_000, 30];
    let all: Vec<RollupReading> =
        times.iter().map(|time| reading((NOON + time) * 1000, 1000 + time % 1000)).collect();
    let kept = rolled(&all);
    for tier in 0..small().len() {
        let buckets = of_tier(&kept, tier);
        assert_eq!(buckets.iter().map(|bucket| bucket.count).sum::<u64>(), 10, "tier {tier}");
        assert_eq!(buckets.iter().map(|bucket| bucket.max).max(), Some(1030));
    }
}

#[test]
fn readings_of_one_moment_end_with_the_one_that_came_last() {
    let all = [reading(NOON * 1000, 5), reading(NOON * 1000, 9), reading(NOON * 1000, 7)];
    let fine = of_tier(&rolled(&all), 0);
    assert_eq!((fine[0].count, fine[0].min, fine[0].max, fine[0].last), (3, 5, 9, 7));
}

#[test]
fn the_finest_tier_answers_that_goes_back_far_enough() {
    let tiers = tiers(&crate::defaults().series);
    let ask = |hours: u64| {
        let range = PointRange { from: NOON - hours * 3600, to: NOON, points: 400 };
        tiers[tier_for(&tiers, range, NOON)].seconds
    };
    assert_eq!([1, 6, 24, 24 * 7, 24 * 30, 24 * 365].map(ask), [10, 60, 60, 600, 3600, 3600]);
    // A range of ten minutes last week.
    let range = PointRange { from: NOON - 500_000, to: NOON - 499_400, points: 400 };
    assert_eq!(tiers[tier_for(&tiers, range, NOON)].seconds, 600);
}

#[test]
fn what_a_killed_writer_did_not_write_comes_from_the_finest_tier() {
    let all: Vec<RollupReading> = (0..700).map(|n| reading((NOON + n) * 1000, 50 + n % 7)).collect();
    let kept = rolled(&all);
    let (fine, tier) = (of_tier(&kept, 0), small()[2]);
    let whole = of_tier(&kept, 2);
    assert_eq!(whole.len(), 2);
    // The process wrote only the first coarse bucket.
    let missing = rebuild_missing(tier, whole[0].last_at, &fine);
    assert_eq!(missing.iter().map(|bucket| bucket.start).collect::<Vec<_>>(), [whole[1].start]);
    assert_eq!((missing[0].count, missing[0].last), (whole[1].count, whole[1].last));
    assert_eq!(rebuild_missing(tier, whole[1].last_at, &fine), [], "nothing is counted twice");
    // The process wrote no coarse bucket.
    let counts: u64 = rebuild_missing(tier, 0, &fine).iter().map(|bucket| bucket.count).sum();
    assert_eq!(counts, 700);
}

prop_compose! {
    /// A reading of any size within two hours.
    fn some()(at in 0..7_200_000_u64, bytes in prop_oneof![0..1_u64 << 40, Just(0), Just(u64::MAX >> 12)]) -> RollupReading {
        reading(NOON * 1000 + at, bytes)
    }
}

proptest! {
    #[test]
    fn in_any_order_every_bucket_is_within_its_readings(all in prop::collection::vec(some(), 1..200)) {
        let kept = rolled(&all);
        let mut ordered = all.clone();
        ordered.sort_by_key(|reading| reading.at);
        let again = rolled(&ordered);
        for (number, tier) in small().into_iter().enumerate() {
            let buckets = of_tier(&kept, number);
            prop_assert_eq!(buckets.iter().map(|bucket| bucket.count).sum::<u64>(), all.len() as u64);
            for bucket in &buckets {
                let own = || all.iter().filter(|reading| tier.start(reading.at / 1000) == bucket.start);
                prop_assert_eq!(Some(bucket.min), own().map(|reading| reading.bytes).min());
                prop_assert_eq!(Some(bucket.max), own().map(|reading| reading.bytes).max());
                prop_assert!(bucket.mean.is_finite() && bucket.mean_bytes() >= bucket.min && bucket.mean_bytes() <= bucket.max);
                prop_assert!(bucket.last >= bucket.min && bucket.last <= bucket.max);
                prop_assert!(bucket.covered <= tier.seconds * 1000);
                prop_assert!(bucket.first_at <= bucket.last_at);
                // Values that do not depend on the order are equal.
                let other = &again[&(number, bucket.start)];
                prop_assert_eq!(
                    (bucket.count, bucket.min, bucket.max, bucket.first_at, bucket.last_at),
                    (other.count, other.min, other.max, other.first_at, other.last_at)
                );
            }
        }
    }

    #[test]
    fn no_more_points_than_were_asked_for_and_all_within_what_was_read(
        all in prop::collection::vec(some(), 1..300), points in 2..50_usize, tier in 0..3_usize,
        from in 0..7200_u64, length in 1..7200_u64,
    ) {
        let range = PointRange { from: NOON + from, to: NOON + from + length, points };
        let kept = rolled(&all);
        let asked: Vec<ReadingBucket> =
            of_tier(&kept, tier).into_iter().filter(|bucket| in_range(bucket, range)).collect();
        let thinned = reduce_points(&asked, points);
        prop_assert!(thinned.len() <= points);
        prop_assert_eq!(thinned.is_empty(), asked.is_empty());
        let count = |all: &[ReadingBucket]| all.iter().map(|bucket| bucket.count).sum::<u64>();
        prop_assert_eq!(count(&thinned), count(&asked));
        let least = |all: &[ReadingBucket]| all.iter().map(|bucket| bucket.min).min();
        let most = |all: &[ReadingBucket]| all.iter().map(|bucket| bucket.max).max();
        // Thinning keeps the extremes.
        prop_assert_eq!((least(&thinned), most(&thinned)), (least(&asked), most(&asked)));
        prop_assert!(thinned.windows(2).all(|two| two[0].end() <= two[1].start), "in order, side by side");
        // The result contains all readings within the range.
        let inside: Vec<u64> = all.iter().filter(|reading| (range.from..range.to).contains(&(reading.at / 1000)))
            .map(|reading| reading.bytes).collect();
        if let Some(largest) = inside.iter().max() {
            prop_assert!(most(&thinned).is_some_and(|most| most >= *largest));
        }
    }
}

#[test]
fn what_is_drawn_beside_is_that_of_the_last_reading() {
    let with = |verdict| RollupContext { verdict, ..RollupContext::default() };
    let all = [
        RollupReading { lines: with(GrowthVerdict::Leaking), ..reading(NOON * 1000 + 2000, 1) },
        RollupReading { lines: with(GrowthVerdict::Steady), ..reading(NOON * 1000 + 1000, 1) },
    ];
    assert_eq!(of_tier(&rolled(&all), 0)[0].lines.verdict, GrowthVerdict::Leaking);
}
