//! A single llama-server outside of any fleet, for experiments.
//!
//! ```text
//!     Starter::start ── spawn (nursery, private socket) ── probes ── 200 ──> Solo ── sample, … ── stop
//!                        └── it ends, or time is over ──> Failure
//! ```
//!
//! The same code starts and reads a fleet's backend, so measurements are comparable. Callers send requests to
//! the process's socket themselves.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::defaults::Child;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_policies::sample::{BackendSample, SampleEdge, WorkDone};
use warden_policies::secrets::{self, KnownSecrets};
use warden_policies::{GenerationId, ModelName, ServerFacts};
use warden_sensors::report::ActiveFix;
use warden_sensors::{CudaReport, HostTotals};

use crate::error::{BackendFailure, FleetError, SpawnError};
use crate::memory::declared_memory;
use crate::process::directories::socket_path;
use crate::process::endpoint::{ListenAddress, choose_endpoint, set_endpoint};
use crate::process::failure::{self, OomEvidence, StartEnd, StartLateness};
use crate::process::group::ProcessExit;
use crate::process::hints::api_key;
use crate::process::host::HostWorld;
use crate::process::nursery::NurseryHandle;
use crate::process::{
    BackendProcess, LineSink, NoVram, ProbeResult, ProcessWorld, SampleOptions, ServerProps, directories,
    discreet, reclaim_file, report_file, until_stalled,
};
use crate::spec::{ServerCommand, ServerKind, SocketMode, SpawnRequest, WatchConfig};
use crate::sync::lock;
use crate::view::DeviceView;

/// Starts single processes.
#[derive(Clone, Debug)]
pub struct SoloStarter {
    world: Arc<dyn ProcessWorld>,
    directory: PathBuf,
    watch: WatchConfig,
    lifecycle: LifecyclePolicy,
    name: ModelName,
    next: Arc<AtomicU64>,
}

/// Process to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoloSpec {
    /// Command without an address.
    pub command: ServerCommand,
    /// Number added to our own `oom_score_adj`.
    pub oom_score_adj: i32,
    /// Kind of the process's address.
    pub socket: SocketMode,
    /// Known facts about the binary.
    pub facts: ServerFacts,
}

impl SoloStarter {
    /// `runtime_dir`: private directory for sockets, with a short path. `lifecycle`: only the settings for
    /// start, probes and stop apply. `watch`: only the number of kept lines and the time limit of a reading.
    ///
    /// # Errors
    ///
    /// The directory cannot be created, or its path is too long for sockets.
    pub fn new(
        nursery: NurseryHandle,
        runtime_dir: &Path,
        lifecycle: &LifecyclePolicy,
        watch: WatchConfig,
    ) -> Result<Self, FleetError> {
        let world = Arc::new(HostWorld::new(nursery));
        Self::in_world(world, runtime_dir, lifecycle, watch, ModelName::new("solo"))
    }

    pub(crate) fn in_world(
        world: Arc<dyn ProcessWorld>,
        runtime_dir: &Path,
        lifecycle: &LifecyclePolicy,
        watch: WatchConfig,
        name: ModelName,
    ) -> Result<Self, FleetError> {
        let directory = std::path::absolute(runtime_dir).unwrap_or_else(|_| runtime_dir.to_owned());
        directories::check_socket_path(&directory, &name, GenerationId(99_999))?;
        directories::prepare_runtime(&directory)?;
        Ok(Self { world, directory, watch, lifecycle: *lifecycle, name, next: Arc::default() })
    }

    /// Starts a process and waits until it is ready. Dropping the future kills it.
    ///
    /// # Errors
    ///
    /// The process ends before it is ready, or is not ready in time.
    pub async fn start(&self, spec: &SoloSpec) -> Result<SoloProcess, Box<BackendFailure>> {
        self.start_unless(spec, std::future::pending()).await.map_err(|unstarted| unstarted.failure)
    }

    /// Starts a process, unless `stop` resolves first: then the process is killed and reaped.
    pub(crate) async fn start_unless(
        &self,
        spec: &SoloSpec,
        stop: impl Future<Output = ()>,
    ) -> Result<SoloProcess, FailedStart> {
        let generation = GenerationId(self.next.fetch_add(1, Ordering::Relaxed) + 1);
        let socket = socket_path(&self.directory, &self.name, generation);
        let said = Arc::new(SoloLog::new(&spec.command, self.watch.child));
        let endpoint = choose_endpoint(spec.socket, spec.facts, &socket).map_err(|source| {
            let binary = spec.command.binary.clone();
            said.failed_start(&StartEnd::NotSpawned(&SpawnError::Exec { binary, source }))
        })?;
        let mut request = SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj };
        set_endpoint(&mut request.command, &endpoint);
        report_file::announce_report(&mut request.command, &socket, true);
        reclaim_file::announce_reclaim(&mut request.command, &socket, false);
        // An earlier process may have left files.
        drop(SoloFiles(socket.clone()));
        let files = SoloFiles(socket.clone());
        let log = Arc::clone(&said);
        let sink: LineSink = Arc::new(move |_, line| log.take_line(line));
        let spawned = Instant::now();
        let longest = self.watch.child.log_line_bytes;
        let process = self.world.spawn(request, socket, endpoint.clone(), longest, sink).await;
        let process = process.map_err(|error| said.failed_start(&StartEnd::NotSpawned(&error)))?;
        let mut solo = SoloProcess {
            process,
            endpoint,
            key: api_key(&spec.command),
            said,
            spawned,
            ready_after: Duration::ZERO,
            props: ServerProps::default(),
            watch: self.watch,
            lifecycle: self.lifecycle,
            _files: files,
        };
        tokio::select! {
            biased;
            exit = solo.process.wait() => {
                Err(solo.said.failed_start(&StartEnd::Exited(exit, OomEvidence::Unknown)))
            }
            () = self.ready(&solo) => {
                solo.ready_after = spawned.elapsed();
                solo.props = solo.process.read_props(self.lifecycle.probe_timeout).await;
                solo.said.note_ready(&spec.command, solo.props, self.world.available_memory());
                Ok(solo)
            }
            lateness = until_too_late(&*solo.process, &self.lifecycle) => {
                let unstarted = solo.said.failed_start(&StartEnd::TimedOut(lateness));
                solo.stop().await;
                Err(unstarted)
            }
            () = stop => {
                solo.process.kill();
                let exit = solo.process.wait().await;
                Err(solo.said.failed_start(&StartEnd::Exited(exit, OomEvidence::Unknown)))
            }
        }
    }

    async fn ready(&self, solo: &SoloProcess) {
        while solo.process.probe(self.lifecycle.probe_timeout).await != ProbeResult::Ready {
            tokio::time::sleep(self.lifecycle.start_probe_interval).await;
        }
    }

    pub(crate) fn has_gpu(&self) -> bool {
        self.world.has_gpu()
    }

    /// Available bytes of the machine; `None` if unreadable.
    pub fn available(&self) -> Option<u64> {
        self.world.available_memory()
    }
}

async fn until_too_late(process: &dyn BackendProcess, lifecycle: &LifecyclePolicy) -> StartLateness {
    let LifecyclePolicy { start_timeout: in_all, start_stall: still, .. } = *lifecycle;
    tokio::select! {
        () = tokio::time::sleep(in_all) => StartLateness::NotReady(in_all),
        () = until_stalled(process, still) => StartLateness::Stalled(still),
    }
}

#[derive(Debug)]
pub(crate) struct FailedStart {
    pub(crate) failure: Box<BackendFailure>,
    /// `None` if the process was not created, or not ready in time.
    pub(crate) exit: Option<ProcessExit>,
}

/// A running process. Dropping it kills its process group.
#[derive(Debug)]
pub struct SoloProcess {
    process: Arc<dyn BackendProcess>,
    endpoint: ListenAddress,
    key: Option<String>,
    said: Arc<SoloLog>,
    spawned: Instant,
    ready_after: Duration,
    props: ServerProps,
    watch: WatchConfig,
    lifecycle: LifecyclePolicy,
    _files: SoloFiles,
}

/// Complete reading of a process's memory and of the machine.
#[derive(Clone, Debug)]
pub struct SoloReading {
    /// Sample for the policies.
    pub sample: BackendSample,
    /// Host memory in bytes that the process may keep on purpose and that cannot be measured.
    pub allowed: u64,
    /// Reason for unknown VRAM on a machine that should report it.
    pub vram_unknown: Option<String>,
    /// The GPUs.
    pub devices: Vec<DeviceView>,
    /// Memory of the machine.
    pub totals: Option<HostTotals>,
    /// GPU memory report of the process, if its build writes one.
    pub report: Option<CudaReport>,
}

impl SoloReading {
    /// Number of captured CUDA graphs. `None` without a report, or if the build limits the number, which may
    /// then still grow.
    pub fn graphs(&self) -> Option<u64> {
        let report = self.report.as_ref()?;
        let is_limited = report.active.contains(&ActiveFix::GraphCacheCap);
        (!is_limited).then(|| report.totals().counts.graphs_live)
    }
}

impl SoloProcess {
    /// Address of the process.
    pub fn endpoint(&self) -> &ListenAddress {
        &self.endpoint
    }

    /// API key that the process requires.
    pub fn api_key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// PID of the process and its group.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Time from the spawn until the process was ready.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// Properties of the ready process.
    pub fn props(&self) -> ServerProps {
        self.props
    }

    /// Reads the memory now. `work`, `in_flight`: requests, which only the caller sees.
    pub async fn read_sample(
        &self,
        edge: SampleEdge,
        work: WorkDone,
        in_flight: u32,
        largest_prompt: u64,
    ) -> SoloReading {
        let limit = self.watch.sensors.read_limit;
        let ask = SampleOptions { metrics: true, ..SampleOptions::brief(Duration::ZERO, limit) };
        let at = self.spawned.elapsed();
        let reading = self.process.sample(ask).await;
        let declared = lock(&self.said.state).declared.clone();
        let pools = declared_memory::measured_pools(&declared, reading.report.as_ref(), &reading.vram);
        SoloReading {
            sample: BackendSample {
                at,
                edge,
                host: reading.host,
                vram: reading.vram,
                pools,
                in_flight,
                work,
                largest_prompt,
                reclaims: 0,
            },
            allowed: declared_memory::allowed_bytes(&declared),
            vram_unknown: reading.no_vram.filter(|no_vram| !no_vram.is_normal).map(|NoVram { why, .. }| why),
            devices: reading.devices.map(|devices| devices.views()).unwrap_or_default(),
            totals: reading.totals,
            report: reading.report,
        }
    }

    /// Sentences about memory that the process keeps on purpose.
    pub fn allowance(&self) -> Vec<String> {
        lock(&self.said.state).declared.source_sentences()
    }

    /// Last output lines, oldest first.
    pub fn last_lines(&self) -> Vec<String> {
        self.said.lines()
    }

    /// Waits until the process ends by itself, and returns the failure. Cancel safe.
    pub async fn until_end(&self) -> BackendFailure {
        self.until_exit().await.1
    }

    /// Like [`Self::until_end`], with the exit status.
    pub async fn until_exit(&self) -> (ProcessExit, BackendFailure) {
        let exit = self.process.wait().await;
        (exit, self.said.classify_end(&StartEnd::Exited(exit, OomEvidence::Unknown)))
    }

    /// Waits until a crashed process has neither ended nor answered for `lifecycle.crash_ends`: some builds
    /// wait for a debugger. Returns the crash line. Cancel safe.
    pub async fn until_crash_hang(&self) -> String {
        let LifecyclePolicy { probe_interval, crash_ends, .. } = self.lifecycle;
        loop {
            tokio::time::sleep(probe_interval.min(crash_ends)).await;
            let Some(line) = failure::crash_line(&self.said.lines()) else { continue };
            if self.process.probe(crash_ends).await.is_answer() {
                continue;
            }
            // An ending process refuses connections too, but only for a moment.
            tokio::time::sleep(crash_ends).await;
            if !self.process.probe(crash_ends).await.is_answer() {
                return line;
            }
        }
    }

    /// Stops the process and returns its exit. Close all connections first: llama-server waits for them.
    pub async fn stop(self) -> ProcessExit {
        self.process.terminate();
        if let Ok(exit) = tokio::time::timeout(self.lifecycle.stop_grace, self.process.wait()).await {
            return exit;
        }
        self.process.kill();
        self.process.wait().await
    }
}

/// Socket and report file, removed after the process.
#[derive(Debug)]
struct SoloFiles(PathBuf);

impl Drop for SoloFiles {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
        report_file::remove_reports(&self.0);
    }
}

/// Output of a process.
#[derive(Debug)]
struct SoloLog {
    limits: Child,
    given: KnownSecrets,
    state: Mutex<SoloLogState>,
}

#[derive(Debug)]
struct SoloLogState {
    lines: VecDeque<String>,
    declared: DeclaredMemory,
}

impl SoloLog {
    fn new(command: &ServerCommand, limits: Child) -> Self {
        let state =
            SoloLogState { lines: VecDeque::new(), declared: declared_memory::from_command(command, None) };
        Self { limits, given: discreet::known_secrets(command), state: Mutex::new(state) }
    }

    fn take_line(&self, line: String) {
        let mut state = lock(&self.state);
        if declared_memory::is_memory_line(&line) {
            state.declared.apply_log_line(&line);
        }
        // Reports with these lines may be published.
        let line = secrets::redact_text(&self.given.redact(line));
        tracing::debug!(target: "llama_server", "{line}");
        if state.lines.len() == self.limits.log_lines.max(1) {
            state.lines.pop_front();
        }
        state.lines.push_back(line);
    }

    /// Updates the declared memory: default sizes depend on the build.
    fn note_ready(&self, command: &ServerCommand, props: ServerProps, available: Option<u64>) {
        let mut state = lock(&self.state);
        if props.build.is_some() {
            state.declared = declared_memory::from_command(command, props.build);
            let SoloLogState { lines, declared, .. } = &mut *state;
            for line in lines.iter().filter(|line| declared_memory::is_memory_line(line)) {
                declared.apply_log_line(line);
            }
        }
        if let Some(bytes) = available {
            state.declared.set_available(bytes);
        }
        if let Some(slots) = props.slots {
            state.declared.set_slots(slots);
        }
    }

    fn classify_end(&self, end: &StartEnd<'_>) -> BackendFailure {
        failure::classify_end(&ServerKind::LlamaServer, end, &self.lines(), self.limits.failure_lines, 1)
    }

    fn failed_start(&self, end: &StartEnd<'_>) -> FailedStart {
        let exit = if let StartEnd::Exited(exit, _) = end { Some(*exit) } else { None };
        FailedStart { failure: Box::new(self.classify_end(end)), exit }
    }

    fn lines(&self) -> Vec<String> {
        lock(&self.state).lines.iter().cloned().collect()
    }
}
