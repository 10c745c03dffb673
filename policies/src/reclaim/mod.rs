//! The first rung: what a running process is asked to give back before it is replaced for its memory.
//!
//! ```text
//!   memory speaks for a replacement ── can it be asked? ── ask ── answer and a reading ── enough? ── nothing is replaced
//!                                          │ no                                             │ no
//!                                          └──────────────── replaced as without it ────────┘ and not asked again
//! ```
//!
//! | wanted because of | after a reclaim that helped |
//! |---|---|
//! | a budget | asked again when the budget is passed again; where that is sooner than `reclaim_again`, replaced |
//! | growth | nothing until it holds as much as before, and that was not a moment ago; then asked again. Budgets hold meanwhile |
//! | a budget of all backends together | replaced if it is still the one that is chosen |
//!
//! Nothing here knows a clock or a process: it is told when something was asked and what was read.

mod given;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use given::{Given, Outcome, Parts};

use crate::defaults::Recycle;
use crate::recycle::{Action, Decision, Reason, SeriesFacts};
use crate::sample::MemoryKind;
use crate::units::{ByteSize, scale, span};

/// What comes first for a decision that speaks for a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// Ask the process to give back what it hoards.
    Reclaim,
    /// It was asked: its answer, or the first reading after it, is still to come.
    Wait,
    /// What it gave back has not come back: nothing is replaced.
    Rest {
        /// Since the answer, in whole seconds.
        seconds: u64,
        /// By so much it fell then.
        bytes: u64,
    },
    /// Replace it.
    Replace(NoReclaim),
}

/// Why a process is replaced without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum NoReclaim {
    /// It is not for its memory that it is to be replaced, or memory is almost gone.
    NotMemory,
    /// `policy.reclaim` is off.
    Off,
    /// Nobody in the process reads what is asked, or none of those who do has this memory.
    CannotAsk,
    /// It was asked in vain: it did not fall far enough.
    NoHelp {
        /// By so much it fell.
        bytes: u64,
    },
    /// It was asked and did not answer in time.
    NoAnswer,
    /// It is as far again so soon after it gave back.
    TooOften {
        /// After so many seconds.
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
                    span(Duration::from_secs(*seconds))
                )
            }
        }
    }
}

/// What a request was worth, by a reading after its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// The memory that was the reason fell far enough.
    Enough,
    /// It did not.
    NotEnough,
    /// An operator asked, or that memory could not be read.
    Unknown,
}

/// A request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    at: Duration,
    /// What it is for; `None` for an operator's.
    cause: Option<Cause>,
    /// When the answer came.
    answered: Option<Duration>,
}

/// The memory for which it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cause {
    series: MemoryKind,
    /// Bytes when it was asked.
    before: u64,
    /// Bytes at which it would have helped.
    most: u64,
}

/// Memory that fell far enough when it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fell {
    series: MemoryKind,
    at: Duration,
    /// From where.
    before: u64,
    /// By how much.
    bytes: u64,
}

/// What is remembered of the requests to one generation. All times are since one moment of the caller's choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaims {
    asked: Option<Asked>,
    /// When the last one was complete.
    last: Option<Duration>,
    /// What came of the last one for each memory. One for another memory, or by an operator, changes nothing about it.
    fell: Vec<Fell>,
    /// Memories for which it is not asked again.
    in_vain: Vec<(MemoryKind, NoReclaim)>,
    /// The last request was for other limits: that it was a moment ago says nothing about the next one, which is waited for.
    forgiven: bool,
    /// The last request came too soon, though we knew of none before.
    refused: bool,
}

impl Reclaims {
    /// What comes first for this decision. `facts`: of the memory that is its reason; `parts`: who in the process can be
    /// asked, `None` as long as that is not known.
    pub fn rung(
        &self,
        policy: &Recycle,
        parts: Option<Parts>,
        decision: &Decision,
        facts: Option<&SeriesFacts>,
        now: Duration,
    ) -> Rung {
        let Some((series, charged)) = memory_of(decision, facts) else {
            return Rung::Replace(NoReclaim::NotMemory);
        };
        if !policy.reclaim {
            return Rung::Replace(NoReclaim::Off);
        }
        if let Some((_, why)) = self.in_vain.iter().find(|(of, _)| *of == series) {
            return Rung::Replace(*why);
        }
        if let Some(asked) = self.asked {
            let limit = if decision.action >= Action::DrainNow {
                policy.reclaim_limit_hard
            } else {
                policy.reclaim_limit
            };
            let late = now.saturating_sub(asked.at) >= limit;
            return if late { Rung::Replace(NoReclaim::NoAnswer) } else { Rung::Wait };
        }
        if !parts.unwrap_or_default().have(series) {
            return Rung::Replace(NoReclaim::CannotAsk);
        }
        let Some(last) = self.last else { return Rung::Reclaim };
        let since = now.saturating_sub(last);
        if decision.reason == Some(Reason::Growth) {
            let fell = self.fell.iter().find(|fell| fell.series == series);
            if let Some(Fell { at, before, bytes, .. }) = fell
                && (charged < *before || since < policy.reclaim_again)
            {
                return Rung::Rest { seconds: now.saturating_sub(*at).as_secs(), bytes: *bytes };
            }
            if since < policy.reclaim_again {
                // For another memory, or by an operator: it is asked for this one when it is time.
                return Rung::Wait;
            }
        }
        if since < policy.reclaim_again {
            if (self.forgiven || self.refused) && decision.action < Action::DrainNow {
                return Rung::Wait;
            }
            return Rung::Replace(NoReclaim::TooOften { seconds: since.as_secs() });
        }
        Rung::Reclaim
    }

    /// It is asked now, for this decision or by an operator.
    pub fn asked(
        &mut self,
        policy: &Recycle,
        cause: Option<(&Decision, Option<&SeriesFacts>)>,
        now: Duration,
    ) {
        let cause = cause.and_then(|(decision, facts)| {
            let (series, before) = memory_of(decision, facts)?;
            let own = matches!(
                decision.reason,
                Some(Reason::HostSoft | Reason::HostHard | Reason::VramSoft | Reason::VramHard)
            );
            // The other limits are about more than this process, or far away.
            let reach = decision.limit_bytes.filter(|_| own).map_or(before, |limit| limit.min(before));
            let fresh = facts.and_then(SeriesFacts::fresh).filter(|fresh| *fresh < reach);
            let most = match fresh {
                Some(fresh) => fresh.saturating_add(scale(reach - fresh, 1.0 - policy.reclaim_room)),
                None => reach.saturating_sub(1),
            };
            Some(Cause { series, before, most })
        });
        self.asked = Some(Asked { at: now, cause, answered: None });
    }

    /// Limits have changed: what was in vain for the old ones may help for the new ones. When it was asked last stays known: a
    /// process that is asked again too soon refuses.
    pub fn forgive(&mut self) {
        self.in_vain.clear();
        self.fell.clear();
        self.forgiven = true;
    }

    /// The answer is there, or will not come. True if a reading that begins from now on says what it was worth.
    pub fn answered(&mut self, outcome: Outcome, now: Duration) -> bool {
        let Some(asked) = &mut self.asked else { return false };
        if matches!(outcome, Outcome::NoAnswer | Outcome::Nobody) {
            if let Some(cause) = asked.cause {
                self.in_vain.push((cause.series, NoReclaim::NoAnswer));
            }
            self.asked = None;
            return false;
        }
        if outcome == Outcome::TooSoon && !self.refused {
            // It knows of a request that we do not know of. Once more, when that is long ago.
            (self.asked, self.last, self.refused) = (None, Some(now), true);
            return false;
        }
        asked.answered = Some(now);
        true
    }

    /// A reading that was begun at this time, with what the process holds of a memory; `None` if it completes no request.
    pub fn read(&mut self, begun: Duration, charged: impl Fn(MemoryKind) -> Option<u64>) -> Option<Worth> {
        let Some(Asked { cause, answered: Some(at), .. }) = self.asked else { return None };
        if begun < at {
            return None;
        }
        self.asked = None;
        let mut worth = Worth::Unknown;
        // What could not be read is no sign that it did not help; the next decision tells.
        if let Some(cause) = cause
            && let Some(after) = charged(cause.series)
        {
            let Cause { series, before, .. } = cause;
            let bytes = before.saturating_sub(after);
            self.fell.retain(|fell| fell.series != series);
            if after <= cause.most {
                worth = Worth::Enough;
                self.fell.push(Fell { series, at, before, bytes });
            } else {
                worth = Worth::NotEnough;
                self.in_vain.push((cause.series, NoReclaim::NoHelp { bytes }));
            }
        }
        self.last = Some(at);
        (self.forgiven, self.refused) = (false, false);
        Some(worth)
    }
}

/// The memory that a decision is about and that a process could give back, and how much it holds of it.
fn memory_of(decision: &Decision, facts: Option<&SeriesFacts>) -> Option<(MemoryKind, u64)> {
    let wanted = matches!(decision.action, Action::RecycleWhenQuiet | Action::DrainNow);
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
