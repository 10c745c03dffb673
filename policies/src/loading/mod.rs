//! Decides which models are loaded, on which GPUs, and which models are unloaded to make room. Does no I/O:
//! the caller reports events and gets orders.
//!
//! ```text
//!   wants ─> waits for room ──Load──> comes ──loaded──> serves ──Unload──> leaves ──gone──> out
//!               │  room: memory that is neither promised nor in use according to the drivers and the kernel
//!               └─ none? reclaim, if that frees enough; else unload the models whose loss costs clients least,
//!                  leaking ones first; never a model that was just loaded and is in use
//! ```
//!
//! **A promise** is the memory that a model was admitted with: its predicted needs until the first reading,
//! then the most that it held. The loader reserves the part that the model has not taken yet.
//!
//! **The queue** is served in order. A later model is admitted first only into room that an earlier model
//! cannot use. A newly loaded model in use keeps its memory for a turn, a multiple of its load time, so every
//! waiting model waits at most for the turns of the models before it.

mod amounts;
mod company;
mod evict;
mod facts;
mod models;
mod next;
mod renew;
mod returning;
mod room;
mod state;
#[cfg(test)]
mod tests;
mod wish;

use std::time::Duration;

pub use self::amounts::MemoryAmounts;
pub use self::facts::{LoadSpec, LoaderOrder, MissingRoom, ModelActivity, ModelId, ModelReading};
pub use self::models::LoadedModels;
use self::returning::ReturningMemory;
pub use self::room::LoadRefusal;
pub use self::state::RequestDemand;
use self::state::{
    AdmittedMemory, LoadedModel, ModelLoadState, ModelMeasurement, ReclaimCall, SettingsRenewal,
};
use self::wish::{LoadWish, Placement, Reservations};
use crate::units;

/// Settings of the loader. `defaults.toml`, section `[loading]`, gives the reasons.
pub type LoadingConfig = crate::defaults::Loading;

impl LoadingConfig {
    /// Returns the part of a host's bytes that models may use.
    pub fn left_of_host(&self, bytes: u64) -> u64 {
        units::scale_bytes(bytes, 1.0 - self.host_kept)
    }

    /// Returns the part of a GPU's bytes that models may use.
    pub fn left_of_gpu(&self, bytes: u64) -> u64 {
        units::scale_bytes(bytes, 1.0 - self.gpu_kept)
    }
}

/// Memory state of all models of this instance.
#[derive(Debug)]
pub struct LoadingState {
    /// Settings.
    pub numbers: LoadingConfig,
    /// Memory that all models together may use.
    pub capacity: MemoryAmounts,
    /// All models.
    pub models: LoadedModels,
    /// Room reserved for waiting models by the last decision.
    kept: Reservations,
    /// Free memory as if the models that are taking memory now had not taken any.
    free_before_starts: Option<MemoryAmounts>,
    /// Memory of ended processes that does not show as free yet.
    returning: ReturningMemory,
    /// Part of that memory that is expected to return; set only during [`Self::next_orders`].
    returning_soon: Option<MemoryAmounts>,
}

impl LoadingState {
    /// Creates an empty state without limits, because the machine's capacity is unknown yet.
    pub fn new(numbers: LoadingConfig) -> Self {
        let kept = Reservations::new();
        Self {
            numbers,
            capacity: MemoryAmounts::everything(),
            models: LoadedModels::default(),
            kept,
            free_before_starts: None,
            returning: ReturningMemory::default(),
            returning_soon: None,
        }
    }

    /// Returns the models that wait for room, with the reasons.
    pub fn waiting(&self, free: Option<&MemoryAmounts>) -> Vec<(ModelId, MissingRoom)> {
        let waiting =
            self.models.all.iter().filter(|(_, model)| matches!(model.state, ModelLoadState::Wants { .. }));
        let lacks = |who: &ModelId, model: &LoadedModel| {
            let kept = room::kept_for_others(&self.kept, who);
            let wish = LoadWish { name: who, kept: &self.kept, free, party: &[] };
            let company =
                self.models.compatibility(&wish, &[], self.numbers.max_loaded) == room::Compatibility::Good;
            MissingRoom {
                needed: room::needed_bytes(model),
                left: self.room_left(free).minus(&kept),
                excluded: !company,
            }
        };
        waiting.map(|(who, model)| (who.clone(), lacks(who, model))).collect()
    }

    /// Removes a model that is neither configured nor loaded.
    pub fn forget(&mut self, model: &ModelId) {
        self.models.all.remove(model);
        self.kept.retain(|(who, _)| who != model);
    }

    /// Returns true if memory of an ended process is not free yet, so that a waiting model may soon fit.
    pub fn awaits_memory(&self) -> bool {
        self.returning.is_awaited()
    }

    /// Records that a model is ready to serve.
    pub fn record_loaded(&mut self, name: &ModelId, now: Duration) {
        if let Some(model) = self.models.all.get_mut(name)
            && let ModelLoadState::Comes { since } = model.state
        {
            (model.load_time, model.raised.factor) = (now.saturating_sub(since), 1.0);
            let until = now.saturating_add(self.numbers.first_reading);
            (model.state, model.measured.deadline) = (ModelLoadState::Serves { since: now }, Some(until));
            if let Some(held) = model.measured.reading.as_ref().map(|reading| reading.held.clone()) {
                self.record_taken(name, &held);
            }
        }
    }

    /// Records a model that the previous llama-warden loaded, each process on the given GPUs.
    pub fn record_inherited(&mut self, name: &ModelId, places: Vec<Vec<usize>>, now: Duration) {
        if let Some(model) = self.models.all.get_mut(name) {
            let until = now.saturating_add(self.numbers.first_reading);
            (model.state, model.measured.deadline) = (ModelLoadState::Serves { since: now }, Some(until));
            model.places = places;
        }
    }

    fn record_taken(&mut self, model: &ModelId, held: &MemoryAmounts) {
        if self.models.all.get_mut(model).is_some_and(|model| model.measured.deadline.take().is_some()) {
            self.adjust_before(|before| before.minus(held));
        }
    }

    /// Stops waiting for a reading: the last reading counts as held memory, or the promise if there is none.
    fn stop_settling(&mut self, name: &ModelId) {
        if let Some(model) = self.models.all.get_mut(name).filter(|model| model.measured.deadline.is_some()) {
            let promised =
                || ModelReading { held: model.admitted.promised.clone(), ..ModelReading::default() };
            let held = model.measured.reading.get_or_insert_with(promised).held.clone();
            self.record_taken(name, &held);
        }
    }

    /// Ends the start of a model without a reading: memory missing since then counts as held, up to its
    /// promise.
    fn attribute_missing(&mut self, who: &ModelId) {
        let missing = self
            .free_before_starts
            .as_ref()
            .zip(self.returning.free())
            .map(|(before, free)| before.minus(free));
        let Some(model) =
            self.models.all.get_mut(who).filter(|model| matches!(model.state, ModelLoadState::Comes { .. }))
        else {
            return;
        };
        if let Some(held) = missing
            .map(|missing| missing.min(&model.admitted.promised))
            .filter(|_| model.measured.reading.is_none())
        {
            model.measured.reading = Some(ModelReading { held: held.clone(), ..ModelReading::default() });
            self.adjust_before(|before| before.minus(&held));
        }
    }

    /// Returns the free memory as if the models that are taking memory now had not taken any.
    fn free_before_taking(&self, free: &MemoryAmounts) -> MemoryAmounts {
        let before =
            self.free_before_starts.as_ref().filter(|_| self.models.all.values().any(LoadedModel::is_taking));
        before.map_or_else(|| free.clone(), |before| before.max(free))
    }

    /// Adjusts the free memory from before the starts, after some was attributed to a model or returned.
    fn adjust_before(&mut self, change: impl Fn(&MemoryAmounts) -> MemoryAmounts) {
        self.free_before_starts = self.free_before_starts.as_ref().map(change);
    }

    fn start_leaving(&mut self, who: &ModelId) {
        self.stop_settling(who);
        self.attribute_missing(who);
        if let Some(model) = self.models.all.get_mut(who) {
            (model.state, model.renewal.asked) = (ModelLoadState::Leaves, None);
        }
    }

    /// Records the memory of a model's processes; memory above the promise raises the promise.
    pub fn record_reading(&mut self, name: &ModelId, mut reading: ModelReading) {
        if let Some(model) = self.models.all.get_mut(name).filter(|model| model.is_there()) {
            if !reading.outdated
                && let Some(renewed) = model.renewal.promise.take()
            {
                (model.admitted.promised, model.admitted.mapped) = (renewed, room::mapped_bytes(model).host);
            }
            if reading.gpus_unknown {
                reading.held.gpus.clone_from(&model.admitted.promised.gpus);
            }
            let (held, outdated) = (reading.held.clone(), reading.outdated);
            if matches!(model.state, ModelLoadState::Serves { .. }) && !reading.leaks {
                let first = !reading.outdated && std::mem::take(&mut model.measured.is_due);
                let measured = model.spec.needs.as_ref().is_some_and(|needs| needs.measured.gpu.is_some());
                if first && std::mem::take(&mut model.admitted.alone) {
                    // The model was predicted to be too large, but its reading shows that it is not.
                    model.admitted.promised = MemoryAmounts::none();
                } else if first && !measured {
                    // GPU memory is allocated at once, so the first reading replaces the prediction; host
                    // memory is not.
                    model.admitted.promised.gpus.clear();
                }
                model.admitted.promised = model.admitted.promised.max(&reading.held);
            }
            model.measured.reading = Some(reading);
            if !outdated {
                self.record_taken(name, &held);
            }
        }
    }

    /// Records that a model stops for another reason than lack of room: TTL passed, or an operator drains it.
    pub fn record_leaving(&mut self, model: &ModelId) {
        if self.models.all.get(model).is_some_and(LoadedModel::is_there) {
            self.start_leaving(model);
        }
    }

    /// Raises a model's needs, because a start ran out of memory although it stayed within its promise.
    pub fn raise_needs(&mut self, model: &ModelId, now: Duration) {
        let by = self.numbers.short;
        // Pinned models are never unloaded for this one.
        let pinned = self
            .models
            .all
            .iter()
            .filter(|(other, known)| known.spec.pin && *other != model && known.is_there());
        let room = self
            .capacity
            .minus(&pinned.fold(MemoryAmounts::none(), |sum, (_, known)| sum.plus(&known.admitted.promised)));
        let Some(known) = self
            .models
            .all
            .get_mut(model)
            .filter(|known| matches!(known.state, ModelLoadState::Comes { .. }))
        else {
            return;
        };
        let before = known.raised.factor;
        (known.raised.factor, known.raised.at) = (before * by, now);
        if !room::fits(model, known, &room) {
            known.raised.factor = before;
        }
    }

    /// Records that all processes of a model have ended and that the model does not ask to be loaded.
    pub fn record_gone(&mut self, name: &ModelId) {
        if let Some(model) = self.models.all.get_mut(name) {
            // Until its first reading, a model does not count as having taken memory.
            let returned = if model.is_taking() { MemoryAmounts::none() } else { model.held() };
            model.state = ModelLoadState::Out;
            model.admitted = AdmittedMemory::default();
            model.measured = ModelMeasurement::UNREAD;
            model.renewal = SettingsRenewal::default();
            model.reclaim = ReclaimCall::default();
            model.places.clear();
            self.kept.retain(|(who, _)| who != name);
            self.adjust_before(|before| before.plus(&returned));
            self.returning.add(returned);
        }
    }
}
