//! Guests: models that stay loaded only as long as no other model needs their room.

use super::next::Placement;
use super::state::ModelLoadState;
use super::{LoadWish, LoaderOrder, LoadingState, MemoryAmounts, ModelId};

impl LoadingState {
    /// Returns the loaded guests.
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

    /// Unloads all guests if a model with new settings does not fit next to them. The model stays loaded
    /// while the guests stop.
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
