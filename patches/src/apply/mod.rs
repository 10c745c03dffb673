//! Writes a series of patch sets into a folder, and takes it out again, to the byte.
//!
//! ```text
//!   apply:    judged edits ──> record of the originals ──> each changed file
//!   reverse:  record ──> each original file ──> record removed
//! ```
//!
//! All contents are known before the first write, and a write that fails undoes those before it. The record is written
//! first, so that a folder in which writing was cut off can be reversed, or applied to again. A file that is neither as
//! recorded nor as patched was edited by its owner: then nothing is touched.

mod edited;
mod record;
#[cfg(test)]
mod tests;
mod write;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use self::edited::{describe_edits, without_marked};
use self::record::{PatchRecord, RecordedFile};
use self::write::{FileChange, check_all, read_file, sync_folder, write_all};
use crate::error::{Result, io_error, refused};
use crate::judgement::Edits;
use crate::revision::Revision;
use crate::series::Series;
use crate::tree::{FolderTree, Overlay, sha256};

pub use self::record::AppliedSet;

/// A llama.cpp in a folder that patches are written into.
pub struct Target {
    /// The folder, locked against a second run as long as this lives.
    _lock: FolderLock,
    tree: FolderTree,
    record: Option<PatchRecord>,
}

/// The result of applying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The sets were written.
    Written,
    /// They were there already; nothing was touched.
    Already,
    /// No set has anything to change here.
    Nothing,
}

/// The result of reversing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reversed {
    /// The sets that are gone; empty when none was there.
    pub sets: Vec<AppliedSet>,
    /// The files that were restored or removed.
    pub files: Vec<String>,
}

/// A recorded file as it is on disk.
enum FileState {
    Original,
    Patched(Vec<u8>),
    /// Edited; none: removed.
    Edited(Option<Vec<u8>>),
}

/// The lock of a folder. Dropping it unlocks the folder instead of only closing the file: a child that another thread has forked and that
/// has not called exec yet holds the file, too.
struct FolderLock(File);

impl FolderLock {
    fn take(root: &Path) -> Result<Self> {
        let folder = File::open(root).map_err(io_error("opening", root))?;
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(refused(
                root,
                "another run reads or writes patches here".to_owned(),
                "wait until it has ended, and try again",
            )),
            // Some network filesystems have no locks.
            Ok(()) | Err(_) => Ok(Self(folder)),
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        let _unlocked = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

impl Target {
    /// Takes the llama.cpp whose root is this folder.
    ///
    /// # Errors
    ///
    /// Another run holds the folder, or the record of applied patches is damaged.
    pub fn open(root: &Path, revision: Revision) -> Result<Self> {
        let lock = FolderLock::take(root)?;
        Ok(Self { _lock: lock, tree: FolderTree::new(root, revision), record: PatchRecord::read(root)? })
    }

    /// The tree without our patches, whether they are applied or not: to be judged.
    ///
    /// # Errors
    ///
    /// A patched file was edited since.
    pub fn original(&self) -> Result<Overlay<'_>> {
        let mut original = Overlay::new(&self.tree);
        if let Some(record) = &self.record {
            self.unedited_states(record)?;
            for file in &record.files {
                original.put(file.path.clone(), file.original(self.root())?);
            }
        }
        Ok(original)
    }

    /// Writes a series of sets that was judged on [`Target::original`]. The caller decides whether the series may be
    /// written; see [`Series::blocking`].
    ///
    /// # Errors
    ///
    /// Other sets are applied, a file was edited since they were, or writing failed; then nothing has changed, or the
    /// error says that reversing is needed.
    pub fn apply(&mut self, series: &Series) -> Result<Applied> {
        let changes = list_changes(&series.edits);
        let Some(record) = &self.record else { return self.apply_first(series, &changes) };
        let states = self.unedited_states(record)?;
        let same = record.files.len() == changes.len()
            && record.files.iter().zip(&changes).all(|(file, change)| {
                file.path == change.path && change.to.as_deref().map(sha256).as_ref() == Some(&file.patched)
            });
        if !same {
            let there: Vec<String> = record.sets.iter().map(ToString::to_string).collect();
            return Err(refused(
                self.root(),
                format!("it has {} applied, and this would be {}", there.join("+"), series.id()),
                &format!(
                    "take the others out first: llama-warden patches apply --reverse --source {}",
                    self.root().display()
                ),
            ));
        }
        let pairs = changes.into_iter().zip(states);
        let missing: Vec<FileChange> = pairs
            .filter(|(_, state)| matches!(state, FileState::Original))
            .map(|(change, _)| change)
            .collect();
        write_all(self.root(), &missing)?;
        Ok(if missing.is_empty() { Applied::Already } else { Applied::Written })
    }

    /// Takes everything out again.
    ///
    /// # Errors
    ///
    /// The owner edited a patched file since, so that its patched lines cannot be separated from the edits; or writing failed.
    pub fn reverse(&mut self) -> Result<Reversed> {
        let Some(record) = &self.record else {
            return Ok(Reversed { sets: Vec::new(), files: Vec::new() });
        };
        let mut changes = Vec::new();
        let mut edited = Vec::new();
        for file in &record.files {
            let original = file.original(self.root())?;
            let from = match self.state(file)? {
                FileState::Original => continue,
                FileState::Patched(found) => Some(found),
                FileState::Edited(found) => {
                    let unmarked = found.as_ref().map(|found| without_marked(found, &record.sets));
                    if unmarked != original {
                        edited.push(self.describe_file(record, file, found.as_deref())?);
                    }
                    found
                }
            };
            changes.push(FileChange { path: file.path.clone(), from, to: original });
        }
        self.refuse_edited(&edited)?;
        write_all(self.root(), &changes)?;
        // After a power cut the record must be there as long as one original is not.
        let paths: Vec<PathBuf> = changes.iter().map(|change| self.root().join(&change.path)).collect();
        let folders: BTreeSet<&Path> =
            paths.iter().filter_map(|path| path.ancestors().skip(1).find(|folder| folder.is_dir())).collect();
        folders.into_iter().try_for_each(sync_folder)?;
        PatchRecord::remove(self.root())?;
        let sets = record.sets.clone();
        self.record = None;
        Ok(Reversed { sets, files: changes.into_iter().map(|change| change.path).collect() })
    }

    fn apply_first(&mut self, series: &Series, changes: &[FileChange]) -> Result<Applied> {
        if changes.is_empty() {
            return Ok(Applied::Nothing);
        }
        check_all(self.root(), changes)?;
        let sets = series.sets().into_iter().map(|(id, hash)| AppliedSet { id, hash });
        let files = changes.iter().map(|change| {
            RecordedFile::new(&change.path, change.from.as_deref(), change.to.as_deref().unwrap_or_default())
        });
        let record = PatchRecord::new(sets.collect(), files.collect());
        record.write(self.root())?;
        sync_folder(self.root())?;
        if let Err(error) = write_all(self.root(), changes) {
            // Without this the next apply would find a record of sets that are not there.
            if record.files.iter().all(|file| matches!(self.state(file), Ok(FileState::Original))) {
                PatchRecord::remove(self.root())?;
            }
            return Err(error);
        }
        self.record = Some(record);
        Ok(Applied::Written)
    }

    fn root(&self) -> &Path {
        self.tree.root()
    }

    fn state(&self, file: &RecordedFile) -> Result<FileState> {
        let found = read_file(self.root(), &file.path)?;
        Ok(match found {
            found if found == file.original(self.root())? => FileState::Original,
            Some(found) if sha256(&found) == file.patched => FileState::Patched(found),
            found => FileState::Edited(found),
        })
    }

    /// The states of the recorded files, none of them edited.
    fn unedited_states(&self, record: &PatchRecord) -> Result<Vec<FileState>> {
        let mut states = Vec::new();
        let mut edited = Vec::new();
        for file in &record.files {
            let state = self.state(file)?;
            if let FileState::Edited(found) = &state {
                edited.push(self.describe_file(record, file, found.as_deref())?);
            }
            states.push(state);
        }
        self.refuse_edited(&edited)?;
        Ok(states)
    }

    fn describe_file(
        &self,
        record: &PatchRecord,
        file: &RecordedFile,
        found: Option<&[u8]>,
    ) -> Result<String> {
        let text = match (file.original(self.root())?, found) {
            (Some(original), Some(found)) => describe_edits(&file.path, &original, found, &record.sets),
            (None, Some(_)) => format!("  {}: is no longer the file that was created", file.path),
            (_, None) => format!("  {}: was removed", file.path),
        };
        Ok(text)
    }

    fn refuse_edited(&self, edited: &[String]) -> Result<()> {
        if edited.is_empty() {
            return Ok(());
        }
        Err(refused(
            self.root(),
            format!(
                "it was edited after the patches were applied (- original, + now):\n{}",
                edited.join("\n")
            ),
            "undo these edits and try again; or restore the files yourself (in a checkout: git checkout -- FILE) and \
             then reverse",
        ))
    }
}

fn list_changes(edits: &Edits) -> Vec<FileChange> {
    let mut changes: Vec<FileChange> = edits
        .0
        .iter()
        .filter(|edit| edit.before.as_ref() != Some(&edit.after))
        .map(|edit| FileChange {
            path: edit.path.clone(),
            from: edit.before.clone(),
            to: Some(edit.after.clone()),
        })
        .collect();
    changes.sort_by(|left, right| left.path.cmp(&right.path));
    changes
}
