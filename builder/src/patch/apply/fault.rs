//! Why a folder is not changed, or was not changed back.

use std::path::{Path, PathBuf};

use crate::error::{Error, Kind};

/// A folder that cannot be patched, or restored, as it is.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {why}")]
pub struct Fault {
    /// The folder or the file in question.
    path: PathBuf,
    /// What is wrong; the lines that differ follow on lines of their own.
    why: String,
    /// The cure.
    cure: String,
    /// Whether it is the folder's content that we refuse to touch.
    refused: bool,
}

impl Fault {
    /// Whose turn it is.
    pub const fn kind(&self) -> Kind {
        if self.refused { Kind::Refused } else { Kind::Machine }
    }

    /// What the reader can do about it.
    pub fn hint(&self) -> &str {
        &self.cure
    }
}

/// The folder's content is not what it must be.
pub(super) fn refused(path: &Path, why: String, cure: &str) -> Error {
    Fault { path: path.to_owned(), why, cure: cure.to_owned(), refused: true }.into()
}

/// The machine does not let us.
pub(super) fn trouble(path: &Path, why: &str, cure: &str) -> Error {
    Fault { path: path.to_owned(), why: why.to_owned(), cure: cure.to_owned(), refused: false }.into()
}

/// A change failed, and so did taking it back.
pub(super) fn half_written(root: &Path, error: &Error, undo: &Error) -> Error {
    let why = format!("{error}; and what was changed before could not be put back: {undo}");
    let cure = format!(
        "nothing is lost: see to what went wrong, then run `llama-warden patches apply --reverse --source {}`",
        root.display()
    );
    trouble(root, &why, &cure)
}
