//! Describes a plot in words: a sentence, a legend, and the list of events.

use std::fmt::Write as _;

use warden_policies::ByteSize;
use warden_policies::units::truncate_to_u64;

use super::frame::PlotFrame;
use super::mark::visible_marks;
use super::{HorizontalQuantity, LinePlot, PlotLimit, PlotMark, PlotMarkKind, VerticalQuantity, is_drawable};
use crate::html::Html;
use crate::number::group_digits;
use crate::time::{UtcMoment, time_element};

/// Returns the description: `Over requests 1 to 184 it goes from 784.0 KiB to 16.8 MiB, with 17.0 MiB at
/// most. …`
pub(super) fn plot_sentence(plot: &LinePlot, frame: &PlotFrame) -> String {
    let shown_levels = || frame.curves.first().into_iter().flatten().flatten();
    let mut text = match (shown_levels().next(), shown_levels().last()) {
        (Some(first), Some(last)) => {
            let most = shown_levels().map(|level| level.high).fold(f64::MIN, f64::max);
            let span = match plot.horizontal {
                HorizontalQuantity::Requests => {
                    format!(
                        "Over requests {} to {}",
                        place_text(plot.horizontal, first.x),
                        place_text(plot.horizontal, last.x)
                    )
                }
                HorizontalQuantity::Time => {
                    format!(
                        "From {} to {}",
                        place_text(plot.horizontal, first.x),
                        place_text(plot.horizontal, last.x)
                    )
                }
            };
            let value = |value: f64| amount_text(plot.vertical, value);
            format!(
                "{span} it goes from {} to {}, with {} at most.",
                value(first.value),
                value(last.value),
                value(most)
            )
        }
        _ => String::new(),
    };
    for law in plot.laws.iter().filter(|law| !law.name.is_empty()) {
        let _ = write!(text, " {}.", capitalize(&law.name));
    }
    for limit in plot.limits.iter().filter(|limit| is_drawable(limit.at)) {
        let _ = write!(text, " {}.", capitalize(&limit_name(plot, frame, limit)));
    }
    if let Some(coming) = forecast_text(plot) {
        let _ = write!(text, " {}.", capitalize(&coming));
    }
    let (marks, left_out) = visible_marks(&plot.marks, frame.from, frame.to);
    match marks.len() + left_out {
        0 => {}
        1 => text.push_str(" One event in that time."),
        count => {
            let _ = write!(text, " {count} events in that time.");
        }
    }
    text
}

fn capitalize(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + letters.as_str())
}

fn amount_text(up: VerticalQuantity, value: f64) -> String {
    match up {
        VerticalQuantity::Bytes => ByteSize(truncate_to_u64(value)).to_string(),
        VerticalQuantity::Count => group_digits(value, 0),
        VerticalQuantity::Seconds if value < 1.0 => format!("{:.0} ms", value * 1e3),
        VerticalQuantity::Seconds => format!("{value:.1} s"),
        VerticalQuantity::PerSecond(what) => format!("{value:.1} {what} a second"),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "`as` saturates, and Moment takes any number")]
fn to_unix_seconds(unix: f64) -> i64 {
    unix.round() as i64
}

fn place_text(across: HorizontalQuantity, x: f64) -> String {
    match across {
        HorizontalQuantity::Requests => group_digits(x, 0),
        HorizontalQuantity::Time => UtcMoment::from_unix(to_unix_seconds(x)).long_text(),
    }
}

/// Returns the name of a limit, such as `the soft budget, 20.0 GiB`, with a remark if it lies above the plot.
fn limit_name(plot: &LinePlot, frame: &PlotFrame, limit: &PlotLimit) -> String {
    let above = if frame.shows(limit) { "" } else { ", beyond the plot" };
    format!("{}: {}{above}", limit.kind.word(), amount_text(plot.vertical, limit.at))
}

fn forecast_text(plot: &LinePlot) -> Option<String> {
    let coming = plot.forecast.filter(|coming| is_drawable(coming.limit) && is_drawable(coming.from.0))?;
    let when = |at: f64| {
        // Treat more than a hundred years, or a thousand million requests, as never.
        let far = if plot.horizontal == HorizontalQuantity::Time { coming.from.0 + 3.2e9 } else { 1e9 };
        if !is_drawable(at) || at >= far { "never".to_owned() } else { place_text(plot.horizontal, at) }
    };
    let [early, likely, late] = coming.reached.map(when);
    let (at, limit) = (
        if plot.horizontal == HorizontalQuantity::Time { "" } else { "request " },
        amount_text(plot.vertical, coming.limit),
    );
    Some(format!("forecast: {limit} at {at}{likely} ({early} to {late})"))
}

/// Returns the text shown when the mouse pointer is on a mark.
pub(super) fn mark_text(across: HorizontalQuantity, mark: &PlotMark) -> String {
    let at = match across {
        HorizontalQuantity::Requests => format!("request {}", place_text(across, mark.x)),
        HorizontalQuantity::Time => place_text(across, mark.x),
    };
    match mark.kind {
        PlotMarkKind::Other => format!("{at}: {}", mark.why),
        kind => format!("{}, {at}: {}", kind.word(), mark.why),
    }
}

pub(super) fn plot_figure(plot: &LinePlot, caption: &Html) -> String {
    let mut html = Html::new();
    html.within("figure", &[], |figure| {
        if !caption.as_str().is_empty() {
            figure.within("figcaption", &[], |words| {
                words.raw(caption.as_str());
            });
        }
        match PlotFrame::from_plot(plot) {
            Some(frame) => {
                figure.raw(&super::draw::draw_svg(plot, &frame));
                write_legend(plot, &frame, figure);
                write_events(plot, &frame, figure);
            }
            None => {
                figure.element("p", &[("class", &"quiet")], "There are no readings in this time.");
            }
        }
    });
    html.into_string()
}

/// Explains each line and area. A plot with a single one needs no legend.
fn write_legend(plot: &LinePlot, frame: &PlotFrame, html: &mut Html) {
    let line = |class: String| ("M1 6H25", class);
    let area = |class: &str| ("M1 1H25V11H1z", class.to_owned());
    let mut rows: Vec<((&str, String), String)> = Vec::new();
    for curve in plot.curves.iter().filter(|curve| !curve.stretches.is_empty()) {
        rows.push((line(format!("curve {}", curve.kind.class())), curve.name.clone()));
    }
    let named = plot.laws.iter().filter(|law| !law.name.is_empty());
    rows.extend(named.map(|law| (line("law".to_owned()), law.name.clone())));
    rows.extend(plot.areas.iter().map(|one| (area(one.kind.class()), one.name.clone())));
    let limits = plot.limits.iter().filter(|limit| is_drawable(limit.at));
    rows.extend(
        limits.map(|limit| (line(format!("limit {}", limit.kind.class())), limit_name(plot, frame, limit))),
    );
    rows.extend(forecast_text(plot).map(|words| (line("coming".to_owned()), words)));
    // List each pair of kind and name only once.
    let mut seen = std::collections::BTreeSet::new();
    rows.retain(|((_, class), name)| seen.insert((class.clone(), name.clone())));
    html.within("ul", &[("class", &"legend")], |list| {
        for ((d, class), name) in &rows {
            list.within("li", &[], |item| {
                item.within(
                    "svg",
                    &[("class", &"plot-key"), ("viewBox", &"0 0 26 12"), ("aria-hidden", &"true")],
                    |svg| {
                        svg.shape("path", &[("class", class), ("d", d)]);
                    },
                );
                item.text(name);
            });
        }
    });
}

fn event_count(count: usize) -> String {
    if count == 1 { "1 event".to_owned() } else { format!("{count} events") }
}

/// Lists the events in words, so that readers need not point at each mark.
fn write_events(plot: &LinePlot, frame: &PlotFrame, html: &mut Html) {
    let (marks, left_out) = visible_marks(&plot.marks, frame.from, frame.to);
    if marks.is_empty() {
        return;
    }
    html.within("details", &[("class", &"marks")], |details| {
        details.element("summary", &[], event_count(marks.len() + left_out));
        details.within("ul", &[], |list| {
            if left_out > 0 {
                list.element(
                    "li",
                    &[("class", &"quiet")],
                    format_args!("{left_out} earlier ones are not shown"),
                );
            }
            for mark in marks {
                list.within("li", &[], |item| {
                    item.within(
                        "svg",
                        &[("class", &"shape"), ("viewBox", &"-6 -6 12 12"), ("aria-hidden", &"true")],
                        |svg| {
                            svg.shape("path", &[("d", &mark.kind.path()), ("fill", &"currentColor")]);
                        },
                    );
                    item.text(" ");
                    match plot.horizontal {
                        HorizontalQuantity::Time => item.raw(&time_element(to_unix_seconds(mark.x))),
                        HorizontalQuantity::Requests => {
                            item.text(format_args!("request {}", place_text(plot.horizontal, mark.x)))
                        }
                    };
                    match mark.kind {
                        PlotMarkKind::Other => item.text(format_args!(": {}", mark.why)),
                        kind => item.text(format_args!(", {}: {}", kind.word(), mark.why)),
                    };
                });
            }
        });
    });
}
