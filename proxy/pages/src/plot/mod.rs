//! Plots as SVG: memory over requests or time, with its law, limits, forecast and events.
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
//! `data-across` (`requests` or `time`), `data-left`, `data-right`, `data-top`, `data-bottom` (units of the
//! `viewBox`), `data-x-from`, `data-x-to`, `data-y-from`, `data-y-to` (values). Labels of a time axis carry
//! `data-time` (seconds since 1970) and `data-step` (seconds from label to label). The label of class
//! `unit` names the zone, so that a script can show another one than UTC. The stylesheet sets colours by
//! class.

mod axis;
mod describe;
mod draw;
mod frame;
mod mark;
mod thin;

use maud::Markup;

pub use mark::{PlotMark, PlotMarkKind};

/// A value at a position of the horizontal axis, with its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlotLevel {
    /// Position: number of requests, or seconds since 1970.
    pub x: f64,
    /// Lower end of the range.
    pub low: f64,
    /// The value.
    pub value: f64,
    /// Upper end of the range.
    pub high: f64,
}

impl PlotLevel {
    /// Creates a value without a range.
    pub const fn exact(x: f64, value: f64) -> Self {
        Self { x, low: value, value, high: value }
    }

    /// Creates a range without a value, for areas.
    pub const fn between(x: f64, low: f64, high: f64) -> Self {
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

/// Quantity of the horizontal axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HorizontalQuantity {
    /// Requests.
    #[default]
    Requests,
    /// Seconds since 1970.
    Time,
}

/// Style of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurveKind {
    /// Readings: a line.
    Readings,
    /// Readings without declared caches: a dashed line.
    WithoutKept,
}

/// Readings as a curve.
#[derive(Clone, Debug, PartialEq)]
pub struct PlotCurve {
    /// Style of the curve.
    pub kind: CurveKind,
    /// Name of the curve in the legend.
    pub name: String,
    /// Readings in stretches, each in the order of the axis. The curve has a gap between two stretches.
    pub stretches: Vec<Vec<PlotLevel>>,
}

/// The line that a detector fits to readings.
#[derive(Clone, Debug, PartialEq)]
pub struct PlotLaw {
    /// Name in the legend, such as `the law: +4.42 MiB a request (4.40 to 4.45)`. Without a name the law is
    /// drawn, but not described, because it is one of several.
    pub name: String,
    /// The line with its band; two levels make a straight line.
    pub levels: Vec<PlotLevel>,
}

/// Kind of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlotLimitKind {
    /// A soft budget.
    Soft,
    /// A hard budget.
    Hard,
}

/// A soft or hard budget as a line.
#[derive(Clone, Debug, PartialEq)]
pub struct PlotLimit {
    /// Kind of the limit.
    pub kind: PlotLimitKind,
    /// The limit in bytes.
    pub at: f64,
    /// The range in which it applied; `None` for the whole plot.
    pub range: Option<(f64, f64)>,
}

impl PlotLimit {
    /// Creates a limit that applies to the whole plot.
    pub const fn new(kind: PlotLimitKind, at: f64) -> Self {
        Self { kind, at, range: None }
    }
}

/// Memory that declared caches may fill.
#[derive(Clone, Debug, PartialEq)]
pub struct PlotArea {
    /// Name of the area in the legend.
    pub name: String,
    /// Areas from `low` to `high`, in stretches like those of a curve.
    pub stretches: Vec<Vec<PlotLevel>>,
}

/// Forecast of reaching a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlotForecast {
    /// Start of the forecast: a position of the horizontal axis, and the value there.
    pub from: (f64, f64),
    /// The limit.
    pub limit: f64,
    /// Earliest, likely and latest position at which the limit is reached; infinite if never.
    pub reached: [f64; 3],
}

/// A plot of memory over requests or time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinePlot {
    /// Subject: `host memory of m`. Titles of the plots of a page differ.
    pub title: String,
    /// Quantity of the horizontal axis.
    pub horizontal: HorizontalQuantity,
    /// Range of the horizontal axis; `None`: the range of the readings, extended for a forecast.
    pub span: Option<(f64, f64)>,
    /// The readings.
    pub curves: Vec<PlotCurve>,
    /// The detector's lines; one for each process.
    pub laws: Vec<PlotLaw>,
    /// Budgets.
    pub limits: Vec<PlotLimit>,
    /// Declared caches.
    pub areas: Vec<PlotArea>,
    /// The forecast.
    pub forecast: Option<PlotForecast>,
    /// Events.
    pub marks: Vec<PlotMark>,
}

impl LinePlot {
    /// Returns the drawing with a legend and a list of events; without readings in the range, a sentence.
    pub fn figure(&self, caption: Option<Markup>) -> Markup {
        describe::plot_figure(self, caption)
    }
}

#[cfg(test)]
mod tests;
