//! Hands the model's processes over to the next instance of the program, while requests that this instance
//! has accepted end here.
//!
//! ```text
//!   run ── asked, nothing is under way ──> frozen: leases continue, no decisions ── thawed ──> run
//!                                             │ the next instance serves
//!                                             v
//!                                          let go: leases here run out; a process that dies closes its gate
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::cooldown::RecycleCooldown;
use warden_policies::lifecycle::BackendPhase;

use super::loading::LoadState;
use super::pin::ManualPin;
use super::unit::{LiveGeneration, ProcessUnit, UnitRole};
use super::warm::PackProgress;
use super::{ControlMessage, HelperReport, ModelTask, TaskCustody, TaskMessage};
use crate::clock;
use crate::error::LeaseDenied;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::QueueRefusal;
use crate::lease::refused::ModelRefusal;
use crate::process::ProbeResult;
use crate::process::heir::{HeirRecord, OpenGate, ProcessHeir};
use crate::view::InputModalities;

/// Everything about a model that the next instance takes over.
#[derive(Debug)]
pub(crate) struct ModelWill {
    pub(crate) record: WillRecord,
    pub(crate) heirs: Vec<ProcessHeir>,
}

/// Serializable part of [`ModelWill`], without the processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WillRecord {
    pub(crate) name: String,
    /// True if the model should have processes even without waiting requests.
    pub(crate) wanted: bool,
    /// GPUs of each process, as chosen by the loader.
    pub(crate) places: Vec<Vec<usize>>,
    /// True if the model runs with its fallback arguments.
    pub(crate) fell_back: bool,
    pub(crate) cooldown: RecycleCooldown,
    pub(crate) crashes: u64,
    pub(crate) n_ctx: Option<u64>,
    pub(crate) modalities: Option<InputModalities>,
    /// Pin set by an operator, if any.
    #[serde(default)]
    pub(super) by_hand: Option<ManualPin>,
    /// Settings that clients made in the model's processes: route and body of each.
    pub(crate) settings: Vec<(String, Vec<u8>)>,
}

/// Way in which the frozen state ended.
enum FreezeEnd {
    Thawed,
    Released,
}

impl ModelTask {
    /// Why the model cannot be handed over now; `None` if nothing prevents it.
    fn handover_obstacle(&self) -> Option<&'static str> {
        let units = || self.units.iter();
        let lives = || self.live_generations();
        let moving = |unit: &ProcessUnit| {
            !matches!(
                unit.phase(),
                BackendPhase::Idle | BackendPhase::Ready | BackendPhase::Backoff | BackendPhase::Failed
            ) || unit.role != UnitRole::Current
                || unit.held_start.is_some()
        };
        match () {
            () if self.end.is_some() => Some("it is ending"),
            () if self.spec.canary_of.is_some() => Some("another build is being tried"),
            () if !self.replacements.is_empty() => Some("a process is being replaced"),
            () if !self.operators.is_empty() => Some("an operator's action is in progress"),
            () if units().any(moving) => Some("a process is starting, draining or ending"),
            () if lives().any(|live| live.process.is_none()) => Some("a process is being created"),
            () if lives().any(|live| live.pending_reclaim.is_some()) => {
                Some("a process is giving memory back")
            }
            () if lives().any(|live| !matches!(live.packed, PackProgress::NotYet)) => {
                Some("slots are being saved")
            }
            () if !matches!(
                self.load_state,
                LoadState::Unloaded | LoadState::Granted { told: true, asking: None, .. }
            ) =>
            {
                Some("it is waiting for room, or being unloaded")
            }
            () => None,
        }
    }

    /// Collects what the next instance needs. From then on this task makes no decisions.
    pub(super) fn prepare_handover(&mut self) -> Result<ModelWill, String> {
        if self.is_searching() {
            // A search does not delay the handover: it is stopped, and the next instance can search.
            self.stop_start_search();
            self.dead_starts.forget_deaths();
        }
        if let Some(why) = self.handover_obstacle() {
            return Err(format!("the model `{}`: {why}", self.spec.name));
        }
        let places = match &self.load_state {
            LoadState::Granted { places, .. } => places.clone(),
            _ => Vec::new(),
        };
        let settings = self.leases.settings.all().into_iter();
        let record = WillRecord {
            name: self.spec.name.to_string(),
            wanted: self.wanted,
            places,
            fell_back: self.configured_command.is_some(),
            cooldown: self.cooldown.clone(),
            crashes: self.crashes,
            n_ctx: self.experience.n_ctx,
            modalities: self.experience.modalities,
            by_hand: self.manual_pin.clone(),
            settings: settings.map(|one| (one.path, one.body.to_vec())).collect(),
        };
        let units = self.units.iter().filter_map(|unit| Some((unit.replica, unit.live.as_ref()?)));
        let heirs: Option<Vec<ProcessHeir>> =
            units.map(|(replica, live)| self.make_heir(replica, live)).collect();
        let Some(heirs) = heirs else {
            return Err(format!("the model `{}`: a process of it cannot be handed over", self.spec.name));
        };
        self.custody = TaskCustody::Frozen;
        Ok(ModelWill { record, heirs })
    }

    fn make_heir(&self, replica: u32, live: &LiveGeneration) -> Option<ProcessHeir> {
        let process = live.process.as_ref()?;
        let (child, files) = process.prepare_handover()?;
        let epoch = self.context.epoch;
        let record = HeirRecord {
            replica,
            generation: live.id,
            child,
            pid: i32::try_from(process.pid()).ok()?,
            endpoint: live.cell.address.endpoint()?.clone(),
            socket: live.socket.clone(),
            made_of: serde_json::to_value(&live.recipe).ok()?,
            command: live.started_with.clone()?,
            facts: live.cell.facts(),
            kin: live.cell.kin.get().copied(),
            saves_for_us: live.cell.saves_for_us.load(std::sync::atomic::Ordering::Relaxed),
            spawned: live.spawned.saturating_duration_since(epoch),
            loading: live.adopted.or(self.experience.load_time).unwrap_or_default(),
            work: live.cell.work(),
            memory: live.memory.to_record(),
        };
        Some(ProcessHeir { record, files })
    }

    /// Makes no decisions until the handover has succeeded or failed. Returns true if it failed, so that
    /// this instance continues.
    pub(super) async fn wait_while_frozen(&mut self) -> bool {
        let mut stashed = Vec::new();
        let ends = loop {
            match self.inbox.recv().await {
                Some(TaskMessage::Control(ControlMessage::Thaw)) | None => break FreezeEnd::Thawed,
                Some(TaskMessage::Control(ControlMessage::LetGo(reply))) => {
                    self.release_processes();
                    let _told = reply.send(());
                    break FreezeEnd::Released;
                }
                // Answer the watchdog: this task is alive, and only the next instance may be hanging.
                Some(TaskMessage::Beat(question)) => drop(question.send(())),
                Some(message) => stashed.push(message),
            }
        };
        // Queue the stashed messages again, whether the handover succeeded or not.
        for message in stashed {
            self.outbox.send(message);
        }
        self.custody = TaskCustody::Ours;
        match ends {
            FreezeEnd::Thawed => {
                for live in self.live_generations() {
                    if let Some(child) = live.process.as_ref().and_then(|process| process.take_handover_id())
                    {
                        self.context.world.cancel_handover(child);
                    }
                }
                true
            }
            FreezeEnd::Released => false,
        }
    }

    fn release_processes(&self) {
        // From now on the next instance decides which requests are refused.
        self.leases.set_refusal(None);
        for live in self.live_generations() {
            if let Some(process) = &live.process {
                process.release();
            }
            if let Some(files) = &live.slot_files {
                files.set_others(true);
            }
        }
    }

    /// After the processes have been handed over, serves the leases and waiting requests of this instance
    /// for as long as the processes live.
    pub(super) async fn serve_remaining(&mut self) {
        let mut ends = false;
        loop {
            let leases = Arc::clone(&self.leases);
            tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(TaskMessage::Report(generation, HelperReport::Exited(..))) => self.note_lost_process(generation),
                    Some(TaskMessage::Report(generation, HelperReport::Probed { health: ProbeResult::Ready, .. })) => {
                        self.reopen_gate(generation);
                    }
                    Some(TaskMessage::Report(generation, HelperReport::Probed { .. })) => self.probe_doubted(generation),
                    Some(TaskMessage::Control(ControlMessage::Disband)) | None => return,
                    Some(TaskMessage::Control(ControlMessage::Gates(gates, refused))) => {
                        self.follow_gates(&gates);
                        self.pass_on_refusals(&refused);
                    }
                    Some(TaskMessage::Control(ControlMessage::Shutdown(_))) => {
                        self.leases.set_refusal(Some(QueueRefusal::ShuttingDown));
                        ends = true;
                    }
                    // Operators have to ask the next instance. The dropped reply channel tells them that
                    // this instance ends.
                    Some(TaskMessage::Control(control)) => drop(control),
                    // Sending fails if the watchdog no longer waits.
                    Some(TaskMessage::Beat(question)) => drop(question.send(())),
                    Some(TaskMessage::Report(..) | TaskMessage::Looked(..) | TaskMessage::StartSearched(..)) => {}
                },
                () = leases.wake.notified() => {
                    for generation in self.leases.take_doubts() {
                        self.probe_doubted(generation);
                    }
                }
                Some(_) = self.helpers.join_next(), if !self.helpers.is_empty() => {}
            }
            // Refuse requests that wait for a process which has ended or will not be started any more.
            if ends && !self.leases.any_open() {
                self.leases.refuse_waiting(&LeaseDenied::ShuttingDown);
            }
            // Nothing else of the state can change here except operators' answers.
            self.operators.send_answers();
        }
    }

    /// Handles the death of a process that has requests here.
    fn note_lost_process(&mut self, generation: GenerationId) {
        self.leases.close_gate(generation);
        for unit in &mut self.units {
            if let Some(live) = unit.live.take_if(|live| live.id == generation) {
                live.cell.revoke();
            }
        }
        // Waiting requests go on as soon as the next instance reports a new process.
        self.leases.remove_generation(generation);
    }

    /// Opens and closes gates as the next instance does, so that requests of this instance can use the
    /// processes of the next one.
    fn follow_gates(&mut self, gates: &[OpenGate]) {
        self.followed = Some(gates.iter().map(|gate| gate.generation).collect());
        for cell in self.leases.open_cells() {
            if !gates.iter().any(|gate| gate.generation == cell.id) {
                self.leases.close_gate(cell.id);
            }
        }
        if gates.iter().any(|gate| gate.touched) {
            self.leases.settings.note_touched();
        }
        for gate in gates {
            let known = self.live_generations().find(|live| live.id == gate.generation);
            let cell = known
                .map(|live| Arc::clone(&live.cell))
                .or_else(|| self.guests.get(&gate.generation).cloned());
            let cell = cell.unwrap_or_else(|| {
                let cell = Arc::new(GenerationCell::new(gate.generation, gate.endpoint.clone(), gate.facts));
                // Without the process's identity, an interrupted answer could not be continued there.
                if let Some(kin) = gate.kin {
                    let _first = cell.kin.set(kin);
                }
                self.guests.insert(gate.generation, Arc::clone(&cell));
                cell
            });
            self.leases.open_gate(&cell, self.lease_limit(gate.slots));
        }
        // Remove processes that the next instance no longer has.
        let here = |id: &GenerationId| gates.iter().any(|gate| gate.generation == *id);
        let gone: Vec<GenerationId> = self.guests.keys().copied().filter(|id| !here(id)).collect();
        for id in gone.into_iter().filter(|id| self.leases.is_unused(*id)) {
            self.guests.remove(&id);
            self.leases.remove_generation(id);
        }
        self.context.followed.notify_one();
    }

    /// Refuses requests that were waiting here when the next instance refused requests of this model.
    fn pass_on_refusals(&self, refused: &[ModelRefusal]) {
        for refused in refused {
            match refused.denied() {
                Some(denied) => self.leases.refuse_waiting_since(&denied, refused.moment()),
                None => {
                    tracing::debug!(model = %self.spec.name, "unknown reason of a refusal by the next instance");
                }
            }
        }
    }

    /// Probes a process that refused a connection.
    fn probe_doubted(&mut self, generation: GenerationId) {
        let (timeout, pause) = (self.spec.lifecycle.probe_timeout, self.spec.lifecycle.start_probe_interval);
        let process =
            self.live_generations().find(|live| live.id == generation).and_then(|live| live.process.clone());
        let Some(process) = process else {
            // The next instance owns this process, watches it and reports its successor: just reopen the
            // gate here.
            let guest = self.guests.get(&generation).filter(|_| self.is_followed(generation));
            if let Some(cell) = guest.cloned() {
                let limit = self.leases.slot_limit(generation).unwrap_or_else(|| self.lease_limit(None));
                self.leases.open_gate(&cell, limit);
                self.context.followed.notify_one();
            }
            return;
        };
        let sent = Instant::now();
        self.spawn_helper(generation, async move {
            let health = process.probe(timeout).await;
            if health != ProbeResult::Ready {
                tokio::time::sleep_until(clock::after_pause(sent, pause)).await;
            }
            HelperReport::Probed { sent, health, props: None, vram: None, unset: Vec::new(), warmed: None }
        });
    }

    /// Reopens the gate of a generation, unless the next instance has closed it.
    fn reopen_gate(&self, generation: GenerationId) {
        let live = self.live_generations().find(|live| live.id == generation);
        if let Some(live) = live.filter(|_| self.is_followed(generation)) {
            self.leases.open_gate(&live.cell, self.lease_limit(live.slots));
            self.context.followed.notify_one();
        }
    }

    /// True if the generation's gate is open in the next instance, as last reported.
    fn is_followed(&self, generation: GenerationId) -> bool {
        self.followed.as_ref().is_none_or(|gates| gates.contains(&generation))
    }
}
