//! For experiments: the slope of some readings, and who pays over several processes that each did one kind of work.
//!
//! The watch of one process knows its own work alone. Where every request brings the same, units cannot be told apart;
//! processes that did different work, side by side, can tell them apart.

use std::time::Duration;

use crate::growth::blame::blame;
use crate::growth::floors::Point;
use crate::growth::stats::{self, Trend};
use crate::growth::{Blame, GrowthPolicy, Interval};
use crate::sample::Work;
use crate::units::exact;

/// Points that a slope is taken from, at most: the cost grows with the square.
const POINTS: usize = 160;

/// A reading of one memory of one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Time since the spawn.
    pub at: Duration,
    /// Work done since then.
    pub work: Work,
    /// Bytes.
    pub bytes: u64,
}

/// Sen's slope in bytes per request with its bounds; `None` with fewer than four readings, or without any work.
pub fn slope(levels: &[Level], policy: &GrowthPolicy) -> Option<Interval> {
    let stride = levels.len().div_ceil(POINTS).max(1);
    let pair = |level: &Level| (exact(level.work.requests), exact(level.bytes));
    let (xs, ys): (Vec<f64>, Vec<f64>) = levels.iter().step_by(stride).map(pair).unzip();
    if xs.len() < 4 {
        return None;
    }
    // Readings of a heap hang together, so fewer of them are news than there are.
    let per_step = stats::sen(&xs, &ys)? * (xs.last()? - xs.first()?) / (stats::size(xs.len()) - 1.0);
    let trend = Trend::of(&ys).widened(stats::hamed_rao(&ys, per_step, policy.bound_z));
    stats::sen_bounds(&xs, &ys, trend.var, policy.bound_z)
}

/// Readings taken together, at most: more would leave too few points of a short leg.
const MOST_AT_ONCE: usize = 8;

/// Which unit of work pays for the growth of these processes, each with its readings in order.
pub fn blame_of(processes: &[Vec<Level>], policy: &GrowthPolicy) -> Blame {
    // A pool of a GPU grows by pieces that are larger than what one request takes: from reading to reading it mostly stands
    // still, and a fit that holds out against outliers would call the growth one. So no more points than it takes.
    let all: usize = processes.iter().map(Vec::len).sum();
    let stride = (all / (2 * policy.blame_floors)).clamp(1, MOST_AT_ONCE);
    let mut points: Vec<Point> = Vec::new();
    for levels in processes {
        let Some(first) = levels.first() else { continue };
        // One curve of all: each process goes on where the one before ended, so that only differences within one count.
        let end = points.last().copied().unwrap_or(Point {
            level: 0.0,
            hours: 0.0,
            work: Work::default(),
            fresh: Work::default(),
        });
        let point = |level: &Level| Point {
            level: end.level + exact(level.bytes) - exact(first.bytes),
            hours: end.hours + level.at.saturating_sub(first.at).as_secs_f64() / 3600.0,
            work: end.work + (level.work - first.work),
            fresh: Work::default(),
        };
        points.extend(levels.iter().step_by(stride).map(point).skip(usize::from(!points.is_empty())));
    }
    blame(&points, policy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::growth::Unit;

    const MIB: u64 = 1 << 20;

    fn process(steps: u64, each: Work, bytes: impl Fn(Work) -> u64) -> Vec<Level> {
        let mut work = Work::default();
        let mut levels = Vec::new();
        for step in 0..steps {
            work += each;
            // Readings are never quite even.
            let bytes = 100 * MIB + bytes(work) + (step * 7919) % 4096;
            levels.push(Level { at: Duration::from_secs(step), work, bytes });
        }
        levels
    }

    fn text() -> Work {
        Work { requests: 1, prompt_tokens: 50, output_tokens: 16, ..Work::default() }
    }

    fn image() -> Work {
        Work { requests: 1, prompt_tokens: 300, output_tokens: 64, images: 1, ..Work::default() }
    }

    #[test]
    fn processes_with_different_work_tell_units_apart_that_one_alone_cannot() {
        let policy = &crate::defaults().growth;
        let leak = |work: Work| work.images * 4 * MIB;
        let images = process(60, image(), leak);
        assert!(matches!(blame_of(std::slice::from_ref(&images), policy), Blame::Undecided { .. }));
        let blamed = blame_of(&[process(60, text(), leak), images], policy);
        assert!(matches!(blamed, Blame::Pays { unit: Unit::Image, .. }), "{blamed:?}");
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
