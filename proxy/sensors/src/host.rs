//! Host memory of a process group: `RssAnon`, `VmSwap` and `VmRSS` of `/proc/PID/status`, summed.
//!
//! Finds the members from the leader downwards (`/proc/PID/task/TID/children`), at the cost of one small file
//! per thread. On a kernel without those files, scans all processes. Misses a member whose parent has ended;
//! llama-server creates none.

use std::collections::BTreeSet;
use std::path::Path;

use procfs::process::{Process, Status};
use procfs::{ProcError, ProcResult};
use warden_policies::sample::HostMemory;

use crate::error::SensorError;

const KIB: u64 = 1024;
pub(crate) const PROC: &str = "/proc";

/// Reads the host memory of the process group that `leader` leads, without members that end meanwhile.
///
/// # Errors
///
/// The leader itself cannot be read.
pub fn host_memory(leader: u32) -> Result<HostMemory, SensorError> {
    let what = || format!("/proc/{leader}/status");
    let pid = i32::try_from(leader).map_err(|_| SensorError::Ended { pid: leader })?;
    let process = Process::new(pid).map_err(|source| read_error(leader, source))?;
    let status = process.status().map_err(|source| read_error(leader, source))?;
    if is_dead(&status) {
        return Err(SensorError::Ended { pid: leader });
    }
    let mut sum =
        memory_from_status(&status).ok_or_else(|| SensorError::NoField { what: what(), field: "RssAnon" })?;
    for member in members(Path::new(PROC), &process) {
        let status = Process::new(member).and_then(|process| process.status());
        if let Some(more) = status.ok().as_ref().and_then(memory_from_status) {
            sum = sum.plus(more);
        }
    }
    Ok(sum)
}

fn read_error(leader: u32, source: ProcError) -> SensorError {
    match source {
        ProcError::NotFound(_) => SensorError::Ended { pid: leader },
        source => SensorError::Proc { what: format!("/proc/{leader}/status"), source },
    }
}

fn is_dead(status: &Status) -> bool {
    status.state.starts_with(['Z', 'X'])
}

/// Sums the host memory of these processes, skipping ended ones; `None` if all have ended.
pub fn host_memory_of(pids: impl IntoIterator<Item = u32>) -> Option<HostMemory> {
    let memory = |pid: u32| {
        let process = Process::new(i32::try_from(pid).ok()?);
        memory_from_status(&process.and_then(|process| process.status()).ok()?)
    };
    pids.into_iter().filter_map(memory).reduce(HostMemory::plus)
}

/// Returns `None` for a zombie, which has no memory.
fn memory_from_status(status: &Status) -> Option<HostMemory> {
    let kib = |field: Option<u64>| field.map(|n| n.saturating_mul(KIB));
    Some(HostMemory {
        anon: kib(status.rssanon)?,
        // Only a kernel built without swap omits the field.
        swap: kib(status.vmswap).unwrap_or(0),
        rss: kib(status.vmrss)?,
    })
}

/// Lists the process group of `leader`, including the leader; empty if the leader is gone.
pub(crate) fn group_members(proc: &Path, leader: u32) -> Vec<i32> {
    let Some(process) = i32::try_from(leader).ok().and_then(|pid| open_process(proc, pid).ok()) else {
        return Vec::new();
    };
    let mut all = vec![process.pid()];
    all.extend(members(proc, &process));
    all
}

fn open_process(proc: &Path, pid: i32) -> ProcResult<Process> {
    Process::new_with_root(proc.join(pid.to_string()))
}

fn members(proc: &Path, leader: &Process) -> BTreeSet<i32> {
    let group = leader.pid();
    descendants(proc, leader).unwrap_or_else(|_| scan_group(proc, group))
}

/// Returns the descendants in the leader's group. A child in another group ends the search there.
fn descendants(proc: &Path, leader: &Process) -> ProcResult<BTreeSet<i32>> {
    let mut found = BTreeSet::new();
    let mut unread = children(leader)?;
    while let Some(pid) = unread.pop() {
        let Ok(process) = open_process(proc, pid) else { continue };
        let in_group = process.stat().is_ok_and(|stat| stat.pgrp == leader.pid());
        if in_group && found.insert(pid) {
            unread.extend(children(&process).unwrap_or_default());
        }
    }
    Ok(found)
}

pub(crate) fn children(process: &Process) -> ProcResult<Vec<i32>> {
    let pids = |children: Vec<u32>| children.into_iter().filter_map(|pid| i32::try_from(pid).ok());
    let leader = process.task_main_thread()?;
    // If this fails, the kernel lacks the file. Later errors are ignored: a thread may have ended.
    let mut all: Vec<i32> = pids(leader.children()?).collect();
    for task in process.tasks()?.filter_map(Result::ok).filter(|task| task.tid != leader.tid) {
        all.extend(task.children().map(pids).into_iter().flatten());
    }
    Ok(all)
}

fn scan_group(proc: &Path, group: i32) -> BTreeSet<i32> {
    let Ok(all) = procfs::process::all_processes_with_root(proc) else { return BTreeSet::new() };
    all.filter_map(Result::ok)
        .filter(|process| process.pid() != group)
        .filter(|process| process.stat().is_ok_and(|stat| stat.pgrp == group))
        .map(|process| process.pid())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn shell(script: &str) -> (Child, String) {
        let mut child = Command::new("/bin/sh")
            .args(["-c", script])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (child, line)
    }

    fn end(mut child: Child) {
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn our_own_memory_is_read_and_grows_with_what_we_touch() {
        let (child, _) = shell("echo ready; read x");
        let alone = host_memory(child.id()).unwrap();
        assert!(alone.anon > 0 && alone.rss >= alone.anon, "{alone:?}");
        end(child);
    }

    #[test]
    fn members_of_the_group_are_counted_and_found_in_both_ways() {
        let (child, line) = shell("exec 3<&0; sh -c 'echo $$; read x' <&3 & wait");
        let member: i32 = line.trim().parse().unwrap();
        let leader = Process::new(i32::try_from(child.id()).unwrap()).unwrap();
        let proc = Path::new(PROC);
        assert_eq!(descendants(proc, &leader).unwrap(), BTreeSet::from([member]));
        assert_eq!(scan_group(proc, leader.pid()), BTreeSet::from([member]));
        let both = host_memory(child.id()).unwrap();
        let one = memory_from_status(&leader.status().unwrap()).unwrap();
        assert!(both.anon > one.anon, "{both:?} {one:?}");
        end(child);
    }

    #[test]
    fn a_process_that_has_ended_is_an_error_and_not_a_zero() {
        let (mut child, _) = shell("echo ready; read x");
        let pid = child.id();
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        // A zombie: not reaped yet.
        while Process::new(i32::try_from(pid).unwrap()).unwrap().stat().unwrap().state != 'Z' {
            std::thread::yield_now();
        }
        assert!(matches!(host_memory(pid), Err(SensorError::Ended { .. })));
        child.wait().unwrap();
        assert!(matches!(host_memory(pid), Err(SensorError::Ended { .. })));
    }
}
