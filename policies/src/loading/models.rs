//! All models with their states: what they ask for, and which belong together or exclude each other.

use std::collections::BTreeMap;
use std::time::Duration;

use super::room::{self, Compatibility};
use super::wish::WaitingModel;
use super::{
    LoadRefusal, LoadSpec, LoadWish, LoadedModel, LoaderOrder, MemoryAmounts, ModelActivity, ModelId,
    ModelLoadState, Reservations,
};
use crate::ModelName;

/// All models of this instance.
#[derive(Debug, Default)]
pub struct LoadedModels {
    pub(super) all: BTreeMap<ModelId, LoadedModel>,
    last_place: u64,
}

impl LoadedModels {
    /// Adds a model, or replaces its specification.
    pub fn set_spec(&mut self, model: &ModelId, spec: LoadSpec) {
        match self.all.get_mut(model) {
            Some(known) => {
                if (&known.spec.needs, known.spec.replicas, &known.spec.gpus)
                    != (&spec.needs, spec.replicas, &spec.gpus)
                {
                    // Old readings and raised needs belong to the previous settings.
                    (known.measured.is_due, known.raised.factor) = (true, 1.0);
                }
                known.spec = spec;
            }
            None => drop(self.all.insert(model.clone(), LoadedModel::new(spec))),
        }
    }

    /// Queues a model for loading, unless it is loaded. `urgent`: others may be unloaded for it at once.
    pub fn enqueue(&mut self, model: &ModelId, urgent: bool) {
        self.last_place += 1;
        let place = self.last_place;
        let Some(model) = self.all.get_mut(model) else { return };
        match &mut model.state {
            ModelLoadState::Out => model.state = ModelLoadState::Wants { place, urgent },
            // Room was reserved when this companion was called, so no model has to be unloaded for it.
            ModelLoadState::Called { .. } => model.state = ModelLoadState::Wants { place: 0, urgent },
            ModelLoadState::Wants { urgent: known, .. } => *known |= urgent,
            ModelLoadState::Comes { .. } | ModelLoadState::Serves { .. } | ModelLoadState::Leaves => {}
        }
    }

    /// Returns true if any model waits for room, so `LoadingState::next_orders` may have orders.
    pub fn has_waiters(&self) -> bool {
        let moves = |model: &LoadedModel| match model.state {
            ModelLoadState::Wants { .. } | ModelLoadState::Called { .. } => true,
            ModelLoadState::Out => model.call_pending,
            _ => model.renewal.asked.is_some(),
        };
        self.all.values().any(moves)
    }

    /// Returns true if orders are likely soon: a model starts or stops, or requests wait for one.
    pub fn expects_orders_soon(&self, seen: impl Fn(&ModelId) -> ModelActivity) -> bool {
        let hurries = |(who, model): (&ModelId, &LoadedModel)| match model.state {
            ModelLoadState::Wants { urgent, .. } => urgent || seen(who).waiting > 0,
            ModelLoadState::Comes { .. } | ModelLoadState::Leaves => true,
            ModelLoadState::Out | ModelLoadState::Called { .. } | ModelLoadState::Serves { .. } => false,
        };
        self.has_waiters() && self.all.iter().any(hurries)
    }

    /// Returns the promised memory that starting or loaded models have not taken yet, and that is reserved.
    pub fn owed(&self) -> BTreeMap<ModelId, MemoryAmounts> {
        let there = self.all.iter().filter(|(_, model)| model.is_there());
        there.map(|(name, model)| (name.clone(), model.untaken_promise())).collect()
    }

    /// Records the total requests of each model. Frequent calls improve the estimate of the next request.
    pub fn record_requests(&mut self, now: Duration, asked: impl Fn(&ModelId) -> u64) {
        for (name, model) in &mut self.all {
            model.demand.record_total(now, asked(name));
        }
    }

    /// Requests that `LoadingState::next_orders` decide on a model whose settings changed
    /// ([`Self::set_spec`]). No effect if the model is not loaded.
    pub fn request_renewal(&mut self, model: &ModelId, now: Duration) {
        if let Some(model) = self.all.get_mut(model) {
            model.renewal.asked = model.is_staying().then_some(now);
        }
    }

    /// Records that a model's reclaim failed, or that it has ended and the memory was read again.
    pub fn reclaim_ended(&mut self, model: &ModelId) {
        if let Some(model) = self.all.get_mut(model) {
            model.reclaim.pending = false;
        }
    }

    /// Returns the companions that loaded models keep loaded. A model whose own TTL has passed keeps none.
    pub fn held_companions(&self, seen: impl Fn(&ModelId) -> ModelActivity) -> Vec<ModelId> {
        let rests = |who: &ModelId, model: &LoadedModel| {
            let seen = seen(who);
            !seen.is_in_use() && model.spec.ttl.is_some_and(|ttl| seen.idle_for >= ttl)
        };
        let hosts = self.models_with_companions().filter(|(who, model)| !rests(who, model));
        let mut all: Vec<ModelId> = hosts.flat_map(|(who, _)| self.all_companions(who)).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Returns all companions of a model, direct and indirect, without the model itself.
    pub(super) fn all_companions(&self, name: &ModelId) -> Vec<ModelId> {
        let mut all = vec![name.clone()];
        let mut next = 0;
        while let Some(model) = all.get(next).and_then(|who| self.all.get(who)) {
            let named = model.spec.companions.iter().filter_map(|name| self.configured_model(name));
            let news: Vec<ModelId> = named.filter(|who| !all.contains(who)).cloned().collect();
            all.extend(news);
            next += 1;
        }
        all.remove(0);
        all
    }

    fn configured_model(&self, name: &ModelName) -> Option<&ModelId> {
        self.all.keys().filter(|who| who.name == *name).max_by_key(|who| who.incarnation)
    }

    pub(super) fn members(&self, all: &[ModelId]) -> Vec<(&ModelId, &LoadedModel)> {
        all.iter().filter_map(|who| self.all.get_key_value(who)).collect()
    }

    fn models_with_companions(&self) -> impl Iterator<Item = (&ModelId, &LoadedModel)> {
        self.all.iter().filter(|(_, model)| model.is_staying() && !model.spec.companions.is_empty())
    }

    /// Returns the loaded models that have this model as a companion, and so are unloaded with it.
    pub(super) fn unloaded_with(&self, name: &ModelId) -> Vec<ModelId> {
        let hosts = self.models_with_companions().map(|(who, _)| who).filter(|who| *who != name);
        hosts.filter(|who| self.all_companions(who).contains(name)).cloned().collect()
    }

    /// Returns true if a pinned model has this model as a companion, and so keeps it loaded.
    pub(super) fn is_held(&self, name: &ModelId) -> bool {
        let forever =
            self.models_with_companions().filter(|(who, model)| *who != name && model.stays_for_good());
        forever.into_iter().any(|(who, _)| self.all_companions(who).contains(name))
    }

    /// Orders the companions of an admitted model to ask to be loaded.
    pub(super) fn call_companions(&mut self, party: Vec<ModelId>, now: Duration) -> Vec<LoaderOrder> {
        for who in party {
            if let Some(model) = self.all.get_mut(&who) {
                model.call_pending = matches!(model.state, ModelLoadState::Out | ModelLoadState::Leaves);
            }
        }
        self.call_pending(now)
    }

    /// Calls the companions that were still being unloaded when a model called them, and are unloaded now.
    pub(super) fn call_pending(&mut self, now: Duration) -> Vec<LoaderOrder> {
        let out =
            self.all.iter_mut().filter(|(_, model)| model.call_pending && model.state == ModelLoadState::Out);
        out.map(|(who, model)| {
            (model.call_pending, model.state) = (false, ModelLoadState::Called { since: now });
            LoaderOrder::CallCompanion { model: who.clone() }
        })
        .collect()
    }

    pub(super) fn guests(&self) -> Vec<&ModelId> {
        let guests = self.all.iter().filter(|(_, model)| model.spec.guest && model.is_staying());
        guests.map(|(who, _)| who).collect()
    }

    /// Returns the models that can be unloaded, will stop by their TTL, or may still fail to start.
    pub(super) fn movable_models(&self) -> Vec<&ModelId> {
        let there = self.all.iter().filter(|(_, model)| model.is_there());
        there
            .filter(|(who, model)| !model.stays_for_good() && !self.is_held(who))
            .map(|(who, _)| who)
            .collect()
    }

    pub(super) fn exclude_each_other(&self, one: &ModelId, other: &ModelId) -> bool {
        let names = |who: &ModelId, other: &ModelId| {
            self.all.get(who).is_some_and(|model| model.spec.never_with.contains(&other.name))
        };
        names(one, other) || names(other, one)
    }

    pub(super) fn models_with(&self, is_one: impl Fn(&LoadedModel) -> bool) -> Vec<ModelId> {
        self.all.iter().filter(|(_, model)| is_one(model)).map(|(who, _)| who.clone()).collect()
    }

    pub(super) fn waiting_models(&self, seen: &BTreeMap<ModelId, ModelActivity>) -> Vec<WaitingModel> {
        let waits = |(name, model): (&ModelId, &LoadedModel)| match model.state {
            ModelLoadState::Wants { place, urgent } => {
                let guest = model.spec.guest;
                let urgent = !guest && (urgent || seen[name].waiting > 0);
                Some(WaitingModel { guest, place, name: name.clone(), urgent })
            }
            _ => None,
        };
        let mut waiting: Vec<WaitingModel> = self.all.iter().filter_map(waits).collect();
        waiting.sort();
        waiting
    }

    pub(super) fn wait_in_line(&mut self, name: &ModelId) {
        self.last_place += 1;
        let wishes = self.last_place;
        if let Some(ModelLoadState::Wants { place, .. }) =
            self.all.get_mut(name).map(|model| &mut model.state)
        {
            *place = wishes;
        }
    }

    /// Returns the additional needs of models that wait for a renewal, reserved before later models.
    pub(super) fn kept_for_remade(&self, capacity: &MemoryAmounts, make_room: bool) -> Reservations {
        let waiting = self.all.iter().filter(|(_, model)| model.renewal.asked.is_some());
        let needs = |(who, model): (&ModelId, &LoadedModel)| {
            let (_, needed) = room::fit_at(who, model, &model.places, capacity, make_room)?;
            Some((who.clone(), needed.minus(&model.held_or_promised())))
        };
        waiting.filter_map(needs).collect()
    }

    pub(super) fn refusal_reason(
        &self,
        who: &ModelId,
        model: &LoadedModel,
        max_loaded: u32,
        left: &MemoryAmounts,
    ) -> LoadRefusal {
        let pinned = || self.all.iter().filter(|(_, other)| other.stays_for_good());
        let is_rival = |other: &&ModelId| self.exclude_each_other(who, other);
        let rivals: Vec<ModelName> =
            pinned().map(|(other, _)| other).filter(is_rival).map(|other| other.name.clone()).collect();
        if !rivals.is_empty() {
            return LoadRefusal::Excluded(rivals);
        }
        let pinned: Vec<ModelName> = pinned().map(|(other, _)| other.name.clone()).collect();
        match (max_loaded, room::needed_bytes(model)) {
            (most, _) if most > 0 && pinned.len() >= usize::try_from(most).unwrap_or(usize::MAX) => {
                LoadRefusal::Count { pinned, most }
            }
            (_, needed) => {
                LoadRefusal::Room { needed: needed.unwrap_or_default(), left: left.clone(), pinned }
            }
        }
    }

    pub(super) fn compatibility(
        &self,
        wish: &LoadWish<'_>,
        leave: &[&ModelId],
        max_loaded: u32,
    ) -> Compatibility {
        let most = match max_loaded {
            0 => usize::MAX,
            most => usize::try_from(most).unwrap_or(usize::MAX),
        };
        let rivals = |other: &ModelId| {
            *other != *wish.name
                && (self.exclude_each_other(wish.name, other)
                    || wish.party.iter().any(|one| one != other && self.exclude_each_other(one, other)))
        };
        let there = || self.all.iter().filter(|(_, model)| model.is_there());
        let stays =
            || there().filter(|(name, model)| model.state != ModelLoadState::Leaves && !leave.contains(name));
        let kept = || wish.kept.iter().map(|(who, _)| who).filter(|who| *who != wish.name);
        let all = kept().count() + wish.party.len();
        if stays().count() + all >= most || stays().any(|(other, _)| rivals(other)) || kept().any(rivals) {
            Compatibility::Bad
        } else if there().count() + all >= most || there().any(|(other, _)| rivals(other)) {
            Compatibility::Soon
        } else {
            Compatibility::Good
        }
    }
}
