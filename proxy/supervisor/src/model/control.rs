//! Handles operator requests: restart, drain, new settings, removal, shutdown.

use std::path::Path;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::ServerFacts;
use warden_policies::cooldown::working_set::PassedBudgets;
use warden_policies::defaults::Recycle;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};

use super::message::RequestedBy;
use super::operators::{DrainRequest, RestartRequest};
use super::recipe::process_recipe;
use super::unit::{ProcessUnit, UnitRole};
use super::{ControlMessage, ModelTask, TaskEnd, TaskMessage};
use crate::clock;
use crate::error::ControlError;
use crate::spec::{SharedSpec, WatchConfig};
use crate::view::event::EventKind;
use crate::view::ledger::LedgerEntry;

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
            ControlMessage::ReclaimForOther => self.reclaim_for_other(),
            ControlMessage::Stay { places, beside, question } => self.note_stay(places, beside, question),
            ControlMessage::Reload { why, question } => self.reload_model(why, question),
            ControlMessage::DropKeptState => self.clear_kept_files(),
            ControlMessage::LoadAlong => self.wanted |= self.end.is_none(),
            ControlMessage::Apply(spec, watch, reply) => {
                let replaced = self.apply_settings(spec, *watch);
                self.answer(reply, replaced);
            }
            ControlMessage::Load(places, asked) => self.take_room(places, asked),
            ControlMessage::Unload(wanted) => self.make_room_for(wanted),
            ControlMessage::NeverLoad { why, by_room } => self.note_never_loaded(&why, by_room),
            ControlMessage::LearnFacts(binary, facts) => self.learn_facts(&binary, facts),
            ControlMessage::PointRemote(_, reply) => drop(reply.send(false)),
            ControlMessage::HandOver(reply) => {
                let will = self.prepare_handover();
                if let Err(Ok(_)) = reply.send(will) {
                    // The reply fails if the instance that requested the handover is gone: continue here.
                    self.outbox.send(TaskMessage::Control(ControlMessage::Thaw));
                }
            }
            ControlMessage::Begin => self.begin_deciding(),
            // These messages matter only during and after a handover.
            ControlMessage::Thaw
            | ControlMessage::LetGo(_)
            | ControlMessage::Gates(..)
            | ControlMessage::Disband => {}
            ControlMessage::Remove => self.remove_model(),
            ControlMessage::Shutdown(deadline) => self.shut_down(deadline),
        }
        self.note_action();
    }

    fn restart_model(
        &mut self,
        by: RequestedBy,
        reply: oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>,
    ) {
        if self.end.is_some() {
            self.answer(reply, Err(ControlError::ShuttingDown));
            return;
        }
        self.cooldown.reset();
        self.wanted = true;
        let after = self.context.last_generation();
        self.operators.restarts.push(RestartRequest { after, by, reply });
    }

    fn drain_model(&mut self, reply: oneshot::Sender<Result<(), ControlError>>) {
        if self.end.is_some() {
            self.answer(reply, Err(ControlError::ShuttingDown));
            return;
        }
        self.give_up_replacements("the model was drained");
        self.leases.expect_no_retries();
        self.wanted = false;
        let generations = self.units.iter().filter_map(ProcessUnit::generation).collect();
        self.stop_all();
        self.operators.drains.push(DrainRequest { generations, reply });
    }

    /// Stops all processes and cancels starts that wait for room.
    pub(super) fn stop_all(&mut self) {
        for unit in &mut self.units {
            unit.held_start = None;
            if unit.role == UnitRole::Successor {
                unit.role = UnitRole::Retiring;
            }
        }
        for id in self.ids() {
            self.step_machine(id, LifecycleEvent::Down);
        }
    }

    /// Applies new settings. Returns true if processes are replaced.
    fn apply_settings(&mut self, spec: SharedSpec, watch: WatchConfig) -> bool {
        let spec = self.keep_fallback(spec);
        let needed = self.loading_spec();
        let old = std::mem::replace(&mut self.spec, spec);
        self.watch = watch;
        let (binary, facts) = (self.spec.command.binary.clone(), self.spec.facts);
        self.learn_facts(&binary, facts);
        self.leases.set_queue_limits(self.spec.queue.depth, self.spec.queue.wait);
        self.leases.set_admission(self.spec.admission.mode, self.spec.admission.policy.clone());
        self.leases.set_quarantine(self.spec.quarantine);
        // Ignore changes of admission and overlap settings: they never held a replacement back.
        let mut before = old.recycle.clone();
        before.common = Recycle {
            admission: self.spec.recycle.common.admission,
            overlap_headroom: self.spec.recycle.common.overlap_headroom,
            overlap_floor: self.spec.recycle.common.overlap_floor,
            ..before.common
        };
        if self.spec.recycle != before {
            self.cooldown.reset();
            let lives = self.units.iter_mut().filter_map(|unit| unit.live.as_mut());
            lives.for_each(|live| {
                live.reclaims.handle_new_limits();
                live.wish.passed = PassedBudgets::default();
            });
        }
        if self.spec.run.preload {
            self.wanted |= !old.run.preload;
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
            self.timers.configuration = None;
            for path in self.leases.settings.clear() {
                let message = format!(
                    "what was set by `POST {path}` is not set in processes with the new command: set it again if it still fits"
                );
                self.log_event(None, EventKind::SettingLost { message });
            }
            self.retry_failed();
        }
        remade && self.units.iter().any(|unit| unit.live.is_some())
    }

    /// Retries failed starts with the current command.
    pub(super) fn retry_failed(&mut self) {
        for id in self.ids() {
            if self
                .unit(id)
                .is_some_and(|unit| matches!(unit.phase(), BackendPhase::Backoff | BackendPhase::Failed))
            {
                self.revive(id, LifecycleEvent::Reset);
                if let Some(unit) = self.unit_mut(id) {
                    unit.failure = None;
                    unit.start_failures = 0;
                }
            }
        }
    }

    /// Stores measured facts about a binary, for its present and future processes.
    fn learn_facts(&mut self, binary: &Path, facts: ServerFacts) {
        if self.spec.command.binary == binary {
            self.spec.facts = facts;
        }
        for live in self.live_generations() {
            if live.recipe.binary() == binary {
                live.cell.set_facts(facts);
            }
        }
    }

    /// Applies a changed maximum of simultaneous requests to the processes that take requests.
    fn reopen_gates(&mut self) {
        for unit in &self.units {
            if let (BackendPhase::Ready, Some(live)) = (unit.phase(), &unit.live) {
                self.leases.open_gate(&live.cell, self.lease_limit(live.slots));
            }
        }
    }

    /// Adjusts the number of replicas: adds new ones, or retires the last ones.
    pub(super) fn set_replicas(&mut self) {
        for replica in 0..self.spec.run.replicas {
            if self.current_unit(replica).is_none() {
                self.add_unit(replica, UnitRole::Current);
            }
        }
        let surplus = self.units.iter().filter(|unit| unit.replica >= self.spec.run.replicas);
        let surplus: Vec<_> = surplus.map(|unit| unit.id).collect();
        for id in surplus {
            if let Some(unit) = self.unit_mut(id) {
                unit.role = UnitRole::Retiring;
            }
            self.step_machine(id, LifecycleEvent::Down);
        }
        let replicas = self.spec.run.replicas;
        while let Some(replacement) = self.replacements.take_surplus(replicas) {
            self.give_up_replacement(replacement, "the replica was removed from the configuration");
        }
        self.replacements.retain_replicas(replicas);
    }

    /// Removes the model. The fleet has already refused its requests.
    fn remove_model(&mut self) {
        self.is_published = false;
        if self.end.is_none() {
            self.end = Some(TaskEnd::Removed);
        }
        self.give_up_replacements("the model was removed from the configuration");
        self.stop_all();
    }

    /// Ends the model by `deadline`. The fleet has already refused new requests.
    fn shut_down(&mut self, deadline: Instant) {
        // Serving processes stay while they have requests; `settle` ends the others.
        self.end = Some(TaskEnd::Shutdown(deadline));
        self.give_up_replacements("the fleet is shutting down");
        for unit in &mut self.units {
            if unit.role == UnitRole::Successor && unit.phase() != BackendPhase::Ready {
                unit.role = UnitRole::Retiring;
            }
        }
    }

    /// True if the task has nothing left to do.
    pub(super) fn is_over(&self) -> bool {
        let Some(end) = self.end else { return false };
        if !self.units.iter().any(|unit| unit.live.is_some()) && !self.is_searching() {
            return true;
        }
        let late = match end {
            TaskEnd::Removed => false,
            TaskEnd::Shutdown(deadline) => clock::after(deadline, self.exit_patience()) <= Instant::now(),
        };
        if late {
            let pids = self.units.iter().filter_map(|unit| unit.live.as_ref()?.process.as_ref());
            let pids: Vec<u32> = pids.map(|process| process.pid()).collect();
            tracing::error!(model = %self.spec.name, ?pids, "processes still run although they were killed");
        }
        late
    }

    /// Time at which the task must check again if it can end.
    pub(super) fn end_deadline(&self) -> Option<Instant> {
        match self.end? {
            TaskEnd::Removed => None,
            TaskEnd::Shutdown(deadline) if deadline > Instant::now() => Some(deadline),
            TaskEnd::Shutdown(deadline) => Some(clock::after(deadline, self.exit_patience())),
        }
    }
}
