//! Everything outside of a model's task: processes, their answers to probes, memory. Traits describe it, so
//! that the task can be tested with scripted processes and a paused clock; [`host::HostWorld`] is the real
//! implementation.
//!
//! | file | job |
//! |---|---|
//! | `nursery`, `spawn`, `child`, `group` | the main thread forks; output, signals, end and reaping |
//! | `root` | the process that forks for its successors, and the PID that they keep |
//! | `heir` | a process as handed over to the next instance |
//! | `kinship`, `server_place` | processes that left a child's group |
//! | `control_group` | where possible, a control group (version 2) per child, which no process leaves |
//! | `host` | this machine: children, probes, readings |
//! | `backend_http`, `hints` | requests to a backend and to no other program, and its relevant options |
//! | `endpoint`, `directories`, `private_dir` | addresses and files of a process |
//! | `report_file` | the memory report of a process |
//! | `regular_file` | files named by others: never waits for a pipe |
//! | `trusted_path` | paths that no other user of the machine can exchange |
//! | `reclaim_file` | asks a process to give memory back |
//! | `lines`, `discreet`, `failure` | output without secrets, and the reason for an end |
//! | `needs` | files that a start needs |
//! | `settings` | settings that clients made |
//! | `slot_files`, `slot_talk`, `touch` | carry slot contents over to the next process |
//! | `gpus` | GPU readings for all, and the number of children |

pub(crate) mod backend_http;
pub(crate) mod child;
pub(crate) mod control_group;
pub(crate) mod directories;
pub(crate) mod discreet;
pub(crate) mod endpoint;
pub(crate) mod failure;
pub(crate) mod gpus;
pub(crate) mod group;
pub(crate) mod heir;
pub(crate) mod hints;
pub(crate) mod host;
pub(crate) mod kinship;
pub(crate) mod lines;
pub(crate) mod needs;
pub mod nursery;
pub mod private_dir;
pub(crate) mod reclaim_file;
pub mod regular_file;
pub(crate) mod report_file;
pub(crate) mod root;
pub(crate) mod server_place;
pub(crate) mod settings;
pub(crate) mod slot_files;
pub(crate) mod slot_talk;
pub(crate) mod spawn;
pub(crate) mod touch;
pub mod trusted_path;

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::time::Instant;
use warden_policies::health::SlotActivity;
use warden_policies::reclaim::ReclaimParts;
use warden_policies::sample::{GpuIndex, HostMemory, VramReading, VramSource};
use warden_policies::standstill::{ProcessActivity, StandstillWatch};
use warden_sensors::{BackendMetrics, CgroupMemory, CudaReport, HostTotals, ProcessRunState};

use crate::error::SpawnError;
use crate::process::endpoint::ListenAddress;
use crate::process::failure::OomEvidence;
use crate::process::gpus::GpuDevices;
use crate::process::group::ProcessExit;
use crate::process::heir::ProcessHeir;
use crate::process::needs::NeedsCheck;
use crate::process::reclaim_file::ReclaimResult;
use crate::process::settings::ClientSetting;
use crate::spec::{ServerCommand, SpawnRequest};
use crate::view::InputModalities;
use crate::view::log::OutputStream;

pub(crate) type SpawnFuture<'a> = BoxFuture<'a, Result<Arc<dyn BackendProcess>, SpawnError>>;

pub(crate) type LineSink = Arc<dyn Fn(OutputStream, String) + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    Ready,
    /// The server answers, but is not ready.
    Loading,
    Lost,
    /// The socket file is gone, so no new connection is possible.
    SocketGone,
}

impl ProbeResult {
    pub(crate) const fn is_answer(self) -> bool {
        matches!(self, Self::Ready | Self::Loading)
    }
}

/// Properties that a server reports in `/props`; unreported ones are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerProps {
    /// Number of slots: requests that the server evaluates at the same time.
    pub slots: Option<u32>,
    /// Context of a slot in tokens.
    pub n_ctx: Option<u64>,
    /// Input kinds besides text.
    pub modalities: Option<InputModalities>,
    /// llama.cpp's build number.
    pub build: Option<u32>,
    /// True if the server, while it is healthy, answers requests for the state of its slots.
    pub reports_slots: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleOptions {
    /// Also read host memory page by page, which is slow.
    pub(crate) by_page: bool,
    pub(crate) gpu_age: Duration,
    /// Time limit for a GPU driver, and for the server's own counters.
    pub(crate) limit: Duration,
    /// Also read the server's own counters, if it has any.
    pub(crate) metrics: bool,
    pub(crate) slots: bool,
}

impl SampleOptions {
    /// Options for a reading of memory only.
    pub(crate) const fn brief(gpu_age: Duration, limit: Duration) -> Self {
        Self { by_page: false, gpu_age, limit, metrics: false, slots: false }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ProcessSample {
    /// Host memory of the process group; `None` if unreadable.
    pub(crate) host: Option<HostMemory>,
    /// Host memory read page by page, if requested and readable.
    pub(crate) confirmed: Option<u64>,
    /// VRAM of the process group per GPU, without GPUs where it is unknown.
    pub(crate) vram: Vec<VramReading>,
    pub(crate) no_vram: Option<NoVram>,
    /// Sentence why the server is not measured; `None` if it is.
    pub(crate) unmeasured: Option<String>,
    /// Readings of all GPUs; `None` if the driver did not answer.
    pub(crate) devices: Option<Arc<GpuDevices>>,
    pub(crate) totals: Option<HostTotals>,
    /// Memory of the process's control group; `None` without a control group of version 2.
    pub(crate) group: Option<CgroupMemory>,
    pub(crate) report: Option<CudaReport>,
    /// The server's own counters; `None` if not requested or not available.
    pub(crate) metrics: Option<BackendMetrics>,
    /// State of the slots; `None` if not requested or not available.
    pub(crate) slots: Option<SlotActivity>,
    /// Why the process may be unable to run: stopped, or waiting for pages from disk; `None` if unknown.
    pub(crate) standing: Option<ProcessRunState>,
    /// Parts of the process that can give memory back; `None` if the process was started without a reclaim
    /// file.
    pub(crate) parts: Option<ReclaimParts>,
}

impl ProcessSample {
    /// VRAM in bytes over all GPUs; `None` if the amount on any of them is unknown or only estimated.
    pub(crate) fn vram_held(&self) -> Option<u64> {
        let known = self.no_vram.as_ref().is_none_or(|no_vram| no_vram.is_normal);
        let exact = self.vram.iter().all(|vram| vram.source != VramSource::Estimate);
        let held = self.vram.iter().map(|vram| vram.bytes).fold(0, u64::saturating_add);
        (known && exact && self.devices.is_some()).then_some(held)
    }

    /// Removes figures of the leader: if the server is not measured, no decision may use them.
    fn without_figures(self, why: String, gpu_here: bool) -> Self {
        let no_vram = gpu_here.then(|| NoVram::new(&why));
        let unmeasured = Some(why);
        let vram = Vec::new();
        Self { host: None, confirmed: None, vram, no_vram, unmeasured, group: None, standing: None, ..self }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoVram {
    pub(crate) why: String,
    /// True if this is normal: the process uses no GPU, so it has no VRAM.
    pub(crate) is_normal: bool,
}

impl NoVram {
    /// Makes a reason that is not normal, so that it is logged.
    pub(crate) fn new(why: &str) -> Self {
        Self { why: why.to_owned(), is_normal: false }
    }
}

/// Memory of a machine in bytes, either total or free at one moment. Unknown values are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MachineMemory {
    /// Host memory, or as much of it as our control group may use.
    pub(crate) host: Option<u64>,
    pub(crate) gpus: Vec<(GpuIndex, u64)>,
}

#[derive(Clone)]
pub(crate) struct BackendRequest {
    pub(crate) path: String,
    /// JSON body of a `POST`; `None` for a `GET`.
    pub(crate) body: Option<Bytes>,
}

impl BackendRequest {
    pub(crate) fn post(path: &str, body: Vec<u8>) -> Self {
        Self { path: path.to_owned(), body: Some(body.into()) }
    }
}

impl Debug for BackendRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Show only the size of a body, because it may contain a client's text.
        write!(f, "Question({}, {:?} bytes)", self.path, self.body.as_ref().map(Bytes::len))
    }
}

pub(crate) trait BackendProcess: Send + Sync + Debug {
    /// PID of the process that was forked, which is also the id of its group.
    fn pid(&self) -> u32;
    /// PID of the process that serves; by default the one that was forked.
    fn server_pid(&self) -> u32 {
        self.pid()
    }
    fn terminate(&self);
    fn kill(&self);
    /// Waits until the process has ended and all its output was passed to the sink.
    fn wait(&self) -> BoxFuture<'_, ProcessExit>;
    /// True if the kernel reports that the process runs now.
    fn is_running(&self) -> bool;
    /// Sends one probe, which counts as lost if there is no answer in time, or another program answers.
    fn probe(&self, timeout: Duration) -> BoxFuture<'_, ProbeResult>;
    fn read_props(&self, timeout: Duration) -> BoxFuture<'_, ServerProps>;
    /// Applies a setting that a client made in another process. The error text contains nothing of the
    /// setting's body.
    fn apply_setting(&self, setting: ClientSetting, timeout: Duration) -> BoxFuture<'_, Result<(), String>>;
    /// Sends a request. Returns status and whole body; `None` if there is no answer in time or it is too
    /// large. Dropping the future closes the connection, and then the server stops working as if a client
    /// had left.
    fn send_request(&self, request: BackendRequest, limit: Duration) -> BoxFuture<'_, Option<(u16, Bytes)>>;
    /// Evidence from the kernel's counters whether processes were killed for lack of memory since the last
    /// reading. Call it after a SIGKILL has ended the process.
    fn oom_evidence(&self) -> BoxFuture<'_, OomEvidence>;
    fn sample(&self, ask: SampleOptions) -> BoxFuture<'_, ProcessSample>;
    /// CPU time and I/O bytes so far of the process and all processes that belong to it; `None` if
    /// unreadable.
    fn read_effort(&self) -> BoxFuture<'_, Option<ProcessActivity>>;
    /// Prepares the process for the next instance: returns its number at the root, and its files. `None` if
    /// that is impossible.
    fn prepare_handover(&self) -> Option<(u64, Vec<OwnedFd>)> {
        None
    }
    /// Takes the number from [`Self::prepare_handover`], if this instance forked the process.
    fn take_handover_id(&self) -> Option<u64> {
        None
    }
    /// Takes the process over from the previous instance, so that it ends with us from now on.
    fn take_ownership(&self) {}
    /// Leaves the process to the next instance: its output is no longer read here, and it does not end with
    /// us.
    fn release(&self) {}
    /// Asks the process to give memory back. For each part, the process may wait this long for a good
    /// moment.
    fn reclaim(&self, wait: Duration) -> BoxFuture<'_, ReclaimResult>;
}

/// Resolves when a starting process has made no progress for `limit`. The future may be dropped.
pub(crate) async fn until_stalled(process: &dyn BackendProcess, limit: Duration) {
    let began = Instant::now();
    let mut watch = StandstillWatch::new(limit);
    loop {
        tokio::time::sleep(watch.pause()).await;
        let effort = process.read_effort().await;
        if watch.is_stalled(began.elapsed(), effort) {
            return;
        }
    }
}

pub(crate) trait ProcessWorld: Send + Sync + Debug {
    /// Creates a child that is to listen on `endpoint`. `socket`: path of its Unix socket; for a child on a
    /// port, the path from which its other files get their names.
    fn spawn(
        &self,
        request: SpawnRequest,
        socket: PathBuf,
        endpoint: ListenAddress,
        longest_line: usize,
        sink: LineSink,
    ) -> SpawnFuture<'_>;
    fn adopt(&self, heir: ProcessHeir, _longest_line: usize, _sink: LineSink) -> SpawnFuture<'_> {
        let binary = heir.record.command.binary;
        Box::pin(async { Err(SpawnError::NurseryGone { binary }) })
    }
    /// Cancels the handover of a child that was prepared for it.
    fn cancel_handover(&self, _child: u64) {}
    /// Checks the files that a process with this command needs. `running`: PID of a process with the same
    /// binary, if any.
    fn check_needs(&self, command: ServerCommand, running: Option<u32>) -> BoxFuture<'static, NeedsCheck>;
    /// Reads the model's files into the page cache, for at most `limit` and only if memory suffices.
    fn read_ahead(&self, command: ServerCommand, limit: Duration) -> BoxFuture<'static, ()>;
    /// Memory available for new processes, in bytes; `None` if unreadable.
    fn available_memory(&self) -> Option<u64>;
    fn free_memory(&self, limit: Duration) -> BoxFuture<'_, MachineMemory>;
    fn total_memory(&self, limit: Duration) -> BoxFuture<'_, MachineMemory>;
    /// Environment variable that restricts a process to these GPUs; `None` if these are all GPUs of the
    /// machine, or if one of them has no UUID. Read within the time limit.
    fn gpu_restriction(
        &self,
        gpus: Vec<GpuIndex>,
        limit: Duration,
    ) -> BoxFuture<'_, Option<(String, String)>>;
    fn has_gpu(&self) -> bool;
    fn minute_of_day(&self) -> Option<u16>;
}
