//! The directories of one instance, and how the command line finds a running one.
//!
//! ```text
//!   <state_dir>/instances/<pid>.json     who runs, and on which admin socket; removed at the end
//!   <runtime_dir>/lock                   held as long as the instance lives, in whatever process namespace
//!   <runtime_dir>/admin.sock, *.sock     ours and the children's
//! ```
//!
//! An instance that was killed leaves its files behind; the next one removes them, knowing by the lock that nobody
//! holds them.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use super::answer::Instance;
use crate::config::resolve::Dirs;
use crate::exit::Failure;

/// Our directories, ours alone as long as this lives.
#[derive(Debug)]
pub(crate) struct Claim {
    runtime: PathBuf,
    pointer: Option<PathBuf>,
    _lock: File,
}

impl Claim {
    /// Makes the directories and takes them.
    pub(crate) fn take(dirs: &Dirs, uid: u32) -> Result<Self, Failure> {
        writable(&dirs.state)?;
        if let Some(parent) = dirs.runtime.parent() {
            sweep(parent);
        }
        let cannot = |problem: io::Error| {
            Failure::usage(
                format!("cannot make the private directory {}: {problem}", dirs.runtime.display()),
                "choose another `paths.runtime_dir`",
            )
        };
        private_dir(&dirs.runtime, uid).map_err(cannot)?;
        let lock = lock(&dirs.runtime).map_err(cannot)?.ok_or_else(|| {
            Failure::hinted(
                format!("another llama-warden is already running in {}", dirs.runtime.display()),
                "stop it, or choose another `paths.runtime_dir`",
            )
        })?;
        Ok(Self { runtime: dirs.runtime.clone(), pointer: None, _lock: lock })
    }

    /// Tells the command line where we are.
    pub(crate) fn announce(&mut self, state: &Path, instance: &Instance) -> Result<(), Failure> {
        let dir = state.join("instances");
        let path = dir.join(format!("{}.json", instance.pid));
        let written = fs::create_dir_all(&dir)
            .and_then(|()| serde_json::to_vec(instance).map_err(io::Error::other))
            .and_then(|text| fs::write(&path, text));
        written.map_err(|problem| {
            Failure::usage(
                format!("cannot write {}: {problem}", path.display()),
                "make its directory writable, or choose another `paths.state_dir`",
            )
        })?;
        self.pointer = Some(path);
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(pointer) = &self.pointer {
            drop(fs::remove_file(pointer));
        }
        drop(fs::remove_dir_all(&self.runtime));
    }
}

fn writable(state: &Path) -> Result<(), Failure> {
    let tried = fs::create_dir_all(state).and_then(|()| tempfile::tempfile_in(state).map(drop));
    tried.map_err(|problem| {
        Failure::usage(
            format!("cannot write to the state directory {}: {problem}", state.display()),
            "make it writable, or choose another `paths.state_dir`",
        )
    })
}

/// A directory that only we can enter. One that exists already has to be ours: in a shared directory like `/tmp`
/// somebody else could have made it before us.
fn private_dir(path: &Path, uid: u32) -> io::Result<()> {
    if let Some(parent) = path.parent()
        && !parent.exists()
    {
        private_dir(parent, uid)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(problem) if problem.kind() == io::ErrorKind::AlreadyExists => {}
        other => return other,
    }
    let facts = fs::symlink_metadata(path)?;
    if !facts.is_dir() || facts.uid() != uid {
        return Err(io::Error::other("it exists and belongs to somebody else"));
    }
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
}

/// The lock of a runtime directory, or `None` if somebody holds it.
fn lock(runtime: &Path) -> io::Result<Option<File>> {
    let file = File::create(runtime.join("lock"))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(problem) => Err(problem.into()),
    }
}

/// Removes what killed instances left beside ours: directories of our naming whose lock is free.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let named = entry
            .file_name()
            .to_str()
            .and_then(|name| name.strip_prefix("llama-warden-")?.parse::<u32>().ok())
            .is_some();
        if named
            && entry.path().join("lock").is_file()
            && let Ok(Some(held)) = lock(&entry.path())
        {
            drop(fs::remove_dir_all(entry.path()));
            drop(held);
        }
    }
}

/// The running instances that a state directory knows of. Files of those that were killed are removed.
pub(crate) fn running(state: &Path) -> Vec<Instance> {
    let mut found = Vec::new();
    for entry in fs::read_dir(state.join("instances")).into_iter().flatten().flatten() {
        let Ok(text) = fs::read(entry.path()) else { continue };
        let Ok(instance) = serde_json::from_slice::<Instance>(&text) else { continue };
        match std::os::unix::net::UnixStream::connect(&instance.admin_socket) {
            Ok(_) => found.push(instance),
            // Refused or missing: nobody will ever listen there again. Anything else may pass.
            Err(problem)
                if matches!(problem.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) =>
            {
                drop(fs::remove_file(entry.path()));
            }
            Err(_) => {}
        }
    }
    found.sort_by_key(|instance| instance.pid);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn dirs(base: &Path) -> Dirs {
        Dirs {
            state: base.join("state"),
            runtime: base.join("run").join("llama-warden-1"),
            data: base.join("data"),
            cache: base.join("cache"),
        }
    }

    fn uid() -> u32 {
        rustix::process::getuid().as_raw()
    }

    #[test]
    fn a_claim_makes_private_directories_excludes_a_second_one_and_leaves_nothing_behind() {
        let base = tempfile::tempdir().unwrap();
        let dirs = dirs(base.path());
        let claim = Claim::take(&dirs, uid()).unwrap();
        assert_eq!(fs::metadata(&dirs.runtime).unwrap().permissions().mode() & 0o777, 0o700);
        let second = Claim::take(&dirs, uid()).unwrap_err();
        assert!(second.to_string().contains("already running"), "{second}");
        drop(claim);
        assert!(!dirs.runtime.exists());
    }

    #[test]
    fn what_a_killed_instance_left_is_removed_and_what_a_living_one_holds_is_not() {
        let base = tempfile::tempdir().unwrap();
        let run = base.path().join("run");
        for name in ["llama-warden-7", "llama-warden-8", "other-9"] {
            fs::create_dir_all(run.join(name)).unwrap();
            fs::write(run.join(name).join("lock"), "").unwrap();
        }
        let living = lock(&run.join("llama-warden-8")).unwrap().unwrap();
        let claim = Claim::take(&dirs(base.path()), uid()).unwrap();
        assert!(!run.join("llama-warden-7").exists());
        assert!(run.join("llama-warden-8").exists() && run.join("other-9").exists());
        drop((claim, living));
    }

    #[test]
    fn a_directory_of_somebody_else_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let dirs = dirs(base.path());
        fs::create_dir_all(&dirs.runtime).unwrap();
        let error = Claim::take(&dirs, uid() + 1).unwrap_err();
        assert_eq!(error.code(), 2);
        assert!(error.to_string().contains("belongs to somebody else"), "{error}");
    }

    #[test]
    fn running_instances_are_found_by_their_sockets_and_dead_ones_forgotten() {
        let base = tempfile::tempdir().unwrap();
        let state = base.path();
        let socket = state.join("a.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        fs::create_dir(state.join("instances")).unwrap();
        let instance = |pid: u32, socket: &Path| Instance {
            pid,
            version: "0".into(),
            address: "127.0.0.1:1".into(),
            admin_socket: socket.to_string_lossy().into_owned(),
            started_at: String::new(),
            ledger: String::new(),
            memory_anon: None,
        };
        for (pid, socket) in [(1, socket.clone()), (2, state.join("gone.sock"))] {
            let text = serde_json::to_vec(&instance(pid, &socket)).unwrap();
            fs::write(state.join("instances").join(format!("{pid}.json")), text).unwrap();
        }
        assert_eq!(running(state), [instance(1, &socket)]);
        assert!(!state.join("instances/2.json").exists());
        drop(listener);
        assert_eq!(running(state), []);
    }
}
