//! What llama-warden itself holds: memory of its programs, files and threads, recorded as it records those of llama-servers.

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

/// More files or threads than at first: some are open for a moment.
const SLACK: usize = 12;

/// Something whose memory is followed.
struct Series {
    file: File,
    begun: Instant,
    /// Requests that had ended before.
    before: u64,
    readings: usize,
}

/// Of one moment.
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

/// All recordings of a soak.
pub(crate) struct Readings {
    folder: PathBuf,
    /// One program serves from beginning to end.
    one: bool,
    begun: Instant,
    series: BTreeMap<String, Series>,
    /// Files and threads of all programs, where one serves and none is on its way out: beside the first one, unless it is that.
    held: Vec<(usize, Held)>,
    /// The first and the last memory in bytes, and the most.
    pub(crate) memory: Option<(u64, u64, u64)>,
}

impl Readings {
    pub(crate) fn new(folder: PathBuf, one: bool) -> Result<Self, Trouble> {
        std::fs::create_dir_all(&folder)?;
        let (begun, series) = (Instant::now(), BTreeMap::new());
        Ok(Self { folder, one, begun, series, held: Vec::new(), memory: None })
    }

    /// For how long it goes on.
    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// The recordings with at least so many readings.
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

    /// Copies all recordings.
    pub(crate) fn keep(&self, folder: &Path) -> Outcome {
        std::fs::create_dir_all(folder)?;
        for name in self.series.keys() {
            std::fs::copy(self.path(name), folder.join(format!("{name}.jsonl")))?;
        }
        Ok(())
    }

    /// Reads all programs of ours, once.
    pub(crate) fn take(&mut self, instance: &Instance, progress: &Progress) {
        let programs = instance.programs();
        // What is being forked is a copy of us until it is a llama-server.
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
        // A reading that could not be written is one less.
        series.readings += usize::from(series.file.write_all(line.as_bytes()).is_ok());
    }

    /// Few of the last third are hardly more than few of the first, within each start.
    pub(crate) fn files_and_threads_are_steady(&self) -> Outcome {
        let starts: std::collections::BTreeSet<usize> = self.held.iter().map(|(start, _)| *start).collect();
        for start in starts {
            let all: Vec<Held> =
                self.held.iter().filter(|(of, _)| *of == start).map(|(_, held)| *held).collect();
            let third = all.len() / 3;
            if third < 3 {
                continue;
            }
            // Not the fewest: the second program of a start has few for a moment, when it is the first that comes after another.
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
