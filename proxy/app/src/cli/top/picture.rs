//! What is shown of an instance at one moment: made of what `GET /status` answers, or of a recording ([`super::film`]). Pure: facts in,
//! a picture out. Every text in it is [`tame`].

use warden_policies::growth::{Blame, Growth, Unit, Verdict};
use warden_policies::lifecycle::Phase;
use warden_policies::units::exact;
use warden_policies::{ByteSize, MemoryKind, MemoryLimit, Work};
use warden_supervisor::{BackendView, DeviceView, ModelState, ModelView};

use super::look::Tone;
use super::rates::Rate;
use super::text::tame;
use crate::admin::answer::{Budget, Status};
use crate::cli::{canary, gpu, growth, status};

/// An instance at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Picture {
    pub(super) who: Who,
    /// The machine's memory, if it is known.
    pub(super) host: Option<Used>,
    pub(super) gpus: Vec<Gpu>,
    pub(super) rows: Vec<Row>,
}

/// Who is looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Who {
    /// Its process id; `None` for a recording.
    pub(super) pid: Option<u32>,
    /// Program and version, or the file.
    pub(super) name: String,
    /// Where it listens.
    pub(super) address: String,
    /// When it started, RFC 3339.
    pub(super) started_at: String,
    /// Its own memory in bytes.
    pub(super) own: Option<u64>,
}

/// Bytes in use, and in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Used {
    pub(super) used: u64,
    pub(super) total: u64,
}

impl Used {
    /// 0 is empty, 1 full.
    pub(super) fn share(self) -> f64 {
        exact(self.used) / exact(self.total.max(1))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gpu {
    pub(super) number: u32,
    pub(super) memory: Option<Used>,
    /// What else is to be known of it: its temperature, a fault.
    pub(super) note: String,
    pub(super) tone: Tone,
}

/// One model.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    /// As routes know it: anything may be in it, so it is never shown.
    pub(super) name: String,
    pub(super) shown: String,
    pub(super) state: (&'static str, Tone),
    /// Processes that take requests, and all of them.
    pub(super) processes: (usize, usize),
    /// Requests that run, and slots for them if they are known.
    pub(super) busy: (u32, Option<u32>),
    pub(super) waiting: usize,
    /// Host memory of all processes in bytes.
    pub(super) host: Option<u64>,
    /// How full the fullest budget of host memory is: bytes of the process, and its limit.
    pub(super) fill: Option<Used>,
    /// VRAM of all processes, GPU by GPU.
    pub(super) vram: Vec<(u32, u64)>,
    /// What it does each second; filled in when there are two pictures.
    pub(super) rate: Option<Rate>,
    /// The worst of all series.
    pub(super) verdict: Verdict,
    /// Bytes per request that the worst series grows by.
    pub(super) slope: Option<f64>,
    /// The same per hour, at the rate of requests that the forecast assumes.
    pub(super) hourly: Option<f64>,
    /// Seconds until the first limit is reached.
    pub(super) left: Option<f64>,
    /// What is done next, and what holds it back.
    pub(super) next: (String, Tone),
    /// All of it in words, for the view of this model.
    pub(super) words: Vec<String>,
    pub(super) memories: Vec<Memory>,
    pub(super) work: Vec<Done>,
}

/// One memory of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) kind: MemoryKind,
    pub(super) replica: u32,
    pub(super) generation: Option<u64>,
    pub(super) bytes: u64,
    pub(super) soft: Option<u64>,
    pub(super) hard: Option<u64>,
}

/// What one process has done since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) replica: u32,
    pub(super) generation: Option<u64>,
    pub(super) requests: u64,
    pub(super) tokens: u64,
}

impl Done {
    pub(super) const fn of(replica: u32, generation: Option<u64>, work: Work) -> Self {
        Self { replica, generation, requests: work.requests, tokens: work.output_tokens }
    }
}

impl Picture {
    pub(super) fn of(status: &Status) -> Self {
        let fleet = &status.fleet;
        let host = fleet
            .host
            .map(|host| Used { used: host.total.saturating_sub(host.available), total: host.total });
        let totals = Totals { host: host.map(|host| host.total), devices: &fleet.devices };
        Self {
            who: Who {
                pid: Some(status.instance.pid),
                name: tame(&format!("llama-warden {}", status.instance.version)),
                address: tame(&format!("http://{}", status.instance.address)),
                started_at: status.instance.started_at.clone(),
                own: status.instance.memory_anon,
            },
            host,
            gpus: fleet.devices.iter().map(device).collect(),
            rows: fleet
                .models
                .iter()
                .chain(&fleet.canaries)
                .map(|model| row(status, model, &totals))
                .collect(),
        }
    }
}

/// Of what shares are taken.
struct Totals<'a> {
    host: Option<u64>,
    devices: &'a [DeviceView],
}

impl Totals<'_> {
    fn of(&self, kind: MemoryKind) -> Option<u64> {
        match kind {
            MemoryKind::Host => self.host,
            MemoryKind::Vram(gpu) => self.devices.iter().find(|device| device.gpu == gpu)?.total,
        }
    }
}

fn device(device: &DeviceView) -> Gpu {
    let memory = device.used.zip(device.total).map(|(used, total)| Used { used, total });
    let mut notes = Vec::new();
    notes.extend(device.temperature.map(|degrees| format!("{degrees}°C")));
    notes.extend(device.xid.map(|xid| format!("Xid {xid}")));
    notes.extend(device.leak.clone());
    let tone = if device.xid.is_some() || device.leak.is_some() { Tone::Bad } else { Tone::Plain };
    Gpu { number: device.gpu.0, memory, note: tame(&notes.join(", ")), tone }
}

fn row(status: &Status, model: &ModelView, totals: &Totals<'_>) -> Row {
    let budget = status.budgets.get(model.name.as_str()).copied().unwrap_or_default();
    let processes: Vec<&BackendView> = model.backends.iter().filter(|one| is_there(model, one)).collect();
    let slots = processes.iter().map(|one| one.slots).try_fold(0_u32, |sum, slots| Some(sum + slots?));
    let memories: Vec<Memory> = processes.iter().flat_map(|one| memories(one, budget, totals)).collect();
    let host = |memory: &&Memory| memory.kind == MemoryKind::Host;
    let charged: Vec<u64> = memories.iter().filter(host).map(|memory| memory.bytes).collect();
    let fills = memories
        .iter()
        .filter(host)
        .filter_map(|memory| Some(Used { used: memory.bytes, total: memory.soft.or(memory.hard)?.max(1) }));
    let mut vram: Vec<(u32, u64)> = Vec::new();
    for memory in &memories {
        let MemoryKind::Vram(gpu) = memory.kind else { continue };
        match vram.iter_mut().find(|(number, _)| *number == gpu.0) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(memory.bytes),
            None => vram.push((gpu.0, memory.bytes)),
        }
    }
    vram.sort_unstable();
    let worst = worst(&processes);
    let loud = worst.filter(|(_, growth)| growth.verdict >= Verdict::Bounded);
    let soonest = processes.iter().flat_map(|one| &one.memory.forecasts);
    let soonest = soonest.filter_map(|one| one.forecast.seconds).map(|seconds| seconds.value);
    let ready = processes.iter().filter(|one| one.phase == Phase::Ready).count();
    Row {
        name: model.name.as_str().to_owned(),
        shown: tame(model.name.as_str()),
        state: state(model, &processes),
        processes: (ready, processes.len().max(model.backends.len())),
        busy: (processes.iter().map(|one| one.in_flight).sum(), slots.filter(|_| !processes.is_empty())),
        waiting: model.waiting,
        host: (!charged.is_empty())
            .then(|| charged.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes))),
        fill: fills.max_by(|a, b| a.share().total_cmp(&b.share())),
        vram,
        rate: None,
        verdict: worst.map(|(_, growth)| growth.verdict).unwrap_or_default(),
        slope: loud.and_then(|(_, growth)| growth.slope).map(|slope| slope.value),
        hourly: loud.and_then(|(process, growth)| hourly(process, growth)),
        left: soonest.filter(|seconds| seconds.is_finite()).min_by(f64::total_cmp),
        next: next(model),
        words: words(status, model, &processes).iter().map(|line| tame(line)).collect(),
        memories,
        work: processes.iter().map(|one| Done::of(one.replica, generation(one), one.work)).collect(),
    }
}

/// A process of ours has a number; an endpoint of others has none, and is there all the same.
fn is_there(model: &ModelView, backend: &BackendView) -> bool {
    backend.pid.is_some() || model.remote.is_some()
}

fn generation(backend: &BackendView) -> Option<u64> {
    backend.generation.map(|generation| generation.0)
}

fn state(model: &ModelView, processes: &[&BackendView]) -> (&'static str, Tone) {
    let degraded = processes.iter().any(|one| one.degraded.is_some());
    match model.state {
        ModelState::Loaded if degraded => ("degraded", Tone::Warn),
        ModelState::Loaded => ("loaded", Tone::Good),
        ModelState::Unloaded => ("unloaded", Tone::Quiet),
        ModelState::Loading => ("loading", Tone::Busy),
        ModelState::Draining => ("draining", Tone::Busy),
        ModelState::Backoff => ("backoff", Tone::Bad),
        ModelState::Failed => ("failed", Tone::Bad),
    }
}

/// The series that says the worst; of several the first, which is the host's.
fn worst<'a>(processes: &[&'a BackendView]) -> Option<(&'a BackendView, &'a Growth)> {
    let all = processes.iter().flat_map(|one| one.memory.growth.iter().map(move |growth| (*one, growth)));
    all.reduce(|worst, one| if one.1.verdict > worst.1.verdict { one } else { worst })
}

/// Bytes per hour: what the forecast assumes, or what an hour itself pays.
fn hourly(process: &BackendView, growth: &Growth) -> Option<f64> {
    if let Some(Blame::Pays { unit: Unit::Hour, bytes_per_unit, .. }) = growth.blame {
        return Some(bytes_per_unit);
    }
    let of_series = process.memory.forecasts.iter().find(|one| one.series == growth.series)?;
    let (requests, seconds) = (of_series.forecast.requests.value, of_series.forecast.seconds?.value);
    let hourly = growth.slope?.value * requests / seconds * 3600.0;
    hourly.is_finite().then_some(hourly)
}

fn memories(process: &BackendView, budget: Budget, totals: &Totals<'_>) -> Vec<Memory> {
    let of = |kind: MemoryKind, bytes: u64, soft: Option<MemoryLimit>, hard: Option<MemoryLimit>| Memory {
        kind,
        replica: process.replica,
        generation: generation(process),
        bytes,
        soft: limit(process, kind, soft, totals, ["host_soft", "vram_soft"]),
        hard: limit(process, kind, hard, totals, ["host_hard", "vram_hard"]),
    };
    let host = process.host.map(|host| of(MemoryKind::Host, host.charged(), budget.soft, budget.hard));
    let vram = process.memory.vram.iter();
    let vram =
        vram.map(|vram| of(MemoryKind::Vram(vram.gpu), vram.bytes, budget.vram_soft, budget.vram_hard));
    host.into_iter().chain(vram).collect()
}

/// A budget in bytes. What was found out by itself (`auto`) is known from a forecast that goes there.
fn limit(
    process: &BackendView,
    kind: MemoryKind,
    limit: Option<MemoryLimit>,
    totals: &Totals<'_>,
    reasons: [&str; 2],
) -> Option<u64> {
    match limit? {
        MemoryLimit::Bytes(bytes) => Some(bytes.0),
        share @ MemoryLimit::Percent(_) => share.resolve(ByteSize(totals.of(kind)?)).map(|bytes| bytes.0),
        MemoryLimit::Auto => {
            let mut all = process.memory.forecasts.iter();
            let one = all.find(|one| one.series == kind && reasons.contains(&one.reason.as_str()))?;
            Some(one.forecast.limit)
        }
    }
}

/// What an operator should know first.
fn next(model: &ModelView) -> (String, Tone) {
    let note = status::note(model);
    let down = matches!(model.state, ModelState::Failed | ModelState::Backoff);
    let tone = if down { Tone::Bad } else { Tone::Warn };
    if model.last_failure.is_some() || note.starts_with("degraded") {
        return (tame(&note), tone);
    }
    match model.policy.as_ref().and_then(growth::next) {
        // That nothing is done, and why, is no warning.
        Some(planned) if note.is_empty() => (tame(&planned), Tone::Plain),
        Some(planned) => (tame(&planned), tone),
        None if note.is_empty() => (String::new(), Tone::Quiet),
        None => (tame(&note), tone),
    }
}

/// All that is known, in sentences: what `llama-warden status` says, process by process.
fn words(status: &Status, model: &ModelView, processes: &[&BackendView]) -> Vec<String> {
    let mut lines = Vec::new();
    if model.queue_depth > 0 {
        lines.push(format!("queue: {} of {} wait", model.waiting, model.queue_depth));
    }
    lines.extend(model.last_failure.as_ref().map(|failure| format!("failed: {}", failure.message)));
    lines.extend(model.outage.as_ref().map(status::outage));
    lines.extend(
        model.remote.as_ref().map(|remote| format!("served by {} as `{}`", remote.url, remote.model)),
    );
    for process in processes {
        let pid = process.pid.map(|pid| format!("process {pid}, ")).unwrap_or_default();
        let generation = process.generation.map(|generation| format!("{generation}, ")).unwrap_or_default();
        let since = process.ready_since.map(|since| format!(" for {}", status::age(since.elapsed())));
        lines.push(format!(
            "{pid}{generation}replica {}: {}{}, {} requests answered",
            process.replica,
            process.phase,
            since.unwrap_or_default(),
            process.work.requests
        ));
        lines.extend(process.degraded.iter().map(|lost| format!("  degraded: {lost}")));
        lines.extend(growth::lines(process).into_iter().map(|line| format!("  {line}")));
        lines.extend(process.report.iter().flat_map(gpu::lines).map(|line| format!("  {line}")));
    }
    lines.extend(status::pin(model));
    lines.extend(model.warm.as_ref().map(|warm| format!("last replacement: {warm}")));
    let replaced: Vec<String> =
        model.recycles.iter().map(|(reason, count)| format!("{count} by {reason}")).collect();
    if !replaced.is_empty() || model.crashes > 0 {
        lines.push(format!("replaced: {}; crashes: {}", replaced.join(", "), model.crashes));
    }
    let mitigations = status.mitigations.get(model.name.as_str());
    lines.extend(mitigations.map(|all| format!("mitigations: {}", all.join(", "))));
    let advice = status.advice.get(model.name.as_str()).into_iter().flatten();
    lines.extend(advice.map(|one| format!("looks like: {}", one.text)));
    lines.extend(model.canary.as_deref().map(canary::line));
    lines
}
