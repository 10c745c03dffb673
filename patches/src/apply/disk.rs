//! The few operations that change a tree, behind a trait, so that tests can let any one of them fail.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// What a transaction does to a disk.
pub(super) trait Disk {
    /// Writes a file that must not be there, with this mode, down to the platters.
    fn write_new(&self, path: &Path, bytes: &[u8], mode: Option<u32>) -> io::Result<()>;
    /// Puts a file in another's place.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes what happened in a folder survive a loss of power.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
}

pub(super) struct RealDisk;

impl Disk for RealDisk {
    fn write_new(&self, path: &Path, bytes: &[u8], mode: Option<u32>) -> io::Result<()> {
        // Without a mode: as any new file of this user, the umask decides.
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(mode.unwrap_or(0o666)).open(path)?;
        file.write_all(bytes)?;
        if let Some(mode) = mode {
            // The umask took bits that the original has.
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            // Some network file systems cannot; then there is nothing to promise.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            other => other,
        }
    }
}
