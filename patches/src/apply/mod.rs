//! Writes a row of patch sets into a folder, and takes it out again: all or nothing, to the byte.
//!
//! ```text
//!            journal written      files renamed into place
//!   plain ───────────────────> * ──────────────────────────> patched
//!     ^                        │ crash: every file is as it    │
//!     │                        │ was, or as it was to become   │
//!     └── journal removed ── * <───────────────────────────────┘
//!                                     files restored
//! ```
//!
//! At both stars the next apply finishes, and the next reverse undoes: the journal knows each file's two states. A
//! file that is in neither was edited by somebody else; then nothing is touched.

mod change;
mod disk;
mod edited;
mod fault;
mod journal;
mod original;
mod splice;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use self::change::{Change, commit, sweep};
use self::disk::{Disk, RealDisk};
use self::edited::{differences, without_marked};
use self::fault::{half_written, refused, trouble};
use self::journal::{Journal, JournalFile, Seen, sha256};
use crate::error::{Result, io_error};
use crate::judgement::{Edits, Status};
use crate::marker::{marked, marker};
use crate::revision::Revision;
use crate::series::Series;

pub use journal::AppliedSet;
use journal::JOURNAL;
pub use original::Original;

/// A llama.cpp in a folder that patches are written into. Nobody else can have the same one until it is dropped.
pub struct Target {
    root: PathBuf,
    revision: Revision,
    journal: Option<Journal>,
    disk: Box<dyn Disk>,
    lock: File,
}

impl Drop for Target {
    /// Closing would be enough, were it not for processes that are just being started and still share our files.
    fn drop(&mut self) {
        let _closing_does_it_too = flock(&self.lock, FlockOperation::Unlock);
    }
}

/// What applying did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The sets were written.
    Written,
    /// They were there already; nothing was touched.
    Already,
    /// An earlier run had been interrupted; the rest was written.
    Finished,
    /// No set has anything to change here.
    Nothing,
}

/// What reversing did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reversed {
    /// The sets that are gone; empty when none was there.
    pub sets: Vec<AppliedSet>,
    /// The files that were restored or removed.
    pub files: Vec<String>,
}

impl Target {
    /// Takes the llama.cpp whose root this folder is.
    ///
    /// # Errors
    ///
    /// Somebody else is patching it, or its journal is damaged.
    pub fn open(root: &Path, revision: Revision) -> Result<Self> {
        Self::with_disk(root, revision, Box::new(RealDisk))
    }

    fn with_disk(root: &Path, revision: Revision, disk: Box<dyn Disk>) -> Result<Self> {
        // The folder itself is the lock: a file would be left behind in somebody's tree.
        let lock = File::open(root).map_err(io_error("opening", root))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(trouble(
                    root,
                    "another llama-warden is patching this tree right now",
                    "wait until it is done",
                ));
            }
            Err(error) => return Err(io_error("locking", root)(error.into())),
        }
        let mut target = Self { root: root.to_owned(), revision, journal: None, disk, lock };
        target.journal = Journal::read(root)?;
        Ok(target)
    }

    /// The sets that are applied, by the journal.
    pub fn applied(&self) -> &[AppliedSet] {
        self.journal.as_ref().map_or(&[], |journal| &journal.sets)
    }

    /// The tree without our patches, whether they are applied or not: what is to be judged.
    ///
    /// # Errors
    ///
    /// A patched file was edited since.
    pub fn original(&self) -> Result<Original> {
        let mut files = BTreeMap::new();
        if let Some(journal) = &self.journal {
            self.states(journal)?;
            for file in &journal.files {
                let (original, _) = self.contents(file)?;
                files.insert(file.path.clone(), original);
            }
        }
        Ok(Original { root: self.root.clone(), revision: self.revision.clone(), files })
    }

    /// Writes a row of sets that was judged on [`Target::original`]. Whether the row may be written is the caller's
    /// decision; see [`Series::blocking`].
    ///
    /// # Errors
    ///
    /// Other sets are applied, a file was edited since they were, or writing failed; then nothing has changed, or
    /// reversing says how to get there.
    pub fn apply(&mut self, series: &Series) -> Result<Applied> {
        let changes: Vec<Change> = changes(&series.edits);
        if let Some(journal) = &self.journal {
            return self.finish(journal, &changes, series);
        }
        if changes.is_empty() {
            return Ok(Applied::Nothing);
        }
        self.unmarked(series)?;
        sweep(self.disk.as_ref(), &self.root, paths(&changes))?;
        // What can be known to fail fails before the journal is written.
        change::look(&self.root, &changes)?;
        let folders = missing_folders(&self.root, &changes);
        let journal = Journal::new(applied_sets(series), folders, &changes)?;
        journal.write(self.disk.as_ref(), &self.root)?;
        if let Err(failed) = commit(self.disk.as_ref(), &self.root, &changes, &journal.folders) {
            // Everything is as it was, or else the journal is what restores it.
            if failed.undone {
                Journal::remove(self.disk.as_ref(), &self.root)
                    .map_err(|undo| half_written(&self.root, &failed.error, &undo))?;
            }
            return Err(failed.error);
        }
        self.journal = Some(journal);
        Ok(Applied::Written)
    }

    /// Takes everything out again.
    ///
    /// # Errors
    ///
    /// A patched file was edited since and our lines cannot be told from it, or writing failed.
    pub fn reverse(&mut self) -> Result<Reversed> {
        let Some(journal) = &self.journal else {
            return Ok(Reversed { sets: Vec::new(), files: Vec::new() });
        };
        let states = self.seen(journal)?;
        let mut changes = Vec::new();
        let mut edited = Vec::new();
        for (file, seen) in journal.files.iter().zip(states) {
            let (original, patched) = self.contents(file)?;
            let from = match seen {
                Seen::Original => continue,
                Seen::Patched => Some(patched),
                Seen::Foreign(found) => {
                    let found = found.unwrap_or_default();
                    if original
                        .as_ref()
                        .is_none_or(|original| *original != without_marked(&found, &journal.sets))
                    {
                        edited.push(differences(&file.path, &patched, &found));
                        continue;
                    }
                    Some(found)
                }
            };
            changes.push(Change { path: file.path.clone(), from, to: original });
        }
        self.refuse(&edited)?;
        sweep(self.disk.as_ref(), &self.root, journal.files.iter().map(|file| file.path.as_str()))?;
        sweep(self.disk.as_ref(), &self.root, std::iter::once(JOURNAL))?;
        commit(self.disk.as_ref(), &self.root, &changes, &[])?;
        for folder in journal.folders.iter().rev() {
            let folder = self.root.join(folder);
            match self.disk.remove_folder(&folder) {
                // Somebody put something of their own there, or took it away.
                Err(error) if matches!(error.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::NotFound) => {}
                other => other.map_err(io_error("removing", folder))?,
            }
        }
        Journal::remove(self.disk.as_ref(), &self.root)?;
        let sets = journal.sets.clone();
        self.journal = None;
        Ok(Reversed { sets, files: changes.into_iter().map(|change| change.path).collect() })
    }

    /// There is a journal: either the same sets are there, whole or in part, or it is not for us to go on.
    fn finish(&self, journal: &Journal, changes: &[Change], series: &Series) -> Result<Applied> {
        let states = self.states(journal)?;
        let same = journal.files.len() == changes.len()
            && journal.files.iter().zip(changes).all(|(file, change)| {
                file.path == change.path
                    && change.to.as_deref().is_some_and(|content| sha256(content) == file.after())
            });
        if !same {
            let there: Vec<String> = journal.sets.iter().map(ToString::to_string).collect();
            return Err(refused(
                &self.root,
                format!("it has {} applied, and this would be {}", there.join("+"), series.id()),
                &format!(
                    "take the others out first: llama-warden patches apply --reverse --source {}",
                    self.root.display()
                ),
            ));
        }
        sweep(self.disk.as_ref(), &self.root, paths(changes))?;
        let missing: Vec<Change> = changes
            .iter()
            .zip(&states)
            .filter(|(_, seen)| **seen == Seen::Original)
            .map(|(change, _)| change.clone())
            .collect();
        if missing.is_empty() {
            return Ok(Applied::Already);
        }
        commit(self.disk.as_ref(), &self.root, &missing, &journal.folders)?;
        Ok(Applied::Finished)
    }

    fn seen(&self, journal: &Journal) -> Result<Vec<Seen>> {
        journal.files.iter().map(|file| file.seen(&self.root)).collect()
    }

    /// How the files are, none of them edited.
    fn states(&self, journal: &Journal) -> Result<Vec<Seen>> {
        let states = self.seen(journal)?;
        let mut edited = Vec::new();
        for (file, seen) in journal.files.iter().zip(&states) {
            if let Seen::Foreign(found) = seen {
                let (_, patched) = self.contents(file)?;
                edited.push(differences(&file.path, &patched, found.as_deref().unwrap_or_default()));
            }
        }
        self.refuse(&edited)?;
        Ok(states)
    }

    fn refuse(&self, edited: &[String]) -> Result<()> {
        if edited.is_empty() {
            return Ok(());
        }
        Err(refused(
            &self.root,
            format!(
                "it was edited after the patches were applied (- patched, + now):\n{}",
                edited.join("\n")
            ),
            "undo these edits and try again; or restore the files yourself (in a checkout: git checkout -- FILE) and \
             then reverse",
        ))
    }

    fn contents(&self, file: &JournalFile) -> Result<(Option<Vec<u8>>, Vec<u8>)> {
        file.states().ok_or_else(|| {
            refused(
                &self.root.join(JOURNAL),
                format!("what it says of {} contradicts itself", file.path),
                "restore the file from where it came from, then remove the journal",
            )
        })
    }

    /// A tree with lines of ours and no journal: it cannot be told what is original.
    fn unmarked(&self, series: &Series) -> Result<()> {
        for edit in &series.edits.0 {
            let lines = edit.before.as_deref().unwrap_or_default().split(|byte| *byte == b'\n');
            for (index, line) in lines.enumerate() {
                let line = String::from_utf8_lossy(line);
                if let Some((set, hook)) = marked(&line) {
                    return Err(refused(
                        &self.root.join(&edit.path),
                        format!(
                            "line {} is of the patch `{}`, but the journal {JOURNAL} is gone",
                            index + 1,
                            marker(set, hook)
                        ),
                        "restore the file from where it came from (in a checkout: git checkout -- FILE), then try again",
                    ));
                }
            }
        }
        Ok(())
    }
}

fn changes(edits: &Edits) -> Vec<Change> {
    let mut changes: Vec<Change> = edits
        .0
        .iter()
        .filter(|edit| edit.before.as_ref() != Some(&edit.after))
        .map(|edit| Change {
            path: edit.path.clone(),
            from: edit.before.clone(),
            to: Some(edit.after.clone()),
        })
        .collect();
    changes.sort_by(|left, right| left.path.cmp(&right.path));
    changes
}

fn paths(changes: &[Change]) -> impl Iterator<Item = &str> {
    changes.iter().map(|change| change.path.as_str()).chain(std::iter::once(JOURNAL))
}

fn applied_sets(series: &Series) -> Vec<AppliedSet> {
    let status =
        |id: &str| series.judgements.iter().find(|judgement| judgement.set == id).map(|found| found.status);
    series
        .sets()
        .into_iter()
        .map(|(id, hash)| AppliedSet { verified: status(&id) != Some(Status::Unverified), id, hash })
        .collect()
}

/// Folders that new files need and that are not there, parents first.
fn missing_folders(root: &Path, changes: &[Change]) -> Vec<String> {
    let mut folders: Vec<String> = Vec::new();
    for change in changes.iter().filter(|change| change.from.is_none()) {
        let parts: Vec<&str> = change.path.split('/').collect();
        for length in 1..parts.len() {
            let folder = parts[..length].join("/");
            if !root.join(&folder).exists() && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders
}
