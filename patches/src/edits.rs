//! Changes to a tree, as values, and their hashes.

use sha2::{Digest, Sha256};

const SET_HASH_DIGITS: usize = 12;

/// Changes to a tree, sorted by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeEdits(pub Vec<FileEdit>);

impl TreeEdits {
    /// Adds edits that apply on top of `self`.
    pub(crate) fn merge(&mut self, later: Self) {
        for edit in later.0 {
            match self.0.binary_search_by(|known| known.path.cmp(&edit.path)) {
                Ok(place) => self.0[place].merge(edit),
                Err(place) => self.0.insert(place, edit),
            }
        }
    }

    /// Hash over everything that the edits write, twelve hexadecimal digits; equal for the same set in the
    /// same tree.
    pub(crate) fn hash(&self) -> String {
        let edits = self.0.iter();
        let parts: Vec<&[u8]> =
            edits.flat_map(|edit| [edit.path.as_bytes(), edit.after.as_slice()]).collect();
        let mut digits = hash_parts(&parts);
        digits.truncate(SET_HASH_DIGITS);
        digits
    }

    /// Hash of the hooks' inserted lines and the new files: the set's changes, without the rest of the tree.
    pub(crate) fn placed_hash(&self) -> String {
        let mut text = String::new();
        for edit in &self.0 {
            for line in &edit.inserted {
                text.extend([line.hook.as_str(), "\0", line.text.trim(), "\n"]);
            }
            if edit.before.is_none() {
                text.extend([edit.path.as_str(), "\0", &hash_parts(&[&edit.after]), "\n"]);
            }
        }
        hash_parts(&[text.as_bytes()])
    }
}

/// A file of a tree before and after a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEdit {
    /// Path relative to llama.cpp's root.
    pub path: String,
    /// Content before; `None`: the file does not exist.
    pub before: Option<Vec<u8>>,
    /// Content after.
    pub after: Vec<u8>,
    /// Lines inserted by hooks, from top to bottom.
    pub inserted: Vec<InsertedLine>,
}

impl FileEdit {
    /// Adds a later edit of the same file. Earlier insertions below its lines move down.
    fn merge(&mut self, later: Self) {
        self.after = later.after;
        for new in later.inserted {
            for old in self.inserted.iter_mut().filter(|old| old.line >= new.line) {
                old.line += 1;
            }
            self.inserted.push(new);
        }
        self.inserted.sort_by_key(|inserted| inserted.line);
    }
}

/// A line inserted by a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InsertedLine {
    /// Line number in the edited file, from 1.
    pub line: usize,
    /// Text of the line without its line end.
    pub text: String,
    /// Id of the hook.
    pub hook: String,
}

pub(crate) fn hash_parts(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // The length of each part makes the concatenation unambiguous.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}
