//! The instance after us goes on with the model's processes: what it is told, and what is left to do here.
//!
//! ```text
//!   run ── asked, nothing is under way ──> frozen: leases go on, nothing is decided ── thawed ──> run
//!                                             │ the other one serves
//!                                             v
//!                                          let go: what runs here ends; a process that dies meanwhile closes its gate
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

/// What a model leaves to the instance after us.
#[derive(Debug)]
pub(crate) struct ModelWill {
    pub(crate) record: WillRecord,
    pub(crate) heirs: Vec<Heir>,
}

/// What is written of it, without its processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WillRecord {
    pub(crate) name: String,
    /// Its processes are to run.
    pub(crate) wanted: bool,
    /// The GPUs of each process.
    pub(crate) places: Vec<Vec<usize>>,
    /// It runs with its fallback arguments.
    pub(crate) fell_back: bool,
    pub(crate) cooldown: Cooldown,
    pub(crate) crashes: u64,
    pub(crate) n_ctx: Option<u64>,
    pub(crate) modalities: Option<Modalities>,
    /// Whether it may leave for another one, if somebody said so.
    #[serde(default)]
    pub(super) by_hand: Option<ByHand>,
    /// What clients have set in its processes: by which route, and what.
    pub(crate) settings: Vec<(String, Vec<u8>)>,
}

/// How the time between the freezing and the end of it ended.
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

    /// What the instance after us gets. From now on nothing is decided here.
    pub(super) fn bequeath(&mut self) -> Result<ModelWill, String> {
        if self.is_searching() {
            // The next instance can search as well: whoever wants to hand over asks again.
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

    /// Nothing is decided until it is known who goes on. Returns whether that is us.
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
                // It turns, and whoever watches over that must not end all for a next program that hangs.
                Some(Message::Beat(question)) => drop(question.send(())),
                Some(message) => stashed.push(message),
            }
        };
        // What came meanwhile is looked at now, by whoever goes on.
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
        // Whether there is hope is the other one's to say from now on.
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

    /// Others own the processes. What has a lease here, or waits for one, goes on as long as its process does.
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
                    // Whoever still asks here has to ask the other instance. Dropped with who waits for its answer, which says that
                    // everything ends.
                    Some(Message::Control(control)) => drop(control),
                    // Whoever asks whether we turn may have left.
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
            // Who waits for a process that ends meanwhile, or for one that nobody starts any more, hears so.
            if ends && !self.leases.any_open() {
                self.leases.dismiss(&Denied::ShuttingDown);
            }
            // Its answers are what changes.
            self.operators.give_answers();
        }
    }

    /// A process has died whose requests are here.
    fn lose(&mut self, generation: GenerationId) {
        self.leases.close(generation);
        for unit in &mut self.units {
            if let Some(live) = unit.live.take_if(|live| live.id == generation) {
                live.cell.revoke();
            }
        }
        // What waits goes on when the other instance has told of the next one.
        self.leases.forget(generation);
    }

    /// The other instance's processes are those that requests go to from here, too.
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
                // Without it no answer of here could be gone on with there by its tokens, or behind its text.
                if let Some(kin) = gate.kin {
                    let _first = cell.kin.set(kin);
                }
                self.guests.insert(gate.generation, Arc::clone(&cell));
                cell
            });
            self.leases.open(&cell, self.limit(gate.slots));
        }
        // One that is gone there is gone here.
        let here = |id: &GenerationId| gates.iter().any(|gate| gate.generation == *id);
        let gone: Vec<GenerationId> = self.guests.keys().copied().filter(|id| !here(id)).collect();
        for id in gone.into_iter().filter(|id| self.leases.is_unused(*id)) {
            self.guests.remove(&id);
            self.leases.forget(id);
        }
        self.context.followed.notify_one();
    }

    /// The other instance has turned its callers away: whoever waits here since then hears the same.
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

    /// It refused a connection: whether it lives is found out by asking.
    fn doubt_again(&mut self, generation: GenerationId) {
        let (timeout, pause) = (self.spec.lifecycle.probe_timeout, self.spec.lifecycle.start_probe_interval);
        let process = self.lives().find(|live| live.id == generation).and_then(|live| live.process.clone());
        let Some(process) = process else {
            // One of the other instance, which knows whether it lives and tells of its next one.
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

    /// Unless the other instance lets nobody in there any more.
    fn open_again(&self, generation: GenerationId) {
        let live = self.lives().find(|live| live.id == generation);
        if let Some(live) = live.filter(|_| self.is_followed(generation)) {
            self.leases.open(&live.cell, self.limit(live.slots));
            self.context.followed.notify_one();
        }
    }

    /// Whether its gate is open there, as far as was heard.
    fn is_followed(&self, generation: GenerationId) -> bool {
        self.followed.as_ref().is_none_or(|gates| gates.contains(&generation))
    }
}
