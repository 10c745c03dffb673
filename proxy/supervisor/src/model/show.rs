//! View of the model for status, metrics and `/v1/models`.

use warden_policies::ModelName;
use warden_policies::lifecycle::BackendPhase;

use super::ModelTask;
use super::unit::{ProcessUnit, UnitList, UnitRole};
use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::view::{BackendView, ModelOutage, ModelState, ModelView, PolicyView};

impl ModelTask {
    pub(super) fn model_view(&self) -> ModelView {
        let mut backends: Vec<BackendView> =
            self.units.all.iter().map(|unit| unit.view(&self.env.leases)).collect();
        backends.sort_by_key(|backend| (backend.replica, backend.generation));
        let policy = self.units.lives().filter_map(|live| live.wish.last_decision);
        // A decision without a reason is not worth showing.
        let needy = policy.filter(|(decision, _)| decision.reason.is_some());
        let neediest = needy.max_by_key(|(decision, _)| decision.action);
        // Requests may wait because the model waits for room.
        let state = self.units.model_state(self.room.is_waiting() && self.env.leases.needs_process());
        let told = self.env.spec.lifecycle.failures_told;
        ModelView {
            name: self.env.spec.name.clone(),
            aliases: self.env.spec.aliases.clone(),
            state,
            waiting: self.env.leases.waiting(),
            queue_depth: self.env.spec.requests.queue.depth,
            backends,
            recycles: self.replacements.counts.clone(),
            last_replacement: self.replacements.last.last().map(|entry| (entry.reason, entry.at.clone())),
            reclaims: self.experience.reclaims.totals.clone(),
            crashes: self.life.crashes,
            was_ready: self.replacements.pace.load_time.is_some(),
            n_ctx: self.experience.n_ctx,
            modalities: self.experience.modalities,
            policy: neediest.map(|(decision, held)| PolicyView { decision, held }),
            last_failure: self.units.all.iter().filter_map(|unit| unit.failure.clone()).next_back(),
            outage: self.units.expected_outage(state, told, &self.env.spec.name),
            warm: self.replacements.warm.clone(),
            replace_note: self.replacements.note_for_view(),
            quarantine: self.env.leases.ward.view(),
            pin: self.room.pin_view(&self.env.spec),
            remote: None,
            canary: None,
        }
    }
}

impl UnitList {
    /// Expected outage, if the model has no process because of a failure.
    fn expected_outage(&self, state: ModelState, told: u32, name: &ModelName) -> Option<ModelOutage> {
        if !matches!(state, ModelState::Backoff | ModelState::Failed) {
            return None;
        }
        let down = || self.staying();
        let next = down().filter_map(|unit| unit.timer.map(|(_, at)| at)).min()?;
        let watching = down().any(ProcessUnit::waits_for_change);
        let cure = if state == ModelState::Failed {
            format!(
                "fix the cause in the message: a change of its files or a reload with other settings starts it at \
                 once, and so does `llama-warden restart {name}`"
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

    fn model_state(&self, waits_for_room: bool) -> ModelState {
        let has = |phases: &[BackendPhase]| self.staying().any(|unit| phases.contains(&unit.phase()));
        let retiring = self.with_role(UnitRole::Retiring).next().is_some();
        if has(&[BackendPhase::Ready]) {
            ModelState::Loaded
        } else if has(&[BackendPhase::Starting]) || waits_for_room {
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
}

impl ProcessUnit {
    fn view(&self, leases: &LeaseQueue) -> BackendView {
        let view = BackendView::without_process(self.replica, self.phase());
        let Some(live) = &self.live else { return view };
        BackendView {
            generation: Some(live.id),
            pid: live.child.process.as_ref().map(|process| process.server_pid()),
            program: Some(live.recipe.command().binary.clone()),
            ready_since: live.start.ready.map(Into::into),
            in_flight: leases.in_flight(live.id),
            slots: live.start.slots,
            host: live.memory.history.host,
            host_at_ready: live.memory.history.host_at_ready,
            work: live.cell.work(),
            report: live.memory.last.report.clone(),
            memory: live.memory.show(),
            health: live.health.show(&live.cell),
            degraded: live.health.degraded.map(|lost| lost.to_string()),
            reclaim: live.reclaim_view(),
            next: live.wish.last_decision.map(|(decision, held)| PolicyView { decision, held }),
            ..view
        }
    }
}
