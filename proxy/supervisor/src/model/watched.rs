//! What is known of the memory and the health of one generation: readings, what they add up to, what the server is told
//! to keep. It is fed and asked; it decides nothing and tells nobody.
//!
//! ```text
//!   reading ──┬─> policies' sample ──┬─> monitor: verdicts, forecasts
//!             │                      └─> recording
//!   log ──────┼─> allowance ─────────┘
//!   outcomes ─┴─> health: symptoms
//! ```

mod confirm;
mod show;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GpuIndex;
use warden_policies::admission::PromptCost;
use warden_policies::allowance::Allowance;
use warden_policies::experiment::headroom::Learnt;
use warden_policies::growth::{Growth, Monitor, Prior, Turn};
use warden_policies::health::{Health, Look, Offload, Symptom};
use warden_policies::recycle::{Facts, Reading, RecyclePolicy, SeriesFacts};
use warden_policies::sample::{Edge, HostMemory, Sample, Series, Vram, VramSource, Work};
use warden_sensors::gpu::Fault;
use warden_sensors::{CgroupMemory, HostTotals, Standing};

use crate::context::Common;
use crate::gpus::Devices;
use crate::hints;
use crate::kept;
use crate::lease::Cell;
use crate::outcomes::Decode;
use crate::process::{self, NoVram, Props};
use crate::record::Recorder;
use crate::spec::Command;

/// When and of what a reading was taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// The how manieth of its process it is, as they were begun.
    pub(crate) number: u64,
    /// When it was complete.
    pub(crate) at: Instant,
    pub(crate) edge: Edge,
    pub(crate) in_flight: u32,
    pub(crate) work: Work,
    /// Host memory was read page by page, too, and has to show this share of its growth.
    pub(crate) confirm: Option<f64>,
}

/// See the module.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts that do not depend on each other, not one state in parts"
)]
pub(super) struct Watched {
    pub(super) monitor: Monitor,
    /// What prompts cost.
    pub(super) cost: PromptCost,
    /// Tokens of the largest prompt at the last reading.
    pub(super) largest_prompt: u64,
    /// Requests were in flight at the last reading.
    pub(super) busy: bool,
    pub(super) recorder: Option<Recorder>,
    /// Names what the process is made of, for what is remembered of it.
    pub(super) key: String,
    pub(super) vram: Vec<Vram>,
    pub(super) vram_at_ready: Vec<Vram>,
    /// What it had on GPUs when it was ready.
    pub(super) offload: Offload,
    pub(super) no_vram: Option<NoVram>,
    /// The last one that was told.
    no_vram_told: Option<NoVram>,
    /// The most tokens that anybody counted: prompt and output.
    tokens: (u64, u64),
    pub(super) devices: Option<Arc<Devices>>,
    pub(super) totals: Option<HostTotals>,
    pub(super) group: Option<CgroupMemory>,
    /// What an experiment measured of such a process.
    measured: Learnt,
    /// The facts of the last judgement.
    pub(super) facts: Option<Facts>,
    /// Since when it drains although a drain or more is wanted.
    pub(super) urgent_since: Option<Instant>,
    /// When growth of host memory was read page by page, and whether that showed it, too.
    pub(super) confirmed: Option<(Instant, bool)>,
    pub(super) confirm_next: bool,
    allowance: Allowance,
    health: Health,
    /// Readings before the last ones.
    before: Vec<(Series, u64)>,
    last: Option<Instant>,
    faults_seen: Option<u64>,
    speed: Option<f64>,
    /// It answers questions about its slots when it is well.
    tells_slots: bool,
    /// Its counters may be asked for while nothing is in flight.
    asked_idle: bool,
    /// How long it may take to load its model again; zero if it never gives it back.
    wake: Duration,
    standing: Option<(Instant, Standing)>,
    paging: u64,
    /// How long a prompt whose client left may still be evaluated.
    forget: Duration,
}

impl Watched {
    pub(super) fn new(common: &Common, priors: Vec<Prior>, key: String, command: &Command) -> Self {
        let mut health = common.health.clone();
        if let Some(tokens) = hints::batch(command) {
            health.prefill_step = tokens;
        }
        let mut watched = Self {
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
            tokens: (0, 0),
            devices: None,
            totals: None,
            group: None,
            measured: Learnt::default(),
            facts: None,
            urgent_since: None,
            confirmed: None,
            confirm_next: false,
            allowance: kept::declared(command, None),
            health: Health::new(&health),
            before: Vec::new(),
            last: None,
            faults_seen: None,
            speed: None,
            tells_slots: false,
            asked_idle: hints::may_ask_idle(command, None),
            wake: Duration::ZERO,
            standing: None,
            paging: common.health.paging,
            forget: common.health.wedged_after,
        };
        watched.allow();
        watched
    }

    /// What an experiment measured of such a process: prices of prompts, and how much the largest take.
    pub(super) fn told(&mut self, measured: Learnt) {
        for price in &measured.prices {
            self.cost.told(*price);
        }
        self.measured = measured;
    }

    /// What is measured is taken off the readings; the rest is allowed for.
    fn allow(&mut self) {
        self.monitor.allow(Series::Host, self.allowed());
    }

    fn allowed(&self) -> u64 {
        kept::allowed(&self.allowance)
    }

    /// It is ready: `/props` told its slots and the build, and `lines` are what it has said so far. `start` is how long it
    /// took.
    pub(super) fn ready(
        &mut self,
        command: &Command,
        props: &Props,
        lines: &[String],
        available: Option<u64>,
        start: Duration,
    ) {
        let (slots, build) = (props.slots, props.build);
        self.tells_slots = props.tells_slots;
        self.asked_idle = hints::may_ask_idle(command, build);
        self.wake = if hints::sleeps(command) { start.saturating_mul(2) } else { Duration::ZERO };
        if build.is_some() {
            // Defaults depend on the build.
            self.allowance = kept::declared(command, build);
            for line in lines {
                self.allowance.learn(line);
            }
        }
        if let Some(bytes) = available {
            self.allowance.available(bytes);
        }
        if let Some(slots) = slots {
            self.allowance.slots(slots);
        }
        self.allow();
    }

    /// A line of its output.
    pub(super) fn said(&mut self, line: &str) {
        if !self.offload.learn(line) && self.allowance.learn(line).is_some() {
            self.allow();
        }
    }

    /// Takes a reading in. Returns the changes of verdict.
    pub(super) fn observe(
        &mut self,
        taken: &Taken,
        reading: &process::Sample,
        spawned: Instant,
        cell: &Cell,
    ) -> Vec<Turn> {
        // Two readings may overtake each other.
        if self.last.is_some_and(|last| taken.at < last) {
            return Vec::new();
        }
        self.last = Some(taken.at);
        let host = reading.host.map(|host| (Series::Host, host.charged()));
        let now: Vec<(Series, u64)> = host
            .into_iter()
            .chain(reading.vram.iter().map(|vram| (Series::Vram(vram.gpu), vram.bytes)))
            .collect();
        let sample = Sample {
            at: taken.at.saturating_duration_since(spawned),
            edge: taken.edge,
            host: reading.host,
            vram: reading.vram.clone(),
            pools: kept::pools(&self.allowance, reading.report.as_ref(), &reading.vram),
            in_flight: taken.in_flight,
            work: self.work(taken.work, reading),
            largest_prompt: cell.largest_prompt(),
        };
        if let Some(recorder) = &mut self.recorder {
            recorder.write(&sample);
        }
        let turns = self.monitor.observe(&sample);
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
        self.devices = reading.devices.clone().or_else(|| self.devices.take());
        self.totals = reading.totals.or(self.totals);
        self.group.clone_from(&reading.group);
        self.look(taken, reading, cell, spawned);
        turns
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
    pub(super) fn news_of_vram(&mut self) -> Option<String> {
        let news = self.no_vram.clone().filter(|no_vram| !no_vram.is_normal);
        let news = news.filter(|no_vram| self.no_vram_told.as_ref() != Some(no_vram))?;
        self.no_vram_told = Some(news.clone());
        Some(news.why)
    }

    /// Whether all its VRAM is in its figures.
    pub(super) fn knows_vram(&self) -> bool {
        self.no_vram.as_ref().is_none_or(|no_vram| no_vram.is_normal)
    }

    /// Whether its counters are asked for now, and what it says of its slots: a server that sleeps is let sleep, and one
    /// that works is left alone.
    pub(super) fn asks(&self, in_flight: u32) -> (bool, bool) {
        (in_flight > 0 || self.asked_idle, in_flight > 0 && self.tells_slots && self.health.asks())
    }

    /// Whether it was stopped since the last reading, or waited for its pages.
    fn is_hindered(&mut self, at: Instant, standing: Option<Standing>) -> bool {
        let Some(now) = standing else { return false };
        let before = self.standing.replace((at, now));
        let stopped = now.stopped || before.is_some_and(|(_, before)| before.stopped);
        let paged = before.is_some_and(|(then, before)| {
            let most = self.paging.saturating_mul(at.saturating_duration_since(then).as_secs().max(1));
            now.major_faults.saturating_sub(before.major_faults) > most
        });
        stopped || paged
    }

    fn look(&mut self, taken: &Taken, reading: &process::Sample, cell: &Cell, spawned: Instant) {
        let at = taken.at.saturating_duration_since(spawned);
        let answers = cell.take_decodes();
        for answer in &answers {
            self.health.speed(at, answer.tokens, answer.ms / 1000.0, answer.busy);
        }
        self.speed = speed(&answers).or(self.speed);
        for prompt in cell.take_prefills() {
            self.health.prompt(prompt.new, prompt.all, prompt.ms);
        }
        let decodes = reading.metrics.and_then(|metrics| metrics.decodes);
        let hindered = self.is_hindered(taken.at, reading.standing);
        self.health.observe(&Look {
            at,
            awaited: cell.pulses.awaited(self.forget),
            moves: cell.pulses.moves(),
            decodes,
            slots: reading.slots,
            tells: self.tells_slots,
            gaps: cell.pulses.gaps(),
            hindered,
            wake: self.wake,
            compute_errors: cell.compute_errors(),
        });
        self.faults(reading);
    }

    fn faults(&mut self, reading: &process::Sample) {
        let Some(devices) = &reading.devices else { return };
        // Those before its first reading were another one's.
        let seen = *self.faults_seen.get_or_insert_with(|| devices.last_fault());
        for fault in devices.faults.iter().filter(|fault| fault.number > seen) {
            // A GPU that is lost tells no figures any more, so those of better times count, too.
            let uses = reading.vram.iter().chain(&self.vram_at_ready).any(|vram| vram.gpu == fault.gpu);
            let xid = match fault.fault {
                Fault::Xid(xid) => xid,
                Fault::Lost => Some(OFF_THE_BUS),
                Fault::Ecc(_) => None,
            };
            if let Some(xid) = xid.filter(|_| uses) {
                self.health.xid(fault.gpu, xid);
            }
        }
        self.faults_seen = Some(seen.max(devices.last_fault()));
    }

    pub(super) fn growth(&self, series: Series) -> Option<&Growth> {
        self.monitor.growth().iter().find(|growth| growth.series == series)
    }

    pub(super) fn symptoms(&self) -> Vec<Symptom> {
        self.health.symptoms()
    }

    /// The speed of decoding at the last look, tokens per second of one slot.
    pub(super) fn speed(&self) -> Option<f64> {
        self.speed
    }

    /// All memories with what is known of each.
    pub(super) fn series(
        &self,
        policy: &RecyclePolicy,
        host: Option<HostMemory>,
        host_at_ready: Option<HostMemory>,
    ) -> Vec<SeriesFacts> {
        let of_host = Reading {
            series: Series::Host,
            charged: host.map(HostMemory::charged),
            before: self.was(Series::Host),
            at_ready: host_at_ready.map(HostMemory::charged),
            estimated: false,
            total: self.totals.map(|totals| totals.total),
            free: self.totals.map(|totals| totals.available),
            allowance: self.allowed(),
            worst: self.measured.worst(Series::Host),
        };
        let of_gpu = |vram: &Vram| {
            let device = self.devices.as_ref().and_then(|devices| devices.reading(vram.gpu));
            let at_ready = self.vram_at_ready.iter().find(|known| known.gpu == vram.gpu);
            Reading {
                series: Series::Vram(vram.gpu),
                charged: Some(vram.bytes),
                before: self.was(Series::Vram(vram.gpu)),
                at_ready: at_ready.map(|vram| vram.bytes),
                estimated: vram.source == VramSource::Estimate,
                total: device.and_then(|device| device.total),
                free: device.and_then(|device| device.free),
                allowance: 0,
                worst: self.measured.worst(Series::Vram(vram.gpu)),
            }
        };
        let all = std::iter::once(of_host).chain(self.vram.iter().map(of_gpu));
        all.map(|reading| SeriesFacts::gather(policy, &self.monitor, &reading)).collect()
    }

    fn was(&self, series: Series) -> Option<u64> {
        self.before.iter().find(|(of, _)| *of == series).map(|(_, bytes)| *bytes)
    }

    /// The GPUs that it uses; all of them where that is not known.
    pub(super) fn gpus(&self) -> Vec<GpuIndex> {
        match (&self.no_vram, &self.devices) {
            (Some(no_vram), Some(devices)) if !no_vram.is_normal => devices.with_vram().collect(),
            _ => self.vram.iter().map(|vram| vram.gpu).collect(),
        }
    }
}

/// The Xid of a GPU that has fallen off the bus, which is what a driver that lost it means.
const OFF_THE_BUS: u64 = 79;

/// Tokens per second of one slot, over all these answers.
#[expect(clippy::cast_precision_loss, reason = "a number of tokens")]
fn speed(answers: &[Decode]) -> Option<f64> {
    let tokens: u64 = answers.iter().map(|answer| answer.tokens).sum();
    let seconds = answers.iter().map(|answer| answer.ms).sum::<f64>() / 1000.0;
    (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
}
