//! Walks the entries of an archive of any supported format.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use tokio_util::sync::CancellationToken;

use super::{ArchiveEntry, ArchiveEntryKind, ArchiveFormat, ArchiveLimits, detect_format, normalize_name};
use crate::error::{BuilderError, Result, check_cancelled, io_error};

/// Longest link target that is accepted; the kernel has the same limit.
const MAX_LINK_TARGET: u64 = 4096;
/// Limit for an entry's headers, which the tar reader keeps in memory; the kernel's longest path has 4 KiB.
const MAX_HEADER_BYTES: u64 = 64 << 10;
const MAX_SHOWN_NAME: usize = 200;

pub(crate) fn walk_entries(
    path: &Path,
    bounds: ArchiveLimits,
    cancel: &CancellationToken,
    visit: &mut dyn FnMut(ArchiveEntry<'_>) -> Result<()>,
) -> Result<()> {
    let kind = detect_format(path)?;
    let file = BufReader::new(File::open(path).map_err(io_error("opening", path))?);
    let mut walk = ArchiveWalk { path, bounds, cancel, entries: 0, visit };
    match kind {
        ArchiveFormat::TarGz => walk.tar(flate2::read::MultiGzDecoder::new(file)),
        ArchiveFormat::TarXz => walk.tar(liblzma::read::XzDecoder::new_multi_decoder(file)),
        ArchiveFormat::Zip => walk.zip(file),
    }
}

struct ArchiveWalk<'a> {
    path: &'a Path,
    bounds: ArchiveLimits,
    cancel: &'a CancellationToken,
    entries: u64,
    visit: &'a mut dyn FnMut(ArchiveEntry<'_>) -> Result<()>,
}

impl ArchiveWalk<'_> {
    fn tar(&mut self, stream: impl Read) -> Result<()> {
        let headers = HeaderAllowance::default();
        let stream = SizeLimitReader { inner: stream, left: self.bounds.bytes };
        let mut archive = tar::Archive::new(HeaderLimitReader { inner: stream, allowance: headers.clone() });
        let path = self.path;
        // Count contents separately: a sparse file expands to more bytes than its stream has.
        let mut left = self.bounds.bytes;
        let bounds = self.bounds;
        let failed = |source| entry_read_error(path, &source, bounds);
        let mut entries = archive.entries().map_err(failed)?;
        loop {
            headers.set(Some(MAX_HEADER_BYTES));
            let next = entries.next();
            if headers.get() == Some(0) {
                return Err(too_large(
                    path,
                    format!("{} KiB of headers for one entry", MAX_HEADER_BYTES >> 10),
                ));
            }
            headers.set(None);
            let Some(entry) = next else { return Ok(()) };
            let mut entry = entry.map_err(failed)?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let header = entry.header();
            let kind = match header.entry_type() {
                kind if kind.is_file() || kind.is_contiguous() || kind.is_gnu_sparse() => {
                    ArchiveEntryKind::File { executable: header.mode().is_ok_and(|mode| mode & 0o100 != 0) }
                }
                kind if kind.is_dir() => ArchiveEntryKind::Folder,
                kind if kind.is_symlink() => {
                    let target = entry.link_name_bytes().unwrap_or_default();
                    ArchiveEntryKind::Link(String::from_utf8_lossy(&target).into_owned())
                }
                kind if kind.is_pax_global_extensions() => {
                    let mut text = String::new();
                    let read = (&mut entry).take(MAX_LINK_TARGET).read_to_string(&mut text);
                    let comment = text.split_once("comment=").map(|(_, rest)| rest.trim().to_owned());
                    if let (Ok(_), Some(comment)) = (read, comment) {
                        ArchiveEntryKind::Comment(comment)
                    } else {
                        io::copy(&mut entry, &mut io::sink()).map_err(failed)?;
                        continue;
                    }
                }
                _ => ArchiveEntryKind::Other,
            };
            let mut data = SizeLimitReader { inner: &mut entry, left };
            self.visit(&name, kind, &mut data)?;
            // Skip the rest of the content, so that only headers lie before the next entry.
            io::copy(&mut data, &mut io::sink()).map_err(failed)?;
            left = data.left;
        }
    }

    fn zip(&mut self, file: BufReader<File>) -> Result<()> {
        let path = self.path;
        let failed = |error: zip::result::ZipError| entry_read_error(path, &error.into(), self.bounds);
        let mut archive = zip::ZipArchive::new(file).map_err(failed)?;
        let remark = String::from_utf8_lossy(archive.comment()).trim().to_owned();
        if !remark.is_empty() {
            self.visit("", ArchiveEntryKind::Comment(remark), &mut io::empty())?;
        }
        let mut left = self.bounds.bytes;
        for index in 0..archive.len() {
            let mut entry = archive
                .by_index(index)
                .map_err(|error| entry_read_error(path, &error.into(), self.bounds))?;
            let name = entry
                .name()
                .map_err(|error| entry_read_error(path, &error.into(), self.bounds))?
                .into_owned();
            let kind = if entry.is_dir() {
                ArchiveEntryKind::Folder
            } else if entry.is_symlink() {
                let mut target = String::new();
                (&mut entry)
                    .take(MAX_LINK_TARGET)
                    .read_to_string(&mut target)
                    .map_err(|source| entry_read_error(path, &source, self.bounds))?;
                ArchiveEntryKind::Link(target)
            } else {
                ArchiveEntryKind::File { executable: entry.unix_mode().is_some_and(|mode| mode & 0o100 != 0) }
            };
            // The sizes in the zip directory are untrusted, so bytes are counted while they are read.
            let mut data = SizeLimitReader { inner: &mut entry, left };
            self.visit(&name, kind, &mut data)?;
            left = data.left;
        }
        Ok(())
    }

    fn visit(&mut self, raw: &str, kind: ArchiveEntryKind, data: &mut dyn Read) -> Result<()> {
        check_cancelled(self.cancel)?;
        self.entries += 1;
        if self.entries > self.bounds.entries {
            return Err(too_large(self.path, format!("{} entries", self.bounds.entries)));
        }
        let name = match &kind {
            ArchiveEntryKind::Comment(_) => String::new(),
            _ => normalize_name(raw).map_err(|why| BuilderError::UnsafeArchive {
                path: self.path.to_owned(),
                entry: shorten_name(raw),
                why,
            })?,
        };
        if name.is_empty() && !matches!(kind, ArchiveEntryKind::Comment(_)) {
            // Skip the entry of the archive's top folder, whose normalized name is empty.
            return Ok(());
        }
        (self.visit)(ArchiveEntry { name: &name, kind, data })
    }
}

/// Bytes that headers may still take; `None` while content is read, zero after a refused header.
type HeaderAllowance = Rc<Cell<Option<u64>>>;

/// Fails on headers longer than the allowance: the tar reader would load names of any length into memory.
struct HeaderLimitReader<R> {
    inner: R,
    allowance: HeaderAllowance,
}

impl<R: Read> Read for HeaderLimitReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        if let Some(left) = self.allowance.get() {
            let left = left.saturating_sub(count as u64);
            self.allowance.set(Some(left));
            if left == 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a header is too long"));
            }
        }
        Ok(count)
    }
}

fn shorten_name(name: &str) -> String {
    match name.char_indices().nth(MAX_SHOWN_NAME) {
        Some((end, _)) => format!("{}… ({} bytes)", &name[..end], name.len()),
        None => name.to_owned(),
    }
}

struct SizeLimitReader<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for SizeLimitReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self
            .left
            .checked_sub(count as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::QuotaExceeded, "too many bytes"))?;
        Ok(count)
    }
}

fn too_large(path: &Path, limit: String) -> BuilderError {
    BuilderError::ArchiveTooLarge { path: path.to_owned(), limit }
}

pub(crate) fn entry_read_error(path: &Path, source: &io::Error, bounds: ArchiveLimits) -> BuilderError {
    if source.kind() == io::ErrorKind::QuotaExceeded {
        return too_large(path, format!("{} MiB", bounds.bytes >> 20));
    }
    BuilderError::NotAnArchive { path: path.to_owned(), why: format!("it is damaged or cut off ({source})") }
}
