//! CPU time, I/O and run state of a process. No function here blocks.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use procfs::process::{Process, StatFlags};
use warden_policies::standstill::ProcessActivity;

use crate::host::{PROC, group_members};

/// Sums the work of the process group that `leader` leads and of `others`, each since the start of its
/// process; `None` if one of them cannot be read. A child process counts once it is reaped. `output` is
/// always 0: log output is not visible here.
///
/// Source: `proc(5)`, fields 14 to 17 of `/proc/PID/stat`, and `rchar`, `wchar` and `read_bytes` of
/// `/proc/PID/io`. Pages of mapped files are only in `read_bytes`, data already cached only in `rchar`.
pub fn effort(leader: u32, others: impl IntoIterator<Item = u32>) -> Option<ProcessActivity> {
    let others = others.into_iter().filter_map(|pid| i32::try_from(pid).ok());
    let all: BTreeSet<i32> = group_members(Path::new(PROC), leader).into_iter().chain(others).collect();
    let mut sum = ProcessActivity::default();
    for pid in all {
        let one = process_effort(pid)?;
        sum.cpu = sum.cpu.saturating_add(one.cpu);
        sum.read = sum.read.saturating_add(one.read);
        sum.written = sum.written.saturating_add(one.written);
    }
    Some(sum)
}

fn process_effort(pid: i32) -> Option<ProcessActivity> {
    let process = Process::new(pid).ok()?;
    let stat = process.stat().ok()?;
    let io = process.io().ok()?;
    let of_children = u64::try_from(stat.cutime.saturating_add(stat.cstime)).unwrap_or(0);
    let ticks = stat.utime.saturating_add(stat.stime).saturating_add(of_children);
    Some(ProcessActivity {
        cpu: Duration::from_millis(ticks.saturating_mul(1000) / procfs::ticks_per_second().max(1)),
        read: io.rchar.saturating_add(io.read_bytes),
        written: io.wchar,
        output: 0,
    })
}

/// Returns whether a process is exiting, a zombie, or gone; `None` if `/proc` cannot be read. On a busy
/// machine, a killed process closes its sockets some milliseconds before its parent can reap it. Call this
/// before the parent reaps the process: later, another process may have the pid.
///
/// Source: `do_exit()` of the kernel sets `PF_EXITING` before it closes files; `proc(5)`, field 9 of
/// `/proc/PID/stat`.
pub fn is_ending(pid: u32) -> Option<bool> {
    let process = Process::new(i32::try_from(pid).ok()?);
    match process.and_then(|process| process.stat()) {
        Ok(stat) => {
            let flags = StatFlags::from_bits_truncate(stat.flags);
            Some(flags.contains(StatFlags::PF_EXITING) || stat.state == 'Z' || stat.state == 'X')
        }
        Err(procfs::ProcError::NotFound(_)) => Some(true),
        Err(_) => None,
    }
}

/// State of a process that shows whether it can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessRunState {
    /// True if a signal or a debugger has stopped the process.
    pub stopped: bool,
    /// Number of page faults since the process started that read a page from disk.
    pub major_faults: u64,
}

/// Reads whether a process can run; `None` if the process is gone or `/proc` does not show it.
///
/// Source: `proc(5)`, fields 3 and 12 of `/proc/PID/stat`.
pub fn process_run_state(pid: u32) -> Option<ProcessRunState> {
    let stat = Process::new(i32::try_from(pid).ok()?).and_then(|process| process.stat()).ok()?;
    Some(ProcessRunState { stopped: matches!(stat.state, 'T' | 't'), major_faults: stat.majflt })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    /// Kills its process on drop, so that none survives a failed test.
    struct KilledChild(std::process::Child);

    impl Drop for KilledChild {
        fn drop(&mut self) {
            drop(self.0.kill().and_then(|()| self.0.wait()));
        }
    }

    #[test]
    fn what_a_process_writes_reads_and_computes_is_seen_and_one_that_is_gone_has_no_effort() {
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg("read x; echo $x; while :; do :; done");
        let mut child = KilledChild(shell.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
        let id = child.0.id();
        let before = effort(id, []).unwrap();
        child.0.stdin.take().unwrap().write_all(b"four\n").unwrap();
        let now = std::iter::repeat_with(|| effort(id, []).unwrap())
            .take(1_000_000)
            .find(|now| now.cpu >= before.cpu + Duration::from_millis(50))
            .unwrap();
        // The first reading may have been made while the process was still reading its own program.
        assert!(now.written - before.written == 5 && now.read - before.read >= 5, "{before:?} {now:?}");
        drop(child);
        assert_eq!(effort(id, [id]), None);
    }

    #[test]
    fn a_process_that_was_killed_is_ending_until_it_is_reaped_and_one_that_runs_is_not() {
        let mut child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        assert_eq!(is_ending(child.id()), Some(false));
        assert_eq!(is_ending(std::process::id()), Some(false));
        child.kill().unwrap();
        assert!(is_seen_to_end(child.id()), "it is never seen to end");
        child.wait().unwrap();
        assert_eq!(is_ending(child.id()), Some(true), "gone");
    }

    fn is_seen_to_end(pid: u32) -> bool {
        (0..1_000_000).any(|_| {
            std::thread::yield_now();
            is_ending(pid) == Some(true)
        })
    }

    #[test]
    fn a_stopped_process_is_seen_to_be_stopped_and_one_that_is_gone_is_nothing() {
        let mut child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        assert_eq!(process_run_state(child.id()).map(|standing| standing.stopped), Some(false));
        let kill = |signal: &str| Command::new("/bin/kill").args([signal, &child.id().to_string()]).status();
        kill("-STOP").unwrap();
        let stopped = |wanted: bool| {
            (0..1_000_000).any(|_| {
                std::thread::yield_now();
                process_run_state(child.id()).is_some_and(|standing| standing.stopped == wanted)
            })
        };
        assert!(stopped(true), "it is never seen to stop");
        kill("-CONT").unwrap();
        assert!(stopped(false), "it is never seen to go on");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(process_run_state(child.id()), None);
    }
}
