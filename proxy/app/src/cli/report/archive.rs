//! The archive: the same bytes for the same contents, and never in the place of another file.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::contents::Contents;
use crate::exit::Failure;

/// The folder in the archive.
const FOLDER: &str = "llama-warden-report";
/// Only for whoever wrote it, until they send it.
const MODE: u32 = 0o600;

/// All of it, packed. Times and owners are left out.
pub(super) fn pack(contents: &Contents) -> Result<Vec<u8>, Failure> {
    let packed = || -> io::Result<Vec<u8>> {
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        for entry in contents.entries() {
            let mut header = tar::Header::new_gnu();
            header.set_size(entry.text.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, format!("{FOLDER}/{}", entry.name), entry.text.as_bytes())?;
        }
        archive.into_inner()?.finish()
    };
    packed().map_err(|error| Failure::failed(format!("cannot pack the report: {error}")))
}

/// Refuses a place where something is.
pub(super) fn is_free(path: &Path) -> Result<(), Failure> {
    if path.symlink_metadata().is_ok() {
        return Err(taken(path));
    }
    Ok(())
}

fn taken(path: &Path) -> Failure {
    Failure::hinted(
        format!("{} is there already, and is left as it is", path.display()),
        "name another file with --out, or remove it",
    )
}

/// Writes it to a new file; half of one does not stay.
pub(super) fn write(path: &Path, archive: &[u8]) -> Result<(), Failure> {
    let cannot = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => taken(path),
        _ => Failure::hinted(
            format!("cannot write {}: {error}", path.display()),
            "choose another place with --out",
        ),
    };
    let mut file: File =
        OpenOptions::new().write(true).create_new(true).mode(MODE).open(path).map_err(cannot)?;
    let written = file.write_all(archive).and_then(|()| file.sync_all());
    written.map_err(|error| {
        // It is ours: it was not there before.
        drop(std::fs::remove_file(path));
        cannot(error)
    })
}
