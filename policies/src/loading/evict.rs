//! Reclaims unused memory of loaded processes, or else chooses the models to unload for another model.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::room;
use super::{
    LoadWish, LoadedModel, LoadingConfig, LoadingState, MemoryAmounts, ModelActivity, ModelId,
    ModelLoadState, Placement,
};

/// Most candidates for which all combinations are tried; with more, candidates are added cheapest first.
const COMBINATION_LIMIT: usize = 12;

/// Least pause between reclaims of a model: a model whose memory grows back sooner leaks.
const RECLAIM_INTERVAL: Duration = Duration::from_secs(60);

pub(super) enum ReclaimStep {
    /// These models are to be asked to reclaim memory.
    Asked(Vec<ModelId>),
    /// Reclaims that already run may free enough.
    Awaited,
    Useless,
}

/// Models that can only be unloaded together, preceded by the value of keeping them.
type EvictionGroup = (f64, Vec<ModelId>);

/// Assumed seconds until the next request of a model in use: less than for any idle model.
const IN_USE_SECONDS: f64 = 0.1;

impl LoadingState {
    /// Chooses the models that make enough room and cost least to unload; empty if room cannot be made.
    pub(super) fn choose_evictions(
        &self,
        wish: &LoadWish<'_>,
        now: Duration,
        seen: &BTreeMap<ModelId, ModelActivity>,
    ) -> Vec<ModelId> {
        let may_leave = |who: &ModelId| {
            let model = self.models.all.get(who);
            model.is_some_and(|model| !model.spec.pin && model.may_leave(now, seen[who], &self.numbers))
        };
        let mut candidates: Vec<EvictionGroup> = self
            .models
            .all
            .keys()
            .filter(|who| may_leave(who))
            .map(|who| {
                let mut leave = self.models.unloaded_with(who);
                leave.push(who.clone());
                leave
            })
            .filter(|leave| leave.iter().all(may_leave))
            .map(|leave| {
                let worth =
                    leave.iter().map(|who| self.models.all[who].keep_value(seen[who], self.numbers.leaker));
                (worth.sum(), leave)
            })
            .collect();
        let is_enough = |groups: &[&EvictionGroup]| {
            !matches!(self.find_place(wish, &distinct_models(groups)), Placement::Nowhere)
        };
        if !is_enough(&candidates.iter().collect::<Vec<_>>()) {
            return Vec::new();
        }
        // Prefer to evict other models. An evicted companion of the wanted model would be loaded again with it,
        // and an evicted model that names the wanted one as its companion would request it again.
        let company = self.models.all_companions(wish.name);
        let is_own = |(_, leave): &EvictionGroup| leave.iter().any(|who| company.contains(who));
        let calls = |(_, leave): &EvictionGroup| {
            leave.iter().any(|who| self.absent_companions(who).contains(wish.name))
        };
        let without = |out: &dyn Fn(&EvictionGroup) -> bool| {
            let others: Vec<_> = candidates.iter().filter(|one| !out(one)).collect();
            is_enough(&others).then(|| others.into_iter().cloned().collect())
        };
        let better = without(&|one| is_own(one) || calls(one))
            .or_else(|| without(&is_own))
            .or_else(|| without(&calls));
        candidates = better.unwrap_or(candidates);
        candidates.sort_by(|one, other| one.0.total_cmp(&other.0).then_with(|| one.1.cmp(&other.1)));
        let cheapest = if candidates.len() <= COMBINATION_LIMIT {
            cheapest_set(&candidates, is_enough)
        } else {
            first_enough(&candidates, is_enough)
        };
        cheapest.unwrap_or_default()
    }
}

fn cheapest_set(
    candidates: &[EvictionGroup],
    is_enough: impl Fn(&[&EvictionGroup]) -> bool,
) -> Option<Vec<ModelId>> {
    let of =
        |set: u32| (0..).zip(candidates).filter(move |(index, _)| set >> index & 1 == 1).map(|(_, one)| one);
    let mut sets: Vec<(f64, u32)> =
        (1..1_u32 << candidates.len()).map(|set| (of(set).map(|(worth, _)| worth).sum(), set)).collect();
    sets.sort_by(|one, other| {
        one.0.total_cmp(&other.0).then_with(|| one.1.count_ones().cmp(&other.1.count_ones()))
    });
    sets.into_iter().find_map(|(_, set)| {
        let leave: Vec<&EvictionGroup> = of(set).collect();
        is_enough(&leave).then(|| distinct_models(&leave).into_iter().cloned().collect())
    })
}

fn first_enough(
    candidates: &[EvictionGroup],
    is_enough: impl Fn(&[&EvictionGroup]) -> bool,
) -> Option<Vec<ModelId>> {
    let all: Vec<&EvictionGroup> = candidates.iter().collect();
    let enough = (1..=all.len()).find(|count| is_enough(&all[..*count]))?;
    let mut leave = all[..enough].to_vec();
    // Drop the models that need not be unloaded from the set, the most valuable first.
    for one in all[..enough].iter().rev() {
        let without: Vec<&EvictionGroup> =
            leave.iter().copied().filter(|kept| !std::ptr::eq(*kept, *one)).collect();
        if is_enough(&without) {
            leave = without;
        }
    }
    Some(distinct_models(&leave).into_iter().cloned().collect())
}

fn distinct_models<'a>(sets: &[&'a EvictionGroup]) -> Vec<&'a ModelId> {
    let all: BTreeSet<&ModelId> = sets.iter().flat_map(|(_, leave)| leave).collect();
    all.into_iter().collect()
}

impl LoadingState {
    /// Chooses the models to ask for memory, if their reclaims would make enough room for the waiting model.
    pub(super) fn request_reclaim(&mut self, wish: &LoadWish<'_>, now: Duration) -> ReclaimStep {
        let Some(free) = wish.free else { return ReclaimStep::Useless };
        let numbers = &self.numbers;
        let hoards = || self.models.all.values().filter_map(|model| model.reclaimable(now, numbers));
        let free = hoards().fold(free.clone(), |sum, hoard| sum.plus(&hoard));
        if hoards().next().is_none()
            || matches!(self.find_place(&LoadWish { free: Some(&free), ..*wish }, &[]), Placement::Nowhere)
        {
            return ReclaimStep::Useless;
        }
        let needed = self.models.all.get(wish.name).and_then(room::needed_bytes);
        let short = match needed.map(|needed| needed.exceeds(&self.room_left(wish.free))) {
            Some(short) if short != (false, false) => short,
            // Unclear: the model may lack host or GPU memory.
            _ => (true, true),
        };
        let helps =
            |model: &LoadedModel| model.reclaimable(now, numbers).is_some_and(|hoard| hoard.is_any_of(short));
        let able = self.models.all.iter().filter(|(_, model)| !model.reclaim.pending && helps(model));
        let asked: Vec<ModelId> = able.map(|(who, _)| who.clone()).collect();
        if asked.is_empty() {
            let awaited = self
                .models
                .all
                .values()
                .any(|model| model.reclaim.pending && model.reclaimable(now, numbers).is_some());
            return if awaited { ReclaimStep::Awaited } else { ReclaimStep::Useless };
        }
        for who in &asked {
            if let Some(model) = self.models.all.get_mut(who) {
                (model.reclaim.pending, model.reclaim.last) = (true, Some(now));
            }
        }
        ReclaimStep::Asked(asked)
    }
}

impl LoadedModel {
    /// Returns true if a model may be unloaded now: it is idle, or was in use for its full turn.
    fn may_leave(&self, now: Duration, seen: ModelActivity, numbers: &LoadingConfig) -> bool {
        if self.spec.guest {
            return self.is_staying();
        }
        let ModelLoadState::Serves { since } = self.state else { return false };
        let is_used = seen.is_in_use()
            || self.demand.expected_gap(seen.idle_for) < self.load_time.as_secs_f64() * numbers.turn_soon;
        !is_used || now.saturating_sub(since) >= self.turn_length(numbers)
    }

    fn turn_length(&self, numbers: &LoadingConfig) -> Duration {
        let LoadingConfig { turn_loads, turn_least, turn_most, .. } = *numbers;
        let turn =
            Duration::try_from_secs_f64(self.load_time.as_secs_f64() * turn_loads).unwrap_or(turn_most);
        turn.max(turn_least).min(turn_most)
    }

    /// Returns the time that keeping a model saves, divided by the time to its next request.
    fn keep_value(&self, seen: ModelActivity, leaker: f64) -> f64 {
        if self.spec.guest {
            return 0.0;
        }
        let expected = if seen.is_in_use() {
            IN_USE_SECONDS
        } else {
            self.demand.expected_gap(seen.idle_for).max(IN_USE_SECONDS)
        };
        let leaks = self.measured.reading.as_ref().is_some_and(|reading| reading.leaks);
        self.load_time.saturating_add(seen.conversations).as_secs_f64() / expected
            * if leaks { leaker } else { 1.0 }
    }

    /// Returns the bytes above the promise, if the build supports reclaim and no reclaim was tried lately.
    fn reclaimable(&self, now: Duration, numbers: &LoadingConfig) -> Option<MemoryAmounts> {
        let reading = self.measured.reading.as_ref().filter(|reading| reading.can_reclaim)?;
        let since = self.reclaim.last.map(|asked| now.saturating_sub(asked));
        let is_asked = match since {
            // A process that has not answered within `give_back` is not expected to free memory.
            Some(since) if self.reclaim.pending => since < numbers.give_back,
            Some(since) => since >= RECLAIM_INTERVAL,
            None => true,
        };
        let hoard = reading.held.minus(&self.admitted.promised);
        (is_asked && hoard.is_any_of((true, true)) && matches!(self.state, ModelLoadState::Serves { .. }))
            .then_some(hoard)
    }
}
