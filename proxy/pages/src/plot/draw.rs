//! Draws the plot, from back to front: areas, grid, limits, bands, lines, forecast, marks.

use std::fmt::{Display, Write as _};

use super::frame::{BOTTOM, HEIGHT, LEFT, PlotFrame, RIGHT, TOP, WIDTH};
use super::mark::{PlotMark, visible_marks};
use super::{
    AreaKind, CurveKind, HorizontalQuantity, LinePlot, PlotForecast, PlotLevel, PlotLimit, PlotLimitKind,
    describe, is_drawable,
};
use crate::html::{Html, HtmlAttributes};
use crate::number::{AxisValue, Px};

impl CurveKind {
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Readings => "read",
            Self::WithoutKept => "rest",
            Self::Other => "more",
        }
    }
}

impl AreaKind {
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Declared => "declared",
            Self::Kept => "kept",
            Self::Weights => "area-weights",
        }
    }
}

impl PlotLimitKind {
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Hard => "hard",
            Self::Total => "most",
        }
    }

    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Soft => "soft budget",
            Self::Hard => "hard budget",
            Self::Total => "all there is",
        }
    }
}

/// Least height at which a range is visible, in units of the drawing.
const MIN_VISIBLE: f64 = 0.7;

pub(super) fn draw_svg(plot: &LinePlot, frame: &PlotFrame) -> String {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let across = if plot.horizontal == HorizontalQuantity::Time { "time" } else { "requests" };
    let mut html = Html::new();
    html.within(
        "svg",
        &[
            ("class", &"plot"),
            ("viewBox", &format_args!("0 0 {WIDTH} {HEIGHT}")),
            ("role", &"img"),
            ("data-across", &across),
            ("data-left", &LEFT),
            ("data-right", &right),
            ("data-top", &TOP),
            ("data-bottom", &bottom),
            ("data-x-from", &AxisValue(frame.from)),
            ("data-x-to", &AxisValue(frame.to)),
            ("data-y-from", &AxisValue(frame.up.first())),
            ("data-y-to", &AxisValue(frame.up.last())),
        ],
        |svg| {
            svg.element("title", &[], &plot.title);
            svg.element("desc", &[], describe::plot_sentence(plot, frame));
            draw_axes(plot, frame, svg);
            // Clip everything outside of the axes.
            let (width, height) = (right - LEFT, bottom - TOP);
            let view = format!("{LEFT} {TOP} {width} {height}");
            svg.within(
                "svg",
                &[
                    ("x", &LEFT),
                    ("y", &TOP),
                    ("width", &width),
                    ("height", &height),
                    ("viewBox", &view),
                    ("overflow", &"hidden"),
                ],
                |inside| draw_layers(plot, frame, inside),
            );
            for limit in plot.limits.iter().filter(|limit| frame.shows(limit)) {
                draw_limit_name(frame, limit, svg);
            }
            for mark in visible_marks(&plot.marks, frame.from, frame.to).0 {
                draw_mark(plot, frame, mark, svg);
            }
        },
    );
    html.into_string()
}

fn draw_axes(plot: &LinePlot, frame: &PlotFrame, svg: &mut Html) {
    for tick in &frame.up.all {
        let y = Px(frame.y(tick.at));
        let end = Px(WIDTH - RIGHT);
        svg.shape("line", &[("class", &"grid"), ("x1", &Px(LEFT)), ("x2", &end), ("y1", &y), ("y2", &y)]);
        let (x, y) = (Px(LEFT - 8.0), Px(frame.y(tick.at) + 4.0));
        svg.element("text", &[("class", &"at-y"), ("x", &x), ("y", &y)], &tick.label);
    }
    for tick in &frame.across.all {
        let (x, y) = (Px(frame.x(tick.at)), Px(HEIGHT - 8.0));
        let (time, step) = (AxisValue(tick.at), AxisValue(frame.across.step));
        let place: [(&'static str, &dyn Display); 3] = [("class", &"at-x"), ("x", &x), ("y", &y)];
        let moment: [(&'static str, &dyn Display); 2] = [("data-time", &time), ("data-step", &step)];
        let moment = if plot.horizontal == HorizontalQuantity::Time { &moment[..] } else { &[] };
        svg.element("text", &[&place, moment].concat(), &tick.label);
    }
    let (x, y) = (Px(LEFT - 8.0), Px(HEIGHT - 8.0));
    let name = if plot.horizontal == HorizontalQuantity::Time { "UTC" } else { "requests" };
    svg.element("text", &[("class", &"at-y unit"), ("x", &x), ("y", &y)], name);
}

fn draw_layers(plot: &LinePlot, frame: &PlotFrame, svg: &mut Html) {
    for area in &plot.areas {
        for stretch in &area.stretches {
            draw_band(frame, stretch, area.kind.class(), svg);
        }
    }
    for limit in plot.limits.iter().filter(|limit| frame.shows(limit)) {
        let (from, to) = limit.range.unwrap_or((frame.from, frame.to));
        let y = Px(frame.y(limit.at));
        let class = format_args!("limit {}", limit.kind.class());
        let (from, to) = (from.clamp(frame.from, frame.to), to.clamp(frame.from, frame.to));
        let (from, to) = (Px(frame.x(from)), Px(frame.x(to)));
        svg.shape("line", &[("class", &class), ("x1", &from), ("x2", &to), ("y1", &y), ("y2", &y)]);
    }
    // Draw the law wide and below the readings, which cover it where it fits.
    for law in &plot.laws {
        draw_band(frame, &law.levels, "band", svg);
        draw_path("law", &line_path(frame, &law.levels), &law.name, svg);
    }
    for (curve, stretches) in plot.curves.iter().zip(&frame.curves) {
        let class = curve.kind.class();
        for stretch in stretches {
            draw_band(frame, stretch, &format!("range {class}"), svg);
        }
        let d: String = stretches.iter().map(|stretch| line_path(frame, stretch)).collect();
        draw_path(&format!("curve {class}"), &d, &curve.name, svg);
    }
    if let Some(coming) = &plot.forecast {
        draw_forecast(frame, coming, svg);
    }
}

fn draw_path(class: &str, d: &str, name: &str, svg: &mut Html) {
    if !d.is_empty() {
        svg.within("path", &[("class", &class), ("d", &d)], |path| {
            path.element("title", &[], name);
        });
    }
}

fn line_path(frame: &PlotFrame, levels: &[PlotLevel]) -> String {
    let mut d = String::new();
    let places = levels.iter().filter(|level| level.is_known());
    for (index, level) in places.enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        let _ = write!(d, "{letter}{} {}", Px(frame.x(level.x)), Px(frame.y(level.value)));
    }
    // Draw a single reading as a dot: a line of no length with round ends.
    if levels.len() == 1 && !d.is_empty() {
        d.push_str("h0");
    }
    d
}

/// Fills the area between the low and high ends, if it is high enough to be visible.
fn draw_band(frame: &PlotFrame, levels: &[PlotLevel], class: &str, svg: &mut Html) {
    let levels: Vec<&PlotLevel> = levels.iter().filter(|level| level.is_known()).collect();
    if levels.len() < 2 || !levels.iter().any(|level| frame.y(level.low) - frame.y(level.high) >= MIN_VISIBLE)
    {
        return;
    }
    let mut d = String::new();
    let highs = levels.iter().map(|level| (level.x, level.high));
    for (index, (x, y)) in highs.chain(levels.iter().rev().map(|level| (level.x, level.low))).enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        let _ = write!(d, "{letter}{} {}", Px(frame.x(x)), Px(frame.y(y)));
    }
    d.push('z');
    svg.shape("path", &[("class", &class), ("d", &d)]);
}

/// Draws a dashed line to the limit, between the earliest and the latest time at which it may be reached,
/// up to the end of the plot.
fn draw_forecast(frame: &PlotFrame, coming: &PlotForecast, svg: &mut Html) {
    let (x, y) = coming.from;
    let known = [x, y, coming.limit].into_iter().all(is_drawable);
    if !known || x >= frame.to {
        return;
    }
    // The straight line ends where it leaves the plot or reaches the limit.
    let end = |at: f64| {
        if at.is_nan() || at <= x {
            return (x, coming.limit);
        }
        let to = at.min(frame.to);
        let share = if at.is_finite() { (to - x) / (at - x) } else { 0.0 };
        (to, y + (coming.limit - y) * share)
    };
    let [early, likely, late] = coming.reached.map(end);
    let place = |(x, y): (f64, f64)| format!("{} {}", Px(frame.x(x)), Px(frame.y(y)));
    let (start, corner) = (place((x, y)), place((late.0, coming.limit)));
    let corner = if early.0 < late.0 && late.0 >= frame.to { format!("L{corner}") } else { String::new() };
    let wedge = format!("M{start}L{}{corner}L{}z", place(early), place(late));
    svg.shape("path", &[("class", &"coming-range"), ("d", &wedge)]);
    draw_path("coming", &format!("M{start}L{}", place(likely)), "forecast", svg);
}

/// Labels a limit at its left end, where a growing curve is lower. The label is above the line, but for a
/// soft budget below it, because the hard budget may be right above.
fn draw_limit_name(frame: &PlotFrame, limit: &PlotLimit, svg: &mut Html) {
    let from = limit.range.map_or(frame.from, |(from, _)| from.clamp(frame.from, frame.to));
    let (shift, hang) = if limit.kind == PlotLimitKind::Soft { (4.0, "hanging") } else { (-4.0, "auto") };
    let (x, y) = (Px(frame.x(from) + 8.0), Px(frame.y(limit.at) + shift));
    let class = format_args!("limit-name {}", limit.kind.class());
    let place: HtmlAttributes<'_> = &[("class", &class), ("x", &x), ("y", &y), ("dominant-baseline", &hang)];
    svg.element("text", place, limit.kind.word());
}

fn draw_mark(plot: &LinePlot, frame: &PlotFrame, mark: &PlotMark, svg: &mut Html) {
    let x = frame.x(mark.x);
    let (top, bottom) = (Px(TOP - 4.0), Px(HEIGHT - BOTTOM));
    let place = format_args!("translate({} {})", Px(x), Px(TOP - 12.0));
    svg.within("g", &[("class", &format_args!("mark {}", mark.kind.word()))], |group| {
        group.element("title", &[], describe::mark_text(plot.horizontal, mark));
        let x = Px(x);
        group.shape("line", &[("x1", &x), ("x2", &x), ("y1", &top), ("y2", &bottom)]);
        // Put the shape into a group, so that the stylesheet can scale it in place.
        group.within("g", &[("transform", &place)], |shape| {
            shape.shape("path", &[("d", &mark.kind.path())]);
        });
    });
}
