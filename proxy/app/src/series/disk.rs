//! The folder of series: one file each, within a limit, written by one instance at a time. Everything here
//! blocks on the disk, so callers use threads that may wait.
//!
//! ```text
//!  STATE/series/lock              held by the instance that writes
//!  STATE/series/m-NAME-….series   one series
//!  STATE/series/marks.jsonl       actions and their times: `marks_file`
//! ```
//!
//! **Foreign files stay.** A file is ours if its head says so. A file of a later version, or another
//! program's file under one of our names, is logged once and left alone. Its series is then kept in memory
//! only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};
use warden_policies::rollup::{ReadingBucket, RollupTier, rebuild_missing};

use super::key::{FILE_SUFFIX, SeriesKey};
use super::ring::{self, RingError, RingFile};

/// Name of the folder in a state directory.
const SERIES_DIR: &str = "series";

/// A series with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileRecord {
    /// Start of the record, in seconds since 1970.
    pub(super) since: u64,
    /// Time of the last write.
    pub(super) written: u64,
}

#[derive(Debug)]
pub(super) struct SeriesFolder {
    pub(super) folder: PathBuf,
    tiers: Vec<RollupTier>,
    /// Limit of files.
    max_files: usize,
    /// Locked while this lives.
    _lock: File,
    known: BTreeMap<SeriesKey, FileRecord>,
    /// Series whose wide buckets were completed since the folder was opened.
    complete: BTreeSet<SeriesKey>,
    /// Series whose file is not used, which was logged.
    refused: BTreeSet<SeriesKey>,
    /// True if the limit of files was logged.
    limit_logged: bool,
}

/// Outcome of a write.
#[derive(Debug)]
pub(super) enum WriteOutcome {
    Done,
    /// Not written: kept in memory only. The sentence is for the log; `None` if it was logged before.
    Never(Option<String>),
}

impl SeriesFolder {
    /// Opens and locks the folder, and reads the heads of its files. `Ok(None)`: another instance holds the
    /// lock.
    ///
    /// # Errors
    /// The folder cannot be created or read.
    pub(super) fn open(state: &Path, tiers: &[RollupTier], bytes: u64, now: u64) -> io::Result<Option<Self>> {
        let folder = state.join(SERIES_DIR);
        DirBuilder::new().recursive(true).mode(0o750).create(&folder)?;
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(i32::try_from(flags.bits()).unwrap_or(0))
            .open(folder.join("lock"))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let most = usize::try_from(bytes / ring::file_length(tiers).max(1)).unwrap_or(usize::MAX).max(1);
        let mut disk = Self {
            folder,
            tiers: tiers.to_vec(),
            max_files: most,
            _lock: lock,
            known: BTreeMap::new(),
            complete: BTreeSet::new(),
            refused: BTreeSet::new(),
            limit_logged: false,
        };
        disk.scan(now)?;
        Ok(Some(disk))
    }

    /// Reads the heads of all files. Removes files beyond the limit, but none for its age, because a clock
    /// may be wrong.
    fn scan(&mut self, now: u64) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().ends_with(FILE_SUFFIX) {
                continue;
            }
            let Ok(head) = ring::read_head(&entry.path()) else { continue };
            // A renamed file is an operator's copy.
            if entry.file_name().to_string_lossy() != head.key.file_name() {
                continue;
            }
            let written = u64::try_from(entry.metadata()?.mtime()).unwrap_or(0);
            self.known.insert(head.key, FileRecord { since: head.since, written });
        }
        while self.known.len() > self.max_files && self.remove_oldest(now, 0) {}
        Ok(())
    }

    /// All series with a file.
    pub(super) fn known(&self) -> &BTreeMap<SeriesKey, FileRecord> {
        &self.known
    }

    /// Removes the file that was not written for longest, if that is at least `rest` seconds. `false`:
    /// there is none.
    fn remove_oldest(&mut self, now: u64, rest: u64) -> bool {
        // After a clock was set back, files written now look older than files given up before, so `rest` is
        // checked by distance first.
        let resting = self.known.iter().filter(|(_, known)| known.written.abs_diff(now) >= rest);
        let oldest = resting.min_by_key(|(_, known)| known.written);
        let Some(key) = oldest.map(|(key, _)| key.clone()) else { return false };
        self.remove_series(&key);
        true
    }

    fn remove_series(&mut self, key: &SeriesKey) {
        self.known.remove(key);
        self.complete.remove(key);
        let path = self.path(key);
        // The name may refer to a foreign file by now.
        if ring::read_head(&path).is_ok_and(|head| head.key == *key) {
            drop(fs::remove_file(path));
        }
    }

    fn path(&self, key: &SeriesKey) -> PathBuf {
        self.folder.join(key.file_name())
    }

    /// Writes the added buckets of a series, each with the number of its tier. Buckets that could not be
    /// written stay in `added`.
    ///
    /// # Errors
    /// The disk fails or is full: a retry may succeed.
    pub(super) fn write(
        &mut self,
        key: &SeriesKey,
        added: &mut Vec<(usize, ReadingBucket)>,
        now: u64,
    ) -> io::Result<WriteOutcome> {
        if self.refused.contains(key) {
            return Ok(WriteOutcome::Never(None));
        }
        let ring = match self.open_ring(key, now) {
            Ok(Some(ring)) => ring,
            Ok(None) => {
                let told = std::mem::replace(&mut self.limit_logged, true);
                return Ok(WriteOutcome::Never((!told).then(|| self.too_many(key))));
            }
            // A folder or a link is at that name: it stays.
            Err(RingError::Io(error)) if !is_wrong_file_kind(&error) => return Err(error),
            Err(problem) => return Ok(self.refuse_series(key, &problem)),
        };
        // The finest tier first: if we are killed in between, the others are completed from it.
        added.sort_by_key(|(tier, bucket)| (*tier, bucket.start));
        while let Some((tier, bucket)) = added.first() {
            ring.merge(*tier, bucket)?;
            added.remove(0);
        }
        self.known.insert(key.clone(), FileRecord { since: ring.since, written: now });
        Ok(WriteOutcome::Done)
    }

    /// The series' file, with complete buckets; `None` beyond the limit of files.
    fn open_ring(&mut self, key: &SeriesKey, now: u64) -> Result<Option<RingFile>, RingError> {
        let path = self.path(key);
        let ring = match RingFile::open(&path, key, &self.tiers, true) {
            Ok(ring) => ring,
            Err(RingError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                self.known.remove(key);
                self.complete.insert(key.clone());
                // A file that is still being written is not removed for another.
                while self.known.len() >= self.max_files {
                    if !self.remove_oldest(now, 3600) {
                        return Ok(None);
                    }
                }
                return RingFile::create(&path, key, &self.tiers, now).map(Some);
            }
            Err(problem) => return Err(problem),
        };
        self.complete_tiers(key, &ring)?;
        Ok(Some(ring))
    }

    /// Completes the wide buckets that a killed writer has left behind.
    fn complete_tiers(&mut self, key: &SeriesKey, ring: &RingFile) -> io::Result<()> {
        if self.complete.contains(key) {
            return Ok(());
        }
        let fine = ring.read(0)?;
        for (number, tier) in self.tiers.iter().enumerate().skip(1) {
            let newest = ring.read(number)?.iter().map(|bucket| bucket.last_at).max().unwrap_or(0);
            for bucket in rebuild_missing(*tier, newest, &fine) {
                ring.merge(number, &bucket)?;
            }
        }
        self.complete.insert(key.clone());
        Ok(())
    }

    fn refuse_series(&mut self, key: &SeriesKey, why: &RingError) -> WriteOutcome {
        self.refused.insert(key.clone());
        let path = self.path(key);
        WriteOutcome::Never(Some(format!(
            "memory readings of `{}` are kept in this process only, because {} is not used: {why}",
            key.model,
            path.display()
        )))
    }

    fn too_many(&self, key: &SeriesKey) -> String {
        format!(
            "memory readings of `{}` are kept in this process only, because {} files are written in {}, and there may be no more: it gets one \
             as soon as another was not written for an hour",
            key.model,
            self.known.len(),
            self.folder.display()
        )
    }

    /// Buckets of one tier of a series; none if it has no file.
    ///
    /// # Errors
    /// The disk fails.
    pub(super) fn read(&mut self, key: &SeriesKey, tier: usize) -> io::Result<Vec<ReadingBucket>> {
        let opened = RingFile::open(&self.path(key), key, &self.tiers, true);
        match opened {
            Ok(ring) => {
                self.complete_tiers(key, &ring)?;
                ring.read(tier)
            }
            Err(RingError::Io(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Err(_) => Ok(Vec::new()),
        }
    }
}

/// Returns true if opening fails because of the kind of file at that name, not because of the disk.
fn is_wrong_file_kind(error: &io::Error) -> bool {
    let link = rustix::io::Errno::LOOP.raw_os_error();
    matches!(error.kind(), io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory)
        || error.raw_os_error() == Some(link)
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
