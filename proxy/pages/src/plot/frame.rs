//! Maps values to coordinates of the drawing.

use super::axis::Ticks;
use super::{Level, Limit, Plot, Up, is_number, thin};

/// Size in units of the drawing.
pub(super) const WIDTH: f64 = 760.0;
pub(super) const HEIGHT: f64 = 266.0;
/// Margins for the numbers at the axes, also for the larger ones of a small screen, and for marks above.
pub(super) const LEFT: f64 = 96.0;
pub(super) const RIGHT: f64 = 12.0;
pub(super) const TOP: f64 = 24.0;
pub(super) const BOTTOM: f64 = 36.0;

/// Range in bytes below which readings count as constant: drawn as a line in the middle, not as noise over
/// the whole height.
const STILL: f64 = 16.0 * 1024.0 * 1024.0;
/// The same for other numbers, as a share of them.
const STILL_SHARE: f64 = 0.1;
/// A limit above this multiple of the highest reading would flatten the readings: it is only described, not
/// drawn.
const FAR: f64 = 2.0;
/// Areas and bands enlarge a plot to at most this multiple of the readings' height: declared caches may be
/// far larger than any change.
const AROUND: f64 = 4.0;
/// A forecast extends a plot by at most this share of its readings' range.
const AHEAD: f64 = 0.5;

/// Axes and visible readings of a plot.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// Values of the left and right end.
    pub(super) from: f64,
    pub(super) to: f64,
    /// Labels; the first and the last of the vertical axis are its ends.
    pub(super) up: Ticks,
    pub(super) across: Ticks,
    /// The visible readings, curve by curve.
    pub(super) curves: Vec<Vec<Vec<Level>>>,
}

impl Frame {
    /// `None` without a visible reading.
    pub(super) fn of(plot: &Plot) -> Option<Self> {
        let read = || plot.curves.iter().flat_map(|curve| curve.stretches.iter().flatten());
        let finite = || read().filter(|level| level.is_known());
        let (first, last) = ends(finite().map(|level| level.x))?;
        let (from, to) = plot
            .span
            .filter(|(from, to)| from < to && is_number(*from) && is_number(*to))
            .unwrap_or((first, ahead(plot, first, last)));
        let inside = |level: &Level| level.x >= from && level.x <= to;
        let curves: Vec<Vec<Vec<Level>>> =
            plot.curves.iter().map(|curve| cut(&curve.stretches, from, to)).collect();
        let levels = || finite().filter(|level| inside(level));
        let around = plot.laws.iter().flat_map(|law| &law.levels);
        let around = around.chain(plot.areas.iter().flat_map(|area| area.stretches.iter().flatten()));
        let around: Vec<&Level> = around.filter(|level| level.is_known() && inside(level)).collect();
        let (low, read) = ends(levels().flat_map(|level| [level.low, level.high]))?;
        let still = if plot.up == Up::Bytes { STILL } else { read.abs() * STILL_SHARE };
        let reach = (read - low).max(still) * (AROUND - 1.0);
        let most = around.iter().map(|level| level.high).fold(read, f64::max).min(read + reach);
        let low = around.iter().map(|level| level.low).fold(low, f64::min).max(low - reach);
        let near = plot.limits.iter().filter(|limit| is_number(limit.at) && limit.at <= most.max(0.0) * FAR);
        let high = near.map(|limit| limit.at).fold(most, f64::max);
        let room = (still - (high - low)).max(0.0) / 2.0;
        // No drawn quantity is negative.
        let bottom = if low >= 0.0 { (low - room).max(0.0) } else { low - room };
        Some(Self {
            from,
            to,
            up: Ticks::up(bottom, (high + room).max(bottom + still), plot.up),
            across: Ticks::across(from, to, plot.across),
            curves,
        })
    }

    pub(super) fn x(&self, value: f64) -> f64 {
        LEFT + share(value, self.from, self.to) * (WIDTH - LEFT - RIGHT)
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - share(value, self.up.first(), self.up.last()) * (HEIGHT - BOTTOM - TOP)
    }

    /// Returns true if a limit lies within the drawing.
    pub(super) fn shows(&self, limit: &Limit) -> bool {
        is_number(limit.at) && limit.at >= self.up.first() && limit.at <= self.up.last()
    }
}

/// The readings within a span, and the next one on each side, so that lines reach its ends.
fn cut(stretches: &[Vec<Level>], from: f64, to: f64) -> Vec<Vec<Level>> {
    let within = |stretch: &Vec<Level>| {
        let begin = stretch.partition_point(|level| level.x < from).saturating_sub(1);
        let end = (stretch.partition_point(|level| level.x <= to) + 1).min(stretch.len());
        stretch.get(begin..end).map(<[Level]>::to_vec).unwrap_or_default()
    };
    let cut: Vec<Vec<Level>> = stretches.iter().map(within).collect();
    thin(&cut, super::MOST_POINTS)
}

/// The right end of a plot of these readings: somewhat farther with a forecast.
fn ahead(plot: &Plot, first: f64, last: f64) -> f64 {
    let reach = plot.coming.map_or(last, |coming| coming.reached[2].max(last));
    let end = reach.min(last + (last - first) * AHEAD);
    if end > first { end } else { first + 1.0 }
}

/// Minimum and maximum; `None` without values.
fn ends(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |ends: Option<(f64, f64)>, value| {
        Some(ends.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
    })
}

fn share(value: f64, from: f64, to: f64) -> f64 {
    if to > from { (value - from) / (to - from) } else { 0.5 }
}
