//! Private directory next to the socket, in which a process saves slots during a replacement or while an
//! unloaded model may return. Slot files contain conversations, so they are removed however a process ends:
//! with the last handle, with the private directory, or at the next start.
//!
//! A `--slot-save-path` in the model's command names an operator's directory, which other programs may use
//! too, even in a container or over the network, where our PIDs mean nothing. So our file names contain a
//! random token, and an empty mark file with the token is locked while the files may be needed. Files whose
//! mark is not locked are removed. The same holds for a model's directory of conversations on disk
//! (`warm = "disk"`), which instances may share.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};
use warden_policies::server_flags::last_value;

use crate::process::directories;
use crate::process::private_dir::is_at;
use crate::process::trusted_path;
use crate::spec::ServerCommand;
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_detached};

pub(crate) const SLOT_PATH_FLAG: &str = "--slot-save-path";
const FILE_PREFIX: &str = "llama-warden-";
pub(crate) const FILE_SUFFIX: &str = ".slot";
const DIRECTORY_EXTENSION: &str = "slots";
const MARK_SUFFIX: &str = ".mark";
/// File that a server with the fix `slot-checkpoints` writes next to a slot file.
const CHECKPOINT_SUFFIX: &str = ".checkpoints";

/// A slot directory. Dropping the last handle removes our files, in the background where possible.
#[derive(Debug)]
pub(crate) struct SlotFiles {
    place: Option<SlotDirectory>,
}

#[derive(Debug)]
struct SlotDirectory {
    path: PathBuf,
    owner: DirectoryOwner,
    token: String,
    /// Locked file that shows other instances that our files are in use.
    mark: Mutex<Option<File>>,
    /// True if another instance owns the files.
    left: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DirectoryOwner {
    /// One process: the directory is made and removed with it.
    Process,
    /// The model: the directory has its conversations on disk.
    Model,
    /// The operator, who named it in the model's command.
    Operator,
}

/// Slot directory of the generation with this socket.
pub(crate) fn slot_directory(socket: &Path) -> PathBuf {
    socket.with_extension(DIRECTORY_EXTENSION)
}

impl SlotFiles {
    /// `stored`: directory of the model's conversations on disk, if they are to stay there.
    pub(crate) fn from_command(command: &ServerCommand, socket: &Path, stored: Option<&Path>) -> Self {
        let (path, owner) = match (given_directory(command), stored) {
            (Some(path), _) => (command.resolve_path(path), DirectoryOwner::Operator),
            (None, Some(path)) => (path.to_owned(), DirectoryOwner::Model),
            (None, None) => (slot_directory(socket), DirectoryOwner::Process),
        };
        let token = format!("{:016x}", rand::random::<u64>());
        let left = AtomicBool::new(false);
        Self { place: Some(SlotDirectory { path, owner, token, mark: Mutex::default(), left }) }
    }

    /// True if the process saves into the directory of the model's conversations on disk.
    pub(crate) fn are_stored(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.owner == DirectoryOwner::Model)
    }

    /// Sets whether another instance owns the directory. Dropping this value then removes nothing.
    pub(crate) fn set_others(&self, is_others: bool) {
        if let Some(place) = &self.place {
            place.left.store(is_others, Ordering::Relaxed);
        }
    }

    /// Worker threads for these files. Conversations on disk have their own, because that disk may hang.
    pub(crate) fn work_kind(&self) -> WorkKind {
        if self.are_stored() { WorkKind::Conversations } else { WorkKind::ModelFiles }
    }

    fn path(&self) -> &Path {
        self.place.as_ref().map_or(Path::new(""), |place| &place.path)
    }

    /// Prepares the directory. Returns true if it has added the flag for our directory.
    pub(crate) fn announce(&self, command: &mut ServerCommand) -> io::Result<bool> {
        let Some(SlotDirectory { path, owner, token, mark, .. }) = &self.place else { return Ok(false) };
        if *owner == DirectoryOwner::Model {
            trusted_path::make_private_dir(path)?;
        }
        if *owner != DirectoryOwner::Process {
            sweep_directory(path);
            *lock(mark) = Some(create_mark(path, token)?);
        }
        match owner {
            DirectoryOwner::Operator => return Ok(false),
            DirectoryOwner::Model => {}
            DirectoryOwner::Process => make_directory(path)?,
        }
        command.args.extend([SLOT_PATH_FLAG.to_owned(), path.to_string_lossy().into_owned()]);
        Ok(true)
    }
    pub(crate) fn file_name(&self, number: usize) -> String {
        let token = self.place.as_ref().map_or("", |place| &place.token);
        format!("{FILE_PREFIX}{token}-{number}{FILE_SUFFIX}")
    }

    /// Creates an empty file, because a file created by the process would get the mode of its umask.
    pub(crate) fn create_file(&self, name: &str) -> io::Result<()> {
        File::options().write(true).create_new(true).mode(0o600).open(self.path().join(name)).map(drop)
    }

    /// Restricts a file to our user and returns its size.
    pub(crate) fn seal_file(&self, name: &str) -> io::Result<u64> {
        seal(&self.path().join(name))
    }

    /// Restricts the checkpoints of a slot file to our user and returns their size; 0 without checkpoints.
    pub(crate) fn seal_checkpoints(&self, name: &str) -> u64 {
        seal(&self.path().join(checkpoint_name(name))).unwrap_or(0)
    }

    /// Moves a file and its checkpoints from another directory.
    pub(crate) fn adopt_file(&self, other: &Self, name: &str) -> io::Result<()> {
        let (from, to) = (other.path(), self.path());
        if from == to {
            return Ok(());
        }
        move_file(&from.join(name), &to.join(name))?;
        let checkpoints = checkpoint_name(name);
        match move_file(&from.join(&checkpoints), &to.join(&checkpoints)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                // The server then evaluates the prompt, and the proof of the restored slot shows this.
                tracing::warn!(%error, "the checkpoints of a slot cannot be moved");
            }
            _ => {}
        }
        Ok(())
    }

    /// Renames a file and its checkpoints, so that they stay in the directory.
    pub(crate) fn keep_file(&self, name: &str, kept: &str) -> io::Result<()> {
        let path = self.path();
        match fs::rename(path.join(checkpoint_name(name)), path.join(checkpoint_name(kept))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::rename(path.join(name), path.join(kept))
    }

    /// Removes a file, and files that the server wrote next to it.
    pub(crate) fn remove_file(&self, name: &str) {
        remove_matching(self.path(), |found| found.starts_with(name));
    }

    /// Bytes that can be written: free space of the disk, on a tmpfs at most the available memory.
    pub(crate) fn free_bytes(&self, available: Option<u64>) -> Option<u64> {
        let disk = rustix::fs::statfs(self.path()).ok()?;
        let bytes = disk.f_bavail.saturating_mul(u64::try_from(disk.f_bsize).ok()?);
        Some(if is_in_memory(&disk) { bytes.min(available?) } else { bytes })
    }

    pub(crate) fn are_in_memory(&self) -> bool {
        rustix::fs::statfs(self.path()).is_ok_and(|disk| is_in_memory(&disk))
    }
}

/// Moves a file, also to another disk: a change of `warm` changes the directory of the next process.
fn move_file(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            fs::copy(from, to)?;
            fs::remove_file(from)
        }
        moved => moved,
    }
}

/// Name of the checkpoints of a slot file.
pub(crate) fn checkpoint_name(name: &str) -> String {
    format!("{name}{CHECKPOINT_SUFFIX}")
}

fn seal(path: &Path) -> io::Result<u64> {
    let facts = fs::symlink_metadata(path)?;
    if !facts.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    if facts.permissions().mode() & 0o077 != 0 {
        // The process has replaced our file.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    }
    Ok(facts.len())
}

fn is_in_memory(disk: &rustix::fs::StatFs) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    [TMPFS, RAMFS].contains(&disk.f_type)
}

impl Drop for SlotFiles {
    fn drop(&mut self) {
        let kind = self.work_kind();
        let place = self.place.take();
        if tokio::runtime::Handle::try_current().is_err() {
            return drop(place);
        }
        let kept = Arc::new(Mutex::new(place));
        let given = Arc::clone(&kept);
        if let Err(error) = run_detached(kind, move || drop(lock(&given).take())) {
            // Leave the files to the next start: most likely the disk hangs.
            if let Some(place) = &*lock(&kept) {
                place.left.store(true, Ordering::Relaxed);
            }
            tracing::warn!(%error, "saved slots are not removed before the next start");
        }
    }
}

impl Drop for SlotDirectory {
    fn drop(&mut self) {
        let Self { path, owner, token, mark, left } = self;
        if left.load(Ordering::Relaxed) {
            return;
        }
        if *owner == DirectoryOwner::Process {
            return remove(path);
        }
        let mark = mark.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        clear_token(path, token);
        if mark.is_some() {
            drop(fs::remove_file(mark_path(path, token)));
        }
    }
}

/// Makes the directory of one process.
fn make_directory(path: &Path) -> io::Result<()> {
    let create = || DirBuilder::new().mode(0o700).create(path);
    match create() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            directories::restore_directory(path).map_err(io::Error::other)?;
            create()
        }
        // An earlier supervisor with the same PID has left this directory.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_ours(path) => {
            clear_directory(path);
            Ok(())
        }
        made => made,
    }
}

fn given_directory(command: &ServerCommand) -> Option<&str> {
    last_value(&command.args, &[SLOT_PATH_FLAG])
}

pub(crate) fn has_given_directory(command: &ServerCommand) -> bool {
    given_directory(command).is_some()
}

/// Removes our directory with its files. Never recurses.
pub(crate) fn remove(directory: &Path) {
    if is_ours(directory) {
        clear_directory(directory);
        drop(fs::remove_dir(directory));
    }
}

/// True for a directory (no link) of our user.
fn is_ours(path: &Path) -> bool {
    let facts = fs::symlink_metadata(path);
    facts.is_ok_and(|facts| facts.is_dir() && facts.uid() == rustix::process::geteuid().as_raw())
}

fn clear_directory(directory: &Path) {
    remove_matching(directory, |name| name.starts_with(FILE_PREFIX));
}

/// Removes files with this token, and files next to them.
fn clear_token(directory: &Path, token: &str) {
    remove_matching(directory, |name| file_token(name) == Some(token));
}

fn remove_matching(directory: &Path, is_one: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(&is_one) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

fn mark_path(directory: &Path, token: &str) -> PathBuf {
    directory.join(format!("{FILE_PREFIX}{token}{MARK_SUFFIX}"))
}

/// Creates and locks the mark. Without a locked mark, other instances would remove our files.
fn create_mark(directory: &Path, token: &str) -> io::Result<File> {
    let path = mark_path(directory, token);
    let made = || {
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        // Another process that inspects the mark holds the lock for a moment, and may have removed the mark.
        flock(&file, FlockOperation::LockExclusive)?;
        if is_at(&file, &path) { Ok(file) } else { Err(io::Error::other("it was removed")) }
    };
    let first = made();
    first.or_else(|_| made()).inspect_err(|_| drop(fs::remove_file(&path)))
}

/// Removes files of killed processes from an operator's directory.
pub(crate) fn sweep_directory(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let token = name.to_str().and_then(|name| name.strip_prefix(FILE_PREFIX)?.strip_suffix(MARK_SUFFIX));
        let Some(token) = token.filter(|token| is_token(token)) else { continue };
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        // Network file systems lock only files that are open for writing.
        let open = || File::options().read(true).write(true).open(entry.path()).ok();
        let Some(file) = is_file.then(open).flatten() else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(&file, &entry.path()) {
            clear_token(directory, token);
            drop(fs::remove_file(entry.path()));
        }
    }
}

fn is_token(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// True for the name of a slot file that a process has saved, or of a file next to it.
pub(crate) fn is_slot_file(name: &str) -> bool {
    file_token(name).is_some()
}

/// Token in the name of one of our files, or of a file next to it.
fn file_token(name: &str) -> Option<&str> {
    let (token, rest) = name.strip_prefix(FILE_PREFIX)?.split_once('-')?;
    rest.split_once(FILE_SUFFIX)?.0.parse::<usize>().ok()?;
    is_token(token).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(args: &[&str]) -> ServerCommand {
        ServerCommand {
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            ..ServerCommand::from_binary("/opt/llama-server".into())
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
        let files = SlotFiles::from_command(&told, &socket, None);
        files.announce(&mut told).unwrap();
        let path = base.path().join("m-7-g1.slots");
        assert_eq!(told.args[2..], [SLOT_PATH_FLAG.to_owned(), path.to_str().unwrap().to_owned()]);
        assert_eq!(mode(&path), 0o700);
        let name = files.file_name(0);
        files.create_file(&name).unwrap();
        assert!(files.create_file(&name).is_err(), "never twice");
        assert_eq!((mode(&path.join(&name)), files.seal_file(&name).unwrap()), (0o600, 0));
        // As a build that replaces the file, and writes another one next to it.
        fs::remove_file(path.join(&name)).unwrap();
        fs::write(path.join(&name), "tokens").unwrap();
        fs::set_permissions(path.join(&name), fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(path.join(format!("{name}.more")), "state").unwrap();
        assert_eq!((files.seal_file(&name).unwrap(), mode(&path.join(&name))), (6, 0o600));
        assert!(files.seal_file("none").is_err() && files.free_bytes(Some(u64::MAX)).is_some());
        drop(files);
        assert!(!path.exists());
    }

    #[test]
    fn files_go_from_one_process_to_the_next() {
        let base = tempfile::tempdir().unwrap();
        let of = |generation: u64| {
            let socket = base.path().join(format!("m-7-g{generation}.sock"));
            let files = SlotFiles::from_command(&command(&[]), &socket, None);
            files.announce(&mut command(&[])).unwrap();
            files
        };
        let (old, new) = (of(1), of(2));
        let name = old.file_name(3);
        old.create_file(&name).unwrap();
        new.adopt_file(&old, &name).unwrap();
        drop(old);
        assert_eq!(new.seal_file(&name).unwrap(), 0);
        new.remove_file(&name);
        assert!(new.seal_file(&name).is_err());
    }

    #[test]
    fn checkpoints_are_counted_and_moved_and_removed_with_their_slot() {
        let base = tempfile::tempdir().unwrap();
        let of = |generation: u64| {
            let socket = base.path().join(format!("m-7-g{generation}.sock"));
            let files = SlotFiles::from_command(&command(&[]), &socket, None);
            files.announce(&mut command(&[])).unwrap();
            files
        };
        let (old, new) = (of(1), of(2));
        let name = old.file_name(0);
        old.create_file(&name).unwrap();
        assert_eq!(old.seal_checkpoints(&name), 0);
        let beside = old.path().join(format!("{name}.checkpoints"));
        fs::write(&beside, "states").unwrap();
        fs::set_permissions(&beside, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!((old.seal_checkpoints(&name), mode(&beside)), (6, 0o600));
        new.adopt_file(&old, &name).unwrap();
        assert!(!beside.exists());
        assert_eq!(new.seal_checkpoints(&name), 6);
        new.remove_file(&name);
        assert_eq!((new.seal_checkpoints(&name), fs::read_dir(new.path()).unwrap().count()), (0, 0));
        // A link is no file of the server's.
        std::os::unix::fs::symlink("/etc/passwd", old.path().join(format!("{name}.checkpoints"))).unwrap();
        assert_eq!(old.seal_checkpoints(&name), 0);
        // A file of the process that was killed while it wrote.
        fs::write(old.path().join(format!("{name}.checkpoints.tmp")), "sta").unwrap();
        old.remove_file(&name);
        assert!(!old.path().join(format!("{name}.checkpoints.tmp")).exists());
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
                .map(|end| theirs.path().join(format!("{FILE_PREFIX}{token}{end}")))
        };
        let foreign = theirs.path().join("llama-warden-notes.mark");
        for file in of(dead).iter().chain(&of(alive)).chain([&kept, &foreign]) {
            fs::write(file, "x").unwrap();
        }
        // In another container PIDs differ, but locks work.
        let held = File::open(&of(alive)[2]).unwrap();
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let socket = Path::new("/run/w/m-7-g1.sock");
        let files = SlotFiles::from_command(&own, socket, None);
        files.announce(&mut told).unwrap();
        assert_eq!(told, own, "it has been told");
        assert!(has_given_directory(&own) && kept.exists() && foreign.exists());
        assert!(of(alive).iter().all(|file| file.exists()) && !of(dead).iter().any(|file| file.exists()));
        files.create_file(&files.file_name(0)).unwrap();
        // The next start of another instance finds our mark locked.
        let other = SlotFiles::from_command(&own, socket, None);
        other.announce(&mut told).unwrap();
        assert_eq!(files.seal_file(&files.file_name(0)).unwrap(), 0);
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
        assert_eq!(file_token(&format!("llama-warden-{token}-0.slot")), Some(token));
        assert_eq!(file_token(&format!("llama-warden-{token}-0.slot.checkpoints")), Some(token));
        for other in
            ["llama-warden-7", "llama-warden-0123456789abcdef-x.slot", "chat.slot", "llama-warden-7-0.slot"]
        {
            assert_eq!(file_token(other), None, "{other}");
        }
    }
}
