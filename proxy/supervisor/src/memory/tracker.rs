//! Memory history of one generation: readings, statistics, declared memory.
//!
//! ```text
//!   reading ──┬─> policies' sample ──┬─> monitor: verdicts, forecasts
//!             │                      └─> recording
//!   log ──────┴─> declared memory ───┘
//! ```

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use warden_policies::admission::PromptCost;
use warden_policies::book::held::{self, HeldMemory};
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::growth::{GrowthMonitor, GrowthVerdict, LeakPrior, SeriesGrowth, VerdictChange};
use warden_policies::health::GpuOffload;
use warden_policies::reclaim::ReclaimParts;
use warden_policies::recycle::{MemoryBudget, RecycleFacts, RecyclePolicy, SeriesFacts, SeriesReading};
use warden_policies::sample::{
    BackendSample, HostMemory, MemoryKind, SampleEdge, VramReading, VramSource, WorkDone,
};
use warden_policies::units::scale_bytes;
use warden_policies::{GpuIndex, Reason};
use warden_sensors::{CgroupMemory, CudaReport, HostTotals};

use crate::lease::cell::GenerationCell;
use crate::memory::declared_memory;
use crate::memory::recording::SampleRecorder;
use crate::process::gpus::GpuDevices;
use crate::process::{self, NoVram, ServerProps};
use crate::spec::{CommonConfig, ServerCommand};
use crate::sync::lock;
use crate::view::{BudgetView, ForecastView, MemoryView};

#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadingContext {
    /// Number of the reading, counted from 1 for each process, in the order in which readings begin.
    pub(crate) number: u64,
    pub(crate) at: Instant,
    pub(crate) edge: SampleEdge,
    pub(crate) in_flight: u32,
    pub(crate) work: WorkDone,
    /// Share of the growth that a page-by-page reading has to show, if one was made.
    pub(crate) confirm: Option<f64>,
    /// Reclaims completed when the reading began.
    pub(crate) reclaims: u64,
}

#[derive(Debug)]
pub(crate) struct ReadingResult {
    pub(crate) first: bool,
    /// Changed growth verdicts; `None` for a reading that is ignored because a later one was complete first.
    pub(crate) changes: Option<Vec<VerdictChange>>,
}

/// Data that the next instance cannot read from the process.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct MemoryHistory {
    begun: u64,
    /// Number of the last recorded reading; 0 before the first.
    taken: u64,
    /// Last known host memory.
    pub(crate) host: Option<HostMemory>,
    pub(crate) host_at_ready: Option<HostMemory>,
    pub(crate) vram: Vec<VramReading>,
    vram_at_ready: Vec<VramReading>,
    /// Largest prompt at the last reading, in tokens.
    pub(crate) largest_prompt: u64,
    /// Highest counts of prompt tokens and of generated tokens.
    tokens: (u64, u64),
    /// Layers and VRAM on GPUs of the ready process.
    pub(crate) offload: GpuOffload,
    held: Vec<HeldMemory>,
    declared: DeclaredMemory,
    /// Answered reclaim requests.
    pub(crate) reclaims: u64,
}

/// Last reading, except for the history.
#[derive(Debug, Default)]
pub(crate) struct LastReading {
    at: Option<Instant>,
    pub(crate) is_busy: bool,
    pub(crate) report: Option<CudaReport>,
    pub(crate) no_vram: Option<NoVram>,
    /// Reason why the server's memory is not measured.
    unmeasured: Option<String>,
    pub(crate) devices: Option<Arc<GpuDevices>>,
    pub(crate) totals: Option<HostTotals>,
    group: Option<CgroupMemory>,
    /// Parts that can give memory back; `None` before the first reading.
    pub(crate) parts: Option<ReclaimParts>,
}

#[derive(Debug)]
pub(crate) struct MemoryTracker {
    /// Key of the process in the leak history.
    pub(crate) key: String,
    pub(crate) history: MemoryHistory,
    pub(crate) last: LastReading,
    pub(crate) monitor: GrowthMonitor,
    pub(crate) cost: PromptCost,
    pub(crate) recorder: Option<SampleRecorder>,
    /// Last logged reason for unknown VRAM.
    no_vram_logged: Option<NoVram>,
    pub(crate) facts: Option<RecycleFacts>,
    previous: Vec<(MemoryKind, u64)>,
    /// Last page-by-page reading, and true if it showed the growth.
    confirmed: Option<(Instant, bool)>,
    confirm_next: bool,
}

impl MemoryTracker {
    pub(crate) fn new(
        common: &CommonConfig,
        priors: Vec<LeakPrior>,
        key: String,
        command: &ServerCommand,
    ) -> Self {
        let declared = declared_memory::from_command(command, None);
        let mut memory = Self {
            key,
            history: MemoryHistory { declared, ..MemoryHistory::default() },
            last: LastReading::default(),
            monitor: GrowthMonitor::with_prior(&common.growth, priors),
            cost: PromptCost::new(&warden_policies::defaults().admission),
            recorder: None,
            no_vram_logged: None,
            facts: None,
            previous: Vec::new(),
            confirmed: None,
            confirm_next: false,
        };
        memory.update_allowance();
        memory
    }

    pub(crate) fn to_record(&self) -> serde_json::Value {
        let mut record = serde_json::to_value(&self.history).unwrap_or_default();
        let monitor = serde_json::to_value(&self.monitor);
        if let (Some(record), Ok(monitor)) = (record.as_object_mut(), monitor) {
            record.insert("monitor".to_owned(), monitor);
        }
        record
    }

    /// Restores a serialized tracker. Returns false if another version wrote it in an unknown form or judged
    /// memory differently: growth is then judged from now on.
    pub(crate) fn restore(&mut self, written: &serde_json::Value) -> bool {
        let Some(monitor) = written.get("monitor") else { return false };
        let Ok(mut history) = MemoryHistory::deserialize(written) else { return false };
        history.begun = history.begun.max(history.taken);
        self.history = history;
        let resumed = self.monitor.resume(monitor);
        self.update_allowance();
        resumed
    }

    /// Updates the memory that the process keeps on purpose. Measured pools are subtracted from readings;
    /// others may grow up to their limits.
    fn update_allowance(&mut self) {
        self.monitor.set_allowance(MemoryKind::Host, self.allowed_bytes());
    }

    fn allowed_bytes(&self) -> u64 {
        declared_memory::allowed_bytes(&self.history.declared)
    }

    /// `props`: from `/props`. `lines`: output so far.
    pub(crate) fn note_ready(
        &mut self,
        command: &ServerCommand,
        props: &ServerProps,
        lines: &[String],
        available: Option<u64>,
    ) {
        let declared = &mut self.history.declared;
        if props.build.is_some() {
            // Default sizes depend on the build.
            *declared = declared_memory::from_command(command, props.build);
            for line in lines {
                declared.apply_log_line(line);
            }
        }
        if let Some(bytes) = available {
            declared.set_available(bytes);
        }
        if let Some(slots) = props.slots {
            declared.set_slots(slots);
        }
        self.update_allowance();
    }

    pub(crate) fn parse_line(&mut self, line: &str) {
        if !self.history.offload.apply_log_line(line) && self.history.declared.apply_log_line(line).is_some()
        {
            self.update_allowance();
        }
    }

    /// Returns the number of the next reading, and true if it has to read page by page.
    pub(crate) fn begin_reading(&mut self) -> (u64, bool) {
        self.history.begun += 1;
        (self.history.begun, std::mem::take(&mut self.confirm_next))
    }

    /// Records a completed reclaim. Returns the number of the last reading begun before.
    pub(crate) fn note_reclaim(&mut self) -> u64 {
        self.history.reclaims += 1;
        self.history.begun
    }

    pub(crate) fn has_reading(&self) -> bool {
        self.history.taken > 0
    }

    /// Returns `None` if a later reading was recorded before.
    pub(crate) fn note_reading(
        &mut self,
        taken: &ReadingContext,
        reading: &process::ProcessSample,
        spawned: Instant,
        cell: &GenerationCell,
    ) -> Option<ReadingResult> {
        // Readings may overtake each other.
        if taken.number < self.history.taken {
            return None;
        }
        let first = std::mem::replace(&mut self.history.taken, taken.number) == 0;
        // An unreadable file does not mean less memory.
        self.history.host = reading.host.or(self.history.host);
        let changes = self.follow_growth(taken, reading, spawned, cell);
        if first {
            self.history.host_at_ready = reading.host;
            self.history.vram_at_ready.clone_from(&reading.vram);
            self.history.offload.vram = reading.vram_held();
        }
        // Without a reclaim file, no part supports reclaim.
        self.last.parts = Some(reading.parts.unwrap_or_default());
        if let Some(report) = &reading.report {
            self.last.report = Some(report.clone());
        }
        Some(ReadingResult { first, changes })
    }

    /// Returns `None` if a later reading was complete before.
    fn follow_growth(
        &mut self,
        taken: &ReadingContext,
        reading: &process::ProcessSample,
        spawned: Instant,
        cell: &GenerationCell,
    ) -> Option<Vec<VerdictChange>> {
        if self.last.at.is_some_and(|last| taken.at < last) {
            return None;
        }
        self.last.at = Some(taken.at);
        let host = reading.host.map(|host| (MemoryKind::Host, host.charged()));
        let now: Vec<(MemoryKind, u64)> = host
            .into_iter()
            .chain(reading.vram.iter().map(|vram| (MemoryKind::Vram(vram.gpu), vram.bytes)))
            .collect();
        let sample = BackendSample {
            at: taken.at.saturating_duration_since(spawned),
            edge: taken.edge,
            host: reading.host,
            vram: reading.vram.clone(),
            pools: declared_memory::measured_pools(
                &self.history.declared,
                reading.report.as_ref(),
                &reading.vram,
            ),
            in_flight: taken.in_flight,
            work: self.work(taken.work, reading),
            largest_prompt: lock(&cell.outcomes).largest_prompt,
            reclaims: taken.reclaims,
        };
        if let Some(recorder) = &self.recorder {
            recorder.write(&sample);
        }
        let changes = self.monitor.observe(&sample);
        // Estimated VRAM may include memory of other processes.
        let read = |series| match series {
            MemoryKind::Host => true,
            MemoryKind::Vram(gpu) => {
                reading.vram.iter().any(|vram| vram.gpu == gpu && vram.source != VramSource::Estimate)
            }
        };
        for (series, bytes) in now.iter().filter(|(series, _)| read(*series)) {
            let sound = self.is_sound(*series);
            held::record_held(&mut self.history.held, *series, *bytes, sound);
        }
        self.cost.observe(&sample);
        self.history.largest_prompt = sample.largest_prompt;
        if let Some(facts) = &mut self.facts {
            self.previous =
                facts.series.iter().filter_map(|facts| Some((facts.series, facts.charged?))).collect();
            facts.series.clear();
        }
        self.note_confirmation(taken, reading, &now);
        self.history.vram.clone_from(&reading.vram);
        let last = &mut self.last;
        last.is_busy = sample.in_flight > 0;
        last.no_vram.clone_from(&reading.no_vram);
        last.unmeasured.clone_from(&reading.unmeasured);
        last.devices = reading.devices.clone().or_else(|| last.devices.take());
        last.totals = reading.totals.or(last.totals);
        last.group.clone_from(&reading.group);
        Some(changes)
    }

    /// Prefers the server's own token counts, because they include requests whose clients left.
    fn work(&mut self, work: WorkDone, reading: &process::ProcessSample) -> WorkDone {
        let metrics = reading.answers.metrics.unwrap_or_default();
        let (prompt, output) = self.history.tokens;
        let prompt_tokens = work.prompt_tokens.max(metrics.prompt_tokens.unwrap_or(0)).max(prompt);
        let output_tokens = work.output_tokens.max(metrics.output_tokens.unwrap_or(0)).max(output);
        self.history.tokens = (prompt_tokens, output_tokens);
        WorkDone { prompt_tokens, output_tokens, ..work }
    }

    /// Reason for unknown VRAM, if it is worth logging and new.
    pub(crate) fn vram_news(&mut self) -> Option<String> {
        let news = self.last.no_vram.clone().filter(|no_vram| !no_vram.is_normal);
        let news = news.filter(|no_vram| self.no_vram_logged.as_ref() != Some(no_vram))?;
        self.no_vram_logged = Some(news.clone());
        Some(news.why)
    }

    /// True if all VRAM of the process is known.
    pub(crate) fn knows_vram(&self) -> bool {
        self.last.no_vram.as_ref().is_none_or(|no_vram| no_vram.is_normal)
    }

    pub(crate) fn growth(&self, series: MemoryKind) -> Option<&SeriesGrowth> {
        self.monitor.growth().iter().find(|growth| growth.series == series)
    }

    /// Inputs of the recycle policy for each kind of memory.
    pub(crate) fn series_facts(&self, policy: &RecyclePolicy) -> Vec<SeriesFacts> {
        let of_host = SeriesReading {
            series: MemoryKind::Host,
            charged: self.charged_bytes(MemoryKind::Host),
            before: self.previous_bytes(MemoryKind::Host),
            at_ready: self.history.host_at_ready.map(HostMemory::charged),
            estimated: false,
            total: self.last.totals.map(|totals| totals.total),
            free: self.last.totals.map(|totals| totals.available),
            allowance: self.allowed_bytes(),
        };
        let of_gpu = |vram: &VramReading| {
            let device = self.last.devices.as_ref().and_then(|devices| devices.reading(vram.gpu));
            let at_ready = self.history.vram_at_ready.iter().find(|known| known.gpu == vram.gpu);
            SeriesReading {
                series: MemoryKind::Vram(vram.gpu),
                charged: Some(vram.bytes),
                before: self.previous_bytes(MemoryKind::Vram(vram.gpu)),
                at_ready: at_ready.map(|vram| vram.bytes),
                estimated: vram.source == VramSource::Estimate,
                total: device.and_then(|device| device.total),
                free: device.and_then(|device| device.free),
                allowance: 0,
            }
        };
        let all = std::iter::once(of_host).chain(self.history.vram.iter().map(of_gpu));
        all.map(|reading| SeriesFacts::gather(policy, &self.monitor, &reading)).collect()
    }

    pub(crate) fn charged_bytes(&self, kind: MemoryKind) -> Option<u64> {
        match kind {
            MemoryKind::Host => self.history.host.map(HostMemory::charged),
            MemoryKind::Vram(gpu) => {
                self.history.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes)
            }
        }
    }

    /// Inputs at the last judgement for one kind of memory.
    pub(crate) fn facts_of(&self, kind: Option<MemoryKind>) -> Option<&SeriesFacts> {
        self.facts.as_ref()?.series.iter().find(|facts| Some(facts.series) == kind)
    }

    /// True unless this memory is known or suspected to leak.
    fn is_sound(&self, series: MemoryKind) -> bool {
        self.growth(series)
            .is_none_or(|growth| !matches!(growth.verdict, GrowthVerdict::Suspected | GrowthVerdict::Leaking))
    }

    pub(crate) fn leaks(&self) -> bool {
        self.monitor.growth().iter().any(|growth| growth.verdict == GrowthVerdict::Leaking)
    }

    /// Held memory; for a leak, the amount when the process became ready.
    pub(crate) fn held_memory(&self) -> Vec<HeldMemory> {
        let mut all = self.history.held.clone();
        for held in &mut all {
            if !self.is_sound(held.series) {
                held.most = held.ready;
            }
        }
        all
    }

    fn previous_bytes(&self, series: MemoryKind) -> Option<u64> {
        self.previous.iter().find(|(of, _)| *of == series).map(|(_, bytes)| *bytes)
    }

    /// True if the process has memory on a GPU, or had when it was ready: a lost GPU reports nothing.
    pub(crate) fn uses_gpu(&self, gpu: GpuIndex) -> bool {
        self.history.vram.iter().chain(&self.history.vram_at_ready).any(|vram| vram.gpu == gpu)
    }

    /// GPUs that the process uses; all GPUs if unknown.
    pub(crate) fn used_gpus(&self) -> Vec<GpuIndex> {
        match (&self.last.no_vram, &self.last.devices) {
            (Some(no_vram), Some(devices)) if !no_vram.is_normal => devices.with_vram().collect(),
            _ => self.history.vram.iter().map(|vram| vram.gpu).collect(),
        }
    }

    fn note_confirmation(
        &mut self,
        taken: &ReadingContext,
        reading: &process::ProcessSample,
        now: &[(MemoryKind, u64)],
    ) {
        let Some(share) = taken.confirm else { return };
        let charged = now.iter().find(|(series, _)| *series == MemoryKind::Host).map(|(_, bytes)| *bytes);
        let baseline = self.growth(MemoryKind::Host).and_then(|growth| growth.baseline);
        let shown = match (reading.confirmed, charged, baseline) {
            (Some(exact), Some(charged), Some(baseline)) => {
                shows_growth(exact, baseline, charged.saturating_sub(baseline), share)
            }
            // Without an earlier figure, believe the kernel's counters.
            _ => true,
        };
        self.confirmed = Some((taken.at, shown));
    }

    /// Result of the last exact reading within `interval`.
    pub(crate) fn confirmation(&self, now: Instant, interval: Duration) -> Option<bool> {
        let (at, shown) = self.confirmed?;
        (now.saturating_duration_since(at) < interval).then_some(shown)
    }

    pub(crate) fn confirm_next(&mut self) {
        self.confirm_next = true;
    }

    pub(crate) fn show(&self) -> MemoryView {
        let facts = self.facts.iter().flat_map(|facts| &facts.series);
        let forecasts = facts.flat_map(|facts| {
            let (soft, hard) = match facts.series {
                MemoryKind::Host => (Reason::HostSoft, Reason::HostHard),
                MemoryKind::Vram(_) => (Reason::VramSoft, Reason::VramHard),
            };
            let all = [(soft, facts.to_soft), (hard, facts.to_hard), (Reason::MemoryExhausted, facts.to_end)];
            all.into_iter().filter_map(|(reason, forecast)| {
                Some(ForecastView { series: facts.series, reason, forecast: forecast? })
            })
        });
        let facts = self.facts.iter().flat_map(|facts| &facts.series);
        let budgets = facts
            .filter(|facts| facts.budget != MemoryBudget::default())
            .map(|facts| BudgetView { series: facts.series, budget: facts.budget });
        MemoryView {
            budgets: budgets.collect(),
            declared: self.history.declared.pools(),
            reading: self.history.taken,
            vram: self.history.vram.clone(),
            vram_unknown: self.last.no_vram.as_ref().map(|no_vram| no_vram.why.clone()),
            unmeasured: self.last.unmeasured.clone(),
            group: self.last.group.clone(),
            growth: self.monitor.growth().to_vec(),
            forecasts: forecasts.collect(),
            request_rate: self.monitor.rate(),
            allowance: self.history.declared.source_sentences(),
            one_pool: self.history.declared.is_one_pool(),
        }
    }
}

/// True if the exact figure has grown by this share of `growth`.
fn shows_growth(exact: u64, baseline: u64, growth: u64, share: f64) -> bool {
    exact.saturating_sub(baseline) >= scale_bytes(growth, share.min(1.0))
}
