//! What is known of the health of one generation: its answers, its progress, faults of its GPUs, and the symptoms that they add
//! up to. It is fed and asked; it decides nothing and tells nobody.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GpuIndex;
use warden_policies::health::{Health, Look, Symptom};
use warden_policies::units::exact;
use warden_sensors::Standing;
use warden_sensors::gpu::Fault;

use crate::lease::cell::Cell;
use crate::lease::outcomes::Decode;
use crate::process::{Props, Sample, hints};
use crate::spec::{Command, Common};
use crate::view::HealthView;

/// Silence that is worth showing: less is the pause between two looks.
const STALL_SHOWN: Duration = Duration::from_secs(10);

/// The Xid of a GPU that has fallen off the bus, which is what a driver that lost it means.
const OFF_THE_BUS: u64 = 79;

#[derive(Debug)]
pub(super) struct HealthTracker {
    health: Health,
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

impl HealthTracker {
    pub(super) fn new(common: &Common, command: &Command) -> Self {
        let mut policy = common.health.clone();
        if let Some(tokens) = hints::batch(command) {
            policy.prefill_step = tokens;
        }
        Self {
            health: Health::new(&policy),
            faults_seen: None,
            speed: None,
            tells_slots: false,
            asked_idle: hints::may_ask_idle(command, None),
            wake: Duration::ZERO,
            standing: None,
            paging: common.health.paging,
            forget: common.health.wedged_after,
        }
    }

    /// It is ready, and took so long to start.
    pub(super) fn ready(&mut self, command: &Command, props: &Props, start: Duration) {
        self.tells_slots = props.tells_slots;
        self.asked_idle = hints::may_ask_idle(command, props.build);
        self.wake = if hints::sleeps(command) { start.saturating_mul(2) } else { Duration::ZERO };
    }

    /// Whether its counters are asked for now, and what it says of its slots: a server that sleeps is let sleep, and one
    /// that works is left alone.
    pub(super) fn asks(&self, in_flight: u32) -> (bool, bool) {
        (in_flight > 0 || self.asked_idle, in_flight > 0 && self.tells_slots && self.health.asks())
    }

    /// Takes in what a reading that was complete at `now`, and the answers since the last one, say. `uses`: whether it
    /// has memory on a GPU.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        spawned: Instant,
        reading: &Sample,
        cell: &Cell,
        uses: impl Fn(GpuIndex) -> bool,
    ) {
        let at = now.saturating_duration_since(spawned);
        let answers = cell.take_decodes();
        for answer in &answers {
            self.health.speed(at, answer.tokens, answer.ms / 1000.0, answer.busy);
        }
        self.speed = speed(&answers).or(self.speed);
        for prompt in cell.take_prefills() {
            self.health.prompt(prompt.new, prompt.all, prompt.ms);
        }
        let decodes = reading.metrics.and_then(|metrics| metrics.decodes);
        let hindered = self.is_hindered(now, reading.standing);
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
        self.faults(reading, uses);
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

    fn faults(&mut self, reading: &Sample, uses: impl Fn(GpuIndex) -> bool) {
        let Some(devices) = &reading.devices else { return };
        // Those before its first reading were another one's.
        let seen = *self.faults_seen.get_or_insert_with(|| devices.last_fault());
        for fault in devices.faults.iter().filter(|fault| fault.number > seen) {
            let xid = match fault.fault {
                Fault::Xid(xid) => xid,
                Fault::Lost => Some(OFF_THE_BUS),
                Fault::Ecc(_) => None,
            };
            if let Some(xid) = xid.filter(|_| uses(fault.gpu)) {
                self.health.xid(fault.gpu, xid);
            }
        }
        self.faults_seen = Some(seen.max(devices.last_fault()));
    }

    pub(super) fn symptoms(&self) -> Vec<Symptom> {
        self.health.symptoms()
    }

    /// The speed of decoding at the last look, tokens per second of one slot.
    pub(super) fn speed(&self) -> Option<f64> {
        self.speed
    }

    /// For status and metrics.
    pub(super) fn show(&self, cell: &Cell) -> HealthView {
        let slow = self.symptoms().into_iter().find_map(|symptom| match symptom {
            Symptom::SlowDecode { baseline, .. } => Some(baseline),
            _ => None,
        });
        let stalled = self.health.stalled().filter(|(stalled, _)| *stalled >= STALL_SHOWN);
        HealthView {
            compute_errors: cell.compute_errors(),
            decode_rate: self.speed,
            decode_baseline: slow,
            stalled_for: stalled.map(|(stalled, _)| stalled),
            stalled_limit: stalled.and_then(|(_, limit)| Duration::try_from_secs_f64(limit.seconds).ok()),
        }
    }
}

/// Tokens per second of one slot, over all these answers.
fn speed(answers: &[Decode]) -> Option<f64> {
    let tokens: u64 = answers.iter().map(|answer| answer.tokens).sum();
    let seconds = answers.iter().map(|answer| answer.ms).sum::<f64>() / 1000.0;
    (tokens > 0 && seconds > 0.0).then(|| exact(tokens) / seconds)
}
