//! A directory for sockets that one process makes inside a directory of somebody's, and takes away again.
//!
//! ```text
//!   <base>/                        somebody's: made if it is missing, never changed, never removed
//!     llama-warden-<pid>/          ours: mode 0700
//!       lock                       our mark, locked as long as we live, in whatever process namespace
//!       admin.sock, *.sock, *.report, *.reclaim
//!       *.slots/                 slots of a process, while it is replaced
//! ```
//!
//! Removal is file by file, of names and kinds that only we make, and then of the directory if nothing is left in it.
//! Nothing here ever recurses. What somebody else has put there stays, and with it the directory.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, FileType};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::process::slot_files;
use crate::process::socket_name::maker;
use crate::process::trusted_path;

/// Begins the names of such directories.
const PREFIX: &str = "llama-warden-";
/// The name of the file that is locked.
const LOCK: &str = "lock";
/// What is in that file.
const MARK: &[u8] = b"llama-warden\n";
/// The operator's socket, where no other place is configured for it.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// Begins the name of a mark that is not in its place yet.
const NEW_MARK: &str = ".lock-";
/// Others that make or sweep the same directory at the same moment make us try again; more in a row are no accident.
const ATTEMPTS: usize = 10;

/// Such a directory, ours as long as this lives. Dropping it removes what we made.
#[derive(Debug)]
pub struct PrivateDir {
    path: PathBuf,
    lock: File,
    /// Another process of the same instance has it.
    is_others: bool,
}

impl PrivateDir {
    /// Where the process `pid` has its directory in `base`.
    pub fn place(base: &Path, pid: u32) -> PathBuf {
        base.join(format!("{PREFIX}{pid}"))
    }

    /// Makes it and takes it; `None` while another process has it. Directories above it are made if need be, and stay.
    ///
    /// # Errors
    /// It cannot be made, belongs to another user, is no directory, or has files and no mark of ours; or another user can exchange
    /// it or a directory above it.
    pub fn make(path: &Path) -> io::Result<Option<Self>> {
        if let Some(base) = path.parent() {
            trusted_path::make_dir(base)?;
        }
        for _ in 0..ATTEMPTS {
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => is_ours(path)?,
                made => made?,
            }
            let lock = match left(path) {
                Left::Held => return Ok(None),
                Left::Ours(lock) => lock,
                Left::Foreign => return Err(io::Error::other("its file `lock` is not llama-warden's")),
                Left::Nothing => match mark(path) {
                    Ok(lock) => lock,
                    // Somebody was quicker, or swept it in this moment.
                    Err(error)
                        if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) =>
                    {
                        continue;
                    }
                    Err(error) => return Err(error),
                },
            };
            if is_at(&lock, &path.join(LOCK)) {
                // Only now: before, it may have been another's.
                trusted_path::make_private_dir(path)?;
                return Ok(Some(Self { path: path.to_owned(), lock, is_others: false }));
            }
        }
        Err(io::Error::other("others make and remove it all the time"))
    }

    /// Goes on with the one of the program before us, whose lock this is. It stays that one's until [`Self::own`].
    pub fn inherit(path: &Path, lock: OwnedFd) -> Self {
        Self { path: path.to_owned(), lock: File::from(lock), is_others: true }
    }

    /// A copy of its lock, for the program after us.
    ///
    /// # Errors
    /// There are too many open files.
    pub fn lock(&self) -> io::Result<OwnedFd> {
        self.lock.as_fd().try_clone_to_owned()
    }

    /// It is ours to take away.
    pub fn own(&mut self) {
        self.is_others = false;
    }

    /// It is the program's after us, and stays.
    pub fn leave(&mut self) {
        self.is_others = true;
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes what killed processes left in `base`: directories of our naming, with our mark, that nobody holds. Nothing is removed
    /// where another user could exchange the directory for another one meanwhile.
    pub fn sweep(base: &Path) {
        let own = rustix::process::geteuid().as_raw();
        if !trusted_path::owner(base).is_ok_and(|owner| owner == own || owner == 0) {
            return;
        }
        for entry in fs::read_dir(base).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            let named = pid.is_some_and(|pid| pid.parse::<u32>().is_ok());
            if named
                && is_ours(&entry.path()).is_ok()
                && let Left::Ours(lock) = left(&entry.path())
            {
                clear(&entry.path(), &lock);
            }
        }
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        if self.is_others {
            return;
        }
        clear(&self.path, &self.lock);
    }
}

/// What lies in the place of a mark.
enum Left {
    Nothing,
    /// Ours, and now locked by us.
    Ours(File),
    Held,
    Foreign,
}

fn left(path: &Path) -> Left {
    let lock = path.join(LOCK);
    let Ok(facts) = fs::symlink_metadata(&lock) else { return Left::Nothing };
    if !facts.is_file() {
        return Left::Foreign;
    }
    let Ok(mut file) = File::options().read(true).write(true).open(&lock) else { return Left::Foreign };
    let mut text = Vec::new();
    let read = (&mut file).take(MARK.len() as u64 + 1).read_to_end(&mut text);
    if read.is_err() || text != MARK {
        return Left::Foreign;
    }
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Left::Ours(file),
        Err(_) => Left::Held,
    }
}

/// Puts the mark there, locked from the first moment that anybody can see it.
fn mark(path: &Path) -> io::Result<File> {
    let mut new = tempfile::Builder::new().prefix(NEW_MARK).tempfile_in(path)?;
    rustix::fs::flock(new.as_file(), FlockOperation::NonBlockingLockExclusive)?;
    new.write_all(MARK)?;
    new.persist_noclobber(path.join(LOCK)).map_err(|error| error.error)
}

/// Whether a path still leads to an open file: it may have been removed, and another put in its place.
pub fn is_at(file: &File, path: &Path) -> bool {
    let facts = file.metadata().ok().zip(fs::symlink_metadata(path).ok());
    facts.is_some_and(|(one, other)| (one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Whether a directory for sockets is ours, and no other user can enter it or put another one in its place. It was so when it was made;
/// where its base is removed meanwhile (cleaners of `/tmp`), another user may make both again.
pub fn is_private(directory: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let is_ours = |facts: fs::Metadata| facts.is_dir() && facts.uid() == own && facts.mode() & 0o777 == 0o700;
    fs::symlink_metadata(directory).is_ok_and(is_ours)
        && trusted_path::owner(directory).is_ok_and(|owner| owner == own)
}

/// Whether the user `peer`, who answers on this socket, may get what is meant for a process of ours: our user, or whoever runs it for us
/// (a container has users of its own) in a directory that nobody else can enter.
pub fn may_answer(socket: &Path, peer: Option<u32>) -> bool {
    peer == Some(rustix::process::geteuid().as_raw()) || socket.parent().is_some_and(is_private)
}

/// A real directory of ours that is empty or has a mark.
fn is_ours(path: &Path) -> io::Result<()> {
    let facts = fs::symlink_metadata(path)?;
    if !facts.is_dir() {
        return Err(io::Error::other("it exists and is no directory"));
    }
    if facts.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it exists and belongs to somebody else"));
    }
    let marked = fs::symlink_metadata(path.join(LOCK)).is_ok();
    if !marked {
        let strange =
            |entry: &fs::DirEntry| !entry.file_name().as_encoded_bytes().starts_with(NEW_MARK.as_bytes());
        if fs::read_dir(path)?.flatten().any(|entry| strange(&entry)) {
            return Err(io::Error::other("it exists and has files that llama-warden did not make"));
        }
    }
    Ok(())
}

/// Removes what we made in a directory whose mark we hold, the mark last.
fn clear(path: &Path, lock: &File) {
    // Where the directory was removed under us and made again (by our own next start), there is no mark at all.
    let marked = fs::symlink_metadata(path.join(LOCK)).is_ok();
    if marked && !is_at(lock, &path.join(LOCK)) {
        return;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if is_made_by_us(&entry.file_name(), kind) {
            drop(fs::remove_file(entry.path()));
        } else if kind.is_dir() && entry.file_name().to_str().is_some_and(|name| maker(name).is_some()) {
            slot_files::remove(&entry.path());
        }
    }
    if marked {
        drop(fs::remove_file(path.join(LOCK)));
    }
    // Only if nothing else is in it.
    drop(fs::remove_dir(path));
}

fn is_made_by_us(name: &OsStr, kind: FileType) -> bool {
    let Some(name) = name.to_str() else { return false };
    let of_a_server = maker(name).is_some() && (kind.is_socket() || kind.is_file());
    let ours = name.starts_with(NEW_MARK) || name.starts_with(".probe-");
    of_a_server || (name == ADMIN_SOCKET && kind.is_socket()) || (ours && kind.is_file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn base() -> (tempfile::TempDir, PathBuf) {
        let base = tempfile::tempdir().unwrap();
        let place = PrivateDir::place(&base.path().join("run"), 7);
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
        assert!(!place.join(LOCK).exists());
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
        fs::write(place.join(LOCK), "a key").unwrap();
        assert!(PrivateDir::make(&place).unwrap_err().to_string().contains("not llama-warden's"));
        PrivateDir::sweep(place.parent().unwrap());
        assert_eq!(fs::read_to_string(place.join(LOCK)).unwrap(), "a key");
    }

    #[test]
    fn what_a_killed_one_left_is_swept_and_what_a_living_one_holds_is_not() {
        let base = tempfile::tempdir().unwrap();
        let at = |pid| PrivateDir::place(base.path(), pid);
        let living = PrivateDir::make(&at(8)).unwrap().unwrap();
        // As a kill leaves it: the lock is let go, nothing else is done.
        let kill = |mut one: PrivateDir| {
            one.lock = File::open(base.path()).unwrap();
        };
        kill(PrivateDir::make(&at(7)).unwrap().unwrap());
        fs::create_dir(base.path().join("llama-warden-9")).unwrap();
        assert!(at(7).join(LOCK).exists());
        PrivateDir::sweep(base.path());
        assert!(!at(7).exists() && at(8).exists() && at(9).exists());
        // One that is left is taken over, too.
        kill(PrivateDir::make(&at(7)).unwrap().unwrap());
        assert!(PrivateDir::make(&at(7)).unwrap().is_some());
        drop(living);
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a test: a thread of its own takes another user's identity"
    )]
    /// Runs a function on a thread of another user; `None` where we are not root and cannot become one.
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
                    match PrivateDir::make(&PrivateDir::place(&base, 7)) {
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
