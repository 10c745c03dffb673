//! A directory for sockets that a process creates in an existing directory, and removes again.
//!
//! ```text
//!     <base>/                  another owner's: created if missing, never changed, never removed
//!       llama-warden-<pid>/    ours: mode 0700
//!         lock                 our mark, locked while we live, across process namespaces
//!         admin.sock, *.sock, *.report, *.reclaim
//!         *.slots/             slots of a process while it is replaced
//! ```
//!
//! The removal deletes only files with our names and types, and then the directory if it is empty. It never
//! recurses.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, FileType};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::process::directories::maker_pid;
use crate::process::slot_files;
use crate::process::trusted_path;

const DIR_PREFIX: &str = "llama-warden-";
const LOCK_FILE: &str = "lock";
const LOCK_CONTENTS: &[u8] = b"llama-warden\n";
/// Default name of the operator's socket.
pub const ADMIN_SOCKET: &str = "admin.sock";
const NEW_MARK_PREFIX: &str = ".lock-";
/// Limit of attempts while other processes create or sweep the same directory.
const MAKE_ATTEMPTS: usize = 10;

/// A locked private directory. Dropping this value removes our files.
#[derive(Debug)]
pub struct PrivateDir {
    path: PathBuf,
    lock: File,
    /// True if another process of the same instance owns the directory.
    is_others: bool,
}

impl PrivateDir {
    /// Path of the directory of process `pid`.
    pub fn path_for(base: &Path, pid: u32) -> PathBuf {
        base.join(format!("{DIR_PREFIX}{pid}"))
    }

    /// Creates and locks the directory, with missing parents; `None` if another process holds the lock.
    ///
    /// # Errors
    /// The directory cannot be created, belongs to another user, is no directory, or has files but no lock
    /// file; or another user can exchange it or a directory above it.
    pub fn make(path: &Path) -> io::Result<Option<Self>> {
        if let Some(base) = path.parent() {
            trusted_path::make_dir(base)?;
        }
        for _ in 0..MAKE_ATTEMPTS {
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => is_ours(path)?,
                made => made?,
            }
            let lock = match mark_state(path) {
                MarkState::Held => return Ok(None),
                MarkState::Ours(lock) => lock,
                MarkState::Foreign => return Err(io::Error::other("its file `lock` is not llama-warden's")),
                MarkState::Nothing => match create_mark(path) {
                    Ok(lock) => lock,
                    // Another process has just created or swept the directory: try again.
                    Err(error)
                        if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) =>
                    {
                        continue;
                    }
                    Err(error) => return Err(error),
                },
            };
            if is_at(&lock, &path.join(LOCK_FILE)) {
                // Before it was locked, the directory may have belonged to another user.
                trusted_path::make_private_dir(path)?;
                return Ok(Some(Self { path: path.to_owned(), lock, is_others: false }));
            }
        }
        Err(io::Error::other("other programs make and remove it all the time"))
    }

    /// Takes over the directory and the lock of the previous instance, which owns the directory until
    /// [`Self::set_others`].
    pub fn inherit(path: &Path, lock: OwnedFd) -> Self {
        Self { path: path.to_owned(), lock: File::from(lock), is_others: true }
    }

    /// Duplicates the lock for the next instance.
    ///
    /// # Errors
    /// Too many files are open.
    pub fn duplicate_lock(&self) -> io::Result<OwnedFd> {
        self.lock.as_fd().try_clone_to_owned()
    }

    /// Sets whether another instance owns the directory and removes it.
    pub fn set_others(&mut self, is_others: bool) {
        self.is_others = is_others;
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes directories of killed processes: with our name and an unlocked lock file. Does nothing if
    /// another user could exchange a directory.
    pub fn sweep(base: &Path) {
        let own = rustix::process::geteuid().as_raw();
        if !trusted_path::path_owner(base).is_ok_and(|owner| owner == own || owner == 0) {
            return;
        }
        for entry in fs::read_dir(base).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.strip_prefix(DIR_PREFIX));
            let named = pid.is_some_and(|pid| pid.parse::<u32>().is_ok());
            if named
                && is_ours(&entry.path()).is_ok()
                && let MarkState::Ours(lock) = mark_state(&entry.path())
            {
                clear_directory(&entry.path(), &lock);
            }
        }
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        if self.is_others {
            return;
        }
        clear_directory(&self.path, &self.lock);
    }
}

enum MarkState {
    Nothing,
    /// The lock file was abandoned, and this process has locked it.
    Ours(File),
    Held,
    Foreign,
}

fn mark_state(path: &Path) -> MarkState {
    let lock = path.join(LOCK_FILE);
    let Ok(facts) = fs::symlink_metadata(&lock) else { return MarkState::Nothing };
    if !facts.is_file() {
        return MarkState::Foreign;
    }
    let Ok(mut file) = File::options().read(true).write(true).open(&lock) else { return MarkState::Foreign };
    let mut text = Vec::new();
    let read = (&mut file).take(LOCK_CONTENTS.len() as u64 + 1).read_to_end(&mut text);
    if read.is_err() || text != LOCK_CONTENTS {
        return MarkState::Foreign;
    }
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => MarkState::Ours(file),
        Err(_) => MarkState::Held,
    }
}

/// Locks the file before it gets its final name.
fn create_mark(path: &Path) -> io::Result<File> {
    let mut new = tempfile::Builder::new().prefix(NEW_MARK_PREFIX).tempfile_in(path)?;
    rustix::fs::flock(new.as_file(), FlockOperation::NonBlockingLockExclusive)?;
    new.write_all(LOCK_CONTENTS)?;
    new.persist_noclobber(path.join(LOCK_FILE)).map_err(|error| error.error)
}

/// True if the open file is still at this path.
pub fn is_at(file: &File, path: &Path) -> bool {
    let facts = file.metadata().ok().zip(fs::symlink_metadata(path).ok());
    facts.is_some_and(|(one, other)| (one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// True if our user owns a directory and no other user can enter it. Another user may have created it again
/// after a cleaner of `/tmp` removed it.
pub fn is_private(directory: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let is_ours = |facts: fs::Metadata| facts.is_dir() && facts.uid() == own && facts.mode() & 0o777 == 0o700;
    fs::symlink_metadata(directory).is_ok_and(is_ours)
        && trusted_path::path_owner(directory).is_ok_and(|owner| owner == own)
}

/// True if requests may be sent to a process of the user `peer` behind this socket: our own user, or any user
/// if the socket's directory is private. Container processes appear under other users.
pub fn may_answer(socket: &Path, peer: Option<u32>) -> bool {
    peer == Some(rustix::process::geteuid().as_raw()) || socket.parent().is_some_and(is_private)
}

/// Checks that a directory (no link) is our user's, and is empty or has our lock file.
fn is_ours(path: &Path) -> io::Result<()> {
    let facts = fs::symlink_metadata(path)?;
    if !facts.is_dir() {
        return Err(io::Error::other("it exists and is no directory"));
    }
    if facts.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it exists and belongs to another user"));
    }
    let marked = fs::symlink_metadata(path.join(LOCK_FILE)).is_ok();
    if !marked {
        let strange = |entry: &fs::DirEntry| {
            !entry.file_name().as_encoded_bytes().starts_with(NEW_MARK_PREFIX.as_bytes())
        };
        if fs::read_dir(path)?.flatten().any(|entry| strange(&entry)) {
            return Err(io::Error::other("it exists and has files that llama-warden did not make"));
        }
    }
    Ok(())
}

/// Removes our files while the lock is held; the lock file comes last.
fn clear_directory(path: &Path, lock: &File) {
    // Without a lock file, the next start has created the directory again.
    let marked = fs::symlink_metadata(path.join(LOCK_FILE)).is_ok();
    if marked && !is_at(lock, &path.join(LOCK_FILE)) {
        return;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if is_made_by_us(&entry.file_name(), kind) {
            drop(fs::remove_file(entry.path()));
        } else if kind.is_dir() && entry.file_name().to_str().is_some_and(|name| maker_pid(name).is_some()) {
            slot_files::remove(&entry.path());
        }
    }
    if marked {
        drop(fs::remove_file(path.join(LOCK_FILE)));
    }
    // The removal fails if files of others are left.
    drop(fs::remove_dir(path));
}

fn is_made_by_us(name: &OsStr, kind: FileType) -> bool {
    let Some(name) = name.to_str() else { return false };
    let of_a_server = maker_pid(name).is_some() && (kind.is_socket() || kind.is_file());
    let ours = name.starts_with(NEW_MARK_PREFIX) || name.starts_with(".probe-");
    of_a_server || (name == ADMIN_SOCKET && kind.is_socket()) || (ours && kind.is_file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn base() -> (tempfile::TempDir, PathBuf) {
        let base = tempfile::tempdir().unwrap();
        let place = PrivateDir::path_for(&base.path().join("run"), 7);
        (base, place)
    }

    #[test]
    fn it_is_private_excludes_a_second_one_and_leaves_nothing_of_ours_behind() {
        let (base, place) = base();
        let made = PrivateDir::make(&place).unwrap().unwrap();
        assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(PrivateDir::make(&place).unwrap().is_none());
        drop(UnixListener::bind(place.join(ADMIN_SOCKET)).unwrap());
        fs::write(place.join("m-7-g1.report"), "").unwrap();
        fs::write(place.join("m-7-g1.reclaim"), "").unwrap();
        fs::create_dir(place.join("m-7-g1.slots")).unwrap();
        fs::write(place.join("m-7-g1.slots/llama-warden-7-g1-0.slot"), "").unwrap();
        drop(made);
        assert!(!place.exists());
        assert!(base.path().join("run").exists());
    }

    #[test]
    fn what_others_put_there_stays() {
        let (_base, place) = base();
        let made = PrivateDir::make(&place).unwrap().unwrap();
        fs::create_dir(place.join("theirs")).unwrap();
        fs::write(place.join("theirs/keep"), "x").unwrap();
        fs::write(place.join(ADMIN_SOCKET), "a file under our name").unwrap();
        drop(made);
        assert!(place.join("theirs/keep").exists() && place.join(ADMIN_SOCKET).exists());
        assert!(!place.join(LOCK_FILE).exists());
        let refused = PrivateDir::make(&place).unwrap_err();
        assert!(refused.to_string().contains("did not make"), "{refused}");
    }

    #[test]
    fn directories_and_links_of_others_are_not_taken() {
        let (base, place) = base();
        let theirs = base.path().join("theirs");
        fs::create_dir_all(&theirs).unwrap();
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&theirs, &place).unwrap();
        assert!(PrivateDir::make(&place).unwrap_err().to_string().contains("no directory"));
        fs::remove_file(&place).unwrap();
        fs::create_dir(&place).unwrap();
        fs::write(place.join(LOCK_FILE), "a key").unwrap();
        assert!(PrivateDir::make(&place).unwrap_err().to_string().contains("not llama-warden's"));
        PrivateDir::sweep(place.parent().unwrap());
        assert_eq!(fs::read_to_string(place.join(LOCK_FILE)).unwrap(), "a key");
    }

    #[test]
    fn what_a_killed_one_left_is_swept_and_what_a_living_one_holds_is_not() {
        let base = tempfile::tempdir().unwrap();
        let at = |pid| PrivateDir::path_for(base.path(), pid);
        let living = PrivateDir::make(&at(8)).unwrap().unwrap();
        // As after a kill: only the lock is released.
        let kill = |mut one: PrivateDir| {
            one.lock = File::open(base.path()).unwrap();
        };
        kill(PrivateDir::make(&at(7)).unwrap().unwrap());
        fs::create_dir(base.path().join("llama-warden-9")).unwrap();
        assert!(at(7).join(LOCK_FILE).exists());
        PrivateDir::sweep(base.path());
        assert!(!at(7).exists() && at(8).exists() && at(9).exists());
        // An abandoned directory is taken over.
        kill(PrivateDir::make(&at(7)).unwrap().unwrap());
        assert!(PrivateDir::make(&at(7)).unwrap().is_some());
        drop(living);
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a test: a thread of its own takes another user's identity"
    )]
    /// Runs a function on a thread of another user; `None` if we are not root and cannot become another
    /// user.
    fn as_user<'scope, T: Send + 'scope>(
        scope: &'scope std::thread::Scope<'scope, '_>,
        user: u32,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> Option<std::thread::ScopedJoinHandle<'scope, T>> {
        use rustix::process::{Gid, Uid, geteuid};
        use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
        geteuid().is_root().then(|| {
            scope.spawn(move || {
                let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
                set_thread_groups(&[]).unwrap();
                set_thread_res_gid(gid, gid, gid).unwrap();
                set_thread_res_uid(uid, uid, uid).unwrap();
                work()
            })
        })
    }

    #[test]
    fn another_user_who_makes_the_base_first_never_gets_a_directory_of_ours() {
        use std::sync::atomic::{AtomicBool, Ordering};
        const ALICE: u32 = 61_001;
        const MALLORY: u32 = 61_002;
        let public = tempfile::tempdir().unwrap();
        fs::set_permissions(public.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let base = public.path().join("run");
        let (ended, caught) = (AtomicBool::new(false), AtomicBool::new(false));
        let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(30);
        std::thread::scope(|scope| {
            let mallory = as_user(scope, MALLORY, || {
                while !ended.load(Ordering::Relaxed) {
                    if DirBuilder::new().create(&base).is_ok() {
                        drop(fs::set_permissions(&base, fs::Permissions::from_mode(0o777)));
                        std::thread::yield_now();
                    }
                    let is_hers = || fs::symlink_metadata(&base).is_ok_and(|facts| facts.uid() == MALLORY);
                    let is_filled = || fs::read_dir(&base).is_ok_and(|mut all| all.next().is_some());
                    if fs::remove_dir(&base).is_err() && is_hers() && is_filled() {
                        caught.store(true, Ordering::Relaxed);
                    }
                }
            });
            let alice = as_user(scope, ALICE, || {
                let (mut made, mut refused) = (0, 0);
                while (made < 100 || refused < 100)
                    && !caught.load(Ordering::Relaxed)
                    && tokio::time::Instant::now() < deadline
                {
                    match PrivateDir::make(&PrivateDir::path_for(&base, 7)) {
                        Ok(one) => {
                            drop(one);
                            drop(fs::remove_dir(&base));
                            made += 1;
                        }
                        Err(_) => refused += 1,
                    }
                }
                ended.store(true, Ordering::Relaxed);
                (made, refused)
            });
            let (Some(_mallory), Some(alice)) = (mallory, alice) else {
                eprintln!("skipped: only root can run as two users");
                return;
            };
            let (made, refused) = alice.join().unwrap();
            assert!(!caught.load(Ordering::Relaxed), "after {made} made and {refused} refused");
            assert!(made > 0 && refused > 0, "{made} made, {refused} refused");
        });
    }
}
