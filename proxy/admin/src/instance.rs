//! The directories of one instance, and the pointer files by which the command line finds a running instance.
//!
//! ```text
//!   <runtime_dir>/llama-warden-<pid>/     private, with the sockets: `warden_supervisor::private_dir`
//!   <state_dir>/instances/<pid>.json      PID and admin socket of a running instance
//!   $XDG_RUNTIME_DIR/llama-warden-instances/<pid>.json     a copy, for commands with another state directory
//! ```
//!
//! A pointer file is locked while its instance runs, in any process or mount namespace, and removed when
//! the instance ends. A killed instance leaves its pointer file behind; a search removes such a file if no
//! process locks it and no instance answers at its socket.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use warden_config::resolve::dirs::WardenDirs;
use warden_supervisor::sync::lock;
use warden_supervisor::{PrivateDir, WorkKind, is_tolerable, run_job, trusted_path};

use crate::error::AdminError;
pub use crate::pointer::LocatedInstance;
use crate::pointer::{InstancePointer, instances_in_folder};
use crate::status::InstanceInfo;

const STATE_POINTER_DIR: &str = "instances";
/// Folder of pointer files in a directory that other programs also use.
const SHARED_POINTER_DIR: &str = "llama-warden-instances";

/// The directories of this instance, locked until this value is dropped.
#[derive(Debug)]
pub struct InstanceDirs {
    runtime: PrivateDir,
    pointers: SharedPointers,
}

/// Pointer files written so far; retries in the background add more.
type SharedPointers = Arc<Mutex<Vec<InstancePointer>>>;

impl InstanceDirs {
    /// Claims the directories.
    ///
    /// # Errors
    /// The state directory is not writable, or the runtime directory cannot be claimed.
    pub fn take(dirs: &WardenDirs) -> Result<Self, AdminError> {
        check_writable(&dirs.state)?;
        PrivateDir::sweep(&dirs.runtime_base);
        Ok(Self { runtime: private_dir(&dirs.runtime)?, pointers: SharedPointers::default() })
    }

    /// Continues with directories that the predecessor owns until [`Self::take_ownership`].
    pub fn inherit(dirs: &WardenDirs, lock: OwnedFd) -> Self {
        Self { runtime: PrivateDir::inherit(&dirs.runtime, lock), pointers: SharedPointers::default() }
    }

    /// Duplicates the lock of the runtime directory, for the successor.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated.
    pub fn lock(&self) -> io::Result<OwnedFd> {
        self.runtime.duplicate_lock()
    }

    /// Takes ownership, so that this process removes the directories when it ends.
    pub fn take_ownership(&mut self) {
        self.runtime.set_others(false);
    }

    /// Gives up ownership, because the directories now belong to the successor.
    pub fn release_ownership(&mut self) {
        self.runtime.set_others(true);
    }

    /// Writes pointer files for the command line: into the state directory and, if possible, into a shared
    /// directory. If the disk is full, returns a future that retries until there is room.
    ///
    /// # Errors
    /// The state directory is not writable, and its disk is not full.
    pub fn announce(
        &mut self,
        state: &Path,
        common: Option<&PathBuf>,
        instance: &InstanceInfo,
    ) -> Result<Option<BoxFuture<'static, ()>>, AdminError> {
        let dir = state.join(STATE_POINTER_DIR);
        let mut again = None;
        match write_state_pointer(&dir, instance) {
            Ok(pointer) => lock(&self.pointers).push(pointer),
            Err(problem) if is_tolerable(&problem) => {
                tracing::warn!(
                    folder = %dir.display(), %problem,
                    "commands cannot find this instance: until its pointer file can be written, name the admin \
                     socket to them (`--admin-socket`)"
                );
                again = Some(announce_later(self.pointers.clone(), dir, instance.clone()).boxed());
            }
            Err(problem) => {
                return Err(AdminError::usage(
                    format!("cannot write to {}: {problem}", dir.display()),
                    "make it writable, or choose another `paths.state_dir`",
                ));
            }
        }
        if let Some(place) = common {
            let dir = place.join(SHARED_POINTER_DIR);
            match trusted_path::make_private_dir(&dir).and_then(|_| InstancePointer::write(&dir, instance)) {
                Ok(pointer) => lock(&self.pointers).push(pointer),
                Err(error) => tracing::debug!(place = %place.display(), %error, "no pointer file there"),
            }
        }
        Ok(again)
    }

    /// Does not wait for a disk that hangs: a pointer file of an ended instance misleads no search.
    pub async fn remove(self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        let Self { runtime, pointers } = self;
        drop(runtime);
        let removed = run_job(WorkKind::StateFiles, move || lock(&pointers).clear());
        let _late = tokio::time::timeout(PATIENCE, removed).await;
    }
}

fn write_state_pointer(dir: &Path, instance: &InstanceInfo) -> io::Result<InstancePointer> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    InstancePointer::write(dir, instance)
}

async fn announce_later(pointers: SharedPointers, dir: PathBuf, instance: InstanceInfo) {
    const PAUSE: Duration = Duration::from_secs(5);
    loop {
        tokio::time::sleep(PAUSE).await;
        let to = dir.clone();
        let own = instance.clone();
        if let Ok(Ok(pointer)) = run_job(WorkKind::StateFiles, move || write_state_pointer(&to, &own)).await {
            tracing::info!(folder = %dir.display(), "the command line finds this instance from now on");
            lock(&pointers).push(pointer);
            return;
        }
    }
}

/// Makes a private directory, and locks it.
///
/// # Errors
/// The directory cannot be made, or another process has it.
pub fn private_dir(path: &Path) -> Result<PrivateDir, AdminError> {
    let hint = "choose another `paths.runtime_dir`";
    let made = PrivateDir::make(path).map_err(|problem| {
        let message = format!("cannot make the private directory {}: {problem}", path.display());
        if problem.kind() == io::ErrorKind::PermissionDenied {
            AdminError::usage(
                message,
                "choose a directory that no other user can change: set XDG_RUNTIME_DIR or `paths.runtime_dir`",
            )
        } else {
            AdminError::usage(message, hint)
        }
    })?;
    made.ok_or_else(|| {
        AdminError::hinted(format!("another llama-warden is already running in {}", path.display()), hint)
    })
}

fn check_writable(state: &Path) -> Result<(), AdminError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(state);
    let tried = made.and_then(|()| tempfile::tempfile_in(state).map(drop));
    let tried = tried.or_else(|problem| if is_tolerable(&problem) { Ok(()) } else { Err(problem) });
    tried.map_err(|problem| {
        AdminError::usage(
            format!("cannot write to the state directory {}: {problem}", state.display()),
            "make it writable, or choose another `paths.state_dir`",
        )
    })
}

fn sort_instances(mut all: Vec<LocatedInstance>) -> Vec<LocatedInstance> {
    let key = |one: &LocatedInstance| (one.instance.pid, one.instance.admin_socket.clone());
    all.sort_by_key(key);
    all.dedup_by(|one, other| one.instance.admin_socket == other.instance.admin_socket);
    all
}

pub(crate) fn instances_in_state(state: &Path) -> Vec<LocatedInstance> {
    sort_instances(instances_in_folder(&state.join(STATE_POINTER_DIR)))
}

/// Returns the running instances known to the state directory or to `places`.
pub fn all_instances(state: &Path, places: &[PathBuf]) -> Vec<LocatedInstance> {
    let common = places.iter().flat_map(|place| instances_in_folder(&place.join(SHARED_POINTER_DIR)));
    sort_instances(instances_in_folder(&state.join(STATE_POINTER_DIR)).into_iter().chain(common).collect())
}

/// Returns the running instances known to the state directory; if there are none, those known to `places`.
pub(crate) fn nearest_instances(state: &Path, places: &[PathBuf]) -> Vec<LocatedInstance> {
    let own = instances_in_state(state);
    if own.is_empty() { all_instances(state, places) } else { own }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn dirs(base: &Path) -> WardenDirs {
        let runtime_base = base.join("run");
        WardenDirs {
            state: base.join("state"),
            runtime: PrivateDir::path_for(&runtime_base, 1),
            runtime_base,
            data: base.join("data"),
            cache: base.join("cache"),
            models: Vec::new(),
        }
    }

    fn instance(pid: u32, socket: &Path) -> InstanceInfo {
        InstanceInfo { pid, admin_socket: socket.to_string_lossy().into_owned(), ..InstanceInfo::default() }
    }

    fn found(all: Vec<LocatedInstance>) -> Vec<InstanceInfo> {
        let own = rustix::process::geteuid().as_raw();
        all.into_iter().inspect(|one| assert_eq!(one.owner, own)).map(|one| one.instance).collect()
    }

    fn put(dir: &Path, instance: &InstanceInfo) -> InstancePointer {
        fs::create_dir_all(dir).unwrap();
        InstancePointer::write(dir, instance).unwrap()
    }

    #[test]
    fn a_claim_excludes_a_second_one_and_leaves_what_others_have_there() {
        let base = tempfile::tempdir().unwrap();
        let dirs = dirs(base.path());
        fs::create_dir(&dirs.runtime_base).unwrap();
        fs::write(dirs.runtime_base.join("keep"), "mine").unwrap();
        let claim = InstanceDirs::take(&dirs).unwrap();
        let second = InstanceDirs::take(&dirs).unwrap_err();
        assert!(second.to_string().contains("already running"), "{second}");
        drop(claim);
        assert!(!dirs.runtime.exists() && dirs.runtime_base.join("keep").exists());
    }

    #[test]
    fn a_directory_of_somebody_else_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let dirs = dirs(base.path());
        fs::create_dir_all(&dirs.runtime).unwrap();
        fs::write(dirs.runtime.join("keep"), "mine").unwrap();
        let error = InstanceDirs::take(&dirs).unwrap_err();
        assert!(matches!(error, AdminError::Usage { .. }), "{error:?}");
        assert!(error.to_string().contains("did not make"), "{error}");
    }

    #[test]
    fn a_running_instance_is_found_though_its_socket_is_in_another_namespace() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join(STATE_POINTER_DIR);
        let away = instance(7, &base.path().join("not-here.sock"));
        let pointer = put(&dir, &away);
        // Another process with the same PID, in a container of its own.
        let same = instance(7, &base.path().join("or-this.sock"));
        let second = put(&dir, &same);
        assert_eq!(found(instances_in_state(base.path())), [away, same.clone()]);
        drop(pointer);
        assert_eq!(found(instances_in_state(base.path())), [same]);
        drop(second);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn dead_ones_are_forgotten_and_other_files_are_not() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join(STATE_POINTER_DIR);
        fs::create_dir(&dir).unwrap();
        let socket = base.path().join("a.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // Pointers of older versions, which locked nothing.
        for (pid, socket) in [(1, socket.clone()), (2, base.path().join("gone.sock"))] {
            fs::write(dir.join(format!("{pid}.json")), serde_json::to_vec(&instance(pid, &socket)).unwrap())
                .unwrap();
        }
        fs::write(dir.join("notes.json"), "mine").unwrap();
        assert_eq!(found(instances_in_state(base.path())), [instance(1, &socket)]);
        assert!(!dir.join("2.json").exists() && dir.join("notes.json").exists());
        drop(listener);
        assert_eq!(found(instances_in_state(base.path())), []);
    }

    #[test]
    fn where_the_state_directory_knows_of_none_the_common_places_are_asked() {
        let base = tempfile::tempdir().unwrap();
        let (state, place) = (base.path().join("state"), base.path().join("run"));
        let there = instance(3, &base.path().join("x.sock"));
        let _pointer = put(&place.join(SHARED_POINTER_DIR), &there);
        assert_eq!(
            found(nearest_instances(&state, std::slice::from_ref(&place))),
            std::slice::from_ref(&there)
        );
        let own = instance(4, &base.path().join("y.sock"));
        let _own = put(&state.join(STATE_POINTER_DIR), &own);
        assert_eq!(
            found(nearest_instances(&state, std::slice::from_ref(&place))),
            std::slice::from_ref(&own)
        );
        assert_eq!(found(all_instances(&state, &[place])), [there, own]);
    }
}
