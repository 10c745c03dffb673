//! Result of a replay as a JSON object. `docs/configuration.md` documents its keys.

use serde_json::{Map, Value, json as value};
use warden_patches::mitigation::LeakAdvice;
use warden_policies::growth::{GrowthBlame, GrowthForecast, GrowthVerdict, SeriesGrowth, VerdictChange};
use warden_policies::recycle::SeriesFacts;
use warden_policies::units::as_f64;
use warden_policies::{Reason, phrases};

use super::{ReplayDecision, ReplayResult};

pub(crate) fn replay_json(trace: &str, done: &ReplayResult, advice: &[LeakAdvice]) -> Value {
    let all =
        done.growth().map(|(facts, growth)| (growth.series.to_string(), series_json(done, facts, growth)));
    value!({
        "trace": trace,
        "readings": done.readings,
        "requests": done.work.requests,
        "seconds": rounded(done.lasted.as_secs_f64()),
        "series": all.collect::<Map<String, Value>>(),
        "actions": done.actions.iter().map(act_json).collect::<Vec<_>>(),
        "observed": done.observed.iter().map(act_json).collect::<Vec<_>>(),
        "advice": advice.iter().map(|one| value!({
            "leak": one.leak,
            "confidence": one.confidence,
            "mitigations": one.mitigations,
            "text": one.sentence(),
        })).collect::<Vec<_>>(),
    })
}

fn series_json(done: &ReplayResult, facts: &SeriesFacts, growth: &SeriesGrowth) -> Value {
    let changes: Vec<&VerdictChange> =
        done.changes.iter().filter(|change| change.growth.series == growth.series).collect();
    let first = changes.iter().find(|change| change.growth.verdict.leaks());
    let (unit, per_unit, share) = match &growth.blame {
        Some(GrowthBlame::Pays { unit, bytes_per_unit, share }) => {
            (Some(unit.as_str()), Some(mib(*bytes_per_unit)), Some(rounded(*share)))
        }
        Some(GrowthBlame::Undecided { .. }) | None => (None, None, None),
    };
    value!({
        "final": verdict_name(growth.verdict),
        "first_leaking_request": first.map(|change| change.request),
        "first_leaking_t": first.map(|change| rounded(change.at.as_secs_f64())),
        "slope_mib_per_request": growth.slope.map(|slope| mib(slope.value)),
        "slope_low_mib": growth.slope.map(|slope| mib(slope.low)),
        "slope_high_mib": growth.slope.map(|slope| mib(slope.high)),
        "blame": unit,
        "blame_mib_per_unit": per_unit,
        "blame_share": share,
        "blame_note": growth.blame.as_ref().map(phrases::blame_phrase),
        "baseline_mib": growth.baseline.map(whole_mib),
        "floor_mib": growth.floor.map(whole_mib),
        "charged_mib": facts.charged.map(whole_mib),
        "fill": { "allowed_mib": whole_mib(growth.fill.allowed), "used_mib": whole_mib(growth.fill.used) },
        "forecast": {
            "soft": facts.to_soft.as_ref().map(forecast_json),
            "hard": facts.to_hard.as_ref().map(forecast_json),
        },
        "verdicts": changes.into_iter().map(change_json).collect::<Vec<_>>(),
    })
}

pub(super) fn verdict_name(verdict: GrowthVerdict) -> String {
    format!("{verdict:?}")
}

fn change_json(change: &VerdictChange) -> Value {
    value!({
        "request": change.request,
        "t": rounded(change.at.as_secs_f64()),
        "before": verdict_name(change.before),
        "verdict": verdict_name(change.growth.verdict),
        "slope_mib_per_request": change.growth.slope.map(|slope| mib(slope.value)),
        "blame_note": change.growth.blame.as_ref().map(phrases::blame_phrase),
    })
}

fn act_json(act: &ReplayDecision) -> Value {
    let why_not = act.decision.why_not.map(|why| why.to_string());
    value!({
        "request": act.request,
        "t": rounded(act.at.as_secs_f64()),
        "action": act.decision.action.as_str(),
        "reason": act.decision.reason.map(Reason::as_str),
        "series": act.decision.series.map(|series| series.to_string()),
        "limit_mib": act.decision.limit_bytes.map(whole_mib),
        "charged_mib": act.bytes.map(whole_mib),
        "due": act.decision.due && act.held.is_none(),
        "why_not": act.held.map(|held| held.to_string()).or(why_not),
    })
}

fn forecast_json(forecast: &GrowthForecast) -> Value {
    let ends = |interval: &warden_policies::growth::IntervalEstimate| {
        // JSON has no infinity, so an infinite end becomes null.
        let end = |end: f64| (end < 1e300).then(|| rounded(end));
        value!({ "value": end(interval.value), "low": end(interval.low), "high": end(interval.high) })
    };
    value!({
        "limit_mib": whole_mib(forecast.limit),
        "requests": ends(&forecast.requests),
        "seconds": forecast.seconds.as_ref().map(ends),
    })
}

fn mib(bytes: f64) -> f64 {
    rounded(bytes / (1024.0 * 1024.0))
}

fn whole_mib(bytes: u64) -> f64 {
    mib(as_f64(bytes))
}

/// Further decimals are noise.
fn rounded(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}
