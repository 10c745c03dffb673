//! A plot as SVG: memory over requests.

use std::fmt::Write as _;

use warden_policies::ByteSize;

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
    /// What it is.
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
    let top = bottom.saturating_add(span);
    let x = |value: u64| LEFT + share(value, first, last) * (WIDTH - LEFT - RIGHT);
    let y = |value: u64| HEIGHT - BOTTOM - share(value, bottom, top) * (HEIGHT - BOTTOM - TOP);
    let mut text = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
    for part in 0..=4_u64 {
        let level = bottom + (top - bottom) / 4 * part;
        let at = y(level);
        let end = WIDTH - RIGHT;
        let _ =
            write!(text, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
        let (beside, under) = (LEFT - 6.0, at + 4.0);
        let _ = write!(text, "<text class=\"y\" x=\"{beside}\" y=\"{under:.1}\">{}</text>", ByteSize(level));
    }
    for value in [first, u64::midpoint(first, last), last] {
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

/// What moves by less than this is still.
const STILL: u64 = 16 << 20;

#[expect(clippy::cast_precision_loss, reason = "a place in a drawing")]
fn share(value: u64, from: u64, to: u64) -> f64 {
    if to <= from { 0.5 } else { value.saturating_sub(from) as f64 / (to - from) as f64 }
}
