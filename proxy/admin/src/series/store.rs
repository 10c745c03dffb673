//! The owner of recorded series. Threads never block while they hold the lock of the data in memory, but may
//! block while they hold the lock of the files. A thread may take the lock of the memory after that of the
//! files, but not vice versa.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use warden_policies::rollup::{
    PointRange, ReadingBucket, RollupReading, RollupTier, SeriesPolicy, in_range, reduce_points, tier_for,
    tiers,
};
use warden_supervisor::sync::lock;
use warden_supervisor::{WorkKind, run_job};

use super::disk::{SeriesFolder, WriteOutcome};
use super::key::SeriesKey;
use super::live::LiveBuckets;
use super::marks::{MarkHistory, SeriesMark};
use super::marks_file::MarksFile;
use crate::clock;

/// Limits the queries that wait for the disk, so that a hanging disk does not block more and more threads.
const MAX_READERS: usize = 4;

/// Cheap to clone.
#[derive(Clone)]
pub struct SeriesStore(Arc<StoreInner>);

struct StoreInner {
    policy: SeriesPolicy,
    tiers: [RollupTier; 4],
    state: PathBuf,
    kept: Mutex<StoreMemory>,
    files: Mutex<StoreFiles>,
    readers: Arc<Semaphore>,
}

struct StoreMemory {
    live: LiveBuckets,
    marks: MarkHistory,
    /// Marks that the file lacks.
    unwritten: Vec<SeriesMark>,
    /// Sentence that says where the series are stored.
    place: String,
}

struct StoreFiles {
    open: Option<(SeriesFolder, MarksFile)>,
    /// Time of the next attempt to open the files.
    retry_at: Option<Instant>,
    failing: bool,
    /// The successor writes the files.
    handed_over: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct FoundSeries {
    pub(super) key: SeriesKey,
    /// Length of a bucket in seconds, before buckets are merged for a plot.
    pub(super) width: u64,
    pub(super) buckets: Vec<ReadingBucket>,
}

/// Times are seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeriesSpan {
    /// Identity of the series.
    #[serde(flatten)]
    pub key: SeriesKey,
    /// Time of the first reading.
    pub from: u64,
    /// Time of the last reading or write.
    pub to: u64,
}

/// Error: the files of series cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SeriesStoreError {
    /// The disk does not answer, or too many queries wait.
    #[error("the files of series in {0} are slow: ask again in a moment")]
    Slow(PathBuf),
    /// The files of this folder cannot be read.
    #[error("cannot read the files of series in {0}: {1}")]
    Disk(PathBuf, io::Error),
}

impl SeriesStore {
    /// Opens no file before the first `flush`.
    pub fn new(policy: &SeriesPolicy, state: &Path) -> Self {
        Self(Arc::new(StoreInner {
            policy: *policy,
            tiers: tiers(policy),
            state: state.to_owned(),
            kept: Mutex::new(StoreMemory {
                live: LiveBuckets::new(policy),
                marks: MarkHistory::default(),
                unwritten: Vec::new(),
                place: "in this process only, so far".to_owned(),
            }),
            files: Mutex::new(StoreFiles { open: None, retry_at: None, failing: false, handed_over: false }),
            readers: Arc::new(Semaphore::new(MAX_READERS)),
        }))
    }

    /// Returns the configured resolution and sizes.
    pub fn policy(&self) -> &SeriesPolicy {
        &self.0.policy
    }

    fn memory(&self) -> MutexGuard<'_, StoreMemory> {
        lock(&self.0.kept)
    }

    fn files(&self) -> MutexGuard<'_, StoreFiles> {
        lock(&self.0.files)
    }

    /// Stops writing, because the successor writes from now on. Blocks briefly.
    pub fn hand_over_files(&self) {
        let files = &mut *self.files();
        files.open = None;
        files.handed_over = true;
    }

    pub(super) fn add_reading(&self, key: &SeriesKey, reading: &RollupReading) {
        self.memory().live.add_reading(key, reading);
    }

    pub(super) fn add_mark(&self, mark: SeriesMark) {
        let kept = &mut *self.memory();
        if kept.marks.add(mark.clone(), &self.0.policy) && kept.unwritten.len() < self.0.policy.marks {
            kept.unwritten.push(mark);
        }
    }

    /// Completes the open buckets, so that the next [`SeriesStore::flush`] writes them.
    pub(super) fn close(&self) {
        self.memory().live.close();
    }

    pub(super) fn storage_place(&self) -> String {
        self.memory().place.clone()
    }

    /// `from` and `to` are milliseconds since 1970.
    pub(super) fn marks(&self, model: &str, from: u64, to: u64) -> Vec<SeriesMark> {
        self.memory().marks.of_model(model, from, to)
    }

    /// Blocks, so callers must run on a thread that may wait.
    pub(super) fn flush(&self) {
        let files = &mut *self.files();
        let now = unix_seconds();
        self.memory().live.forget_quiet(now.saturating_mul(1000));
        if files.handed_over || files.open.is_none() && !self.open(files, now) {
            return;
        }
        let Some((disk, marks)) = &mut files.open else { return };
        let written = self.write(disk, marks, now);
        match written {
            Ok(()) if std::mem::replace(&mut files.failing, false) => {
                tracing::info!(folder = %disk.folder.display(), "memory readings are written again");
            }
            Ok(()) => {}
            Err(error) => {
                if !std::mem::replace(&mut files.failing, true) {
                    tracing::warn!(folder = %disk.folder.display(), %error, "memory readings cannot be written: \
                        they are kept in this process, while it has room; nothing else depends on them");
                }
            }
        }
    }

    fn write(&self, disk: &mut SeriesFolder, marks: &mut MarksFile, now: u64) -> io::Result<()> {
        // Marks are few, and the most useful data.
        let unwritten = std::mem::take(&mut self.memory().unwritten);
        if !unwritten.is_empty() {
            let kept = self.memory().marks.len();
            let all = || self.memory().marks.all().cloned().collect();
            if let Err(error) = marks.write(&unwritten, kept, all) {
                let kept = &mut *self.memory();
                kept.unwritten.splice(0..0, unwritten);
                kept.unwritten.truncate(self.0.policy.marks);
                return Err(error);
            }
        }
        let waiting = self.memory().live.waiting_keys();
        // If a file fails, still write the others.
        let mut failed = None;
        for key in waiting {
            let mut added = self.memory().live.take_waiting(&key);
            let written = disk.write(&key, &mut added, now);
            if !added.is_empty() {
                self.memory().live.give_back(&key, added);
            }
            match written {
                Ok(WriteOutcome::Never(Some(told))) => tracing::warn!("{told}"),
                Ok(_) => {}
                Err(error) => {
                    failed.get_or_insert_with(|| {
                        io::Error::new(error.kind(), format!("{}: {error}", key.file_name()))
                    });
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Returns whether the folder is open. Tries only if the next attempt is due.
    fn open(&self, files: &mut StoreFiles, now: u64) -> bool {
        if files.retry_at.is_some_and(|again| Instant::now() < again) {
            return false;
        }
        files.retry_at = Some(Instant::now() + self.0.policy.retry);
        let state = self.0.state.display();
        let why = match SeriesFolder::open(&self.0.state, &self.0.tiers, self.0.policy.bytes.0, now) {
            Ok(Some(disk)) => {
                let (file, marks) = MarksFile::open(&disk.folder);
                if let Some(refused) = file.refusal() {
                    tracing::warn!("{refused}");
                }
                if std::mem::replace(&mut files.failing, false) {
                    tracing::info!(folder = %disk.folder.display(), "memory readings are written from now on");
                }
                let kept = &mut *self.memory();
                kept.place = format!("in {}", disk.folder.display());
                for mark in marks {
                    kept.marks.add(mark, &self.0.policy);
                }
                files.open = Some((disk, file));
                return true;
            }
            Ok(None) => format!("another llama-warden writes memory readings to {state}"),
            Err(error) => format!("memory readings cannot be written to {state}: {error}"),
        };
        if !std::mem::replace(&mut files.failing, true) {
            tracing::warn!("{why}; they are kept in this process only, as long as that is so");
        }
        self.memory().place = format!("in this process only: {why}");
        false
    }

    pub(super) async fn spans(&self) -> Result<Vec<SeriesSpan>, SeriesStoreError> {
        self.read(|store| {
            let files = store.files();
            // Merge by key, because files and memory may each have a thousand series.
            let mut spans: BTreeMap<SeriesKey, (u64, u64)> = files
                .open
                .iter()
                .flat_map(|(disk, _)| disk.known())
                .map(|(key, known)| (key.clone(), (known.since, known.written)))
                .collect();
            let kept = store.memory();
            for key in kept.live.keys(None) {
                let now = kept.live.read_at(&key).unwrap_or(0) / 1000;
                if let Some((_, to)) = spans.get_mut(&key) {
                    *to = (*to).max(now);
                    continue;
                }
                let all = (0..store.0.tiers.len()).flat_map(|tier| kept.live.buckets(&key, tier));
                let from = all.map(|bucket| bucket.first_at / 1000).min().unwrap_or(now);
                spans.insert(key, (from, now));
            }
            // No plot shows records older than the longest tier.
            let oldest = unix_seconds()
                .saturating_sub(store.0.tiers.iter().map(|tier| tier.span()).max().unwrap_or(0));
            let shown = spans.into_iter().filter(|(_, (_, to))| *to >= oldest);
            Ok(shown.map(|(key, (from, to))| SeriesSpan { key, from: from.max(oldest), to }).collect())
        })
        .await
    }

    pub(super) async fn find(
        &self,
        model: &str,
        range: PointRange,
        now: u64,
    ) -> Result<Vec<FoundSeries>, SeriesStoreError> {
        let model = model.to_owned();
        self.read(move |store| store.find_now(&model, range, now)).await
    }

    fn find_now(&self, model: &str, range: PointRange, now: u64) -> io::Result<Vec<FoundSeries>> {
        let number = tier_for(&self.0.tiers, range, now);
        // This lock keeps buckets from moving from memory to a file.
        let mut files = self.files();
        let mut keys = self.memory().live.keys(Some(model));
        if let Some((disk, _)) = &files.open {
            keys.extend(disk.known().keys().filter(|key| key.model.as_str() == model).cloned());
        }
        keys.sort();
        keys.dedup();
        let mut all = Vec::new();
        for key in keys {
            let mut buckets = match &mut files.open {
                Some((disk, _)) => disk.read(&key, number)?,
                None => Vec::new(),
            };
            for bucket in self.memory().live.buckets(&key, number) {
                match buckets.iter_mut().find(|known| known.start == bucket.start) {
                    Some(known) => known.merge(&bucket),
                    None => buckets.push(bucket),
                }
            }
            buckets.retain(|bucket| in_range(bucket, range));
            buckets.sort_by_key(|bucket| bucket.start);
            let width = self.0.tiers[number].seconds;
            all.push(FoundSeries { key, width, buckets: reduce_points(&buckets, range.points) });
        }
        Ok(all)
    }

    /// Runs a query that reads files, on another thread and within a time limit.
    async fn read<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> Result<T, SeriesStoreError> {
        let store = self.clone();
        let asked = async {
            let permit = Arc::clone(&self.0.readers).acquire_owned().await.ok()?;
            // A query that timed out still waits for the disk, and keeps its permit until it ends.
            let work = run_job(WorkKind::StateFiles, move || {
                let _permit = permit;
                ask(&store)
            });
            work.await.ok()
        };
        match tokio::time::timeout(self.0.policy.patience, asked).await {
            Ok(Some(found)) => found.map_err(|error| SeriesStoreError::Disk(self.0.state.clone(), error)),
            Ok(None) | Err(_) => Err(SeriesStoreError::Slow(self.0.state.clone())),
        }
    }
}

pub(super) fn unix_seconds() -> u64 {
    unix_millis() / 1000
}

pub(super) fn unix_millis() -> u64 {
    u64::try_from(clock::now().as_millisecond()).unwrap_or(0)
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
