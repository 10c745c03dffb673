//! Finds the descendants of a process in `/proc`, so that a cancelled build leaves none behind.
//!
//! A process group does not suffice: ninja runs each compiler in its own group, and a killed ninja leaves
//! them running. A process is identified by PID and start time, so that a reused PID is never signalled.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// A process, distinguished by start time from a later one with the same PID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescendantProcess {
    pid: i32,
    parent: i32,
    started: u64,
}

/// All live descendants of a process, without itself. Empty if `/proc` is unreadable.
pub(crate) fn descendants(root: i32) -> Vec<DescendantProcess> {
    let Ok(folders) = fs::read_dir("/proc") else { return Vec::new() };
    let mut children: HashMap<i32, Vec<DescendantProcess>> = HashMap::new();
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

/// Returns true while the process runs; a killed one still does for a moment.
pub(crate) fn is_running(process: &DescendantProcess) -> bool {
    read(process.pid).is_some_and(|now| now.started == process.started)
}

pub(crate) fn kill(processes: &[DescendantProcess]) {
    for process in processes {
        if let (true, Some(pid)) = (is_running(process), Pid::from_raw(process.pid)) {
            // An error means that the process has ended already.
            kill_process(pid, Signal::KILL).ok();
        }
    }
}

pub(crate) fn terminate(processes: &[DescendantProcess], program: &Path) {
    let runs = |process: &&DescendantProcess| {
        let exe = fs::read_link(format!("/proc/{}/exe", process.pid));
        exe.is_ok_and(|exe| exe == program) && is_running(process)
    };
    for pid in processes.iter().filter(runs).filter_map(|process| Pid::from_raw(process.pid)) {
        kill_process(pid, Signal::TERM).ok();
    }
}

fn read(pid: i32) -> Option<DescendantProcess> {
    parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses `pid (name) state parent ...` with the start time as field 22 (`proc_pid_stat(5)`). The name may
/// contain spaces and parentheses, so fields start after the last `)`.
fn parse(pid: i32, line: &str) -> Option<DescendantProcess> {
    let mut fields = line.rsplit_once(')')?.1.split_ascii_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some(DescendantProcess { pid, parent, started })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_process_does_not_confuse_the_fields() {
        let line = "7 (a) b (c) S 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(parse(7, line), Some(DescendantProcess { pid: 7, parent: 3, started: 4711 }));
    }

    #[test]
    fn a_zombie_is_no_process_any_more() {
        assert_eq!(parse(7, "7 (x) Z 3 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0"), None);
    }
}
