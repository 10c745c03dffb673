//! Which models are loaded, on which GPUs, and which one is unloaded to make room for another. It does no I/O: the caller tells it
//! what happens, and it answers with orders.
//!
//! ```text
//!   wants ─> waits for room ──Load──> comes ──loaded──> serves ──Unload──> leaves ──gone──> out
//!               │  room: what nobody was promised, and what the drivers and the kernel have left
//!               └─ none? who costs people least leaves, one that leaks first; nobody who was loaded a moment ago and is in use
//! ```
//!
//! **A promise** is what a model was let in with: its needs by the book, until it was read, and then the most that it held. What it has not taken
//! yet of that is kept for it, whatever is free now.
//!
//! **Those who wait** are served in the order in which they came. A later one may go first only with room that an earlier one cannot use.
//! A model that was just loaded is left alone while it is in use, for some times as long as its load took; so each of those who wait has
//! its turn, and none waits longer than the turns of those before it.

mod demand;
mod evict;
mod room;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

pub use self::demand::Demand;
pub use self::room::Amounts;
use crate::ModelName;
use crate::book::Needs;

/// The numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// A model that is in use stays for so many times as long as its load took ...
    pub turn_loads: f64,
    /// ... but at least for this time ...
    pub turn_least: Duration,
    /// ... and at most for this one.
    pub turn_most: Duration,
    /// What a model that leaks is worth, as a share of what it would be: its next start is a cure, too.
    pub leaker: f64,
}

/// What is configured of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spec {
    /// What one process needs; `None`: not known, so it is let in, and counts with what it holds.
    pub needs: Option<Needs>,
    /// Processes.
    pub replicas: u32,
    /// The GPUs that it may be on; empty: any.
    pub gpus: Vec<usize>,
    /// It may be spread over several GPUs.
    pub may_split: bool,
    /// It never leaves for another one.
    pub pin: bool,
}

/// What is seen of a model at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Requests so far.
    pub asked: u64,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that are answered.
    pub in_flight: u32,
    /// Since when there is none of both.
    pub idle_for: Duration,
}

impl Seen {
    const fn is_in_use(&self) -> bool {
        self.waiting > 0 || self.in_flight > 0
    }
}

/// What all processes of a model hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of each memory, without the mapped file.
    pub held: Amounts,
    /// It leaks.
    pub leaks: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Start the processes of a model, each on these GPUs; none: on the host, or wherever its command says.
    Load {
        /// Whose.
        model: ModelName,
        /// The GPUs of each replica.
        places: Vec<Vec<usize>>,
    },
    /// Let a model's requests end, and stop it.
    Unload {
        /// Which.
        model: ModelName,
        /// Who wants its room.
        makes_room_for: ModelName,
    },
}

/// Where a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Out,
    /// Since when it wants to be loaded, and its place among those who do.
    Wants(u64),
    Comes {
        since: Duration,
    },
    Serves {
        since: Duration,
    },
    Leaves,
}

#[derive(Debug)]
struct Model {
    spec: Spec,
    state: State,
    demand: Demand,
    /// What it was promised.
    promised: Amounts,
    /// Bytes of its file that it maps, which the kernel counts as free although they are in use.
    mapped: u64,
    reading: Option<Reading>,
    /// What was free when it was let in.
    free_before: Option<Amounts>,
    load_time: Duration,
}

impl Model {
    const fn is_there(&self) -> bool {
        matches!(self.state, State::Comes { .. } | State::Serves { .. } | State::Leaves)
    }
}

/// All models of a fleet, as far as their memory goes.
#[derive(Debug)]
pub struct Loading {
    numbers: Numbers,
    /// What all of them may have.
    capacity: Amounts,
    models: BTreeMap<ModelName, Model>,
    wishes: u64,
}

impl Loading {
    /// Nobody is loaded.
    pub const fn new(numbers: Numbers, capacity: Amounts) -> Self {
        Self { numbers, capacity, models: BTreeMap::new(), wishes: 0 }
    }

    /// The models from now on. Those that are no longer there count until they are [gone](Self::gone).
    pub fn configure(&mut self, specs: impl IntoIterator<Item = (ModelName, Spec)>) {
        for (name, spec) in specs {
            if let Some(known) = self.models.get_mut(&name) {
                known.spec = spec;
                continue;
            }
            let new = Model {
                spec,
                state: State::Out,
                demand: Demand::default(),
                promised: Amounts::default(),
                mapped: 0,
                reading: None,
                free_before: None,
                load_time: Duration::ZERO,
            };
            self.models.insert(name, new);
        }
    }

    /// A model wants to be loaded. Nothing, if it does already or is.
    pub fn wants(&mut self, model: &ModelName) {
        self.wishes += 1;
        let place = self.wishes;
        if let Some(model) = self.models.get_mut(model).filter(|model| model.state == State::Out) {
            model.state = State::Wants(place);
        }
    }

    /// A model serves.
    pub fn loaded(&mut self, model: &ModelName, now: Duration) {
        if let Some(model) = self.models.get_mut(model)
            && let State::Comes { since } = model.state
        {
            model.load_time = now.saturating_sub(since);
            model.state = State::Serves { since: now };
        }
    }

    /// What a model's processes hold. Those that hold more than they were promised have it all the same.
    pub fn read(&mut self, model: &ModelName, reading: Reading) {
        if let Some(model) = self.models.get_mut(model).filter(|model| model.is_there()) {
            if matches!(model.state, State::Serves { .. }) && !reading.leaks {
                let before = model.reading.as_ref().map(|_| &model.promised);
                model.promised = before.map_or_else(|| reading.held.clone(), |most| most.max(&reading.held));
            }
            model.reading = Some(reading);
        }
    }

    /// None of a model's processes is there any more.
    pub fn gone(&mut self, model: &ModelName) {
        if let Some(model) = self.models.get_mut(model).filter(|model| model.is_there()) {
            model.state = State::Out;
            (model.promised, model.mapped, model.reading) = (Amounts::default(), 0, None);
        }
    }

    /// What is to be done now. `free`: what anybody could take, as it was read; `None` where that is not known.
    pub fn next(
        &mut self,
        now: Duration,
        free: Option<&Amounts>,
        seen: impl Fn(&ModelName) -> Seen,
    ) -> Vec<Order> {
        let seen: BTreeMap<ModelName, Seen> =
            self.models.keys().map(|name| (name.clone(), seen(name))).collect();
        for (name, model) in &mut self.models {
            model.demand.note(now, seen[name].asked);
        }
        let mut waiting: Vec<(u64, ModelName)> = self
            .models
            .iter()
            .filter_map(|(name, model)| match model.state {
                State::Wants(place) => Some((place, name.clone())),
                _ => None,
            })
            .collect();
        waiting.sort();
        let mut orders = Vec::new();
        // What earlier ones wait for is not given to later ones.
        let mut kept = Amounts::default();
        for (_, name) in waiting {
            let wish = Wish { name: &name, kept: &kept, free };
            let mut place = self.place(&wish, &[]);
            if matches!(place, Place::Nowhere) {
                for victim in self.leaving_for(&wish, now, &seen) {
                    if let Some(model) = self.models.get_mut(&victim) {
                        model.state = State::Leaves;
                    }
                    orders.push(Order::Unload { model: victim, makes_room_for: name.clone() });
                }
                place = self.place(&wish, &[]);
            }
            match place {
                Place::Now(places, promised) => {
                    self.let_in(&name, promised, now, free);
                    orders.push(Order::Load { model: name, places });
                }
                Place::Later(promised) => kept = kept.plus(&promised),
                Place::Nowhere => {}
            }
        }
        orders
    }

    fn let_in(&mut self, name: &ModelName, promised: Amounts, now: Duration, free: Option<&Amounts>) {
        if let Some(model) = self.models.get_mut(name) {
            let mapped = model.spec.needs.as_ref().map_or(0, |needs| needs.mapped);
            (model.promised, model.mapped) = (promised, mapped);
            model.free_before = free.cloned();
            model.state = State::Comes { since: now };
        }
    }
}

/// A model that waits for room.
struct Wish<'a> {
    name: &'a ModelName,
    /// What is kept for those who came before it.
    kept: &'a Amounts,
    /// What anybody could take now.
    free: Option<&'a Amounts>,
}

/// Whether there is room for a model.
enum Place {
    /// On these GPUs, with these promises.
    Now(Vec<Vec<usize>>, Amounts),
    /// When those who leave are gone.
    Later(Amounts),
    Nowhere,
}
