//! Separates a leak from a cache that fills: verdicts on series of memory readings.
//!
//! | file | part |
//! |---|---|
//! | `floors` | the lowest memory in each stretch of work, for several stretch lengths |
//! | `stats` | Sen's slope with bounds, the Mann-Kendall trend test after Hamed and Rao |
//! | `shape` | tests if one stretch of floors has the shape of a leak |
//! | `series` | from tests to a verdict: warm-up, allowance, persistence, end of a leak |
//! | `blame` | the unit of work that causes the growth |
//! | `forecast` | work and time until a limit |
//! | `monitor` | all memory series of one process |
//! | `stretches` | slope and blame over several processes with different work, for experiments |
//!
//! A series is judged by the work done, not by the clock: idle hours add nothing, a busy minute adds much.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::named::named_enum;
use crate::sample::{MemoryKind, WorkDone};

mod blame;
mod floors;
mod forecast;
mod monitor;
mod series;
mod shape;
pub mod stats;
mod stretches;

pub use monitor::GrowthMonitor;
pub use stretches::blame_processes;
pub use stretches::{MemoryLevel, slope};

named_enum! {
    /// Verdict on the growth of one series.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum GrowthVerdict {
        /// The process has done too little work, or its memory has not settled yet.
        #[default]
        Warming = "warming",
        /// Memory does not grow.
        Steady = "steady",
        /// Memory grows within the declared caches.
        Bounded = "bounded",
        /// Memory may be growing without bound.
        Suspected = "suspected",
        /// Memory grows with work beyond the declared caches, and does not level off.
        Leaking = "leaking",
    }
}

impl GrowthVerdict {
    /// Returns true once the series has been judged.
    pub const fn is_known(self) -> bool {
        !matches!(self, Self::Warming)
    }

    /// Returns true if memory grows, or may be growing, without bound.
    pub const fn grows(self) -> bool {
        matches!(self, Self::Suspected | Self::Leaking)
    }

    /// Returns true if memory leaks: it grows and does not level off.
    pub const fn leaks(self) -> bool {
        matches!(self, Self::Leaking)
    }
}

named_enum! {
    /// Unit of work that may cause growth.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum WorkUnit {
        /// A request.
        Request = "request",
        /// An evaluated prompt token.
        PromptToken = "prompt_token",
        /// A generated token.
        OutputToken = "output_token",
        /// An image.
        Image = "image",
        /// An audio clip.
        Audio = "audio",
        /// An hour of process life, independent of work.
        Hour = "hour",
    }
}

impl WorkUnit {
    /// Returns the amount of the unit in this work; work contains no hours.
    pub(crate) const fn count_in(self, work: &WorkDone) -> u64 {
        match self {
            Self::Request => work.requests,
            Self::PromptToken => work.prompt_tokens,
            Self::OutputToken => work.output_tokens,
            Self::Image => work.images,
            Self::Audio => work.audio,
            Self::Hour => 0,
        }
    }

    /// Returns the singular noun used in sentences.
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

/// Unit of work that causes the growth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum GrowthBlame {
    /// A single unit explains the growth.
    Pays {
        /// Unit that explains the growth.
        unit: WorkUnit,
        /// Bytes per unit.
        bytes_per_unit: f64,
        /// Share of the growth that the unit explains, 0 to 1.
        share: f64,
    },
    /// The load does not separate the units, or no unit explains the growth.
    Undecided {
        /// Reason, one sentence.
        why: String,
    },
}

impl GrowthBlame {
    /// Returns the blamed unit.
    pub const fn unit(&self) -> Option<WorkUnit> {
        match self {
            Self::Pays { unit, .. } => Some(*unit),
            Self::Undecided { .. } => None,
        }
    }
}

/// A value with the ends of its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct IntervalEstimate {
    /// Most likely value.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end; infinity is stored as `f64::MAX`, because JSON has no infinity.
    pub high: f64,
}

/// Size and use of a series' allowance: the memory that the server is configured to cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllowanceFill {
    /// Allowed bytes above the baseline.
    pub allowed: u64,
    /// Used bytes above the baseline.
    pub used: u64,
}

/// Straight line fitted to a series, at the present work. All values are bytes charged to the process: they
/// include measured pools and exclude reclaimed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowthLine {
    /// Value of the line.
    pub level: u64,
    /// Lower end of the band that contains most floors.
    pub low: u64,
    /// Upper end of the band.
    pub high: u64,
}

/// Current state of one series.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeriesGrowth {
    /// Kind of memory of the series.
    pub series: MemoryKind,
    /// Verdict on the series.
    pub verdict: GrowthVerdict,
    /// Request number in the process's life since which the verdict holds.
    pub since_request: u64,
    /// Bytes per request; `None` before the first fit.
    pub slope: Option<IntervalEstimate>,
    /// Bytes at the end of the warm-up; `None` during the warm-up.
    pub baseline: Option<u64>,
    /// Latest floor in bytes: the lowest reading in the last stretch of work.
    pub floor: Option<u64>,
    /// Use of the declared caches.
    pub fill: AllowanceFill,
    /// Unit of work that causes the growth; `None` if the verdict is neither suspected nor leaking.
    pub blame: Option<GrowthBlame>,
    /// Line with the slope `slope`; `None` before the first fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub law: Option<GrowthLine>,
}

impl SeriesGrowth {
    /// Creates the state of a series without any readings.
    pub fn without_readings(series: MemoryKind) -> Self {
        Self { series, ..Self::default() }
    }
}

/// A change of verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VerdictChange {
    /// Time since the spawn.
    pub at: Duration,
    /// Number of requests answered since the spawn.
    pub request: u64,
    /// Verdict before.
    pub before: GrowthVerdict,
    /// State after the change.
    pub growth: SeriesGrowth,
}

/// Work and time left until a limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GrowthForecast {
    /// Limit in bytes.
    pub limit: u64,
    /// Requests until the limit is reached.
    pub requests: IntervalEstimate,
    /// Seconds until the limit is reached at the present rate of requests; `None` if no rate is known.
    pub seconds: Option<IntervalEstimate>,
}

/// Settings of the detector. `defaults.toml`, section `[growth]`, gives the reasons.
pub type GrowthPolicy = crate::defaults::Growth;

/// Leak known from earlier processes of the same build, model and flags.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeakPrior {
    /// Memory that leaked.
    pub series: MemoryKind,
    /// Leaked bytes per request.
    pub slope: IntervalEstimate,
    /// Unit of work that caused the leak.
    pub blame: Option<GrowthBlame>,
}
