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

use super::renew::RenewalDecision;
use super::room::{self, Compatibility};
use super::{
    LoadWish, LoadedModel, LoaderOrder, LoadingState, MemoryAmounts, ModelId, ModelLoadState, Placement,
    Reservations,
};

impl LoadingState {
    /// Returns the unloaded companions of a model, and theirs, if they may be loaded and fit next to pinned
    /// models.
    pub(super) fn absent_companions(&self, name: &ModelId) -> Vec<ModelId> {
        let Some(model) = self.models.all.get(name).filter(|model| !model.spec.companions.is_empty()) else {
            return Vec::new();
        };
        let (stays, mut party): (Vec<ModelId>, Vec<ModelId>) =
            self.models.all_companions(name).into_iter().partition(|who| self.models.all[who].is_staying());
        let forever = self.models.all.iter().filter(|(_, model)| model.stays_for_good()).map(|(who, _)| who);
        let mut may_be: Vec<ModelId> = forever.chain(&stays).chain([name]).cloned().collect();
        party.retain(|who| {
            let good = !may_be.iter().any(|other| self.models.exclude_each_other(who, other));
            if good {
                may_be.push(who.clone());
            }
            good
        });
        // Companions that are already loaded are not unloaded for the model.
        let mobile: Vec<&ModelId> =
            self.models.movable_models().into_iter().filter(|who| !stays.contains(who)).collect();
        let left = self.room_balance(None, &mobile).soon;
        let members = self.models.members(&party);
        let fits = room::fit_with((name, model), &members, &left, self.numbers.make_room).is_some();
        let wish = LoadWish { name, kept: &[], free: None, party: &party };
        let company = self.models.compatibility(&wish, &mobile, self.numbers.max_loaded);
        if fits && company != Compatibility::Bad { party } else { Vec::new() }
    }

    /// Returns the room reserved for called companions. A companion that does not answer in time loses its
    /// reservation.
    pub(super) fn kept_for_called(&mut self, now: Duration, free: Option<&MemoryAmounts>) -> Reservations {
        let patience = self.numbers.called;
        for model in self.models.all.values_mut() {
            if matches!(model.state, ModelLoadState::Called { since } if now.saturating_sub(since) >= patience)
            {
                model.state = ModelLoadState::Out;
            }
        }
        let called =
            self.models.all.iter().filter(|(_, model)| matches!(model.state, ModelLoadState::Called { .. }));
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
    pub(super) fn is_staying(&self) -> bool {
        self.is_there() && self.state != ModelLoadState::Leaves
    }
}

impl LoadingState {
    /// Returns all guests if unloading them makes enough room for the waiting model, else none.
    pub(super) fn guests_leaving_for(&self, wish: &LoadWish<'_>) -> Vec<ModelId> {
        let guests = self.models.guests();
        if guests.is_empty() || matches!(self.find_place(wish, &guests), Placement::Nowhere) {
            return Vec::new();
        }
        guests.into_iter().cloned().collect()
    }

    /// Unloads all guests if a model with new settings does not fit next to them; the model stays loaded.
    pub(super) fn guests_leave_for_remade(&mut self, free: Option<&MemoryAmounts>) -> Vec<LoaderOrder> {
        let remade =
            self.models.all.iter().filter(|(_, model)| model.renewal.asked.is_some() && !model.spec.guest);
        let beside_all = |who: &ModelId| {
            let decision = self.renewal_decision(who, free);
            decision.is_none_or(|decision| matches!(decision, RenewalDecision::Stays(place) if place.beside))
        };
        let crowded: Vec<ModelId> =
            remade.filter(|(who, _)| !beside_all(who)).map(|(who, _)| who.clone()).collect();
        let Some(first) = crowded.first() else { return Vec::new() };
        let guests: Vec<ModelId> = self.models.guests().into_iter().cloned().collect();
        guests.into_iter().map(|guest| self.unload(guest, first)).collect()
    }
}
