//! Writes changed files into a tree: each one atomically, and all or none.

use std::fs::{self, Metadata, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use crate::error::{PatchError, Result, content_error, io_error, machine_error};

const LINK_HINT: &str = "writing through it would change files somewhere else: patch the tree that it leads to, or \
                         replace the link by a copy";

/// A file before and after a change; `None`: the file does not exist.
pub(super) struct FileChange {
    pub(super) path: String,
    pub(super) from: Option<Vec<u8>>,
    pub(super) to: Option<Vec<u8>>,
}

/// Makes all changes or none: if a change fails, the changes before it are undone.
pub(super) fn write_all(root: &Path, changes: &[FileChange]) -> Result<()> {
    check_all(root, changes)?;
    for (count, change) in changes.iter().enumerate() {
        let path = root.join(&change.path);
        let Err(error) = write_file(root, &path, change.to.as_deref()) else { continue };
        for change in changes[..count].iter().rev() {
            write_file(root, &root.join(&change.path), change.from.as_deref())
                .map_err(|undo| incomplete_undo(root, &error, &undo))?;
        }
        return Err(error);
    }
    Ok(())
}

/// Checks everything that can be checked before the first write.
pub(super) fn check_all(root: &Path, changes: &[FileChange]) -> Result<()> {
    changes.iter().try_for_each(|change| check_change(root, change))
}

/// Content of a file in a tree; `None` if it does not exist. Fails for links and special files.
pub(super) fn read_file(root: &Path, path: &str) -> Result<Option<Vec<u8>>> {
    let file = file_inside(root, path)?;
    match regular_file(&file)? {
        None => Ok(None),
        Some(_) => fs::read(&file).map(Some).map_err(io_error("reading", file)),
    }
}

/// The file's absolute path; fails if a component leads out of the tree.
pub(super) fn file_inside(root: &Path, path: &str) -> Result<PathBuf> {
    let relative = Path::new(path);
    // `.git` does not belong to the tree: git runs the programs in its hooks.
    let normal = relative
        .components()
        .all(|part| matches!(part, Component::Normal(name) if !name.eq_ignore_ascii_case(".git")));
    if path.is_empty() || !normal {
        let hint = "a patch may only name files below llama.cpp's own folder";
        return Err(content_error(root, format!("`{path}` leads out of the tree"), hint));
    }
    let mut file = root.to_owned();
    let mut folders = relative.components().peekable();
    while let Some(part) = folders.next() {
        file.push(part);
        if folders.peek().is_some() && fs::symlink_metadata(&file).is_ok_and(|facts| facts.is_symlink()) {
            return Err(machine_error(&file, "the folder is a symbolic link", LINK_HINT));
        }
    }
    Ok(file)
}

pub(super) fn place_new_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    let placed = new_file(folder, bytes).and_then(|new| Ok(new.persist_noclobber(path)?));
    placed.map(|_file| ()).map_err(io_error("writing", path))
}

fn check_change(root: &Path, change: &FileChange) -> Result<()> {
    let file = file_inside(root, &change.path)?;
    // A folder's owner could replace a file of any mode; refuse to replace a read-only one.
    if regular_file(&file)?.is_some_and(|facts| facts.permissions().mode() & 0o200 == 0) {
        return Err(machine_error(
            &file,
            "the file is read-only",
            &format!("allow writing first: chmod u+w {}", file.display()),
        ));
    }
    if read_file(root, &change.path)? != change.from {
        return Err(content_error(
            &file,
            "the file was changed by another program just now".to_owned(),
            "try again when nothing else writes into this tree",
        ));
    }
    Ok(())
}

fn regular_file(file: &Path) -> Result<Option<Metadata>> {
    match fs::symlink_metadata(file) {
        Ok(facts) if facts.is_file() => Ok(Some(facts)),
        Ok(facts) if facts.is_symlink() => Err(machine_error(file, "the file is a symbolic link", LINK_HINT)),
        Ok(_) => Err(machine_error(
            file,
            "this is no regular file",
            "a patched tree needs a file of this name here",
        )),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(io_error("looking at", file)(error)),
    }
}

/// Writes a file, or removes it together with folders that become empty.
fn write_file(root: &Path, path: &Path, content: Option<&[u8]>) -> Result<()> {
    let folder = path.parent().unwrap_or(root);
    let Some(bytes) = content else {
        fs::remove_file(path).map_err(io_error("removing", path))?;
        for folder in path.ancestors().skip(1).take_while(|folder| *folder != root) {
            if fs::remove_dir(folder).is_err() {
                break;
            }
        }
        return Ok(());
    };
    fs::create_dir_all(folder).map_err(io_error("creating", folder))?;
    let write = || {
        let new = new_file(folder, bytes)?;
        if let Ok(facts) = fs::metadata(path) {
            new.as_file().set_permissions(facts.permissions())?;
        }
        Ok(new.persist(path)?)
    };
    write().map(|_file| ()).map_err(io_error("writing", path))
}

fn new_file(folder: &Path, bytes: &[u8]) -> io::Result<tempfile::NamedTempFile> {
    let mut new = tempfile::Builder::new()
        .prefix(".llama-warden-new-")
        // The umask applies, as for any new file.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    new.write_all(bytes)?;
    new.as_file().sync_all()?;
    Ok(new)
}

pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    fs::File::open(folder).and_then(|opened| opened.sync_all()).map_err(io_error("syncing", folder))
}

fn incomplete_undo(root: &Path, error: &PatchError, undo: &PatchError) -> PatchError {
    let why = format!("{error}; and the files changed before could not be restored: {undo}");
    let cure = format!(
        "nothing is lost: remove the cause, then run `llama-warden patches apply --reverse --source {}`",
        root.display()
    );
    machine_error(root, &why, &cure)
}
