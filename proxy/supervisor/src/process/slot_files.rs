//! Where a process saves slots: a directory of its own beside its socket, of mode 0700, whose files of mode 0600 exist for as long as a
//! replacement takes, or a model that is unloaded is waited for. Files have conversations in them, so they go in every way in which a process can end: with the last handle,
//! with the private directory, and with the next start where we were killed.
//!
//! A `--slot-save-path` of the model's own comes first. That directory is its owner's, and others may use it at the same time: on this
//! machine, in another container, over the network, where process ids say nothing. So our files have a name in them that is drawn for
//! each process, and a mark with that name is locked for as long as they may be needed. Whose mark nobody holds, his files are left over.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};

use crate::process::private_dir::is_at;
use crate::process::{directories, hints};
use crate::spec::Command;
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_detached};

/// llama-server's flag for it.
pub(crate) const FLAG: &str = "--slot-save-path";
/// Begins the name of each of our files.
const PREFIX: &str = "llama-warden-";
/// Ends it, and the name of the directory.
const FILE: &str = ".slot";
const DIRECTORY: &str = "slots";
/// Ends the name of a mark.
const MARK: &str = ".mark";

/// Such a directory. Dropping it removes what is ours, beside the caller where that can be had: large files take their time to go.
#[derive(Debug)]
pub(crate) struct SlotFiles {
    place: Option<Place>,
}

#[derive(Debug)]
struct Place {
    path: PathBuf,
    /// It is ours, with all that is in it.
    own: bool,
    /// In the names of our files.
    token: String,
    /// Tells others that our files are in use; in a directory of our own nobody else looks.
    mark: Mutex<Option<File>>,
    /// Somebody else has it from now on.
    left: AtomicBool,
}

/// The directory of the generation that listens on this socket: equally unique.
pub(crate) fn beside(socket: &Path) -> PathBuf {
    socket.with_extension(DIRECTORY)
}

impl SlotFiles {
    /// Of a process of this command.
    pub(crate) fn of(command: &Command, socket: &Path) -> Self {
        let (path, own) = match given(command) {
            Some(path) => {
                let directory = command.directory.as_deref().unwrap_or_else(|| Path::new(""));
                (directory.join(path), false)
            }
            None => (beside(socket), true),
        };
        let token = format!("{:016x}", rand::random::<u64>());
        Self { place: Some(Place { path, own, token, mark: Mutex::default(), left: AtomicBool::new(false) }) }
    }

    /// Whether somebody else has the directory, for the same process: then nothing of it is removed.
    pub(crate) fn set_others(&self, is_others: bool) {
        if let Some(place) = &self.place {
            place.left.store(is_others, Ordering::Relaxed);
        }
    }

    /// There is one until it is dropped.
    fn path(&self) -> &Path {
        self.place.as_ref().map_or(Path::new(""), |place| &place.path)
    }

    /// Tells a process of it, unless its own command does, and makes it. Whether it was told by us.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn announce(&self, command: &mut Command) -> io::Result<bool> {
        let Some(Place { path, own, token, mark, .. }) = &self.place else { return Ok(false) };
        if !own {
            sweep(path);
            *mark.lock().unwrap_or_else(PoisonError::into_inner) = Some(hang_out(path, token)?);
            return Ok(false);
        }
        let create = || DirBuilder::new().mode(0o700).create(path);
        match create() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                directories::restore(path).map_err(io::Error::other)?;
                create()?;
            }
            // Left by a supervisor with our process id that could not clean up.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_ours(path) => clear(path),
            made => made?,
        }
        command.args.extend([FLAG.to_owned(), path.to_string_lossy().into_owned()]);
        Ok(true)
    }

    /// The name of a file.
    pub(crate) fn name(&self, number: usize) -> String {
        let token = self.place.as_ref().map_or("", |place| &place.token);
        format!("{PREFIX}{token}-{number}{FILE}")
    }

    /// Makes an empty file for a process to write: its own would have the mode that its umask leaves.
    ///
    /// # Errors
    /// It exists, or cannot be made.
    pub(crate) fn make(&self, name: &str) -> io::Result<()> {
        File::options().write(true).create_new(true).mode(0o600).open(self.path().join(name)).map(drop)
    }

    /// Bytes of a file, which nobody else can read from now on.
    ///
    /// # Errors
    /// It is no file, or is gone.
    pub(crate) fn seal(&self, name: &str) -> io::Result<u64> {
        let path = self.path().join(name);
        let facts = fs::symlink_metadata(&path)?;
        if !facts.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        if facts.permissions().mode() & 0o077 != 0 {
            // One that was written anew in the place of ours.
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        }
        Ok(facts.len())
    }

    /// Takes a file from another one's directory into this one.
    ///
    /// # Errors
    /// They are on different disks, or it is gone.
    pub(crate) fn adopt(&self, other: &Self, name: &str) -> io::Result<()> {
        let (from, to) = (other.path(), self.path());
        if from == to { Ok(()) } else { fs::rename(from.join(name), to.join(name)) }
    }

    /// Removes a file, and what a build may have put beside it.
    pub(crate) fn remove(&self, name: &str) {
        remove_those(self.path(), |found| found.starts_with(name));
    }

    /// Bytes that can be written there: on a disk what is free, in memory no more than is available.
    pub(crate) fn free(&self, available: Option<u64>) -> Option<u64> {
        let disk = rustix::fs::statfs(self.path()).ok()?;
        let bytes = disk.f_bavail.saturating_mul(u64::try_from(disk.f_bsize).ok()?);
        Some(if is_in_memory(&disk) { bytes.min(available?) } else { bytes })
    }

    /// Whether the files take memory and no disk.
    pub(crate) fn are_in_memory(&self) -> bool {
        rustix::fs::statfs(self.path()).is_ok_and(|disk| is_in_memory(&disk))
    }
}

fn is_in_memory(disk: &rustix::fs::StatFs) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    [TMPFS, RAMFS].contains(&disk.f_type)
}

impl Drop for SlotFiles {
    fn drop(&mut self) {
        let place = self.place.take();
        if tokio::runtime::Handle::try_current().is_err() {
            return drop(place);
        }
        let kept = Arc::new(Mutex::new(place));
        let given = Arc::clone(&kept);
        if let Err(error) = run_detached(WorkKind::ModelFiles, move || drop(lock(&given).take())) {
            // Their disk hangs, most likely, and no task waits for a disk. Left-over files are removed by the next
            // start.
            if let Some(place) = &*lock(&kept) {
                place.left.store(true, Ordering::Relaxed);
            }
            tracing::warn!(%error, "saved slots are not removed before the next start");
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Self { path, own, token, mark, left } = self;
        if left.load(Ordering::Relaxed) {
            return;
        }
        if *own {
            return remove(path);
        }
        let mark = mark.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        clear_of(path, token);
        if mark.is_some() {
            drop(fs::remove_file(mark_of(path, token)));
        }
    }
}

/// The directory that the command names itself.
fn given(command: &Command) -> Option<&str> {
    hints::values(command, &[FLAG]).last()
}

/// Whether the command names a directory of its own.
pub(crate) fn is_given(command: &Command) -> bool {
    given(command).is_some()
}

/// Removes a directory that we made, with the files in it. Never recurses: what else is in it stays, and with it the directory.
pub(crate) fn remove(directory: &Path) {
    if is_ours(directory) {
        clear(directory);
        drop(fs::remove_dir(directory));
    }
}

/// A real directory of our account.
fn is_ours(path: &Path) -> bool {
    let facts = fs::symlink_metadata(path);
    facts.is_ok_and(|facts| facts.is_dir() && facts.uid() == rustix::process::geteuid().as_raw())
}

fn clear(directory: &Path) {
    remove_those(directory, |name| name.starts_with(PREFIX));
}

/// The files that were made under this name, and what builds put beside them.
fn clear_of(directory: &Path, token: &str) {
    remove_those(directory, |name| maker(name) == Some(token));
}

fn remove_those(directory: &Path, is_one: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(&is_one) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

fn mark_of(directory: &Path, token: &str) -> PathBuf {
    directory.join(format!("{PREFIX}{token}{MARK}"))
}

/// Puts up the mark of this name, locked.
///
/// # Errors
/// It cannot be made, or files cannot be locked there: then others would take ours for left over.
fn hang_out(directory: &Path, token: &str) -> io::Result<File> {
    let path = mark_of(directory, token);
    let made = || {
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        // Whoever looks at it in this moment lets go at once, and may have removed it.
        flock(&file, FlockOperation::LockExclusive)?;
        if is_at(&file, &path) { Ok(file) } else { Err(io::Error::other("it was removed")) }
    };
    let first = made();
    first.or_else(|_| made()).inspect_err(|_| drop(fs::remove_file(&path)))
}

/// Removes what those who were killed left in a directory of somebody's.
fn sweep(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let token = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(MARK));
        let Some(token) = token.filter(|token| is_token(token)) else { continue };
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        // Over the network only who may write can lock.
        let open = || File::options().read(true).write(true).open(entry.path()).ok();
        let Some(file) = is_file.then(open).flatten() else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(&file, &entry.path()) {
            clear_of(directory, token);
            drop(fs::remove_file(entry.path()));
        }
    }
}

fn is_token(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// What was drawn for the maker of one of our files, or of what a build put beside it.
fn maker(name: &str) -> Option<&str> {
    let (token, rest) = name.strip_prefix(PREFIX)?.split_once('-')?;
    rest.split_once(FILE)?.0.parse::<usize>().ok()?;
    is_token(token).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(args: &[&str]) -> Command {
        Command {
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            ..Command::bare("/opt/llama-server".into())
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_process_is_told_a_private_directory_which_goes_with_all_of_ours_in_it() {
        let base = tempfile::tempdir().unwrap();
        let socket = base.path().join("m-7-g1.sock");
        let mut told = command(&["-c", "512"]);
        let files = SlotFiles::of(&told, &socket);
        files.announce(&mut told).unwrap();
        let path = base.path().join("m-7-g1.slots");
        assert_eq!(told.args[2..], [FLAG.to_owned(), path.to_str().unwrap().to_owned()]);
        assert_eq!(mode(&path), 0o700);
        let name = files.name(0);
        files.make(&name).unwrap();
        assert!(files.make(&name).is_err(), "never twice");
        assert_eq!((mode(&path.join(&name)), files.seal(&name).unwrap()), (0o600, 0));
        // As a build does that writes anew, and something beside it.
        fs::remove_file(path.join(&name)).unwrap();
        fs::write(path.join(&name), "tokens").unwrap();
        fs::set_permissions(path.join(&name), fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(path.join(format!("{name}.more")), "state").unwrap();
        assert_eq!((files.seal(&name).unwrap(), mode(&path.join(&name))), (6, 0o600));
        assert!(files.seal("none").is_err() && files.free(Some(u64::MAX)).is_some());
        drop(files);
        assert!(!path.exists());
    }

    #[test]
    fn files_go_from_one_process_to_the_next() {
        let base = tempfile::tempdir().unwrap();
        let of = |generation: u64| {
            let socket = base.path().join(format!("m-7-g{generation}.sock"));
            let files = SlotFiles::of(&command(&[]), &socket);
            files.announce(&mut command(&[])).unwrap();
            files
        };
        let (old, new) = (of(1), of(2));
        let name = old.name(3);
        old.make(&name).unwrap();
        new.adopt(&old, &name).unwrap();
        drop(old);
        assert_eq!(new.seal(&name).unwrap(), 0);
        new.remove(&name);
        assert!(new.seal(&name).is_err());
    }

    #[test]
    fn in_a_directory_of_somebodys_only_our_files_go() {
        let theirs = tempfile::tempdir().unwrap();
        let own = command(&["--slot_save_path", theirs.path().to_str().unwrap()]);
        let mut told = own.clone();
        let kept = theirs.path().join("my-chat.bin");
        let (dead, alive) = ("0123456789abcdef", "fedcba9876543210");
        let of = |token: &str| {
            ["-0.slot", "-0.slot.more", ".mark"]
                .map(|end| theirs.path().join(format!("{PREFIX}{token}{end}")))
        };
        let foreign = theirs.path().join("llama-warden-notes.mark");
        for file in of(dead).iter().chain(&of(alive)).chain([&kept, &foreign]) {
            fs::write(file, "x").unwrap();
        }
        // In another container, process ids are others; locks are not.
        let held = File::open(&of(alive)[2]).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let socket = Path::new("/run/w/m-7-g1.sock");
        let files = SlotFiles::of(&own, socket);
        files.announce(&mut told).unwrap();
        assert_eq!(told, own, "it has been told");
        assert!(is_given(&own) && kept.exists() && foreign.exists());
        assert!(of(alive).iter().all(|file| file.exists()) && !of(dead).iter().any(|file| file.exists()));
        files.make(&files.name(0)).unwrap();
        // Another one's next start finds our mark held.
        let other = SlotFiles::of(&own, socket);
        other.announce(&mut told).unwrap();
        assert_eq!(files.seal(&files.name(0)).unwrap(), 0);
        drop((files, other));
        assert_eq!(fs::read_dir(theirs.path()).unwrap().count(), 5);
    }

    #[test]
    fn a_link_or_what_others_put_there_stays() {
        let base = tempfile::tempdir().unwrap();
        let theirs = base.path().join("theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("llama-warden-7-g1-0.slot"), "x").unwrap();
        let link = base.path().join("m-7-g1.slots");
        std::os::unix::fs::symlink(&theirs, &link).unwrap();
        remove(&link);
        assert!(theirs.join("llama-warden-7-g1-0.slot").exists());
        fs::remove_file(&link).unwrap();
        fs::create_dir(&link).unwrap();
        fs::write(link.join("keep"), "x").unwrap();
        fs::write(link.join("llama-warden-7-g1-0.slot"), "x").unwrap();
        remove(&link);
        assert_eq!(fs::read_dir(&link).unwrap().count(), 1, "what is not ours keeps it");
    }

    #[test]
    fn names_tell_their_maker() {
        let token = "0123456789abcdef";
        assert_eq!(maker(&format!("llama-warden-{token}-0.slot")), Some(token));
        assert_eq!(maker(&format!("llama-warden-{token}-0.slot.checkpoints")), Some(token));
        for other in
            ["llama-warden-7", "llama-warden-0123456789abcdef-x.slot", "chat.slot", "llama-warden-7-0.slot"]
        {
            assert_eq!(maker(other), None, "{other}");
        }
    }
}
