//! The folder of series: its lock, and the removal of files.

use warden_policies::{MemoryKind, ModelName};

use super::super::record::tests::{TIER, full};
use super::*;

const TIERS: [RollupTier; 2] = [TIER, RollupTier { seconds: 60, slots: 4 }];
const DAY: u64 = 1_790_000_400 / 1200 * 1200;

fn key(model: &str) -> SeriesKey {
    SeriesKey { model: ModelName::new(model), replica: 0, memory: MemoryKind::Host }
}

fn take(state: &Path, files: u64, now: u64) -> SeriesFolder {
    SeriesFolder::open(state, &TIERS, files * ring::file_length(&TIERS), now).unwrap().unwrap()
}

fn put(disk: &mut SeriesFolder, model: &str, now: u64) -> WriteOutcome {
    disk.write(&key(model), &mut vec![(0, full(now, 1))], now).unwrap()
}

fn files(state: &Path) -> Vec<String> {
    let all = fs::read_dir(state.join(SERIES_DIR)).unwrap();
    let mut names: Vec<String> = all.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "lock");
    names.sort();
    names
}

#[test]
fn one_instance_writes_at_a_time_and_the_next_one_goes_on() {
    let state = tempfile::tempdir().unwrap();
    let mut first = take(state.path(), 9, DAY);
    assert!(SeriesFolder::open(state.path(), &TIERS, 1 << 30, DAY).unwrap().is_none());
    put(&mut first, "a/b", DAY);
    drop(first);
    let mut second = take(state.path(), 9, DAY + 1);
    assert_eq!(second.known().keys().collect::<Vec<_>>(), [&key("a/b")]);
    put(&mut second, "a/b", DAY + 10);
    assert_eq!(second.read(&key("a/b"), 0).unwrap().len(), 2);
}

#[test]
fn what_was_not_written_for_longest_goes_and_what_is_not_ours_stays() {
    let state = tempfile::tempdir().unwrap();
    let mut disk = take(state.path(), 3, DAY);
    for name in ["notes.series", "notes.txt"] {
        fs::write(disk.folder.join(name), "mine").unwrap();
    }
    for (n, model) in ["a", "b", "c", "d"].into_iter().enumerate() {
        let now = DAY + n as u64 * 3600;
        assert!(matches!(put(&mut disk, model, now), WriteOutcome::Done));
    }
    assert_eq!(disk.known().keys().map(|key| key.model.as_str()).collect::<Vec<_>>(), ["b", "c", "d"]);
    assert_eq!(files(state.path()).len(), 5, "{:?}", files(state.path()));
    // A file that is being written is not removed for another.
    for model in ["b", "c", "d"] {
        put(&mut disk, model, DAY + 20_000);
    }
    let WriteOutcome::Never(Some(told)) = put(&mut disk, "e", DAY + 20_001) else { panic!("written") };
    assert!(told.contains("`e`") && told.contains("3 files"), "{told}");
    assert!(matches!(put(&mut disk, "f", DAY + 20_002), WriteOutcome::Never(None)), "told once");
    // Later an old file may be removed.
    assert!(matches!(put(&mut disk, "e", DAY + 30_000), WriteOutcome::Done));
    assert_eq!(files(state.path()).len(), 5, "{:?}", files(state.path()));
}

#[test]
fn a_clock_that_was_set_back_keeps_no_room_for_what_is_over() {
    let state = tempfile::tempdir().unwrap();
    let mut disk = take(state.path(), 3, DAY);
    for model in ["a", "b", "c"] {
        put(&mut disk, model, DAY + 100_000);
    }
    // The clock was set back a day: two series continue; the last write of the third one lies in the future.
    put(&mut disk, "a", DAY);
    put(&mut disk, "b", DAY);
    assert!(matches!(put(&mut disk, "d", DAY + 1), WriteOutcome::Done));
    assert_eq!(disk.known().keys().map(|key| key.model.as_str()).collect::<Vec<_>>(), ["a", "b", "d"]);
}

#[test]
fn a_thousand_models_have_a_file_each_and_none_is_larger_than_it_says() {
    let state = tempfile::tempdir().unwrap();
    let mut disk = take(state.path(), 1000, DAY);
    for n in 0..1000 {
        assert!(matches!(put(&mut disk, &format!("org/model {n}"), DAY), WriteOutcome::Done));
    }
    assert_eq!((disk.known().len(), files(state.path()).len()), (1000, 1000));
    drop(disk);
    assert_eq!(take(state.path(), 1000, DAY).known().len(), 1000);
    // A smaller limit takes effect when the folder is opened.
    assert_eq!(take(state.path(), 10, DAY).known().len(), 10);
    assert_eq!(files(state.path()).len(), 10);
}

#[test]
fn fifty_models_of_host_and_one_gpu_take_forty_megabytes_for_a_month() {
    let tiers = warden_policies::rollup::tiers(&warden_policies::defaults().series);
    let each = ring::file_length(&tiers);
    assert!((400_000..450_000).contains(&each), "{each}");
    assert!(100 * each < 45_000_000);
    let most = warden_policies::defaults().series.bytes.0 / each;
    assert!(most > 1100, "a thousand models, and some with GPUs: {most}");
}

#[test]
fn a_killed_writer_costs_the_wide_buckets_nothing_that_the_fine_ones_have() {
    let state = tempfile::tempdir().unwrap();
    let mut disk = take(state.path(), 9, DAY);
    let mut fine: Vec<(usize, ReadingBucket)> = (0..5).map(|n| (0, full(DAY + n * 10, 10 + n))).collect();
    disk.write(&key("a"), &mut fine, DAY + 50).unwrap();
    // Simulate a kill: the bucket of the minute was never written.
    drop(disk);
    let mut disk = take(state.path(), 9, DAY + 51);
    let minute = disk.read(&key("a"), 1).unwrap();
    assert_eq!(minute.len(), 1);
    assert_eq!((minute[0].count, minute[0].min, minute[0].max), (5, 10, 14));
    // A second opening does not complete the buckets twice.
    drop(disk);
    let mut disk = take(state.path(), 9, DAY + 52);
    assert_eq!(disk.read(&key("a"), 1).unwrap()[0].count, 5);
}

#[test]
fn a_file_of_a_later_version_is_left_alone_and_told_of_once() {
    let state = tempfile::tempdir().unwrap();
    let mut disk = take(state.path(), 9, DAY);
    put(&mut disk, "a", DAY);
    let path = disk.path(&key("a"));
    drop(disk);
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 2;
    fs::write(&path, &bytes).unwrap();
    let mut disk = take(state.path(), 9, DAY + 1);
    let WriteOutcome::Never(Some(told)) = put(&mut disk, "a", DAY + 10) else { panic!("written") };
    assert!(told.contains("later version"), "{told}");
    assert!(matches!(put(&mut disk, "a", DAY + 20), WriteOutcome::Never(None)));
    assert_eq!(disk.read(&key("a"), 0).unwrap(), []);
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

#[test]
fn a_file_that_is_gone_is_made_anew() {
    let state = tempfile::tempdir().unwrap();
    let mut disk = take(state.path(), 9, DAY);
    put(&mut disk, "a", DAY);
    fs::remove_file(disk.path(&key("a"))).unwrap();
    assert!(matches!(put(&mut disk, "a", DAY + 10), WriteOutcome::Done));
    assert_eq!(disk.read(&key("a"), 0).unwrap().len(), 1);
}
