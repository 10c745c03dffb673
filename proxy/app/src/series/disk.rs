//! The folder of series: one file each, within a bound, written by one instance at a time. Everything here waits for the disk, so it is used
//! only where that holds up nobody.
//!
//! ```text
//!  STATE/series/lock              held by the instance that writes
//!  STATE/series/m-NAME-….series   one series
//!  STATE/series/marks.jsonl       what was done and when: `marks_file`
//! ```
//!
//! **What is not ours stays.** A file is ours if its head says so. One of a later version, or somebody's under a name of ours, is told of once and
//! left alone; its series is then kept in memory only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};
use warden_policies::rollup::{Bucket, Tier, missing};

use super::key::{END, Key};
use super::ring::{self, Ring, RingError};

/// The folder in a state directory.
const FOLDER: &str = "series";

/// A series that has a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    /// Since when it is kept, in seconds since 1970.
    pub(super) since: u64,
    /// When it was written last.
    pub(super) written: u64,
}

#[derive(Debug)]
pub(super) struct Disk {
    pub(super) folder: PathBuf,
    tiers: Vec<Tier>,
    /// Files at most.
    most: usize,
    /// Held as long as this lives.
    _lock: File,
    known: BTreeMap<Key, Known>,
    /// Series whose file was brought up to date since this is open.
    complete: BTreeSet<Key>,
    /// Series whose file is not used: told.
    refused: BTreeSet<Key>,
    /// That there are too many was told.
    full: bool,
}

/// What became of a write.
#[derive(Debug)]
pub(super) enum Written {
    Done,
    /// It does not, or not now: kept in memory only. The sentence is to be told; `None` if it was.
    Never(Option<String>),
}

impl Disk {
    /// Takes the folder, and looks through what is there. `Ok(None)`: another instance has it.
    ///
    /// # Errors
    /// It cannot be made or read.
    pub(super) fn take(state: &Path, tiers: &[Tier], bytes: u64, now: u64) -> io::Result<Option<Self>> {
        let folder = state.join(FOLDER);
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
        let most = usize::try_from(bytes / ring::length(tiers).max(1)).unwrap_or(usize::MAX).max(1);
        let mut disk = Self {
            folder,
            tiers: tiers.to_vec(),
            most,
            _lock: lock,
            known: BTreeMap::new(),
            complete: BTreeSet::new(),
            refused: BTreeSet::new(),
            full: false,
        };
        disk.look_through(now)?;
        Ok(Some(disk))
    }

    /// Which files of series are there. Those that are too many go; none goes for its age, because a clock may be wrong.
    fn look_through(&mut self, now: u64) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if !entry.file_name().to_string_lossy().ends_with(END) {
                continue;
            }
            let Ok(head) = ring::look(&entry.path()) else { continue };
            // One that was renamed is somebody's copy.
            if entry.file_name().to_string_lossy() != head.key.file() {
                continue;
            }
            let written = u64::try_from(entry.metadata()?.mtime()).unwrap_or(0);
            self.known.insert(head.key, Known { since: head.since, written });
        }
        while self.known.len() > self.most && self.forget_one(now, 0) {}
        Ok(())
    }

    /// All that is there.
    pub(super) fn known(&self) -> &BTreeMap<Key, Known> {
        &self.known
    }

    /// Makes room for another file: the one goes that was not written for longest, and not within `rest` seconds.
    fn forget_one(&mut self, now: u64, rest: u64) -> bool {
        // After a clock was set back, what is written now is older than what was given up before: it is asked first who rests.
        let resting = self.known.iter().filter(|(_, known)| known.written.abs_diff(now) >= rest);
        let oldest = resting.min_by_key(|(_, known)| known.written);
        let Some(key) = oldest.map(|(key, _)| key.clone()) else { return false };
        self.forget(&key);
        true
    }

    fn forget(&mut self, key: &Key) {
        self.known.remove(key);
        self.complete.remove(key);
        let path = self.path(key);
        // Somebody may have put something of theirs into its place.
        if ring::look(&path).is_ok_and(|head| head.key == *key) {
            drop(fs::remove_file(path));
        }
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(key.file())
    }

    /// Writes what was added to a series, each bucket with the number of its tier. Whatever it cannot write is left in `added`.
    ///
    /// # Errors
    /// The disk fails or is full: it is worth trying again.
    pub(super) fn write(
        &mut self,
        key: &Key,
        added: &mut Vec<(usize, Bucket)>,
        now: u64,
    ) -> io::Result<Written> {
        if self.refused.contains(key) {
            return Ok(Written::Never(None));
        }
        let ring = match self.opened(key, now) {
            Ok(Some(ring)) => ring,
            Ok(None) => {
                let told = std::mem::replace(&mut self.full, true);
                return Ok(Written::Never((!told).then(|| self.too_many(key))));
            }
            // Somebody put a folder or a link there: it stays.
            Err(RingError::Io(error)) if !is_in_the_way(&error) => return Err(error),
            Err(problem) => return Ok(self.refuse(key, &problem)),
        };
        // The finest first: what the others lack if we are killed in between comes from it.
        added.sort_by_key(|(tier, bucket)| (*tier, bucket.start));
        while let Some((tier, bucket)) = added.first() {
            ring.merge(*tier, bucket)?;
            added.remove(0);
        }
        self.known.insert(key.clone(), Known { since: ring.since, written: now });
        Ok(Written::Done)
    }

    /// Its file, complete; `None` if there may be no more files.
    fn opened(&mut self, key: &Key, now: u64) -> Result<Option<Ring>, RingError> {
        let path = self.path(key);
        let ring = match Ring::open(&path, key, &self.tiers, true) {
            Ok(ring) => ring,
            Err(RingError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                self.known.remove(key);
                self.complete.insert(key.clone());
                // One that is written at this time is not given up for another.
                while self.known.len() >= self.most {
                    if !self.forget_one(now, 3600) {
                        return Ok(None);
                    }
                }
                return Ring::make(&path, key, &self.tiers, now).map(Some);
            }
            Err(problem) => return Err(problem),
        };
        self.complete(key, &ring)?;
        Ok(Some(ring))
    }

    /// Brings the wide buckets up to date that a killed writer has left behind.
    fn complete(&mut self, key: &Key, ring: &Ring) -> io::Result<()> {
        if self.complete.contains(key) {
            return Ok(());
        }
        let fine = ring.read(0)?;
        for (number, tier) in self.tiers.iter().enumerate().skip(1) {
            let newest = ring.read(number)?.iter().map(|bucket| bucket.last_at).max().unwrap_or(0);
            for bucket in missing(*tier, newest, &fine) {
                ring.merge(number, &bucket)?;
            }
        }
        self.complete.insert(key.clone());
        Ok(())
    }

    fn refuse(&mut self, key: &Key, why: &RingError) -> Written {
        self.refused.insert(key.clone());
        let path = self.path(key);
        Written::Never(Some(format!(
            "what the memory of `{}` does is kept in this process only, because {} is not used: {why}",
            key.model,
            path.display()
        )))
    }

    fn too_many(&self, key: &Key) -> String {
        format!(
            "what the memory of `{}` does is kept in this process only, because {} files are written in {}, and there may be no more: it gets one \
             as soon as another was not written for an hour",
            key.model,
            self.known.len(),
            self.folder.display()
        )
    }

    /// The buckets of a tier of a series; none if it has no file.
    ///
    /// # Errors
    /// The disk fails.
    pub(super) fn read(&mut self, key: &Key, tier: usize) -> io::Result<Vec<Bucket>> {
        let opened = Ring::open(&self.path(key), key, &self.tiers, true);
        match opened {
            Ok(ring) => {
                self.complete(key, &ring)?;
                ring.read(tier)
            }
            Err(RingError::Io(error)) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Err(_) => Ok(Vec::new()),
        }
    }
}

/// Whether it is what lies at a name, and not the disk, that keeps us from opening it.
fn is_in_the_way(error: &io::Error) -> bool {
    let link = rustix::io::Errno::LOOP.raw_os_error();
    matches!(error.kind(), io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory)
        || error.raw_os_error() == Some(link)
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
