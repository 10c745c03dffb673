//! Room in memory, asked of the loader.

use std::sync::Arc;

use warden_policies::book::{MeasuredNeeds, MemoryNeeds};
use warden_policies::loading::{LoadSpec, MemoryAmounts, ModelId, ModelReading};
use warden_policies::{GpuIndex, MemoryKind, ModelName};

use crate::clock;
use crate::error::ControlError;
use crate::memory::leak_history;
use crate::memory::loading::{LoadingDesk, LoadingReport};
use crate::model::environment::TaskEnvironment;
use crate::model::generation::process_recipe;
use crate::model::message::{ControlMessage, ManualPin, TaskMessage, TaskOutbox};
use crate::model::replacement::ReplacementTracker;
use crate::model::unit::{UnitList, UnitRole};
use crate::spec::{FallbackSpec, ModelSpec, ServerCommand};
use crate::view::entry::{PinEntry, PinKind, PinView};
use crate::view::event::EventKind;

/// Configured command and needs, kept while the fallback is in use.
#[derive(Debug)]
pub(crate) struct ConfiguredCommand {
    command: ServerCommand,
    needs: Option<MemoryNeeds>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum LoadState {
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
pub(crate) struct ModelRoom {
    pub(super) desk: Arc<LoadingDesk>,
    pub(crate) who: ModelId,
    /// True if processes should run even without waiting requests.
    pub(crate) wanted: bool,
    pub(crate) state: LoadState,
    /// Number of the last request for room or question to the loader.
    last_wish: u64,
    pub(crate) manual_pin: Option<ManualPin>,
    pub(crate) configured: Option<ConfiguredCommand>,
}

impl ModelRoom {
    pub(crate) fn new(desk: Arc<LoadingDesk>, name: ModelName, wanted: bool) -> Self {
        let who = ModelId { name, incarnation: desk.next_life() };
        let state = LoadState::Unloaded;
        Self { desk, who, wanted, state, last_wish: 0, manual_pin: None, configured: None }
    }

    pub(crate) fn report(&self, told: LoadingReport) {
        self.desk.send_report(&self.who, told);
    }

    pub(crate) fn is_granted(&self) -> bool {
        matches!(self.state, LoadState::Granted { .. })
    }

    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.state, LoadState::Waiting { .. })
    }

    pub(crate) fn is_asking_to_stay(&self) -> bool {
        matches!(self.state, LoadState::Granted { asking: Some(_), .. })
    }

    /// True if the pending question is this one or a later one. The loader counts a model as leaving even if
    /// it has answered an earlier question.
    pub(crate) fn is_asked_since(&self, question: u64) -> bool {
        matches!(self.state, LoadState::Granted { asking: Some(asked), .. } if asked >= question)
    }

    fn ask_to_stay(&mut self) {
        if let LoadState::Granted { asking, .. } = &mut self.state {
            self.last_wish += 1;
            *asking = Some(self.last_wish);
            self.report(LoadingReport::ReplacementPlanned(self.last_wish));
        }
    }

    pub(crate) fn replica_gpus(&self, replica: u32, spec: &ModelSpec) -> Vec<GpuIndex> {
        let LoadState::Granted { places, .. } = &self.state else { return Vec::new() };
        if !spec.start.choose_gpus {
            return Vec::new();
        }
        let place = usize::try_from(replica).ok().and_then(|replica| places.get(replica));
        place.into_iter().flatten().filter_map(|gpu| u32::try_from(*gpu).ok().map(GpuIndex)).collect()
    }
    /// Requests room from the loader if that was not done yet. Returns true for a new request.
    pub(crate) fn request(&mut self, env: &TaskEnvironment, urgent: bool) -> bool {
        let changed = match self.state {
            LoadState::Unloaded => {
                // A repeated request for room keeps its number, because the answer may be on its way.
                self.last_wish += 1;
                false
            }
            LoadState::Waiting { urgent: false, changed } if urgent => changed,
            _ => return false,
        };
        self.state = LoadState::Waiting { urgent, changed };
        let spec = Box::new(self.loading_spec(env));
        self.report(LoadingReport::Wanted { spec, urgent, number: self.last_wish });
        true
    }

    /// Takes the room granted to request `asked`, unless the request was withdrawn. Returns true if
    /// processes may start.
    pub(crate) fn take_grant(&mut self, places: Vec<Vec<usize>>, asked: u64) -> bool {
        let LoadState::Waiting { changed, .. } = self.state else { return false };
        if self.last_wish != asked {
            return false;
        }
        self.state = LoadState::Granted { places, told: false, asking: None, beside: true };
        if changed {
            // The settings have changed since the request, so ask again.
            self.ask_to_stay();
        }
        !changed
    }

    /// Handles the permission to stay. Returns true if it answers the pending question.
    pub(crate) fn note_stay(&mut self, now: Vec<Vec<usize>>, fits_beside: bool, question: u64) -> bool {
        let LoadState::Granted { places, asking, beside, .. } = &mut self.state else { return false };
        if *asking != Some(question) {
            return false;
        }
        *places = now;
        *asking = None;
        *beside = fits_beside;
        true
    }

    /// Registers the model with the loader, whose orders become messages to the task.
    pub(crate) fn join(&self, env: &TaskEnvironment, outbox: TaskOutbox) {
        let listener =
            Box::new(move |order| outbox.send(TaskMessage::Control(ControlMessage::Loading(order))));
        self.report(LoadingReport::Joined { leases: Arc::clone(&env.leases), listener });
        self.report_settings(env);
    }

    /// Reports new settings. A loaded model stays loaded.
    pub(crate) fn report_settings(&self, env: &TaskEnvironment) {
        self.report(LoadingReport::SettingsChanged(Box::new(self.loading_spec(env))));
    }

    /// Present memory needs, with measurements of processes with the same command.
    pub(crate) fn loading_spec(&self, env: &TaskEnvironment) -> LoadSpec {
        let mut spec = LoadSpec {
            replicas: env.spec.run.replicas,
            ttl: env.spec.ttl,
            pin: self.is_pinned(&env.spec),
            can_do_with_less: env.spec.start.fallback.is_some() && self.configured.is_none(),
            ..env.spec.loading.clone()
        };
        let measured = env.context.leak_history.peak_memory(&leak_history::process_key(&env.spec.command));
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

    /// Asks the loader whether the model may stay, if new settings change its memory or GPUs. No process is
    /// started before the answer.
    pub(crate) fn plan_stay(&mut self, env: &TaskEnvironment, before: &LoadSpec, remade: bool) {
        let now = self.loading_spec(env);
        // Ignore measurements: they belong to the old command, and the new one may need as much.
        let needs = |spec: &LoadSpec| {
            spec.needs.clone().map(|needs| MemoryNeeds { measured: MeasuredNeeds::default(), ..needs })
        };
        let places = |spec: &LoadSpec| (spec.gpus.clone(), spec.may_split);
        let elsewhere = (env.spec.start.choose_gpus || remade) && places(&now) != places(before);
        if !(remade && needs(&now) != needs(before) || now.replicas != before.replicas || elsewhere) {
            return;
        }
        if let LoadState::Waiting { changed, .. } = &mut self.state {
            *changed = true;
        }
        self.ask_to_stay();
    }

    /// Reports the model's memory to the loader, once the memory of all its processes was read.
    pub(crate) fn report_memory(
        &self,
        env: &TaskEnvironment,
        units: &UnitList,
        replacements: &ReplacementTracker,
    ) {
        // During a replacement two processes hold memory, so the sum would be too large.
        if !self.is_granted() || !replacements.is_empty() || !units.all_serve() {
            return;
        }
        let made_of = process_recipe(&env.spec);
        let mut reading = ModelReading {
            held: MemoryAmounts::none(),
            leaks: false,
            gpus_unknown: false,
            can_reclaim: false,
            outdated: false,
        };
        for unit in &units.all {
            let Some(live) = &unit.live else { continue };
            let memory = &live.memory;
            if !memory.has_reading() {
                return;
            }
            reading.leaks |= memory.leaks();
            // A retiring process ends and frees its memory.
            reading.outdated |= live.recipe != made_of || unit.role != UnitRole::Current;
            reading.gpus_unknown |= !memory.knows_vram();
            reading.can_reclaim |= live.can_reclaim(&env.spec.recycle.common);
            reading.held.add(MemoryKind::Host, memory.charged_bytes(MemoryKind::Host).unwrap_or(0));
            for vram in &memory.history.vram {
                reading.held.add(MemoryKind::Vram(vram.gpu), vram.bytes);
            }
        }
        self.report(LoadingReport::Measured(reading));
    }

    pub(crate) fn is_pinned(&self, spec: &ModelSpec) -> bool {
        self.manual_pin.as_ref().map_or(spec.loading.pin, |said| said.pinned)
    }

    pub(crate) fn pin_view(&self, spec: &ModelSpec) -> PinView {
        let by = self.manual_pin.as_ref().map(|said| said.by.clone());
        PinView { pinned: self.is_pinned(spec), by }
    }

    pub(crate) fn set_pin(
        &mut self,
        env: &TaskEnvironment,
        pinned: bool,
        by: &str,
    ) -> Result<PinView, ControlError> {
        if env.spec.canary_of.is_some() {
            let because = "a canary is temporary, and is unloaded before all others".to_owned();
            return Err(ControlError::CannotPin { model: env.spec.name.clone(), because });
        }
        if self.manual_pin.as_ref().is_none_or(|said| said.pinned != pinned) {
            self.manual_pin = Some(ManualPin { pinned, by: by.to_owned() });
            self.report_settings(env);
            let ledger = &env.context.records.ledger;
            let entry = PinEntry {
                kind: PinKind::Pin,
                id: ledger.next_number(),
                at: clock::wall_time(),
                model: env.spec.name.clone(),
                pinned,
                configured: env.spec.loading.pin,
                by: by.to_owned(),
            };
            ledger.append(&entry);
            env.log_event(None, EventKind::Pinned { entry: Box::new(entry) });
        }
        Ok(self.pin_view(&env.spec))
    }

    pub(crate) fn use_fallback(&mut self, spec: &mut ModelSpec, fallback: FallbackSpec) {
        let command = spec.command.clone();
        spec.command.args.extend(fallback.args);
        let needs = std::mem::replace(&mut spec.loading.needs, fallback.needs);
        self.configured = Some(ConfiguredCommand { command, needs });
    }

    /// Restores the configured command: the next start may have more room.
    pub(crate) fn restore_configured(&mut self, spec: &mut ModelSpec) {
        if let Some(ConfiguredCommand { command, needs }) = self.configured.take() {
            spec.command = command;
            spec.loading.needs = needs;
        }
    }

    /// Keeps the fallback if new settings have the same command and fallback arguments.
    pub(crate) fn keep_fallback(&mut self, old: &ModelSpec, new: &mut ModelSpec) {
        let Some(whole) = self.configured.take() else { return };
        let Some(fallback) = new.start.fallback.clone() else { return };
        let had_same = old.start.fallback.as_ref().is_some_and(|known| known.args == fallback.args);
        if had_same && new.command == whole.command {
            new.command = old.command.clone();
            let needs = std::mem::replace(&mut new.loading.needs, fallback.needs);
            self.configured = Some(ConfiguredCommand { needs, ..whole });
        }
    }
}
