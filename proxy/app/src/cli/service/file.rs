//! Writes and removes unit files. Files written or changed by an operator are touched only with `--force`,
//! which keeps a copy.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::unit::{UnitFileState, classify_unit};
use crate::exit::CommandError;

/// Maximum number of kept copies of one file.
const MAX_COPIES: u32 = 1000;

/// Result of writing or removing a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UnitFileChange {
    Written,
    /// Replaced an older unit written by llama-warden.
    Renewed,
    /// The file was already as wanted.
    Unchanged,
    /// Replaced an operator's file, which is kept at this path.
    Kept(PathBuf),
}

/// Writes a unit. `force` also replaces an operator's file.
///
/// # Errors
/// The file is an operator's, or cannot be written.
pub(super) fn write_unit(path: &Path, text: &str, force: bool) -> Result<UnitFileChange, CommandError> {
    let done = match inspect_file(path, text)? {
        UnitFileState::Nothing => UnitFileChange::Written,
        UnitFileState::Same => return Ok(UnitFileChange::Unchanged),
        UnitFileState::Ours => UnitFileChange::Renewed,
        UnitFileState::Theirs if force => UnitFileChange::Kept(keep_copy(path)?),
        UnitFileState::Theirs => return Err(foreign_file(path, "writes ours and keeps a copy of it")),
    };
    write_atomically(path, text).map_err(|error| cannot("write", path, &error))?;
    Ok(done)
}

/// Removes a unit written by llama-warden; `force` also an operator's. `None` if there was none.
///
/// # Errors
/// The file is an operator's, or cannot be removed.
pub(super) fn remove_unit(path: &Path, force: bool) -> Result<Option<UnitFileChange>, CommandError> {
    match inspect_file(path, "")? {
        UnitFileState::Nothing => return Ok(None),
        UnitFileState::Theirs if force => {
            return keep_copy(path).map(|copy| Some(UnitFileChange::Kept(copy)));
        }
        UnitFileState::Theirs => return Err(foreign_file(path, "takes it away and keeps a copy of it")),
        UnitFileState::Same | UnitFileState::Ours => {}
    }
    std::fs::remove_file(path).map_err(|error| cannot("remove", path, &error))?;
    Ok(Some(UnitFileChange::Written))
}

fn foreign_file(path: &Path, forced: &str) -> CommandError {
    CommandError::hinted(
        format!("{} is not as we wrote it", path.display()),
        format!("`--force` {forced}; changes outlive all this in a drop-in: `systemctl edit llama-warden`"),
    )
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> CommandError {
    let hint = if error.kind() == io::ErrorKind::PermissionDenied { "as root, or with `--user`" } else { "" };
    CommandError::hinted(format!("cannot {what} {}: {error}", path.display()), hint)
}

fn inspect_file(path: &Path, wanted: &str) -> Result<UnitFileState, CommandError> {
    // A symbolic link is an operator's, whatever its target: linking to /dev/null masks a unit.
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(UnitFileState::Nothing),
        Err(error) => Err(cannot("look at", path, &error)),
        Ok(facts) if !facts.is_file() => Ok(UnitFileState::Theirs),
        Ok(_) => {
            let text = std::fs::read(path).map_err(|error| cannot("read", path, &error))?;
            Ok(classify_unit(Some(&String::from_utf8_lossy(&text)), wanted))
        }
    }
}

/// Renames the file to a name that is not a unit's.
fn keep_copy(path: &Path) -> Result<PathBuf, CommandError> {
    let named = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(if number == 1 { ".old".to_owned() } else { format!(".old-{number}") });
        PathBuf::from(name)
    };
    let free = (1..MAX_COPIES).map(named).find(|copy| std::fs::symlink_metadata(copy).is_err());
    let copy = free.ok_or_else(|| {
        CommandError::failed(format!("there are {MAX_COPIES} copies of {} already", path.display()))
    })?;
    std::fs::rename(path, &copy).map_err(|error| cannot("keep a copy of", path, &error))?;
    Ok(copy)
}

/// Writes the file atomically.
fn write_atomically(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    file.as_file().sync_all()?;
    file.persist(path).map(drop).map_err(|failed| failed.error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::service::unit::socket_unit;

    #[test]
    fn what_somebody_changed_stays_or_is_kept_and_ours_comes_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("systemd/user/llama-warden.socket");
        let [old, new] = [8080, 9090].map(|port| socket_unit("127.0.0.1", port).unwrap());
        assert_eq!(write_unit(&path, &old, false).unwrap(), UnitFileChange::Written);
        assert_eq!(write_unit(&path, &old, false).unwrap(), UnitFileChange::Unchanged);
        assert_eq!(write_unit(&path, &new, false).unwrap(), UnitFileChange::Renewed);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        let changed = new.replace("Backlog=4096", "Backlog=1");
        for copy in ["llama-warden.socket.old", "llama-warden.socket.old-2"] {
            std::fs::write(&path, &changed).unwrap();
            for refused in [write_unit(&path, &new, false).map(drop), remove_unit(&path, false).map(drop)] {
                let told = refused.unwrap_err().lines().join("\n");
                assert!(told.contains("--force") && told.contains("llama-warden.socket is not"), "{told}");
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), changed);
            let copy = path.with_file_name(copy);
            assert_eq!(write_unit(&path, &new, true).unwrap(), UnitFileChange::Kept(copy.clone()));
            assert_eq!(std::fs::read_to_string(copy).unwrap(), changed);
        }
        assert_eq!(remove_unit(&path, false).unwrap(), Some(UnitFileChange::Written));
        assert_eq!(remove_unit(&path, false).unwrap(), None);
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(write_unit(&path, &new, false).is_err(), "somebody has masked it");
    }
}
