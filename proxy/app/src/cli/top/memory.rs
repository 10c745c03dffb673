//! The memory of one model over time, from the instance (`GET /series`) or from a recording
//! ([`super::recording`]). Pure.

use warden_policies::MemoryKind;
use warden_policies::units::as_f64;

use super::look::{BAD, GOOD, PLAIN};
use crate::series::answer::{MemoryData, SeriesData};
use crate::series::marks::SeriesMarkKind;
use ratatui_core::style::Color;

/// Number of points: the columns of a wide terminal.
const SERIES_POINTS: u64 = 300;

/// A time range of the model's view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimeSpan {
    seconds: u64,
    pub(super) words: &'static str,
}

pub(super) static SPANS: [TimeSpan; 3] = [
    TimeSpan { seconds: 600, words: "the last 10 min" },
    TimeSpan { seconds: 3600, words: "the last hour" },
    TimeSpan { seconds: 86_400, words: "the last day" },
];

impl TimeSpan {
    /// Seconds until a column of the plot gets a new value.
    pub(super) const fn refresh(self) -> u64 {
        self.seconds / SERIES_POINTS
    }

    /// The query of `GET /series` at this second since 1970.
    pub(super) fn query(self, model: &str, now: u64) -> [(&'static str, String); 4] {
        [
            ("model", model.to_owned()),
            ("from", now.saturating_sub(self.seconds).to_string()),
            ("to", (now + 1).to_string()),
            ("points", SERIES_POINTS.to_string()),
        ]
    }
}

/// All memories of one model. Times are seconds since 1970, or since the start of a recording's process.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct MemoryHistory {
    pub(super) model: String,
    /// `None` for a recording.
    pub(super) span: Option<TimeSpan>,
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) lines: Vec<MemoryLine>,
    pub(super) marks: Vec<HistoryMark>,
}

/// A memory of a replica.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MemoryLine {
    pub(super) kind: MemoryKind,
    pub(super) replica: u32,
    /// Seconds and bytes, oldest first; never empty.
    pub(super) points: Vec<(f64, f64)>,
    /// Bytes now, if a process runs.
    pub(super) held: Option<u64>,
    /// Budgets in bytes.
    pub(super) soft: Option<u64>,
    pub(super) hard: Option<u64>,
}

/// An action at a point in time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HistoryMark {
    pub(super) at: f64,
    pub(super) letter: char,
    pub(super) tone: Color,
}

impl MemoryHistory {
    pub(super) fn from_answer(span: TimeSpan, data: &MemoryData) -> Self {
        let to = as_f64(data.now);
        Self {
            model: data.model.clone(),
            span: Some(span),
            from: to - as_f64(span.seconds),
            to,
            lines: data.series.iter().filter(|one| !one.points.is_empty()).map(|one| line(one, to)).collect(),
            marks: data.marks.iter().filter_map(|one| mark(one.kind, as_f64(one.at) / 1000.0)).collect(),
        }
    }
}

fn line(series: &SeriesData, now: f64) -> MemoryLine {
    // A point is a mean over some seconds: draw it in their middle, but not after now.
    let half = as_f64(series.seconds) / 2.0;
    let points = series.points.iter().map(|point| ((as_f64(point.at) + half).min(now), as_f64(point.mean)));
    let present = series.present.as_ref();
    MemoryLine {
        kind: series.memory,
        replica: series.replica,
        points: points.collect(),
        held: present.map(|present| present.bytes),
        soft: present.and_then(|present| present.soft),
        hard: present.and_then(|present| present.hard),
    }
}

const fn mark(kind: SeriesMarkKind, at: f64) -> Option<HistoryMark> {
    let (letter, tone) = match kind {
        SeriesMarkKind::Replaced => ('R', GOOD),
        SeriesMarkKind::Failed | SeriesMarkKind::Crashed => ('X', BAD),
        SeriesMarkKind::Reclaimed => ('c', GOOD),
        SeriesMarkKind::Unloaded => ('u', PLAIN),
        SeriesMarkKind::Canary | SeriesMarkKind::Configured | SeriesMarkKind::Warned => return None,
    };
    Some(HistoryMark { at, letter, tone })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_becomes_lines_and_marks() {
        let point = |at: u64, mean: u64| json!({"at": at, "count": 5, "min": mean, "mean": mean, "max": mean, "last": mean, "whole": true});
        let data: MemoryData = serde_json::from_value(json!({
            "model": "m", "now": 5000, "from": 1400, "to": 5001, "place": "p",
            "series": [
                {"replica": 0, "memory": "host", "seconds": 60, "points": [point(4000, 7), point(4980, 9)]},
                {"replica": 1, "memory": "host", "seconds": 60, "points": []},
            ],
            "marks": [
                {"at": 4_100_000, "model": "m", "kind": "replaced", "words": "w"},
                {"at": 4_200_000, "model": "m", "kind": "configured", "words": "w"},
            ],
        }))
        .unwrap();
        let history = MemoryHistory::from_answer(SPANS[1], &data);
        assert_eq!((history.from, history.to, history.lines.len()), (1400.0, 5000.0, 1));
        assert_eq!(history.lines[0].points, [(4030.0, 7.0), (5000.0, 9.0)]);
        assert_eq!(history.marks, [HistoryMark { at: 4100.0, letter: 'R', tone: GOOD }]);
    }
}
