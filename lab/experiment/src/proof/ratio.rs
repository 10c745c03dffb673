//! Tests if the new build needs more time or memory than the old one, with as few processes as possible.
//!
//! ```text
//!  round by round: ln(new / old) ──> mean, scatter ──> Student's test at two limits
//!
//!  new / old   ────── 1 ───────────── 1 + limit ──────
//!              Better      Same                   Worse
//! ```
//!
//! The processes of a round run one after the other, so slow drift hardly affects their ratio. The ratios are
//! judged after each round. Error rates are divided among all possible looks (Bonferroni), so stopping at the
//! first proof keeps the declared rates:
//!
//! - `false_worse`: a build that needs at most `limit` more is reported to need more;
//! - [`MISSED_WORSE_CHANCE`]: a build that needs more than that is reported not to.
//!
//! Memory that a build holds only in some rounds, because it took another GPU, has no ratio. Such memory
//! counts if one build holds more than the other by the limit in three of four rounds.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::student;
use super::measured::{BuildMetric, BuildVisit, ProofPolicy, ProofRuling};
use warden_policies::growth::{IntervalEstimate, stats};
use warden_policies::sample::MemoryKind;
use warden_policies::units::as_f64;

/// Probability that a build just above the limit passes as equal.
const MISSED_WORSE_CHANCE: f64 = 0.05;
/// Allowed increase of the time to the first token: network and scheduler take some milliseconds.
const FIRST_TOKEN_SLACK: Duration = Duration::from_millis(5);
/// Allowed increase of the start time: small models start in a fraction of a second, so a share says little.
const START_SLACK: Duration = Duration::from_secs(2);
/// Allowed increase of the start time as a share: loading from disk or page cache varies by a third.
const SLOWER_START_SHARE: f64 = 0.5;

/// Comparison of a metric of both builds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MetricRatio {
    /// Compared metric.
    pub metric: BuildMetric,
    /// Median over the old build's processes, in seconds or bytes.
    pub old: f64,
    /// Median over the new build's processes, in seconds or bytes.
    pub new: f64,
    /// New value divided by old, with the test's interval; `None` with fewer than two rounds, or if a build
    /// holds no such memory.
    pub ratio: Option<IntervalEstimate>,
    /// Ruling on the metric.
    pub ruling: ProofRuling,
}

pub(super) fn compare_all(policy: &ProofPolicy, old: &[BuildVisit], new: &[BuildVisit]) -> Vec<MetricRatio> {
    let mut metrics: Vec<BuildMetric> = Vec::new();
    for (metric, _) in old.iter().chain(new).flat_map(|visit| &visit.measured) {
        if !metrics.contains(metric) {
            metrics.push(*metric);
        }
    }
    metrics.sort();
    metrics.into_iter().filter_map(|metric| compare_metric(policy, metric, old, new)).collect()
}

fn compare_metric(
    policy: &ProofPolicy,
    metric: BuildMetric,
    old: &[BuildVisit],
    new: &[BuildVisit],
) -> Option<MetricRatio> {
    let pairs = pairs(metric, old, new);
    if pairs.len() < old.len().min(new.len())
        && let Some(partial) = compare_partial_memory(policy, metric, old, new)
    {
        return Some(partial);
    }
    compare_pairs(policy, metric, &pairs)
}

pub(crate) fn pairs(metric: BuildMetric, old: &[BuildVisit], new: &[BuildVisit]) -> Vec<(f64, f64)> {
    let both = old.iter().zip(new);
    both.filter_map(|(old, new)| Some((old.value_of(metric)?, new.value_of(metric)?))).collect()
}

pub(crate) fn compare_pairs(
    policy: &ProofPolicy,
    metric: BuildMetric,
    pairs: &[(f64, f64)],
) -> Option<MetricRatio> {
    if pairs.is_empty() {
        return None;
    }
    let before = median(pairs.iter().map(|pair| pair.0).collect());
    let after = median(pairs.iter().map(|pair| pair.1).collect());
    let logs: Vec<f64> = pairs.iter().map(|(old, new)| (new / old).ln()).collect();
    let judged = judge(policy, &logs, allowed_increase(policy, metric, before));
    let (ratio, ruling) =
        judged.map_or((None, ProofRuling::Unknown), |(ratio, ruling)| (Some(ratio), ruling));
    Some(MetricRatio { metric, old: before, new: after, ratio, ruling })
}

fn median(mut values: Vec<f64>) -> f64 {
    stats::median(&mut values).unwrap_or(0.0)
}

/// Compares memory that a build does not hold in all rounds. A round counts only if both processes read some
/// memory, because a refused prompt says nothing about memory.
fn compare_partial_memory(
    policy: &ProofPolicy,
    metric: BuildMetric,
    old: &[BuildVisit],
    new: &[BuildVisit],
) -> Option<MetricRatio> {
    let held = |visit: &BuildVisit| match metric {
        BuildMetric::AtReady(kind) => {
            held_bytes(visit, kind, |metric| matches!(metric, BuildMetric::AtReady(_)))
        }
        BuildMetric::AtLongest(kind) => {
            held_bytes(visit, kind, |metric| matches!(metric, BuildMetric::AtLongest(_)))
        }
        _ => None,
    };
    let pairs: Vec<(f64, f64)> =
        old.iter().zip(new).filter_map(|(old, new)| Some((held(old)?, held(new)?))).collect();
    let slack = |bytes: f64| bytes * (1.0 + policy.more_memory) + as_f64(policy.memory_slack.0);
    let more = pairs.iter().filter(|(old, new)| *new > slack(*old)).count();
    let less = pairs.iter().filter(|(old, new)| *old > slack(*new)).count();
    let most = |count: usize| count >= policy.rounds_least && 4 * count >= 3 * pairs.len();
    let ruling = match (more, less) {
        (0, 0) => ProofRuling::Same,
        _ if most(more) => ProofRuling::Worse,
        (0, less) if most(less) => ProofRuling::Better,
        (0, _) if pairs.len() >= policy.rounds_least => ProofRuling::Same,
        _ => ProofRuling::Unknown,
    };
    let (before, after) = pairs.iter().copied().unzip();
    (!pairs.is_empty()).then(|| MetricRatio {
        metric,
        old: median(before),
        new: median(after),
        ratio: None,
        ruling,
    })
}

/// Returns the bytes of this memory; 0 if only other memory was read, `None` if none was.
fn held_bytes(visit: &BuildVisit, kind: MemoryKind, is_read: fn(BuildMetric) -> bool) -> Option<f64> {
    let mut read = visit.measured.iter().filter(|(metric, _)| is_read(*metric)).peekable();
    read.peek()?;
    let own = read
        .find(|(metric, _)| matches!(*metric, BuildMetric::AtReady(own) | BuildMetric::AtLongest(own) if own == kind));
    Some(own.map_or(0.0, |(_, value)| *value))
}

/// Returns the allowed increase of the new build, as a share of `old`.
fn allowed_increase(policy: &ProofPolicy, metric: BuildMetric, old: f64) -> f64 {
    let beside = |slack: f64| slack / old.max(f64::MIN_POSITIVE);
    match metric {
        BuildMetric::Start => SLOWER_START_SHARE + beside(START_SLACK.as_secs_f64()),
        BuildMetric::Prefill | BuildMetric::Decode => policy.slower,
        BuildMetric::FirstToken => policy.slower + beside(FIRST_TOKEN_SLACK.as_secs_f64()),
        BuildMetric::AtReady(_) | BuildMetric::AtLongest(_) => {
            policy.more_memory + beside(as_f64(policy.memory_slack.0))
        }
    }
}

fn judge(policy: &ProofPolicy, logs: &[f64], limit: f64) -> Option<(IntervalEstimate, ProofRuling)> {
    let count = u32::try_from(logs.len()).ok().filter(|count| *count > 1).map(f64::from)?;
    let mean = logs.iter().sum::<f64>() / count;
    let squares = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>();
    let freedom = count - 1.0;
    // Assume at least `least_noise` between rounds, even if a few agree by chance.
    let error = (squares / freedom).sqrt().max(policy.least_noise) / count.sqrt();
    let looks = policy.rounds_most.saturating_sub(policy.rounds_least) + 1;
    let looks = f64::from(u32::try_from(looks).unwrap_or(u32::MAX));
    let (wrong, missed) = (policy.false_worse / looks, MISSED_WORSE_CHANCE / looks);
    let above = |at: f64| student::upper_tail((mean - at) / error, freedom);
    let below = |at: f64| student::upper_tail((at - mean) / error, freedom);
    let edge = (1.0 + limit).ln();
    let enough = logs.len() >= policy.rounds_least;
    let ruling = if !enough {
        ProofRuling::Unknown
    } else if above(edge) <= wrong {
        ProofRuling::Worse
    } else if below(0.0) <= wrong {
        ProofRuling::Better
    } else if below(edge) <= missed {
        ProofRuling::Same
    } else {
        ProofRuling::Unknown
    };
    let wide = |chance: f64| student::quantile(chance, freedom) * error;
    let ratio = IntervalEstimate {
        value: mean.exp(),
        low: (mean - wide(wrong)).exp(),
        high: (mean + wide(missed)).exp(),
    };
    Some((ratio, ruling))
}
