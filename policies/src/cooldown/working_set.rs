//! Budgets below what a model needs to work: replacing a process for one brings nothing, however often it is done.
//!
//! ```text
//!   fresh process at or above the budget ────────────────────────────┐
//!   passed soon ── replaced ── passed soon ── replaced ── passed soon ┴─> barred below the suggested budget
//!                                                 passed late ──> the count starts again
//! ```
//!
//! A reading at ready shows nothing of the prompts, caches and buffers that work brings, so a replacement can look like a
//! success and be undone by the first request. Time and work between ready and the budget tell the two apart. A leak passes
//! its budget late, or is known as a leak; a working set passes it with the first requests.
//!
//! A barred budget is replaced by the suggested one until an operator acts. Memory that grows beyond the suggested budget
//! while the process is young raises it; memory that passes the suggested budget later is growth, and recycles again.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Ask, Cooldown, Held};
use crate::book::held::Held as Seen;
use crate::recycle::{Action, Facts, Reason, RecyclePolicy, SeriesFacts};
use crate::sample::MemoryKind;
use crate::units::{ByteSize, scale};

/// Twice in a row is no accident, and each try costs the model a load.
const BUDGET_TRIES: u32 = 2;

/// A process that has passed a budget of its model: what it held, and how long and how much it had worked by then.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BudgetPass {
    /// [`Reason::HostSoft`] and its like: which budget.
    pub reason: Reason,
    /// Which memory.
    pub series: MemoryKind,
    /// The budget in bytes.
    pub budget: u64,
    /// Bytes at ready; `None` if that was not read.
    pub at_ready: Option<u64>,
    /// Bytes at this reading.
    pub held: u64,
    /// Time since ready.
    pub age: Duration,
    /// Requests answered since ready.
    pub requests: u64,
    /// The detector says that it leaks: then the budget says nothing about work.
    pub leaks: bool,
}

impl BudgetPass {
    /// The budgets that a process passes at this reading. Estimates say nothing here: they may be somebody else's memory.
    pub fn find(series: &[SeriesFacts], age: Duration, requests: u64) -> Vec<Self> {
        let known = series.iter().filter(|facts| !facts.estimated);
        let passed = known.flat_map(|facts| {
            let (soft, hard) = reasons(facts.series);
            let leaks = facts.growth.as_ref().is_some_and(|growth| growth.verdict.leaks());
            [(soft, facts.budget.soft), (hard, facts.budget.hard)].into_iter().filter_map(
                move |(reason, budget)| {
                    let (held, budget) = (facts.charged?, budget?);
                    let (series, at_ready) = (facts.series, facts.at_ready);
                    (held >= budget).then_some(Self {
                        reason,
                        series,
                        budget,
                        at_ready,
                        held,
                        age,
                        requests,
                        leaks,
                    })
                },
            )
        });
        passed.collect()
    }

    /// Whether it came so soon after ready that another process would pass the budget as well.
    pub(super) fn is_soon(&self, load_time: Option<Duration>, policy: &RecyclePolicy) -> bool {
        let hard = matches!(self.reason, Reason::HostHard | Reason::VramHard);
        let action = if hard { Action::DrainNow } else { Action::RecycleWhenQuiet };
        let ask = Ask { load_time, unit: 0.5, ..Ask::default() };
        let (pause, _) = super::interval(action, &ask, policy);
        let loads = load_time.unwrap_or_default().mul_f64(policy.common.budget_loads.max(0.0));
        !self.leaks && (self.age < pause.max(loads) || self.requests <= policy.common.budget_requests)
    }
}

/// The budgets that one process has passed, each as it was at the first reading over it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Passed(Vec<BudgetPass>);

impl Passed {
    /// Takes the facts of a judgement in. Returns the budgets that this shows to be too small.
    pub fn note(
        &mut self,
        facts: &Facts,
        load_time: Option<Duration>,
        cooldown: &mut Cooldown,
        policy: &RecyclePolicy,
    ) -> Vec<Held> {
        let passed = BudgetPass::find(&facts.series, facts.age, facts.work.requests);
        let news = passed.into_iter().filter_map(|now| {
            if self.find(now.reason, Some(now.series)).is_none() {
                self.0.push(now);
            }
            let first = *self.find(now.reason, Some(now.series))?;
            cooldown.budgets.note_pass(&first, &now, load_time, policy)
        });
        news.collect()
    }

    /// The reading at which a budget was passed; `None` if it was not.
    pub fn find(&self, reason: Reason, series: Option<MemoryKind>) -> Option<&BudgetPass> {
        self.0.iter().find(|known| known.reason == reason && Some(known.series) == series)
    }
}

/// One budget of a model, and what is known against it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BudgetRecord {
    reason: Reason,
    series: MemoryKind,
    /// Replacements in a row for which it was passed soon.
    tries: u32,
    /// It is below what the model needs.
    shortfall: Option<Shortfall>,
}

/// The figures of a budget that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortfall {
    /// The budget in bytes.
    #[serde(rename = "budget_bytes")]
    pub budget: u64,
    /// Bytes that a fresh process held at ready; `None` if that was not read.
    #[serde(rename = "ready_bytes")]
    pub at_ready: Option<u64>,
    /// The most bytes that a process held after work.
    #[serde(rename = "held_bytes")]
    pub held: u64,
    /// A budget in bytes under which the model can work.
    #[serde(rename = "suggested_bytes")]
    pub suggested: u64,
    /// Replacements that were made for the budget in vain.
    pub tries: u32,
}

impl Shortfall {
    /// What is known, in a sentence.
    pub fn figures(&self, series: MemoryKind, reason: Reason) -> String {
        let memory = match series {
            MemoryKind::Host => "host memory".to_owned(),
            MemoryKind::Vram(gpu) => format!("VRAM on GPU {}", gpu.0),
        };
        let mut text = format!(
            "the budget is below what this model needs to work: `{}` is {}",
            key(reason),
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

    /// What to do about it.
    pub fn advice(&self, reason: Reason) -> String {
        format!(
            "set `{}` to {} or more, or give the model less context",
            key(reason),
            ByteSize(self.suggested).round_up()
        )
    }

    pub(super) fn describe(
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

/// The key of the configuration that sets a budget.
const fn key(reason: Reason) -> &'static str {
    match reason {
        Reason::HostHard => "policy.host.hard",
        Reason::VramSoft => "policy.vram.soft",
        Reason::VramHard => "policy.vram.hard",
        _ => "policy.host.soft",
    }
}

/// Budgets that are too small for what earlier processes of the model were seen to hold while they did not leak. `total`: bytes of a
/// memory of this machine, as far as that is known.
pub fn find_shortfalls(
    policy: &RecyclePolicy,
    seen: &[Seen],
    total: impl Fn(MemoryKind) -> Option<u64>,
) -> Vec<(MemoryKind, Reason, Shortfall)> {
    let of_one = |seen: &Seen| {
        let (series, at_ready, held) = (seen.series, seen.ready, seen.most.max(seen.ready));
        let facts = SeriesFacts { total: total(series), ..SeriesFacts::of(series, Some(held)) };
        let too_small = move |budget: u64| {
            // A process that is replaced at its budget holds a little more than that by then.
            at_ready >= budget || held > scale(budget, policy.levels.kill_over)
        };
        let (soft, hard) = reasons(series);
        let budgets = policy.budget(&facts);
        let all = [(soft, budgets.soft), (hard, budgets.hard)].into_iter();
        let suggested = scale(held, policy.levels.host_soft);
        all.filter_map(move |(reason, budget)| {
            let budget = budget.filter(|budget| too_small(*budget))?;
            let shortfall = Shortfall { budget, at_ready: Some(at_ready), held, suggested, tries: 0 };
            Some((series, reason, shortfall))
        })
    };
    seen.iter().flat_map(of_one).collect()
}

/// The reasons that passing the soft and the hard budget of a memory are.
const fn reasons(series: MemoryKind) -> (Reason, Reason) {
    match series {
        MemoryKind::Host => (Reason::HostSoft, Reason::HostHard),
        MemoryKind::Vram(_) => (Reason::VramSoft, Reason::VramHard),
    }
}

/// All budgets of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BudgetRecords(Vec<BudgetRecord>);

impl BudgetRecords {
    fn entry(&mut self, reason: Reason, series: MemoryKind) -> &mut BudgetRecord {
        let found = self.0.iter().position(|known| (known.reason, known.series) == (reason, series));
        let index = found.unwrap_or_else(|| {
            self.0.push(BudgetRecord { reason, series, tries: 0, shortfall: None });
            self.0.len() - 1
        });
        &mut self.0[index]
    }

    /// A process that is over a budget was judged. `first` is the reading at which it passed the budget, `now` the present
    /// one. Returns what this switches off, if it does.
    pub(super) fn note_pass(
        &mut self,
        first: &BudgetPass,
        now: &BudgetPass,
        load_time: Option<Duration>,
        policy: &RecyclePolicy,
    ) -> Option<Held> {
        let common = &policy.common;
        let entry = self.entry(now.reason, now.series);
        let suggested = scale(now.held, policy.levels.host_soft);
        let fresh_is_over = first.at_ready.is_some_and(|at_ready| at_ready >= now.budget);
        if !fresh_is_over {
            // An earlier process was over it at ready, and this one was not.
            entry.shortfall = entry.shortfall.filter(|known| known.tries > 0);
        }
        if let Some(known) = &mut entry.shortfall {
            known.budget = now.budget;
            if now.is_soon(load_time, policy) {
                known.held = known.held.max(now.held);
                known.suggested = known.suggested.max(scale(known.held, policy.levels.host_soft));
            }
            return None;
        }
        // `max_futile = 0` asks for replacements without an end.
        let tried = common.max_futile > 0 && entry.tries >= BUDGET_TRIES.min(common.max_futile);
        if !(fresh_is_over || tried && first.is_soon(load_time, policy)) {
            return None;
        }
        let shortfall = Shortfall {
            budget: now.budget,
            at_ready: now.at_ready,
            held: now.held,
            suggested,
            tries: entry.tries,
        };
        entry.shortfall = Some(shortfall);
        Some(Held::BudgetTooSmall { series: now.series, reason: now.reason, shortfall })
    }

    /// A process has taken the place of one that had passed a budget.
    pub(super) fn note_replaced(
        &mut self,
        first: &BudgetPass,
        load_time: Option<Duration>,
        policy: &RecyclePolicy,
    ) {
        let entry = self.entry(first.reason, first.series);
        entry.tries = if first.is_soon(load_time, policy) { entry.tries.saturating_add(1) } else { 0 };
    }

    /// Whether a budget is known to be too small for a process that holds this much. A hard budget that is too small makes the
    /// soft one below it too small as well.
    pub(super) fn bars(&self, reason: Reason, series: MemoryKind, held: Option<u64>) -> Option<Held> {
        let above = match reason {
            Reason::HostSoft => Some(Reason::HostHard),
            Reason::VramSoft => Some(Reason::VramHard),
            _ => None,
        };
        let known = self.0.iter().filter(|known| {
            known.series == series && (known.reason == reason || Some(known.reason) == above)
        });
        known
            .filter_map(|known| Some((known.reason, known.shortfall?)))
            .filter(|(_, shortfall)| held.is_none_or(|held| held < shortfall.suggested))
            .max_by_key(|(_, shortfall)| shortfall.suggested)
            .map(|(reason, shortfall)| Held::BudgetTooSmall { series, reason, shortfall })
    }

    /// Whether a process passed a budget soon that the one before it had been replaced for, as soon.
    pub(super) fn is_repeated(
        &self,
        first: &BudgetPass,
        load_time: Option<Duration>,
        policy: &RecyclePolicy,
    ) -> bool {
        let of = |known: &&BudgetRecord| (known.reason, known.series) == (first.reason, first.series);
        first.is_soon(load_time, policy) && self.0.iter().find(of).is_some_and(|known| known.tries > 0)
    }
}
