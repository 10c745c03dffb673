//! `diagnose --trace`: attributes the growth to call sites.
//!
//! A preloaded library writes the live allocations of the server to `PID.trace`. Each reading compares these
//! counted bytes with the measured bytes. The call sites are those that grew between a third of the leg and
//! its end.
//!
//! Tracing only observes, with one exception. If the detector only suspects a leak, counted allocations or
//! handles that grow with every request and with the memory turn the verdict into a leak.

mod tell;

use std::path::PathBuf;

use serde::Serialize;
use tempfile::TempDir;
use warden_diagnose::{DiagnoseReport, ExperimentOutcome, LegProgress};
use warden_experiment::{GrowthAttribution, GrowthEnd, LegFinding, TracedMoment, Workload};
use warden_policies::MemoryKind;
use warden_policies::growth::GrowthVerdict;
use warden_policies::sample::BackendSample;
use warden_supervisor::ServerCommand;
use warden_tracer_reader::{
    AllocationKind, AllocationPlace, PreloadObstacle, ProcessModules, SymbolTables, TRACE_VARIABLE,
    TraceLosses, TraceSnapshot, TracedMemory, group_by_place, preload_obstacle, write_library,
};

use crate::exit::CommandError;
use crate::{out, private_temp};

const HANDLE_KINDS: [(AllocationKind, &str); 2] =
    [(AllocationKind::GraphExec, "live graph executables"), (AllocationKind::Cublas, "cuBLAS handles")];
const HOST_KINDS: [AllocationKind; 3] =
    [AllocationKind::Heap, AllocationKind::Mapped, AllocationKind::Pinned];
const DEVICE_KINDS: [AllocationKind; 3] =
    [AllocationKind::Device, AllocationKind::Pool, AllocationKind::DeviceMapped];

#[derive(Clone, Debug, Serialize)]
pub(super) struct MemoryAttribution {
    memory: TracedMemory,
    grows: bool,
    #[serde(flatten)]
    attribution: GrowthAttribution,
    /// Share of the growth that counted allocations explain, 0 to 1.
    explained: f64,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct LegTrace {
    workload: Workload,
    /// The leg repeats a workload without the prompt cache.
    control: bool,
    /// Number of requests between the two compared snapshots.
    requests: u64,
    /// Number of all requests of the workload.
    answered: u64,
    memories: Vec<MemoryAttribution>,
    places: Vec<AllocationPlace>,
    program: String,
    /// Average bytes between samples of the heap.
    interval: u64,
    /// Allocations since the start whose release was not tracked, and which are not counted as live.
    unfollowed: u64,
    /// Allocations since the start that are not counted, because the table of call sites was full.
    siteless: u64,
    /// The program has an allocator of its own, so heap blocks are not counted.
    own_heap: bool,
}

#[derive(Debug)]
struct TraceMoment {
    at: usize,
    requests: u64,
    snapshot: TraceSnapshot,
}

#[derive(Debug, Default)]
struct LegReadings {
    host: Vec<TracedMoment>,
    device: Vec<TracedMoment>,
    kept: Vec<TraceMoment>,
    /// Number of times that the recorder dropped every second snapshot to save memory.
    halvings: u32,
    last: Option<TraceMoment>,
    /// The recorder read the server's memory, but found no trace of allocations.
    silent: bool,
}

#[derive(Debug)]
pub(super) struct TraceRecorder {
    folder: TempDir,
    library: PathBuf,
    leg: LegReadings,
    modules: ProcessModules,
    symbols: SymbolTables,
    legs: Vec<LegTrace>,
    /// Path of the started program, and the reason why the loader may ignore the preloaded library.
    server: PathBuf,
    obstacle: Option<PreloadObstacle>,
    untraced: Vec<Workload>,
}

impl TraceRecorder {
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
            leg: LegReadings::default(),
            modules: ProcessModules::default(),
            symbols: SymbolTables::default(),
            legs: Vec::new(),
            server: PathBuf::new(),
            obstacle: None,
            untraced: Vec::new(),
        })
    }

    /// Preloads the library into the server. Refuses a musl server, which would not even start.
    pub(super) fn apply(&mut self, command: &mut ServerCommand) -> Result<(), CommandError> {
        const PRELOAD: &str = "LD_PRELOAD";
        self.server = std::fs::canonicalize(&command.binary).unwrap_or_else(|_| command.binary.clone());
        self.obstacle = preload_obstacle(&self.server);
        let server = self.server.display();
        let glibc = "take a build that is linked with glibc 2.34 or newer";
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
        self.leg = LegReadings::default();
        // Remove files of ended processes, which the recorder would mistake for files of the next server.
        for entry in std::fs::read_dir(self.folder.path()).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|end| end == "trace") {
                drop(std::fs::remove_file(entry.path()));
            }
        }
    }

    fn read(&mut self, now: &BackendSample) {
        let Some(snapshot) = self.snapshot() else {
            self.leg.silent = true;
            return;
        };
        self.modules = ProcessModules::read(snapshot.pid);
        let leg = &mut self.leg;
        let requests = now.work.requests;
        let handles = HANDLE_KINDS.map(|(kind, _)| snapshot.live_count(&[kind]));
        let moment = |kinds: &[AllocationKind], measured: u64| {
            let counted = snapshot.live_bytes(kinds);
            TracedMoment { requests, measured, counted, handles }
        };
        leg.host.extend(now.host.map(|host| moment(&HOST_KINDS, host.charged())));
        if !now.vram.is_empty() {
            leg.device.push(moment(&DEVICE_KINDS, now.vram.iter().map(|vram| vram.bytes).sum()));
        }
        let at = leg.last.as_ref().map_or(0, |last| last.at + 1);
        let is_kept = |moment: &TraceMoment, halvings: u32| moment.at.is_multiple_of(1 << halvings);
        if let Some(last) = leg.last.replace(TraceMoment { at, requests, snapshot })
            && is_kept(&last, leg.halvings)
        {
            leg.kept.push(last);
            if leg.kept.len() > warden_policies::defaults().diagnose.trace.kept {
                leg.halvings += 1;
                let halvings = leg.halvings;
                leg.kept.retain(|moment| is_kept(moment, halvings));
            }
        }
    }

    /// Finds the server's snapshot among those of a shell or tool around the server. If no path matches,
    /// takes the first snapshot: a script may start the server under another name.
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
        let leg = std::mem::take(&mut self.leg);
        let Some(last) = leg.last else {
            if leg.silent && !self.untraced.contains(&finding.workload) {
                self.untraced.push(finding.workload);
            }
            return;
        };
        let third = last.at / 3;
        let base = leg.kept.iter().min_by_key(|moment| moment.at.abs_diff(third));
        let requests = last.requests.saturating_sub(base.map_or(0, |base| base.requests));
        let places =
            group_by_place(base.map(|base| &base.snapshot), &last.snapshot, &self.modules, &mut self.symbols);
        // Include a workload that was too short for a verdict.
        let grows = |host: bool| {
            finding.series.iter().any(|found| {
                let judged = !matches!(found.verdict, GrowthVerdict::Steady | GrowthVerdict::Warming);
                (found.series == MemoryKind::Host) == host && (judged || found.settles == GrowthEnd::No)
            })
        };
        let memory = |memory: TracedMemory, grows: bool, readings: &[TracedMoment]| {
            let attribution = GrowthAttribution::from_readings(readings)?;
            Some(MemoryAttribution { memory, grows, attribution, explained: attribution.explained_share() })
        };
        let host = memory(TracedMemory::Host, grows(true), &leg.host);
        let device = memory(TracedMemory::Device, grows(false), &leg.device);
        let TraceLosses { unfollowed, siteless, .. } = last.snapshot.losses;
        self.legs.push(LegTrace {
            workload: finding.workload,
            control: finding.control,
            requests,
            answered: finding.requests,
            memories: host.into_iter().chain(device).collect(),
            places,
            program: last.snapshot.exe.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            interval: last.snapshot.interval,
            unfollowed,
            siteless,
            own_heap: last.snapshot.own_heap,
        });
    }

    /// Leaves the verdicts of untraced workloads unchanged.
    pub(super) fn apply_to_verdicts(&self, outcome: &mut ExperimentOutcome) {
        let mut traced: Vec<&LegTrace> = self.legs.iter().collect();
        for leg in &mut outcome.legs {
            let workload = leg.finding.workload;
            let answered = leg.finding.requests;
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

    pub(super) fn add_to_report(&self, report: &mut DiagnoseReport) -> Result<(), CommandError> {
        let legs = self.legs.iter().map(serde_json::to_value).collect::<Result<_, _>>();
        report.trace = legs.map_err(|error| CommandError::failed(format!("--trace: {error}")))?;
        report.attribution = self.report_lines();
        report.untraced = self.untraced_reason();
        Ok(())
    }

    fn untraced_reason(&self) -> Option<String> {
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

    fn report_lines(&self) -> Vec<String> {
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

const UNTRACED_CAUSES: &str = "it may start another program that is linked statically, with another C \
     library than glibc 2.34 or newer, or as another user; or the folder for temporary files may not hold programs \
     (set TMPDIR to one that may)";
