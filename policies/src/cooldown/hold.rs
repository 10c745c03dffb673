//! Reasons for which a due recycle is held back.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recycle::Reason;
use crate::sample::MemoryKind;
use crate::units::{ByteSize, format_span};

/// Rule for the least time between two recycles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseRule {
    /// `policy.min_interval` applies.
    #[default]
    MinInterval,
    /// `policy.min_interval_hard` applies.
    MinIntervalHard,
    /// A multiple of the load time applies.
    LoadTime,
}

impl PauseRule {
    const fn words(self) -> &'static str {
        match self {
            Self::MinInterval => "`policy.min_interval`",
            Self::MinIntervalHard => "`policy.min_interval_hard`",
            Self::LoadTime => "the time that a load takes",
        }
    }
}

/// Reason for which a due recycle is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum HoldReason {
    /// The last recycle was too recent.
    TooSoon {
        /// Time until a recycle is allowed, in whole seconds, rounded up.
        seconds_left: u64,
        /// Rule that sets the interval.
        #[serde(default)]
        rule: PauseRule,
    },
    /// The last drain was abandoned at its deadline: requests still ran, and memory was not short.
    LongRequests {
        /// Time until the next drain, in whole seconds, rounded up.
        seconds_left: u64,
    },
    /// Recycling did not help several times in a row, so the policy is off until an operator acts.
    Futile {
        /// Consecutive recycles that did not help.
        recycles: u32,
        /// Memory that did not shrink.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        series: Option<MemoryKind>,
    },
    /// Growth caused several recycles within a few hours, so growth causes no more until an operator acts.
    /// Budgets still apply.
    GrowthGoesOn {
        /// Recycles because of growth.
        recycles: u32,
        /// Time span in seconds.
        seconds: u64,
    },
    /// The answers of two processes in a row became faulty, so such answers cause no replacement until an
    /// operator acts.
    AnswersStayFaulty,
    /// Memory did not return after the process exited, so the driver leaks, not the process.
    DriverLeak {
        /// Memory in question.
        series: MemoryKind,
        /// Missing bytes.
        bytes: u64,
    },
    /// The next process could not start, so stopping the present process would only cause an outage.
    CannotStart,
    /// The budget is below the working set of the model, so the budget causes no replacement until an
    /// operator acts or the process exceeds the suggested budget.
    BudgetTooSmall {
        /// Memory in question.
        series: MemoryKind,
        /// Budget in question: [`Reason::HostSoft`] or a similar one.
        reason: Reason,
        /// Figures of the budget.
        #[serde(flatten)]
        shortfall: BudgetShortfall,
    },
}

impl std::fmt::Display for HoldReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooSoon { seconds_left, rule } => write!(
                f,
                "the last replacement was too recent: {seconds_left} s to wait by {}; the machine itself is not short \
                 of memory",
                rule.words()
            ),
            Self::LongRequests { seconds_left } => write!(
                f,
                "requests were still running at the drain deadline, and the machine has memory, so it continues to \
                 serve: the next drain is in {seconds_left} s"
            ),
            Self::Futile { recycles, series } => {
                let (memory, off, cure) = match series {
                    Some(vram @ MemoryKind::Vram(_)) => (
                        vram.noun(),
                        "replacing because of it",
                        "raise the budget, give it less context or fewer layers on the GPU",
                    ),
                    Some(MemoryKind::Host) | None => {
                        ("memory".to_owned(), "replacing by policy", "raise the budget, lower --cache-ram")
                    }
                };
                write!(
                    f,
                    "the last {recycles} replacements did not bring {memory} down, so {off} is off: {cure} or change \
                     the build, then `llama-warden restart` switches it on again"
                )
            }
            Self::GrowthGoesOn { recycles, seconds } => write!(
                f,
                "{recycles} replacements because of growth within {} did not cure it, so growth replaces nothing any \
                 more; budgets still do. Raise the budget, pin --cache-ram or change the build, then `llama-warden \
                 restart` switches it on again",
                format_span(Duration::from_secs(*seconds))
            ),
            Self::AnswersStayFaulty => f.write_str(
                "the answers of a second process became faulty a short time after a replacement for such answers, so \
                 they replace nothing any more. The model file or the build may be damaged: compare the file's \
                 checksum or try another build, then `llama-warden restart` switches it on again",
            ),
            Self::BudgetTooSmall { series, reason, shortfall } => shortfall.describe(f, *series, *reason),
            Self::CannotStart => f.write_str(
                "something that the next process needs is missing, so the running one is kept; it is replaced when \
                 that is there",
            ),
            Self::DriverLeak { series, bytes } => {
                let cure = match series {
                    MemoryKind::Host => "another process or a kernel driver holds it: look there",
                    MemoryKind::Vram(_) => {
                        "another process or the driver holds it: look at `nvidia-smi`, and reset the GPU or update \
                         the driver"
                    }
                };
                write!(
                    f,
                    "{} of {} did not come back when the process had exited, so restarts do not help: {cure}",
                    ByteSize(*bytes),
                    series.noun()
                )
            }
        }
    }
}

/// Figures of a budget that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetShortfall {
    /// Budget in bytes.
    #[serde(rename = "budget_bytes")]
    pub budget: u64,
    /// Bytes when a fresh process became ready; `None` if not read.
    #[serde(rename = "ready_bytes")]
    pub at_ready: Option<u64>,
    /// Most bytes that a process held soon after it became ready, with its first work.
    #[serde(rename = "held_bytes")]
    pub held: u64,
    /// Budget in bytes that suffices for the model.
    #[serde(rename = "suggested_bytes")]
    pub suggested: u64,
    /// Futile replacements for the budget.
    pub tries: u32,
}

impl BudgetShortfall {
    /// Returns the figures as a sentence.
    pub fn figures(&self, series: MemoryKind, reason: Reason) -> String {
        let memory = series.noun();
        let mut text = format!(
            "the budget is below what this model needs to work: `{}` is {}",
            budget_key(reason),
            ByteSize(self.budget)
        );
        if let Some(at_ready) = self.at_ready {
            let _infallible =
                write!(text, ", a fresh process holds {} of {memory} at ready", ByteSize(at_ready));
        }
        if self.at_ready.is_none_or(|at_ready| self.held > at_ready) {
            let _infallible = write!(text, ", {} after work", ByteSize(self.held));
        }
        text
    }

    /// Returns the recommended action.
    pub fn advice(&self, reason: Reason) -> String {
        format!(
            "set `{}` to {} or more, or give the model less context",
            budget_key(reason),
            ByteSize(self.suggested).round_up()
        )
    }

    fn describe(
        &self,
        f: &mut std::fmt::Formatter<'_>,
        series: MemoryKind,
        reason: Reason,
    ) -> std::fmt::Result {
        let tried = match self.tries {
            0 => "a replacement would bring nothing".to_owned(),
            tries => format!("{tries} replacements were undone at once"),
        };
        write!(
            f,
            "{}; {tried}. Below {} nothing is replaced for it: {}",
            self.figures(series, reason),
            ByteSize(self.suggested),
            self.advice(reason)
        )
    }
}

const fn budget_key(reason: Reason) -> &'static str {
    match reason {
        Reason::HostHard => "policy.host.hard",
        Reason::VramSoft => "policy.vram.soft",
        Reason::VramHard => "policy.vram.hard",
        _ => "policy.host.soft",
    }
}
