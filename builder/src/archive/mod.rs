//! Reads .tar.gz, .tar.xz and .zip as one stream of entries, whose names are checked before anybody sees them.
//!
//! An archive is input from strangers: names that lead out of it end the reading, and so do more bytes or entries
//! than [`Bounds`] allows, counted after decompression. What is done with an entry is the visitor's business;
//! [`unpack`] writes a part of an archive to disk.

mod unpack;
mod walk;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub(crate) use unpack::{below, stays_inside, unpack};
pub(crate) use walk::{unreadable, walk};

use crate::error::{Error, Result, io_error};

/// How much an archive may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Bytes after decompression, entries that nobody wants included.
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
}

impl Bounds {
    /// Ten times the largest source archive that was seen (205 MB, 3,900 entries).
    pub(crate) const SOURCE: Self = Self { bytes: 2 << 30, entries: 100_000 };
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file, with its content in [`Entry::data`].
    File {
        /// Whether it may be run.
        executable: bool,
    },
    Folder,
    /// A symbolic link to this target.
    Link(String),
    /// A device, a pipe, a hard link: nothing that a source tree has.
    Other,
    /// Not an entry: the remark that `git archive` leaves, which is a commit. The name is empty.
    Remark(String),
}

pub(crate) struct Entry<'a> {
    /// Relative, normal components only, separated by slashes.
    pub(crate) name: &'a str,
    pub(crate) kind: Kind,
    /// The content of a file; empty for everything else.
    pub(crate) data: &'a mut dyn Read,
}

/// How an archive is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    TarGz,
    TarXz,
    Zip,
}

/// Tells the format by the first bytes: names lie.
pub(crate) fn format(path: &Path) -> Result<Format> {
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
        [0x1f, 0x8b, ..] => Ok(Format::TarGz),
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Ok(Format::TarXz),
        [b'P', b'K', 3, 4, ..] => Ok(Format::Zip),
        start => {
            let why = match start {
                [] => "it is empty".to_owned(),
                [b'B', b'Z', b'h', ..] => "it is packed with bzip2".to_owned(),
                [0x28, 0xb5, 0x2f, 0xfd, ..] => "it is packed with zstd".to_owned(),
                [b'G', b'G', b'U', b'F', ..] => "it is a GGUF model".to_owned(),
                other => format!("it starts with the bytes {}", hex::encode(other)),
            };
            Err(Error::NotAnArchive { path: path.to_owned(), why })
        }
    }
}

/// Brings a name into its normal form, or says why it must not be used.
fn normal_name(raw: &str) -> std::result::Result<String, &'static str> {
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
