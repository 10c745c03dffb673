//! Facts from the kernel: CPU affinity, CPU time, memory and system calls of processes.

use std::path::Path;
use std::process::{Command, Stdio};

use procfs::process::Process;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};
use warden_rig::{Context as _, Trouble};

pub(crate) const PROXY: usize = 0;
pub(crate) const LOAD: usize = 1;

/// Moves all threads of a process to one CPU; new threads inherit it.
pub(crate) fn pin(pid: i32, cpu: usize) -> Result<(), Trouble> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    for task in Process::new(pid)?.tasks()?.flatten() {
        let thread = Pid::from_raw(task.tid).context("a thread without a number")?;
        // The thread may have ended.
        let _gone = sched_setaffinity(Some(thread), &cpus);
    }
    Ok(())
}

/// Gives this process priority over all ordinary ones.
pub(crate) fn real_time() -> Result<(), Trouble> {
    let pid = std::process::id().to_string();
    let done = Command::new("chrt").args(["-f", "-a", "-p", "1", &pid]).status()?;
    if done.success() { Ok(()) } else { Err(Trouble::new("chrt: not permitted")) }
}

pub(crate) fn cpu_seconds(pids: &[i32]) -> Result<f64, Trouble> {
    let mut nanoseconds: u64 = 0;
    for pid in pids {
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).context(format!("process {pid}"))? {
            let schedstat = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
            nanoseconds += schedstat.split(' ').next().and_then(|time| time.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(std::time::Duration::from_nanos(nanoseconds).as_secs_f64())
}

/// Returns the proportional memory of these processes, in MiB.
pub(crate) fn pss_mib(pids: &[i32]) -> Result<f64, Trouble> {
    let mut bytes: u64 = 0;
    for pid in pids {
        let rollup = Process::new(*pid)?.smaps_rollup()?;
        let maps = rollup.memory_map_rollup.iter();
        bytes += maps.filter_map(|map| map.extension.map.get("Pss")).sum::<u64>();
    }
    Ok(mib(bytes))
}

/// Returns the peak resident memory of these processes since [`forget_peak`], in MiB.
pub(crate) fn peak_mib(pids: &[i32]) -> Result<f64, Trouble> {
    let mut kib: u64 = 0;
    for pid in pids {
        kib += Process::new(*pid)?.status()?.vmhwm.unwrap_or(0);
    }
    Ok(mib(kib * 1024))
}

pub(crate) fn forget_peak(pids: &[i32]) -> Result<(), Trouble> {
    for pid in pids {
        std::fs::write(format!("/proc/{pid}/clear_refs"), "5").context("clear_refs")?;
    }
    Ok(())
}

pub(crate) fn family(pid: i32) -> Vec<i32> {
    let mut all = vec![pid];
    let mut at = 0;
    while let Some(parent) = all.get(at) {
        all.extend(warden_rig::process::children_of(*parent).iter().map(|child| child.pid));
        at += 1;
    }
    all
}

#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark are far below 2^52")]
pub(crate) fn float(number: u64) -> f64 {
    number as f64
}

fn mib(bytes: u64) -> f64 {
    float(bytes) / 1024.0 / 1024.0
}

pub(crate) fn has(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|path| path.join(program).exists())
}

pub(crate) struct Strace {
    child: std::process::Child,
    report: std::path::PathBuf,
}

impl Strace {
    /// Attaches to the processes; returns once every call will be counted.
    pub(crate) fn attach(pids: &[i32], folder: &Path) -> Result<Self, Trouble> {
        let report = folder.join("strace.txt");
        let words = folder.join("strace.log");
        let mut command = Command::new("strace");
        command.args(["-f", "-c", "-o"]).arg(&report);
        for pid in pids {
            command.arg("-p").arg(pid.to_string());
        }
        let child = command.stdin(Stdio::null()).stderr(std::fs::File::create(&words)?).spawn()?;
        let mut strace = Self { child, report };
        for _ in 0..1000 {
            // strace prints a line per process once it holds all its threads.
            let said = std::fs::read_to_string(&words)?;
            if said.matches("attached").count() >= pids.len() {
                return Ok(strace);
            }
            if strace.child.try_wait()?.is_some() {
                return Err(Trouble::new(format!("strace: {said}")));
            }
            pause();
        }
        Err(Trouble::new("strace does not attach"))
    }

    /// Detaches; returns calls by name, the most frequent first.
    pub(crate) fn counts(&mut self) -> Result<Vec<(String, u64)>, Trouble> {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::INT)?;
        }
        self.child.wait()?;
        let report = std::fs::read_to_string(&self.report)?;
        let mut counts = Vec::new();
        for line in report.lines() {
            // % time, seconds, usecs/call, calls, [errors,] name
            let words: Vec<&str> = line.split_whitespace().collect();
            let (Some(share), Some(calls), Some(name)) = (words.first(), words.get(3), words.last()) else {
                continue;
            };
            if let (Ok(_), Ok(calls)) = (share.parse::<f64>(), calls.parse::<u64>())
                && *name != "total"
            {
                counts.push(((*name).to_owned(), calls));
            }
        }
        counts.sort_by_key(|(_, calls)| std::cmp::Reverse(*calls));
        Ok(counts)
    }
}

impl Drop for Strace {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Sleeps for 2 ms, without a runtime.
pub(crate) fn pause() {
    let moment = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    let _woken = rustix::thread::nanosleep(&moment);
}
