//! What readings say, in sentences for events and logs.

use warden_policies::growth::{Blame, Turn};
use warden_policies::units::ByteSize;

/// One sentence about a change of verdict.
pub(super) fn verdict(turn: &Turn) -> String {
    let growth = &turn.growth;
    let (now, before) = (growth.verdict.as_str(), turn.before.as_str());
    let mut parts =
        vec![format!("{}: {now} since request {} (was {before})", growth.series, growth.since_request)];
    parts.extend(growth.slope.map(|slope| format!("{} per request", size(slope.value))));
    parts.extend(growth.blame.as_ref().map(|blame| match blame {
        Blame::Pays { unit, bytes_per_unit, share } => format!(
            "{} per {} ({:.0} % of the growth)",
            size(*bytes_per_unit),
            unit.as_str().replace('_', " "),
            share * 100.0
        ),
        Blame::Undecided { why } => format!("no unit of work to blame: {why}"),
    }));
    if growth.fill.allowed > 0 {
        let (used, allowed) = (ByteSize(growth.fill.used), ByteSize(growth.fill.allowed));
        parts.push(format!("{used} of {allowed} that it is told to keep"));
    }
    parts.join(", ")
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "made positive before; bytes for people, so a fraction of one does not matter"
)]
fn size(bytes: f64) -> String {
    let size = ByteSize(bytes.abs() as u64);
    if bytes < 0.0 { format!("-{size}") } else { size.to_string() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warden_policies::Series;
    use warden_policies::growth::{Fill, Growth, Interval, Unit, Verdict};

    use super::*;

    #[test]
    fn a_change_of_verdict_reads_as_a_sentence() {
        let interval = |value| Interval { value, low: value, high: value };
        let mut growth = Growth {
            series: Series::Host,
            verdict: Verdict::Leaking,
            since_request: 120,
            slope: Some(interval(4.5 * 1024.0 * 1024.0)),
            baseline: None,
            floor: None,
            fill: Fill { allowed: 2 << 30, used: 3 << 30 },
            blame: Some(Blame::Pays { unit: Unit::Image, bytes_per_unit: 1024.0, share: 0.943 }),
        };
        let turn = |growth: &Growth| Turn {
            at: Duration::ZERO,
            request: 120,
            before: Verdict::Bounded,
            growth: growth.clone(),
        };
        assert_eq!(
            verdict(&turn(&growth)),
            "host: leaking since request 120 (was bounded), 4.5 MiB per request, 1.0 KiB per image (94 % of the growth), \
             3.0 GiB of 2.0 GiB that it is told to keep"
        );
        growth.slope = Some(interval(-2048.0));
        growth.blame = Some(Blame::Undecided { why: "the load is always the same".to_owned() });
        growth.fill = Fill::default();
        assert_eq!(
            verdict(&turn(&growth)),
            "host: leaking since request 120 (was bounded), -2.0 KiB per request, no unit of work to blame: the load is \
             always the same"
        );
    }
}
