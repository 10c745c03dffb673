//! Decisions of the recycle policy, and hindrances.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::reason::{Reason, RecycleAction};
use crate::cooldown::HoldReason;
use crate::sample::MemoryKind;
use crate::units::{ByteSize, format_span};

/// Reason why a wanted replacement does not take place now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RecycleHindrance {
    /// Requests are in flight, or were until recently.
    NotQuiet {
        /// Rest of the wait, in whole seconds, rounded up.
        seconds_left: u64,
    },
    /// The time of day is outside the windows.
    OutsideWindow {
        /// Minutes until the next window opens.
        minutes_left: u16,
    },
    /// The mode is `observe`.
    Observing {
        /// Action that another mode would take.
        would: RecycleAction,
    },
    /// Memory leaks, but its limit is not near enough.
    NotYet {
        /// Whole seconds until the limit is reached.
        seconds_to_limit: u64,
        /// Whole seconds: a replacement is wanted once the limit is nearer than this.
        seconds_before: u64,
    },
    /// The exact reading of host memory does not confirm the growth that the counters show.
    NotConfirmed,
    /// Another replacement, of the same model or on the same GPU, goes first.
    InTurn,
    /// A reclaim is in progress.
    Reclaiming,
    /// Reclaimed memory has not grown back.
    Reclaimed {
        /// Whole seconds since the reclaim.
        seconds: u64,
        /// Bytes reclaimed.
        bytes: u64,
    },
    /// The cooldown holds the replacement back.
    Held {
        /// Reason of the cooldown.
        by: HoldReason,
    },
}

impl std::fmt::Display for RecycleHindrance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotQuiet { seconds_left } => write!(
                f,
                "waiting for a moment without requests, at most {}",
                format_span(Duration::from_secs(*seconds_left))
            ),
            Self::OutsideWindow { minutes_left } => {
                let left = Duration::from_secs(u64::from(*minutes_left) * 60);
                write!(f, "outside of the window of the day: the next one opens in {}", format_span(left))
            }
            Self::Observing { would: RecycleAction::DrainNow } => f.write_str(
                "`policy.growth` is \"observe\": with \"recycle\" it would be drained and replaced now",
            ),
            Self::Observing { .. } => f.write_str(
                "`policy.growth` is \"observe\": with \"recycle\" it would be replaced at the next quiet moment",
            ),
            Self::NotYet { seconds_to_limit, seconds_before } => write!(
                f,
                "it reaches the limit in about {}; it is replaced when less than {} are left",
                format_span(Duration::from_secs(*seconds_to_limit)),
                format_span(Duration::from_secs(*seconds_before))
            ),
            Self::NotConfirmed => {
                f.write_str("the exact reading of its memory (smaps_rollup) does not show the growth")
            }
            Self::InTurn => f.write_str("another replacement of this model or on this GPU goes first"),
            Self::Reclaiming => f.write_str("it was asked to give memory back; the effect is measured first"),
            Self::Reclaimed { seconds, bytes } => write!(
                f,
                "it gave {} back {} ago, and does not hold as much again yet",
                ByteSize(*bytes),
                format_span(Duration::from_secs(*seconds))
            ),
            Self::Held { by } => by.fmt(f),
        }
    }
}

/// Decision of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecycleDecision {
    /// Action to take.
    pub action: RecycleAction,
    /// Reason. `None` with [`RecycleAction::Observe`], except with [`RecycleHindrance::Observing`] (reason in
    /// another mode) and [`RecycleHindrance::NotYet`] (reason of a future action).
    pub reason: Option<Reason>,
    /// True if the action is due now.
    pub due: bool,
    /// Kind of memory that is the reason, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<MemoryKind>,
    /// Limit that is or will be exceeded, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Hindrance, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<RecycleHindrance>,
    /// The machine or the GPU is short of that memory, so no cooldown interval applies.
    #[serde(default)]
    pub threat: bool,
}

impl RecycleDecision {
    /// No action.
    pub const OBSERVE: Self = Self {
        action: RecycleAction::Observe,
        reason: None,
        due: false,
        series: None,
        limit_bytes: None,
        why_not: None,
        threat: false,
    };

    /// Returns this decision, held back: not due, with a hindrance.
    #[must_use]
    pub fn held_back(self, why_not: RecycleHindrance) -> Self {
        Self { due: false, why_not: Some(why_not), ..self }
    }
}
