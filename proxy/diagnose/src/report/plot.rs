//! A plot as SVG: memory over requests.

use std::fmt::Write as _;

use warden_policies::units::exact;

/// Size in the units of the drawing.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 200.0;
/// Room for the numbers beside the axes.
const LEFT: f64 = 72.0;
const BOTTOM: f64 = 24.0;
const TOP: f64 = 8.0;
const RIGHT: f64 = 8.0;

/// One curve: requests and bytes.
pub(super) struct Curve<'a> {
    /// A class for its colour.
    pub(super) class: &'a str,
    pub(super) name: &'a str,
    pub(super) points: Vec<(u64, u64)>,
}

/// The curves in one plot; empty text if there is nothing to draw.
pub(super) fn svg(curves: &[Curve<'_>]) -> String {
    let all = || curves.iter().flat_map(|curve| curve.points.iter().copied());
    let Some(last) = all().map(|(x, _)| x).max() else { return String::new() };
    let first = all().map(|(x, _)| x).min().unwrap_or(0);
    let (low, high) = (all().map(|(_, y)| y).min().unwrap_or(0), all().map(|(_, y)| y).max().unwrap_or(0));
    // A still memory is a line in the middle, not noise over the whole height.
    let span = (high - low).max(STILL);
    let bottom = low.saturating_sub((span - (high - low)) / 2);
    let levels = Ticks::of_bytes(bottom, bottom.saturating_add(span));
    let (bottom, top) = (levels.first, levels.last());
    let requests = Ticks::of_numbers(first, last);
    let x = |value: u64| LEFT + share(value, first, last) * (WIDTH - LEFT - RIGHT);
    let y = |value: u64| HEIGHT - BOTTOM - share(value, bottom, top) * (HEIGHT - BOTTOM - TOP);
    let mut text = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
    for level in levels.all() {
        let at = y(level);
        let end = WIDTH - RIGHT;
        let _ =
            write!(text, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
        let (beside, under) = (LEFT - 6.0, at + 4.0);
        let label = format!("{} {}", level / levels.unit.0, levels.unit.1);
        let _ = write!(text, "<text class=\"y\" x=\"{beside}\" y=\"{under:.1}\">{label}</text>");
    }
    for value in requests.all().filter(|value| (first..=last).contains(value)) {
        let (at, under) = (x(value), HEIGHT - 6.0);
        let _ = write!(text, "<text class=\"x\" x=\"{at:.1}\" y=\"{under}\">{value}</text>");
    }
    for curve in curves {
        let points: Vec<String> =
            curve.points.iter().map(|(a, b)| format!("{:.1},{:.1}", x(*a), y(*b))).collect();
        let _ = write!(
            text,
            "<polyline class=\"{}\" points=\"{}\"><title>{}</title></polyline>",
            curve.class,
            points.join(" "),
            curve.name
        );
    }
    text.push_str("</svg>");
    text
}

/// Parts of an axis, at most.
const PARTS: u64 = 5;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Round numbers along an axis: 1, 2 or 5 times a power of ten of a unit apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    /// The first, at or before the least value.
    first: u64,
    step: u64,
    /// Steps until the largest value is reached.
    count: u64,
    /// The unit that labels are in, and its name.
    unit: (u64, &'static str),
}

impl Ticks {
    fn of_numbers(low: u64, high: u64) -> Self {
        Self::of(low, high, (1, ""))
    }

    fn of_bytes(low: u64, high: u64) -> Self {
        // Whole numbers of the unit have to be fine enough.
        let rough = (high.saturating_sub(low) / PARTS).max(1);
        let unit = match rough {
            rough if rough >= GIB => (GIB, "GiB"),
            rough if rough >= MIB => (MIB, "MiB"),
            _ => (KIB, "KiB"),
        };
        Self::of(low, high, unit)
    }

    fn of(low: u64, high: u64, unit: (u64, &'static str)) -> Self {
        let mut step = unit.0;
        let mut factors = [2, 5, 10].into_iter().cycle();
        let mut power = unit.0;
        let count = |step: u64| high.div_ceil(step).saturating_sub(low / step);
        while count(step) > PARTS {
            let factor = factors.next().unwrap_or(10);
            step = power.saturating_mul(factor);
            if factor == 10 {
                power = step;
            }
            if step == u64::MAX {
                break;
            }
        }
        Self { first: low / step * step, step, count: count(step).max(1), unit }
    }

    fn all(self) -> impl Iterator<Item = u64> {
        (0..=self.count).map(move |at| self.first.saturating_add(self.step.saturating_mul(at)))
    }

    fn last(self) -> u64 {
        self.first.saturating_add(self.step.saturating_mul(self.count))
    }
}

/// What moves by less than this is still.
const STILL: u64 = 16 << 20;

fn share(value: u64, from: u64, to: u64) -> f64 {
    if to <= from { 0.5 } else { exact(value.saturating_sub(from)) / exact(to - from) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers_that_hold_all_values() {
        for (low, high, labels) in [
            (784 * KIB, 17 * MIB, vec![0, 5, 10, 15, 20]),
            (435 * MIB, 1292 * MIB, vec![400, 600, 800, 1000, 1200, 1400]),
            (3 * GIB, 5 * GIB + 1, vec![3000, 3500, 4000, 4500, 5000, 5500]),
            (100 * GIB, 160 * GIB, vec![100, 120, 140, 160]),
        ] {
            let ticks = Ticks::of_bytes(low, high);
            let found: Vec<u64> = ticks.all().map(|level| level / ticks.unit.0).collect();
            assert!(ticks.first <= low && ticks.last() >= high, "{ticks:?}");
            assert!(found.len() <= 7 && found.len() >= 3, "{found:?}");
            assert!(ticks.all().all(|level| level % ticks.unit.0 == 0));
            if labels[0] != 3000 {
                assert_eq!(found, labels);
            }
        }
        assert_eq!(Ticks::of_numbers(1, 184).all().collect::<Vec<_>>(), [0, 50, 100, 150, 200]);
        assert_eq!(Ticks::of_numbers(7, 7).all().count(), 2);
        let curve = Curve { class: "all", name: "all", points: vec![(1, 784 * KIB), (184, 17 * MIB)] };
        let drawn = svg(&[curve]);
        assert!(drawn.contains(">20 MiB<") && drawn.contains(">150<") && !drawn.contains("784"), "{drawn}");
    }
}
