//! The decision step: selects models to admit, to renew in place, to ask for memory, or to unload.

use std::collections::BTreeMap;
use std::time::Duration;

use super::evict::ReclaimStep;
use super::room;
use super::state::ModelLoadState;
use super::wish::WaitingModel;
use super::{
    LoadWish, LoaderOrder, LoadingState, MemoryAmounts, ModelActivity, ModelId, Placement, Reservations,
};

/// Longest wait for an ended process's memory to show as free; drivers take some tens of milliseconds.
const MEMORY_RETURN_TIMEOUT: Duration = Duration::from_millis(250);

struct OrderRound<'a> {
    now: Duration,
    free: Option<&'a MemoryAmounts>,
    seen: BTreeMap<ModelId, ModelActivity>,
    kept: Reservations,
    orders: Vec<LoaderOrder>,
    /// A model waits for other turns to end; unloading models for later waiters would begin new turns.
    blocked: bool,
}

impl LoadingState {
    /// Decides the next orders. `free`: measured free memory; `seen` returns the requests of each model.
    pub fn next_orders(
        &mut self,
        now: Duration,
        free: Option<&MemoryAmounts>,
        seen: impl Fn(&ModelId) -> ModelActivity,
    ) -> Vec<LoaderOrder> {
        self.returning_soon = self.returning.update(now, free, MEMORY_RETURN_TIMEOUT);
        let seen: BTreeMap<ModelId, ModelActivity> =
            self.models.all.keys().map(|name| (name.clone(), seen(name))).collect();
        for (name, model) in &mut self.models.all {
            model.demand.record_total(now, seen[name].requests);
            if model.raised.factor > 1.0 && now.saturating_sub(model.raised.at) >= self.numbers.short_for {
                // Another program may have held the memory when the start failed, and have freed it since.
                model.raised.factor = 1.0;
            }
        }
        for who in self.models.models_with(|model| model.measured.deadline.is_some_and(|until| now >= until))
        {
            self.stop_settling(&who);
        }
        for who in
            self.models.models_with(|model| model.renewal.promise.is_some() && now >= model.renewal.until)
        {
            self.renewal_failed(&who);
        }
        let waiting = self.models.waiting_models(&seen);
        let mut orders = self.guests_leave_for_remade(free);
        // Room that earlier models wait for is not given to later ones.
        orders.extend(self.renew(now, free));
        orders.extend(self.models.call_pending(now));
        let mut kept = self.kept_for_called(now, free);
        kept.extend(self.models.kept_for_remade(&self.capacity, self.numbers.make_room));
        let mut round = OrderRound { now, free, seen, kept, orders, blocked: false };
        for waiter in waiting {
            self.serve_waiter(&mut round, waiter);
        }
        (self.kept, self.returning_soon) = (round.kept, None);
        round.orders
    }

    fn serve_waiter(&mut self, round: &mut OrderRound<'_>, waiter: WaitingModel) {
        let WaitingModel { guest, place: number, name, urgent } = waiter;
        let (now, free) = (round.now, round.free);
        let mut party = self.absent_companions(&name);
        // Room already reserved for a companion is not reserved twice.
        party.retain(|who| !round.kept.iter().any(|(known, _)| known == who));
        let alone = LoadWish { name: &name, kept: &round.kept, free, party: &[] };
        let together = LoadWish { party: &party, ..alone };
        if !party.is_empty() && matches!(self.place_without_movers(&together), Placement::Nowhere) {
            // Pinned models occupy the room that the companions would need.
            party.clear();
        }
        let wish = LoadWish { party: &party, ..alone };
        let mut place = self.find_place(&wish, &[]);
        if guest && !matches!(place, Placement::Now(..)) {
            // Nothing is reserved for guests.
            return;
        }
        if matches!(place, Placement::Nowhere) {
            let guests = self.guests_leaving_for(&wish);
            if !guests.is_empty() {
                round.orders.extend(guests.into_iter().map(|guest| self.unload(guest, &name)));
                place = self.find_place(&wish, &[]);
            }
        }
        if urgent && !round.blocked && matches!(place, Placement::Nowhere) {
            match self.request_reclaim(&wish, now) {
                ReclaimStep::Asked(asked) => {
                    round.orders.extend(asked.into_iter().map(|model| LoaderOrder::Reclaim { model }));
                }
                ReclaimStep::Awaited => {}
                ReclaimStep::Useless => {
                    let victims = self.choose_evictions(&wish, now, &round.seen);
                    round.orders.extend(victims.into_iter().map(|victim| self.unload(victim, &name)));
                    place = self.find_place(&wish, &[]);
                }
            }
        }
        match place {
            Placement::Now(places, promised, guests) => {
                self.admit(&name, promised, now, free, places.clone());
                round.orders.push(LoaderOrder::Load { model: name, places });
                round.kept.extend(guests);
                round.orders.extend(self.models.call_companions(party, now));
            }
            Placement::Later(promised, guests) => {
                round.kept.push((name, promised));
                round.kept.extend(guests);
            }
            Placement::Nowhere if urgent && !round.blocked => {
                if let Placement::Later(promised, guests) | Placement::Now(_, promised, guests) =
                    self.place_without_movers(&wish)
                {
                    round.kept.push((name, promised));
                    round.kept.extend(guests);
                    round.blocked = true;
                }
            }
            // A called companion that lost its room waits like all others.
            Placement::Nowhere if number == 0 => self.models.wait_in_line(&name),
            Placement::Nowhere => {}
        }
    }

    pub(super) fn unload(&mut self, model: ModelId, makes_room_for: &ModelId) -> LoaderOrder {
        self.start_leaving(&model);
        LoaderOrder::Unload { model, replaced_by: makes_room_for.clone() }
    }

    /// Returns the room for a model as if all unpinned models were unloaded.
    fn place_without_movers(&self, wish: &LoadWish<'_>) -> Placement {
        let there = self.models.all.iter().filter(|(_, model)| model.is_there() && !model.spec.pin);
        let movers: Vec<&ModelId> =
            there.map(|(who, _)| who).filter(|who| !self.models.is_held(who)).collect();
        self.find_place(wish, &movers)
    }

    fn admit(
        &mut self,
        name: &ModelId,
        promised: MemoryAmounts,
        now: Duration,
        free: Option<&MemoryAmounts>,
        places: Vec<Vec<usize>>,
    ) {
        let alone = promised == self.capacity;
        self.free_before_starts = free.map(|free| self.free_before_taking(free));
        if let Some(model) = self.models.all.get_mut(name) {
            (model.admitted.promised, model.admitted.mapped, model.admitted.alone) =
                (promised, room::mapped_bytes(model).host, alone);
            model.places = places;
            model.state = ModelLoadState::Comes { since: now };
        }
    }
}
