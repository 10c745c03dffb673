//! Where a process saves slots: a directory of its own beside its socket, of mode 0700, whose files of mode 0600 exist for as long as a
//! replacement takes. Files have conversations in them, so they go in every way in which a process can end: with the last handle,
//! with the private directory, and with the next start where we were killed.
//!
//! A `--slot-save-path` of the model's own comes first. That directory is its owner's: only files of our naming are made and removed
//! there.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use warden_policies::GenerationId;

use crate::process::hints;
use crate::spec::Command;

/// llama-server's flag for it.
pub(crate) const FLAG: &str = "--slot-save-path";
/// Begins the name of each of our files.
const PREFIX: &str = "llama-warden-";
/// Ends it, and the name of the directory.
const FILE: &str = ".slot";
const DIRECTORY: &str = "slots";

/// Such a directory. Dropping it removes what is ours.
#[derive(Debug)]
pub(crate) struct SlotFiles {
    path: PathBuf,
    /// It is ours, with all that is in it.
    own: bool,
    generation: GenerationId,
}

/// The directory of the generation that listens on this socket: equally unique.
pub(crate) fn beside(socket: &Path) -> PathBuf {
    socket.with_extension(DIRECTORY)
}

impl SlotFiles {
    /// Of a process of this command.
    pub(crate) fn of(command: &Command, socket: &Path, generation: GenerationId) -> Self {
        match given(command) {
            Some(path) => {
                let directory = command.directory.as_deref().unwrap_or_else(|| Path::new(""));
                Self { path: directory.join(path), own: false, generation }
            }
            None => Self { path: beside(socket), own: true, generation },
        }
    }

    /// Tells a process of it, unless its own command does, and makes it. Whether it was told by us.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn announce(&self, command: &mut Command) -> io::Result<bool> {
        if !self.own {
            sweep(&self.path);
            return Ok(false);
        }
        match DirBuilder::new().mode(0o700).create(&self.path) {
            // Left by a supervisor with our process id that could not clean up.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_ours(&self.path) => {
                clear(&self.path);
            }
            made => made?,
        }
        command.args.extend([FLAG.to_owned(), self.path.to_string_lossy().into_owned()]);
        Ok(true)
    }

    /// The name of a file.
    pub(crate) fn name(&self, number: usize) -> String {
        let Self { generation, .. } = self;
        format!("{PREFIX}{}-{generation}-{number}{FILE}", std::process::id())
    }

    /// Makes an empty file for a process to write: its own would have the mode that its umask leaves.
    ///
    /// # Errors
    /// It exists, or cannot be made.
    pub(crate) fn make(&self, name: &str) -> io::Result<()> {
        File::options().write(true).create_new(true).mode(0o600).open(self.path.join(name)).map(drop)
    }

    /// Bytes of a file, which nobody else can read from now on.
    ///
    /// # Errors
    /// It is no file, or is gone.
    pub(crate) fn seal(&self, name: &str) -> io::Result<u64> {
        let path = self.path.join(name);
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
        if self.path == other.path { Ok(()) } else { fs::rename(other.path.join(name), self.path.join(name)) }
    }

    /// Removes a file, and what a build may have put beside it.
    pub(crate) fn remove(&self, name: &str) {
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|found| found.starts_with(name)) {
                drop(fs::remove_file(entry.path()));
            }
        }
    }

    /// Bytes that can be written there: on a disk what is free, in memory no more than is available.
    pub(crate) fn free(&self, available: Option<u64>) -> Option<u64> {
        const TMPFS: i64 = 0x0102_1994;
        const RAMFS: i64 = 0x8584_58f6;
        let disk = rustix::fs::statfs(&self.path).ok()?;
        let bytes = disk.f_bavail.saturating_mul(u64::try_from(disk.f_bsize).ok()?);
        let in_memory = [TMPFS, RAMFS].contains(&disk.f_type);
        Some(if in_memory { bytes.min(available?) } else { bytes })
    }
}

impl Drop for SlotFiles {
    fn drop(&mut self) {
        if self.own {
            remove(&self.path);
        } else {
            let own = format!("{PREFIX}{}-{}-", std::process::id(), self.generation);
            self.remove(&own);
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
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX)) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Removes what those who were killed left in a directory of somebody's.
fn sweep(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let dead = |pid: u32| pid != std::process::id() && !Path::new(&format!("/proc/{pid}")).exists();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && name.to_str().and_then(maker).is_some_and(dead) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// The process id in the name of one of our files, or of what a build put beside it.
fn maker(name: &str) -> Option<u32> {
    let (pid, rest) = name.strip_prefix(PREFIX)?.split_once('-')?;
    let (generation, rest) = rest.split_once('-')?;
    generation.strip_prefix('g')?.parse::<u64>().ok()?;
    rest.split_once(FILE)?.0.parse::<usize>().ok()?;
    pid.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(args: &[&str]) -> Command {
        Command {
            binary: "/opt/llama-server".into(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: Vec::new(),
            env_remove: Vec::new(),
            directory: None,
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
        let files = SlotFiles::of(&told, &socket, GenerationId(1));
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
            let files = SlotFiles::of(&command(&[]), &socket, GenerationId(generation));
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
        let dead = theirs.path().join("llama-warden-4999999-g3-0.slot");
        let alive = theirs.path().join("llama-warden-1-g3-0.slot");
        for file in [&kept, &dead, &alive] {
            fs::write(file, "x").unwrap();
        }
        let files = SlotFiles::of(&own, Path::new("/run/w/m-7-g1.sock"), GenerationId(1));
        files.announce(&mut told).unwrap();
        assert_eq!(told, own, "it has been told");
        assert!(is_given(&own) && kept.exists() && alive.exists() && !dead.exists());
        files.make(&files.name(0)).unwrap();
        drop(files);
        assert_eq!(fs::read_dir(theirs.path()).unwrap().count(), 2);
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
        assert_eq!(maker("llama-warden-7-g1-0.slot"), Some(7));
        assert_eq!(maker("llama-warden-7-g1-0.slot.checkpoints"), Some(7));
        for other in ["llama-warden-7", "llama-warden-7-g1-x.slot", "chat.slot", "llama-warden-x-g1-0.slot"] {
            assert_eq!(maker(other), None, "{other}");
        }
    }
}
