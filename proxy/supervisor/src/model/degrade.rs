//! Handles a process that loaded much less onto GPUs than an earlier process with the same command, because
//! the GPU was lost or full.
//!
//! ```text
//!   ready ── layers from its log, VRAM from a reading ── much less than known for its command?
//!    successor in an overlap, and the old process can serve ── the successor ends, the old process stays
//!    anything else ── it serves degraded, which is logged; it is restarted when enough memory is available,
//!                     after growing pauses
//! ```

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::backoff::{self, BackoffPolicy};
use warden_policies::health::{GpuOffload, HealthPolicy, OffloadLoss};
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::{Reason, units};

use super::ModelTask;
use super::timers::OffloadRecovery;
use super::unit::{ProcessUnit, UnitId, UnitRole};
use crate::clock;
use crate::error::{BackendFailure, FailureKind};
use crate::sync::lock;
use crate::view::event::EventKind;

/// Reasons of replacements whose old process serves no better than a new one on the CPU.
const CANNOT_SERVE: [Reason; 5] =
    [Reason::Wedged, Reason::ComputeErrors, Reason::DeviceFault, Reason::Unresponsive, Reason::Crashed];

impl ModelTask {
    fn health_policy(&self) -> HealthPolicy {
        lock(&self.context.common).health.clone()
    }

    /// Layers or VRAM that a process lacks, compared with the best process with the same command.
    fn lost_offload(&self, unit: &ProcessUnit, now: GpuOffload) -> Option<OffloadLoss> {
        let live = unit.live.as_ref()?;
        let known = self.context.leak_history.best_offload(&live.memory.key)?;
        now.loss_against(known, &self.health_policy())
    }

    /// Decides whether a ready successor is ended instead of taking over, because it lacks much on the GPU
    /// and the old process can serve. `vram`: bytes that the successor holds now, if they were read.
    pub(super) fn yields_to_old(&mut self, id: UnitId, vram: Option<u64>) -> bool {
        let Some(unit) = self.unit(id).filter(|unit| unit.role == UnitRole::Successor) else { return false };
        let Some(live) = &unit.live else { return false };
        let (replica, generation) = (unit.replica, live.id);
        let now = GpuOffload { vram: vram.or(live.memory.offload.vram), ..live.memory.offload };
        let Some(lost) = self.lost_offload(unit, now) else { return false };
        let serves = self.current_unit(replica).is_some_and(|old| old.phase() == BackendPhase::Ready);
        let reason = self.replacements.reason(replica);
        if !serves || reason.is_some_and(|reason| CANNOT_SERVE.contains(&reason)) {
            return false;
        }
        let message = format!("{lost}: not used; the running process stays");
        if let Some(unit) = self.unit_mut(id) {
            let failure = BackendFailure {
                kind: FailureKind::Degraded,
                message: message.clone(),
                lines: Vec::new(),
                failures: 1,
            };
            unit.failure = Some(failure);
        }
        self.log_event(Some(generation), EventKind::Unwell { reason: Reason::Degraded, message });
        self.step_machine(id, LifecycleEvent::Down);
        true
    }

    /// Judges the offload of a serving process: from its log when it is ready, and from a reading a moment
    /// later. `settled`: the reading is final, so a complete offload is remembered.
    pub(super) fn judge_offload(&mut self, id: UnitId, settled: bool) {
        let Some(unit) = self.unit(id) else { return };
        let Some(live) = &unit.live else { return };
        let (generation, now, key) = (live.id, live.memory.offload, live.memory.key.clone());
        let known_before = live.degraded.is_some();
        match self.lost_offload(unit, now) {
            Some(lost) => {
                if let Some(live) = self.live_mut(id) {
                    live.degraded = Some(lost);
                }
                if !known_before {
                    let message = format!(
                        "{lost}: it serves, and restarts when the GPU memory is available; if intended, set `-ngl`"
                    );
                    self.log_event(Some(generation), EventKind::Unwell { reason: Reason::Degraded, message });
                    let tried = self.timers.recovery.map_or(0, |recovery| recovery.tried);
                    self.timers.recovery = Some(OffloadRecovery { at: self.next_recovery(tried), tried });
                    self.note_action();
                }
            }
            None if settled => {
                self.timers.recovery = self.timers.recovery.filter(|_| self.is_degraded());
                if now.is_some() {
                    let keep = self.watch.sensors.priors_kept;
                    self.context.leak_history.note_offload(&key, &self.spec.name, now, keep);
                }
            }
            None => {}
        }
    }

    fn is_degraded(&self) -> bool {
        self.units.iter().any(|unit| unit.live.as_ref().is_some_and(|live| live.degraded.is_some()))
    }

    fn next_recovery(&self, tried: u32) -> Instant {
        let health = self.health_policy();
        let policy = BackoffPolicy { first: health.offload_retry, cap: health.offload_retry_most };
        clock::after_pause(Instant::now(), backoff::delay(&policy, tried.saturating_add(1), rand::random()))
    }

    /// Restarts a process that lost its GPU when enough memory is available again.
    pub(super) fn recover_offload(&mut self, now: Instant) {
        let Some(recovery) = self.timers.recovery.filter(|recovery| recovery.at <= now) else { return };
        let degraded = |unit: &&ProcessUnit| {
            unit.role == UnitRole::Current && unit.live.as_ref().is_some_and(|live| live.degraded.is_some())
        };
        let Some(unit) = self.units.iter().find(degraded).filter(|_| self.end.is_none()) else {
            self.timers.recovery = None;
            return;
        };
        let (replica, ready) = (unit.replica, unit.phase() == BackendPhase::Ready);
        if !ready || !self.replacements.is_empty() || !self.is_vram_available(unit) {
            // Checking is cheap, so the pause between checks does not grow.
            let pause = self.health_policy().offload_retry.max(Duration::from_secs(1));
            self.timers.recovery = Some(OffloadRecovery { at: clock::after_pause(now, pause), ..recovery });
            return;
        }
        let tried = recovery.tried.saturating_add(1);
        self.timers.recovery = Some(OffloadRecovery { at: self.next_recovery(tried), tried });
        self.replace_replica(replica, Reason::Degraded);
    }

    /// True if as much VRAM is available as the best process held, counting the VRAM that this process
    /// would free. Also true without a GPU sensor: then only a start can tell.
    fn is_vram_available(&self, unit: &ProcessUnit) -> bool {
        let Some(live) = &unit.live else { return false };
        let Some(lost) = live.degraded else { return false };
        let devices = live.memory.devices.as_ref().filter(|devices| !devices.readings.is_empty());
        let (Some(devices), Some(needed)) = (devices, lost.known.vram) else {
            return self.context.world.has_gpu();
        };
        let reserved = |gpu| self.context.fleet_memory.reserved_vram(Some(live.id), gpu);
        let free = |gpu| Some(devices.reading(gpu)?.free?.saturating_sub(reserved(gpu)));
        let free: u64 = devices.with_vram().filter_map(free).fold(0, u64::saturating_add);
        let own = live.memory.offload.vram.unwrap_or(0);
        free.saturating_add(own) >= units::scale_bytes(needed, self.health_policy().offload_layers)
    }
}
