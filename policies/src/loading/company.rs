//! Companions: models that are loaded along with another model and stay loaded as long as that model. Guests:
//! models that stay loaded only as long as no other model needs their room.
//!
//! ```text
//!   a (with b) is admitted, with room for both ─> b is called, its room reserved ─> b asks ─> b is admitted
//!   b is to be unloaded ─> a is unloaded, too
//! ```
//!
//! Companions are optional: if they do not fit next to pinned models, a model is loaded without them.

use std::time::Duration;

use super::room::{self, Compatibility};
use super::{
    LoadWish, LoadedModel, LoaderOrder, LoadingState, MemoryAmounts, ModelActivity, ModelId, ModelLoadState,
    Placement, Reservations,
};

impl LoadingState {
    /// Returns the unloaded companions of a model, and theirs, if they may be loaded and fit next to pinned
    /// models.
    pub(super) fn absent_companions(&self, name: &ModelId) -> Vec<ModelId> {
        let Some(model) = self.models.get(name).filter(|model| !model.spec.companions.is_empty()) else {
            return Vec::new();
        };
        let (stays, mut party): (Vec<ModelId>, Vec<ModelId>) =
            self.all_companions(name).into_iter().partition(|who| self.models[who].is_staying());
        let forever = self.models.iter().filter(|(_, model)| model.stays_for_good()).map(|(who, _)| who);
        let mut may_be: Vec<ModelId> = forever.chain(&stays).chain([name]).cloned().collect();
        party.retain(|who| {
            let good = !may_be.iter().any(|other| self.exclude_each_other(who, other));
            if good {
                may_be.push(who.clone());
            }
            good
        });
        // Companions that are already loaded are not unloaded for the model.
        let mobile: Vec<&ModelId> =
            self.movable_models().into_iter().filter(|who| !stays.contains(who)).collect();
        let left = self.left_if_gone(&mobile);
        let fits =
            room::fit_with((name, model), &self.members(&party), &left, self.numbers.make_room).is_some();
        let wish = LoadWish { name, kept: &[], free: None, party: &party };
        if fits && self.compatibility(&wish, &mobile) != Compatibility::Bad { party } else { Vec::new() }
    }

    /// Returns all companions of a model, direct and indirect, and the model itself.
    pub(super) fn all_companions(&self, name: &ModelId) -> Vec<ModelId> {
        let mut all = vec![name.clone()];
        let mut next = 0;
        while let Some(model) = all.get(next).and_then(|who| self.models.get(who)) {
            let named = model.spec.companions.iter().filter_map(|name| self.configured_model(name));
            let news: Vec<ModelId> = named.filter(|who| !all.contains(who)).cloned().collect();
            all.extend(news);
            next += 1;
        }
        all.remove(0);
        all
    }

    fn configured_model(&self, name: &crate::ModelName) -> Option<&ModelId> {
        self.models.keys().filter(|who| who.name == *name).max_by_key(|who| who.incarnation)
    }

    pub(super) fn members(&self, all: &[ModelId]) -> Vec<(&ModelId, &LoadedModel)> {
        all.iter().filter_map(|who| self.models.get_key_value(who)).collect()
    }

    fn models_with_companions(&self) -> impl Iterator<Item = (&ModelId, &LoadedModel)> {
        self.models.iter().filter(|(_, model)| model.is_staying() && !model.spec.companions.is_empty())
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

    /// Orders the companions of an admitted model to ask to be loaded.
    pub(super) fn call_companions(&mut self, party: Vec<ModelId>, now: Duration) -> Vec<LoaderOrder> {
        for who in party {
            if let Some(model) = self.models.get_mut(&who) {
                model.call_pending = matches!(model.state, ModelLoadState::Out | ModelLoadState::Leaves);
            }
        }
        self.call_pending(now)
    }

    /// Calls the companions that were still being unloaded when a model called them, and are unloaded now.
    pub(super) fn call_pending(&mut self, now: Duration) -> Vec<LoaderOrder> {
        let out = self
            .models
            .iter_mut()
            .filter(|(_, model)| model.call_pending && model.state == ModelLoadState::Out);
        out.map(|(who, model)| {
            (model.call_pending, model.state) = (false, ModelLoadState::Called { since: now });
            LoaderOrder::CallCompanion { model: who.clone() }
        })
        .collect()
    }

    pub(super) fn wait_in_line(&mut self, name: &ModelId) {
        self.last_place += 1;
        let wishes = self.last_place;
        if let Some(ModelLoadState::Wants { place, .. }) =
            self.models.get_mut(name).map(|model| &mut model.state)
        {
            *place = wishes;
        }
    }

    /// Returns the room reserved for called companions. A companion that does not answer in time loses its
    /// reservation.
    pub(super) fn kept_for_called(&mut self, now: Duration, free: Option<&MemoryAmounts>) -> Reservations {
        let patience = self.numbers.called;
        for model in self.models.values_mut() {
            if matches!(model.state, ModelLoadState::Called { since } if now.saturating_sub(since) >= patience)
            {
                model.state = ModelLoadState::Out;
            }
        }
        let called =
            self.models.iter().filter(|(_, model)| matches!(model.state, ModelLoadState::Called { .. }));
        let mut kept: Reservations = Vec::new();
        for (who, model) in called {
            let wish = LoadWish { name: who, kept: &kept, free, party: &[] };
            let promised = match self.find_place(&wish, &[]) {
                Placement::Now(_, promised, _) | Placement::Later(promised, _) => {
                    promised.plus(&room::mapped_bytes(model))
                }
                Placement::Nowhere => MemoryAmounts::none(),
            };
            kept.push((who.clone(), promised));
        }
        kept
    }
}

impl LoadedModel {
    fn is_staying(&self) -> bool {
        self.is_there() && self.state != ModelLoadState::Leaves
    }
}

impl LoadingState {
    pub(super) fn guests(&self) -> Vec<&ModelId> {
        let there = |state| matches!(state, ModelLoadState::Comes { .. } | ModelLoadState::Serves { .. });
        let guests = self.models.iter().filter(|(_, model)| model.spec.guest && there(model.state));
        guests.map(|(who, _)| who).collect()
    }

    /// Returns all guests if unloading them makes enough room for the waiting model, else none.
    pub(super) fn guests_leaving_for(&self, wish: &LoadWish<'_>) -> Vec<ModelId> {
        let guests = self.guests();
        if guests.is_empty() || matches!(self.find_place(wish, &guests), Placement::Nowhere) {
            return Vec::new();
        }
        guests.into_iter().cloned().collect()
    }

    /// Unloads all guests if a model with new settings does not fit next to them; the model stays loaded.
    pub(super) fn guests_leave_for_remade(&mut self, free: Option<&MemoryAmounts>) -> Vec<LoaderOrder> {
        let remade =
            self.models.iter().filter(|(_, model)| model.renewal_asked.is_some() && !model.spec.guest);
        let crowded: Vec<ModelId> =
            remade.filter(|(who, _)| !self.stays_beside_all(who, free)).map(|(who, _)| who.clone()).collect();
        let Some(first) = crowded.first() else { return Vec::new() };
        let guests: Vec<ModelId> = self.guests().into_iter().cloned().collect();
        let mut orders = Vec::new();
        for guest in guests {
            self.start_leaving(&guest);
            orders.push(LoaderOrder::Unload { model: guest, replaced_by: first.clone() });
        }
        orders
    }
}
