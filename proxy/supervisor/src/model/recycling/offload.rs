//! Handles a process that loaded much less onto GPUs than an earlier process with the same command. The usual
//! cause is a lost or full GPU.
//!
//! ```text
//!   ready ── layers from its log, VRAM from a reading ── much less than known for its command?
//!    successor in an overlap, and the old process can serve ── the successor ends, the old process stays
//!    anything else ── it serves degraded, which is logged; it is restarted when enough memory is available,
//!                     after growing pauses
//! ```

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::health::{GpuOffload, OffloadLoss};
use warden_policies::lifecycle::BackendPhase;
use warden_policies::{Reason, units};

use crate::clock;
use crate::error::{BackendFailure, FailureKind};
use crate::model::context::FleetContext;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::LiveGeneration;
use crate::model::life::{OffloadRecovery, TaskLife};
use crate::model::replacement::ReplacementTracker;
use crate::model::unit::{ProcessUnit, UnitId, UnitList, UnitRole};
use crate::view::event::EventKind;

/// After these symptoms the old process serves no better than a new one on the CPU.
const CANNOT_SERVE: [Reason; 5] =
    [Reason::Wedged, Reason::ComputeErrors, Reason::DeviceFault, Reason::Unresponsive, Reason::Crashed];

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

impl ReplacementTracker {
    /// Rejects a ready successor that lacks much on the GPU if the old process can serve. Returns true if so.
    /// `vram`: bytes that the successor holds now, if known.
    pub(crate) fn rejects_successor(
        &self,
        env: &TaskEnvironment,
        units: &mut UnitList,
        id: UnitId,
        vram: Option<u64>,
    ) -> bool {
        let Some(unit) = units.get(id) else { return false };
        let Some(live) = &unit.live else { return false };
        if unit.role != UnitRole::Successor {
            return false;
        }
        let offload = live.memory.history.offload;
        let now = GpuOffload { vram: vram.or(offload.vram), ..offload };
        let Some(lost) = live.lost_offload(&env.context, now) else { return false };
        let serves = units.current(unit.replica).is_some_and(|old| old.phase() == BackendPhase::Ready);
        let reason = self.reason(unit.replica);
        if !serves || reason.is_some_and(|reason| reason.is_answers() || CANNOT_SERVE.contains(&reason)) {
            return false;
        }
        let message = format!("{lost}: not used; the running process stays");
        let kind = EventKind::Unwell { reason: Reason::Degraded, message: message.clone() };
        env.log_event(Some(live.id), kind);
        if let Some(unit) = units.get_mut(id) {
            let kind = FailureKind::Degraded;
            unit.failure = Some(BackendFailure { kind, message, lines: Vec::new(), failures: 1 });
        }
        true
    }
}

impl TaskLife {
    /// Judges how much of the model the process has on GPUs: when it becomes ready, and again after a
    /// reading. `is_settled`: the reading is final, so a complete offload is remembered.
    pub(crate) fn judge_offload(
        &mut self,
        env: &TaskEnvironment,
        units: &mut UnitList,
        id: UnitId,
        is_settled: bool,
    ) {
        let Some(live) = units.live_mut(id) else { return };
        let generation = live.id;
        let now = live.memory.history.offload;
        match live.lost_offload(&env.context, now) {
            Some(lost) => {
                let is_new = live.health.degraded.replace(lost).is_none();
                if is_new {
                    let message = format!(
                        "{lost}: it serves, and restarts when the GPU memory is available; if intended, set `-ngl`"
                    );
                    env.log_event(Some(generation), EventKind::Unwell { reason: Reason::Degraded, message });
                    let tried = self.timers.recovery.map_or(0, |recovery| recovery.tried);
                    self.timers.schedule_recovery(&env.context.health_policy(), tried);
                    self.note_action();
                }
            }
            None if is_settled => {
                if now.is_some() {
                    let keep = env.watch.sensors.priors_kept;
                    env.context.leak_history.note_offload(&live.memory.key, &env.spec.name, now, keep);
                }
                if !units.lives().any(|live| live.health.degraded.is_some()) {
                    self.timers.recovery = None;
                }
            }
            None => {}
        }
    }

    /// Returns the replica whose process lost its GPU and is to be restarted, because enough memory is available
    /// again.
    pub(crate) fn take_recovery(
        &mut self,
        env: &TaskEnvironment,
        units: &UnitList,
        is_replacing: bool,
        now: Instant,
    ) -> Option<u32> {
        let recovery = self.timers.recovery.filter(|recovery| recovery.at <= now)?;
        let is_degraded =
            |unit: &&ProcessUnit| unit.live.as_ref().is_some_and(|live| live.health.degraded.is_some());
        let unit = units.with_role(UnitRole::Current).find(is_degraded);
        let (Some(unit), None) = (unit, self.end) else {
            self.timers.recovery = None;
            return None;
        };
        let policy = env.context.health_policy();
        if unit.phase() != BackendPhase::Ready
            || is_replacing
            || !unit.live.as_ref().is_some_and(|live| live.is_vram_available(&env.context))
        {
            // Checking is cheap, so the pause between checks does not grow.
            let pause = policy.offload_retry.max(Duration::from_secs(1));
            let at = clock::after_pause(now, pause);
            self.timers.recovery = Some(OffloadRecovery { at, ..recovery });
            return None;
        }
        self.timers.schedule_recovery(&policy, recovery.tried.saturating_add(1));
        Some(unit.replica)
    }
}
