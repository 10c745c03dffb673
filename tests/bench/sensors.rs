//! Measures the cost of watching eight backends: CPU time of the reading thread, as a share of one core at
//! the product's interval. The aim is less than half a percent.
//!
//! `cargo bench -p warden-tests --bench sensors`: the backends are children with as many threads as a
//! llama-server. With an NVIDIA driver its library is read; otherwise `tests/fake-nvml` lists the children on
//! two GPUs, so that everything but the driver's own work is measured.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use warden_rig::{Context as _, FakeGpu, FakeNvml, Trouble};
use warden_sensors::gpu::GpuSources;
use warden_sensors::{GpuSensors, cgroup_memory, host_confirmed, host_memory, host_totals};

const BACKENDS: usize = 8;

/// Threads of a busy llama-server on a machine with 16 cores.
const THREADS: usize = 40;

const ROUNDS: u32 = 200;

/// Body of a child: holds memory and threads until its standard input ends.
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn idle() -> Result<(), Trouble> {
    let memory = vec![1_u8; 64 << 20];
    for _ in 1..THREADS {
        std::thread::spawn(|| {
            loop {
                std::thread::park();
            }
        });
    }
    std::io::stdin().read_to_end(&mut Vec::new())?;
    drop(std::hint::black_box(memory));
    Ok(())
}

struct Backends(Vec<Child>);

impl Backends {
    fn start() -> Result<Self, Trouble> {
        let mut all = Self(Vec::new());
        for _ in 0..BACKENDS {
            let mut command = Command::new(std::env::current_exe()?);
            all.0.push(command.arg("idle").process_group(0).stdin(Stdio::piped()).spawn()?);
        }
        let threads = |pid| std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        while all.pids().any(|pid| threads(pid) < THREADS) {
            std::thread::yield_now();
        }
        Ok(all)
    }

    fn pids(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(Child::id)
    }
}

impl Drop for Backends {
    fn drop(&mut self) {
        for child in &mut self.0 {
            drop(child.stdin.take());
            let _ended = child.wait();
        }
    }
}

fn cpu_time() -> Result<Duration, Trouble> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = text.split_ascii_whitespace().next().context("schedstat is empty")?;
    Ok(Duration::from_nanos(nanoseconds.parse().context("schedstat")?))
}

/// Opens the driver's library, or the simulated one; also returns its name.
fn gpus(folder: &Path, pids: &[u32]) -> Result<(GpuSensors, &'static str), Trouble> {
    let real = GpuSensors::open();
    if !real.devices().is_empty() {
        return Ok((real, "the driver's"));
    }
    let processes = pids.iter().map(|pid| (*pid, 64 << 20)).collect();
    let gpu = FakeGpu { total: 80 << 30, used: 1 << 30, processes, ..FakeGpu::default() };
    let fake = FakeNvml::new(folder)?;
    fake.say(&[gpu.clone(), gpu])?;
    let nvml = vec![fake.library().into_os_string()];
    Ok((GpuSensors::open_at(GpuSources { nvml, ..GpuSources::default() }), "fake"))
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn report(
    what: &str,
    every: Duration,
    mut round: impl FnMut() -> Result<(), Trouble>,
) -> Result<(), Trouble> {
    round()?;
    let before = cpu_time()?;
    for _ in 0..ROUNDS {
        round()?;
    }
    let each = cpu_time()?.saturating_sub(before) / ROUNDS;
    let share = 100.0 * each.as_secs_f64() / every.as_secs_f64();
    println!("| {what} | {:.0} | {:.0} | {share:.4} |", every.as_secs_f64(), each.as_secs_f64() * 1e6);
    Ok(())
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn main() -> Result<(), Trouble> {
    if std::env::args().nth(1).as_deref() == Some("idle") {
        return idle();
    }
    let folder = tempfile::tempdir()?;
    let backends = Backends::start()?;
    let pids: Vec<u32> = backends.pids().collect();
    let (gpus, library) = gpus(folder.path(), &pids)?;
    let every = warden_policies::defaults().sensors.interval;
    let confirm = warden_policies::defaults().sensors.confirm_interval;
    println!(
        "{BACKENDS} backends with {THREADS} threads each; {} GPUs by {library} library",
        gpus.devices().len()
    );
    println!("| what is read | every s | CPU time µs | % of a core |");
    println!("|---|---|---|---|");
    let host = || pids.iter().try_for_each(|pid| host_memory(*pid).map(|_| ()).context("host memory"));
    let vram = || {
        let read = gpus.read();
        // In a container the driver may report nothing, at the same cost.
        for pid in &pids {
            drop(std::hint::black_box(read.group_vram(*pid)));
        }
        Ok(())
    };
    let group = || pids.iter().try_for_each(|pid| cgroup_memory(*pid).map(|_| ()).context("control group"));
    report("host memory", every, host)?;
    report("VRAM", every, vram)?;
    report("control groups", every, group)?;
    report("all of these, and the host's totals", every, || {
        host()?;
        vram()?;
        group()?;
        host_totals().map(|_| ()).context("totals")
    })?;
    report("confirmation, only in doubt", confirm, || {
        pids.iter().try_for_each(|pid| host_confirmed(*pid).map(|_| ()).context("confirmation"))
    })
}
