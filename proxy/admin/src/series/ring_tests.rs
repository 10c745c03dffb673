//! Files of series: damage costs only the damaged buckets, and foreign files are refused.

use std::fs;

use proptest::prelude::*;
use warden_policies::rollup::RollupReading;
use warden_policies::{MemoryKind, ModelName};

use super::super::record::tests::{TIER, full};
use super::*;

const TIERS: [RollupTier; 2] = [TIER, RollupTier { seconds: 60, slots: 4 }];
/// A multiple of the spans of both tiers, so that slots are easy to count.
const DAY: u64 = 1_790_000_400 / 1200 * 1200;

fn key() -> SeriesKey {
    SeriesKey { model: ModelName::new("org/m"), replica: 0, memory: MemoryKind::Host }
}

fn made() -> (tempfile::TempDir, std::path::PathBuf, RingFile) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(key().file_name());
    let ring = RingFile::create(&path, &key(), &TIERS, DAY).unwrap();
    (dir, path, ring)
}

fn starts(ring: &RingFile) -> Vec<u64> {
    ring.read(0).unwrap().iter().map(|bucket| bucket.start - DAY).collect()
}

#[test]
fn a_ring_keeps_the_last_round_and_never_grows() {
    let (_dir, path, ring) = made();
    for n in 0..100 {
        ring.merge(0, &full(DAY + n * 10, n)).unwrap();
    }
    assert_eq!(starts(&ring), [940, 950, 960, 970, 980, 990]);
    assert_eq!(fs::metadata(&path).unwrap().len(), file_length(&TIERS));
    let again = RingFile::open(&path, &key(), &TIERS, false).unwrap();
    assert_eq!((starts(&again), again.since), (starts(&ring), DAY));
}

#[test]
fn what_is_added_to_a_stretch_is_put_to_what_is_there() {
    let (_dir, _path, ring) = made();
    let at = |bytes| {
        ReadingBucket::from_reading(
            &RollupReading { at: DAY * 1000 + bytes, bytes, lines: full(DAY, 0).lines },
            TIER,
        )
    };
    for bytes in [5, 9, 2] {
        ring.merge(0, &at(bytes)).unwrap();
    }
    let found = ring.read(0).unwrap();
    assert_eq!((found[0].count, found[0].min, found[0].max, found[0].last), (3, 2, 9, 9));
}

#[test]
fn a_torn_bucket_is_lost_and_the_others_are_not() {
    let (_dir, path, ring) = made();
    (0..6).for_each(|n| ring.merge(0, &full(DAY + n * 10, n)).unwrap());
    let mut bytes = fs::read(&path).unwrap();
    let third = HEAD_BYTES + 2 * RECORD_BYTES;
    bytes[third + 30..third + 60].fill(0xAB);
    fs::write(&path, &bytes).unwrap();
    assert_eq!(starts(&RingFile::open(&path, &key(), &TIERS, true).unwrap()), [0, 10, 30, 40, 50]);
    // The damaged slot is written again.
    let ring = RingFile::open(&path, &key(), &TIERS, true).unwrap();
    ring.merge(0, &full(DAY + 20, 1)).unwrap();
    assert_eq!(starts(&ring), [0, 10, 20, 30, 40, 50]);
}

#[test]
fn a_file_that_was_cut_reads_as_far_as_it_goes() {
    let (_dir, path, ring) = made();
    (0..6).for_each(|n| ring.merge(0, &full(DAY + n * 10, n)).unwrap());
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len((HEAD_BYTES + 3 * RECORD_BYTES + 50) as u64).unwrap();
    let ring = RingFile::open(&path, &key(), &TIERS, true).unwrap();
    assert_eq!(starts(&ring), [0, 10, 20]);
    ring.merge(0, &full(DAY + 50, 1)).unwrap();
    assert_eq!(starts(&ring), [0, 10, 20, 50]);
}

#[test]
fn buckets_of_other_places_are_none() {
    let (_dir, path, ring) = made();
    ring.merge(0, &full(DAY + 10, 1)).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let (from, to) = (HEAD_BYTES + RECORD_BYTES, HEAD_BYTES + 4 * RECORD_BYTES);
    bytes.copy_within(from..from + RECORD_BYTES, to);
    fs::write(&path, &bytes).unwrap();
    assert_eq!(starts(&ring), [10]);
}

#[test]
fn what_is_not_ours_or_of_a_later_version_is_told_apart_and_stays() {
    let (dir, path, ring) = made();
    drop(ring);
    let ours = fs::read(&path).unwrap();
    let with = |at: usize, new: &[u8]| {
        let mut bytes = ours.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        bytes
    };
    let later = with(8, &9_u32.to_le_bytes());
    let torn = with(TEXT_OFFSET + 3, b"?");
    for (bytes, why) in [
        (later, "it is of a later version of llama-warden (9)"),
        (torn, "it is no file of llama-warden's"),
        (b"my notes".to_vec(), "it is no file of llama-warden's"),
        (Vec::new(), "it is no file of llama-warden's"),
    ] {
        fs::write(&path, &bytes).unwrap();
        let refused = RingFile::open(&path, &key(), &TIERS, true).unwrap_err();
        assert_eq!(refused.to_string(), why);
        assert!(
            RingFile::create(&path, &key(), &TIERS, DAY).is_err(),
            "nothing is made in the place of something"
        );
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
    fs::write(&path, &ours).unwrap();
    let other = SeriesKey { replica: 1, ..key() };
    assert!(matches!(RingFile::open(&path, &other, &TIERS, true), Err(RingError::Other)));
    assert!(matches!(RingFile::open(&path, &key(), &TIERS[..1], true), Err(RingError::Other)));
    // Refuse a link, which leads to another file.
    let link = dir.path().join("link.series");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(RingFile::open(&link, &key(), &TIERS, true).is_err());
    let long = SeriesKey { model: ModelName::new("x".repeat(5000)), ..key() };
    assert!(matches!(
        RingFile::create(&dir.path().join(long.file_name()), &long, &TIERS, DAY),
        Err(RingError::Long)
    ));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "nothing half-made is left");
}

proptest! {
    /// Whatever a file contains, opening it fails at its head, or its buckets can be read and merged.
    #[test]
    fn any_bytes_are_read_or_refused(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..12),
        records in proptest::collection::vec(proptest::collection::vec(any::<u8>(), RECORD_BYTES - 4), 0..4),
        length in any::<proptest::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let (_dir, path, ring) = made();
        (0..6).for_each(|n| ring.merge(0, &full(DAY + n * 10, n)).unwrap());
        let mut bytes = fs::read(&path).unwrap();
        // Forged records with a valid checksum, in the slot of their time.
        for (slot, mut record) in (0_u64..).zip(records) {
            record[..8].copy_from_slice(&(DAY + slot * 10).to_le_bytes());
            (record[92], record[93]) = (record[92] % 6, 0);
            let check = crc32(&record);
            record.extend_from_slice(&check.to_le_bytes());
            let at = HEAD_BYTES + usize::try_from(TIER.slot(DAY + slot * 10)).unwrap() * RECORD_BYTES;
            bytes[at..at + RECORD_BYTES].copy_from_slice(&record);
        }
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if cut {
            bytes.truncate(length.index(bytes.len()));
        }
        fs::write(&path, &bytes).unwrap();
        let head = read_head(&path);
        if let Ok(ring) = RingFile::open(&path, &key(), &TIERS, true) {
            prop_assert!(head.is_ok());
            let mut all = ring.read(0).unwrap();
            prop_assert!(all.len() <= 6 && all.is_sorted_by_key(|bucket| bucket.start));
            if let Some(first) = all.pop() {
                all.into_iter().fold(first, |mut sum, bucket| { sum.merge(&bucket); sum });
            }
            for n in 0..6 {
                ring.merge(0, &full(DAY + n * 10, n)).unwrap();
            }
        }
    }
}
