//! Sentences about readings, for events and logs.

use warden_policies::growth::VerdictChange;
use warden_policies::recycle::SeriesFacts;
use warden_policies::{ByteSize, RecycleDecision, phrases};

pub(crate) fn memory_sentence(decision: &RecycleDecision, facts: &SeriesFacts) -> Option<String> {
    let holds = format!("{} holds {}", facts.series, ByteSize(facts.charged?));
    let mut parts = vec![holds];
    parts.extend(facts.fresh().map(|fresh| format!("{} when it was young", ByteSize(fresh))));
    if let Some(growth) = facts.growth.as_ref().filter(|growth| growth.verdict.grows()) {
        let slope = growth.slope.as_ref().map(|slope| format!(", {}", phrases::slope_phrase(slope)));
        parts.push(format!("{}{}", growth.verdict.as_str(), slope.unwrap_or_default()));
    }
    parts.extend(decision.limit_bytes.map(|limit| format!("the limit is {}", ByteSize(limit))));
    Some(parts.join("; "))
}

pub(crate) fn verdict_sentence(change: &VerdictChange) -> String {
    let growth = &change.growth;
    let now = growth.verdict.as_str();
    let before = change.before.as_str();
    let mut parts =
        vec![format!("{}: {now} since request {} (was {before})", growth.series, growth.since_request)];
    parts.extend(growth.slope.as_ref().map(phrases::slope_phrase));
    parts.extend(growth.blame.as_ref().map(phrases::blame_phrase));
    parts.extend(phrases::fill_phrase(&growth.fill));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warden_policies::growth::{
        AllowanceFill, GrowthBlame, GrowthVerdict, IntervalEstimate, SeriesGrowth, WorkUnit,
    };
    use warden_policies::{GpuIndex, MemoryKind, Reason, RecycleAction};

    use super::*;

    #[test]
    fn the_grounds_name_the_memory_what_it_held_and_the_limit() {
        let series = MemoryKind::Vram(GpuIndex(0));
        let facts = SeriesFacts { at_ready: Some(2 << 30), ..SeriesFacts::from_bytes(series, Some(3 << 30)) };
        let decision = RecycleDecision {
            action: RecycleAction::RecycleWhenQuiet,
            reason: Some(Reason::VramSoft),
            limit_bytes: Some(5 << 29),
            ..RecycleDecision::OBSERVE
        };
        insta::assert_snapshot!(memory_sentence(&decision, &facts).unwrap());
        assert_eq!(memory_sentence(&decision, &SeriesFacts::from_bytes(series, None)), None);
    }

    #[test]
    fn a_change_of_verdict_reads_as_a_sentence() {
        let interval = |value| IntervalEstimate { value, low: value, high: value };
        let mut growth = SeriesGrowth {
            verdict: GrowthVerdict::Leaking,
            since_request: 120,
            slope: Some(interval(4.5 * 1024.0 * 1024.0)),
            fill: AllowanceFill { allowed: 2 << 30, used: 3 << 30 },
            blame: Some(GrowthBlame::Pays { unit: WorkUnit::Image, bytes_per_unit: 1024.0, share: 0.943 }),
            ..SeriesGrowth::without_readings(MemoryKind::Host)
        };
        let change = |growth: &SeriesGrowth| VerdictChange {
            at: Duration::ZERO,
            request: 120,
            before: GrowthVerdict::Bounded,
            growth: growth.clone(),
        };
        let known = verdict_sentence(&change(&growth));
        growth.slope = Some(interval(-2048.0));
        growth.blame = Some(GrowthBlame::Undecided { why: "the load is always the same".to_owned() });
        growth.fill = AllowanceFill::default();
        insta::assert_snapshot!([known, verdict_sentence(&change(&growth))].join("\n"));
    }
}
