//! What the supervisor is told: models, how to run them, and where to keep its things. Plain data, comparable, so that
//! a reload can tell which models changed.

use std::path::PathBuf;
use std::time::Duration;

use warden_policies::admission::{AdmissionMode, AdmissionPolicy};
use warden_policies::growth::GrowthPolicy;
use warden_policies::health::HealthPolicy;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_policies::quarantine::QuarantinePolicy;
use warden_policies::recycle::RecyclePolicy;
use warden_policies::restraint::RestraintPolicy;
use warden_policies::{ByteSize, MemoryLimit, ModelName, ServerFacts};

/// How to run llama-server for one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The llama-server binary.
    pub binary: PathBuf,
    /// Its arguments, without any for listening: `--host` is the supervisor's.
    pub args: Vec<String>,
    /// Variables added to our own environment.
    pub env: Vec<(String, String)>,
    /// Variables of our own environment that the process must not get. A name that is in `env`, too, is not passed on
    /// either.
    pub env_remove: Vec<String>,
    /// Working directory; ours if `None`.
    pub directory: Option<PathBuf>,
}

/// How one generation is replaced by the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replace {
    /// Drain, stop, start; requests queue meanwhile. Needs no extra memory.
    Sequential,
    /// Start the next generation, switch, then drain the old one. Needs memory for both.
    Overlap,
    /// Overlap where host memory allows and no GPU could be short of memory, else sequential.
    Auto,
}

/// What a process listens on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Socket {
    /// A Unix socket, unless the binary is known not to take one; then a port.
    #[default]
    Auto,
    /// A Unix socket in a private directory: nobody but us can reach the process.
    Unix,
    /// A free port of 127.0.0.1: any user of the machine can reach the process.
    Tcp,
}

/// What is done about prompts that do not fit into memory.
#[derive(Clone, Debug, PartialEq)]
pub struct AdmissionSpec {
    /// Nothing, a warning, or keeping them from being sent.
    pub mode: AdmissionMode,
    /// The numbers.
    pub policy: AdmissionPolicy,
}

/// One model: a name that clients address, and the processes behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The name.
    pub name: ModelName,
    /// Other names for it.
    pub aliases: Vec<String>,
    /// What to run.
    pub command: Command,
    /// How many processes, 1 or more.
    pub replicas: u32,
    /// Start at once and keep running, instead of at the first request.
    pub preload: bool,
    /// How a generation is replaced.
    pub replace: Replace,
    /// Callers that may wait.
    pub queue_depth: usize,
    /// How long a caller waits.
    pub queue_wait: Duration,
    /// Requests of the slot kind at a time on one process; its number of slots if `None`.
    pub max_in_flight: Option<u32>,
    /// Crash handling.
    pub lifecycle: LifecyclePolicy,
    /// Deadlines of the lifecycle.
    pub timing: Timing,
    /// Budgets.
    pub recycle: RecyclePolicy,
    /// Limits on recycling.
    pub restraint: RestraintPolicy,
    /// What is done about prompts that do not fit into memory.
    pub admission: AdmissionSpec,
    /// What is done about requests that kill their server.
    pub quarantine: QuarantinePolicy,
    /// Added to `oom_score_adj` of the child, -1000 to 1000.
    pub oom_score_adj: i32,
    /// Ask the process for a report of its GPU memory, which a patched llama-server writes.
    pub memory_report: bool,
    /// What its processes listen on.
    pub socket: Socket,
    /// What is known of how the binary behaves. What becomes known later is told by [`Fleet::learn`](crate::Fleet::learn);
    /// neither replaces a process.
    pub facts: ServerFacts,
    /// Write each reading to `traces/NAME-gN.jsonl` in the state directory, for `policy replay`.
    pub record: bool,
}

/// Deadlines and pauses in the life of a backend. Reasons: `defaults.toml`, section `[lifecycle]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Ready within this time.
    pub start_timeout: Duration,
    /// Pause between probes while starting.
    pub start_probe_interval: Duration,
    /// Pause between probes when ready.
    pub probe_interval: Duration,
    /// A probe unanswered for this long is lost.
    pub probe_timeout: Duration,
    /// Lost probes in a row that make it suspect.
    pub probes_lost: u32,
    /// Suspect for this long: replace.
    pub suspect_timeout: Duration,
    /// Leases have to end within this time.
    pub drain_deadline: Duration,
    /// From TERM to KILL.
    pub stop_grace: Duration,
    /// The same for a process that is ended without draining, because memory is almost gone.
    pub kill_grace: Duration,
    /// Pause between trials of what cannot start before something changes.
    pub recheck: Duration,
    /// Pause between looks at the files that it needs.
    pub look_interval: Duration,
}

/// Everything the fleet needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetConfig {
    /// The models, in the order in which they are listed to clients.
    pub models: Vec<ModelSpec>,
    /// With exactly one model: whatever name a client gives means that model, as llama-server itself does.
    pub any_name: bool,
    /// Budgets over all processes together.
    pub shared: SharedBudgets,
    /// The numbers of the growth detector.
    pub growth: GrowthPolicy,
    /// When a backend is ill.
    pub health: HealthPolicy,
    /// Private directory (mode 0700) for the children's sockets and memory reports. Its path must be short: a Unix socket's path has at
    /// most 107 bytes.
    pub runtime_dir: PathBuf,
    /// Directory of the ledger, of recordings and of what is remembered of earlier runs.
    pub state_dir: PathBuf,
    /// How things are watched and kept.
    pub watch: Watch,
}

/// Budgets over all processes on this host, and over all on each GPU. A process that passes one gives way to the one
/// whose replacement gives back most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SharedBudgets {
    /// Of the host's memory; above it one is replaced when quiet.
    pub host_soft: Option<ByteSize>,
    /// Above this one is drained now.
    pub host_hard: Option<ByteSize>,
    /// Of each GPU's memory, as a size or a share of that GPU; above it one is replaced when quiet.
    pub vram_soft: Option<MemoryLimit>,
    /// Above this one is drained now.
    pub vram_hard: Option<MemoryLimit>,
}

/// Sampling and keeping. Reasons: `defaults.toml`, sections `[sensors]`, `[child]`, `[lifecycle]`, `[recycle]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watch {
    /// Pause between samples.
    pub interval: Duration,
    /// From the idle edge to its sample.
    pub idle_settle: Duration,
    /// Lines of output kept per model.
    pub log_lines: usize,
    /// Bytes kept of one line.
    pub log_line_bytes: usize,
    /// Lines shown with a failed start.
    pub failure_lines: usize,
    /// Events kept for late listeners.
    pub events_kept: usize,
    /// Start failures in a row after which waiting requests are told.
    pub failures_told: u32,
    /// Limit of slot leases when `/props` does not say.
    pub unknown_slots: u32,
    /// For [`Replace::Auto`]: available memory needed, as a multiple of what the backend holds.
    pub overlap_headroom: f64,
    /// Smallest memory that `overlap_headroom` is applied to, so that an idle backend's first pages do not mislead.
    pub overlap_floor: ByteSize,
    /// Growth of host memory is confirmed by a slow and exact reading, at most this often.
    pub confirm_interval: Duration,
    /// Share of the growth that the exact reading has to show, too, 0 to 1.
    pub confirm_share: f64,
    /// A reading of the GPUs serves all backends for this long.
    pub gpu_age: Duration,
    /// A driver, or a backend's own counters, that takes longer is left out of a reading.
    pub read_limit: Duration,
    /// Memory that seems missing after an exit is looked for again after this.
    pub return_wait: Duration,
    /// Bytes of one recording.
    pub trace_bytes: ByteSize,
    /// Slopes of earlier generations that are remembered.
    pub priors_kept: usize,
}
