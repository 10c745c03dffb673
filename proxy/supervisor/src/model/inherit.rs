//! Takes over the processes of the previous instance. Their memory is sampled as for new processes, but
//! nothing is decided about them until the previous instance has let them go.

use tokio::time::Instant;
use warden_policies::lifecycle::{LifecycleEffect, LifecycleEvent};

use super::bequeath::ModelWill;
use super::health::HealthTracker;
use super::loading::LoadState;
use super::recipe::{ProcessRecipe, process_recipe};
use super::unit::{LiveGeneration, UnitRole};
use super::{HelperReport, ModelTask};
use crate::lease::cell::GenerationCell;
use crate::memory::loading::LoadingReport;
use crate::process::heir::ProcessHeir;
use crate::sync::lock;
use bytes::Bytes;
use std::sync::Arc;

impl ModelTask {
    /// Takes over a model of the previous instance.
    pub(super) fn inherit_will(&mut self, will: ModelWill) {
        let ModelWill { record, heirs } = will;
        self.inherit_pin(record.by_hand);
        self.wanted |= record.wanted;
        self.cooldown = record.cooldown;
        self.crashes = record.crashes;
        (self.experience.n_ctx, self.experience.modalities) = (record.n_ctx, record.modalities);
        if heirs.is_empty() {
            return;
        }
        if record.fell_back {
            self.inherit_fallback();
        }
        for (path, body) in record.settings {
            let by = heirs[0].record.generation;
            self.leases.settings.set(by, &path, Bytes::from(body));
        }
        // Mark the settings as applied: the processes have them already.
        let _known = self.leases.settings.take_fresh();
        self.load_state =
            LoadState::Granted { places: record.places.clone(), told: true, asking: None, beside: true };
        self.report_loading(LoadingReport::Inherited(record.places));
        for heir in heirs {
            self.adopt_process(heir);
        }
    }

    fn adopt_process(&mut self, heir: ProcessHeir) {
        let record = heir.record.clone();
        let generation = record.generation;
        let current = self.current_unit(record.replica).map(|unit| unit.id);
        // A replica that is no longer configured gets a unit too, and drains once the process is ours.
        let id = current.unwrap_or_else(|| self.add_unit(record.replica, UnitRole::Current));
        let cell = Arc::new(GenerationCell::new(generation, record.endpoint.clone(), record.facts));
        cell.inherit(record.work, record.saves_for_us);
        if let Some(kin) = record.kin {
            let _first = cell.kin.set(kin);
        }
        // A recipe that cannot be read was written by another version: treat the process as outdated.
        let made_of = serde_json::from_value::<ProcessRecipe>(record.made_of).unwrap_or_else(|_| {
            let mut other = process_recipe(&self.spec);
            other.request.command = record.command.clone();
            other
        });
        let mut memory = self.new_tracker(generation, &made_of.request.command);
        if !memory.restore(&record.memory) {
            tracing::warn!(
                model = %self.spec.name, %generation,
                "the predecessor's record of the process's memory cannot be read: growth is judged from now on"
            );
        }
        let health = HealthTracker::new(&lock(&self.context.common), &made_of.request.command);
        let mut live = LiveGeneration::new(generation, record.socket.clone(), cell, made_of, memory, health);
        live.spawned = self.context.epoch + record.spawned;
        live.adopted = Some(record.loading);
        live.started_with = Some(record.command.clone());
        live.slot_files = self.slot_files(&record.socket);
        if let Some(files) = &live.slot_files {
            files.set_others(true);
        }
        self.experience.load_time = Some(record.loading);
        let (now, policy) = (self.context.now(), self.spec.lifecycle);
        let Some(unit) = self.unit_mut(id) else { return };
        unit.live = Some(Box::new(live));
        let effects = unit.machine.step(LifecycleEvent::Up, now, &policy);
        for effect in effects.into_iter().filter(|effect| *effect != LifecycleEffect::Spawn) {
            self.carry_out_effect(id, effect);
        }
        let sink = self.output_sink(generation, &record.command);
        let world = Arc::clone(&self.context.world);
        let (context, limit) = (Arc::clone(&self.context), self.watch.sensors.read_limit);
        let longest = self.watch.child.log_line_bytes;
        let (needed, outbox) = (self.spec.command.clone(), self.outbox.clone());
        let born = self.live(id).map(|live| Arc::clone(&live.cell));
        self.spawn_helper(generation, async move {
            let sight = world.check_needs(needed, None).await;
            if let (Some(kin), Some(cell)) = (sight.kin, born) {
                let _first = cell.kin.set(kin);
            }
            outbox.send(super::TaskMessage::Report(generation, HelperReport::Looked(sight)));
            context.fleet_memory.add_generation(generation, &world.free_memory(limit).await);
            HelperReport::Spawned(world.adopt(heir, longest, sink).await)
        });
        self.note_action();
    }

    /// Begins to decide, because the previous instance has let the processes go.
    pub(super) fn begin_deciding(&mut self) {
        let now = Instant::now();
        for unit in &mut self.units {
            if let Some(live) = &mut unit.live {
                if let Some(process) = &live.process {
                    process.take_ownership();
                }
                if let Some(files) = &live.slot_files {
                    files.set_others(false);
                }
                if live.ready.is_some() {
                    live.timers.sample = Some(now);
                }
            }
        }
        self.set_replicas();
        if self.wanted {
            self.may_start();
        }
        self.note_action();
    }
}
