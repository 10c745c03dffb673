//! One llama-server outside of any fleet, for experiments: started and read on request, never replaced.
//!
//! ```text
//!     Starter::start ── spawn (nursery, private socket) ── probes ── 200 ──> Solo ── sample, … ── stop
//!                        └── it ends, or time is over ──> Failure
//! ```
//!
//! It uses the same parts as a backend of a fleet, so its memory is read in the same way. It makes no
//! decisions and sends no requests: callers talk to its socket.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_policies::sample::{BackendSample, SampleEdge, WorkDone};
use warden_policies::secrets::{self, KnownSecrets};
use warden_policies::{GenerationId, ModelName, ServerFacts};
use warden_sensors::report::ActiveFix;
use warden_sensors::{CudaReport, HostTotals};

use crate::error::{BackendFailure, FleetError, SpawnError};
use crate::memory::declared_memory;
use crate::process::endpoint::{ListenAddress, choose_endpoint, listen_flags};
use crate::process::failure::{self, StartEnd, StartLateness};
use crate::process::group::ProcessExit;
use crate::process::hints::api_key;
use crate::process::host::HostWorld;
use crate::process::nursery::NurseryHandle;
use crate::process::socket_name::{SOCKET_PATH_LIMIT, socket_path};
use crate::process::standstill::until_stalled;
use crate::process::{
    BackendProcess, LineSink, NoVram, ProbeResult, ProcessWorld, SampleOptions, ServerProps, directories,
    discreet, reclaim_file, report_file,
};
use crate::spec::{ServerCommand, SocketMode, SpawnRequest, WatchConfig};
use crate::sync::lock;
use crate::view::{DeviceView, InputModalities};

/// Starts single processes.
#[derive(Clone, Debug)]
pub struct SoloStarter {
    world: Arc<dyn ProcessWorld>,
    directory: PathBuf,
    watch: WatchConfig,
    lifecycle: LifecyclePolicy,
    /// Name in socket files.
    name: ModelName,
    next: Arc<AtomicU64>,
}

/// Process to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SoloSpec {
    /// Binary, arguments except for the address, environment.
    pub command: ServerCommand,
    /// Added to our own `oom_score_adj`.
    pub oom_score_adj: i32,
    /// Kind of address.
    pub socket: SocketMode,
    /// Known facts about its binary.
    pub facts: ServerFacts,
}

impl SoloStarter {
    /// `runtime_dir`: a private directory for sockets with a short path, created if missing. Of
    /// `lifecycle`, start, probes and stop apply; of `watch`, the number of kept lines and the limit of a
    /// reading.
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
        Self::in_world(
            Arc::new(HostWorld::new(nursery)),
            runtime_dir,
            lifecycle,
            watch,
            ModelName::new("solo"),
        )
    }

    pub(crate) fn in_world(
        world: Arc<dyn ProcessWorld>,
        runtime_dir: &Path,
        lifecycle: &LifecyclePolicy,
        watch: WatchConfig,
        name: ModelName,
    ) -> Result<Self, FleetError> {
        let directory = std::path::absolute(runtime_dir).unwrap_or_else(|_| runtime_dir.to_owned());
        let path = socket_path(&directory, &name, GenerationId(99_999));
        let length = path.as_os_str().len();
        if length > SOCKET_PATH_LIMIT {
            return Err(FleetError::SocketPath { path, length, limit: SOCKET_PATH_LIMIT });
        }
        directories::prepare_runtime(&directory)?;
        Ok(Self { world, directory, watch, lifecycle: *lifecycle, name, next: Arc::default() })
    }

    /// Starts a process and waits until it is ready. Dropping the future kills it.
    ///
    /// # Errors
    ///
    /// It ends or hangs before it is ready. The failure has its last lines.
    pub async fn start(&self, spec: &SoloSpec) -> Result<SoloProcess, Box<BackendFailure>> {
        self.start_unless(spec, std::future::pending()).await.map_err(|unstarted| unstarted.failure)
    }

    /// Same as [`Self::start`], with the exit if it ended. When `stop` resolves first, the process is
    /// killed and reaped.
    pub(crate) async fn start_unless(
        &self,
        spec: &SoloSpec,
        stop: impl Future<Output = ()>,
    ) -> Result<SoloProcess, FailedStart> {
        let generation = GenerationId(self.next.fetch_add(1, Ordering::Relaxed) + 1);
        let socket = socket_path(&self.directory, &self.name, generation);
        let said = Arc::new(SoloLog::new(&spec.command, self.watch.child.log_lines));
        let mut request = SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj };
        let (endpoint, failed) = match choose_endpoint(spec.socket, spec.facts, &socket) {
            Ok(endpoint) => (endpoint, None),
            Err(error) => (ListenAddress::Unix(socket.clone()), Some(error)),
        };
        request.command.args.extend(listen_flags(&endpoint));
        report_file::announce_report(&mut request.command, &socket, true);
        reclaim_file::announce_reclaim(&mut request.command, &socket, false);
        let files = SoloFiles(socket.clone());
        files.remove();
        let told = Arc::clone(&said);
        let sink: LineSink = Arc::new(move |_, line| told.take_line(line));
        let spawned = Instant::now();
        let process = if let Some(source) = failed {
            Err(SpawnError::Exec { binary: request.command.binary, source })
        } else {
            let (at, longest) = (endpoint.clone(), self.watch.child.log_line_bytes);
            self.world.spawn(request, socket.clone(), at, longest, sink).await
        };
        let lines = self.watch.child.failure_lines;
        let judge = |end: StartEnd<'_>, said: &SoloLog| FailedStart {
            failure: Box::new(failure::classify_end(&end, &said.lines(), lines, 1)),
            exit: if let StartEnd::Exited(exit, _) = end { Some(exit) } else { None },
        };
        let process = process.map_err(|error| judge(StartEnd::NotSpawned(&error), &said))?;
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
                Err(judge(StartEnd::Exited(exit, failure::OomEvidence::Unknown), &solo.said))
            }
            () = self.ready(&solo) => {
                solo.ready_after = spawned.elapsed();
                solo.props = solo.process.read_props(self.lifecycle.probe_timeout).await;
                solo.said.note_ready(&spec.command, solo.props, self.world.available_memory());
                Ok(solo)
            }
            lateness = until_too_late(&*solo.process, &self.lifecycle) => {
                let unstarted = judge(StartEnd::TimedOut(lateness), &solo.said);
                solo.stop().await;
                Err(unstarted)
            }
            () = stop => {
                solo.process.kill();
                let exit = solo.process.wait().await;
                Err(judge(StartEnd::Exited(exit, failure::OomEvidence::Unknown), &solo.said))
            }
        }
    }

    async fn ready(&self, solo: &SoloProcess) {
        while solo.process.probe(self.lifecycle.probe_timeout).await != ProbeResult::Ready {
            tokio::time::sleep(self.lifecycle.start_probe_interval).await;
        }
    }

    /// True if the machine has a GPU, whether a sensor supports it or not.
    pub(crate) fn has_gpu(&self) -> bool {
        self.world.has_gpu()
    }

    /// Available memory of the machine in bytes; `None` if unreadable.
    pub fn available(&self) -> Option<u64> {
        self.world.available_memory()
    }
}

/// Resolves when a start exceeds its time limit.
async fn until_too_late(process: &dyn BackendProcess, lifecycle: &LifecyclePolicy) -> StartLateness {
    let (in_all, still) = (lifecycle.start_timeout, lifecycle.start_stall);
    tokio::select! {
        () = tokio::time::sleep(in_all) => StartLateness::NotReady(in_all),
        () = until_stalled(process, still) => StartLateness::Stalled(still),
    }
}

/// A failed start.
#[derive(Debug)]
pub(crate) struct FailedStart {
    pub(crate) failure: Box<BackendFailure>,
    /// Exit of the process; `None` if there was none, or it was not ready in time.
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

/// Properties from `/props` when it was ready; unknown ones are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SoloProps {
    /// Number of requests that it evaluates at a time.
    pub slots: Option<u32>,
    /// Context of a slot in tokens.
    pub n_ctx: Option<u64>,
    /// Input kinds besides text.
    pub modalities: Option<InputModalities>,
    /// llama.cpp's build number.
    pub build: Option<u32>,
}

/// A complete reading.
#[derive(Clone, Debug)]
pub struct SoloReading {
    /// Sample for the policies.
    pub sample: BackendSample,
    /// Bytes of host memory that it may keep and that are not measured.
    pub allowed: u64,
    /// Why VRAM is unknown, if it should be known.
    pub vram_unknown: Option<String>,
    /// The GPUs.
    pub devices: Vec<DeviceView>,
    /// Memory of the machine.
    pub totals: Option<HostTotals>,
    /// Report of GPU memory, if the build writes one.
    pub report: Option<CudaReport>,
}

impl SoloReading {
    /// Captured graphs, by its report; `None` if the build limits them, because they may still grow up to
    /// the limit.
    pub fn graphs(&self) -> Option<u64> {
        let report =
            self.report.as_ref().filter(|report| !report.active.contains(&ActiveFix::GraphCacheCap))?;
        Some(report.totals().counts.graphs_live)
    }
}

impl SoloProcess {
    /// Address on which it listens.
    pub fn endpoint(&self) -> &ListenAddress {
        &self.endpoint
    }

    /// API key that it requires.
    pub fn api_key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// PID, which is also its process group.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Time from the spawn until it was ready.
    pub fn ready_after(&self) -> Duration {
        self.ready_after
    }

    /// Properties when it was ready.
    pub fn props(&self) -> SoloProps {
        let ServerProps { slots, n_ctx, modalities, build, .. } = self.props;
        SoloProps { slots, n_ctx, modalities, build }
    }

    /// Reads its memory now. The caller supplies `work` and `in_flight`, because requests do not pass
    /// through here.
    pub async fn read_sample(
        &self,
        edge: SampleEdge,
        work: WorkDone,
        in_flight: u32,
        largest_prompt: u64,
    ) -> SoloReading {
        let limit = self.watch.sensors.read_limit;
        let ask =
            SampleOptions { by_page: false, gpu_age: Duration::ZERO, limit, metrics: true, slots: false };
        let at = self.spawned.elapsed();
        let reading = self.process.sample(ask).await;
        let (pools, allowed) = self.said.declared_pools(reading.report.as_ref(), &reading.vram);
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
            allowed,
            vram_unknown: reading.no_vram.filter(|no_vram| !no_vram.is_normal).map(|NoVram { why, .. }| why),
            devices: reading.devices.map(|devices| devices.views()).unwrap_or_default(),
            totals: reading.totals,
            report: reading.report,
        }
    }

    /// Memory that it keeps on purpose, in sentences.
    pub fn allowance(&self) -> Vec<String> {
        lock(&self.said.state).declared.source_sentences()
    }

    /// Last lines of output, oldest first.
    pub fn last_lines(&self) -> Vec<String> {
        self.said.lines()
    }

    /// Handle to its output, readable after its end, too.
    pub fn output(&self) -> SoloOutput {
        SoloOutput(Arc::clone(&self.said))
    }

    /// Waits until it ends by itself, and returns the failure. May be called again, may be dropped.
    pub async fn until_end(&self) -> BackendFailure {
        let exit = self.process.wait().await;
        self.classify_exit(exit)
    }

    /// Same as [`Self::until_end`], with the exit.
    pub async fn until_exit(&self) -> (ProcessExit, BackendFailure) {
        let exit = self.process.wait().await;
        (exit, self.classify_exit(exit))
    }

    /// Waits until it has logged a crash but neither ends nor answers a probe within
    /// `lifecycle.crash_ends`. Returns the crash line. Some builds wait for a debugger after a crash. May
    /// be dropped.
    pub async fn until_crash_hang(&self) -> String {
        let LifecyclePolicy { probe_interval, crash_ends, .. } = self.lifecycle;
        loop {
            tokio::time::sleep(probe_interval.min(crash_ends)).await;
            let Some(line) = failure::crash_line(&self.said.lines()) else { continue };
            if self.process.probe(crash_ends).await.is_answer() {
                continue;
            }
            // An ending process also refuses connections for a moment.
            tokio::time::sleep(crash_ends).await;
            if !self.process.probe(crash_ends).await.is_answer() {
                return line;
            }
        }
    }

    fn classify_exit(&self, exit: ProcessExit) -> BackendFailure {
        failure::classify_end(
            &StartEnd::Exited(exit, failure::OomEvidence::Unknown),
            &self.said.lines(),
            self.watch.child.failure_lines,
            1,
        )
    }

    /// Sends TERM, and KILL after the grace, and returns the exit. Close all connections first:
    /// llama-server waits for them.
    pub async fn stop(self) -> ProcessExit {
        self.process.terminate();
        if let Ok(exit) = tokio::time::timeout(self.lifecycle.stop_grace, self.process.wait()).await {
            return exit;
        }
        self.process.kill();
        self.process.wait().await
    }
}

/// Output of a process, which outlives it.
#[derive(Clone, Debug)]
pub struct SoloOutput(Arc<SoloLog>);

impl SoloOutput {
    /// Lines so far, including those no longer kept.
    pub fn line_count(&self) -> usize {
        lock(&self.0.state).heard
    }

    /// Lines after the first `heard`, as far as kept, oldest first.
    pub fn lines_since(&self, heard: usize) -> Vec<String> {
        let state = lock(&self.0.state);
        let new = state.heard.saturating_sub(heard);
        state.lines.iter().skip(state.lines.len().saturating_sub(new)).cloned().collect()
    }
}

/// Socket and report of the process, removed when it is gone.
#[derive(Debug)]
struct SoloFiles(PathBuf);

impl SoloFiles {
    fn remove(&self) {
        drop(std::fs::remove_file(&self.0));
        report_file::remove_reports(&self.0);
    }
}

impl Drop for SoloFiles {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Output of the process, and the memory that it declares there.
#[derive(Debug)]
struct SoloLog {
    keep: usize,
    given: KnownSecrets,
    state: Mutex<SoloLogState>,
}

#[derive(Debug)]
struct SoloLogState {
    lines: VecDeque<String>,
    /// Lines so far, including those no longer kept.
    heard: usize,
    declared: DeclaredMemory,
}

impl SoloLog {
    fn new(command: &ServerCommand, keep: usize) -> Self {
        let state = SoloLogState {
            lines: VecDeque::new(),
            heard: 0,
            declared: declared_memory::from_command(command, None),
        };
        Self { keep: keep.max(1), given: discreet::known_secrets(command), state: Mutex::new(state) }
    }

    fn take_line(&self, line: String) {
        let mut state = lock(&self.state);
        if declared_memory::is_memory_line(&line) {
            state.declared.apply_log_line(&line);
        }
        // Kept lines go into reports that may be published.
        let line = secrets::redact_text(&self.given.redact(line));
        tracing::debug!(target: "llama_server", "{line}");
        state.heard += 1;
        if state.lines.len() == self.keep {
            state.lines.pop_front();
        }
        state.lines.push_back(line);
    }

    /// Records that it is ready: defaults depend on its build.
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

    fn declared_pools(
        &self,
        report: Option<&CudaReport>,
        vram: &[warden_policies::VramReading],
    ) -> (Vec<(warden_policies::MemoryKind, u64)>, u64) {
        let state = lock(&self.state);
        (
            declared_memory::measured_pools(&state.declared, report, vram),
            declared_memory::allowed_bytes(&state.declared),
        )
    }

    fn lines(&self) -> Vec<String> {
        lock(&self.state).lines.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_since_a_moment_is_told_as_far_as_it_is_kept() {
        let command = ServerCommand::from_binary("x".into());
        let said = Arc::new(SoloLog::new(&command, 3));
        let output = SoloOutput(Arc::clone(&said));
        let take = |lines: &[&str]| {
            for line in lines {
                said.take_line((*line).to_owned());
            }
        };
        take(&["a", "b"]);
        let heard = output.line_count();
        assert_eq!(output.lines_since(heard), Vec::<String>::new());
        take(&["c"]);
        assert_eq!(output.lines_since(heard), ["c"]);
        take(&["d", "e", "f"]);
        assert_eq!(output.lines_since(heard), ["d", "e", "f"], "`c` is not kept any more");
    }
}
