//! Handles requests of operators and of the fleet: restart, drain, new settings, removal, shutdown. An
//! operator gets the reply once the published view shows the result.

use std::path::Path;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::cooldown::working_set::PassedBudgets;
use warden_policies::defaults::Recycle;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::{GenerationId, ServerFacts};

use super::message::RequestedBy;
use super::unit::{ProcessUnit, UnitRole, process_recipe};
use super::{ControlMessage, ModelTask, TaskEnd, TaskMessage};
use crate::clock;
use crate::error::ControlError;
use crate::spec::{SharedSpec, WatchConfig};
use crate::view::entry::ReclaimEntry;
use crate::view::event::EventKind;
use crate::view::ledger::LedgerEntry;

/// Restart requested by an operator; done when each replica has a process newer than generation `after`.
#[derive(Debug)]
pub(super) struct RestartRequest {
    pub(super) after: GenerationId,
    pub(super) by: RequestedBy,
    pub(super) reply: oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>,
}

#[derive(Debug)]
pub(super) struct ReclaimRequest {
    pub(super) generations: Vec<GenerationId>,
    pub(super) entries: Vec<ReclaimEntry>,
    pub(super) by: RequestedBy,
    pub(super) reply: oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>,
}

/// Drain requested by an operator: these generations have to end.
#[derive(Debug)]
pub(super) struct DrainRequest {
    pub(super) generations: Vec<GenerationId>,
    pub(super) reply: oneshot::Sender<Result<(), ControlError>>,
}

#[derive(Default)]
pub(super) struct OperatorRequests {
    pub(super) restarts: Vec<RestartRequest>,
    pub(super) drains: Vec<DrainRequest>,
    pub(super) reclaims: Vec<ReclaimRequest>,
    pub(super) answers: Vec<Box<dyn FnOnce() + Send>>,
}

impl OperatorRequests {
    pub(super) fn is_empty(&self) -> bool {
        self.restarts.is_empty() && self.drains.is_empty() && self.reclaims.is_empty()
    }

    pub(super) fn who_reclaims(&self, generation: GenerationId) -> Option<String> {
        let asked = self.reclaims.iter().filter(|waiting| waiting.generations.contains(&generation));
        asked.filter_map(|waiting| waiting.by.as_deref()).map(str::to_owned).next()
    }

    pub(super) fn note_reclaimed(
        &mut self,
        generation: GenerationId,
        entry: &ReclaimEntry,
    ) -> Vec<ReclaimRequest> {
        for waiting in &mut self.reclaims {
            if let Some(index) = waiting.generations.iter().position(|known| *known == generation) {
                waiting.generations.remove(index);
                waiting.entries.push(entry.clone());
            }
        }
        self.reclaims.extract_if(.., |waiting| waiting.generations.is_empty()).collect()
    }

    pub(super) fn send_answers(&mut self) {
        for answer in std::mem::take(&mut self.answers) {
            answer();
        }
    }
}

impl ModelTask {
    pub(super) fn handle_control(&mut self, control: ControlMessage) {
        match control {
            ControlMessage::Restart(by, reply) => self.restart_model(by, reply),
            ControlMessage::Drain(reply) => self.drain_model(reply),
            ControlMessage::Reclaim(by, reply) => self.reclaim_for_operator(by, reply),
            ControlMessage::Pin(pinned, by, reply) => {
                let answer = self.set_pin(pinned, &by);
                self.answer(reply, answer);
            }
            ControlMessage::Loading(order) => self.follow_loader(order),
            ControlMessage::Apply(spec, watch, reply) => {
                let replaced = self.apply_settings(spec, *watch);
                self.answer(reply, replaced);
            }
            ControlMessage::LearnFacts(binary, facts) => self.learn_facts(&binary, facts),
            ControlMessage::PointRemote(_, reply) => drop(reply.send(false)),
            ControlMessage::HandOver(reply) => {
                let will = self.prepare_handover();
                if let Err(Ok(_)) = reply.send(will) {
                    // The requesting instance is gone: continue here.
                    self.mail.outbox.send(TaskMessage::Control(ControlMessage::Thaw));
                }
            }
            ControlMessage::Begin => self.begin_deciding(),
            ControlMessage::Thaw
            | ControlMessage::LetGo(_)
            | ControlMessage::Gates(..)
            | ControlMessage::Disband => {}
            ControlMessage::Remove => self.remove_model(),
            ControlMessage::Shutdown(deadline) => self.shut_down(deadline),
        }
        self.life.note_action();
    }

    fn restart_model(
        &mut self,
        by: RequestedBy,
        reply: oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>,
    ) {
        if self.life.end.is_some() {
            self.answer(reply, Err(ControlError::ShuttingDown));
            return;
        }
        self.replacements.cooldown.reset();
        self.room.wanted = true;
        let after = self.context.last_generation();
        self.operators.restarts.push(RestartRequest { after, by, reply });
    }

    fn drain_model(&mut self, reply: oneshot::Sender<Result<(), ControlError>>) {
        if self.life.end.is_some() {
            self.answer(reply, Err(ControlError::ShuttingDown));
            return;
        }
        self.give_up_replacements("the model was drained");
        self.leases.with_state(|queue| queue.coming.retry = None);
        self.room.wanted = false;
        let generations = self.units.all.iter().filter_map(ProcessUnit::generation).collect();
        self.stop_all();
        self.operators.drains.push(DrainRequest { generations, reply });
    }

    pub(super) fn stop_all(&mut self) {
        for unit in &mut self.units.all {
            unit.held_start = None;
            if unit.role == UnitRole::Successor {
                unit.role = UnitRole::Retiring;
            }
        }
        for id in self.units.ids() {
            self.step_machine(id, LifecycleEvent::Down);
        }
    }

    /// Applies new settings. Returns true if processes are replaced.
    fn apply_settings(&mut self, mut spec: SharedSpec, watch: WatchConfig) -> bool {
        self.room.keep_fallback(&self.spec, &mut spec);
        let needed = self.loading_spec();
        let old = std::mem::replace(&mut self.spec, spec);
        self.watch = watch;
        self.learn_facts(&self.spec.command.binary.clone(), self.spec.facts);
        let (limits, admission) = (&self.spec.queue, &self.spec.admission);
        self.leases.with_state(|queue| queue.set_limits(limits.depth, limits.wait));
        self.leases.change_admission(|admit| admit.set_policy(admission.mode, admission.policy.clone()));
        self.leases.ward.set_policy(self.spec.quarantine);
        // Changes of admission and overlap settings are ignored: they never prevented a replacement.
        let mut before = old.recycle.clone();
        before.common = Recycle {
            admission: self.spec.recycle.common.admission,
            overlap_headroom: self.spec.recycle.common.overlap_headroom,
            overlap_floor: self.spec.recycle.common.overlap_floor,
            ..before.common
        };
        if self.spec.recycle != before {
            self.replacements.cooldown.reset();
            for live in self.units.lives_mut() {
                live.reclaim.history.handle_new_limits();
                live.wish.passed = PassedBudgets::default();
            }
        }
        if self.spec.run.preload {
            self.room.wanted |= !old.run.preload;
        }
        if self.spec.max_in_flight != old.max_in_flight {
            self.reopen_gates();
        }
        self.drop_disallowed_state();
        self.apply_loading();
        let remade = process_recipe(&self.spec) != process_recipe(&old);
        self.ask_to_stay(&needed, remade);
        self.set_replicas();
        self.enable_conversations();
        if remade {
            self.life.timers.configuration = None;
            for path in self.leases.settings.clear() {
                let message = format!(
                    "what was set by `POST {path}` is not set in processes with the new command: set it again if it \
                     still fits"
                );
                self.log_event(None, EventKind::SettingLost { message });
            }
            self.retry_failed();
        }
        remade && self.units.any_process()
    }

    pub(super) fn retry_failed(&mut self) {
        for id in self.units.ids() {
            let phase = self.units.get(id).map(ProcessUnit::phase);
            if matches!(phase, Some(BackendPhase::Backoff | BackendPhase::Failed)) {
                self.revive(id, LifecycleEvent::Reset);
                if let Some(unit) = self.units.get_mut(id) {
                    unit.failure = None;
                    unit.start_failures = 0;
                }
            }
        }
    }

    /// Stores measured facts about a binary for present and future processes.
    fn learn_facts(&mut self, binary: &Path, facts: ServerFacts) {
        if self.spec.command.binary == binary {
            self.spec.facts = facts;
        }
        for live in self.units.lives() {
            if live.recipe.command().binary == binary {
                live.cell.set_facts(facts);
            }
        }
    }

    /// Applies a changed limit of concurrent requests to the serving processes.
    fn reopen_gates(&mut self) {
        for unit in &self.units.all {
            if let (BackendPhase::Ready, Some(live)) = (unit.phase(), &unit.live) {
                self.leases.open_gate(&live.cell, self.lease_limit(live.start.slots));
            }
        }
    }

    pub(super) fn set_replicas(&mut self) {
        let replicas = self.spec.run.replicas;
        for replica in 0..replicas {
            if self.units.current(replica).is_none() {
                self.add_unit(replica, UnitRole::Current);
            }
        }
        for id in self.units.ids() {
            if let Some(unit) = self.units.get_mut(id)
                && unit.replica >= replicas
            {
                unit.role = UnitRole::Retiring;
                self.step_machine(id, LifecycleEvent::Down);
            }
        }
        while let Some(replacement) = self.replacements.take_first(|known| known.replica() >= replicas) {
            self.give_up_replacement(replacement, "the replica was removed from the configuration");
        }
        self.replacements.last.retain(|entry| entry.replica < replicas);
    }

    /// Removes the model. The fleet has already refused its requests.
    fn remove_model(&mut self) {
        self.life.is_published = false;
        if self.life.end.is_none() {
            self.life.end = Some(TaskEnd::Removed);
        }
        self.give_up_replacements("the model was removed from the configuration");
        self.stop_all();
    }

    /// Ends the model by `deadline`. The fleet has already refused new requests.
    fn shut_down(&mut self, deadline: Instant) {
        // Serving processes stay while they have requests; `settle` ends the others.
        self.life.end = Some(TaskEnd::Shutdown(deadline));
        self.give_up_replacements("the fleet is shutting down");
        for unit in &mut self.units.all {
            if unit.role == UnitRole::Successor && unit.phase() != BackendPhase::Ready {
                unit.role = UnitRole::Retiring;
            }
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let Some(end) = self.life.end else { return false };
        if !self.units.any_process() && !self.experience.dead_starts.is_searching() {
            return true;
        }
        let late = match end {
            TaskEnd::Removed => false,
            TaskEnd::Shutdown(deadline) => clock::after(deadline, self.exit_patience()) <= Instant::now(),
        };
        if late {
            let pids: Vec<u32> = self.units.lives().filter_map(|live| live.child.pid()).collect();
            tracing::error!(model = %self.spec.name, ?pids, "processes still run although they were killed");
        }
        late
    }

    pub(super) fn end_deadline(&self) -> Option<Instant> {
        match self.life.end? {
            TaskEnd::Removed => None,
            TaskEnd::Shutdown(deadline) if deadline > Instant::now() => Some(deadline),
            TaskEnd::Shutdown(deadline) => Some(clock::after(deadline, self.exit_patience())),
        }
    }
}
