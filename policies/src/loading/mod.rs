//! Which models are loaded, on which GPUs, and which one is unloaded to make room for another. It does no I/O: the caller tells it
//! what happens, and it answers with orders.
//!
//! ```text
//!   wants ─> waits for room ──Load──> comes ──loaded──> serves ──Unload──> leaves ──gone──> out
//!               │  room: what nobody was promised, and what the drivers and the kernel have left
//!               └─ none? who hoards gives back, if that does; else who costs people least leaves, one that leaks first; nobody who
//!                  was loaded a moment ago and is in use
//! ```
//!
//! **A promise** is what a model was let in with: its needs by the book, until it was read, and then the most that it held. What it has not taken
//! yet of that is kept for it, whatever is free now.
//!
//! **Those who wait** are served in the order in which they came. A later one may go first only with room that an earlier one cannot use.
//! A model that was just loaded is left alone while it is in use, for some times as long as its load took; so each of those who wait has
//! its turn, and none waits longer than the turns of those before it.

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

/// The numbers. Reasons: `defaults.toml`, section `[loading]`.
pub type Numbers = crate::defaults::Loading;

impl Numbers {
    /// What models may have of a host with so many bytes.
    pub fn left_of_host(&self, bytes: u64) -> u64 {
        units::scale(bytes, 1.0 - self.host_kept)
    }

    /// What they may have of a GPU with so many.
    pub fn left_of_gpu(&self, bytes: u64) -> u64 {
        units::scale(bytes, 1.0 - self.gpu_kept)
    }
}

/// All models of a fleet, as far as their memory goes.
#[derive(Debug)]
pub struct Loading {
    numbers: Numbers,
    /// What all of them may have.
    capacity: Amounts,
    models: BTreeMap<Who, Model>,
    wishes: u64,
    /// What the last look kept for those who wait.
    kept: Kept,
    /// What would be free if those that are taking their memory had nothing of it yet.
    before: Option<Amounts>,
    /// What those held that are gone, as long as it is not free again.
    returning: Returning,
    /// What of it comes back by itself; as long as it is looked for room.
    comes_back: Option<Amounts>,
}

impl Loading {
    /// Nobody is loaded, and nothing is known of the machine: it may have everything.
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

    /// Other numbers.
    pub fn set_numbers(&mut self, numbers: Numbers) {
        self.numbers = numbers;
    }

    /// Those who wait for room, and what for.
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

    /// What all of them may have from now on.
    pub fn set_capacity(&mut self, capacity: Amounts) {
        self.capacity = capacity;
    }

    /// What is configured of a model from now on.
    pub fn set(&mut self, model: &Who, spec: Spec) {
        match self.models.get_mut(model) {
            Some(known) => {
                if (&known.spec.needs, known.spec.replicas, &known.spec.gpus)
                    != (&spec.needs, spec.replicas, &spec.gpus)
                {
                    // Its next reading says what it holds now; what was thought of its needs was of others.
                    (known.unread, known.raised) = (true, 1.0);
                }
                known.spec = spec;
            }
            None => drop(self.models.insert(model.clone(), Model::new(spec))),
        }
    }

    /// A model is no longer configured, and nothing of it is there.
    pub fn forget(&mut self, model: &Who) {
        self.models.remove(model);
        self.kept.retain(|(who, _)| who != model);
    }

    /// A model wants to be loaded. With `urgent` others leave for it even if nobody waits for it. Nothing, if it is loaded.
    pub fn wants(&mut self, model: &Who, urgent: bool) {
        self.wishes += 1;
        let place = self.wishes;
        let Some(model) = self.models.get_mut(model) else { return };
        match &mut model.state {
            State::Out => model.state = State::Wants { place, urgent },
            // Its room is kept, so it needs nobody to leave.
            State::Called { .. } => model.state = State::Wants { place: 0, urgent },
            State::Wants { urgent: known, .. } => *known |= urgent,
            State::Comes { .. } | State::Serves { .. } | State::Leaves => {}
        }
    }

    /// Whether anybody waits for room: then [`Self::next`] may have something to say.
    pub fn is_moving(&self) -> bool {
        let moves = |model: &Model| match model.state {
            State::Wants { .. } | State::Called { .. } => true,
            State::Out => model.comes_again,
            _ => model.remade.is_some(),
        };
        self.models.values().any(moves)
    }

    /// Whether that may be soon: somebody leaves or comes, or requests wait, by what is seen.
    pub fn is_hurried(&self, seen: impl Fn(&Who) -> Seen) -> bool {
        let hurries = |(who, model): (&Who, &Model)| match model.state {
            State::Wants { urgent, .. } => urgent || seen(who).waiting > 0,
            State::Comes { .. } | State::Leaves => true,
            State::Out | State::Called { .. } | State::Serves { .. } => false,
        };
        self.is_moving() && self.models.iter().any(hurries)
    }

    /// Whether what an ended process held is not seen to be free yet: it may be at any moment, and somebody waits for it.
    pub fn awaits_memory(&self) -> bool {
        self.returning.is_awaited()
    }

    /// A model serves.
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

    /// Somebody else had loaded a model before we were there, each process on these GPUs: what it holds is known by its next
    /// reading.
    pub fn inherited(&mut self, name: &Who, places: Vec<Vec<usize>>, now: Duration) {
        if let Some(model) = self.models.get_mut(name) {
            let until = now.saturating_add(self.numbers.first_reading);
            (model.state, model.settles) = (State::Serves { since: now }, Some(until));
            model.places = places;
        }
    }

    /// It is known what a model has taken that was loaded a moment ago.
    fn has_taken(&mut self, model: &Who, held: &Amounts) {
        if self.models.get_mut(model).is_some_and(|model| model.settles.take().is_some()) {
            self.since_others_came(|before| before.minus(held));
        }
    }

    /// It will not be read any more, or in time: it has what it had, or what it was promised.
    fn has_all(&mut self, name: &Who) {
        if let Some(model) = self.models.get_mut(name).filter(|model| model.settles.is_some()) {
            let promised = || Reading { held: model.promised.clone(), ..Reading::default() };
            let held = model.reading.get_or_insert_with(promised).held.clone();
            self.has_taken(name, &held);
        }
    }

    /// One that comes was not read yet, and goes: it has what is missing since the first of those who come, at most its promise.
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

    /// What would be free if those that are taking their memory had nothing of it yet. The first of them has it as it is.
    fn free_before_taking(&self, free: &Amounts) -> Amounts {
        let before = self.before.as_ref().filter(|_| self.models.values().any(Model::is_taking));
        before.map_or_else(|| free.clone(), |before| before.max(free))
    }

    /// Of what was free when the first of those came that are taking their memory, this much is somebody's by now, or is free again: what is
    /// missing beside that they have taken.
    fn since_others_came(&mut self, change: impl Fn(&Amounts) -> Amounts) {
        self.before = self.before.as_ref().map(change);
    }

    /// It is on its way out from now on.
    fn part(&mut self, who: &Who) {
        self.has_all(who);
        self.has_what_vanished(who);
        if let Some(model) = self.models.get_mut(who) {
            (model.state, model.remade) = (State::Leaves, None);
        }
    }

    /// What a model's processes hold. Those that hold more than they were promised have it all the same.
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
                    // It was too large by the book, and is not.
                    model.promised = Amounts::none();
                } else if first && !measured {
                    // What is allocated on a GPU is taken at once, so the reading is better than the plan. On the host it is taken when it is
                    // used for the first time.
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

    /// A model is on its way out by itself: nobody asks for it, or an operator drains it.
    pub fn leaves(&mut self, model: &Who) {
        if self.models.get(model).is_some_and(Model::is_there) {
            self.part(model);
        }
    }

    /// A model found too little memory when it started, though its promise was kept: it needs more than was thought.
    pub fn short(&mut self, model: &Who, now: Duration) {
        let by = self.numbers.short;
        // What never leaves is never room for it, whatever it needs.
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

    /// None of a model's processes is there any more, and it does not want to be loaded.
    pub fn gone(&mut self, name: &Who) {
        if let Some(model) = self.models.get_mut(name) {
            // What one had that was not read yet was not counted as taken.
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

    /// What models that come or serve were promised and have not taken yet: free, and nobody else's to have.
    pub fn owed(&self) -> BTreeMap<Who, Amounts> {
        let there = self.models.iter().filter(|(_, model)| model.is_there());
        there.map(|(name, model)| (name.clone(), model.owed())).collect()
    }

    /// Requests so far, by model, so that it is known when there were how many. The more often this is called the better.
    pub fn note(&mut self, now: Duration, asked: impl Fn(&Who) -> u64) {
        for (name, model) in &mut self.models {
            model.demand.note(now, asked(name));
        }
    }
}
