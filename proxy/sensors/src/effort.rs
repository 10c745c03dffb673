//! The work done so far by a process and its relatives: CPU time, bytes read and written.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use procfs::process::Process;
use warden_policies::standstill::ProcessActivity;

use crate::host::{PROC, group_members};

/// Sums the work of the process group that `leader` leads and of `others` since each process began; `None`
/// if it cannot be read for one of them. The work of a child process is included once that child is reaped.
/// The number of output bytes is always 0, because it is not known here.
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
    let (stat, io) = (process.stat().ok()?, process.io().ok()?);
    let of_children = u64::try_from(stat.cutime.saturating_add(stat.cstime)).unwrap_or(0);
    let ticks = stat.utime.saturating_add(stat.stime).saturating_add(of_children);
    Some(ProcessActivity {
        cpu: Duration::from_millis(ticks.saturating_mul(1000) / procfs::ticks_per_second().max(1)),
        read: io.rchar.saturating_add(io.read_bytes),
        written: io.wchar,
        output: 0,
    })
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
        // The first reading may have been made while it was still reading its own program.
        assert!(now.written - before.written == 5 && now.read - before.read >= 5, "{before:?} {now:?}");
        drop(child);
        assert_eq!(effort(id, [id]), None);
    }
}
