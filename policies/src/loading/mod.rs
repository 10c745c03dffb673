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
mod give_back;
mod room;
pub mod simulate;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

pub use self::demand::Demand;
use self::give_back::Giving;
pub use self::room::{Amounts, Never};
use crate::book::Needs;
use crate::{ModelName, units};

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

/// A model. One that was removed and has come again with the same name is another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Who {
    /// Its name.
    pub name: ModelName,
    /// Which of those that have had it.
    pub life: u64,
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
    /// Models that are not loaded while it is.
    pub never_with: Vec<ModelName>,
    /// Models that are loaded along with it, and do not leave for another one while it is there.
    pub with: Vec<ModelName>,
    /// It goes when nobody has asked for it for so long, even if it is pinned.
    pub ttl: Option<Duration>,
    /// If this is too much, it can be started with less: then it is not tried.
    pub can_do_with_less: bool,
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
    /// What its conversations would have to evaluate again if they went on after it had been unloaded.
    pub conversations: Duration,
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
    /// What they hold of GPUs is not known: it counts as what they were promised.
    pub gpus_unknown: bool,
    /// It leaks.
    pub leaks: bool,
    /// Its processes can be asked to give back what they hoard.
    pub can_give: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Start the processes of a model, each on these GPUs; none: on the host, or wherever its command says.
    Load {
        /// Whose.
        model: Who,
        /// The GPUs of each replica.
        places: Vec<Vec<usize>>,
    },
    /// Let a model's requests end, and stop it.
    Unload {
        /// Which.
        model: Who,
        /// Who wants its room.
        makes_room_for: Who,
    },
    /// Have a model ask to be loaded, because another one is; its room is kept.
    Call {
        /// Which.
        model: Who,
    },
    /// Ask a model's processes for what they hoard, while they serve.
    GiveBack {
        /// Which.
        model: Who,
    },
}

/// Where a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Out,
    /// It is to come along with another one, and has not asked yet.
    Called {
        since: Duration,
    },
    Wants {
        /// Among those who do.
        place: u64,
        /// Others leave for it even if nobody waits.
        urgent: bool,
    },
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
    /// It was let in although it is too large by the book: what it was promised is everything.
    alone: bool,
    load_time: Duration,
    /// It was on its way out when another one was loaded that it is loaded along with.
    comes_again: bool,
    /// It was asked to give memory back, and has not answered.
    gives: bool,
    /// When it was asked last.
    asked_back: Option<Duration>,
    /// What it needs as a multiple of what was thought, since its start found too little.
    raised: f64,
    /// Since when.
    raised_at: Duration,
}

impl Model {
    fn new(spec: Spec) -> Self {
        Self {
            spec,
            state: State::Out,
            demand: Demand::default(),
            promised: Amounts::none(),
            mapped: 0,
            reading: None,
            free_before: None,
            alone: false,
            load_time: Duration::ZERO,
            comes_again: false,
            gives: false,
            asked_back: None,
            raised: 1.0,
            raised_at: Duration::ZERO,
        }
    }

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
    models: BTreeMap<Who, Model>,
    wishes: u64,
    /// What the last look kept for those who wait.
    kept: Kept,
}

impl Loading {
    /// Nobody is loaded, and nothing is known of the machine: it may have everything.
    pub const fn new(numbers: Numbers) -> Self {
        let kept = Kept::new();
        Self { numbers, capacity: Amounts::everything(), models: BTreeMap::new(), wishes: 0, kept }
    }

    /// Other numbers.
    pub fn set_numbers(&mut self, numbers: Numbers) {
        self.numbers = numbers;
    }

    /// Those who wait for room, with what all processes of each need where that is known, on one GPU each, and what is left: neither
    /// promised nor, by `free`, taken by anybody.
    pub fn waiting(&self, free: Option<&Amounts>) -> Vec<(Who, Option<Amounts>, Amounts)> {
        let waiting = self.models.iter().filter(|(_, model)| matches!(model.state, State::Wants { .. }));
        waiting.map(|(who, model)| (who.clone(), room::needed(model), self.left(free))).collect()
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
                    (known.reading, known.raised) = (None, 1.0);
                }
                known.spec = spec;
            }
            None => drop(self.models.insert(model.clone(), Model::new(spec))),
        }
    }

    /// A model is no longer configured, and nothing of it is there.
    pub fn forget(&mut self, model: &Who) {
        self.models.remove(model);
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
            _ => false,
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

    /// A model serves.
    pub fn loaded(&mut self, model: &Who, now: Duration) {
        if let Some(model) = self.models.get_mut(model)
            && let State::Comes { since } = model.state
        {
            (model.load_time, model.raised) = (now.saturating_sub(since), 1.0);
            model.state = State::Serves { since: now };
        }
    }

    /// What a model's processes hold. Those that hold more than they were promised have it all the same.
    pub fn read(&mut self, model: &Who, mut reading: Reading) {
        if let Some(model) = self.models.get_mut(model).filter(|model| model.is_there()) {
            if reading.gpus_unknown {
                reading.held.gpus.clone_from(&model.promised.gpus);
            }
            if matches!(model.state, State::Serves { .. }) && !reading.leaks {
                let measured = model.spec.needs.as_ref().is_some_and(|needs| needs.measured.gpu.is_some());
                if std::mem::take(&mut model.alone) {
                    // It was too large by the book, and is not.
                    model.promised = Amounts::none();
                } else if model.reading.is_none() && !measured {
                    // What is allocated on a GPU is taken at once, so the reading is better than the plan. On the host it is taken when it is
                    // used for the first time.
                    model.promised.gpus.clear();
                }
                model.promised = model.promised.max(&reading.held);
            }
            model.reading = Some(reading);
        }
    }

    /// A model is on its way out by itself: nobody asks for it, or an operator drains it.
    pub fn leaves(&mut self, model: &Who) {
        if let Some(model) = self.models.get_mut(model).filter(|model| model.is_there()) {
            model.state = State::Leaves;
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
    pub fn gone(&mut self, model: &Who) {
        if let Some(model) = self.models.get_mut(model) {
            model.state = State::Out;
            (model.promised, model.mapped, model.reading) = (Amounts::none(), 0, None);
            (model.gives, model.asked_back) = (false, None);
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

    /// What is to be done now. `free`: what anybody could take, as it was read; `None` where that is not known.
    pub fn next(&mut self, now: Duration, free: Option<&Amounts>, seen: impl Fn(&Who) -> Seen) -> Vec<Order> {
        let seen: BTreeMap<Who, Seen> = self.models.keys().map(|name| (name.clone(), seen(name))).collect();
        for (name, model) in &mut self.models {
            model.demand.note(now, seen[name].asked);
            if model.raised > 1.0 && now.saturating_sub(model.raised_at) >= self.numbers.short_for {
                // Somebody else may have had the memory, and has it no more.
                model.raised = 1.0;
            }
        }
        let mut waiting: Vec<(u64, Who, bool)> = self
            .models
            .iter()
            .filter_map(|(name, model)| match model.state {
                State::Wants { place, urgent } => {
                    Some((place, name.clone(), urgent || seen[name].waiting > 0))
                }
                _ => None,
            })
            .collect();
        waiting.sort();
        let mut orders = Vec::new();
        // What earlier ones wait for is not given to later ones.
        orders.extend(self.call_again(now));
        let mut kept = self.kept_for_called(now, free);
        // Nobody leaves for those who came after one that waits for others' turns to end: it would never find all of them ended.
        let mut blocked = false;
        for (number, name, urgent) in waiting {
            let mut party = self.party(&name);
            // What is kept for them already is kept once.
            party.retain(|who| !kept.iter().any(|(known, _)| known == who));
            let unpinned = self.unpinned();
            let unpinned: Vec<&Who> = unpinned.iter().collect();
            let alone = Wish { name: &name, kept: &kept, free, party: &[] };
            if !party.is_empty()
                && matches!(self.place(&Wish { party: &party, ..alone }, &unpinned), Place::Nowhere)
            {
                // Somebody else has the room of its company.
                party.clear();
            }
            let wish = Wish { party: &party, ..alone };
            let mut place = self.place(&wish, &[]);
            if urgent && !blocked && matches!(place, Place::Nowhere) {
                match self.giving_for(&wish, now) {
                    Giving::Asked(asked) => {
                        orders.extend(asked.into_iter().map(|model| Order::GiveBack { model }));
                    }
                    Giving::Awaited => {}
                    Giving::Nobody => {
                        for victim in self.leaving_for(&wish, now, &seen) {
                            if let Some(model) = self.models.get_mut(&victim) {
                                model.state = State::Leaves;
                            }
                            orders.push(Order::Unload { model: victim, makes_room_for: name.clone() });
                        }
                        place = self.place(&wish, &[]);
                    }
                }
            }
            match place {
                Place::Now(places, promised, guests) => {
                    self.let_in(&name, promised, now, free);
                    orders.push(Order::Load { model: name, places });
                    kept.extend(guests);
                    orders.extend(self.call(party, now));
                }
                Place::Later(promised, guests) => {
                    kept.push((name, promised));
                    kept.extend(guests);
                }
                Place::Nowhere if urgent && !blocked => {
                    if let Place::Later(promised, guests) | Place::Now(_, promised, guests) =
                        self.place(&wish, &unpinned)
                    {
                        kept.push((name, promised));
                        kept.extend(guests);
                        blocked = true;
                    }
                }
                // It came guests with another one and missed its room: it waits like all others.
                Place::Nowhere if number == 0 => self.wait_in_line(&name),
                Place::Nowhere => {}
            }
        }
        self.kept = kept;
        orders
    }

    fn unpinned(&self) -> Vec<Who> {
        let there = self.models.iter().filter(|(_, model)| model.is_there() && !model.spec.pin);
        there.map(|(who, _)| who).filter(|who| !self.is_held(who)).cloned().collect()
    }

    fn let_in(&mut self, name: &Who, promised: Amounts, now: Duration, free: Option<&Amounts>) {
        let alone = promised == self.capacity;
        if let Some(model) = self.models.get_mut(name) {
            let mapped = model.spec.needs.as_ref().map_or(0, |needs| needs.mapped);
            (model.promised, model.mapped, model.alone) = (promised, mapped, alone);
            model.free_before = free.cloned();
            model.state = State::Comes { since: now };
        }
    }
}

/// What is kept for whom.
type Kept = Vec<(Who, Amounts)>;

/// A model that waits for room.
#[derive(Clone, Copy)]
struct Wish<'a> {
    name: &'a Who,
    /// What is kept for those who came before it, and perhaps for itself.
    kept: &'a [(Who, Amounts)],
    /// What anybody could take now.
    free: Option<&'a Amounts>,
    /// Who is to be loaded along with it.
    party: &'a [Who],
}

/// Whether there is room for a model.
enum Place {
    /// On these GPUs, with these promises, and with so much for those who come along.
    Now(Vec<Vec<usize>>, Amounts, Kept),
    /// When those who leave are gone, with so much for those who come along.
    Later(Amounts, Kept),
    Nowhere,
}
