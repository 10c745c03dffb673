//! Processes that belong to a child of ours wherever they went: what descends from it, and what its wrapper left
//! behind.
//!
//! A process group does not hold them: `setsid`, container tools and daemons leave it. What a wrapper leaves behind
//! when it ends becomes a child of the process that is the subreaper, and is told from the others by a variable that
//! the wrapper was started with and that its children inherit. Waits some milliseconds at most.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use procfs::process::{Process, Stat};
use warden_policies::sample::HostMemory;

use crate::host::{self, PROC};

/// How often the children of the reaper are read until no new one is among them.
const HANDED_ON_LOOKS: usize = 5;

/// How often an environment is read that is empty.
const EXEC_LOOKS: usize = 20;

/// The pause between two of these.
const EXEC_PAUSE: Duration = Duration::from_millis(1);

/// A process by its number and its start, so that another one with the same number is not taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StartedProcess {
    /// Its process id, as we see it.
    pub pid: u32,
    /// When it was started, in clock ticks since the boot: field 22 of `/proc/PID/stat`.
    pub started: u64,
}

impl StartedProcess {
    /// The process that has this number now, a zombie included; `None` if there is none or `/proc` hides it.
    pub fn with_pid(pid: u32) -> Option<Self> {
        Some(Relative::from_stat(&stat(pid)?)?.process)
    }

    /// Whether it is there and no zombie.
    pub fn is_alive(self) -> bool {
        Relative::with_pid(self.pid).is_some_and(|now| now.process == self && !now.is_zombie)
    }
}

/// What `/proc` says of a process that belongs to a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relative {
    /// Which one it is.
    pub process: StartedProcess,
    /// The process id of its parent.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// It has ended and waits to be reaped.
    pub is_zombie: bool,
}

impl Relative {
    /// What `/proc` says of the process with this number now.
    pub fn with_pid(pid: u32) -> Option<Self> {
        Self::from_stat(&stat(pid)?)
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

/// Whose relatives are looked for.
#[derive(Clone, Copy, Debug)]
pub struct Ancestry<'a> {
    /// The child: it leads a process group of its own.
    pub leader: u32,
    /// The process that orphans are handed to: the subreaper.
    pub reaper: u32,
    /// `NAME=VALUE` in the environment of the child and of what it started; no other child has the same.
    pub mark: &'a str,
}

/// The processes of a child but for the child itself: its descendants, and below the subreaper the orphans that are in
/// its group or carry its mark, with their descendants. Zombies are among them only below a parent that lives.
///
/// Source: `proc(5)` for `children`, `environ` and `stat`; `PR_SET_CHILD_SUBREAPER(2const)` for who gets orphans.
pub fn relatives(of: Ancestry<'_>) -> Vec<Relative> {
    let mut children = Children::default().of(of.reaper);
    let mut found = Vec::new();
    for _ in 0..HANDED_ON_LOOKS {
        found = relatives_among(&children, of);
        let now = Children::default().of(of.reaper);
        // A parent that ended before its children were read has handed them to the reaper, whose had been read.
        if now.iter().all(|pid| children.contains(pid)) {
            break;
        }
        children = now;
    }
    found
}

fn relatives_among(children: &[u32], of: Ancestry<'_>) -> Vec<Relative> {
    let mut table = Children::default();
    let orphans = children.iter().copied().filter(|pid| *pid != of.leader);
    let is_ours = |pid: &u32| {
        let in_group = Relative::with_pid(*pid).is_some_and(|orphan| orphan.group == of.leader);
        in_group || has_mark(*pid, of.mark)
    };
    let mut unread: Vec<u32> = orphans.filter(is_ours).collect();
    unread.extend(table.of(of.leader));
    table.below(unread)
}

/// A process and its descendants; none if it is gone.
pub fn process_tree(top: StartedProcess) -> Vec<Relative> {
    if StartedProcess::with_pid(top.pid) != Some(top) {
        return Vec::new();
    }
    Children::default().below(vec![top.pid])
}

/// The children of `reaper` that have a variable of this name in their environment, with all their descendants.
pub fn marked_below(reaper: u32, name: &str) -> Vec<Relative> {
    let mut table = Children::default();
    let prefix = format!("{name}=");
    let marked =
        table.of(reaper).into_iter().filter(|pid| environment_has(*pid, |one| one.starts_with(&prefix)));
    let marked = marked.collect();
    table.below(marked)
}

/// The effective user of a process.
pub fn user_of(pid: u32) -> Option<u32> {
    let status = Process::new(i32::try_from(pid).ok()?).and_then(|process| process.status()).ok()?;
    Some(status.euid)
}

/// The children of a process, zombies included.
pub fn children_of(pid: u32) -> Vec<Relative> {
    Children::default().of(pid).into_iter().filter_map(Relative::with_pid).collect()
}

/// Host memory of these processes together, those left out that have ended; `None` if that is all of them.
pub fn host_memory_of(pids: impl IntoIterator<Item = u32>) -> Option<HostMemory> {
    pids.into_iter().filter_map(host::memory_of_one).reduce(|sum, more| HostMemory {
        anon: sum.anon.saturating_add(more.anon),
        swap: sum.swap.saturating_add(more.swap),
        rss: sum.rss.saturating_add(more.rss),
    })
}

fn stat(pid: u32) -> Option<Stat> {
    Process::new(i32::try_from(pid).ok()?).and_then(|process| process.stat()).ok()
}

fn has_mark(pid: u32, mark: &str) -> bool {
    environment_has(pid, |one| one == mark)
}

/// Whether the environment that a process was started with has an entry like this. The files of other users are closed
/// to us.
#[expect(clippy::disallowed_methods, reason = "worker threads look here: the pause holds up no request")]
fn environment_has(pid: u32, wanted: impl Fn(&str) -> bool) -> bool {
    let path: PathBuf = Path::new(PROC).join(pid.to_string()).join("environ");
    let mut environment = Vec::new();
    for _ in 0..EXEC_LOOKS {
        environment = match std::fs::read(&path) {
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => break,
            // The memory of the program before is gone while it is read.
            Err(_) => Vec::new(),
        };
        // Empty or cut off while the kernel lays out the memory of another program; empty of a zombie.
        if environment.ends_with(&[0]) || Relative::with_pid(pid).is_none_or(|one| one.is_zombie) {
            break;
        }
        std::thread::sleep(EXEC_PAUSE);
    }
    environment.split(|byte| *byte == 0).any(|one| std::str::from_utf8(one).is_ok_and(&wanted))
}

/// Who is whose child. A kernel without the files `children` is asked once for all processes.
#[derive(Default)]
struct Children {
    all: Option<BTreeMap<u32, Vec<u32>>>,
}

impl Children {
    fn of(&mut self, pid: u32) -> Vec<u32> {
        let Some(process) = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()) else {
            return Vec::new();
        };
        if self.all.is_none() {
            match host::children(&process) {
                Ok(children) => return children.into_iter().filter_map(|pid| pid.try_into().ok()).collect(),
                // It has ended meanwhile.
                Err(_) if !process.is_alive() => return Vec::new(),
                Err(_) => {}
            }
        }
        self.all.get_or_insert_with(by_parent).get(&pid).cloned().unwrap_or_default()
    }

    /// These and all their descendants.
    fn below(&mut self, mut unread: Vec<u32>) -> Vec<Relative> {
        let mut found: BTreeMap<u32, Relative> = BTreeMap::new();
        while let Some(pid) = unread.pop() {
            if found.contains_key(&pid) {
                continue;
            }
            let Some(relative) = Relative::with_pid(pid) else { continue };
            found.insert(pid, relative);
            unread.extend(self.of(pid));
        }
        found.into_values().collect()
    }
}

fn by_parent() -> BTreeMap<u32, Vec<u32>> {
    let mut all: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for process in procfs::process::all_processes().into_iter().flatten().filter_map(Result::ok) {
        if let Some(found) = process.stat().ok().as_ref().and_then(Relative::from_stat) {
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

    /// One that goes on executing itself, so that it is often looked at in between.
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
        let of = Ancestry { leader: leader.id(), reaper: std::process::id(), mark: "WARDEN_TEST_MARK=exec" };
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
        let of = Ancestry { leader: one.id(), reaper: std::process::id(), mark: "WARDEN_TEST_MARK=one" };
        let found = relatives(of);
        assert!(found.iter().any(|relative| relative.process.pid == left && relative.group != one.id()));
        assert!(!found.iter().any(|relative| [one.id(), other.id(), others].contains(&relative.process.pid)));
        // Below another leader, the mark alone says whose it is.
        let of = Ancestry { leader: other.id(), ..of };
        let found: Vec<u32> = relatives(of).iter().map(|relative| relative.process.pid).collect();
        assert!(found.contains(&left) && found.contains(&one.id()) && found.contains(&others), "{found:?}");
        assert!(host_memory_of([left]).unwrap().anon > 0);
        for pid in [left, others] {
            Command::new("/bin/kill").arg(pid.to_string()).status().unwrap();
        }
        one.wait().unwrap();
        other.wait().unwrap();
        assert_eq!(host_memory_of([left]), None);
    }
}
