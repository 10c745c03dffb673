//! Reclaims unused memory from loaded processes so that no model has to be unloaded.

use std::time::Duration;

use super::{
    LoadWish, LoadedModel, LoadingConfig, LoadingState, MemoryAmounts, ModelId, ModelLoadState, Placement,
    room,
};

/// Least pause between reclaims of a model. A model whose memory grows back sooner leaks, and only a fresh
/// process helps.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(60);

/// Result of the reclaim attempt that precedes an eviction.
pub(super) enum ReclaimStep {
    /// These models are to be asked to reclaim memory.
    Asked(Vec<ModelId>),
    /// Reclaims that already run may free enough.
    Awaited,
    /// Reclaims cannot free enough.
    Useless,
}

impl LoadingState {
    /// Chooses the models to ask for memory, if their reclaims would make enough room for the waiting model.
    pub(super) fn request_reclaim(&mut self, wish: &LoadWish<'_>, now: Duration) -> ReclaimStep {
        let Some(free) = wish.free else { return ReclaimStep::Useless };
        let numbers = &self.numbers;
        let hoards = || self.models.values().filter_map(|model| model.reclaimable(now, numbers));
        let free = hoards().fold(free.clone(), |sum, hoard| sum.plus(&hoard));
        if hoards().next().is_none()
            || matches!(self.find_place(&LoadWish { free: Some(&free), ..*wish }, &[]), Placement::Nowhere)
        {
            return ReclaimStep::Useless;
        }
        let short = self.is_short_of(wish);
        let helps =
            |model: &LoadedModel| model.reclaimable(now, numbers).is_some_and(|hoard| hoard.is_any_of(short));
        let able = self.models.iter().filter(|(_, model)| !model.reclaiming && helps(model));
        let asked: Vec<ModelId> = able.map(|(who, _)| who.clone()).collect();
        if asked.is_empty() {
            let awaited = self
                .models
                .values()
                .any(|model| model.reclaiming && model.reclaimable(now, numbers).is_some());
            return if awaited { ReclaimStep::Awaited } else { ReclaimStep::Useless };
        }
        for who in &asked {
            if let Some(model) = self.models.get_mut(who) {
                (model.reclaiming, model.last_reclaim) = (true, Some(now));
            }
        }
        ReclaimStep::Asked(asked)
    }

    /// Returns true for host memory and for GPU memory, depending on which a waiting model lacks; true for
    /// both if neither explains why the model does not fit.
    fn is_short_of(&self, wish: &LoadWish<'_>) -> (bool, bool) {
        let left = self.room_left(wish.free);
        let Some(needed) = self.models.get(wish.name).and_then(room::needed_bytes) else {
            return (true, true);
        };
        match needed.exceeds(&left) {
            (false, false) => (true, true),
            short => short,
        }
    }

    /// Records that a model's reclaim failed, or that it has ended and the memory was read again.
    pub fn reclaim_ended(&mut self, model: &ModelId) {
        if let Some(model) = self.models.get_mut(model) {
            model.reclaiming = false;
        }
    }
}

impl LoadedModel {
    /// Returns the reclaimable bytes: memory above the promise, if the build supports reclaim and no reclaim
    /// was tried within the interval.
    fn reclaimable(&self, now: Duration, numbers: &LoadingConfig) -> Option<MemoryAmounts> {
        let reading = self.reading.as_ref().filter(|reading| reading.can_reclaim)?;
        let since = self.last_reclaim.map(|asked| now.saturating_sub(asked));
        let is_asked = match since {
            // Stop waiting for an overdue answer.
            Some(since) if self.reclaiming => since < numbers.give_back,
            Some(since) => since >= RECLAIM_INTERVAL,
            None => true,
        };
        let hoard = reading.held.minus(&self.promised);
        (is_asked && hoard.is_any_of((true, true)) && matches!(self.state, ModelLoadState::Serves { .. }))
            .then_some(hoard)
    }
}
