//! Draws the plot, from back to front: areas, grid, limits, bands, lines, forecast, marks.

use std::fmt::Write as _;

use maud::{Markup, html};

use super::frame::{BOTTOM, HEIGHT, LEFT, PlotFrame, RIGHT, TOP, WIDTH};
use super::mark::{PlotMark, visible_marks};
use super::{LinePlot, PlotForecast, PlotLevel, PlotLimit, PlotLimitKind, describe, is_drawable};
use crate::markup::number::{AxisValue, Px};

impl PlotLimitKind {
    pub(super) const fn class(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Hard => "hard",
        }
    }

    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Soft => "soft budget",
            Self::Hard => "hard budget",
        }
    }
}

/// Least height at which a range is visible, in units of the drawing.
const MIN_VISIBLE: f64 = 0.7;

pub(super) fn draw_svg(plot: &LinePlot, frame: &PlotFrame) -> Markup {
    let right = WIDTH - RIGHT;
    let bottom = HEIGHT - BOTTOM;
    let width = right - LEFT;
    let height = bottom - TOP;
    html! {
        svg class="plot" viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img"
            data-left=(LEFT) data-right=(right) data-top=(TOP) data-bottom=(bottom)
            data-x-from=(AxisValue(frame.from)) data-x-to=(AxisValue(frame.to))
            data-y-from=(AxisValue(frame.up.first())) data-y-to=(AxisValue(frame.up.last()))
        {
            title { (plot.title) }
            desc { (describe::plot_sentence(plot, frame)) }
            (draw_axes(frame))
            // Clip everything outside of the axes.
            svg x=(LEFT) y=(TOP) width=(width) height=(height)
                viewBox={ (LEFT) " " (TOP) " " (width) " " (height) } overflow="hidden"
            {
                (draw_layers(plot, frame))
            }
            @for limit in plot.limits.iter().filter(|limit| frame.shows(limit)) {
                (draw_limit_name(frame, limit))
            }
            @for mark in visible_marks(&plot.marks, frame.from, frame.to).0 {
                (draw_mark(frame, mark))
            }
        }
    }
}

fn draw_axes(frame: &PlotFrame) -> Markup {
    let left = Px(LEFT - 8.0);
    let bottom = Px(HEIGHT - 8.0);
    let step = AxisValue(frame.across.step);
    html! {
        @for tick in &frame.up.all {
            @let y = frame.y(tick.at);
            line class="grid" x1=(Px(LEFT)) x2=(Px(WIDTH - RIGHT)) y1=(Px(y)) y2=(Px(y)) {}
            text class="at-y" x=(left) y=(Px(y + 4.0)) { (tick.label) }
        }
        @for tick in &frame.across.all {
            @let time = AxisValue(tick.at);
            text class="at-x" x=(Px(frame.x(tick.at))) y=(bottom) data-time=(time) data-step=(step) {
                (tick.label)
            }
        }
        text class="at-y unit" x=(left) y=(bottom) { "UTC" }
    }
}

fn draw_layers(plot: &LinePlot, frame: &PlotFrame) -> Markup {
    html! {
        @for stretch in plot.areas.iter().flat_map(|area| &area.stretches) {
            (draw_band(frame, stretch, "declared"))
        }
        @for limit in plot.limits.iter().filter(|limit| frame.shows(limit)) {
            @let (from, to) = limit.range.unwrap_or((frame.from, frame.to));
            @let from = Px(frame.x(from.clamp(frame.from, frame.to)));
            @let to = Px(frame.x(to.clamp(frame.from, frame.to)));
            @let y = Px(frame.y(limit.at));
            line class={ "limit " (limit.kind.class()) } x1=(from) x2=(to) y1=(y) y2=(y) {}
        }
        // Draw the law wide and below the readings, which cover it where it fits.
        @for law in &plot.laws {
            (draw_band(frame, &law.levels, "band"))
            (draw_path("law", &line_path(frame, &law.levels), &law.name))
        }
        @for (curve, stretches) in plot.curves.iter().zip(&frame.curves) {
            @for stretch in stretches {
                (draw_band(frame, stretch, "range read"))
            }
            @let d = stretches.iter().map(|stretch| line_path(frame, stretch)).collect::<String>();
            (draw_path("curve read", &d, &curve.name))
        }
        @if let Some(coming) = &plot.forecast {
            (draw_forecast(frame, coming))
        }
    }
}

fn draw_path(class: &str, d: &str, name: &str) -> Markup {
    html! {
        @if !d.is_empty() {
            path class=(class) d=(d) {
                title { (name) }
            }
        }
    }
}

fn line_path(frame: &PlotFrame, levels: &[PlotLevel]) -> String {
    let mut d = String::new();
    let places = levels.iter().filter(|level| level.is_known());
    for (index, level) in places.enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        let _infallible = write!(d, "{letter}{} {}", Px(frame.x(level.x)), Px(frame.y(level.value)));
    }
    // Draw a single reading as a dot: a line of no length with round ends.
    if levels.len() == 1 && !d.is_empty() {
        d.push_str("h0");
    }
    d
}

/// Fills the area between the low and high ends, if it is high enough to be visible.
fn draw_band(frame: &PlotFrame, levels: &[PlotLevel], class: &str) -> Markup {
    let levels: Vec<&PlotLevel> = levels.iter().filter(|level| level.is_known()).collect();
    let is_visible = levels.iter().any(|level| frame.y(level.low) - frame.y(level.high) >= MIN_VISIBLE);
    if levels.len() < 2 || !is_visible {
        return Markup::default();
    }
    let mut d = String::new();
    let highs = levels.iter().map(|level| (level.x, level.high));
    let lows = levels.iter().rev().map(|level| (level.x, level.low));
    for (index, (x, y)) in highs.chain(lows).enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        let _infallible = write!(d, "{letter}{} {}", Px(frame.x(x)), Px(frame.y(y)));
    }
    d.push('z');
    html! {
        path class=(class) d=(d) {}
    }
}

/// Draws a dashed line to the limit, at most up to the end of the plot. The area around the line reaches from
/// the earliest to the latest time at which the limit may be reached.
fn draw_forecast(frame: &PlotFrame, coming: &PlotForecast) -> Markup {
    let (x, y) = coming.from;
    let known = [x, y, coming.limit].into_iter().all(is_drawable);
    if !known || x >= frame.to {
        return Markup::default();
    }
    // The straight line ends where it leaves the plot or reaches the limit.
    let [early, likely, late] = coming.reached.map(|at| {
        if at.is_nan() || at <= x {
            return (x, coming.limit);
        }
        let to = at.min(frame.to);
        let share = if at.is_finite() { (to - x) / (at - x) } else { 0.0 };
        (to, y + (coming.limit - y) * share)
    });
    let place = |(x, y): (f64, f64)| format!("{} {}", Px(frame.x(x)), Px(frame.y(y)));
    let start = place((x, y));
    let corner = if early.0 < late.0 && late.0 >= frame.to {
        format!("L{}", place((late.0, coming.limit)))
    } else {
        String::new()
    };
    html! {
        path class="coming-range" d={ "M" (start) "L" (place(early)) (corner) "L" (place(late)) "z" } {}
        (draw_path("coming", &format!("M{start}L{}", place(likely)), "forecast"))
    }
}

/// Labels a limit at its left end, where a growing curve is lower. The label of a soft budget is below its
/// line, because the hard budget may be right above.
fn draw_limit_name(frame: &PlotFrame, limit: &PlotLimit) -> Markup {
    let from = limit.range.map_or(frame.from, |(from, _)| from.clamp(frame.from, frame.to));
    let (shift, baseline) = match limit.kind {
        PlotLimitKind::Soft => (4.0, "hanging"),
        PlotLimitKind::Hard => (-4.0, "auto"),
    };
    let x = Px(frame.x(from) + 8.0);
    let y = Px(frame.y(limit.at) + shift);
    html! {
        text class={ "limit-name " (limit.kind.class()) } x=(x) y=(y) dominant-baseline=(baseline) {
            (limit.kind.word())
        }
    }
}

fn draw_mark(frame: &PlotFrame, mark: &PlotMark) -> Markup {
    let x = Px(frame.x(mark.x));
    html! {
        g class={ "mark " (mark.kind.word()) } {
            title { (describe::mark_text(mark)) }
            line x1=(x) x2=(x) y1=(Px(TOP - 4.0)) y2=(Px(HEIGHT - BOTTOM)) {}
            // Group the shape, so that the stylesheet can scale it in place.
            g transform={ "translate(" (x) " " (Px(TOP - 12.0)) ")" } {
                path d=(mark.kind.path()) {}
            }
        }
    }
}
