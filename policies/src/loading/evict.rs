//! Chooses the models to unload so that another one can be loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Loading, Model, Numbers, Place, Seen, State, Who, Wish};

/// Most candidates for which all combinations are tried; more are unloaded one by one, cheapest first.
const COMBINED: usize = 12;

/// Value of keeping models that can only be unloaded together, and the models.
type Party = (f64, Vec<Who>);

/// Seconds until the next request of a model in use: less than for any idle model.
const SOONEST: f64 = 0.1;

impl Loading {
    /// Chooses the models whose unloading costs least and makes enough room; empty if no set does.
    pub(super) fn leaving_for(&self, wish: &Wish<'_>, now: Duration, seen: &BTreeMap<Who, Seen>) -> Vec<Who> {
        let may_leave = |who: &Who| {
            let model = self.models.get(who);
            model.is_some_and(|model| !model.spec.pin && self.may_leave(model, now, seen[who]))
        };
        let mut candidates: Vec<Party> = self
            .models
            .keys()
            .filter(|who| may_leave(who))
            .map(|who| {
                let mut leave = self.who_goes_along(who);
                leave.push(who.clone());
                leave
            })
            .filter(|leave| leave.iter().all(may_leave))
            .map(|leave| {
                let worth = leave.iter().map(|who| self.worth(&self.models[who], seen[who]));
                (worth.sum(), leave)
            })
            .collect();
        let is_enough = |of: &[Party]| self.is_enough(wish, &union(&of.iter().collect::<Vec<_>>()));
        if !is_enough(&candidates) {
            return Vec::new();
        }
        // The wanted model's companions would be loaded again with it, and a model that has it as a
        // companion would call it again. Both kinds are unloaded only where others are not enough.
        let company = self.along_with(wish.name);
        let is_own = |(_, leave): &Party| leave.iter().any(|who| company.contains(who));
        let calls = |(_, leave): &Party| leave.iter().any(|who| self.calls(who, wish.name));
        let without = |out: &dyn Fn(&Party) -> bool| {
            let others: Vec<_> = candidates.iter().filter(|one| !out(one)).cloned().collect();
            is_enough(&others).then_some(others)
        };
        let better = without(&|one| is_own(one) || calls(one))
            .or_else(|| without(&is_own))
            .or_else(|| without(&calls));
        candidates = better.unwrap_or(candidates);
        candidates.sort_by(|one, other| one.0.total_cmp(&other.0).then_with(|| one.1.cmp(&other.1)));
        let cheapest = if candidates.len() <= COMBINED {
            self.cheapest_set(wish, &candidates)
        } else {
            self.first_enough(wish, &candidates)
        };
        cheapest.unwrap_or_default()
    }

    /// Returns true if a loaded model has the wanted one as an absent companion, and so would call it.
    fn calls(&self, there: &Who, wanted: &Who) -> bool {
        self.models.get(there).is_some_and(|model| !model.spec.with.is_empty())
            && self.party(there).contains(wanted)
    }

    /// Returns true if a model may be unloaded now: not in use, or in use for its full turn.
    fn may_leave(&self, model: &Model, now: Duration, seen: Seen) -> bool {
        if model.spec.guest {
            return matches!(model.state, State::Comes { .. } | State::Serves { .. });
        }
        let State::Serves { since } = model.state else { return false };
        let is_used = seen.is_in_use()
            || model.demand.expected(seen.idle_for) < model.load_time.as_secs_f64() * self.numbers.turn_soon;
        !is_used || now.saturating_sub(since) >= self.turn(model)
    }

    fn turn(&self, model: &Model) -> Duration {
        let Numbers { turn_loads, turn_least, turn_most, .. } = self.numbers;
        let turn =
            Duration::try_from_secs_f64(model.load_time.as_secs_f64() * turn_loads).unwrap_or(turn_most);
        turn.max(turn_least).min(turn_most)
    }

    /// Value of keeping a model: the load and prompt evaluation that it saves, divided by the time to its
    /// next request.
    fn worth(&self, model: &Model, seen: Seen) -> f64 {
        if model.spec.guest {
            return 0.0;
        }
        let expected =
            if seen.is_in_use() { SOONEST } else { model.demand.expected(seen.idle_for).max(SOONEST) };
        let leaks = model.reading.as_ref().is_some_and(|reading| reading.leaks);
        model.load_time.saturating_add(seen.conversations).as_secs_f64() / expected
            * if leaks { self.numbers.leaker } else { 1.0 }
    }

    fn is_enough(&self, wish: &Wish<'_>, leave: &[&Who]) -> bool {
        !matches!(self.place(wish, leave), Place::Nowhere)
    }

    fn cheapest_set(&self, wish: &Wish<'_>, candidates: &[Party]) -> Option<Vec<Who>> {
        let of = |set: u32| {
            (0..).zip(candidates).filter(move |(index, _)| set >> index & 1 == 1).map(|(_, one)| one)
        };
        let mut sets: Vec<(f64, u32)> =
            (1..1_u32 << candidates.len()).map(|set| (of(set).map(|(worth, _)| worth).sum(), set)).collect();
        sets.sort_by(|one, other| {
            one.0.total_cmp(&other.0).then_with(|| one.1.count_ones().cmp(&other.1.count_ones()))
        });
        sets.into_iter().find_map(|(_, set)| {
            let leave = union(&of(set).collect::<Vec<_>>());
            self.is_enough(wish, &leave).then(|| leave.into_iter().cloned().collect())
        })
    }

    fn first_enough(&self, wish: &Wish<'_>, candidates: &[Party]) -> Option<Vec<Who>> {
        let all: Vec<&Party> = candidates.iter().collect();
        let enough = (1..=all.len()).find(|count| self.is_enough(wish, &union(&all[..*count])))?;
        let mut leave = all[..enough].to_vec();
        // Keep the models that are not needed, the most valuable first.
        for one in all[..enough].iter().rev() {
            let without: Vec<&Party> =
                leave.iter().copied().filter(|kept| !std::ptr::eq(*kept, *one)).collect();
            if self.is_enough(wish, &union(&without)) {
                leave = without;
            }
        }
        Some(union(&leave).into_iter().cloned().collect())
    }
}

/// All models of the sets, each once.
fn union<'a>(sets: &[&'a Party]) -> Vec<&'a Who> {
    let all: BTreeSet<&Who> = sets.iter().flat_map(|(_, leave)| leave).collect();
    all.into_iter().collect()
}
