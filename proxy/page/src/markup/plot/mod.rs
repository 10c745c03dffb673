//! Plots as SVG: memory over time, with its law, limits, forecast and events.
//!
//! ```text
//!        ▼ replacement                     a mark, with its reason
//!  ──────┼──────────────────── hard        a limit
//!  - - - ┼ - - - - - - - - - - soft  ⋰     the forecast, with its range
//!     ⣀⠤⠒│                        ⋰⋰
//!   ⠤⠒   │        ⣀⠤⠔⠒⠊⠉⠒⠤⠔⠒⠊⠉⋰          readings, and the law with its band
//!  ▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒            declared caches
//!  └─────┴─────────────────────────
//! ```
//!
//! | file | part |
//! |---|---|
//! | `axis` | round numbers along an axis |
//! | `thin` | reduces points to those that can be seen, and keeps the extremes |
//! | `frame` | maps values to coordinates |
//! | `draw` | the drawing |
//! | `mark` | events and their shapes |
//! | `describe` | the same in words: title, description, legend, list of marks |
//!
//! The drawing carries its geometry, so that a script can put one cursor over all plots of a page:
//! `data-left`, `data-right`, `data-top`, `data-bottom` (units of the `viewBox`), `data-x-from`, `data-x-to`,
//! `data-y-from`, `data-y-to` (values). Labels of the time axis carry `data-time` (seconds since 1970) and
//! `data-step` (seconds from label to label). The label of class `unit` names the zone, so that a script can
//! show another one than UTC. The stylesheet sets colours by class.

mod axis;
mod describe;
mod draw;
mod frame;
mod mark;
mod thin;

use maud::Markup;

pub(crate) use mark::{PlotMark, PlotMarkKind};

/// A value at a position of the horizontal axis, with its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PlotLevel {
    /// Position: seconds since 1970.
    pub(crate) x: f64,
    /// Lower end of the range.
    pub(crate) low: f64,
    /// The value.
    pub(crate) value: f64,
    /// Upper end of the range.
    pub(crate) high: f64,
}

impl PlotLevel {
    /// Creates a value without a range.
    #[cfg(test)]
    pub(crate) const fn exact(x: f64, value: f64) -> Self {
        Self { x, low: value, value, high: value }
    }

    /// Creates a range without a value, for areas.
    pub(crate) const fn between(x: f64, low: f64, high: f64) -> Self {
        Self { x, low, value: high, high }
    }

    fn is_known(&self) -> bool {
        [self.x, self.low, self.value, self.high].into_iter().all(is_drawable)
    }
}

/// Returns whether a number can be drawn. Numbers larger than an exabyte are not measurements.
fn is_drawable(number: f64) -> bool {
    number.abs() <= 1e18
}

/// Readings as a curve.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlotCurve {
    /// Name of the curve in the legend.
    pub(crate) name: String,
    /// Readings in stretches, each in the order of the axis. The curve has a gap between two stretches.
    pub(crate) stretches: Vec<Vec<PlotLevel>>,
}

/// The line that a detector fits to readings.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlotLaw {
    /// Name in the legend, such as `the law: +4.42 MiB a request (4.40 to 4.45)`. Without a name the law is
    /// drawn, but not described, because it is one of several.
    pub(crate) name: String,
    /// The line with its band; two levels make a straight line.
    pub(crate) levels: Vec<PlotLevel>,
}

/// Kind of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlotLimitKind {
    /// A soft budget.
    Soft,
    /// A hard budget.
    Hard,
}

/// A soft or hard budget as a line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlotLimit {
    /// Kind of the limit.
    pub(crate) kind: PlotLimitKind,
    /// The limit in bytes.
    pub(crate) at: f64,
    /// The range in which it applied; `None` for the whole plot.
    pub(crate) range: Option<(f64, f64)>,
}

/// Memory that declared caches may fill.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlotArea {
    /// Name of the area in the legend.
    pub(crate) name: String,
    /// Areas from `low` to `high`, in stretches like those of a curve.
    pub(crate) stretches: Vec<Vec<PlotLevel>>,
}

/// Forecast of reaching a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PlotForecast {
    /// Start of the forecast: a position of the horizontal axis, and the value there.
    pub(crate) from: (f64, f64),
    /// The limit.
    pub(crate) limit: f64,
    /// Earliest, likely and latest position at which the limit is reached; infinite if never.
    pub(crate) reached: [f64; 3],
}

/// A plot of memory over requests or time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LinePlot {
    /// Subject: `host memory of m`. Titles of the plots of a page differ.
    pub(crate) title: String,
    /// Range of the horizontal axis; `None`: the range of the readings, extended for a forecast.
    pub(crate) span: Option<(f64, f64)>,
    /// The readings.
    pub(crate) curves: Vec<PlotCurve>,
    /// The detector's lines; one for each process.
    pub(crate) laws: Vec<PlotLaw>,
    /// Budgets.
    pub(crate) limits: Vec<PlotLimit>,
    /// Declared caches.
    pub(crate) areas: Vec<PlotArea>,
    /// The forecast.
    pub(crate) forecast: Option<PlotForecast>,
    /// Events.
    pub(crate) marks: Vec<PlotMark>,
}

impl LinePlot {
    /// Returns the drawing with a legend and a list of events; without readings in the range, a sentence.
    pub(crate) fn figure(&self, caption: Option<Markup>) -> Markup {
        describe::plot_figure(self, caption)
    }
}

#[cfg(test)]
mod tests;
