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
//! | `answer_probe` | asks a process fixed prompts |
//! | `gpus` | GPU readings for all, and the number of children |

pub(crate) mod answer_probe;
pub(crate) mod backend_http;
pub(crate) mod child;
pub(crate) mod control_group;
pub(crate) mod conversation_name;
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
    Loading,
    Lost,
    /// A program other than llama-server has not answered in time, but has not refused the connection.
    Silent,
    /// Without the socket file, no new connection is possible.
    SocketGone,
}

impl ProbeResult {
    pub(crate) const fn is_answer(self) -> bool {
        matches!(self, Self::Ready | Self::Loading)
    }
}

/// Properties reported in `/props`; unreported ones are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerProps {
    /// Number of slots.
    pub slots: Option<u32>,
    /// Context of a slot in tokens.
    pub n_ctx: Option<u64>,
    /// Input kinds besides text.
    pub modalities: Option<InputModalities>,
    /// llama.cpp's build number.
    pub build: Option<u32>,
    /// True if a healthy server answers requests for its slots.
    pub reports_slots: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleOptions {
    /// Reads host memory page by page, which is slow.
    pub(crate) by_page: bool,
    pub(crate) gpu_age: Duration,
    /// Time limit for the GPU driver and for the server's own counters.
    pub(crate) limit: Duration,
    pub(crate) metrics: bool,
    pub(crate) slots: bool,
}

impl SampleOptions {
    pub(crate) const fn brief(gpu_age: Duration, limit: Duration) -> Self {
        Self { by_page: false, gpu_age, limit, metrics: false, slots: false }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ProcessSample {
    pub(crate) host: Option<HostMemory>,
    pub(crate) confirmed: Option<u64>,
    /// VRAM per GPU, without GPUs for which it is unknown.
    pub(crate) vram: Vec<VramReading>,
    pub(crate) no_vram: Option<NoVram>,
    /// Sentence that explains why the server is not measured.
    pub(crate) unmeasured: Option<String>,
    /// Readings of all GPUs; `None` if the driver did not answer.
    pub(crate) devices: Option<Arc<GpuDevices>>,
    pub(crate) totals: Option<HostTotals>,
    /// Memory of the control group; `None` without one of version 2.
    pub(crate) group: Option<CgroupMemory>,
    pub(crate) report: Option<CudaReport>,
    pub(crate) answers: ServerAnswers,
    /// Sign that the process is stopped or waits for pages from disk; `None` if unknown.
    pub(crate) standing: Option<ProcessRunState>,
    /// Parts that can give memory back; `None` without a reclaim file.
    pub(crate) parts: Option<ReclaimParts>,
}

/// Answers of the server itself; empty if it was not asked.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerAnswers {
    pub(crate) metrics: Option<BackendMetrics>,
    pub(crate) slots: Option<SlotActivity>,
}

impl ProcessSample {
    /// Bytes over all GPUs; `None` if a part is unknown or estimated.
    pub(crate) fn vram_held(&self) -> Option<u64> {
        let known = self.no_vram.as_ref().is_none_or(|no_vram| no_vram.is_normal);
        let exact = self.vram.iter().all(|vram| vram.source != VramSource::Estimate);
        let held = self.vram.iter().map(|vram| vram.bytes).fold(0, u64::saturating_add);
        (known && exact && self.devices.is_some()).then_some(held)
    }

    /// Removes the leader's figures: decisions must not use them if the server is not measured.
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
    /// True if the process uses no GPU.
    pub(crate) is_normal: bool,
}

impl NoVram {
    pub(crate) fn new(why: &str) -> Self {
        Self { why: why.to_owned(), is_normal: false }
    }
}

/// Memory of a machine in bytes, total or free. Unknown values are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MachineMemory {
    /// Host memory, or the limit of our control group.
    pub(crate) host: Option<u64>,
    pub(crate) gpus: Vec<(GpuIndex, u64)>,
}

#[derive(Clone)]
pub(crate) struct BackendRequest {
    pub(crate) path: String,
    /// Body of a `POST`; `None` for a `GET`.
    pub(crate) body: Option<Bytes>,
}

impl BackendRequest {
    pub(crate) fn post(path: &str, body: Vec<u8>) -> Self {
        Self { path: path.to_owned(), body: Some(body.into()) }
    }
}

impl Debug for BackendRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The body may contain a client's text, so show only its size.
        write!(f, "BackendRequest({}, {:?} bytes)", self.path, self.body.as_ref().map(Bytes::len))
    }
}

pub(crate) trait BackendProcess: Send + Sync + Debug {
    /// PID of the forked process, and of its group.
    fn pid(&self) -> u32;
    /// PID of the process that serves.
    fn server_pid(&self) -> u32 {
        self.pid()
    }
    fn terminate(&self);
    fn kill(&self);
    /// Waits until the process has ended and the sink has all its output.
    fn wait(&self) -> BoxFuture<'_, ProcessExit>;
    fn is_running(&self) -> bool;
    /// Sends a probe. It counts as lost if another program answers, or none in time.
    fn probe(&self, timeout: Duration) -> BoxFuture<'_, ProbeResult>;
    fn read_props(&self, timeout: Duration) -> BoxFuture<'_, ServerProps>;
    /// Applies a client's setting from another process. The error text contains nothing of its body.
    fn apply_setting(&self, setting: ClientSetting, timeout: Duration) -> BoxFuture<'_, Result<(), String>>;
    /// Sends a request. `None` if the answer is too late or too large. Dropping the future closes the
    /// connection, and the server then stops its work.
    fn send_request(&self, request: BackendRequest, limit: Duration) -> BoxFuture<'_, Option<(u16, Bytes)>>;
    /// Evidence of the kernel's OOM killer since the last reading; read after a SIGKILL.
    fn oom_evidence(&self) -> BoxFuture<'_, OomEvidence>;
    fn sample(&self, ask: SampleOptions) -> BoxFuture<'_, ProcessSample>;
    /// CPU time and I/O bytes of the process and its relatives; `None` if unreadable.
    fn read_effort(&self) -> BoxFuture<'_, Option<ProcessActivity>>;
    /// Prepares the handover. Returns the child's number at the root and its files; `None` if impossible.
    fn prepare_handover(&self) -> Option<(u64, Vec<OwnedFd>)> {
        None
    }
    /// Takes the number of [`Self::prepare_handover`], if this instance forked the process.
    fn take_handover_id(&self) -> Option<u64> {
        None
    }
    /// Takes the process over from the previous instance: it now ends with this instance.
    fn take_ownership(&self) {}
    /// Leaves the process to the next instance, which reads its output from now on.
    fn release(&self) {}
    /// Asks the process to give memory back. `wait`: time for which each part may wait for a good moment.
    fn reclaim(&self, wait: Duration) -> BoxFuture<'_, ReclaimResult>;
}

/// Resolves when a starting process has made no progress for `limit`. Cancel safe.
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
    /// Creates a child that listens on `endpoint`. `socket`: path of its Unix socket; for a child on a port,
    /// only its other files are named after this path.
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
    fn cancel_handover(&self, _child: u64) {}
    /// Checks the files that the command needs. `running`: PID of a process with the same binary.
    fn check_needs(&self, command: ServerCommand, running: Option<u32>) -> BoxFuture<'static, NeedsCheck>;
    /// Reads the model's files into the page cache, if memory suffices.
    fn read_ahead(&self, command: ServerCommand, limit: Duration) -> BoxFuture<'static, ()>;
    /// Bytes available for new processes; `None` if unreadable.
    fn available_memory(&self) -> Option<u64>;
    fn free_memory(&self, limit: Duration) -> BoxFuture<'_, MachineMemory>;
    fn total_memory(&self, limit: Duration) -> BoxFuture<'_, MachineMemory>;
    /// Environment variable that restricts a process to these GPUs. `None` if these are all GPUs, or if one
    /// of them has no UUID.
    fn gpu_restriction(
        &self,
        gpus: Vec<GpuIndex>,
        limit: Duration,
    ) -> BoxFuture<'_, Option<(String, String)>>;
    fn has_gpu(&self) -> bool;
    fn minute_of_day(&self) -> Option<u16>;
}
