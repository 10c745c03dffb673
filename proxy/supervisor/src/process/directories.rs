//! Directories that the fleet writes to. The private directory for sockets is checked and cleaned.

use std::fs;
use std::io;
use std::path::Path;

use warden_policies::GenerationId;

use crate::error::{FleetError, SpawnError};
use crate::process::instance;
use crate::process::slot_files;
use crate::process::socket_name::{SOCKET_PATH_LIMIT, maker_pid, socket_path};
use crate::process::trusted_path;
use crate::spec::FleetConfig;

/// Creates the directory for sockets (mode 0700, owned by our user) and removes files of dead supervisors.
pub(crate) fn prepare_runtime(path: &Path) -> Result<(), FleetError> {
    make_private(path).map_err(|source| FleetError::RuntimeDir { path: path.to_owned(), source })?;
    sweep_runtime(path);
    Ok(())
}

/// Creates a directory that only our user can enter, or restricts an existing directory of ours.
pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    trusted_path::make_private_dir(path)?;
    // Check now, and not at the first request, that the directory is writable.
    let probe = path.join(format!(".probe-{}", std::process::id()));
    fs::write(&probe, "")?;
    fs::remove_file(probe)
}

/// Creates the directory of a socket (or of a file next to it) again if it is gone: no process could start
/// without it. The end of a login session removes `/run/user/UID`, and cleaners of `/tmp` remove old
/// directories.
///
/// # Errors
/// The directory cannot be created, or another user has put one in its place.
pub fn restore_directory(beside: &Path) -> Result<(), SpawnError> {
    let Some(directory) = beside.parent() else { return Ok(()) };
    let is_gone = fs::symlink_metadata(directory).is_err();
    if is_gone {
        tracing::warn!(directory = %directory.display(), "the directory for sockets was removed; making it again");
    }
    // Check an existing directory, too: after the one above it was removed, another user may have created
    // both.
    let made =
        if is_gone { make_private(directory) } else { trusted_path::make_private_dir(directory).map(drop) };
    made.map_err(|source| SpawnError::Sockets { directory: directory.to_owned(), source })
}

/// Removes files of dead supervisors. Errors are ignored, because a file that stays does no harm.
fn sweep_runtime(path: &Path) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let dead = |pid: u32| pid != instance::instance_pid() && !Path::new(&format!("/proc/{pid}")).exists();
        if name.to_str().and_then(maker_pid).is_some_and(dead) {
            slot_files::remove(&entry.path());
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Checks that no socket path will be too long, even with a generation number that a year of crash loops
/// cannot reach.
pub(crate) fn check_sockets(config: &FleetConfig) -> Result<(), FleetError> {
    const LATE_GENERATION: GenerationId = GenerationId(99_999_999);
    for model in &config.models {
        let path = socket_path(&config.runtime_dir, &model.name, LATE_GENERATION);
        let length = path.as_os_str().len();
        if length > SOCKET_PATH_LIMIT {
            return Err(FleetError::SocketPath { path, length, limit: SOCKET_PATH_LIMIT });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_directory_is_private_and_swept_of_what_the_dead_left() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/b");
        fs::create_dir_all(&path).unwrap();
        // Above the greatest PID of Linux.
        let (stale, ours) =
            (path.join("m-4999999-g1.sock"), path.join(format!("m-{}-g1.sock", std::process::id())));
        let stale_report = crate::process::report_file::report_path(&stale);
        for file in [&stale, &stale_report, &ours] {
            fs::write(file, "").unwrap();
        }
        prepare_runtime(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(!stale.exists() && !stale_report.exists() && ours.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let parent = tempfile::tempdir().unwrap();
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        let error = prepare_runtime(&file.join("run")).unwrap_err().to_string();
        assert!(error.contains("file/run") && error.contains("runtime_dir"), "{error}");
    }
}
