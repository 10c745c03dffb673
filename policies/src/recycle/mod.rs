//! Decides if a backend should be replaced because of memory budgets, growth, faults, requests or age.
//!
//! ```text
//!  policy ─┐                                              ┌─ when quiet ── window? quiet? cheapest moment? ── due
//!          ├─ wishes, each with a reason ── the strongest ┼─ drain now ───────────────────────────────────── due
//!  Facts ──┘                                              └─ kill now ────────────────────────────────────── due
//! ```
//!
//! [`decide`] maps one [`RecycleFacts`] to one [`RecycleDecision`] and keeps no state. [`crate::cooldown`]
//! decides if the action may be carried out now.

mod decision;
mod facts;
mod policy;
#[cfg(test)]
mod policy_tests;
mod reason;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use decision::{RecycleDecision, RecycleHindrance};
pub use facts::{RecycleFacts, SeriesFacts, SeriesReading};
pub use policy::{LevelsPolicy, MemoryBudget, RecyclePolicy};
pub use reason::{Reason, RecycleAction};

pub use crate::modes::{AnswersMode, GrowthMode};

use crate::growth::GrowthForecast;
use crate::health::HealthSymptom;
use crate::replacement_cost;
use crate::sample::MemoryKind;
use crate::share::BudgetLevel;
use crate::units::{self, as_f64, truncate_to_u64};

/// An argument for a replacement.
#[derive(Clone, Copy)]
struct RecycleWish {
    action: RecycleAction,
    reason: Reason,
    series: Option<MemoryKind>,
    limit: Option<u64>,
    observing: bool,
    threat: bool,
}

impl RecycleWish {
    const fn new(action: RecycleAction, reason: Reason, series: Option<MemoryKind>) -> Self {
        Self { action, reason, series, limit: None, observing: false, threat: false }
    }
}

/// Judges one process.
pub fn decide(policy: &RecyclePolicy, facts: &RecycleFacts) -> RecycleDecision {
    decide_without_barred(policy, facts, |_, _| false)
}

/// Judges one process, with barred reasons ([`crate::cooldown::RecycleCooldown::find_bar`]), which never
/// precede another reason. If only barred reasons exist, the strongest is returned for the cooldown to hold
/// back.
pub fn decide_without_barred(
    policy: &RecyclePolicy,
    facts: &RecycleFacts,
    barred: impl Fn(Reason, Option<MemoryKind>) -> bool,
) -> RecycleDecision {
    let wishes = collect_wishes(policy, facts);
    let of = |observing: bool, all: bool| {
        // `max_by_key` takes the last of equal values, and the list has the strongest reason first.
        let kind = wishes.iter().rev().filter(move |wish| wish.observing == observing);
        kind.filter(|wish| all || !barred(wish.reason, wish.series)).max_by_key(|wish| wish.action)
    };
    let Some(wish) = of(false, false).or_else(|| of(false, true)) else {
        let observed = of(true, true).map(|wish| RecycleDecision {
            reason: Some(wish.reason),
            series: wish.series,
            limit_bytes: wish.limit,
            why_not: Some(RecycleHindrance::Observing { would: wish.action }),
            ..RecycleDecision::OBSERVE
        });
        return observed.or_else(|| future_decision(policy, facts)).unwrap_or(RecycleDecision::OBSERVE);
    };
    let decision = RecycleDecision {
        action: wish.action,
        reason: Some(wish.reason),
        due: true,
        series: wish.series,
        limit_bytes: wish.limit,
        why_not: None,
        threat: wish.threat,
    };
    if wish.action > RecycleAction::RecycleWhenQuiet {
        decision
    } else {
        check_quiet(policy, facts, decision)
    }
}

/// Decides if a replacement that can be deferred should take place now.
fn check_quiet(policy: &RecyclePolicy, facts: &RecycleFacts, decision: RecycleDecision) -> RecycleDecision {
    if let Some(minute) = facts.minute
        && !policy.only.is_open(minute)
    {
        return decision
            .held_back(RecycleHindrance::OutsideWindow { minutes_left: policy.only.opens_in(minute) });
    }
    let quiet = facts.idle_for.is_some_and(|idle| idle >= policy.common.quiet_for);
    // Time outside the windows does not count: every waiting replacement would be due when a window opens.
    let opened = facts.minute.and_then(|minute| policy.only.open_for(minute)).unwrap_or(Duration::MAX);
    let waited = facts.wanted_for.unwrap_or_default().min(opened);
    let last = facts.minute.is_some_and(|minute| policy.only.is_closing(minute));
    if quiet
        || last
        || waited >= policy.common.quiet_within
        || replacement_cost::weigh_replacement(&policy.replacement_cost, &facts.load, soonest_end(facts)).now
    {
        return decision;
    }
    let left = policy.common.quiet_within.saturating_sub(waited);
    let seconds_left = left.as_secs() + u64::from(left.subsec_nanos() > 0);
    decision.held_back(RecycleHindrance::NotQuiet { seconds_left })
}

fn soonest_end(facts: &RecycleFacts) -> Option<&GrowthForecast> {
    let leaking = |series: &&SeriesFacts| series.growth.as_ref().is_some_and(|growth| growth.verdict.leaks());
    let ends = facts
        .series
        .iter()
        .filter(leaking)
        .flat_map(|series| [series.to_hard.as_ref(), series.to_end.as_ref()]);
    ends.flatten().filter(|forecast| forecast.seconds.is_some()).min_by(|a, b| {
        let low = |forecast: &GrowthForecast| forecast.seconds.map_or(f64::MAX, |seconds| seconds.low);
        low(a).total_cmp(&low(b))
    })
}

/// Returns all arguments for a replacement, the strongest first.
fn collect_wishes(policy: &RecyclePolicy, facts: &RecycleFacts) -> Vec<RecycleWish> {
    let mut wishes = Vec::new();
    for series in &facts.series {
        wishes.extend(exhaustion_wish(policy, series));
    }
    for series in &facts.series {
        wishes.extend(budget_wish(policy, series, facts.urgent_for));
    }
    wishes.extend(facts.shared.map(|chosen| {
        let action = match chosen.level {
            BudgetLevel::Soft => RecycleAction::RecycleWhenQuiet,
            BudgetLevel::Hard => RecycleAction::DrainNow,
        };
        let is_host = chosen.series == MemoryKind::Host;
        let reason = if is_host { Reason::SharedHost } else { Reason::SharedVram };
        RecycleWish { limit: Some(chosen.limit), ..RecycleWish::new(action, reason, Some(chosen.series)) }
    }));
    wishes.extend(facts.symptoms.iter().filter_map(|symptom| {
        let slow = symptom.reason() == Reason::SlowDecode;
        let action = symptom_action(symptom, facts.urgent_for);
        let wish = RecycleWish::new(action, symptom.reason(), symptom.series());
        if symptom.reason().is_answers() {
            return match policy.common.answers {
                // A symptom found before the setting was changed.
                AnswersMode::Off => None,
                AnswersMode::Observe => Some(RecycleWish { observing: true, ..wish }),
                AnswersMode::Replace => Some(wish),
            };
        }
        match policy.common.growth {
            GrowthMode::Off if slow => None,
            GrowthMode::Observe if slow => Some(RecycleWish { observing: true, ..wish }),
            _ => Some(wish),
        }
    }));
    let waits = facts
        .admission
        .map(|_| RecycleWish::new(RecycleAction::DrainNow, Reason::Admission, facts.admission));
    wishes.extend(waits);
    for series in &facts.series {
        wishes.extend(growth_wish(policy, facts, series));
    }
    let plain = |reason| RecycleWish::new(RecycleAction::RecycleWhenQuiet, reason, None);
    if policy
        .max_requests
        .is_some_and(|max| facts.work.requests >= jittered(max, policy.common.jitter, facts.unit))
    {
        wishes.push(plain(Reason::MaxRequests));
    }
    if policy.max_age.is_some_and(|max| facts.age >= jittered_time(max, policy.common.jitter, facts.unit)) {
        wishes.push(plain(Reason::MaxAge));
    }
    wishes
}

/// Returns the action for a symptom. A wedged server never finishes the requests that a drain waits for, so
/// it is killed if it stays silent for the same time again.
fn symptom_action(symptom: &HealthSymptom, urgent_for: Option<Duration>) -> RecycleAction {
    match symptom {
        HealthSymptom::Wedged { limit, .. }
            if urgent_for.is_some_and(|drained| drained.as_secs_f64() >= limit.seconds) =>
        {
            RecycleAction::KillNow
        }
        _ => symptom.action(),
    }
}

/// Returns the wish to kill a backend because memory is almost exhausted, if that frees enough.
fn exhaustion_wish(policy: &RecyclePolicy, facts: &SeriesFacts) -> Option<RecycleWish> {
    let (free, gain) = (facts.free?, facts.gain()?);
    let limit = policy.exhaustion_bytes(facts);
    // A GPU that was filled on purpose always has little free VRAM; only a growing process is a danger there.
    let still = facts.series == MemoryKind::Host || facts.rising;
    let wish = RecycleWish::new(RecycleAction::KillNow, Reason::MemoryExhausted, Some(facts.series));
    (free < limit && still && gain >= limit && !facts.estimated).then_some(RecycleWish {
        limit: Some(limit),
        threat: true,
        ..wish
    })
}

fn budget_wish(
    policy: &RecyclePolicy,
    facts: &SeriesFacts,
    urgent_for: Option<Duration>,
) -> Option<RecycleWish> {
    let charged = facts.charged?;
    let budget = policy.budget(facts);
    let (soft, hard) = match facts.series {
        MemoryKind::Host => (Reason::HostSoft, Reason::HostHard),
        MemoryKind::Vram(_) => (Reason::VramSoft, Reason::VramHard),
    };
    let wish = |action, reason, limit| {
        Some(RecycleWish { limit: Some(limit), ..RecycleWish::new(action, reason, Some(facts.series)) })
    };
    if let Some(limit) = budget.hard.filter(|limit| charged >= *limit) {
        let lost = charged > units::scale_bytes(limit, policy.levels.kill_over)
            && urgent_for.is_some_and(|wanted| wanted >= policy.levels.kill_after)
            && !facts.estimated;
        // If the machine still has memory, the drain continues: requests are worth more than the budget.
        let action =
            if lost && policy.is_short(facts) { RecycleAction::KillNow } else { RecycleAction::DrainNow };
        return wish(action, hard, limit)
            .map(|wish| RecycleWish { threat: facts.free.is_some() && policy.is_short(facts), ..wish });
    }
    budget
        .soft
        .filter(|limit| charged >= *limit)
        .and_then(|limit| wish(RecycleAction::RecycleWhenQuiet, soft, limit))
}

/// Returns the wish to replace a leaking process, if the leak reaches a limit soon.
fn growth_wish(policy: &RecyclePolicy, facts: &RecycleFacts, series: &SeriesFacts) -> Option<RecycleWish> {
    let leaks = series.growth.as_ref().is_some_and(|growth| growth.verdict.leaks());
    if policy.common.growth == GrowthMode::Off || !leaks {
        return None;
    }
    let quiet = quiet_horizon(policy, facts);
    let soonest = |forecasts: &[Option<GrowthForecast>], within: Duration| {
        let known =
            forecasts.iter().flatten().filter_map(|forecast| Some((forecast.limit, forecast.seconds?.value)));
        known
            .filter(|(_, seconds)| *seconds < within.as_secs_f64())
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .map(|(limit, _)| limit)
    };
    let hard = soonest(&[series.to_hard, series.to_end], policy.common.growth_drain);
    let soft = soonest(&[series.to_soft, series.to_hard, series.to_end], quiet);
    let (action, limit) = match (hard, soft) {
        (Some(limit), _) => (RecycleAction::DrainNow, limit),
        (None, Some(limit)) => (RecycleAction::RecycleWhenQuiet, limit),
        (None, None) => return None,
    };
    Some(RecycleWish {
        limit: Some(limit),
        observing: policy.common.growth == GrowthMode::Observe,
        ..RecycleWish::new(action, Reason::Growth, Some(series.series))
    })
}

/// Returns a decision for a leak that will be handled later, with the limit that it reaches first.
fn future_decision(policy: &RecyclePolicy, facts: &RecycleFacts) -> Option<RecycleDecision> {
    if policy.common.growth != GrowthMode::Recycle {
        return None;
    }
    let leaks = |series: &&SeriesFacts| series.growth.as_ref().is_some_and(|growth| growth.verdict.leaks());
    let ends = facts.series.iter().filter(leaks).flat_map(|series| {
        let all = [series.to_soft, series.to_hard, series.to_end].into_iter().flatten();
        all.filter_map(|forecast| Some((series.series, forecast.limit, forecast.seconds?.value)))
    });
    let (series, limit, seconds) = ends.min_by(|a, b| a.2.total_cmp(&b.2))?;
    let left = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    let why_not = RecycleHindrance::NotYet {
        seconds_to_limit: left.as_secs(),
        seconds_before: quiet_horizon(policy, facts).as_secs(),
    };
    Some(RecycleDecision {
        reason: Some(Reason::Growth),
        series: Some(series),
        limit_bytes: Some(limit),
        why_not: Some(why_not),
        ..RecycleDecision::OBSERVE
    })
}

/// Returns the time before a budget is reached from which a growing backend is replaced at a quiet moment.
///
/// With daily windows: half a day, or the time until the window after the present one, if longer. Without
/// windows: the time that finding a lull takes almost surely, between twice the horizon of a drain and half a
/// day.
fn quiet_horizon(policy: &RecyclePolicy, facts: &RecycleFacts) -> Duration {
    if !policy.only.is_always() {
        let next = facts.minute.map_or(Duration::ZERO, |minute| policy.only.time_to_next(minute));
        return policy.common.growth_quiet.max(next);
    }
    let least = policy.common.growth_drain.saturating_mul(2).min(policy.common.growth_quiet);
    facts
        .load
        .lull_search_time()
        .map_or(policy.common.growth_quiet, |time| time.clamp(least, policy.common.growth_quiet))
}

/// Returns a factor between `1 - jitter` and `1`: jitter never raises a configured limit.
fn jitter_factor(jitter: f64, unit: f64) -> f64 {
    1.0 - jitter.clamp(0.0, 1.0) * unit.clamp(0.0, 1.0)
}

fn jittered(max: u64, jitter: f64, unit: f64) -> u64 {
    truncate_to_u64((as_f64(max) * jitter_factor(jitter, unit)).ceil()).clamp(1, max.max(1))
}

fn jittered_time(max: Duration, jitter: f64, unit: f64) -> Duration {
    max.mul_f64(jitter_factor(jitter, unit))
}
