//! Finds the descendants of a process in `/proc`, so that a cancelled build leaves none of them.
//!
//! A process group is not enough: ninja puts each compiler into a group of its own, and a ninja that is killed
//! hard leaves them running. A process is named by id and start time, so that a reused id is never hit.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// A process, told from a later one with the same id by its start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pid: i32,
    parent: i32,
    /// Clock ticks since boot.
    started: u64,
}

/// All live descendants of a process, without itself. Empty where `/proc` cannot be read.
pub(crate) fn descendants(root: i32) -> Vec<Process> {
    let Ok(folders) = fs::read_dir("/proc") else { return Vec::new() };
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for folder in folders.flatten() {
        let pid = folder.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(process) = pid.and_then(read) {
            children.entry(process.parent).or_default().push(process);
        }
    }
    let mut found = children.remove(&root).unwrap_or_default();
    let mut next = 0;
    while let Some(process) = found.get(next) {
        let more = children.remove(&process.pid).unwrap_or_default();
        found.extend(more);
        next += 1;
    }
    found
}

/// Whether a process still runs. One that was killed does for a moment.
pub(crate) fn lives(process: &Process) -> bool {
    read(process.pid).is_some_and(|now| now.started == process.started)
}

/// Kills those that still live. They cannot clean up after themselves, so ask politely before.
pub(crate) fn kill(processes: &[Process]) {
    for process in processes {
        if let (true, Some(pid)) = (lives(process), Pid::from_raw(process.pid)) {
            // It may have ended since: that is what we want.
            kill_process(pid, Signal::KILL).ok();
        }
    }
}

/// Tells those that run this program to end.
pub(crate) fn tell(processes: &[Process], program: &Path) {
    let runs = |process: &&Process| {
        let exe = fs::read_link(format!("/proc/{}/exe", process.pid));
        exe.is_ok_and(|exe| exe == program) && lives(process)
    };
    for pid in processes.iter().filter(runs).filter_map(|process| Pid::from_raw(process.pid)) {
        kill_process(pid, Signal::TERM).ok();
    }
}

fn read(pid: i32) -> Option<Process> {
    parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The line is `pid (name) state parent ...`, start time at place 22 (`proc_pid_stat(5)`). The name may hold spaces
/// and parentheses, so what follows the last one counts.
fn parse(pid: i32, line: &str) -> Option<Process> {
    let mut fields = line.rsplit_once(')')?.1.split_ascii_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some(Process { pid, parent, started })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_process_does_not_confuse_the_fields() {
        let line = "7 (a) b (c) S 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(parse(7, line), Some(Process { pid: 7, parent: 3, started: 4711 }));
    }

    #[test]
    fn a_zombie_is_no_process_any_more() {
        assert_eq!(parse(7, "7 (x) Z 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0"), None);
    }
}
