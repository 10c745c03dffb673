//! What is known of the memory of one generation: readings, what they add up to, what the server is told to keep. It is fed
//! and asked; it decides nothing and tells nobody.
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
use warden_policies::book::held::{self, Held};
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::growth::{Growth, Monitor, Prior, Verdict, VerdictChange};
use warden_policies::health::Offload;
use warden_policies::measured_needs::MeasuredNeeds;
use warden_policies::reclaim::Parts;
use warden_policies::recycle::{Facts, Reading, RecyclePolicy, SeriesFacts};
use warden_policies::sample::{Edge, HostMemory, MemoryKind, Sample, Vram, VramSource, Work};
use warden_sensors::{CgroupMemory, HostTotals, Report};

use crate::lease::cell::Cell;
use crate::memory::declared_memory;
use crate::memory::recording::Recorder;
use crate::process::gpus::Devices;
use crate::process::{self, NoVram, Props};
use crate::spec::{Command, Common};

/// When and of what a reading was taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// The number of the reading: those of a process are counted from 1, as they are begun.
    pub(crate) number: u64,
    /// When it was complete.
    pub(crate) at: Instant,
    pub(crate) edge: Edge,
    pub(crate) in_flight: u32,
    pub(crate) work: Work,
    /// Host memory was read page by page, too, and has to show this share of its growth.
    pub(crate) confirm: Option<f64>,
    /// How often it had given memory back on demand when this was begun.
    pub(crate) reclaims: u64,
}

/// What a reading changed.
#[derive(Debug)]
pub(crate) struct Observed {
    /// It is the first one.
    pub(crate) first: bool,
    /// The changes of verdict; `None` if it says nothing about growth and health, because a later one was complete before it.
    pub(crate) changes: Option<Vec<VerdictChange>>,
}

#[derive(Debug)]
pub(crate) struct MemoryTracker {
    /// How many readings were begun.
    begun: u64,
    /// The number of the last one that was taken in; 0 before the first.
    taken: u64,
    /// The last known figure.
    pub(crate) host: Option<HostMemory>,
    pub(crate) host_at_ready: Option<HostMemory>,
    /// The last one that it wrote.
    pub(crate) report: Option<Report>,
    pub(crate) monitor: Monitor,
    pub(crate) cost: PromptCost,
    /// Tokens of the largest prompt at the last reading.
    pub(crate) largest_prompt: u64,
    /// Requests were in flight at the last reading.
    pub(crate) busy: bool,
    pub(crate) recorder: Option<Recorder>,
    /// Names what the process is made of, for what is remembered of it.
    pub(crate) key: String,
    pub(crate) vram: Vec<Vram>,
    pub(crate) vram_at_ready: Vec<Vram>,
    /// What it had on GPUs when it was ready.
    pub(crate) offload: Offload,
    pub(crate) no_vram: Option<NoVram>,
    /// The last one that was told.
    no_vram_told: Option<NoVram>,
    /// The most tokens that anybody counted: prompt and output.
    tokens: (u64, u64),
    /// Why its server is not measured, if it is not.
    unmeasured: Option<String>,
    pub(crate) devices: Option<Arc<Devices>>,
    pub(crate) totals: Option<HostTotals>,
    pub(crate) group: Option<CgroupMemory>,
    /// What an experiment measured of such a process.
    measured: MeasuredNeeds,
    /// What it was seen to hold.
    held: Vec<Held>,
    /// The facts of the last judgement.
    pub(crate) facts: Option<Facts>,
    /// When growth of host memory was read page by page, and whether that showed it, too.
    confirmed: Option<(Instant, bool)>,
    confirm_next: bool,
    declared: DeclaredMemory,
    /// Who in it can be asked to give memory back; `None` before the first reading.
    pub(crate) parts: Option<Parts>,
    /// How often it has answered such a request.
    pub(crate) reclaims: u64,
    /// Readings before the last ones.
    before: Vec<(MemoryKind, u64)>,
    last: Option<Instant>,
}

impl MemoryTracker {
    pub(crate) fn new(common: &Common, priors: Vec<Prior>, key: String, command: &Command) -> Self {
        let mut memory = Self {
            begun: 0,
            taken: 0,
            host: None,
            host_at_ready: None,
            report: None,
            monitor: Monitor::with_prior(&common.growth, priors),
            cost: PromptCost::new(&warden_policies::defaults().admission),
            largest_prompt: 0,
            busy: false,
            recorder: None,
            key,
            vram: Vec::new(),
            vram_at_ready: Vec::new(),
            offload: Offload::default(),
            no_vram: None,
            no_vram_told: None,
            unmeasured: None,
            tokens: (0, 0),
            devices: None,
            totals: None,
            group: None,
            measured: MeasuredNeeds::default(),
            held: Vec::new(),
            facts: None,
            confirmed: None,
            confirm_next: false,
            declared: declared_memory::of(command, None),
            parts: None,
            reclaims: 0,
            before: Vec::new(),
            last: None,
        };
        memory.allow();
        memory
    }

    /// What an experiment measured of such a process: prices of prompts, and how much the largest take.
    pub(crate) fn told(&mut self, measured: MeasuredNeeds) {
        for price in &measured.prices {
            self.cost.told(*price);
        }
        self.measured = measured;
    }

    /// What is measured is taken off the readings; the rest is allowed for.
    fn allow(&mut self) {
        self.monitor.allow(MemoryKind::Host, self.allowed());
    }

    fn allowed(&self) -> u64 {
        declared_memory::allowed(&self.declared)
    }

    /// It is ready: `/props` told its slots and the build, and `lines` are what it has said so far.
    pub(crate) fn ready(
        &mut self,
        command: &Command,
        props: &Props,
        lines: &[String],
        available: Option<u64>,
    ) {
        let (slots, build) = (props.slots, props.build);
        if build.is_some() {
            // Defaults depend on the build.
            self.declared = declared_memory::of(command, build);
            for line in lines {
                self.declared.learn(line);
            }
        }
        if let Some(bytes) = available {
            self.declared.available(bytes);
        }
        if let Some(slots) = slots {
            self.declared.slots(slots);
        }
        self.allow();
    }

    /// A line of its output.
    pub(crate) fn said(&mut self, line: &str) {
        if !self.offload.learn(line) && self.declared.learn(line).is_some() {
            self.allow();
        }
    }

    /// Numbers the next reading. True if it is to read host memory page by page, too.
    pub(crate) fn begin(&mut self) -> (u64, bool) {
        self.begun += 1;
        (self.begun, std::mem::take(&mut self.confirm_next))
    }

    /// It has given memory back. Returns the number of the last reading that was begun before.
    pub(crate) fn note_reclaim(&mut self) -> u64 {
        self.reclaims += 1;
        self.begun
    }

    /// Whether a reading was taken in.
    pub(crate) fn is_known(&self) -> bool {
        self.taken > 0
    }

    /// Takes a reading in; `None` if a later one was before it.
    pub(crate) fn observe(
        &mut self,
        taken: &Taken,
        reading: &process::Sample,
        spawned: Instant,
        cell: &Cell,
    ) -> Option<Observed> {
        // Two readings may overtake each other: what began earlier shows what was earlier, however late it comes.
        if taken.number < self.taken {
            return None;
        }
        let first = std::mem::replace(&mut self.taken, taken.number) == 0;
        // The last known figure stays: an unreadable file is no sign of less memory.
        self.host = reading.host.or(self.host);
        let changes = self.follow(taken, reading, spawned, cell);
        if first {
            self.host_at_ready = reading.host;
            self.vram_at_ready.clone_from(&reading.vram);
            self.offload.vram = reading.vram_held();
        }
        // A process that was told no place can be asked by nobody.
        self.parts = Some(reading.parts.unwrap_or_default());
        if let Some(report) = &reading.report {
            self.report = Some(report.clone());
        }
        Some(Observed { first, changes })
    }

    /// The changes of verdict; `None` if this reading began later than the last one and was complete before it.
    fn follow(
        &mut self,
        taken: &Taken,
        reading: &process::Sample,
        spawned: Instant,
        cell: &Cell,
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
        let sample = Sample {
            at: taken.at.saturating_duration_since(spawned),
            edge: taken.edge,
            host: reading.host,
            vram: reading.vram.clone(),
            pools: declared_memory::pools(&self.declared, reading.report.as_ref(), &reading.vram),
            in_flight: taken.in_flight,
            work: self.work(taken.work, reading),
            largest_prompt: cell.largest_prompt(),
            reclaims: taken.reclaims,
        };
        if let Some(recorder) = &self.recorder {
            recorder.write(&sample);
        }
        let changes = self.monitor.observe(&sample);
        // What is estimated may be somebody else's.
        let read = |series| match series {
            MemoryKind::Host => true,
            MemoryKind::Vram(gpu) => {
                reading.vram.iter().any(|vram| vram.gpu == gpu && vram.source != VramSource::Estimate)
            }
        };
        for (series, bytes) in now.iter().filter(|(series, _)| read(*series)) {
            let sound = self.is_sound(*series);
            held::note(&mut self.held, *series, *bytes, sound);
        }
        self.cost.observe(&sample);
        (self.largest_prompt, self.busy) = (sample.largest_prompt, sample.in_flight > 0);
        if let Some(facts) = &mut self.facts {
            self.before =
                facts.series.iter().filter_map(|facts| Some((facts.series, facts.charged?))).collect();
            facts.series.clear();
        }
        self.confirm(taken, reading, &now);
        self.vram.clone_from(&reading.vram);
        self.no_vram.clone_from(&reading.no_vram);
        self.unmeasured.clone_from(&reading.unmeasured);
        self.devices = reading.devices.clone().or_else(|| self.devices.take());
        self.totals = reading.totals.or(self.totals);
        self.group.clone_from(&reading.group);
        Some(changes)
    }

    /// The work, with its tokens as the server counts them where it tells: it knows of those for clients that left, too.
    fn work(&mut self, work: Work, reading: &process::Sample) -> Work {
        let told = |tokens: Option<u64>| tokens.unwrap_or(0);
        let metrics = reading.metrics.unwrap_or_default();
        let (prompt, output) = self.tokens;
        let prompt_tokens = work.prompt_tokens.max(told(metrics.prompt_tokens)).max(prompt);
        let output_tokens = work.output_tokens.max(told(metrics.output_tokens)).max(output);
        self.tokens = (prompt_tokens, output_tokens);
        Work { prompt_tokens, output_tokens, ..work }
    }

    /// Why VRAM is not known, if that is worth telling and was not told yet.
    pub(crate) fn news_of_vram(&mut self) -> Option<String> {
        let news = self.no_vram.clone().filter(|no_vram| !no_vram.is_normal);
        let news = news.filter(|no_vram| self.no_vram_told.as_ref() != Some(no_vram))?;
        self.no_vram_told = Some(news.clone());
        Some(news.why)
    }

    /// Whether all its VRAM is in its figures.
    pub(crate) fn knows_vram(&self) -> bool {
        self.no_vram.as_ref().is_none_or(|no_vram| no_vram.is_normal)
    }

    pub(crate) fn growth(&self, series: MemoryKind) -> Option<&Growth> {
        self.monitor.growth().iter().find(|growth| growth.series == series)
    }

    /// All memories with what is known of each.
    pub(crate) fn series(&self, policy: &RecyclePolicy) -> Vec<SeriesFacts> {
        let of_host = Reading {
            series: MemoryKind::Host,
            charged: self.charged(MemoryKind::Host),
            before: self.was(MemoryKind::Host),
            at_ready: self.host_at_ready.map(HostMemory::charged),
            estimated: false,
            total: self.totals.map(|totals| totals.total),
            free: self.totals.map(|totals| totals.available),
            allowance: self.allowed(),
            worst: self.measured.worst(MemoryKind::Host),
        };
        let of_gpu = |vram: &Vram| {
            let device = self.devices.as_ref().and_then(|devices| devices.reading(vram.gpu));
            let at_ready = self.vram_at_ready.iter().find(|known| known.gpu == vram.gpu);
            Reading {
                series: MemoryKind::Vram(vram.gpu),
                charged: Some(vram.bytes),
                before: self.was(MemoryKind::Vram(vram.gpu)),
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

    /// Bytes that it holds of one memory.
    pub(crate) fn charged(&self, kind: MemoryKind) -> Option<u64> {
        match kind {
            MemoryKind::Host => self.host.map(HostMemory::charged),
            MemoryKind::Vram(gpu) => self.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes),
        }
    }

    /// What the last judgement knew of one memory.
    pub(crate) fn facts_of(&self, kind: Option<MemoryKind>) -> Option<&SeriesFacts> {
        self.facts.as_ref()?.series.iter().find(|facts| Some(facts.series) == kind)
    }

    /// Whether what it holds of one memory is its own need, and no leak as far as is known.
    fn is_sound(&self, series: MemoryKind) -> bool {
        self.growth(series)
            .is_none_or(|growth| !matches!(growth.verdict, Verdict::Suspected | Verdict::Leaking))
    }

    /// Whether anything that it holds grows without an end.
    pub(crate) fn leaks(&self) -> bool {
        self.monitor.growth().iter().any(|growth| growth.verdict == Verdict::Leaking)
    }

    /// What it was seen to hold. Of what leaks nobody knows how much was needed: it counts as it was when it was ready.
    pub(crate) fn held(&self) -> Vec<Held> {
        let mut all = self.held.clone();
        for held in &mut all {
            if !self.is_sound(held.series) {
                held.most = held.ready;
            }
        }
        all
    }

    fn was(&self, series: MemoryKind) -> Option<u64> {
        self.before.iter().find(|(of, _)| *of == series).map(|(_, bytes)| *bytes)
    }

    /// Whether it has memory on a GPU. One that is lost tells no figures any more, so those of better times count, too.
    pub(crate) fn uses(&self, gpu: GpuIndex) -> bool {
        self.vram.iter().chain(&self.vram_at_ready).any(|vram| vram.gpu == gpu)
    }

    /// The GPUs that it uses; all of them where that is not known.
    pub(crate) fn gpus(&self) -> Vec<GpuIndex> {
        match (&self.no_vram, &self.devices) {
            (Some(no_vram), Some(devices)) if !no_vram.is_normal => devices.with_vram().collect(),
            _ => self.vram.iter().map(|vram| vram.gpu).collect(),
        }
    }
}
