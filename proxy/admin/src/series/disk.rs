//! The folder of series: one file per series, up to a limit. Only one instance writes at a time. All calls
//! block on the disk, so callers must run on threads that may wait.
//!
//! ```text
//!  STATE/series/lock              held by the instance that writes
//!  STATE/series/m-NAME-….series   one series
//!  STATE/series/marks.jsonl       actions and their times: `marks_file`
//! ```
//!
//! A file belongs to llama-warden only if its head says so. Another file with the name of a series is logged
//! once and left alone; that series stays in memory only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};
use warden_policies::rollup::{ReadingBucket, RollupTier, rebuild_missing};

use super::key::{FILE_SUFFIX, SeriesKey};
use super::ring::{self, RingError, RingFile};

const SERIES_DIR: &str = "series";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileRecord {
    /// In seconds since 1970.
    pub(super) since: u64,
    /// Time of the last write, in seconds since 1970.
    pub(super) written: u64,
}

#[derive(Debug)]
pub(super) struct SeriesFolder {
    pub(super) folder: PathBuf,
    tiers: Vec<RollupTier>,
    max_files: usize,
    _lock: File,
    known: BTreeMap<SeriesKey, FileRecord>,
    /// Series whose wider buckets were completed after the folder was opened.
    complete: BTreeSet<SeriesKey>,
    /// Series with a foreign or unusable file, which was logged.
    refused: BTreeSet<SeriesKey>,
    /// The log already says that the limit of files is reached.
    limit_logged: bool,
}

#[derive(Debug)]
pub(super) enum WriteOutcome {
    Done,
    /// The series stays in memory only. The text is for the log; `None` if it was logged before.
    Never(Option<String>),
}

impl SeriesFolder {
    /// Locks the folder, and reads the heads of its files. Returns `Ok(None)` if another instance holds the
    /// lock.
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

    /// Removes files beyond the limit, but no file because of its age alone: the clock may be wrong.
    fn scan(&mut self, now: u64) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().ends_with(FILE_SUFFIX) {
                continue;
            }
            let Ok(head) = ring::read_head(&entry.path()) else { continue };
            // A file under another name is an operator's copy.
            if entry.file_name().to_string_lossy() != head.key.file_name() {
                continue;
            }
            let written = u64::try_from(entry.metadata()?.mtime()).unwrap_or(0);
            self.known.insert(head.key, FileRecord { since: head.since, written });
        }
        while self.known.len() > self.max_files && self.remove_oldest(now, 0) {}
        Ok(())
    }

    pub(super) fn known(&self) -> &BTreeMap<SeriesKey, FileRecord> {
        &self.known
    }

    /// Removes the file with the oldest write, unless that write is less than `rest` seconds ago. Returns
    /// whether a file was removed.
    fn remove_oldest(&mut self, now: u64, rest: u64) -> bool {
        // After the clock was set back, files in use look older than unused files. So first filter by the
        // distance to the current time.
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
        // Another program may have replaced the file.
        if ring::read_head(&path).is_ok_and(|head| head.key == *key) {
            drop(fs::remove_file(path));
        }
    }

    fn path(&self, key: &SeriesKey) -> PathBuf {
        self.folder.join(key.file_name())
    }

    /// Writes added buckets, each with the number of its tier. After an error, `added` contains the buckets
    /// that were not written; a retry may succeed.
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
            // Leave a folder or a link of that name alone.
            Err(RingError::Io(error)) if !is_wrong_file_kind(&error) => return Err(error),
            Err(problem) => return Ok(self.refuse_series(key, &problem)),
        };
        // Write the finest tier first: if the process is killed in between, `complete_tiers` completes the
        // wider tiers from it.
        added.sort_by_key(|(tier, bucket)| (*tier, bucket.start));
        while let Some((tier, bucket)) = added.first() {
            ring.merge(*tier, bucket)?;
            added.remove(0);
        }
        self.known.insert(key.clone(), FileRecord { since: ring.since, written: now });
        Ok(WriteOutcome::Done)
    }

    /// Returns `None` if the limit of files is reached.
    fn open_ring(&mut self, key: &SeriesKey, now: u64) -> Result<Option<RingFile>, RingError> {
        let path = self.path(key);
        let ring = match RingFile::open(&path, key, &self.tiers, true) {
            Ok(ring) => ring,
            Err(RingError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                self.known.remove(key);
                self.complete.insert(key.clone());
                // Keep files that were written within the last hour.
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

    /// Completes wider buckets that were incomplete when an earlier process was killed.
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
            "memory readings of `{}` are kept in this process only, because {} files are written in {}, and \
             there may be no more: it gets one as soon as another was not written for an hour",
            key.model,
            self.known.len(),
            self.folder.display()
        )
    }

    /// Returns no buckets if the series has no file.
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

/// Returns whether a folder or a link has the file's name.
fn is_wrong_file_kind(error: &io::Error) -> bool {
    let link = rustix::io::Errno::LOOP.raw_os_error();
    matches!(error.kind(), io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory)
        || error.raw_os_error() == Some(link)
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
