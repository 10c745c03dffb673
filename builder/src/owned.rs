//! Creates folders marked as ours, and removes only marked ones.
//!
//! The parent folders are configurable, so a folder with our name may belong to the user; the mark proves
//! that it is ours. Links are removed and never followed. A crash between creation and marking leaves an
//! empty folder, which is harmless to remove.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, unlinkat};
use rustix::io::Errno;

pub(crate) const MARK_FILE: &str = ".made-by-llama-warden";
const MARK_TEXT: &str = "llama-warden made this folder, and removes it with everything in it.\n";

/// Creates and marks a folder; fails if the name exists. Missing parents are created without a mark.
pub(crate) fn create(folder: &Path) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::create_dir(folder)?;
    fs::write(folder.join(MARK_FILE), MARK_TEXT)
}

/// Returns true for a real folder (no link) with our mark.
pub(crate) fn is_ours(folder: &Path) -> bool {
    let is = |path: &Path, kind: fn(&fs::FileType) -> bool| {
        fs::symlink_metadata(path).is_ok_and(|facts| kind(&facts.file_type()))
    };
    is(folder, fs::FileType::is_dir) && is(&folder.join(MARK_FILE), fs::FileType::is_file)
}

/// Removes a folder of ours with all its content. A missing folder is no error; an empty one is removed, too.
/// Fails if the folder is not ours, contains a mount, or contains something that cannot be removed.
pub(crate) fn remove(folder: &Path) -> io::Result<()> {
    let facts = match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        facts => facts?,
    };
    if facts.is_dir() && !is_ours(folder) {
        return match fs::remove_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Err(not_ours()),
            other => other,
        };
    }
    if !facts.is_dir() {
        return Err(not_ours());
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(CWD, folder, flags, Mode::empty())?;
    let device = fstat(&opened)?.st_dev;
    remove_content(&opened, device, true)?;
    unlinkat(&opened, MARK_FILE, AtFlags::empty())?;
    fs::remove_dir(folder)
}

fn not_ours() -> io::Error {
    io::Error::other("llama-warden did not make it: move it away, or name another folder in [paths]")
}

/// Removes the content of an open folder, except the mark of the top one.
fn remove_content(folder: &OwnedFd, device: u64, top: bool) -> io::Result<()> {
    let mut entries = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let is_mark = top && name.to_bytes() == MARK_FILE.as_bytes();
        if !matches!(name.to_bytes(), b"." | b"..") && !is_mark {
            entries.push((name.to_owned(), entry.file_type()));
        }
    }
    for (name, kind) in entries {
        // If the file system reports no type, try `unlinkat` first, which fails for a folder.
        if kind != FileType::Directory {
            match unlinkat(folder, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => continue,
                Err(Errno::ISDIR | Errno::PERM) if kind == FileType::Unknown => {}
                Err(error) => return Err(error.into()),
            }
        }
        let inner = match open_subfolder(folder, &name, device) {
            Err(Errno::NOENT) => continue,
            Err(Errno::XDEV) => {
                let name = name.to_string_lossy();
                return Err(io::Error::other(format!("something is mounted at `{name}` in it")));
            }
            inner => inner?,
        };
        remove_content(&inner, device, false)?;
        drop(inner);
        match unlinkat(folder, &name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Opens a subfolder, unless it is a link or a mount.
fn open_subfolder(folder: &OwnedFd, name: &CStr, device: u64) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    match openat2(folder, name, flags, Mode::empty(), within) {
        // `openat2` is missing in kernels before 5.6, or blocked by a syscall filter. Compare device numbers,
        // which reveals most mounts.
        Err(Errno::NOSYS | Errno::PERM) => {
            let inner = openat(folder, name, flags, Mode::empty())?;
            if fstat(&inner)?.st_dev == device { Ok(inner) } else { Err(Errno::XDEV) }
        }
        other => other,
    }
}

/// Total bytes of the files in a folder; a link counts its own size.
pub(crate) fn folder_bytes(folder: &Path) -> u64 {
    let mut all = 0;
    let mut folders: Vec<PathBuf> = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(facts) if facts.is_dir() => folders.push(entry.path()),
                Ok(facts) => all += facts.len(),
                Err(_) => {}
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_we_made_goes_with_everything_in_it_and_links_are_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let (ours, theirs) = (base.path().join("a/ours"), base.path().join("theirs"));
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("keep"), "mine").unwrap();
        create(&ours).unwrap();
        fs::create_dir_all(ours.join("deep/er")).unwrap();
        fs::write(ours.join("deep/er/file"), "").unwrap();
        symlink(&theirs, ours.join("deep/link")).unwrap();
        assert!(is_ours(&ours));
        remove(&ours).unwrap();
        assert!(!ours.exists() && theirs.join("keep").exists());
        remove(&ours).unwrap();
    }

    #[test]
    fn what_somebody_else_made_stays() {
        let base = tempfile::tempdir().unwrap();
        let theirs = base.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("keep"), "mine").unwrap();
        for path in [theirs.clone(), theirs.join("keep")] {
            let error = remove(&path).unwrap_err().to_string();
            assert!(error.contains("did not make it"), "{error}");
        }
        let link = base.path().join("link");
        let ours = base.path().join("ours");
        create(&ours).unwrap();
        symlink(&ours, &link).unwrap();
        assert!(remove(&link).is_err() && ours.exists(), "a link to ours is not ours");
        assert!(create(&theirs).is_err(), "what is there is never taken for ours");
        assert!(theirs.join("keep").exists() && !theirs.join(MARK_FILE).exists());
    }

    #[test]
    fn an_empty_folder_that_a_crash_left_goes() {
        let base = tempfile::tempdir().unwrap();
        let empty = base.path().join("empty");
        fs::create_dir(&empty).unwrap();
        remove(&empty).unwrap();
        assert!(!empty.exists());
    }
}
