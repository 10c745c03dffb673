//! The real [`ProcessWorld`]: children on this machine, HTTP requests over their sockets, sensor readings.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use rustix::process::Pid;
use tokio::net::unix::pipe;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use warden_policies::GpuIndex;
use warden_policies::health::SlotActivity;
use warden_policies::sample::HostMemory;
use warden_policies::standstill::ProcessActivity;
use warden_sensors::gpu::{GpuBaseline, GpuSnapshot, VramUnknown};
use warden_sensors::oom::OomChange;
use warden_sensors::{BackendMetrics, HostConfirmed, backend_metrics};

use crate::clock;
use crate::error::SpawnError;
use crate::process::backend_http::BackendHttp;
use crate::process::child::{ChildProcess, RootChild};
use crate::process::endpoint::ListenAddress;
use crate::process::failure::OomEvidence;
use crate::process::gpus::GpuReader;
use crate::process::group::ProcessExit;
use crate::process::heir::ProcessHeir;
use crate::process::hints::{api_key, build_number, has_metrics};
use crate::process::kinship::MARK_VARIABLE;
use crate::process::needs::read_ahead::{ReadAheadResult, read_ahead};
use crate::process::needs::{self, NeedsCheck};
use crate::process::nursery::NurseryHandle;
use crate::process::own_port::OwnPort;
use crate::process::population::{ChildBirth, ChildPopulation};
use crate::process::reclaim_file::{ReclaimChannel, ReclaimResult};
use crate::process::report_file::ReportSource;
use crate::process::root::family::RootFamily;
use crate::process::server_place::ChildServer;
use crate::process::settings::ClientSetting;
use crate::process::{
    BackendProcess, BackendRequest, LineSink, MachineMemory, NoVram, ProbeResult, ProcessSample,
    ProcessWorld, SampleOptions, ServerProps, backend_slots, directories, lines, server_search,
};
use crate::spec::{ServerCommand, SpawnRequest};
use crate::sync::lock;
use crate::view::log::OutputStream;
use crate::worker_threads::{WorkKind, run_job};

/// Maximum age of a reading from which total GPU memory is taken; totals do not change.
const GPU_TOTALS_MAX_AGE: Duration = Duration::from_secs(60);

/// Extra time for reading the last piece when files are read ahead.
const LAST_PIECE_TIME: Duration = Duration::from_secs(1);

/// Time limit for checking files. Local disks answer within milliseconds, network disks within a second.
const NEEDS_CHECK_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct HostWorld {
    nursery: NurseryHandle,
    gpus: Arc<GpuReader>,
    population: Arc<ChildPopulation>,
    /// Lock that lets one model at a time be read ahead: two readers gain nothing on one disk, and a
    /// hanging disk then blocks only one thread.
    reader: Arc<tokio::sync::Mutex<()>>,
}

impl HostWorld {
    pub(crate) fn new(nursery: NurseryHandle) -> Self {
        Self { nursery, gpus: Arc::default(), population: Arc::default(), reader: Arc::default() }
    }
}

/// State of the machine when a child was created.
struct StartSurroundings {
    desk: Option<ReclaimChannel>,
    /// True if the previous instance still owns the child and reads its output.
    is_others: bool,
    before: Option<GpuBaseline>,
    birth: ChildBirth,
}

impl HostWorld {
    /// Makes a process from a child, and starts reading its output.
    #[expect(clippy::too_many_arguments, reason = "each is another thing, and it is called in two places")]
    fn make_process(
        &self,
        command: &ServerCommand,
        socket: &Path,
        endpoint: &ListenAddress,
        child: ChildProcess,
        surroundings: StartSurroundings,
        longest_line: usize,
        sink: LineSink,
    ) -> Arc<dyn BackendProcess> {
        let kills = Mutex::new(warden_sensors::OomKills::read(child.pid()));
        let (mut readers, over, begun) = (JoinSet::new(), CancellationToken::new(), CancellationToken::new());
        if surroundings.is_others {
            child.hand_over();
        } else {
            begun.cancel();
        }
        let output = child.take_output().map(|(stdout, stderr)| (Arc::new(stdout), Arc::new(stderr)));
        let said: Arc<AtomicU64> = Arc::default();
        if let Some((stdout, stderr)) = output.clone() {
            let (to_out, to_err) = (Arc::clone(&sink), sink);
            let of = |pipe, stream, to: LineSink| {
                let (begun, over, said) = (begun.clone(), over.clone(), Arc::clone(&said));
                async move {
                    begun.cancelled().await;
                    lines::follow_lines(pipe, longest_line, over, &said, move |line| to(stream, line)).await;
                }
            };
            readers.spawn(of(stdout, OutputStream::Stdout, to_out));
            readers.spawn(of(stderr, OutputStream::Stderr, to_err));
        }
        let child = Arc::new(child);
        Arc::new(HostProcess {
            http: BackendHttp::new(endpoint, api_key(command), OwnPort::from_endpoint(endpoint, &child)),
            endpoint: endpoint.clone(),
            report: ReportSource::from_command(command, socket),
            desk: surroundings.desk.map(Arc::new),
            output_bytes: said,
            has_metrics: has_metrics(command),
            child,
            readers: tokio::sync::Mutex::new(readers),
            output_released: over,
            output,
            family: self.nursery.family().cloned(),
            bequeathed: Mutex::default(),
            output_claimed: begun,
            gpus: Arc::clone(&self.gpus),
            before: surroundings.before,
            birth: surroundings.birth,
            kills,
            gpu_here: self.has_gpu(),
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
    ) -> BoxFuture<'_, Result<Arc<dyn BackendProcess>, SpawnError>> {
        Box::pin(async move {
            directories::restore_directory(&socket)?;
            let made_of = request.command.clone();
            let desk = ReclaimChannel::make(&made_of, &socket);
            let birth = ChildBirth::new(&self.population);
            let before = self.gpus.read_within(BASELINE_MAX_AGE, BASELINE_TIMEOUT).await;
            let before = before.map(|(snapshot, _)| snapshot.baseline());
            let mut request = request;
            // Use the socket's name as the mark: it is never used twice, and the next instance knows it.
            let mark = socket.to_string_lossy().into_owned();
            request.command.env.push((MARK_VARIABLE.to_owned(), mark));
            let child = self.nursery.spawn(request).await?;
            let surroundings = StartSurroundings { desk, is_others: false, before, birth };
            Ok(self.make_process(&made_of, &socket, &endpoint, child, surroundings, longest_line, sink))
        })
    }

    fn adopt(
        &self,
        heir: ProcessHeir,
        longest_line: usize,
        sink: LineSink,
    ) -> BoxFuture<'_, Result<Arc<dyn BackendProcess>, SpawnError>> {
        Box::pin(async move {
            let ProcessHeir { record, files } = heir;
            let binary = record.command.binary.clone();
            let gone = || SpawnError::NurseryGone { binary: binary.clone() };
            let client = self.nursery.root().cloned().ok_or_else(gone)?;
            let leader = Pid::from_raw(record.pid).ok_or_else(gone)?;
            let mut files = files.into_iter();
            let pidfd = files.next().ok_or_else(gone)?;
            let output = files.next().zip(files.next());
            let mark = Some(format!("{MARK_VARIABLE}={}", record.socket.display()));
            let child =
                ChildProcess::of_root(RootChild { id: record.child, leader, client }, pidfd, output, mark)?;
            // The GPU memory before the process was created is unknown here, so VRAM estimates begin anew.
            let (socket, endpoint) = (record.socket, record.endpoint);
            let desk = ReclaimChannel::reopen(&record.command, &socket);
            let surroundings = StartSurroundings {
                desk,
                is_others: true,
                before: None,
                birth: ChildBirth::new(&self.population),
            };
            Ok(self.make_process(
                &record.command,
                &socket,
                &endpoint,
                child,
                surroundings,
                longest_line,
                sink,
            ))
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
            // Do not delay a start because of a slow disk, which may answer when the child reads it. The
            // child reports missing files, too.
            match timeout(NEEDS_CHECK_LIMIT, look).await {
                Ok(Ok(sight)) => sight,
                Ok(Err(error)) => {
                    tracing::warn!(%error, "the files that a process needs were not checked");
                    NeedsCheck::default()
                }
                Err(_) => {
                    tracing::warn!(limit = ?NEEDS_CHECK_LIMIT, "the files that a process needs could not be checked in time");
                    NeedsCheck::default()
                }
            }
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
            // Stop waiting after the limit: a hanging disk then blocks only the reading thread.
            if let Ok(Some(ReadAheadResult { read, whole })) = timeout(limit + LAST_PIECE_TIME, reading).await
                && read > 0
            {
                let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
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
            let Some((_, devices)) = self.gpus.read_within(GPU_TOTALS_MAX_AGE, limit).await else {
                return MachineMemory { host, gpus: Vec::new() };
            };
            let total = |gpu| Some((gpu, devices.reading(gpu)?.total?));
            MachineMemory { host, gpus: devices.with_vram().filter_map(total).collect() }
        })
    }

    fn gpu_restriction(
        &self,
        gpus: Vec<GpuIndex>,
        limit: Duration,
    ) -> BoxFuture<'_, Option<(String, String)>> {
        Box::pin(async move {
            let (_, devices) = self.gpus.read_within(GPU_TOTALS_MAX_AGE, limit).await?;
            devices.restriction(&gpus)
        })
    }

    fn minute_of_day(&self) -> Option<u16> {
        clock::minute_of_day()
    }

    fn has_gpu(&self) -> bool {
        has_gpu()
    }
}

/// True if the machine has a GPU, whether a sensor supports it or not.
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
struct HostProcess {
    child: Arc<ChildProcess>,
    readers: tokio::sync::Mutex<JoinSet<()>>,
    /// Cancelled when the next instance reads the output.
    output_released: CancellationToken,
    output: Option<(Arc<pipe::Receiver>, Arc<pipe::Receiver>)>,
    /// Keeper of the child for the next instance, if this process forked the child.
    family: Option<Arc<RootFamily>>,
    bequeathed: Mutex<Option<u64>>,
    /// Cancelled as soon as this instance may read the child's output.
    output_claimed: CancellationToken,
    http: BackendHttp,
    endpoint: ListenAddress,
    report: Option<ReportSource>,
    /// Number of bytes of output so far.
    output_bytes: Arc<AtomicU64>,
    /// Channel for asking the process to give memory back; `None` without one.
    desk: Option<Arc<ReclaimChannel>>,
    /// True if the server has a metrics endpoint.
    has_metrics: bool,
    gpus: Arc<GpuReader>,
    /// GPU memory before the child was created.
    before: Option<GpuBaseline>,
    birth: ChildBirth,
    /// OOM-kill counters at the last reading.
    kills: Mutex<warden_sensors::OomKills>,
    /// True if the machine has a GPU, even if no sensor supports it.
    gpu_here: bool,
}

impl HostProcess {
    /// Result of a probe that was answered: ready, if the child or one of its descendants answered. If the
    /// leader has ended and an unrelated process answers, that process cannot be measured, watched or
    /// stopped, so it is not used.
    async fn probe_result(&self) -> ProbeResult {
        let is_known = match self.child.kinship().server() {
            None => false,
            // If the leader lives, it may start its server again.
            Some(ChildServer::Member(server)) => server.is_running(),
            Some(_) => true,
        };
        let could_look = is_known || server_search::find_server(&self.child, &self.endpoint).await;
        let is_watched = || self.child.kinship().watched_server().is_some();
        if self.child.leader_has_ended() && !is_watched() {
            if could_look && self.child.kinship().is_outlived() {
                tracing::error!(
                    pid = self.child.pid(),
                    "the program of this process has ended, and a server that is not its own answers: it is stopped; a script has \
                     to end in `exec llama-server \"$@\"`, and `podman run` to stay in the foreground"
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
        let answer = self.http.get("/metrics", limit).await?;
        if answer.status() != reqwest::StatusCode::OK {
            return None;
        }
        Some(backend_metrics::parse(&answer.text().await.ok()?))
    }

    async fn slots(&self, limit: Duration) -> Option<SlotActivity> {
        let answer = self.http.get("/slots", limit).await?;
        if answer.status() != reqwest::StatusCode::OK {
            return None;
        }
        backend_slots::read_slots(&answer.json().await.ok()?)
    }
}

/// True if a file does not exist. A file that cannot be inspected counts as existing.
fn is_removed(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}

/// Time limit for reading the remaining output of a dead child. Only a process that left the group can
/// still hold the pipe open.
const LAST_OUTPUT_WAIT: Duration = Duration::from_millis(500);

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
            let mut readers = self.readers.lock().await;
            let rest = async { while readers.join_next().await.is_some() {} };
            if timeout(LAST_OUTPUT_WAIT, rest).await.is_err() {
                readers.abort_all();
            }
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
        if let Some((stdout, stderr)) = &self.output {
            files.extend([copy(stdout.as_fd())?, copy(stderr.as_fd())?]);
        }
        Some((id, files))
    }

    fn take_handover_id(&self) -> Option<u64> {
        lock(&self.bequeathed).take()
    }

    fn take_ownership(&self) {
        self.child.claim();
        self.output_claimed.cancel();
    }

    fn release(&self) {
        self.child.hand_over();
        self.output_released.cancel();
    }

    fn probe(&self, timeout: Duration) -> BoxFuture<'_, ProbeResult> {
        Box::pin(async move {
            match self.http.get("/health", timeout).await {
                Some(answer) if answer.status() == reqwest::StatusCode::OK => self.probe_result().await,
                Some(_) => ProbeResult::Loading,
                None => match &self.endpoint {
                    ListenAddress::Unix(path) if is_removed(path) => ProbeResult::SocketGone,
                    _ => ProbeResult::Lost,
                },
            }
        })
    }

    fn read_props(&self, timeout: Duration) -> BoxFuture<'_, ServerProps> {
        Box::pin(async move {
            let Some(answer) = self.http.get("/props", timeout).await else { return ServerProps::default() };
            let Ok(json) = answer.json::<serde_json::Value>().await else { return ServerProps::default() };
            let slots = json["total_slots"].as_u64().and_then(|slots| u32::try_from(slots).ok());
            ServerProps {
                slots: slots.filter(|slots| *slots > 0),
                n_ctx: json["default_generation_settings"]["n_ctx"].as_u64().or(json["n_ctx"].as_u64()),
                modalities: serde_json::from_value(json["modalities"].clone()).ok(),
                build: json["build_info"].as_str().and_then(build_number),
                reports_slots: self.slots(timeout).await.is_some(),
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

    fn send_request(&self, question: BackendRequest, limit: Duration) -> BoxFuture<'_, Option<(u16, Bytes)>> {
        let BackendRequest { path, body } = question;
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
            // Store the OOM-kill counters at each sample, so that the comparison when the child ends covers
            // only seconds: other processes are killed, too.
            let pid = self.server_pid();
            if let Ok(now) = run_job(WorkKind::Kernel, move || warden_sensors::OomKills::read(pid)).await {
                *lock(&self.kills) = now;
            }
            // Run both requests concurrently, because each may have to wait.
            let metrics = async { if ask.metrics { self.metrics(ask.limit).await } else { None } };
            let slots = async { if ask.slots { self.slots(ask.limit).await } else { None } };
            let (seen, metrics, slots) =
                tokio::join!(self.gpus.read_within(ask.gpu_age, ask.limit), metrics, slots);
            let (pid, source, desk) = (self.child.pid(), self.report.clone(), self.desk.clone());
            let (server_pid, kinship) = (self.server_pid(), Arc::clone(self.child.kinship()));
            let unmeasured = match kinship.server() {
                Some(ChildServer::Unmeasured(why)) => Some(why.sentence()),
                _ => None,
            };
            let (before, alone, gpu_here) = (self.before.clone(), self.birth.is_alone(), self.gpu_here);
            let read = move || {
                let outside = kinship.measured_relatives();
                let host = warden_sensors::host_memory(pid);
                let host = host.inspect_err(|error| tracing::debug!(%error, "memory unknown")).ok();
                let host = combine(host, warden_sensors::host_memory_of(outside.iter().copied()), add_host);
                let confirmed = ask.by_page.then(|| {
                    let group = warden_sensors::host_confirmed(pid);
                    let group =
                        group.inspect_err(|error| tracing::debug!(%error, "memory not confirmed")).ok();
                    let outside = warden_sensors::host_confirmed_of(outside.iter().copied());
                    let charged = |part: Option<HostConfirmed>| part.map(HostConfirmed::charged);
                    combine(charged(group), charged(outside), u64::saturating_add)
                });
                // If the server is not measured, these are figures of the leader, which no decision may use.
                let is_measured = unmeasured.is_none();
                let of = |snapshot: &GpuSnapshot| {
                    snapshot.child_vram(pid, &outside, before.as_ref().map(|before| (before, alone)))
                };
                let (vram, no_vram, devices) = match seen {
                    None => {
                        let why = NO_DRIVER_ANSWER.to_owned();
                        (Vec::new(), Some(NoVram { why, is_normal: false }), None)
                    }
                    Some((snapshot, devices)) => {
                        let vram = of(&snapshot);
                        let no_vram = vram.unavailable.and_then(|why| no_vram(&why, gpu_here));
                        (vram.readings, no_vram, Some(devices))
                    }
                };
                let (vram, no_vram) = match &unmeasured {
                    Some(why) => {
                        let no_vram = gpu_here.then(|| NoVram { why: why.clone(), is_normal: false });
                        (Vec::new(), no_vram)
                    }
                    None => (vram, no_vram),
                };
                ProcessSample {
                    host: host.filter(|_| is_measured),
                    confirmed: confirmed.flatten().filter(|_| is_measured),
                    vram,
                    no_vram,
                    unmeasured,
                    devices,
                    totals: warden_sensors::host_totals().ok(),
                    group: warden_sensors::cgroup_memory(server_pid)
                        .ok()
                        .filter(|group| is_measured && !group.path.is_empty()),
                    report: source.and_then(|source| source.read(pid, &outside)),
                    metrics,
                    slots,
                    standing: warden_sensors::process_run_state(server_pid).filter(|_| is_measured),
                    parts: desk.map(|desk| desk.parts()),
                }
            };
            // Use a worker thread: the reads are small, but a kernel without `children` files needs a walk
            // over /proc.
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
            Some(ProcessActivity { output: self.output_bytes.load(Ordering::Relaxed), ..effort })
        })
    }

    fn reclaim(&self, wait: Duration) -> BoxFuture<'_, ReclaimResult> {
        Box::pin(async move {
            match &self.desk {
                Some(desk) => desk.reclaim(wait).await,
                None => ReclaimResult::NONE_ASKED,
            }
        })
    }
}

/// Combines two optional values; a missing one leaves the other unchanged.
fn combine<T>(one: Option<T>, other: Option<T>, add: impl FnOnce(T, T) -> T) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(add(one, other)),
        (one, other) => one.or(other),
    }
}

fn add_host(one: HostMemory, other: HostMemory) -> HostMemory {
    HostMemory {
        anon: one.anon.saturating_add(other.anon),
        swap: one.swap.saturating_add(other.swap),
        rss: one.rss.saturating_add(other.rss),
    }
}

/// Maximum size of an answer in bytes: the tokens of a prompt with a million tokens take 8 MB.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Reads status and body of an answer; `None` if the body is too long.
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

/// Reason for missing VRAM figures; `None` on a machine without a GPU.
fn no_vram(why: &VramUnknown, gpu_here: bool) -> Option<NoVram> {
    let nothing = matches!(why, VramUnknown::NoDevice(_));
    let is_normal = why.is_normal() && !nothing;
    (gpu_here || !nothing).then(|| NoVram { why: why.sentence(), is_normal })
}

const NO_DRIVER_ANSWER: &str = "the VRAM policy is off because the driver does not answer";

/// Maximum age of a reading of GPU memory that is used as the baseline of a new process.
const BASELINE_MAX_AGE: Duration = Duration::from_millis(50);
/// Maximum time for which a start waits for a GPU driver.
const BASELINE_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
#[path = "host_tests.rs"]
mod tests;
