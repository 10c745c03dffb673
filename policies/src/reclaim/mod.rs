//! Reclaim: asks a running process to give back memory, before it is replaced because of that memory.
//!
//! ```text
//!   memory calls for a replacement ── reclaim supported? ── ask ── answer and a reading ── enough? ── not replaced
//!                                          │ no                                             │ no
//!                                          └──────────────── replaced as without it ────────┘ and not asked again
//! ```
//!
//! | cause of the request | after a successful reclaim |
//! |---|---|
//! | a budget | the process is asked again above the budget; if that is sooner than `reclaim_again`, it is replaced |
//! | growth | llama-warden asks again after `reclaim_again`, once the process is as large as before; budgets apply |
//! | a shared budget | the process is replaced if it is still the chosen one |

mod given;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use given::{ReclaimOutcome, ReclaimParts, ReclaimedBytes};

use crate::defaults::Recycle;
use crate::recycle::{Reason, RecycleAction, RecycleDecision, SeriesFacts};
use crate::sample::MemoryKind;
use crate::units::{ByteSize, format_span, scale_bytes};

impl Recycle {
    /// Returns the time for an answer and a new reading, after which the process is replaced.
    pub fn reclaim_limit_of(&self, action: RecycleAction) -> Duration {
        if action >= RecycleAction::DrainNow { self.reclaim_limit_hard } else { self.reclaim_limit }
    }
}

/// First step when a decision calls for a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReclaimDecision {
    /// Ask the process to reclaim memory.
    Reclaim,
    /// Wait for the answer, or for the first reading after it.
    Wait,
    /// Do nothing: the reclaimed memory has not grown back.
    Rest {
        /// Whole seconds since the answer.
        seconds: u64,
        /// Bytes that were reclaimed.
        bytes: u64,
    },
    /// Replace the process.
    Replace(NoReclaim),
}

/// Reason for a replacement without a reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum NoReclaim {
    /// The cause of the replacement is not memory, or memory is almost exhausted.
    NotMemory,
    /// `policy.reclaim` is off.
    Off,
    /// The process does not support reclaim, at least not for this kind of memory.
    CannotAsk,
    /// A reclaim freed too little.
    NoHelp {
        /// Bytes freed.
        bytes: u64,
    },
    /// The process did not answer in time.
    NoAnswer,
    /// Memory grew back too soon after a reclaim.
    TooOften {
        /// Seconds from the reclaim to the next decision.
        seconds: u64,
    },
}

impl std::fmt::Display for NoReclaim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotMemory => f.write_str("it is not for memory that a process could give back"),
            Self::Off => f.write_str("`policy.reclaim` is off"),
            Self::CannotAsk => f.write_str("this build cannot be asked to give that memory back"),
            Self::NoHelp { bytes: 0 } => f.write_str("it was asked to give memory back, and none came back"),
            Self::NoHelp { bytes } => {
                write!(f, "it was asked to give memory back, and {} were not enough", ByteSize(*bytes))
            }
            Self::NoAnswer => f.write_str("it was asked to give memory back and did not answer in time"),
            Self::TooOften { seconds } => {
                write!(
                    f,
                    "it is as large again {} after it gave memory back",
                    format_span(Duration::from_secs(*seconds))
                )
            }
        }
    }
}

/// Result of a reclaim request, from a reading after its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReclaimWorth {
    /// The memory in question fell far enough.
    Enough,
    /// The memory in question did not fall far enough.
    NotEnough,
    /// The request came from an operator, or the memory could not be read.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ActiveReclaim {
    at: Duration,
    /// Memory that caused the request; `None` for an operator's request.
    cause: Option<ReclaimCause>,
    answered: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReclaimCause {
    series: MemoryKind,
    before: u64,
    /// The request has helped if at most this many bytes are left.
    most: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FreedMemory {
    series: MemoryKind,
    at: Duration,
    before: u64,
    bytes: u64,
}

/// History of the reclaim requests to one process. All times are since one epoch of the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReclaimHistory {
    asked: Option<ActiveReclaim>,
    last: Option<Duration>,
    /// Last success for each kind of memory.
    fell: Vec<FreedMemory>,
    /// Kinds of memory for which no further request is made, with the reasons.
    in_vain: Vec<(MemoryKind, NoReclaim)>,
    /// Limits have changed since the last request, so a decision that is not urgent waits until the next
    /// request is allowed, instead of getting [`NoReclaim::TooOften`].
    forgiven: bool,
    /// The process refused the last request as too soon, although no earlier request is known here.
    refused: bool,
}

impl ReclaimHistory {
    /// Returns the first step for this decision. `facts`: memory in question; `parts`: parts that support
    /// reclaim.
    pub fn decide(
        &self,
        policy: &Recycle,
        parts: Option<ReclaimParts>,
        decision: &RecycleDecision,
        facts: Option<&SeriesFacts>,
        now: Duration,
    ) -> ReclaimDecision {
        let Some((series, charged)) = reclaimable_memory(decision, facts) else {
            return ReclaimDecision::Replace(NoReclaim::NotMemory);
        };
        if !policy.reclaim {
            return ReclaimDecision::Replace(NoReclaim::Off);
        }
        if let Some((_, why)) = self.in_vain.iter().find(|(of, _)| *of == series) {
            return ReclaimDecision::Replace(*why);
        }
        if let Some(asked) = self.asked {
            let late = now.saturating_sub(asked.at) >= policy.reclaim_limit_of(decision.action);
            return if late { ReclaimDecision::Replace(NoReclaim::NoAnswer) } else { ReclaimDecision::Wait };
        }
        if !parts.unwrap_or_default().hold(series) {
            return ReclaimDecision::Replace(NoReclaim::CannotAsk);
        }
        let Some(last) = self.last else { return ReclaimDecision::Reclaim };
        let since = now.saturating_sub(last);
        if decision.reason == Some(Reason::Growth) {
            let fell = self.fell.iter().find(|fell| fell.series == series);
            if let Some(FreedMemory { at, before, bytes, .. }) = fell
                && (charged < *before || since < policy.reclaim_again)
            {
                return ReclaimDecision::Rest { seconds: now.saturating_sub(*at).as_secs(), bytes: *bytes };
            }
            if since < policy.reclaim_again {
                // The last request has no result for this memory, for example because an operator made it.
                return ReclaimDecision::Wait;
            }
        }
        if since < policy.reclaim_again {
            if (self.forgiven || self.refused) && decision.action < RecycleAction::DrainNow {
                return ReclaimDecision::Wait;
            }
            return ReclaimDecision::Replace(NoReclaim::TooOften { seconds: since.as_secs() });
        }
        ReclaimDecision::Reclaim
    }

    /// Records a request, made for this decision or by an operator.
    pub fn record_request(
        &mut self,
        policy: &Recycle,
        cause: Option<(&RecycleDecision, Option<&SeriesFacts>)>,
        now: Duration,
    ) {
        let cause = cause.and_then(|(decision, facts)| {
            let (series, before) = reclaimable_memory(decision, facts)?;
            let own = matches!(
                decision.reason,
                Some(Reason::HostSoft | Reason::HostHard | Reason::VramSoft | Reason::VramHard)
            );
            // Other limits are shared with other processes, or are far away, so they set no target.
            let reach = decision.limit_bytes.filter(|_| own).map_or(before, |limit| limit.min(before));
            let fresh = facts.and_then(SeriesFacts::fresh).filter(|fresh| *fresh < reach);
            let most = match fresh {
                Some(fresh) => fresh.saturating_add(scale_bytes(reach - fresh, 1.0 - policy.reclaim_room)),
                None => reach.saturating_sub(1),
            };
            Some(ReclaimCause { series, before, most })
        });
        self.asked = Some(ActiveReclaim { at: now, cause, answered: None });
    }

    /// Forgets the results of earlier requests, because they were judged by the limits before a change. Keeps
    /// the time of the last request, because a process refuses requests that follow too soon.
    pub fn handle_new_limits(&mut self) {
        self.in_vain.clear();
        self.fell.clear();
        self.forgiven = true;
    }

    /// Records the answer, or that none arrived. Returns true if the next reading shows the result.
    pub fn record_answer(&mut self, outcome: ReclaimOutcome, now: Duration) -> bool {
        let Some(asked) = &mut self.asked else { return false };
        if matches!(outcome, ReclaimOutcome::NoAnswer | ReclaimOutcome::Nobody) {
            if let Some(cause) = asked.cause {
                self.in_vain.push((cause.series, NoReclaim::NoAnswer));
            }
            self.asked = None;
            return false;
        }
        if outcome == ReclaimOutcome::TooSoon && !self.refused {
            // The process had another request that is unknown here. Retry later.
            (self.asked, self.last, self.refused) = (None, Some(now), true);
            return false;
        }
        asked.answered = Some(now);
        true
    }

    /// Adds a reading begun at `begun`; returns the result of the request that this reading completes.
    pub fn add_reading(
        &mut self,
        begun: Duration,
        charged: impl Fn(MemoryKind) -> Option<u64>,
    ) -> Option<ReclaimWorth> {
        let Some(ActiveReclaim { cause, answered: Some(at), .. }) = self.asked else { return None };
        if begun < at {
            return None;
        }
        self.asked = None;
        let mut worth = ReclaimWorth::Unknown;
        // A missing reading does not prove a failure; the next decision is based on a new reading.
        if let Some(cause) = cause
            && let Some(after) = charged(cause.series)
        {
            let ReclaimCause { series, before, .. } = cause;
            let bytes = before.saturating_sub(after);
            self.fell.retain(|fell| fell.series != series);
            if after <= cause.most {
                worth = ReclaimWorth::Enough;
                self.fell.push(FreedMemory { series, at, before, bytes });
            } else {
                worth = ReclaimWorth::NotEnough;
                self.in_vain.push((cause.series, NoReclaim::NoHelp { bytes }));
            }
        }
        self.last = Some(at);
        (self.forgiven, self.refused) = (false, false);
        Some(worth)
    }
}

/// Returns the kind of memory that a decision is about, and its bytes; `None` if it cannot be reclaimed.
fn reclaimable_memory(decision: &RecycleDecision, facts: Option<&SeriesFacts>) -> Option<(MemoryKind, u64)> {
    let wanted = matches!(decision.action, RecycleAction::RecycleWhenQuiet | RecycleAction::DrainNow);
    let memory = matches!(
        decision.reason?,
        Reason::HostSoft
            | Reason::HostHard
            | Reason::VramSoft
            | Reason::VramHard
            | Reason::Growth
            | Reason::SharedHost
            | Reason::SharedVram
    );
    let facts = facts.filter(|facts| Some(facts.series) == decision.series)?;
    (wanted && memory).then_some((facts.series, facts.charged?))
}
