//! Growth over several processes, for experiments: slope of the readings, and the unit of work that causes
//! it. Processes with different work can separate units that always occur together within one process.

use std::time::Duration;

use crate::growth::blame::{confirm, explain};
use crate::growth::floors::FloorPoint;
use crate::growth::stats::{self, TrendTest};
use crate::growth::{GrowthBlame, GrowthPolicy, IntervalEstimate};
use crate::sample::WorkDone;
use crate::units::as_f64;

/// Most points of a slope: the cost grows with their square.
const SLOPE_POINTS: usize = 160;

/// Memory reading of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryLevel {
    /// Time since the spawn.
    pub at: Duration,
    /// Work done since the spawn.
    pub work: WorkDone,
    /// Memory in bytes.
    pub bytes: u64,
}

/// Returns Sen's slope in bytes per request with its bounds; `None` with fewer than four readings or no work.
pub fn slope(levels: &[MemoryLevel], policy: &GrowthPolicy) -> Option<IntervalEstimate> {
    let stride = levels.len().div_ceil(SLOPE_POINTS).max(1);
    let pair = |level: &MemoryLevel| (as_f64(level.work.requests), as_f64(level.bytes));
    let (xs, ys): (Vec<f64>, Vec<f64>) = levels.iter().step_by(stride).map(pair).unzip();
    if xs.len() < 4 {
        return None;
    }
    // Heap readings are correlated, so the effective number of readings is smaller.
    let per_step =
        stats::sen_slope(&xs, &ys)? * (xs.last()? - xs.first()?) / (stats::length_as_f64(xs.len()) - 1.0);
    let trend = TrendTest::from_values(&ys).widened(stats::hamed_rao_factor(&ys, per_step, policy.bound_z));
    stats::sen_slope_with_bounds(&xs, &ys, trend.var, policy.bound_z)
}

/// Most readings merged into one point: with more, a short run would have too few points.
const MERGED_READINGS: usize = 8;

/// Finds the unit of work that causes the growth of these processes; the readings of each are in order.
pub fn blame_processes(processes: &[Vec<MemoryLevel>], policy: &GrowthPolicy) -> GrowthBlame {
    // A GPU pool grows in pieces and is constant between most readings, so a robust fit would treat growth as
    // an outlier. Therefore merge readings until just enough points remain.
    let all: usize = processes.iter().map(Vec::len).sum();
    let stride = (all / (2 * policy.blame_floors)).clamp(1, MERGED_READINGS);
    let mut points: Vec<FloorPoint> = Vec::new();
    for levels in processes {
        let Some(first) = levels.first() else { continue };
        // Join all processes to one curve, so that only differences within a process count.
        let end = points.last().copied().unwrap_or_default();
        let point = |level: &MemoryLevel| FloorPoint {
            level: end.level + as_f64(level.bytes) - as_f64(first.bytes),
            hours: end.hours + level.at.saturating_sub(first.at).as_secs_f64() / 3600.0,
            work: end.work + (level.work - first.work),
            fresh: WorkDone::default(),
        };
        points.extend(levels.iter().step_by(stride).map(point).skip(usize::from(!points.is_empty())));
    }
    confirm(explain(&points, policy), &points, policy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::growth::WorkUnit;

    const MIB: u64 = 1 << 20;

    fn process(steps: u64, each: WorkDone, bytes: impl Fn(WorkDone) -> u64) -> Vec<MemoryLevel> {
        let mut work = WorkDone::default();
        let mut levels = Vec::new();
        for step in 0..steps {
            work += each;
            // Real readings always vary.
            let bytes = 100 * MIB + bytes(work) + (step * 7919) % 4096;
            levels.push(MemoryLevel { at: Duration::from_secs(step), work, bytes });
        }
        levels
    }

    fn text() -> WorkDone {
        WorkDone { requests: 1, prompt_tokens: 50, output_tokens: 16, ..WorkDone::default() }
    }

    fn image() -> WorkDone {
        WorkDone { requests: 1, prompt_tokens: 300, output_tokens: 64, images: 1, ..WorkDone::default() }
    }

    #[test]
    fn processes_with_different_work_tell_units_apart_that_one_alone_cannot() {
        let policy = &crate::defaults().growth;
        let leak = |work: WorkDone| work.images * 4 * MIB;
        let images = process(60, image(), leak);
        assert!(matches!(
            blame_processes(std::slice::from_ref(&images), policy),
            GrowthBlame::Undecided { .. }
        ));
        let blamed = blame_processes(&[process(60, text(), leak), images], policy);
        assert!(matches!(blamed, GrowthBlame::Pays { unit: WorkUnit::Image, .. }), "{blamed:?}");
    }

    #[test]
    fn a_slope_is_that_of_the_readings() {
        let levels = process(500, text(), |work| work.requests * MIB);
        let slope = slope(&levels, &crate::defaults().growth).unwrap();
        assert!((slope.value - 1_048_576.0).abs() < 1000.0, "{slope:?}");
        assert!(slope.low <= slope.value && slope.value <= slope.high);
        assert_eq!(super::slope(&levels[..3], &crate::defaults().growth), None);
    }
}
