//! View of the model for status, metrics and `/v1/models`.

use warden_policies::lifecycle::BackendPhase;

use super::ModelTask;
use super::unit::{LiveGeneration, ProcessUnit, UnitRole};
use crate::clock;
use crate::view::{BackendView, ModelOutage, ModelState, ModelView, PolicyView};

impl ModelTask {
    pub(super) fn model_view(&self) -> ModelView {
        let mut backends: Vec<BackendView> = self.units.iter().map(|unit| self.unit_view(unit)).collect();
        backends.sort_by_key(|backend| (backend.replica, backend.generation));
        let policy = self.units.iter().filter_map(|unit| unit.live.as_ref()?.wish.last_decision);
        // Show only decisions that have a reason, whether they are acted on or only reported.
        let needy = policy.filter(|(decision, _)| decision.reason.is_some());
        let neediest = needy.max_by_key(|(decision, _)| decision.action);
        ModelView {
            name: self.spec.name.clone(),
            aliases: self.spec.aliases.clone(),
            state: self.model_state(),
            waiting: self.leases.waiting(),
            queue_depth: self.spec.queue.depth,
            backends,
            recycles: self.replacements.counts.clone(),
            last_replacement: self.replacements.last.last().map(|entry| (entry.reason, entry.at.clone())),
            reclaims: self.reclaim_counts.show(),
            crashes: self.crashes,
            was_ready: self.experience.load_time.is_some(),
            n_ctx: self.experience.n_ctx,
            modalities: self.experience.modalities,
            policy: neediest.map(|(decision, held)| PolicyView { decision, held }),
            last_failure: self.units.iter().filter_map(|unit| unit.failure.clone()).next_back(),
            outage: self.expected_outage(),
            warm: self.replacements.warm.clone(),
            replace_note: self
                .needs
                .missing()
                .map(|missing| missing.message.clone())
                .or_else(|| self.note.clone()),
            quarantine: self.leases.quarantine_view(),
            pin: self.pin_view(),
            remote: None,
            canary: None,
        }
    }

    /// Expected course of an outage, if a failure is why the model has no process.
    fn expected_outage(&self) -> Option<ModelOutage> {
        if !matches!(self.model_state(), ModelState::Backoff | ModelState::Failed) {
            return None;
        }
        let told = self.spec.lifecycle.failures_told;
        let down = || self.units.iter().filter(|unit| unit.role != UnitRole::Retiring);
        let next = down().filter_map(|unit| unit.timer.map(|(_, at)| at)).min()?;
        let watching = down().any(ProcessUnit::waits_for_change);
        let name = &self.spec.name;
        let cure = if self.model_state() == ModelState::Failed {
            format!(
                "fix the cause in the message: a change of its files or a reload with other settings starts it at once, and so \
                 does `llama-warden restart {name}`"
            )
        } else {
            format!("it restarts automatically; `llama-warden restart {name}` does it at once")
        };
        Some(ModelOutage {
            refusing: down().all(|unit| unit.is_hopeless(told)),
            next_start_unix_ms: clock::unix_ms(next),
            watching,
            cure,
        })
    }

    fn model_state(&self) -> ModelState {
        let has = |phases: &[BackendPhase]| {
            let shown = self.units.iter().filter(|unit| unit.role != UnitRole::Retiring);
            shown.map(ProcessUnit::phase).any(|phase| phases.contains(&phase))
        };
        let retiring = self.units.iter().any(|unit| unit.role == UnitRole::Retiring);
        if has(&[BackendPhase::Ready]) {
            ModelState::Loaded
        } else if has(&[BackendPhase::Starting]) || self.waits_for_room() {
            ModelState::Loading
        } else if has(&[BackendPhase::Suspect, BackendPhase::Draining, BackendPhase::Stopping]) || retiring {
            ModelState::Draining
        } else if has(&[BackendPhase::Backoff]) {
            ModelState::Backoff
        } else if has(&[BackendPhase::Failed]) {
            ModelState::Failed
        } else {
            ModelState::Unloaded
        }
    }

    fn unit_view(&self, unit: &ProcessUnit) -> BackendView {
        let live = unit.live.as_deref();
        BackendView {
            replica: unit.replica,
            generation: unit.generation(),
            phase: unit.phase(),
            pid: live.and_then(|live| live.process.as_ref()).map(|process| process.server_pid()),
            program: live.map(|live| live.recipe.request.command.binary.clone()),
            ready_since: live.and_then(|live| live.ready).map(Into::into),
            in_flight: unit.generation().map_or(0, |generation| self.leases.in_flight(generation)),
            slots: live.and_then(|live| live.slots),
            host: live.and_then(|live| live.memory.host),
            host_at_ready: live.and_then(|live| live.memory.host_at_ready),
            work: live.map(|live| live.cell.work()).unwrap_or_default(),
            report: live.and_then(|live| live.memory.report.clone()),
            memory: live.map(|live| live.memory.show()).unwrap_or_default(),
            health: live.map(|live| live.health.show(&live.cell)).unwrap_or_default(),
            degraded: live.and_then(|live| live.degraded).map(|lost| lost.to_string()),
            reclaim: live.map(LiveGeneration::reclaim_view).unwrap_or_default(),
            next: live
                .and_then(|live| live.wish.last_decision)
                .map(|(decision, held)| PolicyView { decision, held }),
        }
    }
}
