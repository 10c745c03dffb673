//! Converts the recorded series of one kind of memory into a plot. Pure.

use warden_admin::series::answer::{MemoryData, SeriesData, SeriesPoint, SeriesStatus};
use warden_admin::series::marks;
use warden_policies::ByteSize;
use warden_policies::units::as_f64;

use crate::markup::plot::{
    LinePlot, PlotArea, PlotCurve, PlotForecast, PlotLaw, PlotLevel, PlotLimit, PlotLimitKind, PlotMark,
    PlotMarkKind,
};

/// Least length of a gap in points; a gap is also longer than [`GAP_SECONDS`].
const GAP_POINTS: u64 = 3;
const GAP_SECONDS: u64 = 60;
/// Largest extension of a plot for forecasts, as a share of its range.
const MAX_FORECAST_SHARE: f64 = 0.3;
/// Most stretches drawn of one budget, because each stretch has a line in the legend.
const MAX_LIMITS: usize = 3;
/// Budgets are recorded in whole KiB.
const KIB: u64 = 1024;

pub(crate) fn series_plot(data: &MemoryData, series: &SeriesData, what: &str) -> LinePlot {
    let top = plot_top(series);
    let declared = series_levels(data, series, |x, point| {
        let (from, to) = point.lines.kept?;
        Some(PlotLevel::between(x, as_f64(from.min(top)), as_f64(to.min(top))))
    });
    let mut areas = Vec::new();
    if !declared.is_empty() {
        areas.push(PlotArea { name: declared_name(series, top), stretches: declared });
    }
    let mut limits = constant_limits(series, PlotLimitKind::Soft, |point| point.lines.soft);
    limits.extend(constant_limits(series, PlotLimitKind::Hard, |point| point.lines.hard));
    let own_marks = data.marks.iter().filter(|mark| mark.replica.is_none_or(|own| own == series.replica));
    LinePlot {
        title: format!("{what} of {}", data.model),
        span: Some(plot_range(data)),
        curves: vec![PlotCurve {
            name: reading_description(series),
            stretches: series_levels(data, series, |x, point| {
                Some(PlotLevel {
                    x,
                    low: as_f64(point.min),
                    value: as_f64(point.mean),
                    high: as_f64(point.max),
                })
            }),
        }],
        laws: detector_lines(data, series),
        limits,
        areas,
        forecast: next_limit(series, data),
        marks: own_marks.map(plot_mark).collect(),
    }
}

/// Applies `level` to each point. Splits the levels at gaps and where `level` returns `None`. A point is
/// placed at the middle of its time span, but not in the future.
fn series_levels(
    data: &MemoryData,
    series: &SeriesData,
    level: impl Fn(f64, &SeriesPoint) -> Option<PlotLevel>,
) -> Vec<Vec<PlotLevel>> {
    let place = |point: &SeriesPoint| {
        let middle = point.at.saturating_add(series.seconds / 2);
        as_f64(middle.min(data.now.max(point.at)))
    };
    let mut all = Vec::new();
    for stretch in split_stretches(series) {
        let mut levels = Vec::new();
        for point in stretch {
            match level(place(point), point) {
                Some(level) => levels.push(level),
                None => all.push(std::mem::take(&mut levels)),
            }
        }
        all.push(levels);
    }
    all.retain(|levels| !levels.is_empty());
    all
}

/// Returns the detector's lines, also those of former processes; the legend names only the last line.
fn detector_lines(data: &MemoryData, series: &SeriesData) -> Vec<PlotLaw> {
    let lines = series_levels(data, series, |x, point| {
        let law = point.lines.law?;
        Some(PlotLevel { x, low: as_f64(law.low), value: as_f64(law.level), high: as_f64(law.high) })
    });
    let mut laws: Vec<PlotLaw> =
        lines.into_iter().map(|levels| PlotLaw { name: String::new(), levels }).collect();
    if let Some(last) = laws.last_mut() {
        last.name = law_name(series, data);
    }
    laws
}

/// Returns the common time range of all plots of a page, so that a moment has the same position in each.
fn plot_range(data: &MemoryData) -> (f64, f64) {
    let from = as_f64(data.from);
    let to = as_f64(data.to);
    let far =
        data.series.iter().filter_map(|series| next_limit(series, data)).map(|coming| coming.reached[1]);
    let ahead = far.map(|at| (at - to) * 1.05).fold(0.0, f64::max);
    (from, to + ahead.min((to - from) * MAX_FORECAST_SHARE))
}

/// Declared caches are drawn up to this value: gigabytes of cache must not flatten a line of megabytes.
fn plot_top(series: &SeriesData) -> u64 {
    let most = series.points.iter().map(|point| point.max).max().unwrap_or(0);
    let least = series.points.iter().map(|point| point.min).min().unwrap_or(0);
    most.saturating_add((most - least).max(most / 4))
}

fn declared_name(series: &SeriesData, top: u64) -> String {
    let most = series.points.iter().filter_map(|point| point.lines.kept).map(|(_, to)| to).max().unwrap_or(0);
    let beyond = if most > top { ", beyond the plot" } else { "" };
    format!("declared caches, up to {}{beyond}", ByteSize(most))
}

fn reading_description(series: &SeriesData) -> String {
    let each = std::time::Duration::from_secs(series.seconds);
    format!("{} mean, min and max", warden_policies::units::format_span(each))
}

fn law_name(series: &SeriesData, data: &MemoryData) -> String {
    let slope = current_verdict(series, data).and_then(|present| present.slope.as_ref());
    slope.map_or_else(|| "the detector's line".to_owned(), |slope| format!("the law: {slope}"))
}

/// Splits points into stretches, each of one process and without a gap.
fn split_stretches(series: &SeriesData) -> Vec<&[SeriesPoint]> {
    let gap = (series.seconds * GAP_POINTS).max(GAP_SECONDS);
    let together = |a: &SeriesPoint, b: &SeriesPoint| {
        b.at.saturating_sub(a.at) <= gap && a.lines.generation == b.lines.generation
    };
    series.points.chunk_by(together).collect()
}

fn constant_limits(
    series: &SeriesData,
    kind: PlotLimitKind,
    of: fn(&SeriesPoint) -> Option<u64>,
) -> Vec<PlotLimit> {
    let same =
        |a: &SeriesPoint, b: &SeriesPoint| of(a).map(|limit| limit / KIB) == of(b).map(|limit| limit / KIB);
    let held: Vec<&[SeriesPoint]> = series.points.chunk_by(same).collect();
    let end = held.len();
    let one = |(stretch, number): (&&[SeriesPoint], usize)| {
        let first = stretch.first()?;
        let last = stretch.last()?;
        let at = as_f64(of(last)?);
        // A budget that never changed spans the whole plot.
        let to = if number == end { f64::MAX } else { as_f64(last.at.saturating_add(series.seconds)) };
        let from = if number == 1 { f64::MIN } else { as_f64(first.at) };
        let held = (number > 1 || number < end).then_some((from, to));
        Some(PlotLimit { kind, at, range: held })
    };
    let mut all: Vec<PlotLimit> = held.iter().zip(1..).filter_map(one).collect();
    all.drain(..all.len().saturating_sub(MAX_LIMITS));
    all
}

/// Returns the verdict on the running process; `None` for a plot of the past, which may show another process.
fn current_verdict<'a>(series: &'a SeriesData, data: &MemoryData) -> Option<&'a SeriesStatus> {
    if data.to.saturating_add(2 * series.seconds) >= data.now { series.present.as_ref() } else { None }
}

fn next_limit(series: &SeriesData, data: &MemoryData) -> Option<PlotForecast> {
    let present = current_verdict(series, data)?;
    let first = present.forecasts.iter().filter(|one| one.at.is_some()).min_by_key(|one| one.at)?;
    let at = |at: Option<u64>| at.map_or(f64::INFINITY, as_f64);
    Some(PlotForecast {
        from: (as_f64(data.now), as_f64(present.bytes)),
        limit: as_f64(first.limit),
        reached: [at(first.early), at(first.at), at(first.late)],
    })
}

fn plot_mark(mark: &marks::SeriesMark) -> PlotMark {
    let kind = match mark.kind {
        marks::SeriesMarkKind::Replaced => PlotMarkKind::Replacement,
        marks::SeriesMarkKind::Reclaimed => PlotMarkKind::Reclaim,
        marks::SeriesMarkKind::Unloaded => PlotMarkKind::Eviction,
        marks::SeriesMarkKind::Crashed => PlotMarkKind::Crash,
        marks::SeriesMarkKind::Canary => PlotMarkKind::Canary,
        marks::SeriesMarkKind::Configured => PlotMarkKind::Configuration,
        marks::SeriesMarkKind::Failed | marks::SeriesMarkKind::Warned => PlotMarkKind::Other,
    };
    PlotMark { x: as_f64(mark.at) / 1000.0, kind, why: mark.words.clone() }
}
