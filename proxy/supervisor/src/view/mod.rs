//! What the supervisor shows: one immutable picture of the fleet, numbered, for status, metrics and `/v1/models`.
//! Reading it decides nothing: whoever wants to send a request asks for a lease.

pub mod canary;
pub mod event;
pub mod ledger;
pub mod log;
pub mod pin_entry;
pub(crate) mod publish;
pub mod ready_since;
pub mod reclaim_entry;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_policies::cooldown::Held;
use warden_policies::declared_memory::Declared;
use warden_policies::growth::{Forecast, Growth};
use warden_policies::lifecycle::Phase;
use warden_policies::quarantine::Known;
use warden_policies::reclaim::{Given, Outcome, Parts};
use warden_policies::recycle::Budget;
use warden_policies::sample::{GpuIndex, HostMemory, MemoryKind, Vram};
use warden_policies::warmth::Warmth;
use warden_policies::{Decision, GenerationId, ModelName, Reason, Work};
use warden_sensors::{CgroupMemory, HostTotals, Report};

use crate::error::Failure;
use crate::view::canary::CanaryView;
use crate::view::pin_entry::PinView;
use crate::view::ready_since::ReadySince;
use crate::view::reclaim_entry::ReclaimEntry;

/// The fleet at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FleetView {
    /// Grows with every change.
    pub number: u64,
    /// The models, in configured order.
    pub models: Vec<Arc<ModelView>>,
    /// The processes of builds that are tried beside a model's own, each as a model that no client can ask for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub canaries: Vec<Arc<ModelView>>,
    /// The GPUs of this machine at the last reading; none where no driver tells.
    #[serde(default)]
    pub devices: Vec<DeviceView>,
    /// The host's memory at the last reading of a process.
    #[serde(default)]
    pub host: Option<HostTotals>,
}

/// One GPU, as its driver tells. What the driver does not tell is absent, never 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceView {
    /// Its number in all figures of VRAM.
    pub gpu: GpuIndex,
    /// Its name.
    pub name: String,
    /// Memory in all, in bytes.
    #[serde(default)]
    pub total: Option<u64>,
    /// Memory in use by anybody, in bytes.
    #[serde(default)]
    pub used: Option<u64>,
    /// Memory that can be had, in bytes.
    #[serde(default)]
    pub free: Option<u64>,
    /// Degrees Celsius.
    #[serde(default)]
    pub temperature: Option<u32>,
    /// The last Xid error (a fault of GPU or driver) that the driver told since we run.
    #[serde(default)]
    pub xid: Option<u64>,
    /// Why growth of memory on it is not acted on any more, if it is not: memory stayed in use after a process had ended.
    #[serde(default)]
    pub leak: Option<String>,
}

/// The state of a model as clients know it (`status.value` in `/v1/models`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelState {
    /// No process; the first request starts one.
    Unloaded,
    /// A process starts.
    Loading,
    /// Requests are served.
    Loaded,
    /// Requests wait: the only process is being replaced, stopped, or is suspect.
    Draining,
    /// It crashed and waits for its next start.
    Backoff,
    /// It cannot start before something changes: a flag, a file.
    Failed,
}

impl ModelState {
    /// The name in `/v1/models`, status and metrics.
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

/// One model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelView {
    /// Its name.
    pub name: ModelName,
    /// Other names.
    pub aliases: Vec<String>,
    /// Its state.
    pub state: ModelState,
    /// Callers waiting in the queue.
    pub waiting: usize,
    /// The bound of the queue.
    pub queue_depth: usize,
    /// Its processes, oldest first. While one replaces another there are two per replica.
    pub backends: Vec<BackendView>,
    /// Replacements so far, by reason.
    pub recycles: Vec<(Reason, u64)>,
    /// The last of them: why, and when it was complete (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_replacement: Option<(Reason, String)>,
    /// Requests to give memory back so far.
    #[serde(default)]
    pub reclaims: ReclaimTotals,
    /// Unexpected ends so far.
    pub crashes: u64,
    /// A process of it was ready once since we run.
    #[serde(default)]
    pub was_ready: bool,
    /// Context length in tokens that the last ready process reported.
    pub n_ctx: Option<u64>,
    /// What it takes beside text, as the last ready process reported; `None` if it did not say.
    #[serde(default)]
    pub modalities: Option<Modalities>,
    /// What the policy says about the neediest backend, and what holds it back.
    pub policy: Option<PolicyView>,
    /// Why the last start failed, while that matters.
    pub last_failure: Option<Failure>,
    /// What is to be expected while it has no process because one has failed.
    #[serde(default)]
    pub outage: Option<Outage>,
    /// What became of the conversations at the last replacement that had any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<Warmth>,
    /// Why a start or replacement chose its way (`sequential: a GPU is present`), for people.
    pub replace_note: Option<String>,
    /// Requests that may have killed its processes.
    #[serde(default)]
    pub quarantine: QuarantineView,
    /// Whether it may leave for another model.
    #[serde(default)]
    pub pin: PinView,
    /// Who serves it, if no process of ours does. What is said of a process is said of the endpoint then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteView>,
    /// The build that is tried beside its own, or was tried last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Box<CanaryView>>,
}

impl ModelView {
    /// Its own name and its aliases: what a client may ask for.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// A model of which nothing runs, and nothing has.
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

/// Somebody else's endpoint that serves a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteView {
    /// Its address.
    pub url: String,
    /// What the model is called there.
    pub model: String,
}

/// Requests that may have killed a process of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuarantineView {
    /// Those that are refused, then those that are suspected.
    pub requests: Vec<Known>,
    /// Requests that were put under refusal so far.
    pub quarantined: u64,
    /// Times that one of them was sent again and refused.
    pub refusals: u64,
}

/// A model without a process, because one has failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outage {
    /// Callers are turned away at once, because waiting would most likely be in vain; else they wait in the queue.
    pub refusing: bool,
    /// The next start, in milliseconds since 1970 (UTC).
    pub next_start_unix_ms: u64,
    /// The next start comes as soon as a file that it needs has changed, whatever `next_start_unix_ms` says.
    pub watching: bool,
    /// What an operator can do, in a sentence.
    pub cure: String,
}

/// What a model takes beside text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Modalities {
    /// Images.
    pub vision: bool,
    /// Recordings.
    pub audio: bool,
    /// Films.
    pub video: bool,
}

/// A decision and its cooldown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyView {
    /// The decision.
    pub decision: Decision,
    /// What holds it back; `None` if nothing does.
    pub held: Option<Held>,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendView {
    /// Which replica of the model, from 0.
    pub replica: u32,
    /// Which generation; `None` before the first start.
    pub generation: Option<GenerationId>,
    /// Where it is in its life.
    pub phase: Phase,
    /// Its process id.
    pub pid: Option<u32>,
    /// The program that it was started as; what it is by now may be another, if that program was a script or a wrapper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// Since when it takes requests.
    #[serde(rename = "ready_seconds", alias = "ready_for", default)]
    pub ready_since: Option<ReadySince>,
    /// Leases held.
    pub in_flight: u32,
    /// Slots that it reported.
    pub slots: Option<u32>,
    /// Host memory at the last sample.
    pub host: Option<HostMemory>,
    /// Host memory when it had become ready.
    pub host_at_ready: Option<HostMemory>,
    /// Work since its spawn.
    pub work: Work,
    /// What it last reported about its GPU memory; `None` if it reports nothing, as a plain llama-server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<Report>,
    /// What its memory does.
    #[serde(default)]
    pub memory: MemoryView,
    /// Signs of its health beside probes.
    #[serde(default)]
    pub health: HealthView,
    /// What it lost on GPUs against the best process like it, in words; `None` if nothing is known to be missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub degraded: Option<String>,
    /// Whether it can be asked to give memory back, and what came of it.
    #[serde(default)]
    pub reclaim: ReclaimView,
    /// What the policy does next with it; `None` before it was judged.
    #[serde(default)]
    pub next: Option<PolicyView>,
}

impl BackendView {
    /// Bytes that it held of a memory when that was read last; `None` if it was not.
    pub fn held(&self, memory: MemoryKind) -> Option<u64> {
        match memory {
            MemoryKind::Host => self.host.map(HostMemory::charged),
            MemoryKind::Vram(gpu) => {
                self.memory.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes)
            }
        }
    }
}

/// Requests to give memory back to all processes of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReclaimTotals {
    /// How many ended how.
    pub counts: Vec<(Outcome, u64)>,
    /// What was given back, by the processes' own count.
    pub given: Given,
}

/// Requests to give memory back to one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReclaimView {
    /// Who in it can be asked; `None` before the first reading.
    pub parts: Option<Parts>,
    /// `policy.reclaim`, as it was when the process was made.
    pub wanted: bool,
    /// It is being asked.
    pub asking: bool,
    /// How often it was asked.
    pub count: u64,
    /// What came of the last time.
    pub last: Option<ReclaimEntry>,
}

/// What the memory of a process does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryView {
    /// VRAM at the last sample, GPU by GPU; a GPU whose figure is not known is not in it.
    #[serde(default)]
    pub vram: Vec<Vram>,
    /// Why VRAM is not known, so that nothing is decided by it; `None` if it is known or the machine has no GPU.
    #[serde(default)]
    pub vram_unknown: Option<String>,
    /// Why neither host memory nor VRAM of its server is measured, so that no memory policy acts on it; `None` if they
    /// are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmeasured: Option<String>,
    /// The control group that it is in, as the kernel counts for it; shown, never judged. `None` if it has none of
    /// version 2.
    #[serde(default)]
    pub group: Option<CgroupMemory>,
    /// The picture of each series that was read.
    #[serde(default)]
    pub growth: Vec<Growth>,
    /// What is left to each limit of a series that grows.
    #[serde(default)]
    pub forecasts: Vec<ForecastView>,
    /// Requests per second lately, as forecasts take them; `None` before the first one was answered.
    #[serde(default)]
    pub request_rate: Option<f64>,
    /// What the server is told to keep, in words, one pool each.
    #[serde(default)]
    pub allowance: Vec<String>,
    /// The same in bytes: pools of host memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub declared: Vec<Declared>,
    /// Its slots share one context: what one of them holds is missing to the others.
    #[serde(default)]
    pub one_pool: bool,
    /// The budgets of each memory in bytes, as far as they are known yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<BudgetView>,
    /// The number of the reading that all this is of: those of a process are counted from 1; 0 before the first.
    #[serde(default)]
    pub reading: u64,
}

/// The budgets of one memory in bytes, whatever they were written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetView {
    /// Which memory.
    pub series: MemoryKind,
    /// They.
    #[serde(flatten)]
    pub budget: Budget,
}

/// What is left until a limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForecastView {
    /// Which memory.
    pub series: MemoryKind,
    /// The reason that reaching the limit will be: `host_soft`, `vram_hard`, …
    pub reason: Reason,
    /// The forecast.
    #[serde(flatten)]
    pub forecast: Forecast,
}

/// Signs of health beside probes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HealthView {
    /// Answers in a row in which the server said that computing failed.
    #[serde(default)]
    pub compute_errors: u32,
    /// Tokens per second and busy slot lately; `None` before enough was generated.
    #[serde(default)]
    pub decode_rate: Option<f64>,
    /// The same when it was fresh.
    #[serde(default)]
    pub decode_baseline: Option<f64>,
    /// For how long work has been in flight without any sign of progress.
    #[serde(rename = "stalled_seconds", alias = "stalled_for", with = "warden_policies::seconds", default)]
    pub stalled_for: Option<Duration>,
    /// How long that would be sound, by what its tokens and prompts took so far.
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

    /// Whether any value in it is a time as serde writes it by itself.
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
        // The same picture, asked for later.
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(serde_json::to_value(&view).unwrap()["ready_seconds"], json!(8.0));
    }
}
