//! `diagnose --trace`: which call sites the growth comes from.
//!
//! ```text
//!   library ─ LD_PRELOAD ─> the server ─ PID.trace ─┐
//!   each reading of a leg ──────────────────────────┴─ snapshot ─┬─ counted against measured, reading by reading
//!                                                                └─ a third into the leg against its end: places
//! ```
//!
//! It only watches. Where the detector merely suspects a memory, though, handles or counted allocations that become more with every
//! request, and that take the memory with them, are evidence: then the verdict is that it leaks.

mod tell;

use std::path::PathBuf;

use serde::Serialize;
use tempfile::TempDir;
use warden_diagnose::{Outcome, Progress};
use warden_experiment::{Attribution, Finding, Settles, Trace, Workload};
use warden_policies::MemoryKind;
use warden_policies::growth::Verdict;
use warden_policies::sample::{HostMemory, Sample};
use warden_supervisor::Command;
use warden_tracer_reader::{
    Kind, Losses, Memory, Modules, Obstacle, Place, Snapshot, Symbols, VARIABLE, obstacle, places,
    write_library,
};

use crate::exit::Failure;
use crate::{out, private_temp};

/// Kinds of handles in a [`Trace`], and what they are called.
const HANDLES: [(Kind, &str); 2] =
    [(Kind::GraphExec, "live graph executables"), (Kind::Cublas, "cuBLAS handles")];
const HOST: [Kind; 3] = [Kind::Heap, Kind::Mapped, Kind::Pinned];
const DEVICE: [Kind; 3] = [Kind::Device, Kind::Pool, Kind::DeviceMapped];

/// What of one memory's growth is known in a leg.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Traced {
    memory: Memory,
    /// Whether the detector says that it grows.
    grows: bool,
    #[serde(flatten)]
    attribution: Attribution,
    /// Part of the growth that counted allocations make up, 0 to 1.
    explained: f64,
}

/// What a leg's call sites did.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LegTrace {
    workload: Workload,
    /// The same once more without the prompt cache.
    control: bool,
    /// Requests between the two snapshots that the places are compared by.
    requests: u64,
    /// All requests of the leg.
    answered: u64,
    memories: Vec<Traced>,
    places: Vec<Place>,
    /// The program's file, without its folder.
    program: String,
    /// Bytes between samples of the heap on average.
    interval: u64,
    /// Allocations since the server started whose end was not followed: they do not count as living.
    unfollowed: u64,
    /// Allocations since then that are in no count, because there are too many call sites.
    siteless: u64,
    /// Whether the program has an allocator of its own, so that blocks of the heap are not counted.
    own_heap: bool,
}

/// A moment of the leg under way.
#[derive(Debug)]
struct Moment {
    at: usize,
    requests: u64,
    snapshot: Snapshot,
}

/// Watches the legs of an experiment.
#[derive(Debug)]
pub(super) struct Tracing {
    folder: TempDir,
    library: PathBuf,
    readings: [Vec<Trace>; 2],
    kept: Vec<Moment>,
    every: usize,
    last: Option<Moment>,
    modules: Modules,
    symbols: Symbols,
    legs: Vec<LegTrace>,
    /// The program that is started, and what its file says against it.
    server: PathBuf,
    obstacle: Option<Obstacle>,
    /// Whether the leg under way had readings and no trace, and the legs of which that was all.
    silent: bool,
    untraced: Vec<Workload>,
}

impl Tracing {
    /// Prepares the library: the one that is carried, or another.
    pub(super) fn prepare(other: Option<&PathBuf>) -> Result<Self, Failure> {
        let failed = |what: &str, error: &std::io::Error| {
            Failure::hinted(format!("--trace: {what}: {error}"), "name a library with `--tracer PATH`")
        };
        let folder = private_temp::folder("llama-warden-trace-");
        let folder = folder.map_err(|error| failed("cannot make a folder", &error))?;
        let library = match other {
            Some(path) => std::path::absolute(path).and_then(std::fs::canonicalize),
            None => write_library(folder.path()),
        };
        let library = library.map_err(|error| failed("no library", &error))?;
        // The loader takes them for the ends of names, and goes on without a library that it cannot find.
        if library.to_string_lossy().contains([' ', ':', '\t', '\n']) {
            return Err(Failure::usage(
                format!("--trace: the loader cannot be told the path {}", library.display()),
                "use paths without blanks and colons: `--tracer PATH`, or TMPDIR for the library that is carried",
            ));
        }
        Ok(Self {
            folder,
            library,
            readings: [Vec::new(), Vec::new()],
            kept: Vec::new(),
            every: 1,
            last: None,
            modules: Modules::default(),
            symbols: Symbols::default(),
            legs: Vec::new(),
            server: PathBuf::new(),
            obstacle: None,
            silent: false,
            untraced: Vec::new(),
        })
    }

    /// Makes the server run with it. Says beforehand what will not work: a server of musl would not even start.
    pub(super) fn apply(&mut self, command: &mut Command) -> Result<(), Failure> {
        const PRELOAD: &str = "LD_PRELOAD";
        self.server = std::fs::canonicalize(&command.binary).unwrap_or_else(|_| command.binary.clone());
        self.obstacle = obstacle(&self.server);
        let (server, glibc) = (self.server.display(), "take a build that is linked with glibc 2.34 or newer");
        match self.obstacle {
            Some(why @ Obstacle::Musl) => {
                return Err(Failure::hinted(format!("--trace: {server} {why}"), glibc));
            }
            Some(why @ Obstacle::Static) => {
                out::error_line(&format!("warning: --trace: {server} {why}; {glibc}, dynamically"));
            }
            None => {}
        }
        let ours = self.library.to_string_lossy().into_owned();
        let known =
            command.env.iter().rev().find(|(name, _)| name == PRELOAD).map(|(_, value)| value.clone());
        let others = known.or_else(|| std::env::var(PRELOAD).ok()).filter(|value| !value.is_empty());
        let all = others.map_or_else(|| ours.clone(), |others| format!("{ours}:{others}"));
        command.env.retain(|(name, _)| name != PRELOAD && name != VARIABLE);
        command.env.push((PRELOAD.to_owned(), all));
        command.env.push((VARIABLE.to_owned(), self.folder.path().to_string_lossy().into_owned()));
        Ok(())
    }

    /// Takes an event in.
    pub(super) fn see(&mut self, progress: &Progress<'_>) {
        match progress {
            Progress::Starting(_) => self.begin(),
            Progress::Step { now, .. } => self.read(now),
            Progress::Ended(finding) => self.end(finding),
            Progress::Ready(..) | Progress::Control(_) | Progress::Skipped(..) | Progress::Again(..) => {}
        }
    }

    fn begin(&mut self) {
        self.readings = [Vec::new(), Vec::new()];
        self.kept.clear();
        self.every = 1;
        self.last = None;
        self.silent = false;
        // Files of processes that are gone would be taken for the next one's.
        for entry in std::fs::read_dir(self.folder.path()).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|end| end == "trace") {
                drop(std::fs::remove_file(entry.path()));
            }
        }
    }

    fn read(&mut self, now: &Sample) {
        let Some(snapshot) = self.snapshot() else {
            self.silent = true;
            return;
        };
        self.modules = Modules::of(snapshot.pid);
        let requests = now.work.requests;
        let handles = HANDLES.map(|(kind, _)| snapshot.live_count(&[kind]));
        let vram = (!now.vram.is_empty()).then(|| now.vram.iter().map(|vram| vram.bytes).sum());
        let measured = [now.host.map(HostMemory::charged), vram];
        for ((readings, measured), kinds) in self.readings.iter_mut().zip(measured).zip([HOST, DEVICE]) {
            let counted = snapshot.live_bytes(&kinds);
            readings.extend(measured.map(|measured| Trace { requests, measured, counted, handles }));
        }
        let at = self.last.as_ref().map_or(0, |last| last.at + 1);
        if let Some(last) = self.last.replace(Moment { at, requests, snapshot })
            && last.at.is_multiple_of(self.every)
        {
            self.kept.push(last);
            if self.kept.len() > warden_policies::defaults().diagnose.trace.kept {
                self.every *= 2;
                let every = self.every;
                self.kept.retain(|moment| moment.at.is_multiple_of(every));
            }
        }
    }

    /// Of the server, and not of the shell or the tool around it. A script may start it under another name.
    fn snapshot(&self) -> Option<Snapshot> {
        let mut all = Snapshot::all_in(self.folder.path()).ok()?;
        let server = all.iter().position(|snapshot| snapshot.exe == self.server);
        match (server, self.obstacle) {
            (Some(place), _) => Some(all.swap_remove(place)),
            (None, None) => all.into_iter().next(),
            (None, Some(_)) => None,
        }
    }

    fn end(&mut self, finding: &Finding) {
        let Some(last) = self.last.take() else {
            if self.silent && !self.untraced.contains(&finding.workload) {
                self.untraced.push(finding.workload);
            }
            return;
        };
        let third = last.at / 3;
        let base = self.kept.iter().min_by_key(|moment| moment.at.abs_diff(third));
        let requests = last.requests.saturating_sub(base.map_or(0, |base| base.requests));
        let places =
            places(base.map(|base| &base.snapshot), &last.snapshot, &self.modules, &mut self.symbols);
        // Also where the leg was too short for a verdict.
        let grows = |host: bool| {
            finding.series.iter().any(|found| {
                let judged = !matches!(found.verdict, Verdict::Steady | Verdict::Warming);
                (found.series == MemoryKind::Host) == host && (judged || found.settles == Settles::No)
            })
        };
        let memories = [(Memory::Host, true), (Memory::Device, false)];
        let memories = memories.into_iter().zip(&self.readings).filter_map(|((memory, host), readings)| {
            let attribution = Attribution::of(readings)?;
            Some(Traced { memory, grows: grows(host), attribution, explained: attribution.explained() })
        });
        let Losses { unfollowed, siteless, .. } = last.snapshot.losses;
        self.legs.push(LegTrace {
            workload: finding.workload,
            control: finding.control,
            requests,
            answered: finding.requests,
            memories: memories.collect(),
            places,
            program: last.snapshot.exe.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            interval: last.snapshot.interval,
            unfollowed,
            siteless,
            own_heap: last.snapshot.own_heap,
        });
    }

    /// What was traced counts for the verdicts of the legs, too. Legs that were not traced are left as they are.
    pub(super) fn testify(&self, outcome: &mut Outcome) {
        let mut traced: Vec<&LegTrace> = self.legs.iter().collect();
        for leg in &mut outcome.legs {
            let (workload, answered) = (leg.finding.workload, leg.finding.requests);
            let own = |trace: &&LegTrace| trace.workload == workload && trace.answered == answered;
            let Some(place) = traced.iter().position(own) else { continue };
            let trace = traced.remove(place);
            for found in &mut leg.finding.series {
                let memory = if found.series == MemoryKind::Host { Memory::Host } else { Memory::Device };
                let own = trace.memories.iter().find(|own| own.memory == memory);
                found.verdict = own.map_or(found.verdict, |own| own.attribution.testifies(found.verdict));
            }
        }
    }

    pub(super) fn legs(&self) -> &[LegTrace] {
        &self.legs
    }

    /// Why some legs are missing there, if they are.
    pub(super) fn untraced(&self) -> Option<String> {
        if self.untraced.is_empty() {
            return None;
        }
        let legs: Vec<String> = self.untraced.iter().map(ToString::to_string).collect();
        let why = self.obstacle.map_or_else(
            || UNKNOWN.to_owned(),
            |why| {
                format!(
                    "{} {why}: take a build that is linked with glibc 2.34 or newer, dynamically",
                    self.server.display()
                )
            },
        );
        Some(format!("not traced: {}. The tracer was not loaded into the server: {why}", legs.join(", ")))
    }

    /// For people: what grows, and where it comes from.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for leg in &self.legs {
            leg.tell(&mut lines);
        }
        if lines.is_empty() && !self.legs.is_empty() {
            lines.push("traced: no growth was found, so there is no call site to name".to_owned());
        }
        lines.extend(self.untraced());
        lines
    }
}

const UNKNOWN: &str = "it may start another program that is linked statically, with another C library than glibc 2.34 or newer, or \
as another user; or the folder for temporary files may not hold programs (set TMPDIR to one that may)";
