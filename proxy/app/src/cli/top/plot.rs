//! The memory of one model over time, from `GET /series` or from a recording ([`super::recording`]). Plots
//! the memory with budgets and with letters for actions. Pure.

use std::time::Duration;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::{Color, Style};
use ratatui_core::symbols::Marker;
use ratatui_core::text::Line;
use ratatui_core::widgets::Widget;
use ratatui_widgets::canvas::{Canvas, Context, Line as Stroke, Points};
use warden_admin::series::answer::{MemoryData, SeriesData};
use warden_admin::series::marks::SeriesMarkKind;
use warden_policies::MemoryKind;
use warden_policies::units::{ByteAmount, as_f64, truncate_to_u64};

use super::look::{self, BAD, BUSY, GOOD, PLAIN, QUIET, WARN};
use crate::cli::status::short_age;

/// As many points as a wide terminal has columns.
const SERIES_POINTS: u64 = 300;

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
    /// Returns the seconds until the next column of the plot.
    pub(super) const fn refresh(self) -> u64 {
        self.seconds / SERIES_POINTS
    }

    pub(super) fn query(self, model: &str, now: u64) -> [(&'static str, String); 4] {
        [
            ("model", model.to_owned()),
            ("from", now.saturating_sub(self.seconds).to_string()),
            ("to", (now + 1).to_string()),
            ("points", SERIES_POINTS.to_string()),
        ]
    }
}

/// Memory of all replicas of a model. Times are seconds since 1970, or since the start of a recording's
/// process.
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

#[derive(Clone, Debug, PartialEq)]
pub(super) struct MemoryLine {
    pub(super) kind: MemoryKind,
    pub(super) replica: u32,
    /// Seconds and bytes, oldest first; never empty.
    pub(super) points: Vec<(f64, f64)>,
    /// Current bytes, if a process runs.
    pub(super) held: Option<u64>,
    /// Budgets in bytes.
    pub(super) soft: Option<u64>,
    pub(super) hard: Option<u64>,
}

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
    // A point is a mean over some seconds: draw it at their middle, but not after the current time.
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

const NUMBER_COLUMNS: u16 = 7;
/// Draw no budget beyond this multiple of the highest reading, because it would flatten the line.
const MAX_BUDGET_RATIO: f64 = 3.0;
/// Minimum height of the axis as a part of the highest reading: single pages must not look like hills.
const MIN_AXIS_SHARE: f64 = 0.005;
const MIB: f64 = 1_048_576.0;

pub(super) fn draw_plot(history: &MemoryHistory, memory: &MemoryLine, area: Rect, buffer: &mut Buffer) {
    let [plot, times] = Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(area);
    let [numbers, plot] =
        Layout::horizontal([Constraint::Length(NUMBER_COLUMNS), Constraint::Min(1)]).areas(plot);
    let scale = ByteScale::from_memory(memory, plot.height);
    let from = history.from;
    let to = history.to.max(history.from + 1.0);
    // Labels occupy the cell at or above their position, lines the nearest cell.
    let column = (to - from) / f64::from(plot.width.max(2) - 1);
    let half_row = (scale.ceiling - scale.floor) / f64::from(plot.height.max(2) - 1) / 2.0;
    let paint = |context: &mut Context<'_>| {
        context.marker(Marker::Custom('─'));
        for (limit, name, tone) in budgets(memory) {
            let label = Line::styled(format!(" {name} {}", look::short_bytes(limit)), Style::from(tone));
            let at = as_f64(limit);
            let columns = u32::try_from(label.width()).unwrap_or(1);
            context.draw(&Stroke::new(from, at, to, at, tone));
            context.print(to - (f64::from(columns) - 1.0) * column, at - half_row, label);
        }
        context.marker(Marker::Custom('┊'));
        for HistoryMark { at, letter, tone } in &history.marks {
            context.draw(&Stroke::new(*at, scale.floor, *at, scale.ceiling, *tone));
            let letter = Line::styled(letter.to_string(), *tone);
            context.print((*at + column / 2.0).min(to), scale.ceiling, letter);
        }
        context.marker(Marker::Braille);
        let color = BUSY;
        context.draw(&Points { coords: &memory.points, color });
        for pair in memory.points.windows(2) {
            context.draw(&Stroke::new(pair[0].0, pair[0].1, pair[1].0, pair[1].1, color));
        }
    };
    Canvas::default()
        .x_bounds([from, to])
        .y_bounds([scale.floor, scale.ceiling])
        .paint(paint)
        .render(plot, buffer);
    scale.draw_numbers(numbers, buffer);
    let recorded = history.span.is_none();
    draw_times((from, to), recorded, Rect { x: plot.x, width: plot.width, ..times }, buffer);
}

fn budgets(memory: &MemoryLine) -> impl Iterator<Item = (u64, &'static str, Color)> {
    let soft = memory.soft.map(|soft| (soft, "soft budget", WARN));
    soft.into_iter().chain(memory.hard.map(|hard| (hard, "hard budget", BAD)))
}

/// Range of the axis in bytes, and the distance of its numbers, a power of two.
struct ByteScale {
    floor: f64,
    ceiling: f64,
    step: f64,
}

impl ByteScale {
    fn from_memory(memory: &MemoryLine, rows: u16) -> Self {
        let ends = |(low, high): (f64, f64), bytes: f64| (low.min(bytes), high.max(bytes));
        let (low, high) = memory.points.iter().map(|(_, bytes)| *bytes).fold((f64::MAX, 0.0), ends);
        let near = budgets(memory)
            .map(|(limit, ..)| as_f64(limit))
            .filter(|limit| *limit <= high * MAX_BUDGET_RATIO);
        // Leave room above a budget's line: the letters of the marks are at the top of the plot.
        let near = near.map(|limit| limit * 1.02);
        let (low, high) = near.fold((low, high), ends);
        let ticks = f64::from((rows / 3).clamp(1, 6));
        let step = ((high - low).max(high * MIN_AXIS_SHARE).max(MIB) / ticks).log2().ceil().exp2();
        let floor = (low / step).floor() * step;
        Self { floor, ceiling: ((high / step).ceil() * step).max(floor + step), step }
    }

    fn draw_numbers(&self, area: Rect, buffer: &mut Buffer) {
        let rows = f64::from(area.height.saturating_sub(1));
        for tick in 0..=truncate_to_u64(((self.ceiling - self.floor) / self.step).round()) {
            let bytes = self.floor + as_f64(tick) * self.step;
            let row = (self.ceiling - bytes) / (self.ceiling - self.floor) * rows;
            let y = area.y + u16::try_from(truncate_to_u64(row.round())).unwrap_or_default();
            let number = Line::styled(self.number(bytes) + " ", QUIET).right_aligned();
            number.render(Rect { y, height: 1, ..area }, buffer);
        }
    }

    fn number(&self, bytes: f64) -> String {
        let unit = ((bytes.max(1.0).log2() / 10.0).floor() * 10.0).exp2();
        let digits = [1.0, 0.5, 0.01].iter().filter(|part| self.step < *part * unit).count();
        look::compact_size(&format!("{:.digits$}", ByteAmount(bytes)))
    }
}

/// Times are since the start of a recording's process, or ages.
fn draw_times((from, to): (f64, f64), recorded: bool, area: Rect, buffer: &mut Buffer) {
    let parts = if area.width < 60 { 2 } else { 4 };
    for part in 0..=parts {
        let share = f64::from(part) / f64::from(parts);
        let at = from + (to - from) * share;
        let seconds = truncate_to_u64(if recorded { at } else { to - at });
        let short = short_age(Duration::from_secs(seconds));
        let short = short.trim_end_matches("00s").trim_end_matches("00m");
        let words = match (recorded, seconds) {
            (true, _) => short.to_owned(),
            (false, 0) => "now".to_owned(),
            (false, _) => format!("-{short}"),
        };
        let width = u16::try_from(words.len()).unwrap_or(area.width);
        let middle = u16::try_from(truncate_to_u64(share * f64::from(area.width))).unwrap_or_default();
        let start = middle.saturating_sub(width / 2).min(area.width.saturating_sub(width));
        let place = Rect { x: area.x + start, width, ..area }.intersection(area);
        Line::styled(words, QUIET).render(place, buffer);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use warden_policies::MemoryKind;

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

    fn scale(points: &[u64], soft: Option<u64>) -> ByteScale {
        let points = points.iter().map(|bytes| (0.0, as_f64(*bytes))).collect();
        let kind = MemoryKind::Host;
        let memory = MemoryLine { kind, replica: 0, points, held: None, soft, hard: None };
        ByteScale::from_memory(&memory, 12)
    }

    #[test]
    fn the_axis_has_round_ends_around_all_readings_and_the_budgets_that_are_near() {
        let numbers = |points: &[u64], soft| {
            let scale = scale(points, soft);
            [scale.floor, scale.floor + scale.step, scale.ceiling].map(|bytes| scale.number(bytes))
        };
        assert_eq!(numbers(&[3 << 30, 7 << 30], None), ["3G", "4G", "7G"]);
        assert_eq!(numbers(&[3 << 30], Some(5 << 30)), ["3G", "4G", "6G"]);
        assert_eq!(numbers(&[3 << 30], Some(50 << 30)), ["3.000G", "3.004G", "3.004G"], "flat");
        assert_eq!(numbers(&[0, 10], None), ["0B", "256K", "256K"]);
    }
}
