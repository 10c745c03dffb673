//! Reads files whose path another program chose, or whose directory other users can write to.
//!
//! A pipe would block, a device has no end, and a large file could fill the memory. So a file is opened
//! without waiting, and its type and size are checked afterwards.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file, also through symbolic links.
///
/// # Errors
/// The file cannot be opened, or is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(path, OFlags::empty())
}

/// Opens a regular file, but no symbolic link.
///
/// # Errors
/// The errors of [`open`], or the path is a link.
pub fn open_unlinked(path: &Path) -> io::Result<File> {
    open_with(path, OFlags::NOFOLLOW)
}

fn open_with(path: &Path, more: OFlags) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | more;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

/// Reads a whole file of at most `most` bytes.
///
/// # Errors
/// The errors of [`open`], or the file is larger.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_bounded(open(path)?, most)
}

/// Reads a whole text file of at most `most` bytes.
///
/// # Errors
/// The errors of [`read`], or the file is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read(path, most)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads at most `most` bytes to the end of a file.
///
/// # Errors
/// The file cannot be read, or has more bytes.
pub fn read_bounded(file: impl io::Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("it is larger than {most} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn pipes_devices_and_large_files_are_refused_at_once() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("zero")).unwrap();
        fs::write(at("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        File::create(at("huge")).unwrap().set_len(6 << 30).unwrap();
        for name in ["pipe", "zero", "."] {
            assert!(read(&at(name), 10).unwrap_err().to_string().contains("no regular file"), "{name}");
        }
        assert!(read(&at("huge"), 1 << 20).unwrap_err().to_string().contains("larger than 1048576 bytes"));
        assert_eq!(read_text(&at("link"), 4).unwrap(), "text");
        assert!(open_unlinked(&at("link")).is_err() && open_unlinked(&at("file")).is_ok());
    }
}
