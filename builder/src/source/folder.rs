//! Folders as sources: finding llama.cpp, hashing and copying.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{fs, io};

use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use warden_patches::SourceRevision;

use super::tree::{MAX_ROOT_DEPTH, TreeLocation, TreeSearch, join_names};
use super::{ExaminedSource, file_sha256, is_source, revision};
use crate::archive::{ArchiveLimits, stays_inside};
use crate::error::{BuilderError, Result, check_cancelled, io_error, list_names};
use crate::event::EventReporter;
use crate::machine::run_on_all_cores;

/// Folders that are not searched: they are large, and a tree in them is a work copy.
const SKIPPED_FOLDERS: [&str; 4] = [".git", "node_modules", "target", "build"];
/// Maximum entries of a search: more means that the user gave a wrong folder, such as their home.
const MAX_SEARCH_ENTRIES: usize = 200_000;
pub(super) fn examine_folder(path: &Path, cancel: &CancellationToken) -> Result<ExaminedSource> {
    let (tree, revision) = locate(path, cancel)?;
    let root = path.join(&tree.root);
    let items = list_items(&root, cancel)?.kept;
    if items.is_empty() {
        // No file of the folder belongs to a source, so all such folders would have the same hash.
        return Err(BuilderError::NoLlamaCpp { path: path.to_owned(), top: Vec::new() });
    }
    let identity = format!("tree-sha256:{}", hash_items(&root, &items, cancel)?);
    Ok(ExaminedSource {
        given: path.to_owned(),
        kind: "directory".into(),
        identity,
        root: tree.root,
        server: tree.server.into(),
        revision,
    })
}

pub(super) fn locate(path: &Path, cancel: &CancellationToken) -> Result<(TreeLocation, SourceRevision)> {
    let mut search = TreeSearch::default();
    let mut left = MAX_SEARCH_ENTRIES;
    search_folder(path, "", 0, &mut left, &mut search, cancel)?;
    let Some(tree) = search.tree() else {
        return Err(BuilderError::NoLlamaCpp { path: path.to_owned(), top: search.top() });
    };
    let read = |name: &str| {
        // The metadata of a worktree may be anywhere: `name` is then absolute, and `join` leaves it
        // unchanged.
        let file = path.join(name);
        let facts = fs::metadata(&file).ok()?;
        let is_small = facts.is_file() && facts.len() <= revision::MAX_EVIDENCE_BYTES;
        if is_small { fs::read_to_string(file).ok() } else { None }
    };
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let revision = revision::find_revision(&tree.root, &name, None, &read);
    Ok((tree, revision))
}

fn search_folder(
    path: &Path,
    name: &str,
    depth: usize,
    left: &mut usize,
    search: &mut TreeSearch,
    cancel: &CancellationToken,
) -> Result<()> {
    check_cancelled(cancel)?;
    let folder = path.join(name);
    for entry in fs::read_dir(&folder).map_err(io_error("reading", &folder))? {
        let entry = entry.map_err(io_error("reading", &folder))?;
        let Some(next) = left.checked_sub(1) else { return Ok(()) };
        *left = next;
        let Ok(file_name) = entry.file_name().into_string() else { continue };
        let below = join_names(name, &file_name);
        let kind = entry.file_type().map_err(io_error("reading", entry.path()))?;
        search.add(&below, kind.is_file());
        // Two levels below the deepest root, for `tools/server`.
        if kind.is_dir() && depth < MAX_ROOT_DEPTH + 2 && !SKIPPED_FOLDERS.contains(&file_name.as_str()) {
            // An unreadable folder cannot be built, so it counts as absent.
            match search_folder(path, &below, depth + 1, left, search, cancel) {
                Err(BuilderError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {}
                other => other?,
            }
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TreeItem {
    File(PathBuf),
    Link(PathBuf, PathBuf),
}

/// The source's entries in sorted order, and files that are too large for a source, with their bytes.
#[derive(Default)]
struct TreeItems {
    kept: Vec<TreeItem>,
    large: Vec<(PathBuf, u64)>,
}

/// Maximum bytes of a source file: llama.cpp's largest files, except models, have some MiB.
const MAX_FILE_BYTES: u64 = 64 << 20;
const MAX_SHOWN_FILES: usize = 3;

/// Entries of an in-source cmake build in the root; its other files look like source files.
const CMAKE_BUILD_FILES: [&str; 2] = ["CMakeCache.txt", "CMakeFiles"];

/// Lists everything that belongs to the source. Excludes cmake build folders below the root, and links that
/// lead outside.
fn list_items(root: &Path, cancel: &CancellationToken) -> Result<TreeItems> {
    let (mut found, mut bytes) = (TreeItems::default(), 0);
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        check_cancelled(cancel)?;
        let path = root.join(&folder);
        let is_root = folder.as_os_str().is_empty();
        if !is_root && path.join("CMakeCache.txt").exists() {
            continue;
        }
        for entry in fs::read_dir(&path).map_err(io_error("reading", &path))? {
            let entry = entry.map_err(io_error("reading", &path))?;
            let name = folder.join(entry.file_name());
            if is_root && CMAKE_BUILD_FILES.iter().any(|left| name == Path::new(left)) {
                continue;
            }
            let kind = entry.file_type().map_err(io_error("reading", entry.path()))?;
            if !is_source(&name.to_string_lossy()) {
                continue;
            }
            if kind.is_dir() {
                folders.push(name);
            } else if kind.is_file() {
                let size = entry.metadata().map_err(io_error("reading", entry.path()))?.len();
                if size > MAX_FILE_BYTES {
                    found.large.push((name, size));
                } else {
                    bytes += size;
                    found.kept.push(TreeItem::File(name));
                }
            } else if kind.is_symlink() {
                let target = fs::read_link(entry.path()).map_err(io_error("reading", entry.path()))?;
                if stays_inside(&name.to_string_lossy(), &target.to_string_lossy()) {
                    found.kept.push(TreeItem::Link(name, target));
                }
            }
            check_limits(root, bytes, found.kept.len())?;
        }
    }
    found.kept.sort();
    found.large.sort();
    Ok(found)
}

/// Checks the limits of an archive, since a folder is copied like an archive is unpacked.
fn check_limits(root: &Path, bytes: u64, files: usize) -> Result<()> {
    let ArchiveLimits { bytes: most_bytes, entries: most_files } = ArchiveLimits::SOURCE;
    let limit = if bytes > most_bytes {
        format!("{} GiB", most_bytes >> 30)
    } else if files as u64 > most_files {
        format!("{most_files} files")
    } else {
        return Ok(());
    };
    Err(BuilderError::SourceTooLarge { path: root.to_owned(), limit })
}

/// sha256 over the names and contents of sorted items. Files are hashed on all cores.
fn hash_items(root: &Path, items: &[TreeItem], cancel: &CancellationToken) -> Result<String> {
    let contents = run_on_all_cores(items.len(), |indices| {
        let mut done = Vec::new();
        for index in indices {
            let content = match &items[index] {
                TreeItem::File(name) => file_sha256(&root.join(name), cancel)?,
                TreeItem::Link(..) => String::new(),
            };
            done.push((index, content));
        }
        Ok(done)
    })?;
    let mut hash = Sha256::new();
    for (item, content) in items.iter().zip(&contents) {
        // Names contain no zero byte, so it separates the parts unambiguously.
        let (kind, name, content) = match item {
            TreeItem::File(name) => (b"f\0", name, content.as_bytes()),
            TreeItem::Link(name, target) => (b"l\0", name, target.as_os_str().as_bytes()),
        };
        hash.update(kind);
        hash.update(name.as_os_str().as_bytes());
        hash.update(b"\0");
        hash.update(content);
        hash.update(b"\0");
    }
    Ok(hex::encode(hash.finalize()))
}

/// Copies the source. Builds never use the original, because cmake and patches write into their tree.
pub(super) fn copy_source(
    root: &Path,
    into: &Path,
    reporter: &EventReporter,
    cancel: &CancellationToken,
) -> Result<()> {
    let TreeItems { kept, large } = list_items(root, cancel)?;
    if !large.is_empty() {
        let named: Vec<String> =
            large.iter().map(|(name, size)| format!("{} ({} MiB)", name.display(), size >> 20)).collect();
        reporter.note(format!(
            "{}: left out of the source, as files of more than {} MiB are",
            list_names(&named, MAX_SHOWN_FILES),
            MAX_FILE_BYTES >> 20
        ));
    }
    for item in kept {
        check_cancelled(cancel)?;
        let (TreeItem::File(name) | TreeItem::Link(name, _)) = &item;
        let (from, to) = (root.join(name), into.join(name));
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(io_error("creating", parent))?;
        }
        match &item {
            TreeItem::File(_) => fs::copy(&from, &to).map(drop).map_err(io_error("copying", from))?,
            TreeItem::Link(_, target) => symlink(target, &to).map_err(io_error("copying", from))?,
        }
    }
    Ok(())
}
