//! The directories of one instance, and how the command line finds a running one.
//!
//! ```text
//!   <runtime_dir>/llama-warden-<pid>/     ours, with the sockets: `warden_supervisor::private_dir`
//!   <state_dir>/instances/<pid>.json      who runs, and on which admin socket
//!   $XDG_RUNTIME_DIR/llama-warden-instances/<pid>.json     the same, for whoever has another state directory
//! ```
//!
//! Such a pointer is locked as long as its instance lives, in whatever process or mount namespace, and removed at the end.
//! An instance that was killed leaves it behind; who looks for instances removes what nobody holds and nobody answers for.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use warden_supervisor::PrivateDir;
use warden_supervisor::private_dir::is_at;

use super::answer::Instance;
use crate::config::machine::Machine;
use crate::config::resolve::dirs::Dirs;
use crate::exit::Failure;

/// Pointers of one name that are tried: processes of different namespaces may have the same number.
const NAMES: u32 = 100;
/// The folder of pointers in a state directory.
const IN_STATE: &str = "instances";
/// The folder of pointers in a place that is not ours alone.
const IN_COMMON: &str = "llama-warden-instances";

/// Our directories, ours alone as long as this lives.
#[derive(Debug)]
pub(crate) struct Claim {
    runtime: PrivateDir,
    pointers: Vec<Pointer>,
}

impl Claim {
    /// Makes the directories and takes them.
    pub(crate) fn take(dirs: &Dirs, machine: &Machine) -> Result<Self, Failure> {
        writable(&dirs.state)?;
        trusted(&machine.temporary_base(), machine.uid)?;
        PrivateDir::sweep(&dirs.runtime_base);
        Ok(Self { runtime: private_dir(&dirs.runtime)?, pointers: Vec::new() })
    }

    /// Goes on with the directories of the program before us. They are its own until [`Self::own`].
    pub(crate) fn inherit(dirs: &Dirs, lock: OwnedFd) -> Self {
        Self { runtime: PrivateDir::inherit(&dirs.runtime, lock), pointers: Vec::new() }
    }

    /// For the program after us.
    pub(crate) fn lock(&self) -> io::Result<OwnedFd> {
        self.runtime.lock()
    }

    /// They are ours to take away.
    pub(crate) fn own(&mut self) {
        self.runtime.own();
    }

    /// They are the next program's.
    pub(crate) fn leave(&mut self) {
        self.runtime.leave();
    }

    /// Tells the command line where we are: in the state directory, and as far as possible in a place that everybody knows.
    pub(crate) fn announce(
        &mut self,
        state: &Path,
        common: Option<&PathBuf>,
        instance: &Instance,
    ) -> Result<(), Failure> {
        let dir = state.join(IN_STATE);
        let pointer = Pointer::put(&dir, instance).map_err(|problem| {
            Failure::usage(
                format!("cannot write to {}: {problem}", dir.display()),
                "make it writable, or choose another `paths.state_dir`",
            )
        })?;
        self.pointers.push(pointer);
        if let Some(place) = common {
            match Pointer::put(&place.join(IN_COMMON), instance) {
                Ok(pointer) => self.pointers.push(pointer),
                Err(error) => tracing::debug!(place = %place.display(), %error, "no word is left there"),
            }
        }
        Ok(())
    }
}

/// Makes the directory for sockets, or says why that cannot be.
pub(crate) fn private_dir(path: &Path) -> Result<PrivateDir, Failure> {
    let hint = "choose another `paths.runtime_dir`";
    let made = PrivateDir::make(path).map_err(|problem| {
        Failure::usage(format!("cannot make the private directory {}: {problem}", path.display()), hint)
    })?;
    made.ok_or_else(|| {
        Failure::hinted(format!("another llama-warden is already running in {}", path.display()), hint)
    })
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

/// In `/tmp` somebody else could have made our directory before us, and change what is in it.
fn trusted(base: &Path, uid: u32) -> Result<(), Failure> {
    match fs::symlink_metadata(base) {
        Ok(facts) if !facts.is_dir() || facts.uid() != uid || facts.mode() & 0o022 != 0 => {
            Err(Failure::usage(
                format!("{} belongs to somebody else, or others can write to it", base.display()),
                "remove it, or set `paths.runtime_dir` or XDG_RUNTIME_DIR",
            ))
        }
        _ => Ok(()),
    }
}

/// The file that says where an instance is, locked and removed by the instance itself.
#[derive(Debug)]
struct Pointer {
    path: PathBuf,
    file: File,
}

impl Pointer {
    fn put(dir: &Path, instance: &Instance) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut new = tempfile::Builder::new().prefix(".new-").tempfile_in(dir)?;
        rustix::fs::flock(new.as_file(), FlockOperation::NonBlockingLockExclusive)?;
        new.write_all(&serde_json::to_vec(instance)?)?;
        for number in 1..=NAMES {
            let more = if number == 1 { String::new() } else { format!("-{number}") };
            let path = dir.join(format!("{}{more}.json", instance.pid));
            // One that a killed process of our number has left makes room.
            drop(read(&path));
            match new.persist_noclobber(&path) {
                Ok(file) => return Ok(Self { path, file }),
                Err(taken) if taken.error.kind() == io::ErrorKind::AlreadyExists => new = taken.file,
                Err(failed) => return Err(failed.error),
            }
        }
        Err(io::Error::other("there are too many files of our name"))
    }
}

impl Drop for Pointer {
    fn drop(&mut self) {
        if is_at(&self.file, &self.path) {
            drop(fs::remove_file(&self.path));
        }
    }
}

/// The living instance that a pointer is about. One that is dead is removed.
fn read(path: &Path) -> Option<Instance> {
    let facts = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
    // Root looks into places that others can write to.
    if facts.uid() != rustix::process::geteuid().as_raw() && facts.mode() & 0o022 != 0 {
        return None;
    }
    let instance: Instance = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let file = File::open(path).ok()?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err() {
        return Some(instance);
    }
    // Nobody holds it. Versions before this one did not, so it counts whether somebody listens.
    match std::os::unix::net::UnixStream::connect(&instance.admin_socket) {
        Ok(_) => Some(instance),
        // Refused or missing: nobody will ever listen there again. Anything else may pass.
        Err(problem)
            if matches!(problem.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) =>
        {
            if is_at(&file, path) {
                drop(fs::remove_file(path));
            }
            None
        }
        Err(_) => None,
    }
}

fn in_folder(dir: &Path) -> Vec<Instance> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let pointers =
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "json"));
    pointers.filter_map(|path| read(&path)).collect()
}

fn sorted(mut all: Vec<Instance>) -> Vec<Instance> {
    all.sort_by(|one, other| (one.pid, &one.admin_socket).cmp(&(other.pid, &other.admin_socket)));
    all.dedup_by(|one, other| one.admin_socket == other.admin_socket);
    all
}

/// The running instances that a state directory knows of.
pub(crate) fn running(state: &Path) -> Vec<Instance> {
    sorted(in_folder(&state.join(IN_STATE)))
}

/// The running instances that a state directory or one of `places` knows of.
pub(crate) fn everywhere(state: &Path, places: &[PathBuf]) -> Vec<Instance> {
    let common = places.iter().flat_map(|place| in_folder(&place.join(IN_COMMON)));
    sorted(in_folder(&state.join(IN_STATE)).into_iter().chain(common).collect())
}

/// Those of the state directory; where it knows of none, those that have left word elsewhere.
pub(crate) fn nearest(state: &Path, places: &[PathBuf]) -> Vec<Instance> {
    let own = running(state);
    if own.is_empty() { everywhere(state, places) } else { own }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dirs(base: &Path) -> Dirs {
        let runtime_base = base.join("run");
        Dirs {
            state: base.join("state"),
            runtime: PrivateDir::place(&runtime_base, 1),
            runtime_base,
            data: base.join("data"),
            cache: base.join("cache"),
            models: Vec::new(),
        }
    }

    fn instance(pid: u32, socket: &Path) -> Instance {
        Instance { pid, admin_socket: socket.to_string_lossy().into_owned(), ..Instance::default() }
    }

    #[test]
    fn a_claim_excludes_a_second_one_and_leaves_what_others_have_there() {
        let base = tempfile::tempdir().unwrap();
        let (dirs, machine) = (dirs(base.path()), Machine::read());
        fs::create_dir(&dirs.runtime_base).unwrap();
        fs::write(dirs.runtime_base.join("keep"), "mine").unwrap();
        let claim = Claim::take(&dirs, &machine).unwrap();
        let second = Claim::take(&dirs, &machine).unwrap_err();
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
        let error = Claim::take(&dirs, &Machine::read()).unwrap_err();
        assert_eq!(error.code(), 2);
        assert!(error.to_string().contains("did not make"), "{error}");
        assert!(trusted(base.path(), rustix::process::getuid().as_raw() + 1).is_err());
    }

    #[test]
    fn a_running_instance_is_found_though_its_socket_is_in_another_namespace() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join(IN_STATE);
        let away = instance(7, &base.path().join("not-here.sock"));
        let pointer = Pointer::put(&dir, &away).unwrap();
        // Another process that has the same number, in a container of its own.
        let same = instance(7, &base.path().join("or-this.sock"));
        let second = Pointer::put(&dir, &same).unwrap();
        assert_eq!(running(base.path()), [away, same.clone()]);
        drop(pointer);
        assert_eq!(running(base.path()), [same]);
        drop(second);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }

    #[test]
    fn dead_ones_are_forgotten_and_other_files_are_not() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join(IN_STATE);
        fs::create_dir(&dir).unwrap();
        let socket = base.path().join("a.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // As versions that locked nothing wrote them.
        for (pid, socket) in [(1, socket.clone()), (2, base.path().join("gone.sock"))] {
            fs::write(dir.join(format!("{pid}.json")), serde_json::to_vec(&instance(pid, &socket)).unwrap())
                .unwrap();
        }
        fs::write(dir.join("notes.json"), "mine").unwrap();
        assert_eq!(running(base.path()), [instance(1, &socket)]);
        assert!(!dir.join("2.json").exists() && dir.join("notes.json").exists());
        drop(listener);
        assert_eq!(running(base.path()), []);
    }

    #[test]
    fn where_the_state_directory_knows_of_none_the_common_places_are_asked() {
        let base = tempfile::tempdir().unwrap();
        let (state, place) = (base.path().join("state"), base.path().join("run"));
        let there = instance(3, &base.path().join("x.sock"));
        let _pointer = Pointer::put(&place.join(IN_COMMON), &there).unwrap();
        assert_eq!(nearest(&state, std::slice::from_ref(&place)), std::slice::from_ref(&there));
        let own = instance(4, &base.path().join("y.sock"));
        let _own = Pointer::put(&state.join(IN_STATE), &own).unwrap();
        assert_eq!(nearest(&state, std::slice::from_ref(&place)), std::slice::from_ref(&own));
        assert_eq!(everywhere(&state, &[place]), [there, own]);
    }
}
