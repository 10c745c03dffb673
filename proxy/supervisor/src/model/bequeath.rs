//! Hands the model's processes over to the next instance of the program, and serves the remaining leases
//! here.
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
use warden_policies::cooldown::Cooldown;
use warden_policies::lifecycle::Phase;

use super::loading::Stand;
use super::pin::ByHand;
use super::unit::{Generation, Role, Unit};
use super::warm::Packed;
use super::{Control, Custody, Message, Model, Report};
use crate::clock;
use crate::error::Denied;
use crate::lease::cell::Cell;
use crate::lease::queue::Refusal;
use crate::lease::refused::Refused;
use crate::process::Health;
use crate::process::heir::{Gate, Heir, HeirRecord};
use crate::view::Modalities;

/// Everything about a model that the next instance takes over.
#[derive(Debug)]
pub(crate) struct ModelWill {
    pub(crate) record: WillRecord,
    pub(crate) heirs: Vec<Heir>,
}

/// Serializable part of [`ModelWill`], without the processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WillRecord {
    pub(crate) name: String,
    /// The model should have processes even if no request waits.
    pub(crate) wanted: bool,
    /// The GPUs of each process.
    pub(crate) places: Vec<Vec<usize>>,
    /// The model runs with its fallback arguments.
    pub(crate) fell_back: bool,
    pub(crate) cooldown: Cooldown,
    pub(crate) crashes: u64,
    pub(crate) n_ctx: Option<u64>,
    pub(crate) modalities: Option<Modalities>,
    /// Pin set by an operator, if any.
    #[serde(default)]
    pub(super) by_hand: Option<ByHand>,
    /// Settings that clients made in its processes: route and body.
    pub(crate) settings: Vec<(String, Vec<u8>)>,
}

/// Outcome of the frozen state.
enum Ends {
    Thawed,
    LetGo,
}

impl Model {
    /// Why the model cannot be handed over now; `None` if it can.
    fn busy(&self) -> Option<&'static str> {
        let units = || self.units.iter();
        let lives = || self.lives();
        let moving = |unit: &Unit| {
            !matches!(unit.phase(), Phase::Idle | Phase::Ready | Phase::Backoff | Phase::Failed)
                || unit.role != Role::Current
                || unit.held.is_some()
        };
        match () {
            () if self.end.is_some() => Some("it is ending"),
            () if self.spec.canary_of.is_some() => Some("another build is being tried"),
            () if !self.replacements.is_empty() => Some("a process is being replaced"),
            () if !self.operators.are_still() => Some("an operator waits for it"),
            () if units().any(moving) => Some("a process is starting, draining or ending"),
            () if lives().any(|live| live.process.is_none()) => Some("a process is being created"),
            () if lives().any(|live| live.asked_back.is_some()) => Some("a process is giving memory back"),
            () if lives().any(|live| !matches!(live.packed, Packed::NotYet)) => Some("slots are being saved"),
            () if !matches!(self.stand, Stand::Out | Stand::In { told: true, asking: None, .. }) => {
                Some("it is waiting for room, or leaving")
            }
            () => None,
        }
    }

    /// Builds what the next instance gets. From now on this task decides nothing.
    pub(super) fn bequeath(&mut self) -> Result<ModelWill, String> {
        if self.is_searching() {
            // The next instance can search too, and the handover is requested again.
            self.stop_start_search();
            self.dead_starts.forget_deaths();
        }
        if let Some(why) = self.busy() {
            return Err(format!("the model `{}`: {why}", self.spec.name));
        }
        let places = match &self.stand {
            Stand::In { places, .. } => places.clone(),
            _ => Vec::new(),
        };
        let settings = self.leases.settings.all().into_iter();
        let record = WillRecord {
            name: self.spec.name.to_string(),
            wanted: self.wanted,
            places,
            fell_back: self.whole.is_some(),
            cooldown: self.cooldown.clone(),
            crashes: self.crashes,
            n_ctx: self.experience.n_ctx,
            modalities: self.experience.modalities,
            by_hand: self.by_hand.clone(),
            settings: settings.map(|one| (one.path, one.body.to_vec())).collect(),
        };
        let units = self.units.iter().filter_map(|unit| Some((unit.replica, unit.live.as_ref()?)));
        let heirs: Option<Vec<Heir>> = units.map(|(replica, live)| self.heir(replica, live)).collect();
        let Some(heirs) = heirs else {
            return Err(format!("the model `{}`: a process of it cannot be handed over", self.spec.name));
        };
        self.custody = Custody::Frozen;
        Ok(ModelWill { record, heirs })
    }

    fn heir(&self, replica: u32, live: &Generation) -> Option<Heir> {
        let process = live.process.as_ref()?;
        let (child, files) = process.bequeath()?;
        let epoch = self.context.epoch;
        let record = HeirRecord {
            replica,
            generation: live.id,
            child,
            pid: i32::try_from(process.pid()).ok()?,
            endpoint: live.cell.address.endpoint()?.clone(),
            socket: live.socket.clone(),
            made_of: serde_json::to_value(&live.made_of).ok()?,
            command: live.started_with.clone()?,
            facts: live.cell.facts(),
            kin: live.cell.kin.get().copied(),
            saves_for_us: live.cell.saves_for_us.load(std::sync::atomic::Ordering::Relaxed),
            spawned: live.spawned.saturating_duration_since(epoch),
            loading: live.adopted.or(self.experience.load_time).unwrap_or_default(),
            work: live.cell.work(),
            memory: live.memory.bequeath(),
        };
        Some(Heir { record, files })
    }

    /// Decides nothing until the handover succeeds or fails. Returns true if this instance continues.
    pub(super) async fn stay_frozen(&mut self) -> bool {
        let mut stashed = Vec::new();
        let ends = loop {
            match self.inbox.recv().await {
                Some(Message::Control(Control::Thaw)) | None => break Ends::Thawed,
                Some(Message::Control(Control::LetGo(reply))) => {
                    self.let_go();
                    let _told = reply.send(());
                    break Ends::LetGo;
                }
                // The task is responsive. The watchdog must not end the program because the next instance
                // hangs.
                Some(Message::Beat(question)) => drop(question.send(())),
                Some(message) => stashed.push(message),
            }
        };
        // Handle the stashed messages now, in either case.
        for message in stashed {
            self.outbox.send(message);
        }
        self.custody = Custody::Ours;
        match ends {
            Ends::Thawed => {
                for live in self.lives() {
                    if let Some(child) = live.process.as_ref().and_then(|process| process.bequeathed()) {
                        self.context.world.thaw(child);
                    }
                }
                true
            }
            Ends::LetGo => false,
        }
    }

    fn let_go(&self) {
        // From now on the next instance decides which requests are refused.
        self.leases.refuse(None);
        for live in self.lives() {
            if let Some(process) = &live.process {
                process.let_go();
            }
            if let Some(files) = &live.slot_files {
                files.set_others(true);
            }
        }
    }

    /// Serves leases and waiting requests after the processes have been handed over, as long as their
    /// processes live.
    pub(super) async fn see_off(&mut self) {
        let mut ends = false;
        loop {
            let leases = Arc::clone(&self.leases);
            tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(Message::Report(generation, Report::Exited(..))) => self.lose(generation),
                    Some(Message::Report(generation, Report::Probed { health: Health::Ready, .. })) => {
                        self.open_again(generation);
                    }
                    Some(Message::Report(generation, Report::Probed { .. })) => self.doubt_again(generation),
                    Some(Message::Control(Control::Disband)) | None => return,
                    Some(Message::Control(Control::Gates(gates, refused))) => {
                        self.follow_gates(&gates);
                        self.turn_away(&refused);
                    }
                    Some(Message::Control(Control::Shutdown(_))) => {
                        self.leases.refuse(Some(Refusal::ShuttingDown));
                        ends = true;
                    }
                    // Operators have to ask the next instance. Dropping the reply channel tells them that
                    // this instance ends.
                    Some(Message::Control(control)) => drop(control),
                    // Fails if the watchdog has stopped waiting.
                    Some(Message::Beat(question)) => drop(question.send(())),
                    Some(Message::Report(..) | Message::Looked(..) | Message::StartSearched(..)) => {}
                },
                () = leases.wake.notified() => {
                    for generation in self.leases.take_doubts() {
                        self.doubt_again(generation);
                    }
                }
                Some(_) = self.helpers.join_next(), if !self.helpers.is_empty() => {}
            }
            // Tell requests that wait for a process which has ended, or which is no longer started.
            if ends && !self.leases.any_open() {
                self.leases.dismiss(&Denied::ShuttingDown);
            }
            // Pending answers are all that can change here.
            self.operators.give_answers();
        }
    }

    /// Handles the death of a process that has requests here.
    fn lose(&mut self, generation: GenerationId) {
        self.leases.close(generation);
        for unit in &mut self.units {
            if let Some(live) = unit.live.take_if(|live| live.id == generation) {
                live.cell.revoke();
            }
        }
        // Waiting requests continue when the next instance reports a new process.
        self.leases.forget(generation);
    }

    /// Opens and closes gates here as the next instance does, so that requests of this instance reach its
    /// processes.
    fn follow_gates(&mut self, gates: &[Gate]) {
        self.followed = Some(gates.iter().map(|gate| gate.generation).collect());
        for cell in self.leases.open_cells() {
            if !gates.iter().any(|gate| gate.generation == cell.id) {
                self.leases.close(cell.id);
            }
        }
        if gates.iter().any(|gate| gate.touched) {
            self.leases.settings.touch();
        }
        for gate in gates {
            let known = self.lives().find(|live| live.id == gate.generation);
            let cell = known
                .map(|live| Arc::clone(&live.cell))
                .or_else(|| self.guests.get(&gate.generation).cloned());
            let cell = cell.unwrap_or_else(|| {
                let cell = Arc::new(Cell::new(gate.generation, gate.endpoint.clone(), gate.facts));
                // Without its identity an answer could not be continued there by its tokens or after its
                // text.
                if let Some(kin) = gate.kin {
                    let _first = cell.kin.set(kin);
                }
                self.guests.insert(gate.generation, Arc::clone(&cell));
                cell
            });
            self.leases.open(&cell, self.limit(gate.slots));
        }
        // Remove processes that are gone in the next instance.
        let here = |id: &GenerationId| gates.iter().any(|gate| gate.generation == *id);
        let gone: Vec<GenerationId> = self.guests.keys().copied().filter(|id| !here(id)).collect();
        for id in gone.into_iter().filter(|id| self.leases.is_unused(*id)) {
            self.guests.remove(&id);
            self.leases.forget(id);
        }
        self.context.followed.notify_one();
    }

    /// Refuses requests waiting here that the next instance has refused since.
    fn turn_away(&self, refused: &[Refused]) {
        for refused in refused {
            match refused.denied() {
                Some(denied) => self.leases.dismiss_since(&denied, refused.moment()),
                None => {
                    tracing::debug!(model = %self.spec.name, "why the next program turned callers away means nothing here");
                }
            }
        }
    }

    /// Probes a process that refused a connection.
    fn doubt_again(&mut self, generation: GenerationId) {
        let (timeout, pause) = (self.spec.lifecycle.probe_timeout, self.spec.lifecycle.start_probe_interval);
        let process = self.lives().find(|live| live.id == generation).and_then(|live| live.process.clone());
        let Some(process) = process else {
            // A process of the next instance, which knows if it lives and reports its successor.
            let guest = self.guests.get(&generation).filter(|_| self.is_followed(generation));
            if let Some(cell) = guest.cloned() {
                let limit = self.leases.limit(generation).unwrap_or_else(|| self.limit(None));
                self.leases.open(&cell, limit);
                self.context.followed.notify_one();
            }
            return;
        };
        let sent = Instant::now();
        self.help(generation, async move {
            let health = process.probe(timeout).await;
            if health != Health::Ready {
                tokio::time::sleep_until(clock::again(sent, pause)).await;
            }
            Report::Probed { sent, health, props: None, vram: None, unset: Vec::new(), warmed: None }
        });
    }

    /// Reopens the gate of a generation, unless the next instance has closed it.
    fn open_again(&self, generation: GenerationId) {
        let live = self.lives().find(|live| live.id == generation);
        if let Some(live) = live.filter(|_| self.is_followed(generation)) {
            self.leases.open(&live.cell, self.limit(live.slots));
            self.context.followed.notify_one();
        }
    }

    /// True if the gate is open in the next instance, as last reported.
    fn is_followed(&self, generation: GenerationId) -> bool {
        self.followed.as_ref().is_none_or(|gates| gates.contains(&generation))
    }
}
