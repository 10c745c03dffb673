//! The exact host memory of a backend, from `smaps_rollup`. The kernel walks page tables for it, so it is
//! read only to confirm a verdict. The faster counters that [`crate::host`] reads are kept per CPU and may be
//! off by some MiB.

use std::path::Path;

use procfs::ProcError;
use procfs::process::Process;

use crate::error::SensorError;
use crate::host;

/// Exact host memory of a process group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostConfirmed {
    /// `Private_Dirty`: written pages that are not shared.
    pub private_dirty: u64,
    /// `Pss_Anon`: anonymous pages, shared ones proportionally; `None` before Linux 5.5.
    pub anon: Option<u64>,
    /// `Swap`: swapped pages.
    pub swap: u64,
}

impl HostConfirmed {
    /// Returns the bytes to compare with [`warden_policies::sample::HostMemory::charged`].
    pub fn charged(self) -> u64 {
        self.anon.unwrap_or(self.private_dirty).saturating_add(self.swap)
    }

    fn add(&mut self, other: Self) {
        self.private_dirty = self.private_dirty.saturating_add(other.private_dirty);
        self.anon = self.anon.zip(other.anon).map(|(one, more)| one.saturating_add(more));
        self.swap = self.swap.saturating_add(other.swap);
    }
}

/// Reads the exact host memory of the group that `leader` leads, without members that end meanwhile. Call
/// this at most once a minute: it takes milliseconds per GiB of resident memory and slows the process down.
///
/// # Errors
///
/// The leader itself cannot be read, or the kernel has no `smaps_rollup` (Linux 4.14 has it).
pub fn host_confirmed(leader: u32) -> Result<HostConfirmed, SensorError> {
    let pid = i32::try_from(leader).map_err(|_| SensorError::Ended { pid: leader })?;
    let mut sum = read_rollup(pid)?;
    for member in
        host::group_members(Path::new(host::PROC), leader).into_iter().filter(|member| *member != pid)
    {
        if let Ok(more) = read_rollup(member) {
            sum.add(more);
        }
    }
    Ok(sum)
}

/// Reads the exact host memory of these processes, skipping ended ones; `None` if none can be read.
pub fn host_confirmed_of(pids: impl IntoIterator<Item = u32>) -> Option<HostConfirmed> {
    let read = |pid: u32| read_rollup(i32::try_from(pid).ok()?).ok();
    pids.into_iter().filter_map(read).reduce(|mut sum, more| {
        sum.add(more);
        sum
    })
}

fn read_rollup(pid: i32) -> Result<HostConfirmed, SensorError> {
    let what = || format!("/proc/{pid}/smaps_rollup");
    let rollup = Process::new(pid).and_then(|process| process.smaps_rollup());
    let rollup = rollup.map_err(|source| match source {
        ProcError::NotFound(_) => SensorError::Ended { pid: pid.unsigned_abs() },
        source => SensorError::Proc { what: what(), source },
    })?;
    let fields = rollup.memory_map_rollup.0.first().map(|all| &all.extension.map);
    let field = |name: &str| fields.and_then(|fields| fields.get(name).copied());
    Ok(HostConfirmed {
        // A missing field means an empty file: the process is ending.
        private_dirty: field("Private_Dirty").ok_or(SensorError::Ended { pid: pid.unsigned_abs() })?,
        anon: field("Pss_Anon"),
        // Only a kernel built without swap omits the field.
        swap: field("Swap").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_figure_agrees_with_the_counters_to_some_mib() {
        let held = vec![1_u8; 64 << 20];
        let me = std::process::id();
        let exact = read_rollup(i32::try_from(me).unwrap()).unwrap();
        let counted = crate::host_memory(me).unwrap().charged();
        assert!(exact.charged() > 64 << 20, "{exact:?}");
        assert!(exact.charged().abs_diff(counted) < 32 << 20, "{exact:?} {counted}");
        drop(std::hint::black_box(held));
    }

    #[test]
    fn members_of_the_group_are_counted_and_a_missing_process_is_an_error() {
        use std::io::{BufRead as _, BufReader};
        use std::os::unix::process::CommandExt as _;
        use std::process::{Command, Stdio};
        let mut shell = Command::new("/bin/sh")
            .args(["-c", "exec 3<&0; sh -c 'echo ready; read x' <&3 & wait"])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let both = host_confirmed(shell.id()).unwrap();
        let one = read_rollup(i32::try_from(shell.id()).unwrap()).unwrap();
        assert!(both.private_dirty > one.private_dirty, "{both:?} {one:?}");
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert!(host_confirmed(shell.id()).is_err());
    }

    #[test]
    fn where_one_member_lacks_the_newer_field_the_sum_uses_the_older_one() {
        let mut sum = HostConfirmed { private_dirty: 10, anon: Some(8), swap: 1 };
        sum.add(HostConfirmed { private_dirty: 5, anon: None, swap: 2 });
        assert_eq!((sum.anon, sum.charged()), (None, 18));
    }
}
