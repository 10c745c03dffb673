//! Asks the loader for room before the model's first process, and gives the room back after the last one.
//!
//! ```text
//!   Out ── wanted: asks ──> Asked ── Load ──> In ── idle, drained, evicted ──> Leaving
//!    ^                        │ starts fail               │                        │
//!    └────── gives back ──────┴───────────────────────────┴── no process is left ──┘
//! ```
//!
//! Crashes and replacements within the granted room do not involve the loader.

use std::sync::Arc;

use warden_policies::book::{MeasuredNeeds, MemoryNeeds};
use warden_policies::lifecycle::LifecycleEvent;
use warden_policies::loading::{LoadSpec, MemoryAmounts, ModelId, ModelReading};
use warden_policies::{GpuIndex, MemoryKind, ModelName};

use super::start_search::ConfiguredCommand;
use super::unit::{UnitId, UnitRole, process_recipe};
use super::unload::ManualPin;
use super::warm::KeptState;
use super::{ControlMessage, ModelTask, TaskEnd, TaskMessage};
use crate::error::LeaseDenied;
use crate::memory::leak_history;
use crate::memory::loading::{LoadingDesk, LoadingOrder, LoadingReport};
use crate::spec::ModelSpec;
use crate::view::event::EventKind;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum LoadState {
    #[default]
    Unloaded,
    /// The model waits for room. `changed`: the model's settings have changed since its request.
    Waiting {
        urgent: bool,
        changed: bool,
    },
    /// The model may have processes. `places`: GPUs of each replica; if empty, the command chooses. `asking`:
    /// number of a pending question whether the model may stay; meanwhile no process is started.
    /// `beside`: a process with the latest settings fits next to an old one.
    Granted {
        places: Vec<Vec<usize>>,
        told: bool,
        asking: Option<u64>,
        beside: bool,
    },
    Leaving {
        for_another: bool,
    },
}

/// Memory that the model has requested from the loader.
#[derive(Debug)]
pub(super) struct ModelRoom {
    desk: Arc<LoadingDesk>,
    pub(super) who: ModelId,
    /// True if processes should run even without waiting requests.
    pub(super) wanted: bool,
    pub(super) state: LoadState,
    /// Number of the last request for room or question to the loader.
    last_wish: u64,
    pub(super) manual_pin: Option<ManualPin>,
    pub(super) configured: Option<ConfiguredCommand>,
}

impl ModelRoom {
    pub(super) fn new(desk: Arc<LoadingDesk>, name: ModelName, wanted: bool) -> Self {
        let who = ModelId { name, incarnation: desk.next_life() };
        let state = LoadState::Unloaded;
        Self { desk, who, wanted, state, last_wish: 0, manual_pin: None, configured: None }
    }

    pub(super) fn report(&self, told: LoadingReport) {
        self.desk.send_report(&self.who, told);
    }

    pub(super) fn is_granted(&self) -> bool {
        matches!(self.state, LoadState::Granted { .. })
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, LoadState::Waiting { .. })
    }

    pub(super) fn is_asking_to_stay(&self) -> bool {
        matches!(self.state, LoadState::Granted { asking: Some(_), .. })
    }

    fn ask_to_stay(&mut self) {
        if let LoadState::Granted { asking, .. } = &mut self.state {
            self.last_wish += 1;
            *asking = Some(self.last_wish);
            self.report(LoadingReport::ReplacementPlanned(self.last_wish));
        }
    }

    pub(super) fn replica_gpus(&self, replica: u32, spec: &ModelSpec) -> Vec<GpuIndex> {
        let LoadState::Granted { places, .. } = &self.state else { return Vec::new() };
        if !spec.choose_gpus {
            return Vec::new();
        }
        let place = usize::try_from(replica).ok().and_then(|replica| places.get(replica));
        place.into_iter().flatten().filter_map(|gpu| u32::try_from(*gpu).ok().map(GpuIndex)).collect()
    }
}

impl ModelTask {
    pub(super) fn settle_loading(&mut self) {
        let any = self.units.any_process() || self.experience.dead_starts.is_searching();
        let ends = self.life.end.is_some();
        match &self.room.state {
            LoadState::Granted { told: false, .. } if self.units.all_serve() => {
                if let LoadState::Granted { told, .. } = &mut self.room.state {
                    *told = true;
                }
                self.room.report(LoadingReport::Loaded);
            }
            LoadState::Granted { .. } if !any && (ends || self.units.all_starts_failed()) => {
                self.give_room_back();
            }
            // An operator or `ttl` has unloaded the model.
            LoadState::Granted { .. }
                if self.life.end.map_or(!self.room.wanted, |end| end == TaskEnd::Removed) =>
            {
                self.room.state = LoadState::Leaving { for_another: false };
                self.room.report(LoadingReport::Leaving);
                self.life.note_action();
            }
            LoadState::Leaving { .. } if !any => {
                self.room.restore_configured(&mut self.spec);
                self.give_room_back();
            }
            // The room was given back while a start waits: request room again.
            LoadState::Unloaded if self.units.holds_starts() && !ends => drop(self.may_start()),
            LoadState::Waiting { .. } if ends || !(self.room.wanted || self.units.holds_starts()) => {
                self.room.restore_configured(&mut self.spec);
                self.give_room_back();
            }
            _ => {}
        }
    }

    pub(super) fn give_room_back(&mut self) {
        self.replacements.release_permits();
        self.room.state = LoadState::Unloaded;
        self.room.report(LoadingReport::Unloaded);
        self.life.note_action();
    }

    /// Returns true if processes may be started. Otherwise requests room from the loader.
    pub(super) fn may_start(&mut self) -> bool {
        if let LoadState::Granted { asking, .. } = self.room.state {
            return asking.is_none();
        }
        let urgent = !self.operators.restarts.is_empty();
        let asks = match self.room.state {
            LoadState::Unloaded => true,
            LoadState::Waiting { urgent: known, .. } => urgent && !known,
            LoadState::Granted { .. } | LoadState::Leaving { .. } => false,
        };
        if asks {
            // A repeated request for room keeps its number, because the answer may be on its way.
            if self.room.state == LoadState::Unloaded {
                self.room.last_wish += 1;
            }
            let changed = matches!(self.room.state, LoadState::Waiting { changed: true, .. });
            self.room.state = LoadState::Waiting { urgent, changed };
            let spec = Box::new(self.loading_spec());
            self.room.report(LoadingReport::Wanted { spec, urgent, number: self.room.last_wish });
            self.life.note_action();
        }
        false
    }

    /// Starts a process, or queues the start until room is granted.
    pub(super) fn revive(&mut self, id: UnitId, event: LifecycleEvent) {
        if self.may_start() {
            self.step_machine(id, event);
        } else if let Some(unit) = self.units.get_mut(id) {
            unit.held_start = Some(event);
        }
    }

    /// Present memory needs, with measurements of processes with the same command.
    pub(super) fn loading_spec(&self) -> LoadSpec {
        let mut spec = LoadSpec {
            replicas: self.spec.run.replicas,
            ttl: self.spec.ttl,
            pin: self.room.is_pinned(&self.spec),
            can_do_with_less: self.spec.fallback.is_some() && self.room.configured.is_none(),
            ..self.spec.loading.clone()
        };
        let measured = self.context.leak_history.peak_memory(&leak_history::process_key(&self.spec.command));
        match &mut spec.needs {
            Some(needs) => needs.measured = measured,
            // The model file does not show the needs, but processes with the same command were measured.
            None if measured.host.is_some() => {
                spec.needs = Some(MemoryNeeds { measured, ..MemoryNeeds::default() });
            }
            None => {}
        }
        spec
    }

    /// Registers the model with the loader, whose orders become messages to this task.
    pub(super) fn join_loading(&self) {
        let outbox = self.mail.outbox.clone();
        let listener =
            Box::new(move |order| outbox.send(TaskMessage::Control(ControlMessage::Loading(order))));
        self.room.report(LoadingReport::Joined { leases: Arc::clone(&self.leases), listener });
        self.apply_loading();
    }

    pub(super) fn follow_loader(&mut self, order: LoadingOrder) {
        match order {
            LoadingOrder::Load(places, asked) => self.take_room(places, asked),
            LoadingOrder::Unload(wanted) => self.make_room_for(wanted.name),
            LoadingOrder::ReclaimMemory => self.reclaim_for_other(),
            LoadingOrder::Stay { places, beside, question } => self.note_stay(places, beside, question),
            LoadingOrder::Reload { why, question } => self.reload_model(why, question),
            LoadingOrder::LoadAlong => self.room.wanted |= self.life.end.is_none(),
            LoadingOrder::DropKeptState => self.experience.kept_state.iter().for_each(KeptState::clear_files),
            LoadingOrder::NeverLoad { why, by_room } => self.note_never_loaded(&why, by_room),
        }
    }

    /// Reports new settings. A loaded model stays loaded.
    pub(super) fn apply_loading(&self) {
        self.room.report(LoadingReport::SettingsChanged(Box::new(self.loading_spec())));
    }

    /// Handles a final refusal by the loader. Uses the fallback arguments if they can help; otherwise waiting
    /// requests and operators get the reason.
    fn note_never_loaded(&mut self, why: &str, by_room: bool) {
        if !self.room.is_waiting() || by_room && self.fall_back(why) {
            return;
        }
        let denied = LeaseDenied::NeverLoaded(why.to_owned());
        self.leases.refuse_waiting(&denied);
        self.leases.with_state(|queue| queue.predecessor.give_up());
        self.context.refuse_in_predecessor(&self.spec.name, &denied);
        self.give_up_replacements(&format!("it cannot be loaded: {why}"));
        // The next request asks the loader again. Until then no process may start.
        self.room.wanted = false;
        self.stop_all();
    }

    /// Takes the room granted to request `asked`, unless the request was withdrawn.
    fn take_room(&mut self, places: Vec<Vec<usize>>, asked: u64) {
        let LoadState::Waiting { changed, .. } = self.room.state else { return };
        if self.room.last_wish != asked {
            return;
        }
        self.room.state = LoadState::Granted { places, told: false, asking: None, beside: true };
        if changed {
            // The settings have changed since the request, so ask again.
            self.room.ask_to_stay();
        } else {
            self.run_held_starts();
        }
        self.life.note_action();
    }

    fn run_held_starts(&mut self) {
        for id in self.units.ids() {
            if let Some(event) = self.units.get_mut(id).and_then(|unit| unit.held_start.take()) {
                self.step_machine(id, event);
            }
        }
    }

    /// Asks the loader whether the model may stay, if new settings change its memory or GPUs. No process is
    /// started before the answer.
    pub(super) fn ask_to_stay(&mut self, before: &LoadSpec, remade: bool) {
        let now = self.loading_spec();
        // Ignore measurements: they belong to the old command, and the new one may need as much.
        let needs = |spec: &LoadSpec| {
            spec.needs.clone().map(|needs| MemoryNeeds { measured: MeasuredNeeds::default(), ..needs })
        };
        let places = |spec: &LoadSpec| (spec.gpus.clone(), spec.may_split);
        let elsewhere = (self.spec.choose_gpus || remade) && places(&now) != places(before);
        if !(remade && needs(&now) != needs(before) || now.replicas != before.replicas || elsewhere) {
            return;
        }
        if let LoadState::Waiting { changed, .. } = &mut self.room.state {
            *changed = true;
        }
        self.room.ask_to_stay();
    }

    fn note_stay(&mut self, now: Vec<Vec<usize>>, fits_beside: bool, question: u64) {
        let LoadState::Granted { places, asking, beside, .. } = &mut self.room.state else { return };
        if *asking != Some(question) {
            return;
        }
        *places = now;
        *asking = None;
        *beside = fits_beside;
        self.life.timers.configuration = None;
        self.run_held_starts();
        self.life.note_action();
    }

    /// Drains and stops a model that may not stay with its new settings, and requests room again.
    fn reload_model(&mut self, why: String, question: u64) {
        // Accept an answer to an earlier question, too: the loader already counts the model as leaving.
        if self.life.end.is_some()
            || !matches!(self.room.state, LoadState::Granted { asking: Some(asked), .. } if asked >= question)
        {
            return;
        }
        self.log_event(None, EventKind::LoadsAnew { message: why });
        self.leave_for("the model is reloaded with its new settings");
    }

    fn make_room_for(&mut self, wanted: ModelName) {
        if self.life.end.is_some() || !self.room.is_granted() {
            return;
        }
        self.log_event(None, EventKind::MakesRoom { wanted });
        self.leave_for("the model makes room for another one");
        self.room.wanted = false;
    }

    fn leave_for(&mut self, why: &str) {
        self.give_up_replacements(why);
        self.room.state = LoadState::Leaving { for_another: true };
        self.stop_all();
    }

    /// True while the model drains for another model: its running requests are not interrupted.
    pub(super) fn may_drain_long(&self, id: UnitId) -> bool {
        let Some(live) = self.units.live(id) else { return false };
        // Without requests, the drain waits only for saving slots, which has its own time limit.
        self.leases.in_flight(live.id) > 0
            && self.life.end.is_none()
            && self.room.state == (LoadState::Leaving { for_another: true })
            && live.probing.crashed_at.is_none()
            && !live.child.short_grace
            && live.probing.silent_for(self.spec.lifecycle.probes_lost).is_none()
    }

    /// Reports the model's memory to the loader, once the memory of all its processes was read.
    pub(super) fn report_memory(&self) {
        // During a replacement two processes hold memory, so the sum would be too large.
        if !self.room.is_granted() || !self.replacements.is_empty() || !self.units.all_serve() {
            return;
        }
        let made_of = process_recipe(&self.spec);
        let mut reading = ModelReading {
            held: MemoryAmounts::none(),
            leaks: false,
            gpus_unknown: false,
            can_reclaim: false,
            outdated: false,
        };
        for unit in &self.units.all {
            let Some(live) = &unit.live else { continue };
            let memory = &live.memory;
            if !memory.has_reading() {
                return;
            }
            reading.leaks |= memory.leaks();
            // A retiring process ends and frees its memory.
            reading.outdated |= live.recipe != made_of || unit.role != UnitRole::Current;
            reading.gpus_unknown |= !memory.knows_vram();
            reading.can_reclaim |= live.can_reclaim(&self.spec.recycle.common);
            reading.held.add(MemoryKind::Host, memory.charged_bytes(MemoryKind::Host).unwrap_or(0));
            for vram in &memory.history.vram {
                reading.held.add(MemoryKind::Vram(vram.gpu), vram.bytes);
            }
        }
        self.room.report(LoadingReport::Measured(reading));
    }

    /// True if requests wait because the model waits for room.
    pub(super) fn waits_for_room(&self) -> bool {
        self.room.is_waiting() && self.leases.needs_process()
    }
}
