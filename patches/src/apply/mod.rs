//! Writes a series of patch sets into a folder. Every file is checked before the first write.

#[cfg(test)]
mod tests;

use std::fs::{self, Metadata, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use crate::edits::FileEdit;
use crate::error::{Result, content_error, io_error, machine_error};
use crate::series::PatchSeries;
use crate::whole::{self, LossTolerance};

const LINK_HINT: &str = "writing through it would change files somewhere else: patch the tree that it leads to, or \
                         replace the link by a copy";

/// Writes a series judged on this folder, and returns whether it changes something. The caller checks
/// [`PatchSeries::blocking`] first.
///
/// # Errors
/// Fails before the first write if a file cannot be written or has changed since it was judged. If a write
/// fails, the earlier files stay written.
pub fn apply(root: &Path, series: &PatchSeries) -> Result<bool> {
    let edits: Vec<&FileEdit> =
        series.edits.0.iter().filter(|edit| edit.before.as_ref() != Some(&edit.after)).collect();
    edits.iter().try_for_each(|edit| check_edit(root, edit))?;
    for edit in &edits {
        let file = root.join(&edit.path);
        let old = fs::metadata(&file).map(|facts| facts.permissions());
        let mode = old.unwrap_or_else(|_| Permissions::from_mode(0o644));
        whole::write_with_mode(&file, &edit.after, mode, LossTolerance::Replaceable)
            .map_err(io_error("writing", file))?;
    }
    Ok(!edits.is_empty())
}

fn check_edit(root: &Path, edit: &FileEdit) -> Result<()> {
    let file = file_inside(root, &edit.path)?;
    let found = match regular_file(&file)? {
        None => None,
        // The superuser could write it all the same.
        Some(facts) if facts.permissions().mode() & 0o200 == 0 => {
            let cure = format!("allow writing first: chmod u+w {}", file.display());
            return Err(machine_error(&file, "the file is read-only", &cure));
        }
        Some(_) => Some(fs::read(&file).map_err(io_error("reading", &file))?),
    };
    if found != edit.before {
        return Err(content_error(
            &file,
            "the file was changed by another program just now".to_owned(),
            "try again when nothing else writes into this tree",
        ));
    }
    Ok(())
}

/// The file's absolute path; fails if a component leads out of the tree.
fn file_inside(root: &Path, path: &str) -> Result<PathBuf> {
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
