//! Describes a plot in words: a sentence, a legend, and the list of events.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use maud::{Markup, html};
use warden_policies::ByteSize;
use warden_policies::units::truncate_to_u64;

use super::draw::draw_svg;
use super::frame::PlotFrame;
use super::mark::visible_marks;
use super::{LinePlot, PlotLimit, PlotMark, PlotMarkKind, is_drawable};
use crate::markup::time::{UtcMoment, time_element};
use crate::markup::words::capitalize;

/// Returns the description: `From 26 Nov 2026 14:03:20 UTC to … it goes from 784.0 KiB to 16.8 MiB, with 17.0 MiB at
/// most. …`
pub(super) fn plot_sentence(plot: &LinePlot, frame: &PlotFrame) -> String {
    let shown_levels = || frame.curves.first().into_iter().flatten().flatten();
    let mut text = String::new();
    if let (Some(first), Some(last)) = (shown_levels().next(), shown_levels().last()) {
        let most = shown_levels().map(|level| level.high).fold(f64::MIN, f64::max);
        let _infallible = write!(
            text,
            "From {} to {} it goes from {} to {}, with {} at most.",
            place_text(first.x),
            place_text(last.x),
            byte_text(first.value),
            byte_text(last.value),
            byte_text(most)
        );
    }
    let laws = plot.laws.iter().map(|law| law.name.clone()).filter(|name| !name.is_empty());
    let limits = plot.limits.iter().filter(|limit| is_drawable(limit.at));
    for words in laws.chain(limits.map(|limit| limit_name(frame, limit))).chain(forecast_text(plot)) {
        let _infallible = write!(text, " {}.", capitalize(&words));
    }
    let (marks, left_out) = visible_marks(&plot.marks, frame.from, frame.to);
    match marks.len() + left_out {
        0 => {}
        1 => text.push_str(" One event in that time."),
        count => {
            let _infallible = write!(text, " {count} events in that time.");
        }
    }
    text
}

fn byte_text(value: f64) -> String {
    ByteSize(truncate_to_u64(value)).to_string()
}

#[expect(clippy::cast_possible_truncation, reason = "`as` saturates, and `UtcMoment` takes any number")]
fn to_unix_seconds(unix: f64) -> i64 {
    unix.round() as i64
}

fn place_text(x: f64) -> String {
    UtcMoment::from_unix(to_unix_seconds(x)).long_text()
}

/// Returns the name of a limit, such as `the soft budget, 20.0 GiB`, with a remark if it lies above the plot.
fn limit_name(frame: &PlotFrame, limit: &PlotLimit) -> String {
    let above = if frame.shows(limit) { "" } else { ", beyond the plot" };
    format!("{}: {}{above}", limit.kind.word(), byte_text(limit.at))
}

fn forecast_text(plot: &LinePlot) -> Option<String> {
    let coming = plot.forecast.filter(|coming| is_drawable(coming.limit) && is_drawable(coming.from.0))?;
    // More than a hundred years count as never.
    let never = coming.from.0 + 3.2e9;
    let [early, likely, late] = coming.reached.map(|at| {
        let is_reached = is_drawable(at) && at < never;
        if is_reached { place_text(at) } else { "never".to_owned() }
    });
    let limit = byte_text(coming.limit);
    Some(format!("forecast: {limit} at {likely} ({early} to {late})"))
}

/// Returns the text shown when the mouse pointer is on a mark.
pub(super) fn mark_text(mark: &PlotMark) -> String {
    let at = place_text(mark.x);
    match mark.kind {
        PlotMarkKind::Other => format!("{at}: {}", mark.why),
        kind => format!("{}, {at}: {}", kind.word(), mark.why),
    }
}

pub(super) fn plot_figure(plot: &LinePlot, caption: Option<Markup>) -> Markup {
    html! {
        figure {
            @if let Some(caption) = caption {
                figcaption { (caption) }
            }
            @if let Some(frame) = PlotFrame::from_plot(plot) {
                (draw_svg(plot, &frame))
                (plot_legend(plot, &frame))
                (event_list(plot, &frame))
            } @else {
                p class="quiet" { "There are no readings in this time." }
            }
        }
    }
}

fn plot_legend(plot: &LinePlot, frame: &PlotFrame) -> Markup {
    const LINE: &str = "M1 6H25";
    const AREA: &str = "M1 1H25V11H1z";
    let mut rows: Vec<(&str, String, String)> = Vec::new();
    for curve in plot.curves.iter().filter(|curve| !curve.stretches.is_empty()) {
        rows.push((LINE, "curve read".to_owned(), curve.name.clone()));
    }
    for law in plot.laws.iter().filter(|law| !law.name.is_empty()) {
        rows.push((LINE, "law".to_owned(), law.name.clone()));
    }
    for area in &plot.areas {
        rows.push((AREA, "declared".to_owned(), area.name.clone()));
    }
    for limit in plot.limits.iter().filter(|limit| is_drawable(limit.at)) {
        rows.push((LINE, format!("limit {}", limit.kind.class()), limit_name(frame, limit)));
    }
    rows.extend(forecast_text(plot).map(|words| (LINE, "coming".to_owned(), words)));
    // List each pair of kind and name only once.
    let mut seen = BTreeSet::new();
    rows.retain(|(_, class, name)| seen.insert((class.clone(), name.clone())));
    html! {
        ul class="legend" {
            @for (path, class, name) in rows {
                li {
                    svg class="plot-key" viewBox="0 0 26 12" aria-hidden="true" {
                        path class=(class) d=(path) {}
                    }
                    (name)
                }
            }
        }
    }
}

fn event_count(count: usize) -> String {
    if count == 1 { "1 event".to_owned() } else { format!("{count} events") }
}

/// Lists the events in words, so that readers need not point at each mark.
fn event_list(plot: &LinePlot, frame: &PlotFrame) -> Markup {
    let (marks, left_out) = visible_marks(&plot.marks, frame.from, frame.to);
    html! {
        @if !marks.is_empty() {
            details class="marks" {
                summary { (event_count(marks.len() + left_out)) }
                ul {
                    @if left_out > 0 {
                        li class="quiet" { (left_out) " earlier ones are not shown" }
                    }
                    @for mark in marks {
                        li {
                            svg class="shape" viewBox="-6 -6 12 12" aria-hidden="true" {
                                path d=(mark.kind.path()) fill="currentColor" {}
                            }
                            " "
                            (time_element(to_unix_seconds(mark.x)))
                            @if mark.kind != PlotMarkKind::Other {
                                ", " (mark.kind.word())
                            }
                            ": " (mark.why)
                        }
                    }
                }
            }
        }
    }
}
