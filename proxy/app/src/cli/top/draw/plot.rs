//! A line over time, in braille where the terminal has it: round axes, lines for budgets, marks for what was done. Pure.

use ratatui_core::layout::Rect;
use ratatui_core::style::Style;
use warden_policies::units::{exact, whole};

use super::super::look::Tone;
use super::super::text;
use super::Pen;

/// Columns for the numbers at the left.
const NUMBERS: u16 = 7;
/// A budget so many times above all readings is not drawn: the line would lie on the ground.
const FAR: f64 = 3.0;
/// A range below this share of the highest reading, or below a MiB, is not stretched over the plot.
const FLAT: f64 = 0.005;
const MIB: f64 = 1_048_576.0;
/// What steps of an axis are multiples of: numbers that are round where 1024 MiB are a GiB.
const BYTES: [f64; 10] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
const SECONDS: [u64; 18] =
    [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 43_200, 86_400, 604_800];

/// What is drawn.
pub(super) struct Plot<'a> {
    /// Seconds and bytes, in the order of time.
    pub(super) points: &'a [(f64, u64)],
    pub(super) budgets: &'a [(u64, &'static str, Tone)],
    /// Seconds, a letter, what it means.
    pub(super) marks: &'a [(f64, char, Tone)],
    /// The first and the last second of the axis.
    pub(super) from_to: (f64, f64),
    /// Times are told as how long ago, not since the beginning.
    pub(super) ago: bool,
}

pub(super) fn draw(plot: &Plot<'_>, pen: &mut Pen<'_>, area: Rect) {
    let inner = Rect::new(
        area.x + NUMBERS,
        area.y,
        area.width.saturating_sub(NUMBERS),
        area.height.saturating_sub(1),
    );
    if inner.width < 10 || inner.height < 3 || plot.points.is_empty() {
        pen.text(area.x, area.y, area.width, "no reading yet", pen.look.of_tone(Tone::Quiet));
        return;
    }
    let scale = Scale::of(plot, inner);
    numbers(&scale, pen, area, inner);
    times(plot, &scale, pen, area, inner);
    for (bytes, name, tone) in plot.budgets.iter().filter(|(bytes, ..)| scale.has(*bytes)) {
        let y = inner.y + scale.row(exact(*bytes));
        let style = pen.look.of_tone(*tone);
        let line = pen.look.lines().0.repeat(usize::from(inner.width));
        pen.text(inner.x, y, inner.width, &line, style);
        pen.text_to(inner.right(), y, inner.width, &format!(" {name} {}", text::bytes(*bytes)), style);
    }
    for (second, letter, tone) in plot.marks {
        let Some(x) = scale.column(*second) else { continue };
        let style = pen.look.of_tone(*tone);
        for y in inner.y..inner.bottom() {
            pen.text(inner.x + x, y, 1, pen.look.lines().1, style);
        }
        pen.text(inner.x + x, inner.y, 1, letter.encode_utf8(&mut [0; 4]), style);
    }
    line(plot, &scale, pen, inner);
}

/// From seconds and bytes to cells.
struct Scale {
    seconds: (f64, f64),
    bytes: (f64, f64),
    step: f64,
    columns: u16,
    rows: u16,
}

impl Scale {
    /// Round ends around all readings, and around the budgets that are near.
    fn of(plot: &Plot<'_>, inner: Rect) -> Self {
        let readings = plot.points.iter().map(|(_, bytes)| exact(*bytes));
        let (low, high) =
            readings.fold((f64::MAX, 0.0_f64), |(low, high), bytes| (low.min(bytes), high.max(bytes)));
        let budgets = plot.budgets.iter().map(|(bytes, ..)| exact(*bytes));
        let near = budgets.filter(|bytes| *bytes <= (high * FAR).max(1.0));
        let (low, high) = near.fold((low, high), |(low, high), bytes| (low.min(bytes), high.max(bytes)));
        let ticks = f64::from((inner.height / 3).clamp(1, 6));
        // A line that is as good as flat is drawn flat: not each page that comes and goes is a hill.
        let step = step((high - low).max(high * FLAT).max(MIB) / ticks);
        let floor = (low / step).floor() * step;
        let ceiling = ((high / step).ceil() * step).max(floor + step);
        let (from, to) = plot.from_to;
        Self {
            seconds: (from, to.max(from + 1.0)),
            bytes: (floor, ceiling),
            step,
            columns: inner.width,
            rows: inner.height,
        }
    }

    fn has(&self, bytes: u64) -> bool {
        (self.bytes.0..=self.bytes.1).contains(&exact(bytes))
    }

    /// From 0 at the top to 1 at the bottom.
    fn down(&self, bytes: f64) -> f64 {
        ((self.bytes.1 - bytes) / (self.bytes.1 - self.bytes.0)).clamp(0.0, 1.0)
    }

    fn row(&self, bytes: f64) -> u16 {
        cell(self.down(bytes), self.rows)
    }

    /// From 0 at the left to 1 at the right; outside of both if it is not on the axis.
    fn along(&self, second: f64) -> f64 {
        (second - self.seconds.0) / (self.seconds.1 - self.seconds.0)
    }

    fn column(&self, second: f64) -> Option<u16> {
        let along = self.along(second);
        (0.0..=1.0).contains(&along).then(|| cell(along, self.columns))
    }
}

/// The cell of several that a share from 0 to 1 falls into.
fn cell(share: f64, cells: u16) -> u16 {
    let last = cells.saturating_sub(1);
    u16::try_from(whole((share * f64::from(last)).round())).unwrap_or(last).min(last)
}

/// A step of bytes that is round in its unit.
fn step(least: f64) -> f64 {
    let mut unit = 1.0;
    while least > unit * 512.0 {
        unit *= 1024.0;
    }
    BYTES.iter().map(|step| step * unit).find(|step| *step >= least).unwrap_or(unit)
}

fn numbers(scale: &Scale, pen: &mut Pen<'_>, area: Rect, inner: Rect) {
    let quiet = pen.look.of_tone(Tone::Quiet);
    let mut value = scale.bytes.0;
    let mut taken = u16::MAX;
    while value <= scale.bytes.1 + scale.step / 2.0 {
        let row = scale.row(value);
        if row != taken {
            pen.text_to(area.x + NUMBERS - 1, inner.y + row, NUMBERS - 1, &number(value, scale.step), quiet);
        }
        taken = row;
        value += scale.step;
    }
}

/// A number of the axis, with as many digits as tell it from the next one.
fn number(bytes: f64, step: f64) -> String {
    let (mut unit, mut letter) = (1.0, "B");
    for next in ["K", "M", "G", "T", "P"] {
        if bytes < unit * 1024.0 {
            break;
        }
        (unit, letter) = (unit * 1024.0, next);
    }
    let digits = [1.0, 0.1].iter().filter(|place| step < *place * unit).count();
    format!("{:.digits$}{letter}", bytes / unit)
}

fn times(plot: &Plot<'_>, scale: &Scale, pen: &mut Pen<'_>, area: Rect, inner: Rect) {
    let quiet = pen.look.of_tone(Tone::Quiet);
    let y = area.bottom().saturating_sub(1);
    let (from, to) = scale.seconds;
    let wanted = (to - from) / f64::from((inner.width / 16).max(1));
    let longest = 604_800;
    let step = SECONDS.iter().copied().find(|step| exact(*step) >= wanted).unwrap_or(longest);
    let zero = if plot.ago { to } else { 0.0 };
    let mut free = 0;
    let mut ticks: Vec<u64> = (0..=whole((to - from) / exact(step)) + 1).collect();
    if plot.ago {
        ticks.reverse();
    }
    let first = if plot.ago { 0 } else { whole((from / exact(step)).ceil()) };
    for tick in ticks {
        let seconds = (first + tick) * step;
        let at = if plot.ago { zero - exact(seconds) } else { exact(seconds) };
        let Some(x) = scale.column(at) else { continue };
        let label = match (plot.ago, seconds) {
            (true, 0) => "now".to_owned(),
            (true, seconds) => format!("-{}", short(seconds)),
            (false, seconds) => short(seconds),
        };
        let width = u16::try_from(label.len()).unwrap_or(u16::MAX);
        let start = x.saturating_sub(width / 2).min(inner.width.saturating_sub(width));
        if start >= free {
            pen.text(inner.x + start, y, width, &label, quiet);
            free = start + width + 1;
        }
    }
}

/// A round time in few letters.
fn short(seconds: u64) -> String {
    match seconds {
        seconds if seconds != 0 && seconds.is_multiple_of(86_400) => format!("{}d", seconds / 86_400),
        seconds if seconds != 0 && seconds.is_multiple_of(3600) => format!("{}h", seconds / 3600),
        seconds if seconds > 3600 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        seconds if seconds != 0 && seconds.is_multiple_of(60) => format!("{}m", seconds / 60),
        seconds if seconds > 60 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        seconds => format!("{seconds}s"),
    }
}

/// Two dots beside each other and four above each other in a cell.
const DOTS: [[u32; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];

fn line(plot: &Plot<'_>, scale: &Scale, pen: &mut Pen<'_>, inner: Rect) {
    let (across, up) = (inner.width * 2, inner.height * 4);
    let place = |(second, bytes): &(f64, u64)| {
        let x = scale.along(*second) * f64::from(across - 1);
        (x, scale.down(exact(*bytes)) * f64::from(up - 1))
    };
    let places: Vec<(f64, f64)> = plot.points.iter().map(place).collect();
    let mut dots = vec![0_u32; usize::from(inner.width) * usize::from(inner.height)];
    let mut set = |x: u16, y: u16| {
        let index = usize::from(y / 4) * usize::from(inner.width) + usize::from(x / 2);
        if let Some(cell) = dots.get_mut(index) {
            *cell |= DOTS[usize::from(x % 2)][usize::from(y % 4)];
        }
    };
    let mut before: Option<u16> = None;
    for x in 0..across {
        let Some(y) = at(&places, f64::from(x)) else { continue };
        let y = u16::try_from(whole(y.round())).unwrap_or(0).min(up - 1);
        // No gap between this column and the one before, however steep it is.
        let (from, to) = before
            .map_or((y, y), |before| if before < y { (before + 1, y) } else { (y, before.max(y + 1) - 1) });
        (from..=to.max(from)).for_each(|y| set(x, y));
        set(x, y);
        before = Some(y);
    }
    for (index, bits) in dots.iter().enumerate().filter(|(_, bits)| **bits != 0) {
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        let (x, y) = (inner.x + index % inner.width, inner.y + index / inner.width);
        let letter = if pen.look.unicode { char::from_u32(0x2800 + bits).unwrap_or('*') } else { '*' };
        pen.text(x, y, 1, letter.encode_utf8(&mut [0; 4]), Style::new().patch(pen.look.of_tone(Tone::Busy)));
    }
}

/// The height of the line over a column; `None` before its first point and after its last.
fn at(places: &[(f64, f64)], x: f64) -> Option<f64> {
    let after = places.partition_point(|(px, _)| *px < x);
    match (after.checked_sub(1).and_then(|index| places.get(index)), places.get(after)) {
        (Some((x0, y0)), Some((x1, y1))) if x1 > x0 => Some(y0 + (y1 - y0) * (x - x0) / (x1 - x0)),
        (_, Some((x1, y))) if (x1 - x).abs() < 1.0 => Some(*y),
        (Some((x0, y)), _) if (x - x0).abs() < 1.0 => Some(*y),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(step: f64, wanted: f64) {
        assert!((step - wanted).abs() < 0.5, "{step} is not {wanted}");
    }

    #[test]
    fn steps_are_round_numbers_of_their_unit() {
        let mib = 1024.0 * 1024.0;
        is(step(784.0 * 1024.0), mib);
        is(step(300.0 * mib), 512.0 * mib);
        is(step(513.0 * mib), 1024.0 * mib);
        let told = [
            (0.0, mib),
            (512.0 * mib, 512.0 * mib),
            (1536.0 * mib, 512.0 * mib),
            (30_770.0 * mib, 50.0 * mib),
        ];
        assert_eq!(told.map(|(bytes, step)| number(bytes, step)), ["0B", "512M", "1.5G", "30.05G"]);
        is(step(16.8 * mib), 32.0 * mib);
        is(step(3.0), 4.0);
        is(step(1.0), 1.0);
        assert_eq!(
            [30, 90, 120, 3600, 5400, 172_800, 0].map(short),
            ["30s", "1m30s", "2m", "1h", "1h30m", "2d", "0s"]
        );
    }

    #[test]
    fn between_points_the_line_goes_straight_and_beyond_them_there_is_none() {
        let places = [(0.0, 10.0), (10.0, 20.0), (10.0, 0.0)];
        assert_eq!(at(&places, 5.0), Some(15.0));
        assert_eq!(at(&places, 20.0), None);
        assert_eq!(at(&[(5.0, 3.0)], 5.5), Some(3.0));
        assert_eq!(at(&[(5.0, 3.0)], 7.5), None);
        assert_eq!(at(&[], 7.5), None);
    }
}
