//! `diagnose --trace`: attributes the growth to call sites.
//!
//! ```text
//!   library ─ LD_PRELOAD ─> the server ─ PID.trace ─┐
//!   each reading of a leg ──────────────────────────┴─ snapshot ─┬─ counted against measured bytes
//!                                                                └─ a third into the leg against its end
//! ```
//!
//! Tracing only observes. One exception: if the detector merely suspects a memory, handles or counted
//! allocations that grow with every request and with the memory are evidence. The verdict then becomes a
//! leak.

mod tell;

use std::path::PathBuf;

use serde::Serialize;
use tempfile::TempDir;
use warden_diagnose::{ExperimentOutcome, LegProgress};
use warden_experiment::{GrowthAttribution, GrowthEnd, LegFinding, TracedMoment, Workload};
use warden_policies::MemoryKind;
use warden_policies::growth::GrowthVerdict;
use warden_policies::sample::{BackendSample, HostMemory};
use warden_supervisor::ServerCommand;
use warden_tracer_reader::{
    AllocationKind, AllocationPlace, PreloadObstacle, ProcessModules, SymbolTables, TRACE_VARIABLE,
    TraceLosses, TraceSnapshot, TracedMemory, group_by_place, preload_obstacle, write_library,
};

use crate::exit::CommandError;
use crate::{out, private_temp};

/// Kinds of handles in a [`TracedMoment`], with their names in the report.
const HANDLE_KINDS: [(AllocationKind, &str); 2] =
    [(AllocationKind::GraphExec, "live graph executables"), (AllocationKind::Cublas, "cuBLAS handles")];
const HOST_KINDS: [AllocationKind; 3] =
    [AllocationKind::Heap, AllocationKind::Mapped, AllocationKind::Pinned];
const DEVICE_KINDS: [AllocationKind; 3] =
    [AllocationKind::Device, AllocationKind::Pool, AllocationKind::DeviceMapped];

/// Attribution of the growth of one memory in a leg.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MemoryAttribution {
    memory: TracedMemory,
    /// The detector says that this memory grows.
    grows: bool,
    #[serde(flatten)]
    attribution: GrowthAttribution,
    /// Share of the growth that counted allocations explain, 0 to 1.
    explained: f64,
}

/// Call sites of a leg and their growth.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LegTrace {
    workload: Workload,
    /// The leg repeats a workload without the prompt cache.
    control: bool,
    /// Requests between the two compared snapshots.
    requests: u64,
    /// All requests of the leg.
    answered: u64,
    memories: Vec<MemoryAttribution>,
    places: Vec<AllocationPlace>,
    /// File name of the program, without its folder.
    program: String,
    /// Average bytes between samples of the heap.
    interval: u64,
    /// Allocations since the start whose release was not tracked. They are not counted as live.
    unfollowed: u64,
    /// Allocations since the start that are not counted, because there are too many call sites.
    siteless: u64,
    /// The program has an allocator of its own, so heap blocks are not counted.
    own_heap: bool,
}

/// A snapshot during the current leg.
#[derive(Debug)]
struct TraceMoment {
    at: usize,
    requests: u64,
    snapshot: TraceSnapshot,
}

/// Traces the legs of an experiment.
#[derive(Debug)]
pub(super) struct TraceRecorder {
    folder: TempDir,
    library: PathBuf,
    readings: [Vec<TracedMoment>; 2],
    kept: Vec<TraceMoment>,
    every: usize,
    last: Option<TraceMoment>,
    modules: ProcessModules,
    symbols: SymbolTables,
    legs: Vec<LegTrace>,
    /// Started program, and the obstacle to tracing found in its file.
    server: PathBuf,
    obstacle: Option<PreloadObstacle>,
    /// The current leg has readings but no trace. `untraced` lists the workloads of such legs.
    silent: bool,
    untraced: Vec<Workload>,
}

impl TraceRecorder {
    /// Prepares the tracer library: the built-in one, or `other`.
    pub(super) fn prepare(other: Option<&PathBuf>) -> Result<Self, CommandError> {
        let failed = |what: &str, error: &std::io::Error| {
            CommandError::hinted(format!("--trace: {what}: {error}"), "name a library with `--tracer PATH`")
        };
        let folder = private_temp::private_folder("llama-warden-trace-");
        let folder = folder.map_err(|error| failed("cannot make a folder", &error))?;
        let library = match other {
            Some(path) => std::path::absolute(path).and_then(std::fs::canonicalize),
            None => write_library(folder.path()),
        };
        let library = library.map_err(|error| failed("no library", &error))?;
        // The loader treats these characters as separators, and ignores a library that it cannot find.
        if library.to_string_lossy().contains([' ', ':', '\t', '\n']) {
            return Err(CommandError::usage(
                format!("--trace: the loader cannot take the path {}", library.display()),
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
            modules: ProcessModules::default(),
            symbols: SymbolTables::default(),
            legs: Vec::new(),
            server: PathBuf::new(),
            obstacle: None,
            silent: false,
            untraced: Vec::new(),
        })
    }

    /// Preloads the library into the server. Reports obstacles beforehand: a musl server would not even
    /// start.
    pub(super) fn apply(&mut self, command: &mut ServerCommand) -> Result<(), CommandError> {
        const PRELOAD: &str = "LD_PRELOAD";
        self.server = std::fs::canonicalize(&command.binary).unwrap_or_else(|_| command.binary.clone());
        self.obstacle = preload_obstacle(&self.server);
        let (server, glibc) = (self.server.display(), "take a build that is linked with glibc 2.34 or newer");
        match self.obstacle {
            Some(why @ PreloadObstacle::Musl) => {
                return Err(CommandError::hinted(format!("--trace: {server} {why}"), glibc));
            }
            Some(why @ PreloadObstacle::Static) => {
                out::error_line(&format!("warning: --trace: {server} {why}; {glibc}, dynamically"));
            }
            None => {}
        }
        let ours = self.library.to_string_lossy().into_owned();
        let known =
            command.env.iter().rev().find(|(name, _)| name == PRELOAD).map(|(_, value)| value.clone());
        let others = known.or_else(|| std::env::var(PRELOAD).ok()).filter(|value| !value.is_empty());
        let all = others.map_or_else(|| ours.clone(), |others| format!("{ours}:{others}"));
        command.env.retain(|(name, _)| name != PRELOAD && name != TRACE_VARIABLE);
        command.env.push((PRELOAD.to_owned(), all));
        command.env.push((TRACE_VARIABLE.to_owned(), self.folder.path().to_string_lossy().into_owned()));
        Ok(())
    }

    pub(super) fn on_progress(&mut self, progress: &LegProgress<'_>) {
        match progress {
            LegProgress::Starting(_) => self.begin(),
            LegProgress::Step { now, .. } => self.read(now),
            LegProgress::Ended(finding) => self.end(finding),
            LegProgress::Ready(..)
            | LegProgress::Control(_)
            | LegProgress::Skipped(..)
            | LegProgress::Again(..) => {}
        }
    }

    fn begin(&mut self) {
        self.readings = [Vec::new(), Vec::new()];
        self.kept.clear();
        self.every = 1;
        self.last = None;
        self.silent = false;
        // Remove files of ended processes: they would be mistaken for those of the next server.
        for entry in std::fs::read_dir(self.folder.path()).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|end| end == "trace") {
                drop(std::fs::remove_file(entry.path()));
            }
        }
    }

    fn read(&mut self, now: &BackendSample) {
        let Some(snapshot) = self.snapshot() else {
            self.silent = true;
            return;
        };
        self.modules = ProcessModules::read(snapshot.pid);
        let requests = now.work.requests;
        let handles = HANDLE_KINDS.map(|(kind, _)| snapshot.live_count(&[kind]));
        let vram = (!now.vram.is_empty()).then(|| now.vram.iter().map(|vram| vram.bytes).sum());
        let measured = [now.host.map(HostMemory::charged), vram];
        for ((readings, measured), kinds) in
            self.readings.iter_mut().zip(measured).zip([HOST_KINDS, DEVICE_KINDS])
        {
            let counted = snapshot.live_bytes(&kinds);
            readings.extend(measured.map(|measured| TracedMoment { requests, measured, counted, handles }));
        }
        let at = self.last.as_ref().map_or(0, |last| last.at + 1);
        if let Some(last) = self.last.replace(TraceMoment { at, requests, snapshot })
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

    /// Finds the snapshot of the server among those of a shell or tool around it. A script may start the
    /// server under another name.
    fn snapshot(&self) -> Option<TraceSnapshot> {
        let mut all = TraceSnapshot::all_in(self.folder.path()).ok()?;
        let server = all.iter().position(|snapshot| snapshot.exe == self.server);
        match (server, self.obstacle) {
            (Some(place), _) => Some(all.swap_remove(place)),
            (None, None) => all.into_iter().next(),
            (None, Some(_)) => None,
        }
    }

    fn end(&mut self, finding: &LegFinding) {
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
            group_by_place(base.map(|base| &base.snapshot), &last.snapshot, &self.modules, &mut self.symbols);
        // Consider a leg that was too short for a verdict, too.
        let grows = |host: bool| {
            finding.series.iter().any(|found| {
                let judged = !matches!(found.verdict, GrowthVerdict::Steady | GrowthVerdict::Warming);
                (found.series == MemoryKind::Host) == host && (judged || found.settles == GrowthEnd::No)
            })
        };
        let memories = [(TracedMemory::Host, true), (TracedMemory::Device, false)];
        let memories = memories.into_iter().zip(&self.readings).filter_map(|((memory, host), readings)| {
            let attribution = GrowthAttribution::from_readings(readings)?;
            Some(MemoryAttribution {
                memory,
                grows: grows(host),
                attribution,
                explained: attribution.explained_share(),
            })
        });
        let TraceLosses { unfollowed, siteless, .. } = last.snapshot.losses;
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

    /// Adds the attributions to the verdicts of the legs. Leaves untraced legs unchanged.
    pub(super) fn apply_to_verdicts(&self, outcome: &mut ExperimentOutcome) {
        let mut traced: Vec<&LegTrace> = self.legs.iter().collect();
        for leg in &mut outcome.legs {
            let (workload, answered) = (leg.finding.workload, leg.finding.requests);
            let own = |trace: &&LegTrace| trace.workload == workload && trace.answered == answered;
            let Some(place) = traced.iter().position(own) else { continue };
            let trace = traced.remove(place);
            for found in &mut leg.finding.series {
                let memory =
                    if found.series == MemoryKind::Host { TracedMemory::Host } else { TracedMemory::Device };
                let own = trace.memories.iter().find(|own| own.memory == memory);
                found.verdict =
                    own.map_or(found.verdict, |own| own.attribution.confirm_verdict(found.verdict));
            }
        }
    }

    pub(super) fn legs(&self) -> &[LegTrace] {
        &self.legs
    }

    /// Says why legs are missing from the trace, if any are.
    pub(super) fn untraced_reason(&self) -> Option<String> {
        if self.untraced.is_empty() {
            return None;
        }
        let legs: Vec<String> = self.untraced.iter().map(ToString::to_string).collect();
        let why = self.obstacle.map_or_else(
            || UNTRACED_CAUSES.to_owned(),
            |why| {
                format!(
                    "{} {why}: take a build that is linked with glibc 2.34 or newer, dynamically",
                    self.server.display()
                )
            },
        );
        Some(format!("not traced: {}. The tracer was not loaded into the server: {why}", legs.join(", ")))
    }

    /// Describes what grows and where it is allocated.
    pub(super) fn report_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for leg in &self.legs {
            leg.append_lines(&mut lines);
        }
        if lines.is_empty() && !self.legs.is_empty() {
            lines.push("traced: no growth was found, so there is no call site to name".to_owned());
        }
        lines.extend(self.untraced_reason());
        lines
    }
}

const UNTRACED_CAUSES: &str = "it may start another program that is linked statically, with another C library than glibc 2.34 or newer, or \
as another user; or the folder for temporary files may not hold programs (set TMPDIR to one that may)";
