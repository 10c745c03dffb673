//! Handover of the model's processes between two instances of the program.
//!
//! The old instance still serves the requests that it has accepted (see `remaining`):
//!
//! ```text
//!   run ── asked, nothing is under way ──> frozen: leases continue, no decisions ── thawed ──> run
//!                                             │ the next instance serves
//!                                             v
//!                                          let go: leases here run out; a process that dies closes its gate
//! ```
//!
//! The new instance probes the processes from the start. It reads their memory and decides about them only
//! after the old instance has released them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use warden_policies::lifecycle::{BackendPhase, LifecycleEffect, LifecycleEvent};

use super::ModelTask;
use super::environment::TaskEnvironment;
use super::experience::ModelExperience;
use super::generation::{LiveGeneration, PackProgress, ProcessRecipe, process_recipe};
use super::loading::room::LoadState;
use super::message::{ControlMessage, HelperReport, ModelWill, TaskMail, TaskMessage, WillRecord};
use super::unit::{ProcessUnit, UnitList, UnitRole};
use crate::lease::cell::GenerationCell;
use crate::memory::loading::LoadingReport;
use crate::process::heir::{HeirRecord, ProcessHeir};

impl ModelTask {
    /// Collects what the next instance needs. The task makes no decisions afterwards.
    pub(super) fn prepare_handover(&mut self) -> Result<ModelWill, String> {
        let dead = &mut self.experience.dead_starts;
        if dead.is_searching() {
            // A search must not delay the handover; the next instance can search again.
            dead.stop_search();
            dead.forget_deaths();
        }
        let is_loaded = matches!(
            self.room.state,
            LoadState::Unloaded | LoadState::Granted { told: true, asking: None, .. }
        );
        let obstacle = match () {
            () if self.life.end.is_some() => Some("it is ending"),
            () if self.env.spec.canary_of.is_some() => Some("another build is being tried"),
            () if !self.replacements.is_empty() => Some("a process is being replaced"),
            () if !self.operators.is_empty() => Some("an operator's action is in progress"),
            () if is_loaded => self.units.handover_obstacle(),
            () => self.units.handover_obstacle().or(Some("it is waiting for room, or being unloaded")),
        };
        if let Some(why) = obstacle {
            return Err(format!("the model `{}`: {why}", self.env.spec.name));
        }
        let places = match &self.room.state {
            LoadState::Granted { places, .. } => places.clone(),
            _ => Vec::new(),
        };
        let settings = self.env.leases.settings.all().into_iter();
        let record = WillRecord {
            name: self.env.spec.name.to_string(),
            wanted: self.room.wanted,
            places,
            fell_back: self.room.configured.is_some(),
            cooldown: self.replacements.pace.cooldown.clone(),
            crashes: self.life.crashes,
            n_ctx: self.experience.n_ctx,
            modalities: self.experience.modalities,
            by_hand: self.room.manual_pin.clone(),
            settings: settings.map(|one| (one.path, one.body.to_vec())).collect(),
        };
        let epoch = self.env.context.epoch;
        let load_time = self.replacements.pace.load_time;
        let units = self.units.all.iter().filter_map(|unit| Some((unit.replica, unit.live.as_ref()?)));
        let heirs: Option<Vec<ProcessHeir>> =
            units.map(|(replica, live)| live.make_heir(replica, epoch, load_time)).collect();
        let Some(heirs) = heirs else {
            return Err(format!("the model `{}`: a process of it cannot be handed over", self.env.spec.name));
        };
        self.life.is_frozen = true;
        Ok(ModelWill { record, heirs })
    }

    pub(super) fn inherit_will(&mut self, will: ModelWill) {
        let ModelWill { record, heirs } = will;
        if record.by_hand.is_some() {
            self.room.manual_pin = record.by_hand;
            self.room.report_settings(&self.env);
        }
        self.room.wanted |= record.wanted;
        self.replacements.pace.cooldown = record.cooldown;
        self.life.crashes = record.crashes;
        self.experience.n_ctx = record.n_ctx;
        self.experience.modalities = record.modalities;
        if heirs.is_empty() {
            return;
        }
        if record.fell_back {
            // The processes were started with the fallback arguments.
            if let Some(fallback) = self.env.spec.start.fallback.clone() {
                self.room.use_fallback(&mut self.env.spec, fallback);
                self.room.report_settings(&self.env);
            }
        }
        for (path, body) in record.settings {
            let by = heirs[0].record.generation;
            self.env.leases.settings.set(by, &path, Bytes::from(body));
        }
        // The processes have these settings already.
        let _known = self.env.leases.settings.take_fresh();
        self.room.state =
            LoadState::Granted { places: record.places.clone(), told: true, asking: None, beside: true };
        self.room.report(LoadingReport::Inherited(record.places));
        for heir in heirs {
            self.replacements.pace.load_time = Some(heir.record.loading);
            let replica = heir.record.replica;
            let current = self.units.current(replica).map(|unit| unit.id);
            // A replica that is no longer configured gets a unit too, and drains after the handover.
            let id = current.unwrap_or_else(|| self.units.add(replica, UnitRole::Current));
            if let Some(unit) = self.units.get_mut(id) {
                unit.adopt(&self.env, &mut self.mail, &self.experience, heir);
            }
            self.life.note_action();
        }
    }
}

impl TaskMail {
    /// Makes no decisions until the handover has succeeded or failed. Returns true after a failure, so that
    /// this instance continues.
    pub(super) async fn wait_while_frozen(&mut self, env: &TaskEnvironment, units: &UnitList) -> bool {
        let mut stashed = Vec::new();
        let is_thawed = loop {
            match self.inbox.recv().await {
                Some(TaskMessage::Control(ControlMessage::Thaw)) | None => break true,
                Some(TaskMessage::Control(ControlMessage::LetGo(reply))) => {
                    // The next instance now decides which requests are refused.
                    env.leases.set_refusal(None);
                    units.lives().for_each(LiveGeneration::release);
                    let _told = reply.send(());
                    break false;
                }
                // Answer the watchdog: this task is alive, and only the next instance may be hanging.
                Some(TaskMessage::Beat(question)) => drop(question.send(())),
                Some(message) => stashed.push(message),
            }
        };
        for message in stashed {
            self.outbox.send(message);
        }
        if is_thawed {
            let processes = units.lives().filter_map(|live| live.child.process.as_ref());
            for child in processes.filter_map(|process| process.take_handover_id()) {
                env.context.world.cancel_handover(child);
            }
        }
        is_thawed
    }
}

impl ProcessUnit {
    /// Takes over a process of the previous instance.
    fn adopt(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        experience: &ModelExperience,
        heir: ProcessHeir,
    ) {
        let record = heir.record.clone();
        let generation = record.generation;
        let cell = Arc::new(GenerationCell::new(generation, record.endpoint.clone(), record.facts));
        cell.inherit(record.work, record.saves_for_us);
        cell.replica.store(record.replica, Ordering::Relaxed);
        if let Some(kin) = record.kin {
            let _first = cell.kin.set(kin);
        }
        // A recipe that cannot be read was written by another version: treat the process as outdated.
        let made_of = serde_json::from_value::<ProcessRecipe>(record.made_of).unwrap_or_else(|_| {
            let mut other = process_recipe(&env.spec);
            other.request.command = record.command.clone();
            other
        });
        let mut live = experience.new_generation(env, Arc::clone(&cell), made_of, record.socket);
        if !live.memory.restore(&record.memory) {
            tracing::warn!(
                model = %env.spec.name, %generation,
                "the predecessor's record of the process's memory cannot be read: growth is judged from now on"
            );
        }
        live.start.spawned = env.context.epoch + record.spawned;
        live.start.adopted = Some(record.loading);
        live.child.started_with = Some(record.command.clone());
        // The process saves where its own settings said.
        live.warm.files = live.warm.files.take_if(|files| files.are_stored() == record.stores_slots);
        if let Some(files) = &live.warm.files {
            files.set_others(true);
        }
        self.live = Some(Box::new(live));
        for effect in self.machine.step(LifecycleEvent::Up, env.context.now(), &env.spec.lifecycle) {
            // The process exists, so only its start is timed.
            if let LifecycleEffect::Arm(timer) = effect {
                self.arm_timer(timer, &env.spec.lifecycle, &env.logs);
            }
        }
        let sink = mail.line_sink(generation, &record.command, &env.logs);
        let context = Arc::clone(&env.context);
        let watch = env.watch;
        let needed = env.spec.command.clone();
        let outbox = mail.outbox.clone();
        mail.spawn_helper(generation, async move {
            let world = &context.world;
            let sight = world.check_needs(needed, None).await;
            if let Some(kin) = sight.kin {
                let _first = cell.kin.set(kin);
            }
            outbox.send(TaskMessage::Report(generation, HelperReport::Looked(sight)));
            let free = world.free_memory(watch.sensors.read_limit).await;
            context.fleet_memory.add_generation(generation, &free);
            HelperReport::Spawned(world.adopt(heir, watch.child.log_line_bytes, sink).await)
        });
    }
}

impl UnitList {
    /// Reason why the processes cannot be handed over now.
    fn handover_obstacle(&self) -> Option<&'static str> {
        let is_moving = |unit: &ProcessUnit| {
            !matches!(
                unit.phase(),
                BackendPhase::Idle | BackendPhase::Ready | BackendPhase::Backoff | BackendPhase::Failed
            ) || unit.role != UnitRole::Current
                || unit.held_start.is_some()
        };
        let any_process = |is: fn(&LiveGeneration) -> bool| self.lives().any(is);
        match () {
            () if self.all.iter().any(is_moving) => Some("a process is starting, draining or ending"),
            () if any_process(|live| live.child.process.is_none()) => Some("a process is being created"),
            () if any_process(|live| live.reclaim.pending.is_some()) => {
                Some("a process is giving memory back")
            }
            () if any_process(|live| live.health.answers.is_asking) => {
                // The requests of the next program would not end the test.
                Some("a process is being tested")
            }
            () if any_process(|live| live.warm.packed != PackProgress::NotYet) => {
                Some("slots are being saved")
            }
            () => None,
        }
    }
}

impl LiveGeneration {
    fn make_heir(&self, replica: u32, epoch: Instant, load_time: Option<Duration>) -> Option<ProcessHeir> {
        let process = self.child.process.as_ref()?;
        let (child, files) = process.prepare_handover()?;
        let record = HeirRecord {
            replica,
            generation: self.id,
            child,
            pid: i32::try_from(process.pid()).ok()?,
            endpoint: self.cell.address.endpoint()?.clone(),
            socket: self.child.socket.clone(),
            made_of: serde_json::to_value(&self.recipe).ok()?,
            command: self.child.started_with.clone()?,
            facts: self.cell.facts(),
            kin: self.cell.kin.get().copied(),
            saves_for_us: self.cell.saves_for_us.load(Ordering::Relaxed),
            stores_slots: self.warm.files.as_ref().is_some_and(|files| files.are_stored()),
            spawned: self.start.spawned.saturating_duration_since(epoch),
            loading: self.start.adopted.or(load_time).unwrap_or_default(),
            work: self.cell.work(),
            memory: self.memory.to_record(),
        };
        Some(ProcessHeir { record, files })
    }

    /// Begins to own the process: the previous instance has released it.
    pub(super) fn take_ownership(&mut self) {
        if let Some(process) = &self.child.process {
            process.take_ownership();
        }
        if let Some(files) = &self.warm.files {
            files.set_others(false);
        }
        if self.start.ready.is_some() {
            self.timers.sample = Some(Instant::now());
        }
    }

    /// Leaves the process to the next instance.
    fn release(&self) {
        if let Some(process) = &self.child.process {
            process.release();
        }
        if let Some(files) = &self.warm.files {
            files.set_others(true);
        }
    }
}
