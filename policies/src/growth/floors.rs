//! Floors: the lowest memory reading in each stretch of work, for several stretch lengths.
//!
//! ```text
//!  readings   .  ' . .'   . ' .  . ' '.  .      (peaks of requests in flight)
//!  scale 1    .    . .    .   .  .    .  .      one step of work each
//!  scale 2    .----  .----    .----   .--
//!  scale 4    .-----------    .----------       …
//! ```
//!
//! A step begins with a reading that shows more requests than the reading before. Further readings at the
//! same work can only lower the floor of the step, so readings during a request do no harm. Every floor keeps
//! the exact work count at which it was read.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::growth::WorkUnit;
use crate::sample::WorkDone;
use crate::units::as_f64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct FloorPoint {
    /// Memory in bytes.
    pub(super) level: f64,
    /// Hours since the spawn.
    pub(super) hours: f64,
    pub(super) work: WorkDone,
    /// Work of the step in which the reading was taken; some memory of that work may still be held.
    #[serde(default)]
    pub(super) fresh: WorkDone,
}

impl FloorPoint {
    pub(super) fn done(&self, unit: WorkUnit) -> f64 {
        if unit == WorkUnit::Hour { self.hours } else { as_f64(unit.count_in(&self.work)) }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct FloorScale {
    /// Steps per floor.
    steps: u64,
    /// Steps so far in the stretch that is not complete yet.
    open: u64,
    lowest: Option<FloorPoint>,
    floors: VecDeque<FloorPoint>,
    /// Number of floors since the beginning, including dropped floors.
    count: u64,
}

/// Floors of all scales, in bounded memory.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct ScaledFloors {
    scales: Vec<FloorScale>,
    keep: usize,
    requests: Option<u64>,
    /// Work done at the latest reading; `before`: work done before its step.
    #[serde(default)]
    latest: WorkDone,
    #[serde(default)]
    before: WorkDone,
}

impl ScaledFloors {
    /// Creates scales, each with stretches twice as long as before and its last `keep` floors.
    pub(super) fn new(scales: u32, keep: usize) -> Self {
        let scale = |power| {
            let steps = 1_u64.checked_shl(power).unwrap_or(u64::MAX);
            FloorScale { steps, ..FloorScale::default() }
        };
        Self { scales: (0..scales.max(1)).map(scale).collect(), keep, ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.scales.len()
    }

    pub(super) fn clear(&mut self) {
        for scale in &mut self.scales {
            scale.open = 0;
            scale.lowest = None;
            scale.floors.clear();
            scale.count = 0;
        }
    }

    /// Adds a reading. Returns true if the reading began a new step, and so may have completed floors.
    pub(super) fn push(&mut self, mut point: FloorPoint) -> bool {
        let step = self.requests != Some(point.work.requests);
        self.requests = Some(point.work.requests);
        if step {
            self.before = self.latest;
        }
        self.latest = point.work;
        point.fresh = point.work - self.before;
        for scale in &mut self.scales {
            if step {
                if scale.open == scale.steps {
                    if let Some(floor) = scale.lowest.take() {
                        if scale.floors.len() == self.keep {
                            scale.floors.pop_front();
                        }
                        scale.floors.push_back(floor);
                        scale.count += 1;
                    }
                    scale.open = 0;
                }
                scale.open += 1;
            }
            // Wait for the first step: a further reading of an old step must not restore cleared floors.
            if scale.open > 0 && scale.lowest.is_none_or(|lowest| point.level < lowest.level) {
                scale.lowest = Some(point);
            }
        }
        step
    }

    /// Returns the floors of a scale, oldest first.
    pub(super) fn at_scale(&self, scale: usize) -> &VecDeque<FloorPoint> {
        &self.scales[scale].floors
    }

    /// Returns true if the latest step completed a floor of the scale, at a multiple of `every` floors.
    pub(super) fn is_due(&self, scale: usize, every: u64) -> bool {
        let scale = &self.scales[scale];
        scale.open == 1 && scale.count > 0 && scale.count.is_multiple_of(every.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(requests: u64, level: f64) -> FloorPoint {
        FloorPoint {
            level,
            hours: 0.0,
            work: WorkDone { requests, ..WorkDone::default() },
            fresh: WorkDone::default(),
        }
    }

    fn levels(floors: &ScaledFloors, scale: usize) -> Vec<f64> {
        floors.at_scale(scale).iter().map(|floor| floor.level).collect()
    }

    #[test]
    fn a_floor_is_the_least_reading_of_its_stretch() {
        let mut floors = ScaledFloors::new(2, 8);
        for (requests, level) in [(1, 5.0), (1, 9.0), (2, 7.0), (2, 3.0), (3, 8.0), (4, 6.0), (5, 1.0)] {
            floors.push(point(requests, level));
        }
        assert_eq!(levels(&floors, 0), [5.0, 3.0, 8.0, 6.0]);
        assert_eq!(levels(&floors, 1), [3.0, 6.0]);
        assert_eq!(floors.at_scale(1)[1].work.requests, 4, "a floor keeps the work at which it was read");
    }

    #[test]
    fn a_busy_server_makes_one_step_of_hundreds_of_requests() {
        let mut floors = ScaledFloors::new(1, 8);
        for step in 0..4 {
            floors.push(point(step * 500, 1.0));
        }
        let work: Vec<u64> = floors.at_scale(0).iter().map(|floor| floor.work.requests).collect();
        assert_eq!(work, [0, 500, 1000]);
    }

    #[test]
    fn memory_is_bounded() {
        let mut floors = ScaledFloors::new(3, 4);
        for step in 0..1000 {
            floors.push(point(step, 1.0));
        }
        assert!((0..floors.len()).all(|scale| floors.at_scale(scale).len() == 4));
    }
}
