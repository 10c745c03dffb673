//! Walks the entries of an archive of any supported format.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use tokio_util::sync::CancellationToken;

use super::{Bounds, Entry, Format, Kind, format, normal_name};
use crate::error::{Error, Result, io_error};

/// Longest link target that is accepted; the kernel has the same limit.
const LONGEST_TARGET: u64 = 4096;
/// Total bytes of an entry's headers: name, link target and other extensions. The kernel's longest path has
/// 4 KiB, and the tar reader keeps headers in memory.
const LONGEST_HEADERS: u64 = 64 << 10;
/// Characters of a name that an error message shows.
const SHOWN: usize = 200;

/// Visits every entry in the archive's order. Stops at the visitor's first error.
pub(crate) fn walk(
    path: &Path,
    bounds: Bounds,
    cancel: &CancellationToken,
    visit: &mut dyn FnMut(Entry<'_>) -> Result<()>,
) -> Result<()> {
    let kind = format(path)?;
    let file = BufReader::new(File::open(path).map_err(io_error("opening", path))?);
    let mut walk = Walk { path, bounds, cancel, entries: 0, visit };
    match kind {
        Format::TarGz => walk.tar(flate2::read::MultiGzDecoder::new(file)),
        Format::TarXz => walk.tar(liblzma::read::XzDecoder::new_multi_decoder(file)),
        Format::Zip => walk.zip(file),
    }
}

struct Walk<'a> {
    path: &'a Path,
    bounds: Bounds,
    cancel: &'a CancellationToken,
    entries: u64,
    visit: &'a mut dyn FnMut(Entry<'_>) -> Result<()>,
}

impl Walk<'_> {
    fn tar(&mut self, stream: impl Read) -> Result<()> {
        let headers = HeaderAllowance::default();
        let stream = Bounded { inner: stream, left: self.bounds.bytes };
        let mut archive = tar::Archive::new(HeaderBound { inner: stream, allowance: headers.clone() });
        let path = self.path;
        // Contents have their own count: a sparse file has more bytes than the stream.
        let mut left = self.bounds.bytes;
        let bounds = self.bounds;
        let failed = |source| unreadable(path, &source, bounds);
        let mut entries = archive.entries().map_err(failed)?;
        loop {
            headers.set(Some(LONGEST_HEADERS));
            let next = entries.next();
            if headers.get() == Some(0) {
                return Err(too_large(
                    path,
                    format!("{} KiB of headers for one entry", LONGEST_HEADERS >> 10),
                ));
            }
            headers.set(None);
            let Some(entry) = next else { return Ok(()) };
            let mut entry = entry.map_err(failed)?;
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let header = entry.header();
            let kind = match header.entry_type() {
                kind if kind.is_file() || kind.is_contiguous() || kind.is_gnu_sparse() => {
                    Kind::File { executable: header.mode().is_ok_and(|mode| mode & 0o100 != 0) }
                }
                kind if kind.is_dir() => Kind::Folder,
                kind if kind.is_symlink() => {
                    let target = entry.link_name_bytes().unwrap_or_default();
                    Kind::Link(String::from_utf8_lossy(&target).into_owned())
                }
                kind if kind.is_pax_global_extensions() => {
                    let mut text = String::new();
                    let read = (&mut entry).take(LONGEST_TARGET).read_to_string(&mut text);
                    let comment = text.split_once("comment=").map(|(_, rest)| rest.trim().to_owned());
                    if let (Ok(_), Some(comment)) = (read, comment) {
                        Kind::Remark(comment)
                    } else {
                        io::copy(&mut entry, &mut io::sink()).map_err(failed)?;
                        continue;
                    }
                }
                _ => Kind::Other,
            };
            let mut data = Bounded { inner: &mut entry, left };
            self.visit(&name, kind, &mut data)?;
            // Skip the rest of the content, so that only headers lie before the next entry.
            io::copy(&mut data, &mut io::sink()).map_err(failed)?;
            left = data.left;
        }
    }

    fn zip(&mut self, file: BufReader<File>) -> Result<()> {
        let path = self.path;
        let failed = |error: zip::result::ZipError| unreadable(path, &error.into(), self.bounds);
        let mut archive = zip::ZipArchive::new(file).map_err(failed)?;
        let remark = String::from_utf8_lossy(archive.comment()).trim().to_owned();
        if !remark.is_empty() {
            self.visit("", Kind::Remark(remark), &mut io::empty())?;
        }
        let mut left = self.bounds.bytes;
        for index in 0..archive.len() {
            let mut entry =
                archive.by_index(index).map_err(|error| unreadable(path, &error.into(), self.bounds))?;
            let name =
                entry.name().map_err(|error| unreadable(path, &error.into(), self.bounds))?.into_owned();
            let kind = if entry.is_dir() {
                Kind::Folder
            } else if entry.is_symlink() {
                let mut target = String::new();
                (&mut entry)
                    .take(LONGEST_TARGET)
                    .read_to_string(&mut target)
                    .map_err(|source| unreadable(path, &source, self.bounds))?;
                Kind::Link(target)
            } else {
                Kind::File { executable: entry.unix_mode().is_some_and(|mode| mode & 0o100 != 0) }
            };
            // The sizes in the zip directory are untrusted, so bytes are counted while they are read.
            let mut data = Bounded { inner: &mut entry, left };
            self.visit(&name, kind, &mut data)?;
            left = data.left;
        }
        Ok(())
    }

    fn visit(&mut self, raw: &str, kind: Kind, data: &mut dyn Read) -> Result<()> {
        if self.cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        self.entries += 1;
        if self.entries > self.bounds.entries {
            return Err(too_large(self.path, format!("{} entries", self.bounds.entries)));
        }
        let name = match &kind {
            Kind::Remark(_) => String::new(),
            _ => normal_name(raw).map_err(|why| Error::UnsafeArchive {
                path: self.path.to_owned(),
                entry: shortened(raw),
                why,
            })?,
        };
        if name.is_empty() && !matches!(kind, Kind::Remark(_)) {
            // The top folder itself is no entry.
            return Ok(());
        }
        (self.visit)(Entry { name: &name, kind, data })
    }
}

/// Remaining bytes for headers; `None` while content is read. Zero after a refused header.
type HeaderAllowance = Rc<Cell<Option<u64>>>;

/// Fails on headers longer than the allowance: the tar reader would load names of any length into memory.
struct HeaderBound<R> {
    inner: R,
    allowance: HeaderAllowance,
}

impl<R: Read> Read for HeaderBound<R> {
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

/// Shortens a name for an error message.
fn shortened(name: &str) -> String {
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} bytes)", &name[..end], name.len()),
        None => name.to_owned(),
    }
}

/// Reads up to `left` bytes, and fails if there are more.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self
            .left
            .checked_sub(count as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::QuotaExceeded, "too many bytes"))?;
        Ok(count)
    }
}

fn too_large(path: &Path, limit: String) -> Error {
    Error::ArchiveTooLarge { path: path.to_owned(), limit }
}

/// Maps an entry's read error: the archive is damaged, or larger than our bounds.
pub(crate) fn unreadable(path: &Path, source: &io::Error, bounds: Bounds) -> Error {
    if source.kind() == io::ErrorKind::QuotaExceeded {
        return too_large(path, format!("{} MiB", bounds.bytes >> 20));
    }
    Error::NotAnArchive { path: path.to_owned(), why: format!("it is damaged or cut off ({source})") }
}
