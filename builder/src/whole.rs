//! Files that others may read at the same time: they are there whole or not at all.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

/// What a power failure may do to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// It can be made again.
    Bearable,
    /// Nobody could make it again.
    Final,
}

/// Writes a file in place of one that may be there; its folder is made.
pub(crate) fn write(path: &Path, bytes: &[u8], loss: Loss) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    // Named after it, so that what a power failure leaves is known for what it is.
    let name = path.file_name().unwrap_or_default();
    let mut new = tempfile::Builder::new().prefix(name).tempfile_in(folder)?;
    new.write_all(bytes)?;
    if loss == Loss::Final {
        new.as_file().sync_all()?;
    }
    new.persist(path).map(drop).map_err(|error| error.error)
}
