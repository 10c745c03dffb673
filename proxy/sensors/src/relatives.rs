//! Finds all processes of a child of ours: its descendants, and those that an ended wrapper left behind.
//!
//! Processes started by `setsid`, container tools and daemons leave the process group. The children of an
//! ended wrapper become children of the subreaper. An environment variable identifies them: they inherited it
//! from the wrapper. All functions block for some milliseconds at most.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use procfs::process::{Process, Stat};

use crate::host::{self, PROC};

/// Maximum number of times that the subreaper's children are read until no new one appears.
const HANDED_ON_LOOKS: usize = 5;

/// Maximum number of attempts to read an environment that is still incomplete.
const EXEC_LOOKS: usize = 20;
/// The same for an empty one: on a busy machine, an exec waits for a core meanwhile.
const EMPTY_LOOKS: usize = 100;

const EXEC_PAUSE: Duration = Duration::from_millis(1);

/// A process, identified by pid and start time, because the kernel reuses pids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StartedProcess {
    /// Process id in our pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since the boot: field 22 of `/proc/PID/stat`.
    pub started: u64,
}

impl StartedProcess {
    /// Returns the process that has this pid now, possibly a zombie; `None` if `/proc` shows no such process.
    pub fn with_pid(pid: u32) -> Option<Self> {
        Some(RelatedProcess::from_stat(&read_stat(pid)?)?.process)
    }

    /// Returns whether the process exists and is no zombie.
    pub fn is_alive(self) -> bool {
        RelatedProcess::with_pid(self.pid).is_some_and(|now| now.process == self && !now.is_zombie)
    }
}

/// Facts from `/proc` about a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelatedProcess {
    /// Pid and start time.
    pub process: StartedProcess,
    /// Process id of the parent.
    pub parent: u32,
    /// Process group id.
    pub group: u32,
    /// Session id.
    pub session: u32,
    /// True if the process has ended and waits to be reaped.
    pub is_zombie: bool,
}

impl RelatedProcess {
    /// Reads the process that has this pid now.
    pub fn with_pid(pid: u32) -> Option<Self> {
        Self::from_stat(&read_stat(pid)?)
    }

    fn from_stat(stat: &Stat) -> Option<Self> {
        let number = |field: i32| u32::try_from(field).ok();
        Some(Self {
            process: StartedProcess { pid: number(stat.pid)?, started: stat.starttime },
            parent: number(stat.ppid)?,
            group: number(stat.pgrp)?,
            session: number(stat.session)?,
            is_zombie: matches!(stat.state, 'Z' | 'X'),
        })
    }
}

/// The child whose relatives are searched.
#[derive(Clone, Copy, Debug)]
pub struct ChildAncestry<'a> {
    /// Pid of the child, which leads its own process group.
    pub leader: u32,
    /// Pid of the subreaper, to which orphans are reparented.
    pub reaper: u32,
    /// `NAME=VALUE` in the environment of the child and its descendants; unique to this child.
    pub mark: &'a str,
}

/// Returns the processes of a child, without the child itself: its descendants; orphans (children of the
/// subreaper) that are in its group or carry its mark; and the descendants of these orphans. Includes a
/// zombie only if its parent lives.
///
/// Source: `proc(5)` for `children`, `environ` and `stat`; `PR_SET_CHILD_SUBREAPER(2const)` for the new
/// parent of orphans.
pub fn relatives(of: ChildAncestry<'_>) -> Vec<RelatedProcess> {
    let mut children = ChildTable::default().direct(of.reaper);
    let mut found = Vec::new();
    for _ in 0..HANDED_ON_LOOKS {
        found = relatives_among(&children, of);
        let now = ChildTable::default().direct(of.reaper);
        // A parent may end after this reading and leave its children to the subreaper.
        if now.iter().all(|pid| children.contains(pid)) {
            break;
        }
        children = now;
    }
    found
}

fn relatives_among(children: &[u32], of: ChildAncestry<'_>) -> Vec<RelatedProcess> {
    let mut table = ChildTable::default();
    let orphans = children.iter().copied().filter(|pid| *pid != of.leader);
    let is_ours = |pid: &u32| {
        let in_group = RelatedProcess::with_pid(*pid).is_some_and(|orphan| orphan.group == of.leader);
        in_group || environment_has(*pid, |one| one == of.mark)
    };
    let mut unread: Vec<u32> = orphans.filter(is_ours).collect();
    unread.extend(table.direct(of.leader));
    table.descendants(unread)
}

/// Returns a process and its descendants; empty if the process is gone.
pub fn process_tree(top: StartedProcess) -> Vec<RelatedProcess> {
    if StartedProcess::with_pid(top.pid) != Some(top) {
        return Vec::new();
    }
    ChildTable::default().descendants(vec![top.pid])
}

/// Returns the children of `reaper` whose environment has a variable `name`, and all their descendants.
pub fn marked_below(reaper: u32, name: &str) -> Vec<RelatedProcess> {
    let mut table = ChildTable::default();
    let prefix = format!("{name}=");
    let mut marked = table.direct(reaper);
    marked.retain(|pid| environment_has(*pid, |one| one.starts_with(&prefix)));
    table.descendants(marked)
}

/// Returns the effective user id of a process.
pub fn user_of(pid: u32) -> Option<u32> {
    let status = Process::new(i32::try_from(pid).ok()?).and_then(|process| process.status()).ok()?;
    Some(status.euid)
}

/// Returns the children of a process, including zombies.
pub fn children_of(pid: u32) -> Vec<RelatedProcess> {
    ChildTable::default().direct(pid).into_iter().filter_map(RelatedProcess::with_pid).collect()
}

fn read_stat(pid: u32) -> Option<Stat> {
    Process::new(i32::try_from(pid).ok()?).and_then(|process| process.stat()).ok()
}

/// False for processes of other users, whose environment we cannot read.
#[expect(clippy::disallowed_methods, reason = "worker threads look here: the pause holds up no request")]
fn environment_has(pid: u32, wanted: impl Fn(&str) -> bool) -> bool {
    let path: PathBuf = Path::new(PROC).join(pid.to_string()).join("environ");
    let mut environment = Vec::new();
    for look in 0..EMPTY_LOOKS {
        environment = match std::fs::read(&path) {
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => break,
            // Reading fails while an exec replaces the process's memory.
            Err(_) => Vec::new(),
        };
        // The text is empty or truncated during an exec, and empty for a zombie.
        if environment.ends_with(&[0]) || RelatedProcess::with_pid(pid).is_none_or(|one| one.is_zombie) {
            break;
        }
        if look >= EXEC_LOOKS && !environment.is_empty() {
            break;
        }
        std::thread::sleep(EXEC_PAUSE);
    }
    environment.split(|byte| *byte == 0).any(|one| std::str::from_utf8(one).is_ok_and(&wanted))
}

/// Children of each process. On a kernel without the `children` files, scans all processes once.
#[derive(Default)]
struct ChildTable {
    all: Option<BTreeMap<u32, Vec<u32>>>,
}

impl ChildTable {
    fn direct(&mut self, pid: u32) -> Vec<u32> {
        let Some(process) = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()) else {
            return Vec::new();
        };
        if self.all.is_none() {
            match host::children(&process) {
                Ok(children) => return children.into_iter().filter_map(|pid| pid.try_into().ok()).collect(),
                Err(_) if !process.is_alive() => return Vec::new(),
                Err(_) => {}
            }
        }
        self.all.get_or_insert_with(children_by_parent).get(&pid).cloned().unwrap_or_default()
    }

    fn descendants(&mut self, mut unread: Vec<u32>) -> Vec<RelatedProcess> {
        let mut found: BTreeMap<u32, RelatedProcess> = BTreeMap::new();
        while let Some(pid) = unread.pop() {
            if found.contains_key(&pid) {
                continue;
            }
            let Some(relative) = RelatedProcess::with_pid(pid) else { continue };
            found.insert(pid, relative);
            unread.extend(self.direct(pid));
        }
        found.into_values().collect()
    }
}

fn children_by_parent() -> BTreeMap<u32, Vec<u32>> {
    let mut all: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for process in procfs::process::all_processes().into_iter().flatten().filter_map(Result::ok) {
        if let Some(found) = process.stat().ok().as_ref().and_then(RelatedProcess::from_stat) {
            all.entry(found.parent).or_default().push(found.process.pid);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    /// The process executes itself repeatedly, so that it is often read during an exec.
    #[test]
    fn a_marked_process_is_found_while_it_executes_another_program() {
        let start = |script: &str| {
            Command::new("/bin/sh")
                .args(["-c", script])
                .env("AGAIN", script)
                .env("WARDEN_TEST_MARK", "exec")
                .process_group(0)
                .spawn()
                .unwrap()
        };
        let (mut leader, mut server) = (start("exec sleep 60"), start("exec /bin/sh -c \"$AGAIN\""));
        let of =
            ChildAncestry { leader: leader.id(), reaper: std::process::id(), mark: "WARDEN_TEST_MARK=exec" };
        let is_found = || relatives(of).iter().any(|one| one.process.pid == server.id());
        let missed = (0..3000).filter(|_| !is_found()).count();
        for child in [&mut leader, &mut server] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(missed, 0);
    }

    #[test]
    fn a_descendant_is_found_in_another_session_and_another_childs_is_not() {
        let start = |mark: &str| {
            let script = "setsid sh -c 'echo $$; exec sleep 60' & wait";
            let mut shell = Command::new("/bin/sh")
                .args(["-c", script])
                .env("WARDEN_TEST_MARK", mark)
                .process_group(0)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
            (shell, line.trim().parse::<u32>().unwrap())
        };
        let (mut one, left) = start("one");
        let (mut other, others) = start("other");
        let of = ChildAncestry { leader: one.id(), reaper: std::process::id(), mark: "WARDEN_TEST_MARK=one" };
        let found = relatives(of);
        assert!(found.iter().any(|relative| relative.process.pid == left && relative.group != one.id()));
        assert!(!found.iter().any(|relative| [one.id(), other.id(), others].contains(&relative.process.pid)));
        // With another leader, only the mark identifies the process.
        let of = ChildAncestry { leader: other.id(), ..of };
        let found: Vec<u32> = relatives(of).iter().map(|relative| relative.process.pid).collect();
        assert!(found.contains(&left) && found.contains(&one.id()) && found.contains(&others), "{found:?}");
        assert!(host::host_memory_of([left]).unwrap().anon > 0);
        for pid in [left, others] {
            Command::new("/bin/kill").arg(pid.to_string()).status().unwrap();
        }
        one.wait().unwrap();
        other.wait().unwrap();
        assert_eq!(host::host_memory_of([left]), None);
    }
}
