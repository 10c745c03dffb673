//! What the instance has kept of the memories of a model (`GET /series`), for the view of its memory: the last hour, or the last day. Pure.

use warden_policies::units::exact;

use super::history::Key;
use super::look::Tone;
use crate::series::answer::MemoryData;
use crate::series::marks::{Mark, MarkKind};

/// Which time the view of a memory shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Span {
    /// Since `top` was started.
    #[default]
    Live,
    Hour,
    Day,
}

impl Span {
    /// The next one.
    pub(super) const fn next(self) -> Self {
        match self {
            Self::Live => Self::Hour,
            Self::Hour => Self::Day,
            Self::Day => Self::Live,
        }
    }

    /// Its seconds; `None` for what is not asked for.
    pub(super) const fn seconds(self) -> Option<u64> {
        match self {
            Self::Live => None,
            Self::Hour => Some(3600),
            Self::Day => Some(86_400),
        }
    }

    /// Its name in a query.
    pub(super) const fn query(self) -> &'static str {
        match self {
            Self::Live => "",
            Self::Hour => "1h",
            Self::Day => "1d",
        }
    }

    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Live => "since this screen began",
            Self::Hour => "the last hour",
            Self::Day => "the last day",
        }
    }
}

/// What was kept of the memories of one model. Times are seconds since `top` was started, below 0 before that.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stored {
    pub(super) model: String,
    pub(super) span: Span,
    /// By memory, in the order of time.
    pub(super) lines: Vec<(Key, Vec<(f64, u64)>)>,
    pub(super) marks: Vec<(f64, char, Tone)>,
}

impl Stored {
    /// Of an answer, for a screen that began then (seconds since 1970).
    pub(super) fn of(model: &str, span: Span, data: &MemoryData, began: i64) -> Self {
        let began = jiff::SignedDuration::from_secs(began).as_secs_f64();
        let lines = data.series.iter().map(|one| {
            // A point is a stretch of time: its mean stands in the middle of it, and not after now.
            let half = exact(one.seconds) / 2.0;
            let at = |second: u64| (exact(second) + half).min(exact(data.now)) - began;
            let points = one.points.iter().map(|point| (at(point.at), point.mean)).collect();
            (Key { replica: one.replica, kind: one.memory }, points)
        });
        let marks = data.marks.iter().filter_map(|one| {
            let (letter, tone) = mark(one)?;
            Some((exact(one.at) / 1000.0 - began, letter, tone))
        });
        Self { model: model.to_owned(), span, lines: lines.collect(), marks: marks.collect() }
    }

    /// The memories of which there is anything.
    pub(super) fn keys(&self) -> Vec<Key> {
        self.lines.iter().filter(|(_, points)| !points.is_empty()).map(|(key, _)| *key).collect()
    }

    pub(super) fn points(&self, key: Key) -> &[(f64, u64)] {
        self.lines.iter().find(|(own, _)| *own == key).map_or(&[], |(_, points)| points)
    }
}

/// As events of this moment are marked.
const fn mark(mark: &Mark) -> Option<(char, Tone)> {
    match mark.kind {
        MarkKind::Replaced => Some(('R', Tone::Good)),
        MarkKind::Failed | MarkKind::Crashed => Some(('X', Tone::Bad)),
        MarkKind::Reclaimed => Some(('c', Tone::Good)),
        MarkKind::Unloaded => Some(('u', Tone::Quiet)),
        MarkKind::Canary | MarkKind::Configured | MarkKind::Warned => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use warden_policies::MemoryKind;

    use super::*;

    #[test]
    fn what_was_kept_stands_before_the_screen_began() {
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
        let stored = Stored::of("m", Span::Hour, &data, 4990);
        let key = Key { replica: 0, kind: MemoryKind::Host };
        assert_eq!(stored.keys(), [key]);
        assert_eq!(stored.points(key), [(-960.0, 7), (10.0, 9)]);
        assert_eq!(stored.marks, [(-890.0, 'R', Tone::Good)]);
        assert_eq!([Span::Live, Span::Hour, Span::Day].map(Span::next), [Span::Hour, Span::Day, Span::Live]);
    }
}
