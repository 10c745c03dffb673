//! Plots as SVG: what a memory did over work or time, and what is known beside it.
//!
//! ```text
//!        ▼ replacement                     a mark, with its reason
//!  ──────┼──────────────────── hard        a limit
//!  - - - ┼ - - - - - - - - - - soft  ⋰     the forecast, with its range
//!     ⣀⠤⠒│                        ⋰⋰
//!   ⠤⠒   │        ⣀⠤⠔⠒⠊⠉⠒⠤⠔⠒⠊⠉⋰          readings, and the law with its band
//!  ▒▒▒▒▒▒│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒            what is declared
//!  └─────┴─────────────────────────
//! ```
//!
//! | file | part |
//! |---|---|
//! | `axis` | round numbers along an axis |
//! | `thin` | no more points than can be seen, and none of the extremes lost |
//! | `frame` | from values to places in the drawing |
//! | `draw` | the drawing |
//! | `mark` | what was done, and its shape |
//! | `describe` | the same in words: title, description, legend, list of marks |
//!
//! The drawing carries its geometry, so that a script can put one cursor over all plots of a page: `data-across` (`requests` or
//! `time`), `data-left`, `data-right`, `data-top`, `data-bottom` (units of the `viewBox`), `data-x-from`, `data-x-to`,
//! `data-y-from`, `data-y-to` (values). Labels of a time axis carry `data-time` (seconds since 1970) and `data-step` (seconds
//! from label to label), and that of the class `unit` names the zone, so that a script can show another one than UTC. Colours come from the stylesheet, by class.

mod axis;
mod describe;
mod draw;
mod frame;
mod mark;
mod thin;

pub use mark::{Mark, MarkKind};
pub use thin::{MOST_POINTS, thin};

/// A value at a place of the horizontal axis, with the ends of its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Where: requests, or seconds since 1970.
    pub x: f64,
    /// The least that it was or may be.
    pub low: f64,
    /// The value.
    pub value: f64,
    /// The most that it was or may be.
    pub high: f64,
}

impl Level {
    /// One value without a range.
    pub const fn exact(x: f64, value: f64) -> Self {
        Self { x, low: value, value, high: value }
    }

    /// Only a range: for areas, whose `value` nobody looks at.
    pub const fn between(x: f64, low: f64, high: f64) -> Self {
        Self { x, low, value: high, high }
    }

    fn is_known(&self) -> bool {
        [self.x, self.low, self.value, self.high].into_iter().all(is_number)
    }
}

/// Whether it is a number that anything measures: an exabyte is none that a drawing could hold.
fn is_number(number: f64) -> bool {
    number.abs() <= 1e18
}

/// What the horizontal axis counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Across {
    /// Requests.
    #[default]
    Requests,
    /// Seconds since 1970.
    Time,
}

/// What the vertical axis measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Up {
    /// Bytes.
    #[default]
    Bytes,
    /// How many: whole numbers.
    Count,
    /// Seconds.
    Seconds,
    /// How many of these a second: `tokens`, `requests`.
    PerSecond(&'static str),
}

/// How a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurveKind {
    /// The readings: a line.
    Readings,
    /// The readings without what is kept on purpose: a broken line.
    WithoutKept,
    /// Another one for comparison: dots.
    Other,
}

/// Readings.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// How it is drawn.
    pub kind: CurveKind,
    /// Its name in the legend.
    pub name: String,
    /// Readings in stretches, each in the order of the axis: between two stretches nothing was read, and nothing is drawn.
    pub stretches: Vec<Vec<Level>>,
}

/// What a detector makes of readings.
#[derive(Clone, Debug, PartialEq)]
pub struct Law {
    /// Its name in the legend: `the law: +4.42 MiB a request (4.40 to 4.45)`. Without one it is drawn, and told of nowhere: one of several.
    pub name: String,
    /// The line with its band; two levels make a straight one.
    pub levels: Vec<Level>,
}

/// Which limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// A soft budget.
    Soft,
    /// A hard budget.
    Hard,
    /// What the machine or the GPU has.
    Most,
}

/// A limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// Which one.
    pub kind: LimitKind,
    /// Where: in the unit of the vertical axis.
    pub at: f64,
    /// From where to where it held; `None` for as far as the plot goes.
    pub held: Option<(f64, f64)>,
}

impl Limit {
    /// One that holds all along.
    pub const fn new(kind: LimitKind, at: f64) -> Self {
        Self { kind, at, held: None }
    }
}

/// Which area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AreaKind {
    /// What the server is told to keep.
    Declared,
    /// What was measured to be kept on purpose.
    Kept,
    /// The model's weights.
    Weights,
}

/// Memory that has a reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Area {
    /// Which one.
    pub kind: AreaKind,
    /// Its name in the legend.
    pub name: String,
    /// From `low` to `high`, in stretches like those of a curve.
    pub stretches: Vec<Vec<Level>>,
}

/// When a limit is reached if it goes on like this.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coming {
    /// From where on it is foretold: a place of the horizontal axis, and the value there.
    pub from: (f64, f64),
    /// The limit.
    pub limit: f64,
    /// Where it is reached at the earliest, likely, and at the latest; what has no end is infinite.
    pub reached: [f64; 3],
}

/// A plot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plot {
    /// What it is of: `host memory of m`. Titles of the plots of a page differ.
    pub title: String,
    /// What the horizontal axis counts.
    pub across: Across,
    /// What the vertical axis measures.
    pub up: Up,
    /// From where to where it goes; `None` for as far as there are readings, and somewhat farther for a forecast.
    pub span: Option<(f64, f64)>,
    /// The readings.
    pub curves: Vec<Curve>,
    /// What the detector makes of them; one for each process.
    pub laws: Vec<Law>,
    /// Budgets, and what there is.
    pub limits: Vec<Limit>,
    /// Memory that has a reason.
    pub areas: Vec<Area>,
    /// What will come.
    pub coming: Option<Coming>,
    /// What was done.
    pub marks: Vec<Mark>,
}

impl Plot {
    /// The drawing; empty if there is no reading in its span.
    pub fn svg(&self) -> String {
        frame::Frame::of(self).map(|frame| draw::svg(self, &frame)).unwrap_or_default()
    }

    /// The drawing with a caption (markup), its legend in words, and the list of what was done. Without a reading in its span
    /// it says so.
    pub fn figure(&self, caption: &crate::Html) -> String {
        describe::figure(self, caption)
    }
}

#[cfg(test)]
mod tests;
