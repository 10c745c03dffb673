//! Floors: the least memory in each stretch of work, at several lengths of stretch.
//!
//! ```text
//!  readings   .  ' . .'   . ' .  . ' '.  .      (peaks of requests in flight)
//!  scale 1    .    . .    .   .  .    .  .      one step of work each
//!  scale 2    .----  .----    .----   .--
//!  scale 4    .-----------    .----------       …
//! ```
//!
//! A step is a reading that shows more requests than the one before: one request on a quiet server, hundreds on a busy
//! one that is read by a timer. A reading of the same work only lowers the floor of its step, so reading twice, or
//! during a request, changes nothing. Every floor keeps the true count of work at which it was read.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::growth::Unit;
use crate::sample::Work;
use crate::units::exact;

/// One reading of one series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Point {
    /// Memory in bytes.
    pub(super) level: f64,
    /// Hours since the spawn.
    pub(super) hours: f64,
    /// Work done since the spawn.
    pub(super) work: Work,
    /// Work of the step in which it was read: some of its memory may still be held.
    #[serde(default)]
    pub(super) fresh: Work,
}

impl Point {
    /// How much of a unit was done by then.
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
    /// Steps to a floor.
    steps: u64,
    /// Steps in the open stretch.
    open: u64,
    lowest: Option<Point>,
    floors: VecDeque<Point>,
    /// Floors since the beginning, those that were dropped too.
    count: u64,
}

/// The floors of all scales. Its memory is bounded.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Floors {
    scales: Vec<Scale>,
    keep: usize,
    requests: Option<u64>,
    /// Work done at the latest reading, and before the step that it belongs to.
    #[serde(default)]
    latest: Work,
    #[serde(default)]
    before: Work,
}

impl Floors {
    /// `scales` lengths, each twice the one before, and the last `keep` floors of each.
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

    /// How many scales there are.
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

    /// Takes a reading in; says whether it began a new step. Only then can floors have been completed.
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
            // Not before the first step: what was cleared must not come back by a second look at it.
            if scale.open > 0 && scale.lowest.is_none_or(|lowest| point.level < lowest.level) {
                scale.lowest = Some(point);
            }
        }
        step
    }

    /// The floors of a scale, oldest first.
    pub(super) fn of(&self, scale: usize) -> &VecDeque<Point> {
        &self.scales[scale].floors
    }

    /// Whether a floor of the scale was completed by the latest step, and it is the `every`-th.
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
