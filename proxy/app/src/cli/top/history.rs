//! What the memories of models did since `top` was started: points in time, fewer and farther apart the longer it runs. Pure.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use warden_policies::MemoryKind;

use super::picture::{Memory, Row};

/// Points of one memory that are kept: two for each column of a wide terminal.
const POINTS: usize = 512;

/// Bytes at a time since `top` was started, or in a recording since the process was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) at: Duration,
    pub(super) bytes: u64,
}

/// Which memory of which process of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) replica: u32,
    pub(super) kind: MemoryKind,
}

#[derive(Clone, Debug, Default)]
pub(super) struct History {
    models: HashMap<String, Vec<(Key, Line)>>,
}

/// The points of one memory, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Line {
    points: Vec<Point>,
    /// Points come no closer than this.
    apart: Duration,
}

impl History {
    /// Takes in a picture. Models that are not in it are forgotten.
    pub(super) fn see(&mut self, at: Duration, rows: &[Row]) {
        let there: HashSet<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        self.models.retain(|name, _| there.contains(name.as_str()));
        for row in rows.iter().filter(|row| !row.memories.is_empty()) {
            let lines = self.models.entry(row.name.clone()).or_default();
            for (key, memory) in newest(&row.memories) {
                let place = lines.iter().position(|(own, _)| *own == key);
                let place = place.unwrap_or_else(|| {
                    lines.push((key, Line::default()));
                    lines.len() - 1
                });
                lines[place].1.push(Point { at, bytes: memory.bytes });
            }
            lines.sort_by_key(|(key, _)| *key);
        }
    }

    /// The memories of a model that there are points of, in order.
    pub(super) fn keys(&self, model: &str) -> Vec<Key> {
        self.models.get(model).into_iter().flatten().map(|(key, _)| *key).collect()
    }

    pub(super) fn points(&self, model: &str, key: Key) -> &[Point] {
        let lines = self.models.get(model).map(Vec::as_slice).unwrap_or_default();
        lines.iter().find(|(own, _)| *own == key).map(|(_, line)| line.points.as_slice()).unwrap_or_default()
    }
}

/// While one process takes the place of another there are two of one replica: the newer one counts.
pub(super) fn newest(memories: &[Memory]) -> Vec<(Key, &Memory)> {
    let mut found: Vec<(Key, &Memory)> = Vec::new();
    for memory in memories {
        let key = Key { replica: memory.replica, kind: memory.kind };
        match found.iter_mut().find(|(own, _)| *own == key) {
            Some((_, other)) if other.generation < memory.generation => *other = memory,
            Some(_) => {}
            None => found.push((key, memory)),
        }
    }
    found
}

impl Line {
    /// The points of a recording, thinned out as they would have been.
    pub(super) fn of(points: impl IntoIterator<Item = Point>) -> Self {
        let mut line = Self::default();
        points.into_iter().for_each(|point| line.push(point));
        line
    }

    pub(super) fn points(&self) -> &[Point] {
        &self.points
    }

    /// The newest reading is always the last point; older ones are kept at a distance that doubles whenever there are too many.
    fn push(&mut self, point: Point) {
        let before = self.points.len().checked_sub(2).and_then(|index| self.points.get(index));
        let close = |before: &Point| point.at.saturating_sub(before.at) < self.apart;
        if before.is_some_and(close) {
            self.points.pop();
        }
        self.points.push(point);
        if self.points.len() > POINTS {
            let spread = point.at.saturating_sub(self.points.first().map_or(point.at, |first| first.at));
            self.apart = spread / u32::try_from(POINTS / 2).unwrap_or(1);
            let mut last = None;
            let apart = self.apart;
            self.points.retain(|one| {
                let keep = last.is_none_or(|last| one.at.saturating_sub(last) >= apart) || *one == point;
                if keep {
                    last = Some(one.at);
                }
                keep
            });
            // Readings that come all at one time are no line.
            if self.points.len() > POINTS {
                self.points.drain(..POINTS / 2);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(second: u64) -> Point {
        Point { at: Duration::from_secs(second), bytes: second }
    }

    #[test]
    fn a_long_line_has_its_first_and_last_point_and_never_more_than_it_may() {
        let mut line = Line::default();
        for second in 0..100_000 {
            line.push(point(second));
            assert!(line.points.len() <= POINTS, "{second}: {}", line.points.len());
        }
        assert_eq!((line.points[0], *line.points.last().unwrap()), (point(0), point(99_999)));
        assert!(line.points.len() >= POINTS / 4, "{}", line.points.len());
        let apart: Vec<u64> = line.points.windows(2).map(|two| two[1].bytes - two[0].bytes).collect();
        let (last, rest) = apart.split_last().unwrap();
        assert!(rest.iter().all(|gap| gap.abs_diff(rest[0]) <= rest[0]), "{apart:?}");
        assert!(*last <= 2 * rest[0], "{apart:?}");
    }

    #[test]
    fn readings_of_one_moment_are_bounded_too() {
        let line = Line::of((0..10_000).map(|_| point(7)));
        assert!(line.points.len() <= POINTS);
    }

    #[test]
    fn while_one_process_takes_the_place_of_another_the_newer_one_is_drawn() {
        let memory = |generation, bytes| Memory {
            kind: MemoryKind::Host,
            replica: 0,
            generation: Some(generation),
            bytes,
            soft: None,
            hard: None,
        };
        let row = |memories: Vec<Memory>| Row { name: "m".to_owned(), memories, ..Row::default() };
        let mut history = History::default();
        history.see(Duration::from_secs(1), &[row(vec![memory(1, 500)])]);
        history.see(Duration::from_secs(2), &[row(vec![memory(1, 510), memory(2, 20)])]);
        let key = Key { replica: 0, kind: MemoryKind::Host };
        assert_eq!(history.keys("m"), [key]);
        let bytes: Vec<u64> = history.points("m", key).iter().map(|point| point.bytes).collect();
        assert_eq!(bytes, [500, 20]);
        history.see(Duration::from_secs(3), &[]);
        assert!(history.keys("m").is_empty());
    }
}
