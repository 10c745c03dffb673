//! `diagnose --trace`: which call sites the growth comes from.
//!
//! ```text
//!   library ─ LD_PRELOAD ─> the server ─ PID.trace ─┐
//!   each reading of a leg ──────────────────────────┴─ snapshot ─┬─ counted against measured, reading by reading
//!                                                                └─ a third into the leg against its end: places
//! ```
//!
//! It only watches: the legs and their verdicts are those of the experiment without it.

use std::path::PathBuf;

use serde::Serialize;
use tempfile::TempDir;
use warden_diagnose::Progress;
use warden_policies::experiment::{Attribution, Finding, Settles, Trace, Workload};
use warden_policies::growth::Verdict;
use warden_policies::sample::{HostMemory, Sample};
use warden_policies::{ByteSize, Series};
use warden_supervisor::Command;
use warden_tracer_reader::{
    Kind, Losses, Memory, Modules, Obstacle, Place, Snapshot, Symbols, VARIABLE, obstacle, places,
    write_library,
};

use crate::exit::Failure;
use crate::out;

/// Snapshots of a leg that are kept, so that one from near its first third is there whenever it ends.
const KEPT: usize = 24;
/// Places that are named for each memory.
const NAMED: usize = 5;
/// Names of a call chain that are shown.
const CHAIN: usize = 6;
/// Places that grow by less than this part of the memory's growth are left out.
const LEAST_PART: f64 = 0.02;

/// Blocks smaller than this many intervals are sampled; larger ones are all counted (the tracer's own rule).
const SAMPLED: f64 = 4.0;

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
    memories: Vec<Traced>,
    places: Vec<Place>,
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
        let folder = tempfile::Builder::new().prefix("llama-warden-trace-").tempdir();
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
        const PRELOAD: &str = "LD_PRELOAD";
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
            Progress::Ready(..) | Progress::Control(_) | Progress::Skipped(..) => {}
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
            if self.kept.len() > KEPT {
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
                (found.series == Series::Host) == host && (judged || found.settles == Settles::No)
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
            memories: memories.collect(),
            places,
            interval: last.snapshot.interval,
            unfollowed,
            siteless,
            own_heap: last.snapshot.own_heap,
        });
    }

    /// For programs.
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
            lines.push("traced: nothing grows, so there is no call site to name".to_owned());
        }
        lines.extend(self.untraced());
        lines
    }
}

const UNKNOWN: &str = "it may start another program that is linked statically, with another C library than glibc 2.34 or newer, or \
as another user; or the folder for temporary files may not hold programs (set TMPDIR to one that may)";

impl LegTrace {
    fn tell(&self, lines: &mut Vec<String>) {
        for traced in self.memories.iter().filter(|traced| traced.grows) {
            let (name, found) = (name(traced.memory), &traced.attribution);
            lines.push(format!(
                "{}{}: {name} grows by {} a request, of which counted allocations make up {} ({:.0} %)",
                self.workload,
                if self.control { ", without the prompt cache" } else { "" },
                amount(found.measured),
                amount(found.counted),
                100.0 * traced.explained
            ));
            for place in self.named(traced) {
                lines.push(self.line(place));
                lines.extend(chain(place));
            }
            if traced.attribution.is_explained() {
                continue;
            }
            match found.follows {
                Some(follows) => {
                    let what = HANDLES[follows.kind];
                    lines.push(format!(
                        "  the rest is in no allocation that is counted: it follows {}, {:.2} more a request, {} each (correlation {:.2})",
                        what.1,
                        follows.per_request,
                        amount(follows.bytes_each),
                        follows.correlation
                    ));
                    for place in self.handles(what.0) {
                        lines.push(self.line(place));
                        lines.extend(chain(place));
                    }
                }
                None => lines.push(
                    "  the rest is in no allocation that is counted, and follows no handle that is"
                        .to_owned(),
                ),
            }
        }
        if !self.memories.iter().any(|traced| traced.grows) {
            return;
        }
        if self.own_heap {
            lines.push(OWN_HEAP.to_owned());
        }
        if self.unfollowed > 0 {
            lines.push(format!(
                "  since the server started {} allocations did not fit into the table of what lives and count as freed",
                self.unfollowed
            ));
        }
        if self.siteless > 0 {
            lines.push(format!(
                "  since the server started {} allocations came from more places than there is room for and are not counted",
                self.siteless
            ));
        }
    }

    /// The places that grew, as far as it is sure that they did.
    fn named(&self, traced: &Traced) -> impl Iterator<Item = &Place> {
        let least = (traced.attribution.measured * LEAST_PART).max(1.0);
        let grown = self.places.iter().filter(move |place| {
            place.memory == traced.memory && self.each(place.more_bytes) >= least.max(self.error(place))
        });
        grown.take(NAMED)
    }

    /// What a place's growth may be off by, in bytes per request: two standard errors where its blocks are sampled.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn error(&self, place: &Place) -> f64 {
        let (bytes, interval) = (place.more_bytes.unsigned_abs() as f64, self.interval as f64);
        let sampled =
            place.memory == Memory::Host && bytes < place.more_count.abs().max(1.0) * interval * SAMPLED;
        if sampled { 2.0 * (bytes * interval).sqrt() / self.requests.max(1) as f64 } else { 0.0 }
    }

    fn handles(&self, kind: Kind) -> impl Iterator<Item = &Place> {
        let makes = move |place: &&Place| match kind {
            Kind::Cublas => place.function.starts_with("cublas"),
            _ => place.function.contains("GraphInstantiate"),
        };
        self.places.iter().filter(makes).filter(|place| place.more_count >= 1.0).take(NAMED)
    }

    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn each(&self, bytes: i64) -> f64 {
        bytes as f64 / self.requests.max(1) as f64
    }

    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn line(&self, place: &Place) -> String {
        let within = place.within.as_ref().map_or_else(String::new, |outer| format!(" within {outer}"));
        let count = place.more_count / self.requests.max(1) as f64;
        let count = if count < 10.0 { format!("{count:.2}") } else { format!("{count:.0}") };
        let what = match place.memory {
            Memory::Handles => format!("{count} × {} a request", place.function),
            Memory::Host | Memory::Device => {
                let error = self.error(place);
                let error = if error > 0.0 { format!(" ± {}", amount(error)) } else { String::new() };
                let each = amount(self.each(place.more_bytes));
                format!("{each}{error} a request, {count} × {}{within}", place.function)
            }
        };
        format!("  {what}, called in {}", place.called_in)
    }
}

const OWN_HEAP: &str = "  the program has an allocator of its own (jemalloc, mimalloc, tcmalloc, …) linked into it, so its blocks are not \
counted, only the mappings that it takes; build it without, or preload that allocator as a library";

fn name(memory: Memory) -> &'static str {
    match memory {
        Memory::Host => "host memory",
        Memory::Device => "VRAM",
        Memory::Handles => "the number of handles",
    }
}

/// Who called that function, and so on outwards.
fn chain(place: &Place) -> Option<String> {
    let names = place.chain.iter().map(ToString::to_string);
    let names: Vec<String> = names.skip_while(|name| *name != place.called_in).take(CHAIN).collect();
    (names.len() > 1).then(|| format!("    {}", names.join(" < ")))
}

/// Bytes, which may be a little below zero.
fn amount(bytes: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a figure for people")]
    let size = ByteSize(bytes.abs() as u64);
    if bytes <= -1.0 { format!("-{size}") } else { size.to_string() }
}
