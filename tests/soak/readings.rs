//! Records memory, files and threads of llama-warden's processes as it records those of llama-servers.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use procfs::process::Process;
use tokio::time::Instant;
use warden_policies::sample::{BackendSample, HostMemory, SampleEdge, WorkDone};
use warden_policies::trace;
use warden_rig::process::ProcessId;
use warden_rig::{Outcome, Trouble};

use crate::clients::Progress;
use crate::instance::Instance;

/// Files or threads above the early level that are tolerated, because some are open for a moment.
const SLACK: usize = 12;

/// Process, or sum of processes, whose memory is recorded.
struct Series {
    file: File,
    begun: Instant,
    before: u64,
    readings: usize,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    anon: u64,
    rss: u64,
    swap: u64,
    pub(crate) files: usize,
    pub(crate) threads: usize,
}

impl Held {
    fn of(process: ProcessId) -> Option<Self> {
        let process = Process::new(process.pid).ok()?;
        let status = process.status().ok()?;
        let bytes = |kib: Option<u64>| kib.unwrap_or_default() * 1024;
        Some(Self {
            anon: bytes(status.rssanon),
            rss: bytes(status.vmrss),
            swap: bytes(status.vmswap),
            files: process.fd_count().ok()?,
            threads: usize::try_from(status.threads).ok()?,
        })
    }

    fn and(self, other: Self) -> Self {
        Self {
            anon: self.anon + other.anon,
            rss: self.rss + other.rss,
            swap: self.swap + other.swap,
            files: self.files + other.files,
            threads: self.threads + other.threads,
        }
    }
}

pub(crate) struct Readings {
    folder: PathBuf,
    /// True if one program serves from beginning to end.
    one: bool,
    begun: Instant,
    series: BTreeMap<String, Series>,
    /// Number of starts, and files and threads of the serving program, when no other program is ending.
    held: Vec<(usize, Held)>,
    /// First, last and largest memory in bytes.
    pub(crate) memory: Option<(u64, u64, u64)>,
}

impl Readings {
    pub(crate) fn new(folder: PathBuf, one: bool) -> Result<Self, Trouble> {
        std::fs::create_dir_all(&folder)?;
        let (begun, series) = (Instant::now(), BTreeMap::new());
        Ok(Self { folder, one, begun, series, held: Vec::new(), memory: None })
    }

    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(crate) fn with(&self, readings: usize) -> Vec<PathBuf> {
        let long = self.series.iter().filter(|(_, series)| series.readings >= readings);
        long.map(|(name, _)| self.path(name)).collect()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.jsonl"))
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn keep(&self, folder: &Path) -> Outcome {
        std::fs::create_dir_all(folder)?;
        for name in self.series.keys() {
            std::fs::copy(self.path(name), folder.join(format!("{name}.jsonl")))?;
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, instance: &Instance, progress: &Progress) {
        let programs = instance.programs();
        // A forked child is a copy of llama-warden until it becomes a llama-server.
        if self.one && programs.len() > 1 {
            return;
        }
        let (done, start) = (progress.all(), instance.starts);
        let mut sum = Held::default();
        for (index, program) in programs.iter().enumerate() {
            let Some(held) = Held::of(*program) else { return };
            sum = sum.and(held);
            let name = match (index, programs.len()) {
                (0, 1) => continue,
                (0, _) => format!("root-{start}"),
                _ => format!("serving-{start}-{}", program.pid),
            };
            self.note(&name, held, done);
        }
        self.note("all", sum, done);
        self.note(&format!("instance-{start}"), sum, done);
        let (first, _, most) = self.memory.unwrap_or((sum.anon, 0, 0));
        self.memory = Some((first, sum.anon, most.max(sum.anon)));
        if programs.len() == if self.one { 1 } else { 2 } {
            self.held.push((start, sum));
        }
    }

    fn note(&mut self, name: &str, held: Held, done: u64) {
        if !self.series.contains_key(name) {
            let file = OpenOptions::new().create(true).append(true).open(self.path(name));
            let Ok(file) = file else { return };
            let series = Series { file, begun: Instant::now(), before: done, readings: 0 };
            self.series.insert(name.to_owned(), series);
        }
        let Some(series) = self.series.get_mut(name) else { return };
        let sample = BackendSample {
            at: series.begun.elapsed(),
            edge: SampleEdge::Tick,
            host: Some(HostMemory { anon: held.anon, swap: held.swap, rss: held.rss }),
            work: WorkDone { requests: done.saturating_sub(series.before), ..WorkDone::default() },
            in_flight: 1,
            vram: Vec::new(),
            pools: Vec::new(),
            largest_prompt: 0,
            reclaims: 0,
        };
        let mut line = trace::format_line(&sample);
        line.push('\n');
        // A reading that cannot be written is dropped.
        series.readings += usize::from(series.file.write_all(line.as_bytes()).is_ok());
    }

    /// Compares a low level of the last third with one of the first third, within each start.
    pub(crate) fn files_and_threads_are_steady(&self) -> Outcome {
        let starts: std::collections::BTreeSet<usize> = self.held.iter().map(|(start, _)| *start).collect();
        for start in starts {
            let all: Vec<Held> =
                self.held.iter().filter(|(of, _)| *of == start).map(|(_, held)| *held).collect();
            let third = all.len() / 3;
            if third < 3 {
                continue;
            }
            // The lowest level would mislead, because a new program has few files and threads for a moment.
            let few = |part: &[Held], of: fn(&Held) -> usize| {
                let mut all: Vec<usize> = part.iter().map(of).collect();
                all.sort_unstable();
                all.get(all.len() / 10).copied().unwrap_or_default()
            };
            for (what, of) in
                [("files", (|held| held.files) as fn(&Held) -> usize), ("threads", |held| held.threads)]
            {
                let (first, last) = (few(&all[..third], of), few(&all[all.len() - third..], of));
                crate::say(&format!("start {start}: {what}: {first} at first, {last} at last"));
                if last > first + SLACK {
                    return Err(Trouble::new(format!("{what} grow: {first} at first, {last} at last")));
                }
            }
        }
        Ok(())
    }
}
