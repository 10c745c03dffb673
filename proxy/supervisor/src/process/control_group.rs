//! A control group (version 2) for each child. A process stays in the group even in another session, under
//! another parent or with another environment.
//!
//! ```text
//!     <our own group>/
//!       llama-warden-<PID of the root>-<number>/   one child and its descendants, flocked by the root
//! ```
//!
//! The root creates, locks and removes the groups; its successors only read them. An unlocked group was left
//! by a killed instance, and the next start ends its processes. Locks work across namespaces and need no
//! PIDs. No controller is enabled, so memory accounting and limits stay as they are. A child starts without
//! a group if none can be created.
//!
//! Source: the kernel's `Documentation/admin-guide/cgroup-v2.rst`; systemd's `CGROUP_DELEGATION.md`.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use tokio::time::Instant;
use warden_sensors::RelatedProcess;

use crate::process::group::kill_process;
use crate::process::root::instance_pid;

const GROUP_PREFIX: &str = "llama-warden-";
const MEMBERS_FILE: &str = "cgroup.procs";
/// Controllers that would share CPU or disk time among groups instead of processes.
const SHARING_CONTROLLERS: [&str; 2] = ["cpu", "io"];
const DELEGATION_ATTRIBUTES: [&str; 2] = ["user.delegate", "trusted.delegate"];
/// Number of names to try, because an earlier process with our PID may have left groups.
const NAME_ATTEMPTS: usize = 16;
/// Depth limit for groups below ours, such as those of a container tool.
const DEPTH_LIMIT: usize = 8;
const EMPTY_LIMIT: Duration = Duration::from_secs(5);
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub(crate) struct ControlGroup {
    path: PathBuf,
    /// Locked directory of the group; `None` in a successor of the root, which must not lock.
    _lock: Option<OwnedFd>,
}

impl ControlGroup {
    fn create(own: &Path) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        for _ in 0..NAME_ATTEMPTS {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = own.join(format!("{GROUP_PREFIX}{}-{number}", std::process::id()));
            // Another user who could open the group could lock it.
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            // A starting instance may take the new group for an abandoned one.
            if let Some(made) = Self::claim(path)? {
                return Ok(made);
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Locks an abandoned group. `None` if the group is locked, gone, or belongs to another user.
    fn claim(path: PathBuf) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = match rustix::fs::open(&path, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            opened => File::from(opened?),
        };
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let held = lock.metadata()?;
        let is_there = fs::metadata(&path).is_ok_and(|now| now.ino() == held.ino());
        let is_ours = held.uid() == rustix::process::geteuid().as_raw();
        Ok((is_there && is_ours).then(|| Self { path, _lock: Some(lock.into()) }))
    }

    /// Finds the group of a child, for successors of the root.
    pub(crate) fn of_child(leader: u32) -> Option<Self> {
        let listed = fs::read_to_string(format!("/proc/{leader}/cgroup")).ok()?;
        let group = version_two_path(&listed)?;
        if group_maker(Path::new(group).file_name()?.to_str()?) != Some(instance_pid()) {
            return None;
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mut paths = group_directories(&mounts, group).into_iter();
        paths.find(|path| path.join(MEMBERS_FILE).exists()).map(|path| Self { path, _lock: None })
    }

    /// Opens the file to which a process writes `0` to enter the group.
    pub(crate) fn open_entrance(&self) -> io::Result<OwnedFd> {
        Ok(File::options().write(true).open(self.path.join(MEMBERS_FILE))?.into())
    }

    /// Processes of the group without zombies. May block on `/proc`.
    pub(crate) fn members(&self) -> Vec<RelatedProcess> {
        let before = self.pids();
        let found: Vec<RelatedProcess> = before.into_iter().filter_map(RelatedProcess::with_pid).collect();
        // A PID may have been reused before `/proc` was read, so keep only PIDs that are still listed.
        let still = self.pids();
        found.into_iter().filter(|one| still.contains(&one.process.pid)).collect()
    }

    fn pids(&self) -> BTreeSet<u32> {
        let listed = groups_below(&self.path, DEPTH_LIMIT);
        let texts = listed.iter().filter_map(|group| fs::read_to_string(group.join(MEMBERS_FILE)).ok());
        let pids = texts.flat_map(|text| text.lines().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>());
        // The kernel lists a process without a PID in our namespace as 0.
        pids.filter(|pid| *pid > 0).collect()
    }

    /// Kills all processes: at once since Linux 5.14, else one by one.
    pub(crate) fn kill(&self) {
        if fs::write(self.path.join("cgroup.kill"), "1").is_err() {
            self.kill_members();
        }
    }

    fn kill_members(&self) {
        self.members().into_iter().for_each(|one| kill_process(one.process));
    }

    /// Removes the group and those below it, if empty. Returns true if the group is gone.
    fn remove(&self) -> bool {
        for group in groups_below(&self.path, DEPTH_LIMIT).iter().rev() {
            let _busy = fs::remove_dir(group);
        }
        !self.path.exists()
    }

    /// Kills the processes until the group can be removed. Returns false if `until` is reached.
    #[expect(clippy::disallowed_methods, reason = "a thread that nobody is served by")]
    fn end_and_remove(&self, until: Instant) -> bool {
        loop {
            self.kill();
            if self.remove() {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(REMOVE_PAUSE);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct ControlGroups {
    made: Vec<Arc<ControlGroup>>,
}

impl ControlGroups {
    pub(crate) fn make(&mut self) -> Option<Arc<ControlGroup>> {
        let made = own_group().map_err(io::Error::other).and_then(|own| ControlGroup::create(&own));
        match made {
            Ok(group) => {
                tracing::debug!(group = %group.path.display(), "a child gets a control group of its own");
                let group = Arc::new(group);
                self.made.push(Arc::clone(&group));
                Some(group)
            }
            Err(error) => {
                tracing::debug!(%error, "a child is started without a control group of its own");
                None
            }
        }
    }

    pub(crate) fn remove_unused(&mut self) {
        self.made.retain(|group| {
            let is_used = Arc::strong_count(group) > 1;
            if !is_used {
                group.kill();
            }
            is_used || !group.remove()
        });
    }

    pub(crate) fn end(self) {
        let until = Instant::now() + EMPTY_LIMIT;
        self.made.iter().for_each(|group| group.kill());
        for group in &self.made {
            if !group.end_and_remove(until) {
                log_remaining(group);
            }
        }
    }
}

/// Ends processes in groups of killed instances, and removes these groups.
pub(crate) fn end_abandoned() {
    let Ok(own) = own_group() else { return };
    let until = Instant::now() + EMPTY_LIMIT;
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        if entry.file_name().to_str().and_then(group_maker).is_none() {
            continue;
        }
        let Ok(Some(group)) = ControlGroup::claim(entry.path()) else { continue };
        let pids = group.pids();
        let is_removed = group.end_and_remove(until);
        if !pids.is_empty() {
            tracing::warn!(
                group = %group.path.display(),
                ?pids,
                "processes of a llama-warden that was killed were still running: they are killed"
            );
        }
        if !is_removed {
            log_remaining(&group);
        }
    }
}

fn log_remaining(group: &ControlGroup) {
    tracing::error!(
        group = %group.path.display(),
        pids = ?group.pids(),
        "a control group cannot be removed: its processes still run although they were killed"
    );
}

/// PID in the name of one of our groups.
fn group_maker(name: &str) -> Option<u32> {
    let (pid, number) = name.strip_prefix(GROUP_PREFIX)?.split_once('-')?;
    number.parse::<u32>().ok()?;
    pid.parse().ok()
}

/// Path in the line `0::/path` of `/proc/PID/cgroup`.
fn version_two_path(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::"))
}

/// Possible directories of a group, by the mounts listed in `/proc/self/mountinfo`.
fn group_directories(mounts: &str, group: &str) -> Vec<PathBuf> {
    let is_outside = |path: &str| path.split('/').any(|part| part == "..");
    let directory = |line: &str| {
        let (mount, source) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        // No path of ours has escaped characters.
        let is_known = source.starts_with("cgroup2 ")
            && !place.contains('\\')
            && !is_outside(root)
            && !is_outside(group);
        let inside = Path::new(group).strip_prefix(root).ok()?;
        is_known.then(|| Path::new(place).join(inside))
    };
    mounts.lines().filter_map(directory).collect()
}

/// Directory of our own group, if groups may be created in it.
fn own_group() -> Result<PathBuf, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let groups = read("/proc/self/cgroup")?;
    let group = version_two_path(&groups).ok_or("the kernel has no control groups of version 2")?;
    let own = std::process::id().to_string();
    let is_ours = |path: &PathBuf| {
        fs::read_to_string(path.join(MEMBERS_FILE)).is_ok_and(|members| members.lines().any(|pid| pid == own))
    };
    let found = group_directories(&read("/proc/self/mountinfo")?, group).into_iter().find(is_ours);
    let path = found.ok_or("our control group is mounted nowhere")?;
    let content = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
    group_refusal(&content("cgroup.type"), &content("cgroup.subtree_control")).map_or(Ok(()), Err)?;
    if Path::new("/run/systemd/system").exists() && !is_delegated(&path) {
        return Err("systemd manages our control group and has not delegated it (`Delegate=yes`)".to_owned());
    }
    Ok(path)
}

/// Reason why no groups may be created below a group. The system's root group has no `cgroup.type`.
fn group_refusal(kind: &str, controllers: &str) -> Option<String> {
    if !matches!(kind.trim(), "" | "domain") {
        return Some(format!("our control group is {}", kind.trim()));
    }
    let sharing = controllers.split_ascii_whitespace().find(|name| SHARING_CONTROLLERS.contains(name))?;
    Some(format!("`{sharing}` is divided among the groups in ours, so a group would change a child's share"))
}

fn is_delegated(path: &Path) -> bool {
    let has = |name: &str| {
        let mut value = [0_u8; 8];
        let length = rustix::fs::getxattr(path, name, &mut value);
        length.is_ok_and(|length| value.get(..length).is_some_and(|value| value == b"1"))
    };
    DELEGATION_ATTRIBUTES.into_iter().any(has)
}

/// A group and those below it down to `depth`; parents come first.
fn groups_below(group: &Path, depth: usize) -> Vec<PathBuf> {
    let mut all = vec![group.to_owned()];
    if depth > 0 {
        for entry in fs::read_dir(group).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                all.extend(groups_below(&entry.path(), depth - 1));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 0:20 / /proc rw,relatime - proc proc rw
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
42 31 0:38 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup rw
43 31 0:38 /../other /mnt/other rw - cgroup2 cgroup2 rw
44 31 0:38 / /mnt/a\\040b rw - cgroup2 cgroup2 rw
45 31 0:39 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
";

    #[test]
    fn a_group_is_looked_for_in_each_mount_that_shows_it() {
        let found = |group| {
            let all = group_directories(MOUNTS, group).into_iter();
            all.map(|path| path.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert_eq!(found("/docker/x/y"), ["/sys/fs/cgroup/unified/docker/x/y", "/sys/fs/cgroup/y"]);
        assert_eq!(found("/a"), ["/sys/fs/cgroup/unified/a"]);
        assert_eq!(found("/../../a"), [""; 0]);
        assert_eq!(version_two_path("4:memory:/a\n0::/b\n"), Some("/b"));
        assert_eq!(version_two_path("4:memory:/a\n1:name=systemd:/b\n"), None);
    }

    #[test]
    fn only_names_of_ours_are_taken_for_groups_of_ours() {
        assert_eq!(group_maker("llama-warden-12-3"), Some(12));
        for other in
            ["llama-warden-12", "llama-warden-x-3", "llama-warden-12-3-4", "llama-warden.service", "12-3"]
        {
            assert_eq!(group_maker(other), None, "{other}");
        }
    }

    #[test]
    fn a_threaded_group_and_one_whose_children_share_the_processor_get_no_groups() {
        for (kind, controllers) in [("", ""), ("domain\n", "\n"), ("", "memory pids\n")] {
            assert_eq!(group_refusal(kind, controllers), None, "{kind} {controllers}");
        }
        assert_eq!(group_refusal("threaded\n", "").unwrap(), "our control group is threaded");
        assert!(group_refusal("", "cpuset cpu memory\n").unwrap().starts_with("`cpu` is divided"));
        assert_eq!(group_refusal("", "cpuset\n"), None);
    }

    /// Uses real groups, where the kernel allows it.
    #[test]
    fn a_group_that_is_held_is_nobody_elses_and_its_processes_are_killed_one_by_one_too() {
        let Ok(own) = own_group() else { return };
        let Ok(group) = ControlGroup::create(&own) else { return };
        assert!(ControlGroup::claim(group.path.clone()).unwrap().is_none(), "it is held");
        let inner = group.path.join("inner");
        fs::create_dir(&inner).unwrap();
        let sleeper = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (mut one, mut other) = (sleeper(), sleeper());
        fs::write(group.path.join(MEMBERS_FILE), one.id().to_string()).unwrap();
        fs::write(inner.join(MEMBERS_FILE), other.id().to_string()).unwrap();
        let pids: Vec<u32> = group.members().iter().map(|member| member.process.pid).collect();
        assert!(pids.len() == 2 && pids.contains(&one.id()) && pids.contains(&other.id()), "{pids:?}");
        assert!(!group.remove(), "it is in use");
        group.kill_members();
        assert!(group.end_and_remove(Instant::now() + EMPTY_LIMIT), "zombies are in nobody's way");
        assert!(!one.wait().unwrap().success() && !other.wait().unwrap().success());
        assert!(ControlGroup::claim(group.path.clone()).unwrap().is_none(), "it is gone");
    }
}
