//! The plot of a memory over time: its line, its budgets, and letters for actions. Pure.

use std::time::Duration;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::{Color, Style};
use ratatui_core::symbols::Marker;
use ratatui_core::text::Line;
use ratatui_core::widgets::Widget;
use ratatui_widgets::canvas::{Canvas, Context, Line as Stroke, Points};
use warden_policies::units::{ByteAmount, as_f64, truncate_to_u64};

use super::look::{BAD, BUSY, QUIET, WARN};
use super::memory::{HistoryMark, MemoryHistory, MemoryLine};
use super::text;
use crate::cli::status::short_age;

/// Columns for a number at the left.
const NUMBER_COLUMNS: u16 = 7;
/// A budget this many times above all readings is not drawn, because it would flatten the line.
const MAX_BUDGET_RATIO: f64 = 3.0;
/// Minimum height of the axis, as a part of the highest reading and at least 1 MiB, so that single pages
/// make no hills.
const MIN_AXIS_SHARE: f64 = 0.005;
const MIB: f64 = 1_048_576.0;

pub(super) fn draw_plot(history: &MemoryHistory, memory: &MemoryLine, area: Rect, buffer: &mut Buffer) {
    let [plot, times] = Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(area);
    let [numbers, plot] =
        Layout::horizontal([Constraint::Length(NUMBER_COLUMNS), Constraint::Min(1)]).areas(plot);
    let scale = ByteScale::from_memory(memory, plot.height);
    let (from, to) = (history.from, history.to.max(history.from + 1.0));
    // Labels use the cell at or above their position, lines the nearest one.
    let column = (to - from) / f64::from(plot.width.max(2) - 1);
    let half_row = (scale.ceiling - scale.floor) / f64::from(plot.height.max(2) - 1) / 2.0;
    let paint = |context: &mut Context<'_>| {
        context.marker(Marker::Custom('─'));
        for (limit, name, tone) in budgets(memory) {
            let label = Line::styled(format!(" {name} {}", text::short_bytes(limit)), Style::from(tone));
            let (at, columns) = (as_f64(limit), u32::try_from(label.width()).unwrap_or(1));
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

/// The ends of the axis of bytes, and its step, which is a power of two.
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
        // Leave room above a budget for the letters of marks.
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

    /// Formats a number of the axis, with as many digits as its step needs.
    fn number(&self, bytes: f64) -> String {
        let unit = ((bytes.max(1.0).log2() / 10.0).floor() * 10.0).exp2();
        let digits = [1.0, 0.5, 0.01].iter().filter(|part| self.step < *part * unit).count();
        text::compact_size(&format!("{:.digits$}", ByteAmount(bytes)))
    }
}

/// Draws times below the plot: since its beginning, or as ages.
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
    use warden_policies::MemoryKind;

    use super::*;

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
