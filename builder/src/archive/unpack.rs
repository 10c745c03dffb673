//! Unpacks the part of an archive below one folder, and never writes outside the destination.
//!
//! Three rules ensure this. Entry names are normalized (see [`super::normalize_name`]). No file is written
//! through a link of the archive. A link's target has `..` only at its beginning, and does not climb above
//! the unpacked part. A link always lies in a real folder, so each `..` leads to that folder's parent; the
//! components after them stay inside by the same rules.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::Path;

use tokio_util::sync::CancellationToken;

use super::walk::{entry_read_error, walk_entries};
use super::{ArchiveEntry, ArchiveEntryKind, ArchiveLimits};
use crate::error::{BuilderError, Result, io_error};

/// Unpacks everything below `top` (empty: the whole archive) into `into`, which must exist and be empty.
/// `wanted` selects entries by their names relative to `top`.
pub(crate) fn unpack(
    path: &Path,
    top: &str,
    into: &Path,
    bounds: ArchiveLimits,
    cancel: &CancellationToken,
    wanted: &dyn Fn(&str) -> bool,
) -> Result<()> {
    let mut links = BTreeSet::new();
    walk_entries(path, bounds, cancel, &mut |entry| match strip_folder(entry.name, top) {
        Some(name) if !name.is_empty() && wanted(name) => {
            write_entry(path, name.to_owned(), entry, into, bounds, &mut links)
        }
        _ => Ok(()),
    })
}

/// Returns the part of a name below `top`; empty for the folder itself. An empty `top` contains every name.
pub(crate) fn strip_folder<'a>(name: &'a str, top: &str) -> Option<&'a str> {
    if top.is_empty() {
        return Some(name);
    }
    let rest = name.strip_prefix(top)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('/') }
}

fn write_entry(
    archive: &Path,
    name: String,
    entry: ArchiveEntry<'_>,
    into: &Path,
    bounds: ArchiveLimits,
    links: &mut BTreeSet<String>,
) -> Result<()> {
    let refuse = |why| {
        Err(BuilderError::UnsafeArchive { path: archive.to_owned(), entry: entry.name.to_owned(), why })
    };
    let through_link = name.match_indices('/').any(|(end, _)| links.contains(&name[..end]));
    if through_link || links.contains(&name) {
        return refuse("would be written through a link");
    }
    let target = into.join(&name);
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).map_err(io_error("creating", parent))?;
    }
    match entry.kind {
        ArchiveEntryKind::Folder => fs::create_dir_all(&target).map_err(io_error("creating", target)),
        ArchiveEntryKind::File { executable } => {
            let mode = if executable { 0o755 } else { 0o644 };
            // `create_new`: if a name occurs twice, the second entry must not be written through a link
            // made by the first.
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(mode)
                .open(&target)
                .map_err(io_error("writing", &target))?;
            io::copy(entry.data, &mut file).map_err(|source| match source.kind() {
                io::ErrorKind::StorageFull => io_error("writing", &target)(source),
                _ => entry_read_error(archive, &source, bounds),
            })?;
            Ok(())
        }
        ArchiveEntryKind::Link(to) => {
            if !stays_inside(&name, &to) {
                return refuse("is a link that leads out of the source");
            }
            symlink(to, &target).map_err(io_error("writing", &target))?;
            links.insert(name);
            Ok(())
        }
        ArchiveEntryKind::Other => refuse("is neither a file nor a folder nor a symbolic link"),
        ArchiveEntryKind::Comment(_) => Ok(()),
    }
}

/// Returns true if the target of the link `name` stays in the tree that `name` is relative to.
pub(crate) fn stays_inside(name: &str, target: &str) -> bool {
    if target.is_empty() || target.starts_with('/') {
        return false;
    }
    let depth = name.matches('/').count();
    let mut parts = target.split('/').peekable();
    let mut climbs = 0;
    while parts
        .next_if(|part| matches!(*part, ".." | "." | ""))
        .inspect(|part| climbs += usize::from(*part == ".."))
        .is_some()
    {}
    climbs <= depth && parts.all(|part| part != "..")
}
