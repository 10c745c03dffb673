//! Chooses and checks the program of an upgrade: a file that only the current user or root can change, and
//! that identifies itself as llama-warden.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::Duration;

use warden_supervisor::SuccessorProgram;

/// Suffix that the kernel appends to the path of a running program whose file was replaced.
const DELETED_SUFFIX: &[u8] = b" (deleted)";

#[derive(Debug)]
pub(super) struct NextProgram {
    pub(super) binary: PathBuf,
    /// True if `binary` is the file that runs now.
    pub(super) same: bool,
    /// The program that a restart would start, if it is another one.
    pub(super) restart_starts: Option<String>,
}

impl NextProgram {
    pub(super) fn choose(named: Option<PathBuf>) -> Result<Self, String> {
        let binary = choose(named)?;
        let restart_starts = restart_differs(&binary).map(|path| path.display().to_string());
        Ok(Self { same: is_running_file(&binary), restart_starts, binary })
    }
}

/// Returns the named file, or the file now at the path that llama-warden was started from.
fn choose(named: Option<PathBuf>) -> Result<PathBuf, String> {
    let path = match named {
        Some(path) => path,
        None => own_path().ok_or("it is not known where our own program is: name one with --to")?,
    };
    let shown = path.display();
    let path = path.canonicalize().map_err(|error| format!("cannot use {shown}: {error}"))?;
    check_trusted(&path)?;
    Ok(path)
}

/// The path that we were started from; for example, a link that is changed for the next version.
static OWN_PATH: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Records the path that we were started from. Call it at the start: later another program may be there.
pub(in crate::serve) fn note_own_name() {
    OWN_PATH.get_or_init(|| {
        let exe = std::env::current_exe().ok()?.canonicalize().ok()?;
        restart_path().filter(|name| name.canonicalize().is_ok_and(|path| path == exe))
    });
}

/// Returns the path at which a restart with the same name finds the program.
fn restart_path() -> Option<PathBuf> {
    let name = std::env::args_os().next()?;
    find_program(&name, &std::env::var_os("PATH").unwrap_or_default())
}

/// Finds a program by its name, as a shell does; a service manager passes a whole path.
fn find_program(name: &OsStr, search: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return std::path::absolute(name).ok();
    }
    let runs =
        |path: &PathBuf| path.metadata().is_ok_and(|facts| facts.is_file() && facts.mode() & 0o111 != 0);
    std::env::split_paths(search).map(|folder| folder.join(name)).find(runs)
}

/// The program that a restart would start instead of `next`, if it is another one.
fn restart_differs(next: &Path) -> Option<PathBuf> {
    restart_path().filter(|path| path.canonicalize().is_ok_and(|path| path != next))
}

fn is_running_file(next: &Path) -> bool {
    let same = |a: std::fs::Metadata, b: std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    std::fs::metadata("/proc/self/exe").ok().zip(next.metadata().ok()).is_some_and(|(a, b)| same(a, b))
}

fn own_path() -> Option<PathBuf> {
    if let Some(name) = OWN_PATH.get().cloned().flatten() {
        return Some(name);
    }
    let path = std::env::current_exe().ok()?.into_os_string().into_vec();
    let path = path.strip_suffix(DELETED_SUFFIX).map(<[u8]>::to_vec).unwrap_or(path);
    Some(PathBuf::from(OsString::from_vec(path)))
}

/// Checks who may change the file, because such a user could run any program with this program's rights.
fn check_trusted(path: &Path) -> Result<(), String> {
    let shown = path.display();
    let facts = path.metadata().map_err(|error| format!("cannot use {shown}: {error}"))?;
    let own = rustix::process::geteuid().as_raw();
    match () {
        () if !facts.is_file() => Err(format!("{shown} is no file")),
        () if facts.mode() & 0o111 == 0 => Err(format!("{shown} is not executable (`chmod +x`)")),
        () if facts.uid() != own && facts.uid() != 0 => {
            Err(format!("{shown} belongs to another user: it has to be ours or root's"))
        }
        () if facts.mode() & 0o022 != 0 => {
            Err(format!("others can write to {shown}: take that away (`chmod go-w`)"))
        }
        () => Ok(()),
    }
}

/// Runs the program for its version, within a limit.
pub(super) async fn program_version(path: &Path, limit: Duration) -> Result<String, String> {
    let shown = path.display();
    let mut command = tokio::process::Command::new(path);
    command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let said = match tokio::time::timeout(limit, command.output()).await {
        Err(_) => return Err(format!("{shown} did not print its version within {limit:?}")),
        Ok(Err(error)) => return Err(format!("cannot run {shown}: {error}")),
        Ok(Ok(output)) => String::from_utf8_lossy(&output.stdout).into_owned(),
    };
    let version = said.trim().strip_prefix("llama-warden ").map(str::to_owned);
    version.ok_or_else(|| format!("{shown} does not say that it is llama-warden when asked for `--version`"))
}

pub(super) fn with_own_arguments(binary: PathBuf) -> SuccessorProgram {
    let mut words = std::env::args_os();
    let called = words.next().unwrap_or_else(|| OsString::from("llama-warden"));
    // Pass on `argv[0]`: under the name `llama-server` the program runs in drop-in mode.
    let called = if called.as_bytes().is_empty() { OsString::from("llama-warden") } else { called };
    SuccessorProgram { binary, called, args: words.collect() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_a_program_that_nobody_else_can_change_may_take_our_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("next");
        assert!(choose(Some(file.clone())).unwrap_err().contains("No such file"));
        std::fs::write(&file, "#!/bin/sh\n").unwrap();
        let with = |mode| {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            choose(Some(file.clone()))
        };
        assert!(with(0o644).unwrap_err().contains("not executable"));
        assert!(with(0o775).unwrap_err().contains("others can write"));
        assert!(with(0o757).unwrap_err().contains("others can write"));
        assert_eq!(with(0o755).unwrap(), file.canonicalize().unwrap());
        assert!(choose(Some(dir.path().to_owned())).unwrap_err().contains("no file"));
    }

    #[test]
    fn a_program_is_found_by_its_path_or_where_a_shell_finds_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let search = std::env::join_paths([dir.path().join("none"), dir.path().to_owned()]).unwrap();
        let find = |name: &str| find_program(OsStr::new(name), &search);
        assert_eq!(find("/opt/current/a"), Some(PathBuf::from("/opt/current/a")));
        assert!(find("./a").unwrap().is_absolute());
        let file = dir.path().join("a");
        std::fs::write(&file, "").unwrap();
        assert_eq!(find("a"), None, "nobody can run it");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find("a"), Some(file));
    }

    #[test]
    fn our_own_path_is_that_of_the_file_that_lies_there_now() {
        assert!(choose(None).unwrap().is_absolute());
    }
}
