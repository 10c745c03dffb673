//! Directories that the fleet writes to, and names of sockets, which contain a PID.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use warden_policies::{GenerationId, ModelName};

use crate::error::{FleetError, SpawnError};
use crate::process::root::instance_pid;
use crate::process::slot_files;
use crate::process::trusted_path;
use crate::spec::FleetConfig;

/// Creates the directory for sockets (mode 0700, owned by our user) and removes files of dead supervisors.
pub(crate) fn prepare_runtime(path: &Path) -> Result<(), FleetError> {
    make_private(path).map_err(|source| FleetError::RuntimeDir { path: path.to_owned(), source })?;
    sweep_runtime(path);
    Ok(())
}

/// Creates a directory that only our user can enter, or restricts an existing one.
pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    trusted_path::make_private_dir(path)?;
    // Detect a read-only directory now, and not at the first request.
    let probe = path.join(format!(".probe-{}", std::process::id()));
    fs::write(&probe, "")?;
    fs::remove_file(probe)
}

/// Creates a socket's directory again if it is gone: the end of a login session removes `/run/user/UID`,
/// and cleaners of `/tmp` remove old directories.
///
/// # Errors
/// The directory cannot be created, or another user has created one there.
pub fn restore_directory(beside: &Path) -> Result<(), SpawnError> {
    let Some(directory) = beside.parent() else { return Ok(()) };
    let is_gone = fs::symlink_metadata(directory).is_err();
    if is_gone {
        tracing::warn!(directory = %directory.display(), "the directory for sockets was removed; making it again");
    }
    // After the removal of the parent directory, another user may have created both again.
    let made =
        if is_gone { make_private(directory) } else { trusted_path::make_private_dir(directory).map(drop) };
    made.map_err(|source| SpawnError::Sockets { directory: directory.to_owned(), source })
}

/// Removes files of dead supervisors. Errors are ignored: a remaining file does no harm.
fn sweep_runtime(path: &Path) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let dead = |pid: u32| pid != instance_pid() && !Path::new(&format!("/proc/{pid}")).exists();
        if name.to_str().and_then(maker_pid).is_some_and(dead) {
            slot_files::remove(&entry.path());
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Checks that no socket path is too long, even for a generation number that no crash loop reaches in a year.
pub(crate) fn check_sockets(config: &FleetConfig) -> Result<(), FleetError> {
    const LATE_GENERATION: GenerationId = GenerationId(99_999_999);
    for model in &config.models {
        check_socket_path(&config.runtime_dir, &model.name, LATE_GENERATION)?;
    }
    Ok(())
}

pub(crate) fn check_socket_path(
    directory: &Path,
    model: &ModelName,
    generation: GenerationId,
) -> Result<(), FleetError> {
    let path = socket_path(directory, model, generation);
    let length = path.as_os_str().len();
    if length > SOCKET_PATH_LIMIT {
        return Err(FleetError::SocketPath { path, length, limit: SOCKET_PATH_LIMIT });
    }
    Ok(())
}

/// Longest path of a Unix socket on Linux: `sun_path` has 108 bytes, with a final zero.
pub(crate) const SOCKET_PATH_LIMIT: usize = 107;

/// Path of a generation's socket. llama-server cannot listen on an existing socket file, so no path is used
/// twice: each contains the instance's PID and the generation.
pub(crate) fn socket_path(directory: &Path, model: &ModelName, generation: GenerationId) -> PathBuf {
    const MAX_MODEL_CHARS: usize = 12;
    let last = model.as_str().rsplit('/').next().unwrap_or_default();
    let short = file_safe_name(last, MAX_MODEL_CHARS);
    directory.join(format!("{short}-{}-{generation}.sock", instance_pid()))
}

/// Beginning of a name, with all characters replaced that are unusual in file names.
pub(crate) fn file_safe_name(name: &str, max_chars: usize) -> String {
    let tame = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    name.chars().take(max_chars).map(tame).collect()
}

/// PID in the name of a socket, report file or slot directory.
pub(crate) fn maker_pid(file_name: &str) -> Option<u32> {
    // Further processes of a generation append their PIDs to the report file's name.
    let file_name = match file_name.rsplit_once('.') {
        Some((name, pid)) if name.ends_with(".report") && pid.parse::<u32>().is_ok() => name,
        _ => file_name,
    };
    let kinds = [".sock", ".report", ".reclaim", ".slots"];
    let stem = kinds.iter().find_map(|kind| file_name.strip_suffix(kind))?;
    let mut parts = stem.rsplit('-');
    parts.next()?.strip_prefix('g')?.parse::<u64>().ok()?;
    parts.next()?.parse().ok()
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

    #[test]
    fn a_socket_name_is_short_tame_and_tells_its_maker() {
        let path =
            socket_path(Path::new("/run/w"), &ModelName::new("org/Some Long-Model.gguf"), GenerationId(12));
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(name, format!("Some-Long-Mo-{}-g12.sock", std::process::id()));
        assert_eq!(maker_pid(name), Some(std::process::id()));
        let report = crate::process::report_file::report_path(&path);
        let report = report.file_name().unwrap().to_str().unwrap();
        assert_eq!(report, format!("Some-Long-Mo-{}-g12.report", std::process::id()));
        assert_eq!(maker_pid(report), Some(std::process::id()));
        assert_eq!(maker_pid(&format!("{report}.4711")), Some(std::process::id()));
        assert_eq!(maker_pid("a-1-g2.slots"), Some(1));
        assert_eq!(maker_pid("a-1-g2.sock.4711"), None);
        assert_eq!(maker_pid("else.sock"), None);
        assert_eq!(maker_pid("a-1-g2.txt"), None);
    }
}
