//! Decides which models are loaded, on which GPUs, and which ones are unloaded for others. No I/O: the
//! caller reports events and gets orders.
//!
//! ```text
//!   wants ─> waits for room ──Load──> comes ──loaded──> serves ──Unload──> leaves ──gone──> out
//!               │  room: memory that is neither promised nor in use according to the drivers and the kernel
//!               └─ none? reclaim, if that frees enough; else unload the models whose loss costs clients least,
//!                  leaking ones first; never a model that was just loaded and is in use
//! ```
//!
//! **A promise** is the memory that a model was admitted with: its needs by the book until the first
//! reading, then the most that it held. The part of a promise that the model has not taken yet is kept for
//! it, even if it is free.
//!
//! **The queue** is served in order. A later model is admitted first only into room that an earlier one
//! cannot use. A newly loaded model keeps its memory for a turn while it is in use; a turn is a multiple of
//! its load time. So every waiting model gets its turn, and none waits longer than the turns of those
//! before it.

mod company;
mod demand;
mod evict;
mod facts;
mod give_back;
mod guests;
mod next;
mod renew;
mod returning;
mod room;
pub mod simulate;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

pub use self::demand::Demand;
pub use self::facts::{Lacks, Order, Reading, Seen, Spec, Who};
use self::next::{Kept, Place, Wish};
use self::returning::Returning;
pub use self::room::{Amounts, Never};
use self::state::{Model, State};
use crate::units;

/// Settings of the loader. `defaults.toml`, section `[loading]`, gives the reasons.
pub type Numbers = crate::defaults::Loading;

impl Numbers {
    /// Returns the part of a host's bytes that models may use.
    pub fn left_of_host(&self, bytes: u64) -> u64 {
        units::scale(bytes, 1.0 - self.host_kept)
    }

    /// Returns the part of a GPU's bytes that models may use.
    pub fn left_of_gpu(&self, bytes: u64) -> u64 {
        units::scale(bytes, 1.0 - self.gpu_kept)
    }
}

/// Memory state of all models of a fleet.
#[derive(Debug)]
pub struct Loading {
    numbers: Numbers,
    /// Memory that all models together may use.
    capacity: Amounts,
    models: BTreeMap<Who, Model>,
    wishes: u64,
    /// Room reserved for waiting models by the last decision.
    kept: Kept,
    /// Free memory as it would be if the models now taking memory had taken none.
    before: Option<Amounts>,
    /// Memory of ended processes that does not show as free yet.
    returning: Returning,
    /// The part of it that will return, set only while [`Self::next`] decides.
    comes_back: Option<Amounts>,
}

impl Loading {
    /// Creates an empty state without limits, because the machine's capacity is unknown yet.
    pub fn new(numbers: Numbers) -> Self {
        let kept = Kept::new();
        Self {
            numbers,
            capacity: Amounts::everything(),
            models: BTreeMap::new(),
            wishes: 0,
            kept,
            before: None,
            returning: Returning::default(),
            comes_back: None,
        }
    }

    /// Replaces the settings.
    pub fn set_numbers(&mut self, numbers: Numbers) {
        self.numbers = numbers;
    }

    /// Returns the models that wait for room, with the reasons.
    pub fn waiting(&self, free: Option<&Amounts>) -> Vec<(Who, Lacks)> {
        let waiting = self.models.iter().filter(|(_, model)| matches!(model.state, State::Wants { .. }));
        let lacks = |who: &Who, model: &Model| {
            let kept = room::kept_for_others(&self.kept, who);
            let wish = Wish { name: who, kept: &self.kept, free, party: &[] };
            let company = self.company(&wish, &[]) == room::Company::Good;
            Lacks { needed: room::needed(model), left: self.left(free).minus(&kept), company: !company }
        };
        waiting.map(|(who, model)| (who.clone(), lacks(who, model))).collect()
    }

    /// Sets the memory that all models together may use.
    pub fn set_capacity(&mut self, capacity: Amounts) {
        self.capacity = capacity;
    }

    /// Adds a model, or replaces its specification.
    pub fn set(&mut self, model: &Who, spec: Spec) {
        match self.models.get_mut(model) {
            Some(known) => {
                if (&known.spec.needs, known.spec.replicas, &known.spec.gpus)
                    != (&spec.needs, spec.replicas, &spec.gpus)
                {
                    // Old readings and raised needs belong to the previous settings.
                    (known.unread, known.raised) = (true, 1.0);
                }
                known.spec = spec;
            }
            None => drop(self.models.insert(model.clone(), Model::new(spec))),
        }
    }

    /// Removes a model that is neither configured nor loaded.
    pub fn forget(&mut self, model: &Who) {
        self.models.remove(model);
        self.kept.retain(|(who, _)| who != model);
    }

    /// Queues a model for loading. With `urgent` others are unloaded for it even without waiting requests.
    /// No effect if it is loaded.
    pub fn wants(&mut self, model: &Who, urgent: bool) {
        self.wishes += 1;
        let place = self.wishes;
        let Some(model) = self.models.get_mut(model) else { return };
        match &mut model.state {
            State::Out => model.state = State::Wants { place, urgent },
            // Called companions have reserved room, so no model has to be unloaded for this one.
            State::Called { .. } => model.state = State::Wants { place: 0, urgent },
            State::Wants { urgent: known, .. } => *known |= urgent,
            State::Comes { .. } | State::Serves { .. } | State::Leaves => {}
        }
    }

    /// Returns true if any model waits for room, so [`Self::next`] may have orders.
    pub fn is_moving(&self) -> bool {
        let moves = |model: &Model| match model.state {
            State::Wants { .. } | State::Called { .. } => true,
            State::Out => model.comes_again,
            _ => model.remade.is_some(),
        };
        self.models.values().any(moves)
    }

    /// Returns true if orders are likely soon: a model starts or stops, or requests wait.
    pub fn is_hurried(&self, seen: impl Fn(&Who) -> Seen) -> bool {
        let hurries = |(who, model): (&Who, &Model)| match model.state {
            State::Wants { urgent, .. } => urgent || seen(who).waiting > 0,
            State::Comes { .. } | State::Leaves => true,
            State::Out | State::Called { .. } | State::Serves { .. } => false,
        };
        self.is_moving() && self.models.iter().any(hurries)
    }

    /// Returns true if memory of an ended process has not shown as free yet, so a waiting model may soon fit.
    pub fn awaits_memory(&self) -> bool {
        self.returning.is_awaited()
    }

    /// Records that a model serves.
    pub fn loaded(&mut self, name: &Who, now: Duration) {
        if let Some(model) = self.models.get_mut(name)
            && let State::Comes { since } = model.state
        {
            (model.load_time, model.raised) = (now.saturating_sub(since), 1.0);
            let until = now.saturating_add(self.numbers.first_reading);
            (model.state, model.settles) = (State::Serves { since: now }, Some(until));
            if let Some(held) = model.reading.as_ref().map(|reading| reading.held.clone()) {
                self.has_taken(name, &held);
            }
        }
    }

    /// Records a model that the predecessor instance loaded, each process on the given GPUs. The next
    /// reading gives its memory.
    pub fn inherited(&mut self, name: &Who, places: Vec<Vec<usize>>, now: Duration) {
        if let Some(model) = self.models.get_mut(name) {
            let until = now.saturating_add(self.numbers.first_reading);
            (model.state, model.settles) = (State::Serves { since: now }, Some(until));
            model.places = places;
        }
    }

    /// Records the memory that a newly loaded model has taken.
    fn has_taken(&mut self, model: &Who, held: &Amounts) {
        if self.models.get_mut(model).is_some_and(|model| model.settles.take().is_some()) {
            self.since_others_came(|before| before.minus(held));
        }
    }

    /// Stops waiting for a reading: the last reading, or the promise, counts as held.
    fn has_all(&mut self, name: &Who) {
        if let Some(model) = self.models.get_mut(name).filter(|model| model.settles.is_some()) {
            let promised = || Reading { held: model.promised.clone(), ..Reading::default() };
            let held = model.reading.get_or_insert_with(promised).held.clone();
            self.has_taken(name, &held);
        }
    }

    /// Ends the start of a model without a reading. It counts as holding the memory missing since the first
    /// start, at most its promise.
    fn has_what_vanished(&mut self, who: &Who) {
        let missing =
            self.before.as_ref().zip(self.returning.free()).map(|(before, free)| before.minus(free));
        let Some(model) = self.models.get_mut(who).filter(|model| matches!(model.state, State::Comes { .. }))
        else {
            return;
        };
        if let Some(held) =
            missing.map(|missing| missing.min(&model.promised)).filter(|_| model.reading.is_none())
        {
            model.reading = Some(Reading { held: held.clone(), ..Reading::default() });
            self.since_others_came(|before| before.minus(&held));
        }
    }

    /// Returns the free memory as it would be if the models now taking memory had taken none. For the first
    /// such model this is `free` itself.
    fn free_before_taking(&self, free: &Amounts) -> Amounts {
        let before = self.before.as_ref().filter(|_| self.models.values().any(Model::is_taking));
        before.map_or_else(|| free.clone(), |before| before.max(free))
    }

    /// Adjusts the free memory from before the present starts, after a part of it was attributed or
    /// returned. The remaining difference is memory taken by starting models.
    fn since_others_came(&mut self, change: impl Fn(&Amounts) -> Amounts) {
        self.before = self.before.as_ref().map(change);
    }

    /// Marks a model as being unloaded.
    fn part(&mut self, who: &Who) {
        self.has_all(who);
        self.has_what_vanished(who);
        if let Some(model) = self.models.get_mut(who) {
            (model.state, model.remade) = (State::Leaves, None);
        }
    }

    /// Records the memory of a model's processes; memory above the promise raises the promise.
    pub fn read(&mut self, name: &Who, mut reading: Reading) {
        if let Some(model) = self.models.get_mut(name).filter(|model| model.is_there()) {
            if !reading.outdated
                && let Some(renewed) = model.renewed.take()
            {
                (model.promised, model.mapped) = (renewed, room::mapped(model).host);
            }
            if reading.gpus_unknown {
                reading.held.gpus.clone_from(&model.promised.gpus);
            }
            let (held, outdated) = (reading.held.clone(), reading.outdated);
            if matches!(model.state, State::Serves { .. }) && !reading.leaks {
                let first = !reading.outdated && std::mem::take(&mut model.unread);
                let measured = model.spec.needs.as_ref().is_some_and(|needs| needs.measured.gpu.is_some());
                if first && std::mem::take(&mut model.alone) {
                    // The model was too large by the book, but is not.
                    model.promised = Amounts::none();
                } else if first && !measured {
                    // GPU memory is allocated at once, so the first reading is better than the plan. Host
                    // memory is taken at first use, so there the plan still counts.
                    model.promised.gpus.clear();
                }
                model.promised = model.promised.max(&reading.held);
            }
            model.reading = Some(reading);
            if !outdated {
                self.has_taken(name, &held);
            }
        }
    }

    /// Records that a model stops on its own: its TTL passed, or an operator drains it.
    pub fn leaves(&mut self, model: &Who) {
        if self.models.get(model).is_some_and(Model::is_there) {
            self.part(model);
        }
    }

    /// Records that a start ran out of memory within its promise: raises the model's needs.
    pub fn short(&mut self, model: &Who, now: Duration) {
        let by = self.numbers.short;
        // Pinned models never give room to this one.
        let pinned =
            self.models.iter().filter(|(other, known)| known.spec.pin && *other != model && known.is_there());
        let room =
            self.capacity.minus(&pinned.fold(Amounts::none(), |sum, (_, known)| sum.plus(&known.promised)));
        let Some(known) =
            self.models.get_mut(model).filter(|known| matches!(known.state, State::Comes { .. }))
        else {
            return;
        };
        let before = known.raised;
        (known.raised, known.raised_at) = (before * by, now);
        if !room::fits(model, known, &room) {
            known.raised = before;
        }
    }

    /// Records that all processes of a model have ended, and it does not ask to be loaded.
    pub fn gone(&mut self, name: &Who) {
        if let Some(model) = self.models.get_mut(name) {
            // A model without a reading was not counted as having taken memory.
            let returned = if model.is_taking() { Amounts::none() } else { model.held() };
            model.state = State::Out;
            (model.promised, model.mapped, model.reading) = (Amounts::none(), 0, None);
            (model.gives, model.asked_back) = (false, None);
            (model.unread, model.remade, model.renewed, model.settles) = (true, None, None, None);
            model.places.clear();
            self.kept.retain(|(who, _)| who != name);
            self.since_others_came(|before| before.plus(&returned));
            self.returning.add(returned);
        }
    }

    /// Returns the promised memory that started or serving models have not taken yet; reserved although free.
    pub fn owed(&self) -> BTreeMap<Who, Amounts> {
        let there = self.models.iter().filter(|(_, model)| model.is_there());
        there.map(|(name, model)| (name.clone(), model.owed())).collect()
    }

    /// Records the total requests of each model. Frequent calls improve the estimate of the next request.
    pub fn note(&mut self, now: Duration, asked: impl Fn(&Who) -> u64) {
        for (name, model) in &mut self.models {
            model.demand.note(now, asked(name));
        }
    }
}
