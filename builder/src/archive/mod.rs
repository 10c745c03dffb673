//! Reads .tar.gz, .tar.xz and .zip as one stream of entries with checked names.
//!
//! Archives are untrusted input. Reading fails at a name that leads out of the archive, and when bytes
//! (counted after decompression) or entries exceed [`ArchiveLimits`].

mod unpack;
mod walk;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub(crate) use unpack::{stays_inside, strip_folder, unpack};
pub(crate) use walk::{entry_read_error, walk_entries};

use crate::error::{BuilderError, Result, io_error};

#[derive(Clone, Copy, Debug)]
pub(crate) struct ArchiveLimits {
    /// Bytes after decompression, including entries that the caller skips.
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
}

impl ArchiveLimits {
    /// Limits for source archives: at least ten times the largest seen so far (205 MB, 3,900 entries).
    pub(crate) const SOURCE: Self = Self { bytes: 2 << 30, entries: 100_000 };
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ArchiveEntryKind {
    File {
        executable: bool,
    },
    Folder,
    Link(String),
    Other,
    /// The comment that `git archive` writes, which is the commit id. The entry's name is empty.
    Comment(String),
}

pub(crate) struct ArchiveEntry<'a> {
    /// Relative path of normal components, separated by slashes.
    pub(crate) name: &'a str,
    pub(crate) kind: ArchiveEntryKind,
    /// The content of a file; empty for everything else.
    pub(crate) data: &'a mut dyn Read,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArchiveFormat {
    TarGz,
    TarXz,
    Zip,
}

/// Detects the format by the first bytes; file extensions may be wrong.
pub(crate) fn detect_format(path: &Path) -> Result<ArchiveFormat> {
    let mut magic = [0; 6];
    let mut file = File::open(path).map_err(io_error("opening", path))?;
    let mut filled = 0;
    while filled < magic.len() {
        match file.read(&mut magic[filled..]).map_err(io_error("reading", path))? {
            0 => break,
            count => filled += count,
        }
    }
    match &magic[..filled] {
        [0x1f, 0x8b, ..] => Ok(ArchiveFormat::TarGz),
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Ok(ArchiveFormat::TarXz),
        [b'P', b'K', 3, 4, ..] => Ok(ArchiveFormat::Zip),
        start => {
            let why = match start {
                [] => "it is empty".to_owned(),
                [b'B', b'Z', b'h', ..] => "it is packed with bzip2".to_owned(),
                [0x28, 0xb5, 0x2f, 0xfd, ..] => "it is packed with zstd".to_owned(),
                [b'G', b'G', b'U', b'F', ..] => "it is a GGUF model".to_owned(),
                other => format!("it starts with the bytes {}", hex::encode(other)),
            };
            Err(BuilderError::NotAnArchive { path: path.to_owned(), why })
        }
    }
}

/// Normalizes a name, or returns why it is unsafe.
fn normalize_name(raw: &str) -> std::result::Result<String, &'static str> {
    if raw.starts_with('/') {
        return Err("is an absolute path");
    }
    if raw.contains('\0') || raw.contains('\\') {
        return Err("has a character that no source file has in its name");
    }
    let mut parts = Vec::new();
    for part in raw.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err("leads out of the archive"),
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

#[cfg(test)]
pub(crate) mod tests;
