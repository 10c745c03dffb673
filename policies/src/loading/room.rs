//! Computes free room and fits models into it.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    LoadWish, LoadedModel, LoadingState, MemoryAmounts, ModelId, ModelLoadState, Placement, Reservations,
};
use crate::book::{self, MachineCapacity, MemoryNeeds, PlacementRequest};
use crate::{ModelName, units};

/// Reason for which pinned models keep another model from being loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadRefusal {
    /// The model must not be loaded next to these pinned models.
    Excluded(Vec<ModelName>),
    /// Pinned models fill `loading.max_loaded`.
    Count {
        /// Pinned models.
        pinned: Vec<ModelName>,
        /// Value of `loading.max_loaded`.
        most: u32,
    },
    /// Pinned models leave too little memory.
    Room {
        /// Bytes needed.
        needed: MemoryAmounts,
        /// Bytes left.
        left: MemoryAmounts,
        /// Pinned models.
        pinned: Vec<ModelName>,
    },
}

pub(super) struct RoomBalance {
    pub(super) now: MemoryAmounts,
    pub(super) soon: MemoryAmounts,
}

impl RoomBalance {
    fn compute(
        models: &BTreeMap<ModelId, LoadedModel>,
        capacity: &MemoryAmounts,
        before: Option<&MemoryAmounts>,
        (free, returning): (Option<&MemoryAmounts>, Option<&MemoryAmounts>),
        leave: &[&ModelId],
    ) -> Self {
        let known = || models.iter().filter(|(_, model)| model.is_there());
        let goes = |name: &ModelId, model: &LoadedModel| {
            model.state == ModelLoadState::Leaves || leave.contains(&name)
        };
        let there = || known().map(|(_, model)| model);
        let stays = || known().filter(|(name, model)| !goes(name, model)).map(|(_, model)| model);
        let leaves = || known().filter(|(name, model)| goes(name, model)).map(|(_, model)| model);
        let all = |models: &mut dyn Iterator<Item = &LoadedModel>,
                   of: &dyn Fn(&LoadedModel) -> MemoryAmounts| {
            models.fold(MemoryAmounts::default(), |sum, model| sum.plus(&of(model)))
        };
        let of_file = |model: &LoadedModel| MemoryAmounts { host: model.admitted.mapped, gpus: Vec::new() };
        let promised = |model: &LoadedModel| model.admitted.promised.plus(&of_file(model));
        let held = LoadedModel::held;
        // The kernel counts the pages of a mapped file as free, so reserve the file's size, too.
        let owed = |model: &LoadedModel| model.untaken_promise().plus(&of_file(model));
        // A model with new settings will hold the memory of its new promise.
        let will = |model: &LoadedModel| {
            model.renewal.promise.as_ref().unwrap_or(&model.admitted.promised).plus(&of_file(model))
        };
        let mut now = capacity.minus(&all(&mut there(), &promised));
        let mut soon = capacity.minus(&all(&mut stays(), &will));
        if let Some(free) = free {
            let comes = || there().filter(|model| model.is_taking());
            // Memory that vanished since the starts began counts as taken by them. If another program took
            // it, a start fails and reports the shortage.
            let before = before.unwrap_or(free);
            let not_taken = all(&mut comes(), &|model| model.admitted.promised.clone());
            let taken = before.minus(free).min(&not_taken);
            let serves = || stays().filter(|model| !model.is_taking());
            let files = all(&mut comes(), &of_file);
            let owed = all(&mut serves(), &owed).plus(&files).plus(&not_taken.minus(&taken));
            now = now.min(&free.minus(&owed));
            // During a start, free memory does not show how much will be left: unload no model for it.
            if comes().next().is_none() {
                let returns = all(&mut leaves(), &held);
                let returns = returning.map_or_else(|| returns.clone(), |gone| returns.plus(gone));
                soon = soon.min(&free.plus(&returns).minus(&owed));
            }
        }
        Self { now, soon }
    }
}

impl LoadedModel {
    pub(super) fn stays_for_good(&self) -> bool {
        self.spec.pin && self.spec.ttl.is_none() && matches!(self.state, ModelLoadState::Serves { .. })
    }

    pub(super) fn held(&self) -> MemoryAmounts {
        self.measured.reading.as_ref().map(|reading| reading.held.clone()).unwrap_or_default()
    }

    /// Returns the promised memory that the model has not taken yet, and that therefore still shows as free.
    pub(super) fn untaken_promise(&self) -> MemoryAmounts {
        self.admitted.promised.minus(&self.held())
    }
}

pub(super) fn kept_for_others(kept: &[(ModelId, MemoryAmounts)], name: &ModelId) -> MemoryAmounts {
    let others = kept.iter().filter(|(who, _)| who != name);
    others.fold(MemoryAmounts::none(), |sum, (_, amounts)| sum.plus(amounts))
}

impl LoadingState {
    /// Returns the memory left, as if the models in `leave` were being unloaded, too.
    pub(super) fn room_balance(&self, free: Option<&MemoryAmounts>, leave: &[&ModelId]) -> RoomBalance {
        let free = (free, self.returning_soon.as_ref());
        RoomBalance::compute(&self.models.all, &self.capacity, self.free_before_starts.as_ref(), free, leave)
    }

    /// Finds room for a model next to the reservations of others, as if those in `leave` were being unloaded.
    pub(super) fn find_place(&self, wish: &LoadWish<'_>, leave: &[&ModelId]) -> Placement {
        let LoadWish { name, kept, free, party } = *wish;
        let Some(model) = self.models.all.get(name) else { return Placement::Nowhere };
        let company = self.models.compatibility(wish, leave, self.numbers.max_loaded);
        if company == Compatibility::Bad {
            return Placement::Nowhere;
        }
        // The model may use its own reservation.
        let others = || kept.iter().filter(|(who, _)| who != name);
        // Predictions may be wrong: a model that is predicted to be too large may still try, with all memory.
        let members = self.models.members(party);
        let fit = |room: &MemoryAmounts| fit_with((name, model), &members, room, self.numbers.make_room);
        let Some((alone, needed, guests)) = fit(&self.capacity) else {
            if model.spec.can_do_with_less {
                return Placement::Nowhere;
            }
            let stays = |other: &ModelId, model: &LoadedModel| model.is_staying() && !leave.contains(&other);
            return if self.models.all.iter().any(|(other, model)| stays(other, model)) {
                Placement::Nowhere
            } else if self.models.all.values().any(LoadedModel::is_there) || others().next().is_some() {
                Placement::Later(self.capacity.clone(), Vec::new())
            } else {
                Placement::Now(vec![Vec::new(); replicas(model)], self.capacity.clone(), Vec::new())
            };
        };
        let ledger = self.room_balance(free, leave);
        // Other models' reservations count against the memory left once models being unloaded are gone.
        let soon = ledger.soon.minus(&kept_for_others(kept, name));
        if let Some((places, promised, guests)) =
            fit(&ledger.now.min(&soon)).filter(|_| company == Compatibility::Good)
        {
            return Placement::Now(places, promised, guests);
        }
        if let Some((_, promised, guests)) = fit(&soon) {
            return Placement::Later(promised, guests);
        }
        // No model is loaded, so another program holds the memory: try the start anyway.
        if !self.models.all.values().any(LoadedModel::is_there) && others().next().is_none() {
            return Placement::Now(alone, needed, guests);
        }
        Placement::Nowhere
    }
}

impl LoadingState {
    /// Returns true if a model has no room even without all `mobile` models, ignoring measured free memory.
    fn is_hopeless(&self, name: &ModelId, mobile: &[&ModelId]) -> bool {
        let wish = LoadWish { name, kept: &[], free: None, party: &[] };
        matches!(self.find_place(&wish, mobile), Placement::Nowhere)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Compatibility {
    Good,
    /// Compatible once models that are being unloaded are gone.
    Soon,
    Bad,
}

/// Returns the bytes that all processes of a model need, if each uses one GPU; `None` if unknown.
pub(super) fn needed_bytes(model: &LoadedModel) -> Option<MemoryAmounts> {
    let needs = scaled_needs(model.spec.needs.as_ref()?, model.raised.factor);
    let count = replicas(model) as u64;
    let host = needs.host_bytes().saturating_mul(count).saturating_add(needs.mapped);
    let gpus = if needs.uses_gpu() { vec![needs.gpu_bytes(1).saturating_mul(count)] } else { Vec::new() };
    Some(MemoryAmounts { host, gpus })
}

impl LoadingState {
    /// Returns the memory that is neither promised nor in use.
    pub(super) fn room_left(&self, free: Option<&MemoryAmounts>) -> MemoryAmounts {
        self.room_balance(free, &[]).now
    }

    /// Returns the models that are loaded, or could be loaded without unloading any model but guests.
    pub fn models_with_room(&self, free: Option<&MemoryAmounts>) -> BTreeSet<ModelId> {
        let has_room = |who: &ModelId, model: &LoadedModel| match model.state {
            ModelLoadState::Comes { .. } | ModelLoadState::Serves { .. } => true,
            ModelLoadState::Leaves => false,
            ModelLoadState::Out | ModelLoadState::Called { .. } | ModelLoadState::Wants { .. } => {
                let wish = LoadWish { name: who, kept: &self.kept, free, party: &[] };
                // Guests do not count, because they are unloaded for any other model.
                matches!(self.find_place(&wish, &[]), Placement::Now(..))
                    || !self.guests_leaving_for(&wish).is_empty()
            }
        };
        let roomy = self.models.all.iter().filter(|(who, model)| has_room(who, model));
        roomy.map(|(who, _)| who.clone()).collect()
    }

    /// Returns the models that pinned models keep from being loaded and that cannot start with less memory.
    pub fn refused_models(&self) -> BTreeSet<ModelId> {
        let all = self.models.all.iter();
        let out = all.filter(|(_, model)| !model.is_there() && !model.spec.can_do_with_less);
        let mobile = self.models.movable_models();
        out.filter(|(who, _)| self.is_hopeless(who, &mobile)).map(|(who, _)| who.clone()).collect()
    }

    /// Returns the waiting models that can never be loaded, with the reasons.
    pub fn hopeless_models(&self) -> Vec<(ModelId, LoadRefusal)> {
        let waits = |model: &LoadedModel| matches!(model.state, ModelLoadState::Wants { .. });
        let waiting = self.models.all.iter().filter(|(_, model)| waits(model));
        let mobile = self.models.movable_models();
        let left = self.room_balance(None, &mobile).soon;
        let refusal = |who, model| self.models.refusal_reason(who, model, self.numbers.max_loaded, &left);
        let hopeless = waiting.filter(|(who, _)| self.is_hopeless(who, &mobile));
        hopeless.map(|(who, model)| (who.clone(), refusal(who, model))).collect()
    }
}

pub(super) fn fits(name: &ModelId, model: &LoadedModel, room: &MemoryAmounts) -> bool {
    fit(name, model, room, true).is_some()
}

pub(super) fn replicas(model: &LoadedModel) -> usize {
    usize::try_from(model.spec.replicas.max(1)).unwrap_or(usize::MAX)
}

fn scaled_needs(needs: &MemoryNeeds, by: f64) -> MemoryNeeds {
    let mut raised = needs.clone();
    if by > 1.0 {
        raised.measured.host = Some(units::scale_bytes(needs.host_bytes(), by));
        if needs.uses_gpu() {
            raised.measured.gpu = Some((units::scale_bytes(needs.gpu_bytes(1), by), 1));
        }
    }
    raised
}

/// Returns the mapped bytes of the model file, which are not part of the promise.
pub(super) fn mapped_bytes(model: &LoadedModel) -> MemoryAmounts {
    MemoryAmounts { host: model.spec.needs.as_ref().map_or(0, |needs| needs.mapped), gpus: Vec::new() }
}

/// Places all processes of a model; returns their GPUs, the promise, and the promises of its companions.
pub(super) fn fit_with(
    (name, model): (&ModelId, &LoadedModel),
    along: &[(&ModelId, &LoadedModel)],
    room: &MemoryAmounts,
    counts: bool,
) -> Option<(Vec<Vec<usize>>, MemoryAmounts, Reservations)> {
    let (places, promised) = fit(name, model, room, counts)?;
    let mut left = room.minus(&promised.plus(&mapped_bytes(model)));
    let mut all = Vec::with_capacity(along.len());
    for (name, model) in along {
        let (_, promised) = fit(name, model, &left, counts)?;
        let taken = promised.plus(&mapped_bytes(model));
        left = left.minus(&taken);
        all.push(((*name).clone(), taken));
    }
    Some((places, promised, all))
}

/// Places all processes of a model; returns their GPUs and the promise.
fn fit(
    name: &ModelId,
    model: &LoadedModel,
    room: &MemoryAmounts,
    counts: bool,
) -> Option<(Vec<Vec<usize>>, MemoryAmounts)> {
    fit_at(name, model, &[], room, counts)
}

/// Places the processes of a model; the first ones keep the GPUs that they have.
pub(super) fn fit_at(
    name: &ModelId,
    model: &LoadedModel,
    taken: &[Vec<usize>],
    room: &MemoryAmounts,
    counts: bool,
) -> Option<(Vec<Vec<usize>>, MemoryAmounts)> {
    let spec = &model.spec;
    let count = replicas(model);
    let place = |number: usize| taken.get(number).filter(|place| !place.is_empty());
    let anywhere = || (0..count).map(|number| place(number).cloned().unwrap_or_default()).collect();
    let Some(needs) = spec.needs.as_ref().filter(|_| counts) else {
        return Some((anywhere(), MemoryAmounts::none()));
    };
    let needs = &scaled_needs(needs, model.raised.factor);
    if needs.uses_gpu() && room.gpus.is_empty() {
        // No GPU reports its memory, so any GPU is accepted.
        return Some((
            anywhere(),
            MemoryAmounts { host: needs.host_bytes() * count as u64, gpus: Vec::new() },
        ));
    }
    let wanted: Vec<PlacementRequest> = (0..count)
        .map(|number| PlacementRequest {
            name: format!("{} {number}", name.name),
            // All processes share one mapped file, so only the first counts it.
            needs: MemoryNeeds { mapped: if number == 0 { needs.mapped } else { 0 }, ..needs.clone() },
            gpus: place(number).unwrap_or(&spec.gpus).clone(),
            may_split: spec.may_split || place(number).is_some_and(|place| place.len() > 1),
        })
        .collect();
    let all: Vec<&PlacementRequest> = wanted.iter().collect();
    let fits = book::fit_models(&MachineCapacity { host: room.host, gpus: room.gpus.clone() }, &all).ok()?;
    let mut promised =
        MemoryAmounts { host: needs.host_bytes() * count as u64, gpus: vec![0; room.gpus.len()] };
    let mut places = Vec::with_capacity(count);
    // Return the GPUs in the order of the processes.
    for one in &wanted {
        let fit = fits.iter().find(|fit| fit.name == one.name)?;
        for (gpu, bytes) in &fit.gpus {
            promised.gpus[*gpu] += bytes;
        }
        places.push(fit.gpus.iter().map(|(gpu, _)| *gpu).collect());
    }
    Some((places, promised))
}
