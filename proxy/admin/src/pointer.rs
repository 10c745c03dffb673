//! Pointer files, which name the address and admin socket of a running instance. This module writes and
//! removes them, and decides which pointer files are trusted.
//!
//! The command line acts on the content of a pointer file: it restarts models of that instance, or has the
//! instance replaced by another program. So a pointer file is trusted only if the current user or root owns
//! the file, and if one of them owns its folder. Root also trusts the user to whom root gave the folder
//! (`/run/llama-warden` belongs to the service), and removes no file of that user.
//!
//! Folder and file are opened first and then checked by their descriptors, because another user may replace
//! the target of a path at any time.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, flock, openat, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use warden_supervisor::trusted_path;

use crate::status::InstanceInfo;

/// Largest pointer file in bytes: it has paths and an address of at most some thousand bytes each.
const MAX_POINTER_BYTES: u64 = 64 << 10;
const MAX_POINTERS: usize = 1000;
/// Most file names tried for one instance: processes in different namespaces may have the same PID.
const MAX_NAMES: u32 = 100;
const ROOT: u32 = 0;

/// A running instance that was found by its pointer file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocatedInstance {
    /// Facts that the instance wrote into the file.
    pub instance: InstanceInfo,
    /// User id of the owner of the file.
    pub owner: u32,
}

#[derive(Debug)]
pub(crate) struct PointerFolder {
    directory: File,
    own: u32,
    /// Another user whose pointer files are trusted here.
    given_to: Option<u32>,
    /// Unlocked pointer files may be removed.
    is_ours: bool,
}

impl PointerFolder {
    /// Opens a folder; `None` if an untrusted user owns it. Fails if the folder cannot be read; for root also
    /// if another user could replace the folder.
    pub(crate) fn open(path: &Path) -> io::Result<Option<Self>> {
        let own = geteuid().as_raw();
        let given_to = if own == ROOT { Some(trusted_path::path_owner(path)?) } else { None };
        let directory = trusted_path::open_dir(path)?;
        let owner = directory.metadata()?.uid();
        let folder = Self { directory, own, given_to, is_ours: owner == own };
        Ok(folder.trusts(owner).then_some(folder))
    }

    fn trusts(&self, user: u32) -> bool {
        user == self.own || user == ROOT || self.given_to == Some(user)
    }

    pub(crate) fn instances(&self) -> Vec<LocatedInstance> {
        let names = Dir::read_from(&self.directory).into_iter().flatten().flatten();
        let names = names.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
        let names = names.filter(|name| Path::new(name).extension().is_some_and(|end| end == "json"));
        names.take(MAX_POINTERS).filter_map(|name| self.read(&name)).collect()
    }

    /// Returns the running instance of one pointer file. Removes the pointer file of an ended instance.
    fn read(&self, name: &OsStr) -> Option<LocatedInstance> {
        // Do not follow a link, and do not block on a pipe.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = File::from(openat(&self.directory, name, flags, Mode::empty()).ok()?);
        let facts = file.metadata().ok()?;
        let owner = facts.uid();
        if !facts.is_file() || facts.len() > MAX_POINTER_BYTES || !self.trusts(owner) {
            return None;
        }
        let mut text = Vec::new();
        (&file).take(MAX_POINTER_BYTES + 1).read_to_end(&mut text).ok()?;
        let instance: InstanceInfo = serde_json::from_slice(&text).ok()?;
        if flock(&file, FlockOperation::NonBlockingLockShared).is_err() {
            return Some(LocatedInstance { instance, owner });
        }
        // No process locks the file. Older versions did not lock it, so a process that listens at the
        // socket also shows that the instance runs.
        match probe_listener(&instance.admin_socket) {
            SocketListener::User(user) => (user == owner).then_some(LocatedInstance { instance, owner }),
            SocketListener::Busy => Some(LocatedInstance { instance, owner }),
            SocketListener::Nobody => {
                if self.is_ours && owner == self.own {
                    remove_if_same(&self.directory, name, &file);
                }
                None
            }
            SocketListener::Unknown => None,
        }
    }
}

enum SocketListener {
    User(u32),
    /// A process listens, but its queue is full.
    Busy,
    /// No process listens on this socket, and none ever will.
    Nobody,
    /// Unknown because of an error that may be temporary.
    Unknown,
}

/// Connects without waiting, because connecting to a socket whose queue is full would block for ever.
fn probe_listener(path: &str) -> SocketListener {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else {
        return SocketListener::Unknown;
    };
    let Ok(address) = SocketAddrUnix::new(path) else { return SocketListener::Unknown };
    match connect(&socket, &address) {
        Ok(()) => socket_peercred(&socket)
            .map_or(SocketListener::Unknown, |peer| SocketListener::User(peer.uid.as_raw())),
        Err(Errno::AGAIN) => SocketListener::Busy,
        Err(Errno::CONNREFUSED | Errno::NOENT) => SocketListener::Nobody,
        Err(_) => SocketListener::Unknown,
    }
}

/// Removes a name from the directory, if it still refers to `file`.
fn remove_if_same(directory: &File, name: &OsStr, file: &File) {
    let there = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok();
    let is_same = |facts: fs::Metadata| {
        there.is_some_and(|there| (there.st_dev, there.st_ino) == (facts.dev(), facts.ino()))
    };
    if file.metadata().is_ok_and(is_same) {
        // A failure does not matter: the name was already removed.
        let _gone = unlinkat(directory, name, AtFlags::empty());
    }
}

/// The pointer file of this instance, locked while this value exists and removed on drop.
#[derive(Debug)]
pub(crate) struct InstancePointer {
    directory: File,
    name: OsString,
    file: File,
}

impl InstancePointer {
    pub(crate) fn write(folder: &Path, instance: &InstanceInfo) -> io::Result<Self> {
        let mut new = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
        flock(new.as_file(), FlockOperation::NonBlockingLockExclusive)?;
        new.write_all(&serde_json::to_vec(instance)?)?;
        let directory = trusted_path::open_dir(folder)?;
        let known = PointerFolder::open(folder).ok().flatten();
        for number in 1..=MAX_NAMES {
            let more = if number == 1 { String::new() } else { format!("-{number}") };
            let name = OsString::from(format!("{}{more}.json", instance.pid));
            // Remove the pointer file of a killed process that had the same PID.
            drop(known.as_ref().and_then(|known| known.read(&name)));
            match new.persist_noclobber(folder.join(&name)) {
                Ok(file) => return Ok(Self { directory, name, file }),
                Err(taken) if taken.error.kind() == io::ErrorKind::AlreadyExists => new = taken.file,
                Err(failed) => return Err(failed.error),
            }
        }
        Err(io::Error::other("there are too many files with llama-warden's name"))
    }
}

impl Drop for InstancePointer {
    fn drop(&mut self) {
        remove_if_same(&self.directory, &self.name, &self.file);
    }
}

pub(crate) fn instances_in_folder(path: &Path) -> Vec<LocatedInstance> {
    match PointerFolder::open(path) {
        Ok(Some(folder)) => folder.instances(),
        Ok(None) => Vec::new(),
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::debug!(folder = %path.display(), %error, "that directory is not searched for instances");
            }
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    const MALLORY: u32 = 61_002;

    fn pointer(socket: &Path) -> Vec<u8> {
        let admin_socket = socket.to_string_lossy().into_owned();
        serde_json::to_vec(&InstanceInfo { pid: 7, admin_socket, ..InstanceInfo::default() }).unwrap()
    }

    #[test]
    fn nothing_but_a_small_regular_file_is_read_and_nothing_is_waited_for() {
        let base = tempfile::tempdir().unwrap();
        let (folder, socket) = (base.path().join("f"), base.path().join("s"));
        fs::create_dir(&folder).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        fs::write(base.path().join("outside.json"), pointer(&socket)).unwrap();
        symlink(base.path().join("outside.json"), folder.join("link.json")).unwrap();
        symlink("/dev/zero", folder.join("zero.json")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            folder.join("pipe.json"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR,
            0,
        )
        .unwrap();
        let sparse = File::create(folder.join("huge.json")).unwrap();
        sparse.set_len(6 << 30).unwrap();
        let mut long = pointer(&socket);
        long.resize(usize::try_from(MAX_POINTER_BYTES).unwrap() + 1, b' ');
        fs::write(folder.join("long.json"), long).unwrap();
        assert_eq!(instances_in_folder(&folder), []);
        fs::write(folder.join("good.json"), pointer(&socket)).unwrap();
        assert_eq!(instances_in_folder(&folder).len(), 1);
        let linked = base.path().join("linked");
        symlink(&folder, &linked).unwrap();
        assert_eq!(instances_in_folder(&linked), [], "the folder itself is no link");
    }

    #[test]
    fn a_socket_whose_queue_is_full_is_not_waited_for() {
        let base = tempfile::tempdir().unwrap();
        let socket = base.path().join("s");
        let address = SocketAddrUnix::new(&socket).unwrap();
        let open =
            || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        let full = open();
        rustix::net::bind(&full, &address).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let mut waiting = Vec::new();
        loop {
            let one = open();
            if connect(&one, &address).is_err() {
                break;
            }
            waiting.push(one);
        }
        fs::write(base.path().join("7.json"), pointer(&socket)).unwrap();
        assert_eq!(instances_in_folder(base.path()).len(), 1);
    }

    #[test]
    fn another_users_pointers_and_folders_are_not_believed() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root can make files of another user");
            return;
        }
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let (folder, socket) = (base.path().join("f"), base.path().join("s"));
        fs::create_dir(&folder).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        let file = folder.join("7.json");
        fs::write(&file, pointer(&socket)).unwrap();
        assert_eq!(instances_in_folder(&folder).len(), 1);
        std::os::unix::fs::chown(&file, Some(MALLORY), None).unwrap();
        assert_eq!(instances_in_folder(&folder), [], "her file in our folder");
        std::os::unix::fs::chown(&folder, Some(MALLORY), None).unwrap();
        std::os::unix::fs::chown(&file, Some(0), None).unwrap();
        assert_eq!(
            instances_in_folder(&folder),
            [],
            "our file in her folder, which she has made in a public place"
        );
        // Now only root can change the parent, so root must have given this folder to the other user. That
        // user's pointer files are trusted in it, for the user's own instance.
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::chown(&file, Some(MALLORY), None).unwrap();
        assert_eq!(instances_in_folder(&folder), [], "root answers on that socket, not she");
        fs::write(&file, pointer(&base.path().join("gone"))).unwrap();
        assert_eq!(instances_in_folder(&folder), []);
        assert!(file.exists(), "root removes nothing of hers");
    }
}
