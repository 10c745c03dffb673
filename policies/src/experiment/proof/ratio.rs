//! Whether the new build takes more of something than the old one, from as few processes as that takes.
//!
//! ```text
//!  round by round: ln(new / old) ──> mean, scatter ──> Student's test at two limits
//!
//!  new / old   ────── 1 ───────────── 1 + limit ──────
//!              Better      Same                   Worse
//! ```
//!
//! Both processes of a round ran one behind the other, so their ratio is free of what changes over minutes. A ratio is judged after each round;
//! the chances of a mistake are divided among all looks that there can be (Bonferroni), so that stopping at the first proof keeps to the
//! declared rates:
//!
//! - `false_worse`: that a build which takes at most `limit` more is said to take more;
//! - `missed_worse`: that one which takes more is said not to.
//!
//! Memory that only one of the builds holds (one of them took another GPU) has no ratio: it counts where each process of that build holds
//! more of it than the slack.

use serde::{Deserialize, Serialize};

use super::super::student;
use super::{Metric, ProofPolicy, Ruling, Visit};
use crate::growth::{Interval, stats};
use crate::sample::MemoryKind;
use crate::units::exact;

/// One metric of both builds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// What.
    pub metric: Metric,
    /// Medians over the processes: seconds or bytes.
    pub old: f64,
    /// Of the new build.
    pub new: f64,
    /// New by old, with the ends of the interval that the test uses; `None` with fewer than two rounds, and where only one build has it.
    pub ratio: Option<Interval>,
    /// How it stands.
    pub ruling: Ruling,
}

/// All metrics that both builds have, and memory that either holds.
pub(super) fn all(policy: &ProofPolicy, old: &[Visit], new: &[Visit]) -> Vec<Ratio> {
    let mut metrics: Vec<Metric> = Vec::new();
    for (metric, _) in old.iter().chain(new).flat_map(|visit| &visit.measured) {
        if !metrics.contains(metric) {
            metrics.push(*metric);
        }
    }
    metrics.sort();
    metrics.into_iter().filter_map(|metric| of(policy, metric, old, new)).collect()
}

fn of(policy: &ProofPolicy, metric: Metric, old: &[Visit], new: &[Visit]) -> Option<Ratio> {
    let value = |visit: &Visit| {
        let own = visit.measured.iter().find(|(own, _)| *own == metric);
        own.map(|(_, value)| *value).filter(|value| value.is_finite() && *value > 0.0)
    };
    let pairs: Vec<(f64, f64)> =
        old.iter().zip(new).filter_map(|(old, new)| Some((value(old)?, value(new)?))).collect();
    if pairs.is_empty() {
        return alone(policy, metric, old, new);
    }
    let (before, after) = (
        median(pairs.iter().map(|pair| pair.0).collect()),
        median(pairs.iter().map(|pair| pair.1).collect()),
    );
    let logs: Vec<f64> = pairs.iter().map(|(old, new)| (new / old).ln()).collect();
    let judged = judge(policy, &logs, limit(policy, metric, before));
    let (ratio, ruling) = judged.map_or((None, Ruling::Unknown), |(ratio, ruling)| (Some(ratio), ruling));
    Some(Ratio { metric, old: before, new: after, ratio, ruling })
}

fn median(mut values: Vec<f64>) -> f64 {
    stats::median(&mut values).unwrap_or(0.0)
}

/// Memory that only one build holds, in rounds in which memory was read of both: a prompt that one of them refuses tells nothing.
fn alone(policy: &ProofPolicy, metric: Metric, old: &[Visit], new: &[Visit]) -> Option<Ratio> {
    let held = |visit: &Visit| match metric {
        Metric::AtReady(kind) => held(visit, kind, |metric| matches!(metric, Metric::AtReady(_))),
        Metric::AtLongest(kind) => held(visit, kind, |metric| matches!(metric, Metric::AtLongest(_))),
        _ => None,
    };
    let pairs = old.iter().zip(new).filter_map(|(old, new)| Some((held(old)?, held(new)?)));
    let (old, new): (Vec<f64>, Vec<f64>) = pairs.unzip();
    let (rounds, slack) = (old.len(), exact(policy.memory_slack.0));
    let more = |values: &[f64]| values.iter().filter(|value| **value > slack).count();
    let ruling = match (more(&old), more(&new)) {
        (0, 0) => Ruling::Same,
        _ if rounds < policy.rounds_least => Ruling::Unknown,
        (0, all) if all == rounds => Ruling::Worse,
        (all, 0) if all == rounds => Ruling::Better,
        _ => Ruling::Unknown,
    };
    (rounds > 0).then(|| Ratio { metric, old: median(old), new: median(new), ratio: None, ruling })
}

/// Bytes of this memory; none at all where others were read and this was not among them.
fn held(visit: &Visit, kind: MemoryKind, is_read: fn(Metric) -> bool) -> Option<f64> {
    let mut read = visit.measured.iter().filter(|(metric, _)| is_read(*metric)).peekable();
    read.peek()?;
    let own = read
        .find(|(metric, _)| matches!(*metric, Metric::AtReady(own) | Metric::AtLongest(own) if own == kind));
    Some(own.map_or(0.0, |(_, value)| *value))
}

/// What the new build may take more, as a share of `old`.
fn limit(policy: &ProofPolicy, metric: Metric, old: f64) -> f64 {
    let beside = |slack: f64| slack / old.max(f64::MIN_POSITIVE);
    match metric {
        Metric::Start => policy.slower_start + beside(policy.start_slack.as_secs_f64()),
        Metric::Prefill | Metric::Decode => policy.slower,
        Metric::FirstToken => policy.slower + beside(policy.first_token_slack.as_secs_f64()),
        Metric::AtReady(_) | Metric::AtLongest(_) => {
            policy.more_memory + beside(exact(policy.memory_slack.0))
        }
    }
}

fn judge(policy: &ProofPolicy, logs: &[f64], limit: f64) -> Option<(Interval, Ruling)> {
    let count = u32::try_from(logs.len()).ok().filter(|count| *count > 1).map(f64::from)?;
    let mean = logs.iter().sum::<f64>() / count;
    let squares = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>();
    let freedom = count - 1.0;
    // However close a few of them lie by chance, rounds differ by this much.
    let error = (squares / freedom).sqrt().max(policy.least_noise) / count.sqrt();
    let looks = policy.rounds_most.saturating_sub(policy.rounds_least) + 1;
    let looks = f64::from(u32::try_from(looks).unwrap_or(u32::MAX));
    let (wrong, missed) = (policy.false_worse / looks, policy.missed_worse / looks);
    let above = |at: f64| student::tail((mean - at) / error, freedom);
    let below = |at: f64| student::tail((at - mean) / error, freedom);
    let edge = (1.0 + limit).ln();
    let enough = logs.len() >= policy.rounds_least;
    let ruling = if !enough {
        Ruling::Unknown
    } else if above(edge) <= wrong {
        Ruling::Worse
    } else if below(0.0) <= wrong {
        Ruling::Better
    } else if below(edge) <= missed {
        Ruling::Same
    } else {
        Ruling::Unknown
    };
    let wide = |chance: f64| student::quantile(chance, freedom) * error;
    let ratio =
        Interval { value: mean.exp(), low: (mean - wide(wrong)).exp(), high: (mean + wide(missed)).exp() };
    Some((ratio, ruling))
}
