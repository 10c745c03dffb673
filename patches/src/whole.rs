//! Writes files as a whole: other processes may read them at the same time, and a full disk leaves the old ones.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Says if a power failure may lose a file that was just written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossTolerance {
    /// The file is made again if it is lost.
    Replaceable,
    /// The content is on the disk when the write returns.
    Irreplaceable,
}

/// Writes or replaces a file that only our user may read; creates its folder.
///
/// # Errors
/// The file cannot be written; an earlier file is kept.
pub fn write_atomically(path: &Path, bytes: &[u8], loss: LossTolerance) -> io::Result<()> {
    write_with_mode(path, bytes, Permissions::from_mode(0o600), loss)
}

/// Like [`write_atomically`], for a file with these permissions. Another hard link of a replaced file keeps the
/// old content.
///
/// # Errors
/// The file cannot be written; an earlier file is kept.
pub fn write_with_mode(path: &Path, bytes: &[u8], mode: Permissions, loss: LossTolerance) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    // Prefix the temporary file with the file's name, so that a leftover of a power failure is recognizable.
    let name = path.file_name().unwrap_or_default();
    let mut new = tempfile::Builder::new().prefix(name).tempfile_in(folder)?;
    new.write_all(bytes)?;
    new.as_file().set_permissions(mode)?;
    if loss == LossTolerance::Irreplaceable {
        new.as_file().sync_all()?;
    }
    new.persist(path).map(drop).map_err(|error| error.error)
}
