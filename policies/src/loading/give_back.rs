//! Reclaims hoarded memory so that no model has to be unloaded.

use std::time::Duration;

use super::{
    LoadWish, LoadedModel, LoadingConfig, LoadingState, MemoryAmounts, ModelId, ModelLoadState, Placement,
    room,
};

/// Least pause between reclaims of a model. A model that grows back faster leaks, and only a fresh process
/// cures it.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(60);

/// Result of the reclaim step that precedes an eviction.
pub(super) enum ReclaimStep {
    /// Models to be asked.
    Asked(Vec<ModelId>),
    /// Running reclaims would free enough.
    Awaited,
    /// Reclaiming cannot free enough.
    Nobody,
}

impl LoadingState {
    /// Chooses the models to ask for memory, if reclaiming would make enough room for the wish.
    pub(super) fn request_reclaim(&mut self, wish: &LoadWish<'_>, now: Duration) -> ReclaimStep {
        let Some(free) = wish.free else { return ReclaimStep::Nobody };
        let numbers = &self.numbers;
        let hoards = || self.models.values().filter_map(|model| model.hoard(now, numbers));
        let free = hoards().fold(free.clone(), |sum, hoard| sum.plus(&hoard));
        if hoards().next().is_none()
            || matches!(self.place(&LoadWish { free: Some(&free), ..*wish }, &[]), Placement::Nowhere)
        {
            return ReclaimStep::Nobody;
        }
        let short = self.is_short_of(wish);
        let helps =
            |model: &LoadedModel| model.hoard(now, numbers).is_some_and(|hoard| hoard.is_any_of(short));
        let able = self.models.iter().filter(|(_, model)| !model.gives && helps(model));
        let asked: Vec<ModelId> = able.map(|(who, _)| who.clone()).collect();
        if asked.is_empty() {
            let awaited =
                self.models.values().any(|model| model.gives && model.hoard(now, numbers).is_some());
            return if awaited { ReclaimStep::Awaited } else { ReclaimStep::Nobody };
        }
        for who in &asked {
            if let Some(model) = self.models.get_mut(who) {
                (model.gives, model.asked_back) = (true, Some(now));
            }
        }
        ReclaimStep::Asked(asked)
    }

    /// Returns whether a model without room lacks host memory, and whether it lacks GPU memory; both if
    /// neither alone explains it.
    fn is_short_of(&self, wish: &LoadWish<'_>) -> (bool, bool) {
        let left = self.left(wish.free);
        let Some(needed) = self.models.get(wish.name).and_then(room::needed) else { return (true, true) };
        match needed.exceeds(&left) {
            (false, false) => (true, true),
            short => short,
        }
    }

    /// Records that a model's reclaim has ended and its memory was read since, or that it failed.
    pub fn reclaim_ended(&mut self, model: &ModelId) {
        if let Some(model) = self.models.get_mut(model) {
            model.gives = false;
        }
    }
}

impl LoadedModel {
    /// Returns the reclaimable bytes: memory above the promise, if the build supports reclaim and none was
    /// tried within the interval.
    fn hoard(&self, now: Duration, numbers: &LoadingConfig) -> Option<MemoryAmounts> {
        let reading = self.reading.as_ref().filter(|reading| reading.can_give)?;
        let since = self.asked_back.map(|asked| now.saturating_sub(asked));
        let is_asked = match since {
            // Stop waiting for an overdue answer.
            Some(since) if self.gives => since < numbers.give_back,
            Some(since) => since >= RECLAIM_INTERVAL,
            None => true,
        };
        let hoard = reading.held.minus(&self.promised);
        (is_asked && hoard.is_any_of((true, true)) && matches!(self.state, ModelLoadState::Serves { .. }))
            .then_some(hoard)
    }
}
