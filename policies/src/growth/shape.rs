//! Tests if a stretch of floors has the shape of a leak.
//!
//! ```text
//!  a leak        a warm-up or a full cache     a high-water mark, a plateau
//!        .'           .------                         .------
//!      .'            /                                |
//!    .'            .'        braking              ----'         jump
//! ```
//!
//! Each function looks at one stretch of floors and keeps no state.

use serde::{Deserialize, Serialize};

use std::collections::VecDeque;

use crate::growth::floors::FloorPoint;
use crate::growth::stats::{self, TrendTest, length_as_f64};
use crate::growth::{GrowthPolicy, IntervalEstimate, WorkUnit};
use crate::units::as_f64;

/// Least share of the rise that must remain if the largest jump is left out.
const JUMP_REST_SHARE: f64 = 0.5;
/// A floor this many deviations above both neighbours is a peak of a request in flight, not a step.
const PEAK_DEVIATIONS: f64 = 3.0;
/// Required rise in deviations of the readings from their line: noisier memory has to rise more.
const EFFECT_DEVIATIONS: f64 = 5.0;
/// Required rise in deviations of a random walk, which rises that far once in 3,000 times.
const DRIFT_DEVIATIONS: f64 = 4.0;
/// A stretch is curved if the slope of its later half falls by more than this many times the relative
/// scatter. Pure curvature costs 14 times the scatter of the floors, a random walk 7 times, noise twice.
const BEND_NOISE_FACTOR: f64 = 10.0;
/// Ratio of the halves' slopes from which the load explains the difference, even for a straight line.
const PACE_LIMIT: f64 = 0.95;
/// A loss of slope in the later half below this many times the scatter of the floors is chance.
const PACE_NOISE_FACTOR: f64 = 4.0;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StretchFinding {
    pub(super) slope: IntervalEstimate,
    pub(super) grows: bool,
    /// Value of the line before any work, in bytes.
    pub(super) foot: f64,
    /// Deviation of the floors from the line, estimated robustly as a standard deviation.
    pub(super) scatter: f64,
}

impl StretchFinding {
    pub(super) fn value_at(&self, requests: u64) -> f64 {
        self.foot + self.slope.value * as_f64(requests)
    }
}

/// Tests a stretch of floors. `effect`: least rise in bytes. `None` if all floors have the same work count.
pub(super) fn examine<'a>(
    floors: impl Iterator<Item = &'a FloorPoint>,
    effect: f64,
    policy: &GrowthPolicy,
) -> Option<StretchFinding> {
    let (xs, ys): (Vec<f64>, Vec<f64>) =
        floors.map(|floor| (as_f64(floor.work.requests), floor.level)).unzip();
    let trend = TrendTest::from_values(&ys);
    let slope = stats::sen_slope_with_bounds(&xs, &ys, trend.var, policy.bound_z)?;
    let run = xs.last()? - xs.first()?;
    let rise = slope.value * run;
    let noise = stats::scatter(&xs, &ys, slope.value);
    let mut feet: Vec<f64> = xs.iter().zip(&ys).map(|(x, y)| y - slope.value * x).collect();
    let foot = stats::median(&mut feet)?;
    let grows = rise >= effect.max(EFFECT_DEVIATIONS * noise)
        && slope.low > 0.0
        && !is_braking(&xs, &ys, slope.value, policy)
        && !is_jumping(&ys, rise, noise, policy)
        && is_significant(&ys, trend, rise, policy);
    Some(StretchFinding { slope, grows, foot, scatter: noise })
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ScaleStatistics {
    pub(super) rise: f64,
    /// The rise exceeds that of a random walk with steps of the observed size.
    pub(super) drift: bool,
    /// The rise not explained by work exceeds that of a random walk measured over four floors, where the
    /// variations of requests in flight cancel out.
    pub(super) far_drift: bool,
    /// Slope of the later half divided by that of the earlier half; above 1 if the latter does not rise.
    pub(super) pace: f64,
    /// Slope of the last third divided by the total slope.
    pub(super) end: f64,
    /// Deviation of the floors from their line, divided by the rise.
    pub(super) scatter: f64,
    /// Like `scatter`, less the part caused by allocation granularity.
    pub(super) bent: f64,
}

/// Computes the statistics of a scale; `None` if there are too few floors for a slope of each half. `along`:
/// work on the x axis; `grain`: allocation granularity in bytes.
pub(super) fn scale_statistics<'a>(
    floors: impl Iterator<Item = &'a FloorPoint>,
    along: WorkUnit,
    grain: f64,
    policy: &GrowthPolicy,
) -> Option<ScaleStatistics> {
    let (xs, ys): (Vec<f64>, Vec<f64>) = floors.map(|floor| (floor.done(along), floor.level)).unzip();
    let slope = stats::sen_slope(&xs, &ys)?;
    let rise = slope * (xs.last()? - xs.first()?);
    let half = xs.len() / 2;
    let (early, late) =
        (stats::sen_slope(&xs[..half], &ys[..half])?, stats::sen_slope(&xs[half..], &ys[half..])?);
    let third = xs.len() - xs.len() / 3;
    let end = if slope > 0.0 { stats::sen_slope(&xs[third..], &ys[third..])? / slope } else { 0.0 };
    let scatter = stats::scatter(&xs, &ys, slope);
    let share = |bytes: f64| if rise > 0.0 { bytes / rise } else { f64::MAX };
    let (scatter, bent) = (share(scatter), share((scatter - grain / 2.0).max(0.0)));
    let pace = if early > 0.0 { late / early } else { f64::MAX };
    // A random walk goes twice as far in four steps as in one; noise does not: the threshold can be higher.
    let drift = rise >= DRIFT_DEVIATIONS * random_walk_distance(&ys, 1, 0.0)
        && rise >= policy.drift_far_z * random_walk_distance(&ys, 4, grain);
    let rests: Vec<f64> = xs.iter().zip(&ys).map(|(x, y)| y - slope * x).collect();
    let goes_far = rise >= policy.drift_far_z * random_walk_distance(&rests, 4, grain);
    Some(ScaleStatistics { rise, drift, far_drift: goes_far, pace, end, scatter, bent })
}

impl ScaleStatistics {
    pub(super) fn slows(&self, effect: f64, policy: &GrowthPolicy) -> bool {
        if self.rise >= policy.steep_effect * effect {
            return self.pace < policy.steep_ratio;
        }
        let noise = 1.0 - PACE_NOISE_FACTOR * self.scatter;
        let limit = noise.min(PACE_LIMIT).max(policy.persist_ratio);
        // If the loss of slope is large against the scatter, the line is curved: the heap settles.
        let bent = 1.0 - self.pace > BEND_NOISE_FACTOR * self.scatter;
        self.pace < limit || bent
    }
}

/// Returns true if memory fell by more than `depth` bytes within `span` floors and stayed low for two floors.
pub(super) fn has_fallen(floors: &VecDeque<FloorPoint>, span: usize, depth: f64) -> bool {
    (2..floors.len()).any(|end| {
        let low = floors[end].level.max(floors[end - 1].level);
        floors.range(end.saturating_sub(span.max(2))..end - 1).any(|floor| floor.level - low > depth)
    })
}

/// Growth in few large steps, with flat stretches between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepGrowth {
    pub(super) steps: u32,
    pub(super) height: f64,
    pub(super) requests: f64,
}

impl StepGrowth {
    /// Recognises several rises by much more than `effect`, without a fall, whose next one is not overdue.
    pub(super) fn from_floors(
        floors: &VecDeque<FloorPoint>,
        effect: f64,
        policy: &GrowthPolicy,
    ) -> Option<Self> {
        let (first, last) = (floors.front()?, floors.back()?);
        let total = last.level - first.level;
        if total < policy.steep_effect * effect
            || has_fallen(floors, floors.len(), policy.fall_share * effect)
        {
            return None;
        }
        let mut steps: Vec<(f64, f64)> = Vec::new();
        let mut climbs = false;
        for (from, to) in floors.iter().zip(floors.iter().skip(1)) {
            let rise = to.level - from.level;
            match steps.last_mut().filter(|_| climbs) {
                Some((_, height)) if rise >= effect => *height += rise,
                _ if rise >= effect => steps.push((as_f64(to.work.requests), rise)),
                _ => {}
            }
            climbs = rise >= effect;
        }
        let climbed: f64 = steps.iter().map(|(_, height)| height).sum();
        let highest = steps.iter().map(|(_, height)| *height).fold(0.0, f64::max);
        let count = u32::try_from(steps.len()).ok().filter(|count| *count >= policy.stairs)?;
        let run = steps.last()?.0 - steps.first()?.0;
        let gap = run / (f64::from(count) - 1.0).max(1.0);
        let due = as_f64(last.work.requests) - steps.last()?.0 <= 2.0 * gap;
        let height = climbed / f64::from(count);
        let even = highest <= 2.0 * height && height >= policy.far_effect * effect;
        let found = Self { steps: count, height, requests: gap };
        (due && even && climbed >= (1.0 - policy.fall_share) * total).then_some(found)
    }
}

/// Returns the expected distance of a random walk over all values, with steps measured over `lag` floors,
/// less the allocation granularity `grain`.
fn random_walk_distance(ys: &[f64], lag: usize, grain: f64) -> f64 {
    let steps: Vec<f64> = ys.iter().zip(ys.iter().skip(lag)).map(|(from, to)| to - from).collect();
    let places = vec![0.0; steps.len()];
    (stats::scatter(&places, &steps, 0.0) - grain).max(0.0)
        * (length_as_f64(ys.len().saturating_sub(1)) / length_as_f64(lag)).sqrt()
}

/// Returns true if the trend is significant, also after a correction for autocorrelation.
fn is_significant(ys: &[f64], trend: TrendTest, rise: f64, policy: &GrowthPolicy) -> bool {
    // Run the cheap test first: the correction can only lower z.
    trend.z() >= policy.trend_z && {
        let per_step = rise / (length_as_f64(ys.len()) - 1.0).max(1.0);
        trend.widened(stats::hamed_rao_factor(ys, per_step, policy.bound_z)).z() >= policy.trend_z
    }
}

/// Returns true if the last two fifths rise much less than the whole stretch, so the rise is about to end.
fn is_braking(xs: &[f64], ys: &[f64], slope: f64, policy: &GrowthPolicy) -> bool {
    let from = xs.len() - xs.len() * 2 / 5;
    let last = stats::sen_slope(&xs[from..], &ys[from..]);
    last.is_none_or(|last| last < policy.brake_ratio * slope)
}

/// Returns true if a few jumps make most of the rise, or could. A single outlier is no jump: the median of
/// itself and its neighbours replaces it.
fn is_jumping(ys: &[f64], rise: f64, noise: f64, policy: &GrowthPolicy) -> bool {
    let smooth: Vec<f64> = ys
        .windows(3)
        .map(|three| {
            let middle = three[0].max(three[1]).min(three[0].min(three[1]).max(three[2]));
            if (three[1] - middle).abs() > PEAK_DEVIATIONS * noise { middle } else { three[1] }
        })
        .collect();
    let mut steps: Vec<f64> = smooth.windows(2).map(|two| (two[1] - two[0]).max(0.0)).collect();
    steps.sort_unstable_by(|a, b| b.total_cmp(a));
    let largest: f64 = steps.iter().take(policy.jumps).sum();
    rise - largest < JUMP_REST_SHARE * rise
}
