//! A transaction on the files of a tree: all changes or none.
//!
//! ```text
//!  look at everything -- new files beside the old ones -- rename each into place -- done
//!        | nothing touched yet        | remove them             | put the old bytes back
//!        v                            v                         v
//!      error                        error                     error
//! ```
//!
//! A crash in between is the journal's business: it was written before.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use super::disk::Disk;
use super::fault::{half_written, refused, trouble};
use crate::error::{Error, Result, io_error};

/// What a new file is called until it takes its place; leftovers are recognised by it.
const NEW: &str = ".llama-warden-new";

/// One file from one state into another. `None`: it is not there.
#[derive(Clone, Debug)]
pub(super) struct Change {
    /// Relative to the root, separated by slashes.
    pub(super) path: String,
    pub(super) from: Option<Vec<u8>>,
    pub(super) to: Option<Vec<u8>>,
}

/// A transaction that did not happen.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: Error,
    /// Whether every file is as it was before.
    pub(super) undone: bool,
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

/// Makes all changes, or none. `folders` are made first (parents before children) where they are missing.
pub(super) fn commit(
    disk: &dyn Disk,
    root: &Path,
    changes: &[Change],
    folders: &[String],
) -> std::result::Result<(), Failed> {
    let modes = look(root, changes).map_err(|error| Failed { error, undone: true })?;
    let mut undo = Undo { disk, root, folders: Vec::new(), files: Vec::new() };
    let Err(error) = undo.run(changes, &modes, folders) else {
        return Ok(());
    };
    Err(match undo.back(changes, &modes) {
        Ok(()) => Failed { error, undone: true },
        Err(why) => Failed { error: half_written(root, &error, &why), undone: false },
    })
}

/// Checks that changes can be made, before anything is touched; gives the modes that the new files get.
pub(super) fn look(root: &Path, changes: &[Change]) -> Result<Vec<Option<u32>>> {
    changes.iter().map(|change| look_at(root, change)).collect()
}

/// Removes what a crash may have left beside these files.
pub(super) fn sweep<'a>(disk: &dyn Disk, root: &Path, paths: impl Iterator<Item = &'a str>) -> Result<()> {
    for path in paths {
        let new = beside(&root.join(path));
        if fs::symlink_metadata(&new).is_ok() {
            disk.remove(&new).map_err(io_error("removing", new))?;
        }
    }
    Ok(())
}

/// The bytes of a file in a tree; nothing if there is none. Links and odd things are refused.
pub(super) fn read(root: &Path, path: &str) -> Result<Option<Vec<u8>>> {
    let file = inside(root, path)?;
    match regular(&file)? {
        None => Ok(None),
        Some(_) => fs::read(&file).map(Some).map_err(io_error("reading", file)),
    }
}

struct Undo<'a> {
    disk: &'a dyn Disk,
    root: &'a Path,
    /// Folders that were made.
    folders: Vec<PathBuf>,
    /// How far each change got, in order.
    files: Vec<Stage>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// A new file may lie beside the old one.
    Written,
    /// The file may be in its new state.
    Placed,
}

impl Undo<'_> {
    fn run(&mut self, changes: &[Change], modes: &[Option<u32>], folders: &[String]) -> Result<()> {
        for folder in folders {
            let path = self.root.join(folder);
            if fs::symlink_metadata(&path).is_err() {
                self.folders.push(path.clone());
                self.disk.create_folder(&path).map_err(io_error("creating", path))?;
            }
        }
        for (change, mode) in changes.iter().zip(modes) {
            self.files.push(Stage::Written);
            if let Some(bytes) = &change.to {
                let new = beside(&self.root.join(&change.path));
                self.disk.write_new(&new, bytes, *mode).map_err(io_error("writing", new))?;
            }
        }
        for (index, change) in changes.iter().enumerate() {
            let path = self.root.join(&change.path);
            self.files[index] = Stage::Placed;
            match &change.to {
                Some(_) => self.disk.rename(&beside(&path), &path).map_err(io_error("replacing", path))?,
                None if change.from.is_some() => {
                    self.disk.remove(&path).map_err(io_error("removing", path))?;
                }
                None => {}
            }
        }
        self.sync(changes)
    }

    /// Puts everything back that `run` may have touched.
    fn back(&self, changes: &[Change], modes: &[Option<u32>]) -> Result<()> {
        for ((change, mode), stage) in changes.iter().zip(modes).zip(&self.files) {
            let path = self.root.join(&change.path);
            let new = beside(&path);
            if fs::symlink_metadata(&new).is_ok() {
                self.disk.remove(&new).map_err(io_error("removing", &new))?;
            }
            if *stage != Stage::Placed || read(self.root, &change.path)? == change.from {
                continue;
            }
            match &change.from {
                Some(bytes) => {
                    self.disk.write_new(&new, bytes, *mode).map_err(io_error("writing", &new))?;
                    self.disk.rename(&new, &path).map_err(io_error("restoring", path))?;
                }
                None => self.disk.remove(&path).map_err(io_error("removing", path))?,
            }
        }
        for folder in self.folders.iter().rev() {
            if folder.exists() {
                self.disk.remove_folder(folder).map_err(io_error("removing", folder))?;
            }
        }
        self.sync(changes)
    }

    fn sync(&self, changes: &[Change]) -> Result<()> {
        let mut folders: Vec<PathBuf> = changes
            .iter()
            .filter_map(|change| self.root.join(&change.path).parent().map(Path::to_owned))
            .filter(|folder| folder.exists())
            .collect();
        folders.sort();
        folders.dedup();
        folders
            .into_iter()
            .try_for_each(|folder| self.disk.sync_folder(&folder).map_err(io_error("syncing", folder)))
    }
}

fn look_at(root: &Path, change: &Change) -> Result<Option<u32>> {
    let file = inside(root, &change.path)?;
    let facts = regular(&file)?;
    if let Some(facts) = &facts {
        // The owner of a file can replace it whatever its mode; but who took the right to write away meant it.
        if facts.permissions().mode() & 0o200 == 0 {
            return Err(trouble(
                &file,
                "the file is read-only",
                &format!("allow writing first: chmod u+w {}", file.display()),
            ));
        }
    }
    if read(root, &change.path)? != change.from {
        return Err(refused(
            &file,
            "the file was changed by somebody else just now".to_owned(),
            "try again when nobody else works in this tree",
        ));
    }
    Ok(facts.map(|facts| facts.permissions().mode() & 0o7777))
}

/// The file's path, if nothing on the way leads out of the tree.
pub(super) fn inside(root: &Path, path: &str) -> Result<PathBuf> {
    let relative = Path::new(path);
    // What git keeps for itself is no part of the tree: programs of its hooks would be run.
    let normal = relative
        .components()
        .all(|part| matches!(part, Component::Normal(name) if !name.eq_ignore_ascii_case(".git")));
    if path.is_empty() || !normal {
        let hint = "a patch may only name files below llama.cpp's own folder";
        return Err(refused(root, format!("`{path}` leads out of the tree"), hint));
    }
    let mut file = root.to_owned();
    let mut folders = relative.components().peekable();
    while let Some(part) = folders.next() {
        file.push(part);
        if folders.peek().is_some() && fs::symlink_metadata(&file).is_ok_and(|facts| facts.is_symlink()) {
            return Err(trouble(&file, "the folder is a symbolic link", LINK_HINT));
        }
    }
    Ok(file)
}

const LINK_HINT: &str = "writing through it would change files somewhere else: patch the tree that it leads to, or \
                         replace the link by a copy";

/// Facts about a regular file; nothing if there is none; an error for everything else of that name.
fn regular(file: &Path) -> Result<Option<Metadata>> {
    match fs::symlink_metadata(file) {
        Ok(facts) if facts.is_file() => Ok(Some(facts)),
        Ok(facts) if facts.is_symlink() => Err(trouble(file, "the file is a symbolic link", LINK_HINT)),
        Ok(_) => {
            Err(trouble(file, "this is no regular file", "a patched tree needs a file of this name here"))
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(io_error("looking at", file)(error)),
    }
}

/// Where a new file waits for its turn: in the same folder, so that renaming it is one step.
pub(super) fn beside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(NEW);
    path.with_file_name(name)
}
