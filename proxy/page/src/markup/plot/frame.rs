//! Maps values to coordinates of the drawing.

use super::axis::AxisTicks;
use super::thin::{MAX_POINTS, reduce_points};
use super::{LinePlot, PlotLevel, PlotLimit, is_drawable};

/// Width of the drawing, in its own units.
pub(super) const WIDTH: f64 = 760.0;
pub(super) const HEIGHT: f64 = 266.0;
/// The margins leave room for the numbers at the axes and for the marks above.
pub(super) const LEFT: f64 = 96.0;
pub(super) const RIGHT: f64 = 12.0;
pub(super) const TOP: f64 = 24.0;
pub(super) const BOTTOM: f64 = 36.0;

/// Range in bytes below which readings count as constant, and are drawn as a line in the middle, not as noise
/// over the whole height.
const CONSTANT_BYTES: f64 = 16.0 * 1024.0 * 1024.0;
/// A limit above this multiple of the highest reading would flatten the readings, so it is only described.
const FAR_LIMIT_FACTOR: f64 = 2.0;
/// Multiple of the readings' height up to which areas and bands may enlarge a plot: declared caches may be
/// far larger than any change.
const MAX_AREA_FACTOR: f64 = 4.0;
/// Largest extension of a plot for a forecast, as a share of the range of its readings.
const MAX_FORECAST_SHARE: f64 = 0.5;

/// Axes and visible readings of a plot.
#[derive(Clone, Debug)]
pub(super) struct PlotFrame {
    /// Values of the left and right end.
    pub(super) from: f64,
    pub(super) to: f64,
    /// Labels; the first and the last of the vertical axis are its ends.
    pub(super) up: AxisTicks,
    pub(super) across: AxisTicks,
    pub(super) curves: Vec<Vec<Vec<PlotLevel>>>,
}

impl PlotFrame {
    /// Computes the frame; `None` if the plot has no visible reading.
    pub(super) fn from_plot(plot: &LinePlot) -> Option<Self> {
        let read = || plot.curves.iter().flat_map(|curve| curve.stretches.iter().flatten());
        let finite = || read().filter(|level| level.is_known());
        let (first, last) = min_max(finite().map(|level| level.x))?;
        let (from, to) = plot
            .span
            .filter(|(from, to)| from < to && is_drawable(*from) && is_drawable(*to))
            .unwrap_or((first, forecast_end(plot, first, last)));
        let inside = |level: &PlotLevel| level.x >= from && level.x <= to;
        let curves: Vec<Vec<Vec<PlotLevel>>> =
            plot.curves.iter().map(|curve| cut_to_span(&curve.stretches, from, to)).collect();
        let levels = || finite().filter(|level| inside(level));
        let around = plot.laws.iter().flat_map(|law| &law.levels);
        let around = around.chain(plot.areas.iter().flat_map(|area| area.stretches.iter().flatten()));
        let around: Vec<&PlotLevel> = around.filter(|level| level.is_known() && inside(level)).collect();
        let (low, read) = min_max(levels().flat_map(|level| [level.low, level.high]))?;
        let reach = (read - low).max(CONSTANT_BYTES) * (MAX_AREA_FACTOR - 1.0);
        let most = around.iter().map(|level| level.high).fold(read, f64::max).min(read + reach);
        let low = around.iter().map(|level| level.low).fold(low, f64::min).max(low - reach);
        let near = plot
            .limits
            .iter()
            .filter(|limit| is_drawable(limit.at) && limit.at <= most.max(0.0) * FAR_LIMIT_FACTOR);
        let high = near.map(|limit| limit.at).fold(most, f64::max);
        let room = (CONSTANT_BYTES - (high - low)).max(0.0) / 2.0;
        // No quantity in a plot is negative.
        let bottom = if low >= 0.0 { (low - room).max(0.0) } else { low - room };
        Some(Self {
            from,
            to,
            up: AxisTicks::vertical(bottom, (high + room).max(bottom + CONSTANT_BYTES)),
            across: AxisTicks::horizontal(from, to),
            curves,
        })
    }

    pub(super) fn x(&self, value: f64) -> f64 {
        LEFT + relative_position(value, self.from, self.to) * (WIDTH - LEFT - RIGHT)
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - relative_position(value, self.up.first(), self.up.last()) * (HEIGHT - BOTTOM - TOP)
    }

    pub(super) fn shows(&self, limit: &PlotLimit) -> bool {
        is_drawable(limit.at) && limit.at >= self.up.first() && limit.at <= self.up.last()
    }
}

/// Returns the readings within a span, and the next one on each side, so that lines reach its ends.
fn cut_to_span(stretches: &[Vec<PlotLevel>], from: f64, to: f64) -> Vec<Vec<PlotLevel>> {
    let within = |stretch: &Vec<PlotLevel>| {
        let begin = stretch.partition_point(|level| level.x < from).saturating_sub(1);
        let end = (stretch.partition_point(|level| level.x <= to) + 1).min(stretch.len());
        stretch.get(begin..end).map(<[PlotLevel]>::to_vec).unwrap_or_default()
    };
    let cut: Vec<Vec<PlotLevel>> = stretches.iter().map(within).collect();
    reduce_points(&cut, MAX_POINTS)
}

/// Returns the right end of a plot: its last reading, or somewhat farther for a forecast.
fn forecast_end(plot: &LinePlot, first: f64, last: f64) -> f64 {
    let reach = plot.forecast.map_or(last, |coming| coming.reached[2].max(last));
    let end = reach.min(last + (last - first) * MAX_FORECAST_SHARE);
    if end > first { end } else { first + 1.0 }
}

fn min_max(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |ends: Option<(f64, f64)>, value| {
        Some(ends.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
    })
}

fn relative_position(value: f64, from: f64, to: f64) -> f64 {
    if to > from { (value - from) / (to - from) } else { 0.5 }
}
