//! Other settings for a model that is there: it stays where it is if what it needs now fits there beside what the others have and were
//! promised, or is no more than it was promised itself. Else it leaves, and waits for room like everybody who is not loaded.

use std::time::Duration;

use super::room;
use super::state::{Model, State};
use super::{Amounts, Kept, Lacks, Loading, Order, Who};

/// No process of the model is started meanwhile, not even for one that died.
const STAY_TIMEOUT: Duration = Duration::from_secs(10);

/// What becomes of one with other settings.
enum Fate {
    Stays(Stays),
    /// There will be room when others have left.
    Waits,
    /// There is none: so much would be left for it.
    Leaves(Amounts),
}

struct Stays {
    /// The GPUs of each process.
    places: Vec<Vec<usize>>,
    promised: Amounts,
    /// It is too large by the book, and was promised everything.
    alone: bool,
    /// There is room for the old processes beside the new ones.
    beside: bool,
}

impl Loading {
    /// A model was told what it is from now on ([`Loading::set`]) and is about to make its processes anew. [`Loading::next`] says whether it
    /// may do that while it is loaded, within [`Numbers::stays_within`](super::Numbers). Nothing, if it is not.
    pub fn remade(&mut self, model: &Who, now: Duration) {
        if let Some(model) = self.models.get_mut(model) {
            model.remade = matches!(model.state, State::Comes { .. } | State::Serves { .. }).then_some(now);
        }
    }

    /// The processes of its other settings do not come: it has what it had, and may be made anew later.
    pub fn kept(&mut self, name: &Who) {
        if let Some(model) = self.models.get_mut(name).filter(|model| model.renewed.is_some()) {
            model.renewed = None;
            self.has_all(name);
        }
    }

    /// Those that wait for what others have that leave, and what they need beyond what they have: nobody who came later gets it.
    pub(super) fn kept_for_remade(&self) -> Kept {
        let waiting = self.models.iter().filter(|(_, model)| model.remade.is_some());
        let needs = |(who, model): (&Who, &Model)| {
            let room = self.capacity.clone();
            let (_, needed) = room::fit_at(who, model, &model.places, &room, self.numbers.make_room)?;
            Some((who.clone(), needed.minus(&own(model))))
        };
        waiting.filter_map(needs).collect()
    }

    /// Says so.
    pub(super) fn renew(&mut self, now: Duration, free: Option<&Amounts>) -> Vec<Order> {
        let remade: Vec<(Who, Duration)> =
            self.models.iter().filter_map(|(who, model)| Some((who.clone(), model.remade?))).collect();
        remade.into_iter().filter_map(|(who, since)| self.renew_one(who, since, now, free)).collect()
    }

    fn renew_one(
        &mut self,
        who: Who,
        since: Duration,
        now: Duration,
        free: Option<&Amounts>,
    ) -> Option<Order> {
        let waited = now.saturating_sub(since) >= STAY_TIMEOUT;
        match self.fate(&who, free)? {
            Fate::Waits if !waited => None,
            Fate::Stays(Stays { places, promised, alone, beside }) => {
                let before = free.map(|free| self.free_before_taking(free));
                let model = self.models.get_mut(&who)?;
                // Until its processes are new ones the old ones have what they have.
                let has = has(model);
                if !model.is_taking() {
                    // What the old ones have is part of what it is promised, whether they go first or not.
                    let held = model.held();
                    self.before = before.map(|before| before.plus(&held));
                    // A load may take as long as the last one did, and not go well: others must not wait for that for ever.
                    let load = self.numbers.turn_most.max(model.load_time.saturating_mul(2));
                    model.settles = Some(now.saturating_add(load.min(self.numbers.short_for)));
                }
                let both = if beside { promised.plus(&has) } else { promised.max(&has) };
                (model.promised, model.renewed) = (both, Some(promised));
                model.renewed_until = now.saturating_add(self.numbers.short_for);
                (model.mapped, model.alone) = (room::mapped(model).host.max(model.mapped), alone);
                (model.remade, model.places) = (None, places.clone());
                Some(Order::Stay { model: who, places, beside })
            }
            Fate::Waits => {
                let left = self.left_without(&who, free);
                self.leave(who, left)
            }
            Fate::Leaves(left) => self.leave(who, left),
        }
    }

    fn leave(&mut self, who: Who, left: Amounts) -> Option<Order> {
        let lacks = Lacks { needed: room::needed(self.models.get(&who)?), left, company: false };
        self.part(&who);
        Some(Order::Anew { model: who, lacks })
    }

    /// What there would be for a model if all that leave, and it, were gone.
    fn left_without(&self, who: &Who, free: Option<&Amounts>) -> Amounts {
        self.ledger(free, &[who]).soon.minus(&room::kept_for_others(&self.kept, who))
    }

    /// Whether a model with other settings may be made anew beside all that are there, its own old processes included.
    pub(super) fn stays_beside_all(&self, who: &Who, free: Option<&Amounts>) -> bool {
        matches!(self.fate(who, free), None | Some(Fate::Stays(Stays { beside: true, .. })))
    }

    fn fate(&self, who: &Who, free: Option<&Amounts>) -> Option<Fate> {
        let model = self.models.get(who)?;
        let soon = self.left_without(who, free);
        let taken: Vec<Vec<usize>> = model.places.iter().take(room::replicas(model)).cloned().collect();
        let may_be_on = |place: &Vec<usize>| {
            model.spec.gpus.is_empty() || place.iter().all(|gpu| model.spec.gpus.contains(gpu))
        };
        if !taken.iter().all(may_be_on) {
            return Some(Fate::Leaves(soon));
        }
        let fit = |room: &Amounts| room::fit_at(who, model, &taken, room, self.numbers.make_room);
        let of_file = Amounts { host: model.mapped, gpus: vec![0; self.capacity.gpus.len()] };
        let stays = |(places, promised): (Vec<Vec<usize>>, Amounts), room: &Amounts| {
            // Both map the same file, unless it is another one.
            let both = promised.plus(&has(model)).plus(&of_file.max(&room::mapped(model)));
            Fate::Stays(Stays { places, promised, alone: false, beside: both.is_within(room) })
        };
        // What others have that leave is not there yet.
        let now = self.left(free).plus(&own(model)).plus(&of_file).min(&soon);
        // No more than it was promised: that is its own, whoever waits.
        if let Some(fits) = fit(&now).or_else(|| fit(&model.promised.plus(&of_file))) {
            return Some(stays(fits, &now));
        }
        if fit(&soon).is_some() {
            return Some(Fate::Waits);
        }
        let is_alone = !self.models.iter().any(|(other, model)| other != who && model.is_there());
        if !is_alone || model.spec.can_do_with_less {
            return Some(Fate::Leaves(soon));
        }
        // Nobody would leave for it. Where it is not too large for other GPUs it goes there.
        match (fit(&self.capacity), room::fits(who, model, &self.capacity)) {
            (Some(fits), _) => Some(stays(fits, &now)),
            (None, true) => Some(Fate::Leaves(soon)),
            (None, false) => {
                let mut places = taken;
                places.resize(room::replicas(model), Vec::new());
                let promised = self.capacity.clone();
                Some(Fate::Stays(Stays { places, promised, alone: true, beside: false }))
            }
        }
    }
}

/// What a model has, as far as is known; processes by settings that were others a moment ago may be taking what these needed.
fn has(model: &Model) -> Amounts {
    match &model.reading {
        Some(reading) if model.renewed.is_none() => reading.held.clone(),
        _ => own(model),
    }
}

/// What a model has and was promised, which is free for it itself.
fn own(model: &Model) -> Amounts {
    model.promised.max(&model.held())
}
