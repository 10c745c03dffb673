//! What readings say, in sentences for events and logs.

use warden_policies::growth::VerdictChange;
use warden_policies::recycle::SeriesFacts;
use warden_policies::{ByteSize, Decision, phrases};

/// One sentence about the memory that a decision is about; `None` if it is not known.
pub(super) fn grounds(decision: &Decision, facts: &SeriesFacts) -> Option<String> {
    let holds = format!("{} holds {}", facts.series, ByteSize(facts.charged?));
    let mut parts = vec![holds];
    parts.extend(facts.fresh().map(|fresh| format!("{} when it was young", ByteSize(fresh))));
    if let Some(growth) = facts.growth.as_ref().filter(|growth| growth.verdict.grows()) {
        let slope = growth.slope.as_ref().map(|slope| format!(", {}", phrases::slope(slope)));
        parts.push(format!("{}{}", growth.verdict.as_str(), slope.unwrap_or_default()));
    }
    parts.extend(decision.limit_bytes.map(|limit| format!("the limit is {}", ByteSize(limit))));
    Some(parts.join("; "))
}

/// One sentence about a change of verdict.
pub(super) fn verdict(change: &VerdictChange) -> String {
    let growth = &change.growth;
    let (now, before) = (growth.verdict.as_str(), change.before.as_str());
    let mut parts =
        vec![format!("{}: {now} since request {} (was {before})", growth.series, growth.since_request)];
    parts.extend(growth.slope.as_ref().map(phrases::slope));
    parts.extend(growth.blame.as_ref().map(phrases::blame));
    parts.extend(phrases::fill(&growth.fill));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warden_policies::growth::{Blame, Fill, Growth, Interval, Unit, Verdict};
    use warden_policies::{Action, GpuIndex, MemoryKind, Reason};

    use super::*;

    #[test]
    fn the_grounds_name_the_memory_what_it_held_and_the_limit() {
        let series = MemoryKind::Vram(GpuIndex(0));
        let facts = SeriesFacts { at_ready: Some(2 << 30), ..SeriesFacts::of(series, Some(3 << 30)) };
        let decision = Decision {
            action: Action::RecycleWhenQuiet,
            reason: Some(Reason::VramSoft),
            limit_bytes: Some(5 << 29),
            ..Decision::OBSERVE
        };
        let said = "vram0 holds 3.0 GiB; 2.0 GiB when it was young; the limit is 2.5 GiB";
        assert_eq!(grounds(&decision, &facts).as_deref(), Some(said));
        assert_eq!(grounds(&decision, &SeriesFacts::of(series, None)), None);
    }

    #[test]
    fn a_change_of_verdict_reads_as_a_sentence() {
        let interval = |value| Interval { value, low: value, high: value };
        let mut growth = Growth {
            verdict: Verdict::Leaking,
            since_request: 120,
            slope: Some(interval(4.5 * 1024.0 * 1024.0)),
            fill: Fill { allowed: 2 << 30, used: 3 << 30 },
            blame: Some(Blame::Pays { unit: Unit::Image, bytes_per_unit: 1024.0, share: 0.943 }),
            ..Growth::of(MemoryKind::Host)
        };
        let change = |growth: &Growth| VerdictChange {
            at: Duration::ZERO,
            request: 120,
            before: Verdict::Bounded,
            growth: growth.clone(),
        };
        assert_eq!(
            verdict(&change(&growth)),
            "host: leaking since request 120 (was bounded), +4.50 MiB a request (4.50 to 4.50), each image pays \
             1.00 KiB (94 % of the growth), 3.0 GiB of 2.0 GiB that it may keep (150 %)"
        );
        growth.slope = Some(interval(-2048.0));
        growth.blame = Some(Blame::Undecided { why: "the load is always the same".to_owned() });
        growth.fill = Fill::default();
        assert_eq!(
            verdict(&change(&growth)),
            "host: leaking since request 120 (was bounded), -0.0020 MiB a request (-0.0020 to -0.0020), nothing is \
             blamed: the load is always the same"
        );
    }
}
