//! Inserts lines into files, and merges several edits of a file.

use std::collections::BTreeMap;

use crate::judgement::{FileEdit, InsertedLine, TreeEdits};
use crate::marker::marker;

/// Lines of a hook with their position.
#[derive(Clone, Debug)]
pub(super) struct HookInsertion {
    /// Offset in the unchanged file: the beginning of a line.
    pub(super) offset: usize,
    /// The insertion belongs to the line above, and precedes insertions at the same offset that belong to the
    /// line below.
    pub(super) after: bool,
    /// Lines without indentation and marker.
    pub(super) lines: Vec<String>,
    /// Indentation.
    pub(super) indent: Vec<u8>,
    /// Line end: `\n` or `\r\n`.
    pub(super) end: &'static [u8],
    pub(super) hook: String,
}

/// The file with all insertions; those at the same position keep the order of the set.
pub(super) fn insert_lines(
    set: &str,
    path: &str,
    raw: &[u8],
    mut insertions: Vec<HookInsertion>,
) -> FileEdit {
    insertions.sort_by_key(|insertion| (insertion.offset, !insertion.after));
    let mut after = Vec::with_capacity(raw.len() + 256 * insertions.len());
    let mut inserted = Vec::new();
    let mut line = 1;
    let mut done = 0;
    for insertion in insertions {
        let kept = raw.get(done..insertion.offset).unwrap_or_default();
        line += kept.split(|byte| *byte == b'\n').count() - 1;
        after.extend_from_slice(kept);
        done = insertion.offset;
        for text in &insertion.lines {
            let text = format!(
                "{}{text} {}",
                String::from_utf8_lossy(&insertion.indent),
                marker(set, &insertion.hook)
            );
            after.extend_from_slice(text.as_bytes());
            after.extend_from_slice(insertion.end);
            inserted.push(InsertedLine { line, text, hook: insertion.hook.clone() });
            line += 1;
        }
    }
    after.extend_from_slice(raw.get(done..).unwrap_or_default());
    FileEdit { path: path.to_owned(), before: Some(raw.to_vec()), after, inserted }
}

/// Consecutive edits merged into one per file.
#[derive(Debug, Default)]
pub(super) struct MergedEdits(BTreeMap<String, FileEdit>);

impl MergedEdits {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds edits that apply to the result of all edits added before.
    pub(super) fn add(&mut self, edits: TreeEdits) {
        for edit in edits.0 {
            match self.0.get_mut(&edit.path) {
                Some(known) => {
                    known.after = edit.after;
                    known.inserted = edit.inserted;
                }
                None => {
                    self.0.insert(edit.path.clone(), edit);
                }
            }
        }
    }

    /// The merged edits, sorted by path.
    pub(super) fn into_edits(self) -> TreeEdits {
        TreeEdits(self.0.into_values().collect())
    }
}
