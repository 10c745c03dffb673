//! The store as a whole: readings are found, even if the files are lost meanwhile.

use std::fs;

use warden_policies::rollup::RollupContext;
use warden_policies::{MemoryKind, ModelName};

use super::super::marks::SeriesMarkKind;
use super::*;

fn key(model: &str) -> SeriesKey {
    SeriesKey { model: ModelName::new(model), replica: 0, memory: MemoryKind::Host }
}

fn store(state: &Path) -> SeriesStore {
    SeriesStore::new(&warden_policies::defaults().series, state)
}

/// The start of a minute in the past.
fn before() -> u64 {
    (unix_seconds() - 1800) / 60 * 60
}

fn read(store: &SeriesStore, model: &str, second: u64, bytes: u64) {
    store.add_reading(
        &key(model),
        &RollupReading { at: second * 1000, bytes, lines: RollupContext::default() },
    );
}

fn mark(model: &str) -> SeriesMark {
    let (replica, memory, generation) = (None, None, None);
    let (at, model) = (unix_millis() - 60_000, ModelName::new(model));
    SeriesMark { at, model, replica, memory, generation, kind: SeriesMarkKind::Replaced, words: "why".into() }
}

async fn count(store: &SeriesStore, model: &str, seconds: u64) -> u64 {
    let now = unix_seconds();
    let range = PointRange { from: now - seconds, to: now + 1, points: 1000 };
    let found = store.find(model, range, now).await.unwrap();
    found.iter().flat_map(|found| &found.buckets).map(|bucket| bucket.count).sum()
}

const HOUR: u64 = 3600;
const MONTH: u64 = 30 * 86_400;

#[tokio::test]
async fn what_was_read_is_found_at_once_after_a_write_and_after_a_restart() {
    let state = tempfile::tempdir().unwrap();
    let first = store(state.path());
    let start = before();
    (0..30).for_each(|n| read(&first, "a/b c", start + n * 5, 1000 + n));
    for seconds in [HOUR, 86_400, 7 * 86_400, MONTH] {
        assert_eq!(count(&first, "a/b c", seconds).await, 30, "{seconds}: before it is written");
    }
    first.flush();
    first.add_mark(mark("a/b c"));
    read(&first, "a/b c", start + 200, 7);
    first.flush();
    for seconds in [HOUR, 86_400, 7 * 86_400, MONTH] {
        assert_eq!(count(&first, "a/b c", seconds).await, 31, "{seconds}: partly written");
    }
    assert_eq!(first.spans().await.unwrap()[0].key, key("a/b c"));
    // Simulate a regular end of the program.
    first.close();
    first.flush();
    drop(first);
    let second = store(state.path());
    second.flush();
    for seconds in [HOUR, 86_400, 7 * 86_400, MONTH] {
        assert_eq!(count(&second, "a/b c", seconds).await, 31, "{seconds}: after a restart");
    }
    assert_eq!(second.marks("a/b c", 0, u64::MAX).len(), 1);
    assert_eq!(second.marks("other", 0, u64::MAX), []);
}

#[tokio::test]
async fn a_kill_costs_at_most_what_was_not_complete() {
    let state = tempfile::tempdir().unwrap();
    let first = store(state.path());
    // Recent times: open buckets may still be completed.
    let start = (unix_seconds() - 145) / 10 * 10;
    (0..30).for_each(|n| read(&first, "a", start + n * 5, 1000 + n));
    first.flush();
    // Simulate a kill: no bucket is closed.
    drop(first);
    let second = store(state.path());
    second.flush();
    for seconds in [HOUR, 86_400, 7 * 86_400, MONTH] {
        assert_eq!(count(&second, "a", seconds).await, 28, "{seconds}");
    }
}

#[tokio::test]
async fn a_second_instance_keeps_its_own_in_memory_and_goes_on_in_files_when_the_first_has_ended() {
    let state = tempfile::tempdir().unwrap();
    let (first, second) = (store(state.path()), store(state.path()));
    let start = before();
    first.flush();
    second.flush();
    assert!(second.storage_place().contains("another llama-warden"), "{}", second.storage_place());
    read(&first, "a", start, 1);
    read(&second, "a", start + 1, 2);
    first.flush();
    second.flush();
    assert_eq!((count(&first, "a", HOUR).await, count(&second, "a", HOUR).await), (1, 1));
    first.close();
    first.flush();
    drop(first);
    second.files().retry_at = None;
    second.flush();
    assert!(second.storage_place().starts_with("in /"), "{}", second.storage_place());
    assert_eq!(count(&second, "a", HOUR).await, 2);
    second.close();
    second.flush();
    assert_eq!(count(&second, "a", MONTH).await, 2);
}

#[tokio::test]
async fn without_a_folder_it_goes_on_in_memory_and_without_room_nothing_is_lost_that_memory_holds() {
    let state = tempfile::tempdir().unwrap();
    fs::write(state.path().join("series"), "mine").unwrap();
    let store = store(state.path());
    let start = before();
    (0..30).for_each(|n| read(&store, "a", start + n * 5, 1000 + n));
    store.add_mark(mark("a"));
    store.flush();
    assert!(store.storage_place().contains("cannot be written"), "{}", store.storage_place());
    assert_eq!(count(&store, "a", HOUR).await, 30);
    fs::remove_file(state.path().join("series")).unwrap();
    store.files().retry_at = None;
    store.flush();
    assert_eq!(count(&store, "a", MONTH).await, 30);
    assert!(fs::read_to_string(state.path().join("series/marks.jsonl")).unwrap().contains("why"));
    fs::remove_dir_all(state.path().join("series")).unwrap();
    read(&store, "a", start + 300, 5);
    read(&store, "a", start + 330, 5);
    store.flush();
    assert!(store.files().failing);
    fs::create_dir(state.path().join("series")).unwrap();
    store.flush();
    assert!(!store.files().failing);
    assert!(count(&store, "a", HOUR).await >= 2);
}

#[tokio::test]
async fn somebodys_files_under_our_names_stay() {
    let state = tempfile::tempdir().unwrap();
    let folder = state.path().join("series");
    fs::create_dir(&folder).unwrap();
    let names = [key("a").file_name(), "marks.jsonl".to_owned(), "mine.series".to_owned(), "lock".to_owned()];
    for name in &names {
        fs::write(folder.join(name), "mine").unwrap();
    }
    let store = store(state.path());
    read(&store, "a", before(), 1);
    read(&store, "a", before() + 20, 1);
    store.add_mark(mark("a"));
    store.flush();
    store.close();
    store.flush();
    for name in &names {
        assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), "mine", "{name}");
    }
    assert_eq!(count(&store, "a", HOUR).await, 2);
}
