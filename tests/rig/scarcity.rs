//! Takes away threads (by a control group), disk access (by freezing), or disk space (by a small disk). Needs
//! root; without it, tests print a line and are skipped.
//!
//! A shell that waits for the end of the test thaws and unmounts, even if the test is killed.

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::{Context as _, Outcome, Trouble};

/// Control group that limits its threads and processes.
#[derive(Debug)]
pub struct TaskLimit {
    group: PathBuf,
}

impl TaskLimit {
    /// Creates a group without a limit and without processes; `None` if the machine does not allow that.
    ///
    /// # Errors
    /// The group cannot be used.
    pub fn new() -> Result<Option<Self>, Trouble> {
        let name = format!("warden-test-{}-{:08x}", std::process::id(), rand::random::<u32>());
        let root = Path::new("/sys/fs/cgroup");
        for base in [root.join("pids"), root.to_owned()] {
            let group = base.join(&name);
            if std::fs::create_dir(&group).is_err() {
                continue;
            }
            let made = Self { group };
            if made.group.join("pids.max").exists() {
                return Ok(Some(made));
            }
        }
        skipped("no control group that bounds processes can be made here");
        Ok(None)
    }

    /// Moves a process into the group; its later children are in the group, too.
    ///
    /// # Errors
    /// The kernel refuses the process.
    pub fn hold(&self, pid: i32) -> Outcome {
        let file = self.group.join("cgroup.procs");
        std::fs::write(&file, pid.to_string()).context(file.display())
    }

    /// Forbids new threads and processes.
    ///
    /// # Errors
    /// The kernel refuses the limit.
    pub fn close(&self) -> Outcome {
        self.set("1")
    }

    /// Removes the limit.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn open(&self) -> Outcome {
        self.set("max")
    }

    fn set(&self, most: &str) -> Outcome {
        std::fs::write(self.group.join("pids.max"), most).context("pids.max")
    }
}

impl Drop for TaskLimit {
    fn drop(&mut self) {
        let _gone = self.open();
        let all = std::fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
        if let Some(base) = self.group.parent() {
            for pid in all.lines() {
                let _gone = std::fs::write(base.join("cgroup.procs"), pid);
            }
        }
        let _removed = std::fs::remove_dir(&self.group);
    }
}

/// Small file system, unmounted on drop. Declare it before the processes that use it.
#[derive(Debug)]
pub struct SmallDisk {
    place: PathBuf,
    keeper: Child,
}

impl SmallDisk {
    /// Mounts an ext4, which can be frozen, at `place`; `None` if the machine does not allow that.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn that_freezes(place: &Path) -> Result<Option<Self>, Trouble> {
        let image = place.with_extension("image");
        std::fs::File::create(&image)?.set_len(32 << 20)?;
        if !does("mkfs.ext4", &["-q", "-F"], &image) {
            skipped("mkfs.ext4 cannot be run here");
            return Ok(None);
        }
        Self::mount(place, &["-o", "loop"], &image)
    }

    /// Mounts a tmpfs of this size at `place`; `None` if the machine does not allow that.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn of_bytes(place: &Path, bytes: u64) -> Result<Option<Self>, Trouble> {
        Self::mount(place, &["-t", "tmpfs", "-o", &format!("size={bytes}")], Path::new("none"))
    }

    fn mount(place: &Path, options: &[&str], what: &Path) -> Result<Option<Self>, Trouble> {
        std::fs::create_dir_all(place)?;
        let mounted = Command::new("mount").args(options).arg(what).arg(place).stderr(Stdio::null()).status();
        if !mounted.is_ok_and(|status| status.success()) {
            skipped("nothing can be mounted here");
            return Ok(None);
        }
        // The shell reads until its input ends, which the end of the test causes in any case.
        let keeper = Command::new("sh")
            .args(["-c", "read -r _; fsfreeze -u \"$0\" 2>/dev/null; umount -l \"$0\""])
            .arg(place)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Some(Self { place: place.to_owned(), keeper }))
    }

    /// Blocks all writers until the result is dropped. Declare the result after the processes that use the
    /// disk.
    ///
    /// # Errors
    /// The disk cannot be frozen.
    pub fn freeze(&self) -> Result<FrozenDisk<'_>, Trouble> {
        if does("fsfreeze", &["-f"], &self.place) {
            Ok(FrozenDisk(self))
        } else {
            Err(Trouble::new(format!("cannot freeze {}", self.place.display())))
        }
    }

    /// Fills the disk with a file; removing the file makes room.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn fill(&self) -> Result<PathBuf, Trouble> {
        let path = self.place.join("ballast");
        let mut file = std::fs::File::create(&path)?;
        for size in [1 << 16, 1 << 12, 1] {
            while file.write_all(&vec![b'x'; size]).is_ok() {}
        }
        Ok(path)
    }

    /// Mount point of the disk.
    pub fn place(&self) -> &Path {
        &self.place
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ended = self.keeper.wait();
    }
}

/// Disk that blocks all writers.
#[derive(Debug)]
pub struct FrozenDisk<'a>(&'a SmallDisk);

impl Drop for FrozenDisk<'_> {
    fn drop(&mut self) {
        let _thawed = does("fsfreeze", &["-u"], &self.0.place);
    }
}

fn does(program: &str, flags: &[&str], on: &Path) -> bool {
    let ran = Command::new(program).args(flags).arg(on).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}

#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
pub(crate) fn skipped(why: &str) {
    eprintln!("skipped: {why}");
}
