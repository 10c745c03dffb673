//! Floors: the lowest memory reading in each stretch of work, at several stretch lengths.
//!
//! ```text
//!  readings   .  ' . .'   . ' .  . ' '.  .      (peaks of requests in flight)
//!  scale 1    .    . .    .   .  .    .  .      one step of work each
//!  scale 2    .----  .----    .----   .--
//!  scale 4    .-----------    .----------       …
//! ```
//!
//! A step is a reading that shows more requests than the one before: one request on a quiet server,
//! hundreds on a busy one that a timer reads. Another reading at the same work only lowers the floor of its
//! step, so extra readings and readings during a request change nothing. Every floor keeps the exact work
//! count at which it was read.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::growth::Unit;
use crate::sample::Work;
use crate::units::exact;

/// Reading of a series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Point {
    /// Memory in bytes.
    pub(super) level: f64,
    /// Hours since the spawn.
    pub(super) hours: f64,
    /// Work done since the spawn.
    pub(super) work: Work,
    /// Work of the step in which the point was read; some of its memory may still be held.
    #[serde(default)]
    pub(super) fresh: Work,
}

impl Point {
    /// Returns the amount of a unit done by then.
    pub(super) fn done(&self, unit: Unit) -> f64 {
        match unit {
            Unit::Request => exact(self.work.requests),
            Unit::PromptToken => exact(self.work.prompt_tokens),
            Unit::OutputToken => exact(self.work.output_tokens),
            Unit::Image => exact(self.work.images),
            Unit::Audio => exact(self.work.audio),
            Unit::Hour => self.hours,
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Scale {
    /// Steps per floor.
    steps: u64,
    /// Steps in the open stretch.
    open: u64,
    lowest: Option<Point>,
    floors: VecDeque<Point>,
    /// Floors since the beginning, dropped ones included.
    count: u64,
}

/// Floors of all scales, in bounded memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Floors {
    scales: Vec<Scale>,
    keep: usize,
    requests: Option<u64>,
    /// Work done at the latest reading, and the work before its step.
    #[serde(default)]
    latest: Work,
    #[serde(default)]
    before: Work,
}

impl Floors {
    /// Creates `scales` stretch lengths, each twice the one before, that keep their last `keep` floors.
    pub(super) fn new(scales: u32, keep: usize) -> Self {
        let scale = |power| Scale {
            steps: 1_u64.checked_shl(power).unwrap_or(u64::MAX),
            open: 0,
            lowest: None,
            floors: VecDeque::new(),
            count: 0,
        };
        Self {
            scales: (0..scales.max(1)).map(scale).collect(),
            keep,
            requests: None,
            latest: Work::default(),
            before: Work::default(),
        }
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

    /// Adds a reading. Returns true if it began a new step; only then can floors have been completed.
    pub(super) fn push(&mut self, mut point: Point) -> bool {
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
            // Only after the first step: a second reading must not restore cleared floors.
            if scale.open > 0 && scale.lowest.is_none_or(|lowest| point.level < lowest.level) {
                scale.lowest = Some(point);
            }
        }
        step
    }

    /// Returns the floors of a scale, oldest first.
    pub(super) fn of(&self, scale: usize) -> &VecDeque<Point> {
        &self.scales[scale].floors
    }

    /// Returns true if the latest step completed a floor of the scale, and the count is a multiple of
    /// `every`.
    pub(super) fn due(&self, scale: usize, every: u64) -> bool {
        let scale = &self.scales[scale];
        scale.open == 1 && scale.count > 0 && scale.count.is_multiple_of(every.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(requests: u64, level: f64) -> Point {
        Point { level, hours: 0.0, work: Work { requests, ..Work::default() }, fresh: Work::default() }
    }

    fn levels(floors: &Floors, scale: usize) -> Vec<f64> {
        floors.of(scale).iter().map(|floor| floor.level).collect()
    }

    #[test]
    fn a_floor_is_the_least_reading_of_its_stretch() {
        let mut floors = Floors::new(2, 8);
        for (requests, level) in [(1, 5.0), (1, 9.0), (2, 7.0), (2, 3.0), (3, 8.0), (4, 6.0), (5, 1.0)] {
            floors.push(point(requests, level));
        }
        assert_eq!(levels(&floors, 0), [5.0, 3.0, 8.0, 6.0]);
        assert_eq!(levels(&floors, 1), [3.0, 6.0]);
        assert_eq!(floors.of(1)[1].work.requests, 4, "a floor keeps the work at which it was read");
    }

    #[test]
    fn a_busy_server_makes_one_step_of_hundreds_of_requests() {
        let mut floors = Floors::new(1, 8);
        for step in 0..4 {
            floors.push(point(step * 500, 1.0));
        }
        let work: Vec<u64> = floors.of(0).iter().map(|floor| floor.work.requests).collect();
        assert_eq!(work, [0, 500, 1000]);
    }

    #[test]
    fn memory_is_bounded() {
        let mut floors = Floors::new(3, 4);
        for step in 0..1000 {
            floors.push(point(step, 1.0));
        }
        assert!((0..floors.len()).all(|scale| floors.of(scale).len() == 4));
    }
}
