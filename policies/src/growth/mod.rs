//! Tells a leak from a cache that fills: verdicts on series of memory readings.
//!
//! ```text
//!  Sample ──> Monitor ──┬─ host ──> verdict, slope, blame, fill of the allowance
//!                       ├─ vram0 ─> …
//!                       └─ vram1 ─> …
//! ```
//!
//! | file | part |
//! |---|---|
//! | `floors` | the least memory in each stretch of work, at several lengths |
//! | `stats` | Sen's slope with bounds, Mann and Kendall's trend test after Hamed and Rao |
//! | `shape` | whether one stretch of floors rises like a leak |
//! | `series` | from tests to a verdict: warm-up, allowance, persistence, and when a leak is over |
//! | `blame` | which unit of work pays |
//! | `forecast` | work and time until a limit |
//! | `monitor` | all series of one generation |
//! | `stretches` | slope and blame over processes that each did one kind of work, for experiments |
//!
//! A series is judged by the work that was done, not by the clock: idle hours add nothing, a busy minute adds much.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sample::MemoryKind;

mod blame;
mod floors;
mod forecast;
mod monitor;
mod series;
mod shape;
pub mod stats;
mod stretches;

pub use monitor::Monitor;
pub use stretches::blame_of;
pub use stretches::{Level, slope};

/// What a series says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Too little work, or not settled yet.
    #[default]
    Warming,
    /// It does not grow.
    Steady,
    /// It grows, within what the server is told to keep.
    Bounded,
    /// It may be growing without bound.
    Suspected,
    /// It grows with work, without a sign of an end, beyond what the server is told to keep.
    Leaking,
}

impl Verdict {
    /// Whether anything can be said yet.
    pub const fn is_known(self) -> bool {
        !matches!(self, Self::Warming)
    }

    /// Whether it grows, or may be growing, without bound.
    pub const fn grows(self) -> bool {
        matches!(self, Self::Suspected | Self::Leaking)
    }

    /// Whether it grows without a sign of an end.
    pub const fn leaks(self) -> bool {
        matches!(self, Self::Leaking)
    }

    /// The name in status and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Warming => "warming",
            Self::Steady => "steady",
            Self::Bounded => "bounded",
            Self::Suspected => "suspected",
            Self::Leaking => "leaking",
        }
    }
}

/// Unit of work that may pay for growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// A request.
    Request,
    /// A prompt token evaluated.
    PromptToken,
    /// A token generated.
    OutputToken,
    /// An image.
    Image,
    /// An audio clip.
    Audio,
    /// An hour, whatever is done in it.
    Hour,
}

impl Unit {
    /// The name in status, metrics and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::PromptToken => "prompt_token",
            Self::OutputToken => "output_token",
            Self::Image => "image",
            Self::Audio => "audio",
            Self::Hour => "hour",
        }
    }

    /// The name in a sentence: one of them.
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::PromptToken => "prompt token",
            Self::OutputToken => "output token",
            Self::Image => "image",
            Self::Audio => "audio clip",
            Self::Hour => "hour",
        }
    }
}

/// Which unit of work pays for the growth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Blame {
    /// This one.
    Pays {
        /// The unit.
        unit: Unit,
        /// Bytes for each.
        bytes_per_unit: f64,
        /// Share of the growth that it explains, 0 to 1.
        share: f64,
    },
    /// The load does not tell the units apart, or nothing explains the growth; why, in words.
    Undecided {
        /// One sentence.
        why: String,
    },
}

/// A value with the ends of its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The likely value.
    pub value: f64,
    /// The low end.
    pub low: f64,
    /// The high end; infinite ones are given as `f64::MAX`, because JSON has no infinity.
    pub high: f64,
}

/// What the server is told to keep in a series, and how full it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    /// Bytes above the baseline that are no leak.
    pub allowed: u64,
    /// Bytes above the baseline now.
    pub used: u64,
}

/// The line that the detector sees in a series, at the work that was done by now. All in bytes that the process is charged: measured pools
/// are in it, what was given back on demand is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Law {
    /// Where the line is.
    pub level: u64,
    /// The low end of the band in which most floors are.
    pub low: u64,
    /// The high end.
    pub high: u64,
}

/// The present picture of one series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// Which memory.
    pub series: MemoryKind,
    /// What it says.
    pub verdict: Verdict,
    /// Since which request of the generation the verdict holds.
    pub since_request: u64,
    /// Bytes per request; `None` before anything could be fitted.
    pub slope: Option<Interval>,
    /// Bytes when it had warmed up; `None` before.
    pub baseline: Option<u64>,
    /// The latest floor in bytes: the least that was seen in the last stretch of work.
    pub floor: Option<u64>,
    /// What the server is told to keep.
    pub fill: Fill,
    /// Which unit of work pays; `None` unless suspected or leaking.
    pub blame: Option<Blame>,
    /// The line of `slope`; `None` before anything could be fitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub law: Option<Law>,
}

impl Growth {
    /// A series of which nothing is known yet.
    pub fn of(series: MemoryKind) -> Self {
        Self {
            series,
            verdict: Verdict::Warming,
            since_request: 0,
            slope: None,
            baseline: None,
            floor: None,
            fill: Fill::default(),
            blame: None,
            law: None,
        }
    }
}

/// A change of verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VerdictChange {
    /// When, since the spawn.
    pub at: Duration,
    /// At which request.
    pub request: u64,
    /// Verdict before.
    pub before: Verdict,
    /// The picture after.
    pub growth: Growth,
}

/// What is left until a limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// The limit in bytes.
    pub limit: u64,
    /// Requests until it is reached.
    pub requests: Interval,
    /// Seconds until it is reached at the present rate of requests; `None` while no rate is known.
    pub seconds: Option<Interval>,
}

/// The numbers of the detector. Reasons: `defaults.toml`, section `[growth]`.
pub type GrowthPolicy = crate::defaults::Growth;

/// What is remembered of earlier generations of the same build, model and flags.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prior {
    /// Which memory.
    pub series: MemoryKind,
    /// It leaked this many bytes per request.
    pub slope: Interval,
    /// And this unit of work paid.
    pub blame: Option<Blame>,
}
