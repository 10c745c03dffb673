//! Packs and writes the archive. Equal contents give equal bytes; an existing file is never overwritten.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::contents::ReportContents;
use crate::exit::CommandError;

/// Folder inside the archive.
const ARCHIVE_FOLDER: &str = "llama-warden-report";
/// Private mode, because a report is its author's until it is sent.
const FILE_MODE: u32 = 0o600;

/// Packs the contents, without times and owners.
pub(super) fn pack_archive(contents: &ReportContents) -> Result<Vec<u8>, CommandError> {
    let packed = || -> io::Result<Vec<u8>> {
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        for entry in contents.entries() {
            let mut header = tar::Header::new_gnu();
            header.set_size(entry.text.len() as u64);
            header.set_mode(0o644);
            archive.append_data(
                &mut header,
                format!("{ARCHIVE_FOLDER}/{}", entry.name),
                entry.text.as_bytes(),
            )?;
        }
        archive.into_inner()?.finish()
    };
    packed().map_err(|error| CommandError::failed(format!("cannot pack the report: {error}")))
}

/// Refuses a path that exists.
pub(super) fn check_free(path: &Path) -> Result<(), CommandError> {
    if path.symlink_metadata().is_ok() {
        return Err(exists_failure(path));
    }
    Ok(())
}

fn exists_failure(path: &Path) -> CommandError {
    CommandError::hinted(
        format!("{} is there already, and is left as it is", path.display()),
        "name another file with --out, or remove it",
    )
}

/// Writes the archive to a new file. Removes an incomplete file.
pub(super) fn write_archive(path: &Path, archive: &[u8]) -> Result<(), CommandError> {
    let cannot = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => exists_failure(path),
        _ => CommandError::hinted(
            format!("cannot write {}: {error}", path.display()),
            "choose another place with --out",
        ),
    };
    let mut file: File =
        OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(path).map_err(cannot)?;
    let written = file.write_all(archive).and_then(|()| file.sync_all());
    written.map_err(|error| {
        // Safe to remove: this call created the file.
        drop(std::fs::remove_file(path));
        cannot(error)
    })
}
