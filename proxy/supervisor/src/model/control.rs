//! Handles requests of operators and of the fleet: restart, drain, new settings, removal, shutdown. An
//! operator gets the reply once the published view shows the result.

use tokio::sync::oneshot;
use warden_policies::cooldown::working_set::PassedBudgets;
use warden_policies::defaults::Recycle;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::modes::WarmMode;

use super::ModelTask;
use super::generation::{LiveGeneration, process_recipe};
use super::life::TaskEnd;
use super::message::{ControlMessage, TaskMessage};
use super::operators::{DrainRequest, RestartRequest};
use super::unit::{ProcessUnit, UnitRole};
use crate::error::ControlError;
use crate::spec::{SharedSpec, WatchConfig};
use crate::view::event::EventKind;

impl ModelTask {
    pub(super) fn handle_control(&mut self, control: ControlMessage) {
        match control {
            ControlMessage::Restart(_, reply) if self.life.end.is_some() => {
                self.operators.answer(reply, Err(ControlError::ShuttingDown));
            }
            ControlMessage::Restart(by, reply) => {
                self.replacements.pace.cooldown.reset();
                self.room.wanted = true;
                let after = self.env.context.last_generation();
                self.operators.restarts.push(RestartRequest { after, by, reply });
            }
            ControlMessage::Drain(reply) => self.drain_model(reply),
            ControlMessage::Reclaim(by, reply) => {
                let is_over = self.life.end.is_some();
                self.operators.begin_reclaim(&self.env, &mut self.mail, &mut self.units, is_over, by, reply);
            }
            ControlMessage::Pin(pinned, by, reply) => {
                let answer = match self.life.end {
                    None => self.room.set_pin(&self.env, pinned, &by),
                    Some(_) => Err(ControlError::ShuttingDown),
                };
                self.operators.answer(reply, answer);
            }
            ControlMessage::Loading(order) => self.follow_loader(order),
            ControlMessage::Apply(spec, watch, reply) => {
                let replaced = self.apply_settings(spec, *watch);
                self.operators.answer(reply, replaced);
            }
            ControlMessage::LearnFacts(binary, facts) => {
                if self.env.spec.command.binary == binary {
                    self.env.spec.facts = facts;
                }
                self.units.set_facts(&binary, facts);
            }
            ControlMessage::PointRemote(_, reply) => drop(reply.send(false)),
            ControlMessage::HandOver(reply) => {
                let will = self.prepare_handover();
                if let Err(Ok(_)) = reply.send(will) {
                    // The requesting instance is gone: continue here.
                    self.mail.outbox.send(TaskMessage::Control(ControlMessage::Thaw));
                }
            }
            ControlMessage::Begin => {
                self.units.lives_mut().for_each(LiveGeneration::take_ownership);
                self.set_replicas();
                if self.room.wanted {
                    self.may_start();
                }
            }
            ControlMessage::Thaw
            | ControlMessage::LetGo(_)
            | ControlMessage::Gates(..)
            | ControlMessage::Disband => {}
            // The fleet has already refused the requests of a removed model, or new ones at a shutdown.
            ControlMessage::Remove => {
                self.life.is_published = false;
                self.life.end = self.life.end.or(Some(TaskEnd::Removed));
                self.experience.close_store();
                self.stop_all("the model was removed from the configuration");
            }
            ControlMessage::Shutdown(deadline) => {
                // Serving processes stay while they have requests; `settle` ends the others.
                self.life.end = Some(TaskEnd::Shutdown(deadline));
                self.give_up_replacements("the fleet is shutting down");
                for unit in &mut self.units.all {
                    if unit.role == UnitRole::Successor && unit.phase() != BackendPhase::Ready {
                        unit.role = UnitRole::Retiring;
                    }
                }
            }
        }
        self.life.note_action();
    }

    fn drain_model(&mut self, reply: oneshot::Sender<Result<(), ControlError>>) {
        if self.life.end.is_some() {
            self.operators.answer(reply, Err(ControlError::ShuttingDown));
            return;
        }
        self.env.leases.with_state(|queue| queue.coming.retry = None);
        self.room.wanted = false;
        let generations = self.units.all.iter().filter_map(ProcessUnit::generation).collect();
        self.stop_all("the model was drained");
        self.operators.drains.push(DrainRequest { generations, reply });
    }

    /// Stops all processes and ends their replacements.
    pub(super) fn stop_all(&mut self, because: &str) {
        self.give_up_replacements(because);
        for unit in &mut self.units.all {
            unit.held_start = None;
            if unit.role == UnitRole::Successor {
                unit.role = UnitRole::Retiring;
            }
        }
        let stops = self.units.ids().into_iter().map(|id| (id, LifecycleEvent::Down)).collect();
        self.step_all(stops);
    }

    /// Applies new settings. Returns true if processes are replaced.
    fn apply_settings(&mut self, mut spec: SharedSpec, watch: WatchConfig) -> bool {
        self.room.keep_fallback(&self.env.spec, &mut spec);
        let needed = self.room.loading_spec(&self.env);
        let old = std::mem::replace(&mut self.env.spec, spec);
        self.env.watch = watch;
        self.units.set_facts(&self.env.spec.command.binary, self.env.spec.facts);
        self.env.leases.with_state(|queue| {
            queue.set_limits(self.env.spec.requests.queue.depth, self.env.spec.requests.queue.wait);
        });
        self.env.leases.change_admission(|admit| {
            admit.set_policy(
                self.env.spec.requests.admission.mode,
                self.env.spec.requests.admission.policy.clone(),
            );
        });
        self.env.leases.ward.set_policy(self.env.spec.requests.quarantine);
        // Changes of admission and overlap settings are ignored: they never prevented a replacement.
        let mut before = old.recycle.clone();
        before.common = Recycle {
            admission: self.env.spec.recycle.common.admission,
            overlap_headroom: self.env.spec.recycle.common.overlap_headroom,
            overlap_floor: self.env.spec.recycle.common.overlap_floor,
            ..before.common
        };
        if self.env.spec.recycle != before {
            self.replacements.pace.cooldown.reset();
            for live in self.units.lives_mut() {
                live.reclaim.history.handle_new_limits();
                live.wish.passed = PassedBudgets::default();
            }
        }
        if self.env.spec.run.preload {
            self.room.wanted |= !old.run.preload;
        }
        if self.env.spec.requests.max_in_flight != old.requests.max_in_flight {
            for unit in &self.units.all {
                if let (BackendPhase::Ready, Some(live)) = (unit.phase(), &unit.live) {
                    self.env.leases.open_gate(&live.cell, self.env.lease_limit(live.start.slots));
                }
            }
        }
        let run = &self.env.spec.run;
        let allowed = match run.warm {
            WarmMode::Auto => !run.warm_away.is_zero(),
            WarmMode::Disk => true,
            WarmMode::Off => false,
        };
        let replicas = if allowed { run.replicas } else { 0 };
        self.experience.drop_state(&self.env.leases, |kept| kept.replica >= replicas);
        self.room.report_settings(&self.env);
        let remade = process_recipe(&self.env.spec) != process_recipe(&old);
        self.room.plan_stay(&self.env, &needed, remade);
        self.set_replicas();
        self.env.enable_conversations();
        self.env.watch_answers();
        self.experience.follow_warm_mode(&self.env);
        if remade {
            self.life.timers.configuration = None;
            for path in self.env.leases.settings.clear() {
                let message = format!(
                    "what was set by `POST {path}` is not set in processes with the new command: set it again if it \
                     still fits"
                );
                self.env.log_event(None, EventKind::SettingLost { message });
            }
            let failed = self.units.forget_failures();
            self.revive_all(failed);
        }
        remade && self.units.any_process()
    }

    pub(super) fn set_replicas(&mut self) {
        let replicas = self.env.spec.run.replicas;
        for replica in 0..replicas {
            if self.units.current(replica).is_none() {
                self.units.add(replica, UnitRole::Current);
                self.life.note_action();
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
            self.replacements.give_up(
                &self.env,
                replacement,
                "the replica was removed from the configuration",
            );
        }
        self.replacements.last.retain(|entry| entry.replica < replicas);
    }
}
