//! Memory history of one generation: readings, statistics, declared memory. Decisions are made elsewhere.
//!
//! ```text
//!   reading ──┬─> policies' sample ──┬─> monitor: verdicts, forecasts
//!             │                      └─> recording
//!   log ──────┴─> declared memory ───┘
//! ```

mod confirm;
mod kept;
mod show;

use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::GpuIndex;
use warden_policies::admission::PromptCost;
use warden_policies::book::held::{self, HeldMemory};
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::experiment_needs::ExperimentNeeds;
use warden_policies::growth::{GrowthMonitor, GrowthVerdict, LeakPrior, SeriesGrowth, VerdictChange};
use warden_policies::health::GpuOffload;
use warden_policies::reclaim::ReclaimParts;
use warden_policies::recycle::{RecycleFacts, RecyclePolicy, SeriesFacts, SeriesReading};
use warden_policies::sample::{
    BackendSample, HostMemory, MemoryKind, SampleEdge, VramReading, VramSource, WorkDone,
};
use warden_sensors::{CgroupMemory, CudaReport, HostTotals};

use crate::lease::cell::GenerationCell;
use crate::memory::declared_memory;
use crate::memory::recording::SampleRecorder;
use crate::process::gpus::GpuDevices;
use crate::process::{self, NoVram, ServerProps};
use crate::spec::{CommonConfig, ServerCommand};

/// Time and circumstances of a reading.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadingContext {
    /// Number of the reading: counted from 1 for each process, in the order in which readings begin.
    pub(crate) number: u64,
    /// Time at which the reading was complete.
    pub(crate) at: Instant,
    pub(crate) edge: SampleEdge,
    pub(crate) in_flight: u32,
    pub(crate) work: WorkDone,
    /// If set, host memory was also read page by page, and that figure has to show this share of the growth.
    pub(crate) confirm: Option<f64>,
    /// Number of completed reclaims when the reading began.
    pub(crate) reclaims: u64,
}

/// Effects of a reading.
#[derive(Debug)]
pub(crate) struct ReadingResult {
    /// True if this is the first reading of the process.
    pub(crate) first: bool,
    /// Growth verdicts that changed; `None` if the reading is ignored for growth and health, because a
    /// reading that began later was complete earlier.
    pub(crate) changes: Option<Vec<VerdictChange>>,
}

#[derive(Debug)]
pub(crate) struct MemoryTracker {
    /// Number of readings that were begun.
    readings_begun: u64,
    /// Number of the last reading recorded; 0 before the first.
    last_reading: u64,
    /// Host memory at the last reading where it was known.
    pub(crate) host: Option<HostMemory>,
    pub(crate) host_at_ready: Option<HostMemory>,
    /// Last memory report that the process wrote.
    pub(crate) report: Option<CudaReport>,
    pub(crate) monitor: GrowthMonitor,
    pub(crate) cost: PromptCost,
    /// Tokens of the largest prompt at the last reading.
    pub(crate) largest_prompt: u64,
    /// True if requests were running at the last reading.
    pub(crate) busy: bool,
    pub(crate) recorder: Option<SampleRecorder>,
    /// Key of the process in the leak history.
    pub(crate) key: String,
    pub(crate) vram: Vec<VramReading>,
    pub(crate) vram_at_ready: Vec<VramReading>,
    /// Layers and VRAM on GPUs when the process was ready.
    pub(crate) offload: GpuOffload,
    pub(crate) no_vram: Option<NoVram>,
    /// Reason for unknown VRAM that was logged last.
    no_vram_logged: Option<NoVram>,
    /// Highest token counts from any source: prompt tokens, and generated tokens.
    tokens: (u64, u64),
    /// Why the memory of the server is not measured; `None` if it is.
    unmeasured: Option<String>,
    pub(crate) devices: Option<Arc<GpuDevices>>,
    pub(crate) totals: Option<HostTotals>,
    pub(crate) group: Option<CgroupMemory>,
    /// Results of an experiment with a process of the same kind.
    measured: ExperimentNeeds,
    /// Memory that the process has held.
    held: Vec<HeldMemory>,
    /// Inputs of the recycle policy at the last judgement.
    pub(crate) facts: Option<RecycleFacts>,
    /// Time of the last page-by-page reading; the flag tells if it showed the growth.
    confirmed: Option<(Instant, bool)>,
    confirm_next: bool,
    declared: DeclaredMemory,
    /// Parts of the process that can give memory back; `None` before the first reading.
    pub(crate) parts: Option<ReclaimParts>,
    /// Number of reclaim requests that the process has answered.
    pub(crate) reclaims: u64,
    /// Bytes of each memory at the previous reading.
    previous: Vec<(MemoryKind, u64)>,
    last: Option<Instant>,
}

impl MemoryTracker {
    pub(crate) fn new(
        common: &CommonConfig,
        priors: Vec<LeakPrior>,
        key: String,
        command: &ServerCommand,
    ) -> Self {
        let mut memory = Self {
            readings_begun: 0,
            last_reading: 0,
            host: None,
            host_at_ready: None,
            report: None,
            monitor: GrowthMonitor::with_prior(&common.growth, priors),
            cost: PromptCost::new(&warden_policies::defaults().admission),
            largest_prompt: 0,
            busy: false,
            recorder: None,
            key,
            vram: Vec::new(),
            vram_at_ready: Vec::new(),
            offload: GpuOffload::default(),
            no_vram: None,
            no_vram_logged: None,
            unmeasured: None,
            tokens: (0, 0),
            devices: None,
            totals: None,
            group: None,
            measured: ExperimentNeeds::default(),
            held: Vec::new(),
            facts: None,
            confirmed: None,
            confirm_next: false,
            declared: declared_memory::from_command(command, None),
            parts: None,
            reclaims: 0,
            previous: Vec::new(),
            last: None,
        };
        memory.update_allowance();
        memory
    }

    /// Sets the results of an experiment with a process of the same kind: prompt prices, and memory with
    /// the largest prompts.
    pub(crate) fn set_measurements(&mut self, measured: ExperimentNeeds) {
        for price in &measured.prices {
            self.cost.set_price(*price);
        }
        self.measured = measured;
    }

    /// Updates the memory that the process keeps on purpose: pools whose size is measured are subtracted
    /// from readings, for others growth up to their limit is allowed.
    fn update_allowance(&mut self) {
        self.monitor.set_allowance(MemoryKind::Host, self.allowed_bytes());
    }

    fn allowed_bytes(&self) -> u64 {
        declared_memory::allowed_bytes(&self.declared)
    }

    /// Records that the process is ready, with slots and build from `/props`. `lines`: its output so far.
    pub(crate) fn note_ready(
        &mut self,
        command: &ServerCommand,
        props: &ServerProps,
        lines: &[String],
        available: Option<u64>,
    ) {
        let (slots, build) = (props.slots, props.build);
        if build.is_some() {
            // Compute the declared memory again: default sizes depend on the build.
            self.declared = declared_memory::from_command(command, build);
            for line in lines {
                self.declared.apply_log_line(line);
            }
        }
        if let Some(bytes) = available {
            self.declared.set_available(bytes);
        }
        if let Some(slots) = slots {
            self.declared.set_slots(slots);
        }
        self.update_allowance();
    }

    /// Reads memory sizes from a line of the process's output.
    pub(crate) fn parse_line(&mut self, line: &str) {
        if !self.offload.apply_log_line(line) && self.declared.apply_log_line(line).is_some() {
            self.update_allowance();
        }
    }

    /// Returns the number of the next reading, and true if host memory has to be read page by page, too.
    pub(crate) fn begin_reading(&mut self) -> (u64, bool) {
        self.readings_begun += 1;
        (self.readings_begun, std::mem::take(&mut self.confirm_next))
    }

    /// Records a completed reclaim. Returns the number of the last reading that was begun before.
    pub(crate) fn note_reclaim(&mut self) -> u64 {
        self.reclaims += 1;
        self.readings_begun
    }

    /// True after the first reading.
    pub(crate) fn has_reading(&self) -> bool {
        self.last_reading > 0
    }

    /// Records a reading. Returns `None` if a reading that began later was recorded before.
    pub(crate) fn note_reading(
        &mut self,
        taken: &ReadingContext,
        reading: &process::ProcessSample,
        spawned: Instant,
        cell: &GenerationCell,
    ) -> Option<ReadingResult> {
        // Readings may overtake each other: a reading that began earlier is older, even if it arrives later.
        if taken.number < self.last_reading {
            return None;
        }
        let first = std::mem::replace(&mut self.last_reading, taken.number) == 0;
        // Keep the last known figure: an unreadable file does not mean less memory.
        self.host = reading.host.or(self.host);
        let changes = self.follow_growth(taken, reading, spawned, cell);
        if first {
            self.host_at_ready = reading.host;
            self.vram_at_ready.clone_from(&reading.vram);
            self.offload.vram = reading.vram_held();
        }
        // Without a reclaim file no part of the process supports reclaim, which is what the default says.
        self.parts = Some(reading.parts.unwrap_or_default());
        if let Some(report) = &reading.report {
            self.report = Some(report.clone());
        }
        Some(ReadingResult { first, changes })
    }

    /// Updates growth statistics. Returns changed verdicts; `None` if a reading that began later was
    /// complete earlier.
    fn follow_growth(
        &mut self,
        taken: &ReadingContext,
        reading: &process::ProcessSample,
        spawned: Instant,
        cell: &GenerationCell,
    ) -> Option<Vec<VerdictChange>> {
        if self.last.is_some_and(|last| taken.at < last) {
            return None;
        }
        self.last = Some(taken.at);
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
            pools: declared_memory::measured_pools(&self.declared, reading.report.as_ref(), &reading.vram),
            in_flight: taken.in_flight,
            work: self.work(taken.work, reading),
            largest_prompt: cell.largest_prompt(),
            reclaims: taken.reclaims,
        };
        if let Some(recorder) = &self.recorder {
            recorder.write(&sample);
        }
        let changes = self.monitor.observe(&sample);
        // Leave out estimated VRAM: an estimate may include memory of other processes.
        let read = |series| match series {
            MemoryKind::Host => true,
            MemoryKind::Vram(gpu) => {
                reading.vram.iter().any(|vram| vram.gpu == gpu && vram.source != VramSource::Estimate)
            }
        };
        for (series, bytes) in now.iter().filter(|(series, _)| read(*series)) {
            let sound = self.is_sound(*series);
            held::record_held(&mut self.held, *series, *bytes, sound);
        }
        self.cost.observe(&sample);
        (self.largest_prompt, self.busy) = (sample.largest_prompt, sample.in_flight > 0);
        if let Some(facts) = &mut self.facts {
            self.previous =
                facts.series.iter().filter_map(|facts| Some((facts.series, facts.charged?))).collect();
            facts.series.clear();
        }
        self.note_confirmation(taken, reading, &now);
        self.vram.clone_from(&reading.vram);
        self.no_vram.clone_from(&reading.no_vram);
        self.unmeasured.clone_from(&reading.unmeasured);
        self.devices = reading.devices.clone().or_else(|| self.devices.take());
        self.totals = reading.totals.or(self.totals);
        self.group.clone_from(&reading.group);
        Some(changes)
    }

    /// Work of the process. Uses token counts of the server where they are reported, because they include
    /// requests whose clients left.
    fn work(&mut self, work: WorkDone, reading: &process::ProcessSample) -> WorkDone {
        let told = |tokens: Option<u64>| tokens.unwrap_or(0);
        let metrics = reading.metrics.unwrap_or_default();
        let (prompt, output) = self.tokens;
        let prompt_tokens = work.prompt_tokens.max(told(metrics.prompt_tokens)).max(prompt);
        let output_tokens = work.output_tokens.max(told(metrics.output_tokens)).max(output);
        self.tokens = (prompt_tokens, output_tokens);
        WorkDone { prompt_tokens, output_tokens, ..work }
    }

    /// Why VRAM is unknown, if that is worth logging and was not logged yet.
    pub(crate) fn vram_news(&mut self) -> Option<String> {
        let news = self.no_vram.clone().filter(|no_vram| !no_vram.is_normal);
        let news = news.filter(|no_vram| self.no_vram_logged.as_ref() != Some(no_vram))?;
        self.no_vram_logged = Some(news.clone());
        Some(news.why)
    }

    /// True if the figures include all VRAM of the process.
    pub(crate) fn knows_vram(&self) -> bool {
        self.no_vram.as_ref().is_none_or(|no_vram| no_vram.is_normal)
    }

    pub(crate) fn growth(&self, series: MemoryKind) -> Option<&SeriesGrowth> {
        self.monitor.growth().iter().find(|growth| growth.series == series)
    }

    /// Inputs of the recycle policy about each kind of memory.
    pub(crate) fn series_facts(&self, policy: &RecyclePolicy) -> Vec<SeriesFacts> {
        let of_host = SeriesReading {
            series: MemoryKind::Host,
            charged: self.charged_bytes(MemoryKind::Host),
            before: self.previous_bytes(MemoryKind::Host),
            at_ready: self.host_at_ready.map(HostMemory::charged),
            estimated: false,
            total: self.totals.map(|totals| totals.total),
            free: self.totals.map(|totals| totals.available),
            allowance: self.allowed_bytes(),
            worst: self.measured.worst(MemoryKind::Host),
        };
        let of_gpu = |vram: &VramReading| {
            let device = self.devices.as_ref().and_then(|devices| devices.reading(vram.gpu));
            let at_ready = self.vram_at_ready.iter().find(|known| known.gpu == vram.gpu);
            SeriesReading {
                series: MemoryKind::Vram(vram.gpu),
                charged: Some(vram.bytes),
                before: self.previous_bytes(MemoryKind::Vram(vram.gpu)),
                at_ready: at_ready.map(|vram| vram.bytes),
                estimated: vram.source == VramSource::Estimate,
                total: device.and_then(|device| device.total),
                free: device.and_then(|device| device.free),
                allowance: 0,
                worst: self.measured.worst(MemoryKind::Vram(vram.gpu)),
            }
        };
        let all = std::iter::once(of_host).chain(self.vram.iter().map(of_gpu));
        all.map(|reading| SeriesFacts::gather(policy, &self.monitor, &reading)).collect()
    }

    /// Bytes of one kind of memory that are charged to the process.
    pub(crate) fn charged_bytes(&self, kind: MemoryKind) -> Option<u64> {
        match kind {
            MemoryKind::Host => self.host.map(HostMemory::charged),
            MemoryKind::Vram(gpu) => self.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes),
        }
    }

    /// Inputs of the recycle policy about one kind of memory, at the last judgement.
    pub(crate) fn facts_of(&self, kind: Option<MemoryKind>) -> Option<&SeriesFacts> {
        self.facts.as_ref()?.series.iter().find(|facts| Some(facts.series) == kind)
    }

    /// True if this kind of memory is neither known nor suspected to leak.
    fn is_sound(&self, series: MemoryKind) -> bool {
        self.growth(series)
            .is_none_or(|growth| !matches!(growth.verdict, GrowthVerdict::Suspected | GrowthVerdict::Leaking))
    }

    /// True if any kind of memory leaks.
    pub(crate) fn leaks(&self) -> bool {
        self.monitor.growth().iter().any(|growth| growth.verdict == GrowthVerdict::Leaking)
    }

    /// Memory that the process has held. For memory that leaks, the amount at readiness counts, because the
    /// real need is unknown.
    pub(crate) fn held_memory(&self) -> Vec<HeldMemory> {
        let mut all = self.held.clone();
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

    /// True if the process has memory on a GPU, or had when it was ready: a lost GPU reports no figures.
    pub(crate) fn uses_gpu(&self, gpu: GpuIndex) -> bool {
        self.vram.iter().chain(&self.vram_at_ready).any(|vram| vram.gpu == gpu)
    }

    /// GPUs that the process uses; all GPUs if unknown.
    pub(crate) fn used_gpus(&self) -> Vec<GpuIndex> {
        match (&self.no_vram, &self.devices) {
            (Some(no_vram), Some(devices)) if !no_vram.is_normal => devices.with_vram().collect(),
            _ => self.vram.iter().map(|vram| vram.gpu).collect(),
        }
    }
}
