//! Tracks the health of one generation: answers, progress, GPU faults and symptoms.
//!
//! Also handles a process that loaded much less onto GPUs than an earlier process with the same command.
//! The usual cause is a lost or full GPU:
//!
//! ```text
//!   ready ── layers from its log, VRAM from a reading ── much less than known for its command?
//!    successor in an overlap, and the old process can serve ── the successor ends, the old process stays
//!    anything else ── it serves degraded, which is logged; it is restarted when enough memory is available,
//!                     after growing pauses
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::backoff::{self, BackoffPolicy};
use warden_policies::health::{GpuOffload, HealthMonitor, HealthObservation, HealthSymptom, OffloadLoss};
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::{GpuIndex, Reason, units};
use warden_sensors::ProcessRunState;
use warden_sensors::gpu::GpuFault;

use super::ModelTask;
use super::context::FleetContext;
use super::unit::{LiveGeneration, ProcessUnit, UnitId, UnitRole};
use crate::clock;
use crate::error::{BackendFailure, FailureKind};
use crate::lease::cell::GenerationCell;
use crate::lease::outcomes::DecodeSpeed;
use crate::process::{ProcessSample, ServerProps, hints};
use crate::spec::{CommonConfig, ServerCommand};
use crate::sync::lock;
use crate::view::HealthView;
use crate::view::event::EventKind;

/// Shortest stall that is shown. A shorter one is only the pause between two readings.
const MIN_SHOWN_STALL: Duration = Duration::from_secs(10);

/// Xid of a GPU that has fallen off the bus; also used when the driver no longer lists a GPU.
const XID_OFF_THE_BUS: u64 = 79;

/// After these symptoms the old process serves no better than a new one on the CPU.
const CANNOT_SERVE: [Reason; 5] =
    [Reason::Wedged, Reason::ComputeErrors, Reason::DeviceFault, Reason::Unresponsive, Reason::Crashed];

#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadRecovery {
    pub(super) at: Instant,
    /// Number of consecutive starts that did not help.
    tried: u32,
}

#[derive(Debug)]
pub(super) struct HealthTracker {
    health: HealthMonitor,
    faults_seen: Option<u64>,
    /// Tokens per second of one slot, at the last reading.
    pub(super) speed: Option<f64>,
    /// True if a healthy process answers requests for its slots.
    tells_slots: bool,
    /// True if counters may be read while no request runs.
    asked_idle: bool,
    /// Time limit for reloading after llama-server's sleep; zero if it never unloads the model.
    wake: Duration,
    standing: Option<(Instant, ProcessRunState)>,
    paging: u64,
    /// Time for which a prompt may still be evaluated after its client has left.
    abandoned_prompt_limit: Duration,
    /// Layers or VRAM missing on GPUs, compared with the best process with the same command.
    pub(super) degraded: Option<OffloadLoss>,
}

impl HealthTracker {
    pub(super) fn new(common: &CommonConfig, command: &ServerCommand) -> Self {
        let mut policy = common.health.clone();
        if let Some(tokens) = hints::batch_size(command) {
            policy.prefill_step = tokens;
        }
        Self {
            health: HealthMonitor::new(&policy),
            faults_seen: None,
            speed: None,
            tells_slots: false,
            asked_idle: hints::may_ask_idle(command, None),
            wake: Duration::ZERO,
            standing: None,
            paging: common.health.paging,
            abandoned_prompt_limit: common.health.wedged_after,
            degraded: None,
        }
    }

    pub(super) fn note_ready(&mut self, command: &ServerCommand, props: &ServerProps, start: Duration) {
        self.tells_slots = props.reports_slots;
        self.asked_idle = hints::may_ask_idle(command, props.build);
        self.wake = if hints::unloads_when_idle(command) { start.saturating_mul(2) } else { Duration::ZERO };
    }

    /// Returns two flags: request the counters, and request the slots. A sleeping server gets no request,
    /// because a request would wake it.
    pub(super) fn what_to_request(&self, in_flight: u32) -> (bool, bool) {
        (in_flight > 0 || self.asked_idle, in_flight > 0 && self.tells_slots && self.health.needs_query())
    }

    /// `uses` returns true for a GPU on which the process has memory.
    pub(super) fn note_reading(
        &mut self,
        now: Instant,
        spawned: Instant,
        reading: &ProcessSample,
        cell: &GenerationCell,
        uses: impl Fn(GpuIndex) -> bool,
    ) {
        let at = now.saturating_duration_since(spawned);
        let answers = std::mem::take(&mut lock(&cell.outcomes).decodes);
        for answer in &answers {
            self.health.record_speed(at, answer.tokens, answer.ms / 1000.0, answer.busy);
        }
        self.speed = speed(&answers).or(self.speed);
        for prompt in std::mem::take(&mut lock(&cell.outcomes).prefills) {
            self.health.record_prompt(prompt.new, prompt.all, prompt.ms);
        }
        let decodes = reading.metrics.and_then(|metrics| metrics.decodes);
        let hindered = self.is_hindered(now, reading.standing);
        self.health.observe(&HealthObservation {
            at,
            awaited: cell.pulses.awaited_output(self.abandoned_prompt_limit),
            moves: cell.pulses.progress_count(),
            decodes,
            slots: reading.slots,
            tells: self.tells_slots,
            gaps: cell.pulses.gap_stats(),
            hindered,
            wake: self.wake,
            compute_errors: lock(&cell.outcomes).compute_errors,
        });
        self.note_faults(reading, uses);
    }

    /// True if, since the last reading, the process was stopped (SIGSTOP) or waited for pages from disk.
    fn is_hindered(&mut self, at: Instant, standing: Option<ProcessRunState>) -> bool {
        let Some(now) = standing else { return false };
        let before = self.standing.replace((at, now));
        let stopped = now.stopped || before.is_some_and(|(_, before)| before.stopped);
        let paged = before.is_some_and(|(then, before)| {
            let most = self.paging.saturating_mul(at.saturating_duration_since(then).as_secs().max(1));
            now.major_faults.saturating_sub(before.major_faults) > most
        });
        stopped || paged
    }

    fn note_faults(&mut self, reading: &ProcessSample, uses: impl Fn(GpuIndex) -> bool) {
        let Some(devices) = &reading.devices else { return };
        // Faults before the first reading belong to an earlier process.
        let seen = *self.faults_seen.get_or_insert_with(|| devices.last_fault());
        for fault in devices.faults.iter().filter(|fault| fault.number > seen) {
            let xid = match fault.fault {
                GpuFault::Xid(xid) => xid,
                GpuFault::Lost => Some(XID_OFF_THE_BUS),
                GpuFault::Ecc(_) => None,
            };
            if let Some(xid) = xid
                && uses(fault.gpu)
            {
                self.health.record_xid(fault.gpu, xid);
            }
        }
        self.faults_seen = Some(seen.max(devices.last_fault()));
    }

    pub(super) fn symptoms(&self) -> Vec<HealthSymptom> {
        self.health.symptoms()
    }

    pub(super) fn show(&self, cell: &GenerationCell) -> HealthView {
        let slow = self.symptoms().into_iter().find_map(|symptom| match symptom {
            HealthSymptom::SlowDecode { baseline, .. } => Some(baseline),
            _ => None,
        });
        let stalled = self.health.stalled().filter(|(stalled, _)| *stalled >= MIN_SHOWN_STALL);
        HealthView {
            compute_errors: lock(&cell.outcomes).compute_errors,
            decode_rate: self.speed,
            decode_baseline: slow,
            stalled_for: stalled.map(|(stalled, _)| stalled),
            stalled_limit: stalled.and_then(|(_, limit)| Duration::try_from_secs_f64(limit.seconds).ok()),
        }
    }
}

/// Tokens per second of one slot, averaged over all these answers.
fn speed(answers: &VecDeque<DecodeSpeed>) -> Option<f64> {
    let tokens: u64 = answers.iter().map(|answer| answer.tokens).sum();
    let seconds = answers.iter().map(|answer| answer.ms).sum::<f64>() / 1000.0;
    (tokens > 0 && seconds > 0.0).then(|| units::as_f64(tokens) / seconds)
}

impl LiveGeneration {
    /// Layers or VRAM that the process lacks, compared with the best process with the same command.
    fn lost_offload(&self, context: &FleetContext, now: GpuOffload) -> Option<OffloadLoss> {
        let known = context.leak_history.best_offload(&self.memory.key)?;
        now.loss_against(known, &context.health_policy())
    }

    /// True if the available VRAM and the VRAM of this process together suffice for a full load. Without a
    /// GPU sensor, only a start can show that.
    fn is_vram_available(&self, context: &FleetContext) -> bool {
        let Some(lost) = self.health.degraded else { return false };
        let devices = self.memory.last.devices.as_ref().filter(|devices| !devices.readings.is_empty());
        let (Some(devices), Some(needed)) = (devices, lost.known.vram) else {
            return context.world.has_gpu();
        };
        let reserved = |gpu| context.fleet_memory.reserved_vram(Some(self.id), gpu);
        let free = |gpu| Some(devices.reading(gpu)?.free?.saturating_sub(reserved(gpu)));
        let free: u64 = devices.with_vram().filter_map(free).fold(0, u64::saturating_add);
        let own = self.memory.history.offload.vram.unwrap_or(0);
        free.saturating_add(own) >= units::scale_bytes(needed, context.health_policy().offload_layers)
    }
}

impl ModelTask {
    /// Ends a ready successor that lacks much on the GPU if the old process can serve. Returns true if so.
    /// `vram`: bytes that the successor holds now, if known.
    pub(super) fn yields_to_old(&mut self, id: UnitId, vram: Option<u64>) -> bool {
        let Some(unit) = self.units.get(id) else { return false };
        let Some(live) = &unit.live else { return false };
        if unit.role != UnitRole::Successor {
            return false;
        }
        let offload = live.memory.history.offload;
        let now = GpuOffload { vram: vram.or(offload.vram), ..offload };
        let Some(lost) = live.lost_offload(&self.context, now) else { return false };
        let serves = self.units.current(unit.replica).is_some_and(|old| old.phase() == BackendPhase::Ready);
        let reason = self.replacements.reason(unit.replica);
        if !serves || reason.is_some_and(|reason| CANNOT_SERVE.contains(&reason)) {
            return false;
        }
        let message = format!("{lost}: not used; the running process stays");
        let kind = EventKind::Unwell { reason: Reason::Degraded, message: message.clone() };
        self.log_event(Some(live.id), kind);
        if let Some(unit) = self.units.get_mut(id) {
            let kind = FailureKind::Degraded;
            unit.failure = Some(BackendFailure { kind, message, lines: Vec::new(), failures: 1 });
        }
        self.step_machine(id, LifecycleEvent::Down);
        true
    }

    /// Judges how much of the model the process has on GPUs: when it becomes ready, and again after a
    /// reading. `is_settled`: the reading is final, so a complete offload is remembered.
    pub(super) fn judge_offload(&mut self, id: UnitId, is_settled: bool) {
        let Some(live) = self.units.live(id) else { return };
        let generation = live.id;
        let now = live.memory.history.offload;
        match live.lost_offload(&self.context, now) {
            Some(lost) => {
                let known = self.units.live_mut(id).and_then(|live| live.health.degraded.replace(lost));
                if known.is_none() {
                    let message = format!(
                        "{lost}: it serves, and restarts when the GPU memory is available; if intended, set `-ngl`"
                    );
                    self.log_event(Some(generation), EventKind::Unwell { reason: Reason::Degraded, message });
                    self.schedule_recovery(self.life.timers.recovery.map_or(0, |recovery| recovery.tried));
                    self.life.note_action();
                }
            }
            None if is_settled => {
                if now.is_some() {
                    let keep = self.watch.sensors.priors_kept;
                    self.context.leak_history.note_offload(&live.memory.key, &self.spec.name, now, keep);
                }
                if !self.units.is_degraded() {
                    self.life.timers.recovery = None;
                }
            }
            None => {}
        }
    }

    fn schedule_recovery(&mut self, tried: u32) {
        let health = self.context.health_policy();
        let policy = BackoffPolicy { first: health.offload_retry, cap: health.offload_retry_most };
        let pause = backoff::delay(&policy, tried.saturating_add(1), rand::random());
        let at = clock::after_pause(Instant::now(), pause);
        self.life.timers.recovery = Some(OffloadRecovery { at, tried });
    }

    /// Restarts a process that lost its GPU, once enough memory is available again.
    pub(super) fn recover_offload(&mut self, now: Instant) {
        let Some(recovery) = self.life.timers.recovery.filter(|recovery| recovery.at <= now) else { return };
        let is_degraded =
            |unit: &&ProcessUnit| unit.live.as_ref().is_some_and(|live| live.health.degraded.is_some());
        let unit = self.units.with_role(UnitRole::Current).find(is_degraded);
        let (Some(unit), None) = (unit, self.life.end) else {
            self.life.timers.recovery = None;
            return;
        };
        let replica = unit.replica;
        let is_ready = unit.phase() == BackendPhase::Ready;
        if !is_ready
            || !self.replacements.is_empty()
            || !unit.live.as_ref().is_some_and(|live| live.is_vram_available(&self.context))
        {
            // Checking is cheap, so the pause between checks does not grow.
            let pause = self.context.health_policy().offload_retry.max(Duration::from_secs(1));
            self.life.timers.recovery =
                Some(OffloadRecovery { at: clock::after_pause(now, pause), ..recovery });
            return;
        }
        self.schedule_recovery(recovery.tried.saturating_add(1));
        self.replace_replica(replica, Reason::Degraded);
    }
}
