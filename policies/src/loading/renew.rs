//! Renews a loaded model in place after its settings changed, if its new needs fit next to others or do not
//! exceed its promise. Otherwise the model is unloaded and waits for room.

use std::time::Duration;

use super::room;
use super::state::LoadedModel;
use super::{LoaderOrder, LoadingState, MemoryAmounts, MissingRoom, ModelId};

/// Longest wait for a decision. Until then no process of the model may start, not even after a crash.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) enum RenewalDecision {
    Stays(RenewalInPlace),
    /// Room will be free once other models have stopped.
    Waits,
    /// Too little room.
    Leaves,
}

pub(super) struct RenewalInPlace {
    places: Vec<Vec<usize>>,
    promised: MemoryAmounts,
    /// The model is predicted to be larger than all memory; all memory was promised to it.
    alone: bool,
    /// Old and new processes fit into memory at the same time.
    pub(super) beside: bool,
}

impl LoadingState {
    /// Records that the new processes did not start; the model keeps its old processes.
    pub fn renewal_failed(&mut self, name: &ModelId) {
        if let Some(model) = self.models.all.get_mut(name).filter(|model| model.renewal.promise.is_some()) {
            model.renewal.promise = None;
            self.stop_settling(name);
        }
    }

    pub(super) fn renew(&mut self, now: Duration, free: Option<&MemoryAmounts>) -> Vec<LoaderOrder> {
        let remade: Vec<(ModelId, Duration)> = self
            .models
            .all
            .iter()
            .filter_map(|(who, model)| Some((who.clone(), model.renewal.asked?)))
            .collect();
        remade.into_iter().filter_map(|(who, since)| self.renew_one(who, since, now, free)).collect()
    }

    fn renew_one(
        &mut self,
        who: ModelId,
        since: Duration,
        now: Duration,
        free: Option<&MemoryAmounts>,
    ) -> Option<LoaderOrder> {
        let waited = now.saturating_sub(since) >= RENEWAL_TIMEOUT;
        match self.renewal_decision(&who, free)? {
            RenewalDecision::Waits if !waited => None,
            RenewalDecision::Stays(RenewalInPlace { places, promised, alone, beside }) => {
                let before = free.map(|free| self.free_before_taking(free));
                let model = self.models.all.get_mut(&who)?;
                // The old processes hold their memory until the new processes run.
                let has = model.held_or_renewed();
                if !model.is_taking() {
                    // The promise covers the old processes' memory, whenever these stop.
                    let held = model.held();
                    self.free_before_starts = before.map(|before| before.plus(&held));
                    // Allow twice the last load time: a failed load must not block others forever.
                    let load = self.numbers.turn_most.max(model.load_time.saturating_mul(2));
                    model.measured.deadline = Some(now.saturating_add(load.min(self.numbers.short_for)));
                }
                let both = if beside { promised.plus(&has) } else { promised.max(&has) };
                (model.admitted.promised, model.renewal.promise) = (both, Some(promised));
                model.renewal.until = now.saturating_add(self.numbers.short_for);
                (model.admitted.mapped, model.admitted.alone) =
                    (room::mapped_bytes(model).host.max(model.admitted.mapped), alone);
                (model.renewal.asked, model.places) = (None, places.clone());
                Some(LoaderOrder::Renew { model: who, places, beside })
            }
            RenewalDecision::Waits | RenewalDecision::Leaves => {
                let needed = room::needed_bytes(self.models.all.get(&who)?);
                let lacks = MissingRoom { needed, left: self.left_without(&who, free), excluded: false };
                self.start_leaving(&who);
                Some(LoaderOrder::Restart { model: who, lacks })
            }
        }
    }

    /// Returns the room for a model as if its own processes and all models being unloaded were gone.
    fn left_without(&self, who: &ModelId, free: Option<&MemoryAmounts>) -> MemoryAmounts {
        self.room_balance(free, &[who]).soon.minus(&room::kept_for_others(&self.kept, who))
    }

    pub(super) fn renewal_decision(
        &self,
        who: &ModelId,
        free: Option<&MemoryAmounts>,
    ) -> Option<RenewalDecision> {
        let model = self.models.all.get(who)?;
        let soon = self.left_without(who, free);
        let taken: Vec<Vec<usize>> = model.places.iter().take(room::replicas(model)).cloned().collect();
        let may_be_on = |place: &Vec<usize>| {
            model.spec.gpus.is_empty() || place.iter().all(|gpu| model.spec.gpus.contains(gpu))
        };
        if !taken.iter().all(may_be_on) {
            return Some(RenewalDecision::Leaves);
        }
        let fit = |room: &MemoryAmounts| room::fit_at(who, model, &taken, room, self.numbers.make_room);
        let of_file = MemoryAmounts { host: model.admitted.mapped, gpus: vec![0; self.capacity.gpus.len()] };
        let stays = |(places, promised): (Vec<Vec<usize>>, MemoryAmounts), room: &MemoryAmounts| {
            // Old and new processes map the same file, unless the file changed.
            let both = promised.plus(&model.held_or_renewed()).plus(&of_file.max(&room::mapped_bytes(model)));
            RenewalDecision::Stays(RenewalInPlace {
                places,
                promised,
                alone: false,
                beside: both.is_within(room),
            })
        };
        // Memory of models that are being unloaded is not free yet.
        let now = self.room_left(free).plus(&model.held_or_promised()).plus(&of_file).min(&soon);
        // Needs within the model's own promise always fit: that memory is not available to waiting models.
        if let Some(fits) = fit(&now).or_else(|| fit(&model.admitted.promised.plus(&of_file))) {
            return Some(stays(fits, &now));
        }
        if fit(&soon).is_some() {
            return Some(RenewalDecision::Waits);
        }
        let is_alone = !self.models.all.iter().any(|(other, model)| other != who && model.is_there());
        if !is_alone || model.spec.can_do_with_less {
            return Some(RenewalDecision::Leaves);
        }
        // No model would be unloaded for this one. If it fits on other GPUs, its new processes start there.
        match (fit(&self.capacity), room::fits(who, model, &self.capacity)) {
            (Some(fits), _) => Some(stays(fits, &now)),
            (None, true) => Some(RenewalDecision::Leaves),
            (None, false) => {
                let mut places = taken;
                places.resize(room::replicas(model), Vec::new());
                let promised = self.capacity.clone();
                Some(RenewalDecision::Stays(RenewalInPlace { places, promised, alone: true, beside: false }))
            }
        }
    }
}

impl LoadedModel {
    /// Returns the known memory: at least the old promise while processes with earlier settings run.
    fn held_or_renewed(&self) -> MemoryAmounts {
        match &self.measured.reading {
            Some(reading) if self.renewal.promise.is_none() => reading.held.clone(),
            _ => self.held_or_promised(),
        }
    }

    /// Returns the memory that a model holds or was promised, which is available to the model itself.
    pub(super) fn held_or_promised(&self) -> MemoryAmounts {
        self.admitted.promised.max(&self.held())
    }
}
