//! Applies a series of patch sets to a folder, and reverses it to the exact bytes.
//!
//! All contents are computed before the first write. If a write fails, the writes before it are undone. The
//! record is written first, so the sets can be removed or applied again after an interruption. If the user
//! edited a patched file, `apply` fails and writes nothing. So does `reverse`, unless the file without the
//! marked lines is the original.

mod record;
#[cfg(test)]
mod tests;
mod write;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use diffy::{DiffOptions, Line};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use self::record::{PatchRecord, RecordedFile};
use self::write::{FileChange, check_all, read_file, sync_folder, write_all};
use crate::edits::TreeEdits;
use crate::error::{Result, content_error, io_error};
use crate::marker::parse_marker;
use crate::series::PatchSeries;
use crate::tree::{FolderTree, OverlayTree, SourceRevision, sha256};

pub use self::record::AppliedSet;

/// A llama.cpp folder to be patched.
pub struct PatchTarget {
    _lock: FolderLock,
    tree: FolderTree,
    record: Option<PatchRecord>,
}

/// Result of applying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApplyOutcome {
    /// The sets' changes were written.
    Written,
    /// The sets were applied already; no file was touched.
    Already,
    /// No set changes this source.
    Nothing,
}

/// Result of reversing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReverseOutcome {
    /// Removed sets; empty if none was applied.
    pub sets: Vec<AppliedSet>,
    /// Restored or removed files.
    pub files: Vec<String>,
}

enum FileState {
    Original,
    Patched(Vec<u8>),
    /// Edited by the user; `None` for a removed file.
    Edited(Option<Vec<u8>>),
}

/// Dropping the lock unlocks explicitly: a child forked by another thread holds the file until its exec, too.
struct FolderLock(File);

impl FolderLock {
    fn take(root: &Path) -> Result<Self> {
        let folder = File::open(root).map_err(io_error("opening", root))?;
        match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(content_error(
                root,
                "another run reads or writes patches here".to_owned(),
                "wait until it has ended, and try again",
            )),
            // Some network filesystems do not support locks.
            Ok(()) | Err(_) => Ok(Self(folder)),
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        let _unlocked = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

impl PatchTarget {
    /// Opens the llama.cpp whose root is this folder.
    ///
    /// # Errors
    /// Fails if another run holds the lock, or if the record of applied patches is damaged.
    pub fn open(root: &Path, revision: SourceRevision) -> Result<Self> {
        let lock = FolderLock::take(root)?;
        Ok(Self { _lock: lock, tree: FolderTree::new(root, revision), record: PatchRecord::read(root)? })
    }

    /// Returns the tree as it is without our patches, for judging.
    ///
    /// # Errors
    /// Fails if a patched file was edited.
    pub fn original(&self) -> Result<OverlayTree<'_>> {
        let mut original = OverlayTree::new(&self.tree);
        if let Some(record) = &self.record {
            self.unedited_states(record)?;
            for file in &record.files {
                original.put(file.path.clone(), file.original(self.root())?);
            }
        }
        Ok(original)
    }

    /// Applies a series judged on [`PatchTarget::original`]. The caller checks [`PatchSeries::blocking`]
    /// first.
    ///
    /// # Errors
    /// Fails if other sets are applied, if a patched file was edited, or if writing failed. Then nothing
    /// has changed, or the error asks for a reversal.
    pub fn apply(&mut self, series: &PatchSeries) -> Result<ApplyOutcome> {
        let changes = list_changes(&series.edits);
        let Some(record) = &self.record else { return self.apply_first(series, &changes) };
        let states = self.unedited_states(record)?;
        let same = record.files.len() == changes.len()
            && record.files.iter().zip(&changes).all(|(file, change)| {
                file.path == change.path && change.to.as_deref().map(sha256).as_ref() == Some(&file.patched)
            });
        if !same {
            let there: Vec<String> = record.sets.iter().map(ToString::to_string).collect();
            return Err(content_error(
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
        Ok(if missing.is_empty() { ApplyOutcome::Already } else { ApplyOutcome::Written })
    }

    /// Removes all applied sets.
    ///
    /// # Errors
    /// Fails if the user edited a patched file and the file without the marked lines is not the original, or
    /// if writing failed.
    pub fn reverse(&mut self) -> Result<ReverseOutcome> {
        let Some(record) = &self.record else {
            return Ok(ReverseOutcome { sets: Vec::new(), files: Vec::new() });
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
        // After a power failure, the record must exist as long as an original is missing.
        let paths: Vec<PathBuf> = changes.iter().map(|change| self.root().join(&change.path)).collect();
        let folders: BTreeSet<&Path> =
            paths.iter().filter_map(|path| path.ancestors().skip(1).find(|folder| folder.is_dir())).collect();
        folders.into_iter().try_for_each(sync_folder)?;
        PatchRecord::remove(self.root())?;
        let sets = record.sets.clone();
        self.record = None;
        Ok(ReverseOutcome { sets, files: changes.into_iter().map(|change| change.path).collect() })
    }

    fn apply_first(&mut self, series: &PatchSeries, changes: &[FileChange]) -> Result<ApplyOutcome> {
        if changes.is_empty() {
            return Ok(ApplyOutcome::Nothing);
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
            // Remove the record: otherwise the next apply would find a record of sets that are not applied.
            if record.files.iter().all(|file| matches!(self.state(file), Ok(FileState::Original))) {
                PatchRecord::remove(self.root())?;
            }
            return Err(error);
        }
        self.record = Some(record);
        Ok(ApplyOutcome::Written)
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
        Err(content_error(
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

fn list_changes(edits: &TreeEdits) -> Vec<FileChange> {
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

const SHOWN_LINES: usize = 12;

fn without_marked(content: &[u8], sets: &[AppliedSet]) -> Vec<u8> {
    content
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| !is_ours(line, sets))
        .flatten()
        .copied()
        .collect()
}

fn describe_edits(path: &str, original: &[u8], found: &[u8], sets: &[AppliedSet]) -> String {
    let diff = DiffOptions::new().set_context_len(0).create_patch_bytes(original, found);
    let mut lines = Vec::new();
    for hunk in diff.hunks() {
        let mut number = hunk.new_range().start();
        for line in hunk.lines() {
            let (sign, text) = match line {
                Line::Delete(text) => ('-', text),
                Line::Insert(text) => ('+', text),
                Line::Context(_) => continue,
            };
            if sign == '-' || !is_ours(text, sets) {
                lines.push(format!("  {path}:{number}: {sign}{}", String::from_utf8_lossy(text).trim_end()));
            }
            number += usize::from(sign == '+');
        }
    }
    if lines.is_empty() {
        lines.push(format!(
            "  {path}: lines of the patches were changed or removed; --reverse takes all of them out"
        ));
    }
    let more = lines.len().saturating_sub(SHOWN_LINES);
    lines.truncate(SHOWN_LINES);
    if more > 0 {
        lines.push(format!("  {path}: and {more} more lines"));
    }
    lines.join("\n")
}

fn is_ours(line: &[u8], sets: &[AppliedSet]) -> bool {
    let line = String::from_utf8_lossy(line);
    parse_marker(&line).is_some_and(|(set, _)| sets.iter().any(|applied| applied.id == set))
}
