//! Detects a process that has begun to end. A killed process closes its sockets before its parent can wait
//! for its end; on a busy machine the difference may be milliseconds. Never blocks.

use procfs::process::{Process, StatFlags};

/// Returns whether a process is exiting, a zombie, or gone; as long as it is not, its files are open.
/// `None` if `/proc` does not show it. Call this only before the parent reaps the process, because the pid
/// may be reused later.
///
/// Source: `do_exit()` of the kernel sets the flag before it closes files; `proc(5)`, field 9 of
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

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

    /// Returns whether its end is observed before it is reaped.
    fn is_seen_to_end(pid: u32) -> bool {
        (0..1_000_000).any(|_| {
            std::thread::yield_now();
            is_ending(pid) == Some(true)
        })
    }
}
