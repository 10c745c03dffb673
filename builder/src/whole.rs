//! Writes files atomically, because other processes may read them at the same time.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossTolerance {
    Replaceable,
    Irreplaceable,
}

/// Writes or replaces a file; creates its folder.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8], loss: LossTolerance) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    // Prefix the temporary file with the file's name, so that a leftover of a power failure is recognizable.
    let name = path.file_name().unwrap_or_default();
    let mut new = tempfile::Builder::new().prefix(name).tempfile_in(folder)?;
    new.write_all(bytes)?;
    if loss == LossTolerance::Irreplaceable {
        new.as_file().sync_all()?;
    }
    new.persist(path).map(drop).map_err(|error| error.error)
}
