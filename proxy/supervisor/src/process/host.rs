//! The real [`ProcessWorld`]: children on this machine, HTTP requests over their sockets, sensor readings.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::net::unix::pipe;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use warden_policies::GpuIndex;
use warden_policies::sample::HostMemory;
use warden_policies::standstill::ProcessActivity;
use warden_sensors::gpu::{GpuBaseline, VramUnknown};
use warden_sensors::oom::OomChange;
use warden_sensors::{BackendMetrics, HostConfirmed, backend_metrics};

use crate::clock;
use crate::error::SpawnError;
use crate::process::backend_http::{BackendHttp, OwnPort, ProbeFault};
use crate::process::child::ChildProcess;
use crate::process::endpoint::ListenAddress;
use crate::process::failure::OomEvidence;
use crate::process::gpus::{ChildBirth, ChildPopulation, GpuReader};
use crate::process::group::ProcessExit;
use crate::process::heir::ProcessHeir;
use crate::process::hints::{api_key, build_number, has_metrics};
use crate::process::kinship::MARK_VARIABLE;
use crate::process::needs::NeedsCheck;
use crate::process::needs::read_ahead::{ReadAheadResult, read_ahead};
use crate::process::nursery::NurseryHandle;
use crate::process::reclaim_file::{ReclaimChannel, ReclaimResult};
use crate::process::report_file::ReportSource;
use crate::process::root::family::RootFamily;
use crate::process::server_place::{ChildServer, find_server};
use crate::process::settings::ClientSetting;
use crate::process::{
    BackendProcess, BackendRequest, LineSink, MachineMemory, NoVram, ProbeResult, ProcessSample,
    ProcessWorld, SampleOptions, ServerAnswers, ServerProps, SpawnFuture, directories, lines, needs,
    slot_talk,
};
use crate::spec::{ServerCommand, ServerKind, SpawnRequest};
use crate::sync::lock;
use crate::view::log::OutputStream;
use crate::worker_threads::{WorkKind, run_job};

/// Maximum age of a reading of total GPU memory, which does not change.
const GPU_TOTALS_MAX_AGE: Duration = Duration::from_secs(60);

const LAST_PIECE_TIME: Duration = Duration::from_secs(1);

/// Time limit for checking files. Local disks answer within milliseconds, network disks within a second.
const NEEDS_CHECK_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct HostWorld {
    nursery: NurseryHandle,
    gpus: Arc<GpuReader>,
    population: Arc<ChildPopulation>,
    /// Lock for reading model files ahead, one model at a time: two readers gain nothing on one disk, and a
    /// hanging disk blocks only one thread.
    reader: Arc<tokio::sync::Mutex<()>>,
}

struct StartSurroundings {
    reclaim: Option<ReclaimChannel>,
    before: Option<GpuBaseline>,
    birth: ChildBirth,
}

impl HostWorld {
    pub(crate) fn new(nursery: NurseryHandle) -> Self {
        Self { nursery, gpus: Arc::default(), population: Arc::default(), reader: Arc::default() }
    }

    fn make_process(
        &self,
        command: &ServerCommand,
        socket: &Path,
        endpoint: ListenAddress,
        child: ChildProcess,
        output: ChildOutput,
        surroundings: StartSurroundings,
    ) -> Arc<dyn BackendProcess> {
        let StartSurroundings { reclaim, before, birth } = surroundings;
        let child = Arc::new(child);
        Arc::new(HostProcess {
            http: BackendHttp::new(&endpoint, api_key(command), OwnPort::from_endpoint(&endpoint, &child)),
            endpoint,
            kind: command.kind.clone(),
            report: ReportSource::from_command(command, socket),
            reclaim: reclaim.map(Arc::new),
            has_metrics: has_metrics(command),
            kills: Mutex::new(warden_sensors::OomKills::read(child.pid())),
            child,
            output,
            family: self.nursery.family().cloned(),
            bequeathed: Mutex::default(),
            gpus: ChildGpus { reader: Arc::clone(&self.gpus), before, birth, present: self.has_gpu() },
        })
    }
}

impl ProcessWorld for HostWorld {
    fn spawn(
        &self,
        request: SpawnRequest,
        socket: PathBuf,
        endpoint: ListenAddress,
        longest_line: usize,
        sink: LineSink,
    ) -> SpawnFuture<'_> {
        Box::pin(async move {
            directories::restore_directory(&socket)?;
            let command = request.command.clone();
            let reclaim = ReclaimChannel::make(&command, &socket);
            let birth = ChildBirth::new(&self.population);
            let before = self.gpus.read_within(BASELINE_MAX_AGE, BASELINE_TIMEOUT).await;
            let before = before.map(|reading| reading.snapshot.baseline());
            let mut request = request;
            // The socket's name is never used twice, and the next instance knows it.
            let mark = socket.to_string_lossy().into_owned();
            request.command.env.push((MARK_VARIABLE.to_owned(), mark));
            let child = self.nursery.spawn(request).await?;
            let output = ChildOutput::follow(&child, longest_line, &sink);
            output.claimed.cancel();
            let surroundings = StartSurroundings { reclaim, before, birth };
            Ok(self.make_process(&command, &socket, endpoint, child, output, surroundings))
        })
    }

    fn adopt(&self, heir: ProcessHeir, longest_line: usize, sink: LineSink) -> SpawnFuture<'_> {
        Box::pin(async move {
            let ProcessHeir { record, files } = heir;
            let (command, socket) = (record.command, record.socket);
            let binary = command.binary.clone();
            let Some(client) = self.nursery.root() else { return Err(SpawnError::NurseryGone { binary }) };
            let mark = Some(format!("{MARK_VARIABLE}={}", socket.display()));
            let child = client.watch_child(record.child, record.pid, files, mark, binary)?;
            // The previous instance owns the child and its output until it releases both.
            child.set_handed_over(true);
            let output = ChildOutput::follow(&child, longest_line, &sink);
            let surroundings = StartSurroundings {
                reclaim: ReclaimChannel::reopen(&command, &socket),
                // Without the GPU memory before the start, VRAM estimates begin again.
                before: None,
                birth: ChildBirth::new(&self.population),
            };
            Ok(self.make_process(&command, &socket, record.endpoint, child, output, surroundings))
        })
    }

    fn cancel_handover(&self, child: u64) {
        if let Some(family) = self.nursery.family() {
            family.forget(child);
        }
    }

    fn check_needs(&self, command: ServerCommand, running: Option<u32>) -> BoxFuture<'static, NeedsCheck> {
        Box::pin(async move {
            let look = run_job(WorkKind::ModelFiles, move || needs::check_needs(&command, running));
            // Start in spite of a slow disk: it may answer later, and the child reports missing files too.
            match timeout(NEEDS_CHECK_LIMIT, look).await {
                Ok(Ok(sight)) => return sight,
                Ok(Err(error)) => tracing::warn!(%error, "the files that a process needs were not checked"),
                Err(_) => tracing::warn!(
                    limit = ?NEEDS_CHECK_LIMIT,
                    "the files that a process needs could not be checked in time"
                ),
            }
            NeedsCheck::default()
        })
    }

    fn read_ahead(&self, command: ServerCommand, limit: Duration) -> BoxFuture<'static, ()> {
        let (available, reader) = (self.available_memory(), Arc::clone(&self.reader));
        Box::pin(async move {
            let begun = Instant::now();
            let reading = async {
                let turn = reader.lock_owned().await;
                let left = limit.saturating_sub(begun.elapsed());
                let read = move || {
                    let _turn = turn;
                    read_ahead(&command, available, left)
                };
                run_job(WorkKind::ModelFiles, read).await.ok()
            };
            // Stop waiting for a hanging disk, which then blocks only the reading thread.
            if let Ok(Some(ReadAheadResult { read, whole })) = timeout(limit + LAST_PIECE_TIME, reading).await
                && read > 0
            {
                let took_ms = clock::millis(begun.elapsed());
                tracing::info!(bytes = read, took_ms, whole, "the model was read ahead of the replacement");
            }
        })
    }

    fn available_memory(&self) -> Option<u64> {
        let totals = warden_sensors::host_totals();
        totals
            .inspect_err(|error| tracing::warn!(%error, "memory unknown"))
            .ok()
            .map(|totals| totals.available)
    }

    fn free_memory(&self, limit: Duration) -> BoxFuture<'_, MachineMemory> {
        Box::pin(async move {
            let gpus = self.gpus.free_memory(limit).await.unwrap_or_default();
            MachineMemory { host: self.available_memory(), gpus }
        })
    }

    fn total_memory(&self, limit: Duration) -> BoxFuture<'_, MachineMemory> {
        Box::pin(async move {
            let host = warden_sensors::host_totals().ok().map(|totals| totals.total);
            let reading = self.gpus.read_within(GPU_TOTALS_MAX_AGE, limit).await;
            let devices = reading.map(|reading| reading.devices).unwrap_or_default();
            let total = |gpu| Some((gpu, devices.reading(gpu)?.total?));
            MachineMemory { host, gpus: devices.with_vram().filter_map(total).collect() }
        })
    }

    fn gpu_restriction(
        &self,
        gpus: Vec<GpuIndex>,
        limit: Duration,
    ) -> BoxFuture<'_, Option<(String, String)>> {
        Box::pin(
            async move { self.gpus.read_within(GPU_TOTALS_MAX_AGE, limit).await?.devices.restriction(&gpus) },
        )
    }

    fn minute_of_day(&self) -> Option<u16> {
        clock::minute_of_day()
    }

    fn has_gpu(&self) -> bool {
        has_gpu()
    }
}

/// True if the machine has a GPU, even without a sensor for it.
pub fn has_gpu() -> bool {
    let numbered = |directory: &str, prefix: &str| {
        std::fs::read_dir(directory).is_ok_and(|entries| {
            entries.filter_map(Result::ok).any(|entry| {
                let name = entry.file_name();
                let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
                number.is_some_and(|number| number.parse::<u32>().is_ok())
            })
        })
    };
    numbered("/dev", "nvidia")
        || ["/dev/kfd", "/dev/dxg"].iter().any(|path| Path::new(path).exists())
        || numbered("/dev/dri", "renderD")
}

#[derive(Debug)]
struct ChildOutput {
    pipes: Option<(Arc<pipe::Receiver>, Arc<pipe::Receiver>)>,
    readers: tokio::sync::Mutex<JoinSet<()>>,
    claimed: CancellationToken,
    released: CancellationToken,
    bytes: Arc<AtomicU64>,
}

impl ChildOutput {
    /// Starts readers that wait until `claimed` is cancelled.
    fn follow(child: &ChildProcess, longest_line: usize, sink: &LineSink) -> Self {
        let pipes = child.take_output().map(|(stdout, stderr)| (Arc::new(stdout), Arc::new(stderr)));
        let (claimed, released) = (CancellationToken::new(), CancellationToken::new());
        let bytes: Arc<AtomicU64> = Arc::default();
        let mut readers = JoinSet::new();
        if let Some((stdout, stderr)) = &pipes {
            for (pipe, stream) in [(stdout, OutputStream::Stdout), (stderr, OutputStream::Stderr)] {
                let (pipe, sink, bytes) = (Arc::clone(pipe), Arc::clone(sink), Arc::clone(&bytes));
                let (claimed, released) = (claimed.clone(), released.clone());
                readers.spawn(async move {
                    claimed.cancelled().await;
                    let each = move |line| sink(stream, line);
                    lines::follow_lines(pipe, longest_line, released, &bytes, each).await;
                });
            }
        }
        Self { pipes, readers: tokio::sync::Mutex::new(readers), claimed, released, bytes }
    }

    /// Waits until the output of a dead child is read.
    async fn read_rest(&self) {
        /// Only a process that left the group can hold the output pipe open for longer.
        const LAST_OUTPUT_WAIT: Duration = Duration::from_millis(500);
        let mut readers = self.readers.lock().await;
        let rest = async { while readers.join_next().await.is_some() {} };
        if timeout(LAST_OUTPUT_WAIT, rest).await.is_err() {
            readers.abort_all();
        }
    }
}

#[derive(Debug)]
struct ChildGpus {
    reader: Arc<GpuReader>,
    before: Option<GpuBaseline>,
    birth: ChildBirth,
    /// True if the machine has a GPU, even without a sensor for it.
    present: bool,
}

#[derive(Debug)]
struct HostProcess {
    child: Arc<ChildProcess>,
    output: ChildOutput,
    /// Keeper of the child for the next instance, if this process forked the child.
    family: Option<Arc<RootFamily>>,
    bequeathed: Mutex<Option<u64>>,
    http: BackendHttp,
    endpoint: ListenAddress,
    kind: ServerKind,
    report: Option<ReportSource>,
    reclaim: Option<Arc<ReclaimChannel>>,
    has_metrics: bool,
    gpus: ChildGpus,
    kills: Mutex<warden_sensors::OomKills>,
}

impl HostProcess {
    /// Result of an answered probe: ready while the leader or its server lives. A probe that an unrelated
    /// process answered is lost: that process cannot be measured, watched or stopped.
    async fn probe_result(&self) -> ProbeResult {
        let is_known = match self.child.kinship().server() {
            None => false,
            // A living leader may start its server again.
            Some(ChildServer::Member(server)) => server.is_running(),
            Some(_) => true,
        };
        let could_look = is_known || find_server(&self.child, &self.endpoint).await;
        let is_watched = || self.child.kinship().watched_server().is_some();
        if self.child.leader_has_ended() && !is_watched() {
            if could_look && self.child.kinship().is_outlived() {
                tracing::error!(
                    pid = self.child.pid(),
                    "the program of this process has ended, and a server that is not its own answers: it is stopped; \
                     a script has to end in `exec llama-server \"$@\"`, and `podman run` to stay in the foreground"
                );
                self.child.kill();
            }
            return ProbeResult::Lost;
        }
        ProbeResult::Ready
    }

    async fn metrics(&self, limit: Duration) -> Option<BackendMetrics> {
        if !self.has_metrics {
            return None;
        }
        let answer = self.http.get_ok("/metrics", limit).await?;
        Some(backend_metrics::parse(&answer.text().await.ok()?))
    }
}

/// A file that cannot be inspected counts as existing.
fn is_removed(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

impl BackendProcess for HostProcess {
    fn pid(&self) -> u32 {
        self.child.pid()
    }

    fn server_pid(&self) -> u32 {
        self.child.kinship().watched_server().map_or(self.child.pid(), |server| server.process().pid)
    }

    fn terminate(&self) {
        self.child.terminate();
    }

    fn kill(&self) {
        self.child.kill();
    }

    fn wait(&self) -> BoxFuture<'_, ProcessExit> {
        Box::pin(async {
            let exit = self.child.wait().await;
            self.output.read_rest().await;
            exit
        })
    }

    fn is_running(&self) -> bool {
        self.child.is_running()
    }

    fn prepare_handover(&self) -> Option<(u64, Vec<OwnedFd>)> {
        let id = match (self.child.root_id(), &self.family) {
            (Some(id), _) => id,
            (None, Some(family)) => {
                let id = family.keep(Arc::clone(&self.child));
                *lock(&self.bequeathed) = Some(id);
                id
            }
            (None, None) => return None,
        };
        let copy = |file: BorrowedFd<'_>| file.try_clone_to_owned().ok();
        let mut files = vec![copy(self.child.pidfd())?];
        if let Some((stdout, stderr)) = &self.output.pipes {
            files.extend([copy(stdout.as_fd())?, copy(stderr.as_fd())?]);
        }
        Some((id, files))
    }

    fn take_handover_id(&self) -> Option<u64> {
        lock(&self.bequeathed).take()
    }

    fn take_ownership(&self) {
        self.child.set_handed_over(false);
        self.output.claimed.cancel();
    }

    fn release(&self) {
        self.child.set_handed_over(true);
        self.output.released.cancel();
    }

    fn probe(&self, timeout: Duration) -> BoxFuture<'_, ProbeResult> {
        Box::pin(async move {
            match self.http.try_get(self.kind.ready_path(), timeout).await {
                Ok(answer) if self.kind.is_ready(answer.status().as_u16()) => self.probe_result().await,
                Ok(_) => ProbeResult::Loading,
                Err(fault) => match &self.endpoint {
                    ListenAddress::Unix(path) if is_removed(path) => ProbeResult::SocketGone,
                    _ if fault == ProbeFault::TimedOut && !self.kind.is_llama_server() => ProbeResult::Silent,
                    _ => ProbeResult::Lost,
                },
            }
        })
    }

    fn read_props(&self, timeout: Duration) -> BoxFuture<'_, ServerProps> {
        Box::pin(async move {
            if !self.kind.is_llama_server() {
                return ServerProps::default();
            }
            let Some(answer) = self.http.get("/props", timeout).await else { return ServerProps::default() };
            let Ok(json) = answer.json::<serde_json::Value>().await else { return ServerProps::default() };
            let slots = json["total_slots"].as_u64().and_then(|slots| u32::try_from(slots).ok());
            ServerProps {
                slots: slots.filter(|slots| *slots > 0),
                n_ctx: json["default_generation_settings"]["n_ctx"].as_u64().or(json["n_ctx"].as_u64()),
                modalities: serde_json::from_value(json["modalities"].clone()).ok(),
                build: json["build_info"].as_str().and_then(build_number),
                reports_slots: slot_talk::slot_activity(self, timeout).await.is_some(),
            }
        })
    }

    fn apply_setting(&self, setting: ClientSetting, timeout: Duration) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            match self.http.post(&setting.path, setting.body, timeout).await {
                Some(answer) if answer.status().is_success() => Ok(()),
                Some(answer) => Err(format!("it answered {}", answer.status().as_u16())),
                None => Err("it did not answer in time".to_owned()),
            }
        })
    }

    fn send_request(&self, request: BackendRequest, limit: Duration) -> BoxFuture<'_, Option<(u16, Bytes)>> {
        let BackendRequest { path, body } = request;
        Box::pin(async move {
            let answer = match body {
                Some(body) => self.http.post(&path, body, limit).await?,
                None => self.http.get(&path, limit).await?,
            };
            read_answer(answer).await
        })
    }

    fn oom_evidence(&self) -> BoxFuture<'_, OomEvidence> {
        Box::pin(async move {
            let before = lock(&self.kills).clone();
            let compared = run_job(WorkKind::Kernel, move || before.compare()).await;
            match compared.ok().flatten() {
                None => OomEvidence::Unknown,
                Some(OomChange::Nowhere) => OomEvidence::No,
                Some(OomChange::InGroup) => OomEvidence::Group,
                Some(OomChange::OnMachine) => OomEvidence::Machine,
            }
        })
    }

    fn sample(&self, ask: SampleOptions) -> BoxFuture<'_, ProcessSample> {
        Box::pin(async move {
            // Read the OOM-kill counters at each sample. Other processes are killed too, so the comparison at
            // the child's end must cover only seconds.
            let pid = self.server_pid();
            if let Ok(now) = run_job(WorkKind::Kernel, move || warden_sensors::OomKills::read(pid)).await {
                *lock(&self.kills) = now;
            }
            // Each of the two requests may have to wait.
            let metrics = async { if ask.metrics { self.metrics(ask.limit).await } else { None } };
            let slots =
                async { if ask.slots { slot_talk::slot_activity(self, ask.limit).await } else { None } };
            let (seen, metrics, slots) =
                tokio::join!(self.gpus.reader.read_within(ask.gpu_age, ask.limit), metrics, slots);
            let (pid, server_pid) = (self.child.pid(), self.server_pid());
            let (kinship, report) = (Arc::clone(self.child.kinship()), self.report.clone());
            let (reclaim, before) = (self.reclaim.clone(), self.gpus.before.clone());
            let (alone, gpu_here) = (self.gpus.birth.is_alone(), self.gpus.present);
            let read = move || {
                let outside = kinship.measured_relatives();
                let host = warden_sensors::host_memory(pid);
                let host = host.inspect_err(|error| tracing::debug!(%error, "memory unknown")).ok();
                let (vram, no_vram, devices) = match seen {
                    None => (Vec::new(), Some(NoVram::new(NO_DRIVER_ANSWER)), None),
                    Some(reading) => {
                        let before = before.as_ref().map(|before| (before, alone));
                        let vram = reading.snapshot.child_vram(pid, &outside, before);
                        let no_vram = vram.unavailable.and_then(|why| no_vram(&why, gpu_here));
                        (vram.readings, no_vram, Some(reading.devices))
                    }
                };
                let sample = ProcessSample {
                    host: combine(
                        host,
                        warden_sensors::host_memory_of(outside.iter().copied()),
                        HostMemory::plus,
                    ),
                    confirmed: if ask.by_page { confirmed_memory(pid, &outside) } else { None },
                    vram,
                    no_vram,
                    unmeasured: None,
                    devices,
                    totals: warden_sensors::host_totals().ok(),
                    group: warden_sensors::cgroup_memory(server_pid)
                        .ok()
                        .filter(|group| !group.path.is_empty()),
                    report: report.and_then(|report| report.read(pid, &outside)),
                    answers: ServerAnswers { metrics, slots },
                    standing: warden_sensors::process_run_state(server_pid),
                    parts: reclaim.map(|channel| channel.parts()),
                };
                match kinship.server() {
                    Some(ChildServer::Unmeasured(why)) => sample.without_figures(why.sentence(), gpu_here),
                    _ => sample,
                }
            };
            // Without `children` files, the kernel needs a walk over /proc.
            run_job(WorkKind::Kernel, read).await.unwrap_or_default()
        })
    }

    fn read_effort(&self) -> BoxFuture<'_, Option<ProcessActivity>> {
        Box::pin(async move {
            let (pid, kinship) = (self.child.pid(), Arc::clone(self.child.kinship()));
            let read = move || {
                let others = kinship.relatives().into_iter().filter(|one| !one.is_zombie);
                warden_sensors::effort(pid, others.map(|one| one.process.pid))
            };
            let effort = run_job(WorkKind::Kernel, read).await.ok().flatten()?;
            Some(ProcessActivity { output: self.output.bytes.load(Ordering::Relaxed), ..effort })
        })
    }

    fn reclaim(&self, wait: Duration) -> BoxFuture<'_, ReclaimResult> {
        Box::pin(async move {
            match &self.reclaim {
                Some(channel) => channel.reclaim(wait).await,
                None => ReclaimResult::NONE_ASKED,
            }
        })
    }
}

/// Host memory of the group and of `outside`, read page by page.
fn confirmed_memory(leader: u32, outside: &[u32]) -> Option<u64> {
    let group = warden_sensors::host_confirmed(leader);
    let group = group.inspect_err(|error| tracing::debug!(%error, "memory not confirmed")).ok();
    let outside = warden_sensors::host_confirmed_of(outside.iter().copied());
    combine(group.map(HostConfirmed::charged), outside.map(HostConfirmed::charged), u64::saturating_add)
}

/// Combines two values; a missing one leaves the other unchanged.
fn combine<T>(one: Option<T>, other: Option<T>, add: impl FnOnce(T, T) -> T) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(add(one, other)),
        (one, other) => one.or(other),
    }
}

/// The answer with the tokens of a prompt takes 8 MB for a million tokens.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Returns `None` if the body is too long.
async fn read_answer(mut answer: reqwest::Response) -> Option<(u16, Bytes)> {
    let status = answer.status().as_u16();
    let mut all = Vec::new();
    while let Some(piece) = answer.chunk().await.ok()? {
        if all.len() + piece.len() > MAX_ANSWER_BYTES {
            return None;
        }
        all.extend_from_slice(&piece);
    }
    Some((status, all.into()))
}

/// Returns `None` on a machine without a GPU.
fn no_vram(why: &VramUnknown, gpu_here: bool) -> Option<NoVram> {
    let nothing = matches!(why, VramUnknown::NoDevice(_));
    let is_normal = why.is_normal() && !nothing;
    (gpu_here || !nothing).then(|| NoVram { why: why.sentence(), is_normal })
}

const NO_DRIVER_ANSWER: &str = "the VRAM policy is off because the driver does not answer";

/// Maximum age of the GPU memory baseline of a new process.
const BASELINE_MAX_AGE: Duration = Duration::from_millis(50);
const BASELINE_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
