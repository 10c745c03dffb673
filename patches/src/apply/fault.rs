//! Why a folder is not changed, or was not changed back.

use std::path::Path;

use crate::error::Error;

/// The folder's content is not what it must be.
pub(super) fn refused(path: &Path, why: String, cure: &str) -> Error {
    Error::Folder { path: path.to_owned(), why, cure: cure.to_owned(), refused: true }
}

/// The machine does not let us.
pub(super) fn trouble(path: &Path, why: &str, cure: &str) -> Error {
    Error::Folder { path: path.to_owned(), why: why.to_owned(), cure: cure.to_owned(), refused: false }
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
