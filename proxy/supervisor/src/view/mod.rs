//! Published state: immutable, numbered views of the fleet for status, metrics and `/v1/models`.

pub mod entry;
pub mod event;
mod event_text;
pub mod ledger;
pub mod log;
pub(crate) mod publish;
pub mod ready_since;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::cooldown::HoldReason;
use warden_policies::declared_memory::DeclaredPool;
use warden_policies::growth::{GrowthForecast, SeriesGrowth};
use warden_policies::lifecycle::BackendPhase;
use warden_policies::quarantine::QuarantinedRequest;
use warden_policies::reclaim::{ReclaimOutcome, ReclaimParts, ReclaimedBytes};
use warden_policies::recycle::MemoryBudget;
use warden_policies::sample::{GpuIndex, HostMemory, MemoryKind, VramReading};
use warden_policies::warmth::WarmthReport;
use warden_policies::{GenerationId, ModelName, Reason, RecycleDecision, WorkDone};
use warden_sensors::{CgroupMemory, CudaReport, HostTotals};

use crate::error::BackendFailure;
use crate::view::entry::{CanaryView, PinView, ReclaimEntry};
pub use crate::view::event_text::canary_traffic;
use crate::view::ready_since::ReadySince;

/// State of the fleet at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FleetView {
    /// Number of this view, increased by each change.
    pub number: u64,
    /// Models in configured order.
    pub models: Vec<Arc<ModelView>>,
    /// Canaries, which clients cannot request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub canaries: Vec<Arc<ModelView>>,
    /// GPUs at the last reading; empty without a GPU driver.
    #[serde(default)]
    pub devices: Vec<DeviceView>,
    /// Host memory at the last reading of a process.
    #[serde(default)]
    pub host: Option<HostTotals>,
}

/// A GPU, as reported by its driver. Missing values are absent, never 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceView {
    /// Number by which all VRAM figures refer to this GPU.
    pub gpu: GpuIndex,
    /// Name of the GPU.
    pub name: String,
    /// Total memory in bytes.
    #[serde(default)]
    pub total: Option<u64>,
    /// Memory used by all programs, in bytes.
    #[serde(default)]
    pub used: Option<u64>,
    /// Available memory in bytes.
    #[serde(default)]
    pub free: Option<u64>,
    /// Temperature in degrees Celsius.
    #[serde(default)]
    pub temperature: Option<u32>,
    /// Last Xid error (a fault of GPU or driver) in this run.
    #[serde(default)]
    pub xid: Option<u64>,
    /// Reason why growth on this GPU causes no replacements: memory stayed in use after a process had ended.
    #[serde(default)]
    pub leak: Option<String>,
}

/// State of a model for clients (`status.value` in `/v1/models`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelState {
    /// No process; the first request starts one.
    Unloaded,
    /// A process starts.
    Loading,
    /// Requests are served.
    Loaded,
    /// Requests wait: the only process is being replaced or stopped, or is suspect.
    Draining,
    /// The process crashed and waits for its next start.
    Backoff,
    /// The process cannot start until a flag or file changes.
    Failed,
}

impl ModelState {
    /// Name in `/v1/models`, status and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unloaded => "unloaded",
            Self::Loading => "loading",
            Self::Loaded => "loaded",
            Self::Draining => "draining",
            Self::Backoff => "backoff",
            Self::Failed => "failed",
        }
    }
}

/// A model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelView {
    /// Name by which clients request the model.
    pub name: ModelName,
    /// Other names that clients may use.
    pub aliases: Vec<String>,
    /// State of the model.
    pub state: ModelState,
    /// Number of waiting requests.
    pub waiting: usize,
    /// Maximum number of waiting requests.
    pub queue_depth: usize,
    /// Processes, oldest first. During a replacement there are two per replica.
    pub backends: Vec<BackendView>,
    /// Replacements so far, by reason.
    pub recycles: Vec<(Reason, u64)>,
    /// Reason of the last replacement, and the time of its completion (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_replacement: Option<(Reason, String)>,
    /// Totals of all requests to give memory back.
    #[serde(default)]
    pub reclaims: ReclaimTotals,
    /// Number of unexpected ends of the model's processes.
    pub crashes: u64,
    /// A process of the model was ready in this run.
    #[serde(default)]
    pub was_ready: bool,
    /// Context length in tokens, from the last ready process.
    pub n_ctx: Option<u64>,
    /// Input kinds besides text, from the last ready process; `None` if not reported.
    #[serde(default)]
    pub modalities: Option<InputModalities>,
    /// Most severe policy decision about any of the model's processes.
    pub policy: Option<PolicyView>,
    /// Last failed start, while it matters.
    pub last_failure: Option<BackendFailure>,
    /// Outage of a model that has no process because of a failure.
    #[serde(default)]
    pub outage: Option<ModelOutage>,
    /// Result of the last replacement that carried conversations over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<WarmthReport>,
    /// Reason for the mode of the last start or replacement (`sequential: a GPU is present`).
    pub replace_note: Option<String>,
    /// Requests that may have killed its processes.
    #[serde(default)]
    pub quarantine: QuarantineView,
    /// Pin state.
    #[serde(default)]
    pub pin: PinView,
    /// Endpoint of a remote model. The fields about processes then describe the endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteView>,
    /// Running canary, or the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Box<CanaryView>>,
}

impl ModelView {
    /// All names that clients may use: the model's name and its aliases.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// View of a model that never ran.
    pub fn unloaded(name: ModelName) -> Self {
        Self {
            name,
            aliases: Vec::new(),
            state: ModelState::Unloaded,
            waiting: 0,
            queue_depth: 1,
            backends: Vec::new(),
            recycles: Vec::new(),
            last_replacement: None,
            reclaims: ReclaimTotals::default(),
            crashes: 0,
            was_ready: false,
            n_ctx: None,
            modalities: None,
            policy: None,
            last_failure: None,
            outage: None,
            warm: None,
            replace_note: None,
            quarantine: QuarantineView::default(),
            pin: PinView::default(),
            remote: None,
            canary: None,
        }
    }
}

/// Remote endpoint that serves a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteView {
    /// Address of the endpoint.
    pub url: String,
    /// Name of the model at the endpoint.
    pub model: String,
}

/// Requests that may have killed a process of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuarantineView {
    /// Refused requests, followed by suspected ones.
    pub requests: Vec<QuarantinedRequest>,
    /// Number of requests that the model began to refuse so far.
    pub quarantined: u64,
    /// Number of refusals of such requests so far.
    pub refusals: u64,
}

/// Outage of a model that has no process because of a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelOutage {
    /// True: requests are refused at once, because waiting would most likely be useless. False: they wait.
    pub refusing: bool,
    /// Time of the next start, in milliseconds since 1970 (UTC).
    pub next_start_unix_ms: u64,
    /// True if a change of a needed file triggers a start before `next_start_unix_ms`.
    pub watching: bool,
    /// Advice for an operator, in a sentence.
    pub cure: String,
}

/// Input kinds besides text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InputModalities {
    /// Images.
    pub vision: bool,
    /// Audio.
    pub audio: bool,
    /// Video.
    pub video: bool,
}

/// Policy decision about a process, and the reason that holds it back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyView {
    /// Decision.
    pub decision: RecycleDecision,
    /// Reason that holds the decision back, if any.
    pub held: Option<HoldReason>,
}

/// A process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendView {
    /// Replica of the model, from 0.
    pub replica: u32,
    /// Generation; `None` before the first start.
    pub generation: Option<GenerationId>,
    /// Phase of its life cycle.
    pub phase: BackendPhase,
    /// PID.
    pub pid: Option<u32>,
    /// Program that was started. It may have executed another program since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// Moment when the process became ready.
    #[serde(rename = "ready_seconds", alias = "ready_for", default)]
    pub ready_since: Option<ReadySince>,
    /// Number of requests that hold a lease on the process.
    pub in_flight: u32,
    /// Number of slots that the process reported.
    pub slots: Option<u32>,
    /// Host memory at the last sample.
    pub host: Option<HostMemory>,
    /// Host memory when the process became ready.
    pub host_at_ready: Option<HostMemory>,
    /// Work done since the process started.
    pub work: WorkDone,
    /// Last GPU memory report of the process; `None` for a llama-server that writes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<CudaReport>,
    /// Memory now, its growth and its limits.
    #[serde(default)]
    pub memory: MemoryView,
    /// Signs of health other than probe results.
    #[serde(default)]
    pub health: HealthView,
    /// Layers or VRAM missing on GPUs, compared with the best process with the same command, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub degraded: Option<String>,
    /// Requests to the process to give memory back.
    #[serde(default)]
    pub reclaim: ReclaimView,
    /// Next decision of the policy; `None` before the first judgement.
    #[serde(default)]
    pub next: Option<PolicyView>,
}

impl BackendView {
    /// View of a replica without a process.
    pub(crate) fn without_process(replica: u32, phase: BackendPhase) -> Self {
        Self {
            replica,
            generation: None,
            phase,
            pid: None,
            program: None,
            ready_since: None,
            in_flight: 0,
            slots: None,
            host: None,
            host_at_ready: None,
            work: WorkDone::default(),
            report: None,
            memory: MemoryView::default(),
            health: HealthView::default(),
            degraded: None,
            reclaim: ReclaimView::default(),
            next: None,
        }
    }

    /// Bytes held at the last reading, if known.
    pub fn held(&self, memory: MemoryKind) -> Option<u64> {
        match memory {
            MemoryKind::Host => self.host.map(HostMemory::charged),
            MemoryKind::Vram(gpu) => {
                self.memory.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes)
            }
        }
    }
}

/// Requests to all processes of a model to give memory back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReclaimTotals {
    /// Number of requests by outcome.
    pub counts: Vec<(ReclaimOutcome, u64)>,
    /// Memory given back, as reported by the processes.
    pub given: ReclaimedBytes,
}

/// Requests to one process to give memory back.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReclaimView {
    /// Parts of the process that can give memory back; `None` before the first reading.
    pub parts: Option<ReclaimParts>,
    /// Value of `policy.reclaim` when the process started.
    pub wanted: bool,
    /// A request is under way.
    pub asking: bool,
    /// Number of requests.
    pub count: u64,
    /// Result of the last request.
    pub last: Option<ReclaimEntry>,
}

/// Memory of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryView {
    /// VRAM at the last sample per GPU, without GPUs where it is unknown.
    #[serde(default)]
    pub vram: Vec<VramReading>,
    /// Reason for unknown VRAM; `None` if it is known or the machine has no GPU.
    #[serde(default)]
    pub vram_unknown: Option<String>,
    /// Reason why the server's memory is not measured, so that no memory policy acts on the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmeasured: Option<String>,
    /// Memory of the process's control group (version 2), as the kernel counts it. Not used for decisions.
    #[serde(default)]
    pub group: Option<CgroupMemory>,
    /// Growth of each kind of memory that was read.
    #[serde(default)]
    pub growth: Vec<SeriesGrowth>,
    /// Forecasts of when growing memory reaches its limits.
    #[serde(default)]
    pub forecasts: Vec<ForecastView>,
    /// Recent requests per second, as used by forecasts; `None` before the first answer.
    #[serde(default)]
    pub request_rate: Option<f64>,
    /// Memory that the server keeps on purpose, one text per pool.
    #[serde(default)]
    pub allowance: Vec<String>,
    /// Pools of host memory that the server declared in its output, in bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub declared: Vec<DeclaredPool>,
    /// True if all slots share one context, so that the tokens of one reduce the room of the others.
    #[serde(default)]
    pub one_pool: bool,
    /// Known budgets of each memory, in bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<BudgetView>,
    /// Number of the last reading, counted from 1 per process; 0 before the first.
    #[serde(default)]
    pub reading: u64,
}

/// Budgets of one kind of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetView {
    /// Kind of memory.
    pub series: MemoryKind,
    /// Budgets of that memory.
    #[serde(flatten)]
    pub budget: MemoryBudget,
}

/// Forecast for reaching a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForecastView {
    /// Kind of memory.
    pub series: MemoryKind,
    /// Reason of the replacement at the limit: `host_soft`, `vram_hard`, …
    pub reason: Reason,
    /// Forecast.
    #[serde(flatten)]
    pub forecast: GrowthForecast,
}

/// Signs of a process's health other than probe results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HealthView {
    /// Consecutive answers that reported a failed computation.
    #[serde(default)]
    pub compute_errors: u32,
    /// Recent speed in tokens per second of a busy slot; `None` before enough tokens were generated.
    #[serde(default)]
    pub decode_rate: Option<f64>,
    /// Speed in tokens per second of a busy slot when the process was new.
    #[serde(default)]
    pub decode_baseline: Option<f64>,
    /// Time without progress while requests run.
    #[serde(rename = "stalled_seconds", alias = "stalled_for", with = "warden_policies::seconds", default)]
    pub stalled_for: Option<Duration>,
    /// Longest normal time without progress, by the tokens and prompts so far.
    #[serde(
        rename = "stalled_limit_seconds",
        alias = "stalled_limit",
        with = "warden_policies::seconds",
        default
    )]
    pub stalled_limit: Option<Duration>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// True if any value is a duration in serde's default form.
    fn has_parts_of_time(value: &Value) -> bool {
        match value {
            Value::Object(fields) => fields.contains_key("nanos") || fields.values().any(has_parts_of_time),
            Value::Array(all) => all.iter().any(has_parts_of_time),
            _ => false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_times_of_a_status_are_numbers_of_seconds_and_ages_go_on() {
        let old = json!({
            "replica": 0, "generation": 1, "phase": "ready", "pid": 7, "ready_for": {"secs": 5, "nanos": 0}, "in_flight": 1,
            "slots": 4, "host": null, "host_at_ready": null, "start_failures": 0, "last_failure": null,
            "work": {"requests": 1, "prompt_tokens": 0, "output_tokens": 0, "images": 0},
            "health": {"stalled_for": {"secs": 1, "nanos": 500_000_000}, "stalled_limit": {"secs": 20, "nanos": 0}},
        });
        let view: BackendView = serde_json::from_value(old).unwrap();
        let now = serde_json::to_value(&view).unwrap();
        assert!(!has_parts_of_time(&now), "{now}");
        assert_eq!(now["ready_seconds"], json!(5.0));
        assert_eq!(
            (&now["health"]["stalled_seconds"], &now["health"]["stalled_limit_seconds"]),
            (&json!(1.5), &json!(20.0))
        );
        assert_eq!(serde_json::from_value::<BackendView>(now).unwrap(), view);
        // The same view, read later.
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(serde_json::to_value(&view).unwrap()["ready_seconds"], json!(8.0));
    }
}
