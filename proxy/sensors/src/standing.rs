//! Detects a process that cannot run, because it is stopped or waits for pages of its memory from a disk.
//! Never blocks.

use procfs::process::Process;

/// Ability of a process to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessRunState {
    /// True if a signal or a debugger has stopped the process.
    pub stopped: bool,
    /// Number of page faults since the start of the process for which a page was read from a disk.
    pub major_faults: u64,
}

/// Reads the ability of a process to run; `None` if the process is gone or `/proc` does not show it.
///
/// Source: `proc(5)`, fields 3 and 12 of `/proc/PID/stat`.
pub fn process_run_state(pid: u32) -> Option<ProcessRunState> {
    let stat = Process::new(i32::try_from(pid).ok()?).and_then(|process| process.stat()).ok()?;
    Some(ProcessRunState { stopped: matches!(stat.state, 'T' | 't'), major_faults: stat.majflt })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

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
