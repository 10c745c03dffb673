//! Finds budgets below a model's working set: replacing a process for such a budget never helps.
//!
//! ```text
//!   fresh process at or above the budget ────────────────────────────────────┐
//!   exceeded soon ── replaced ── exceeded soon ── replaced ── exceeded soon ─┴─> barred below the suggested budget
//!                                                 exceeded late ──> the count restarts
//! ```
//!
//! A leak exceeds its budget late; a working set exceeds it with the first requests, although the process was
//! below it when it became ready. Therefore this module compares the time and work from then until the first
//! reading above the budget.
//!
//! A barred budget is replaced by the suggested one until an operator acts. If a young process grows beyond
//! the suggested budget, the suggestion rises; if an older process does, it is recycled.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::hold::{BudgetShortfall, HoldReason};
use super::{CooldownQuery, RecycleCooldown};
use crate::book::held::HeldMemory as Seen;
use crate::recycle::{Reason, RecycleAction, RecycleFacts, RecyclePolicy, SeriesFacts};
use crate::sample::MemoryKind;
use crate::units::scale_bytes;

/// Futile replacements that bar a budget: two in a row are no accident, and each costs a load of the model.
const BUDGET_TRIES: u32 = 2;

/// A process's state at a reading above a budget.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BudgetPass {
    /// Budget in question: [`Reason::HostSoft`] or a similar one.
    pub reason: Reason,
    /// Memory in question.
    pub series: MemoryKind,
    /// Budget in bytes.
    pub budget: u64,
    /// Bytes when the process became ready; `None` if not read.
    pub at_ready: Option<u64>,
    /// Bytes at this reading.
    pub held: u64,
    /// Time since ready.
    pub age: Duration,
    /// Answered requests since ready.
    pub requests: u64,
    /// The detector reports a leak, so the budget may suffice for the working set.
    pub leaks: bool,
}

impl BudgetPass {
    /// Returns the exceeded budgets. Estimates are ignored: they may include other programs' memory.
    pub fn find(series: &[SeriesFacts], age: Duration, requests: u64) -> Vec<Self> {
        let known = series.iter().filter(|facts| !facts.estimated);
        let passed = known.flat_map(|facts| {
            let (soft, hard) = budget_reasons(facts.series);
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

    /// Returns true if the process exceeded the budget so soon that a new process would do the same.
    pub(super) fn is_soon(&self, load_time: Option<Duration>, policy: &RecyclePolicy) -> bool {
        let hard = matches!(self.reason, Reason::HostHard | Reason::VramHard);
        let action = if hard { RecycleAction::DrainNow } else { RecycleAction::RecycleWhenQuiet };
        let ask = CooldownQuery { load_time, unit: 0.5, ..CooldownQuery::default() };
        let (pause, _) = super::least_interval(action, &ask, policy);
        let loads = load_time.unwrap_or_default().mul_f64(policy.common.budget_loads.max(0.0));
        !self.leaks && (self.age < pause.max(loads) || self.requests <= policy.common.budget_requests)
    }
}

/// The budgets that one process has exceeded, each at the first reading above it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassedBudgets(Vec<BudgetPass>);

impl PassedBudgets {
    /// Adds the facts of a judgement. Returns the budgets that these facts show to be too small.
    pub fn add_facts(
        &mut self,
        facts: &RecycleFacts,
        load_time: Option<Duration>,
        cooldown: &mut RecycleCooldown,
        policy: &RecyclePolicy,
    ) -> Vec<HoldReason> {
        let passed = BudgetPass::find(&facts.series, facts.age, facts.work.requests);
        let news = passed.into_iter().filter_map(|now| {
            if self.find(now.reason, Some(now.series)).is_none() {
                self.0.push(now);
            }
            let first = *self.find(now.reason, Some(now.series))?;
            cooldown.budgets.record_pass(&first, &now, load_time, policy)
        });
        news.collect()
    }

    /// Returns the first reading above a budget; `None` if the budget was not exceeded.
    pub fn find(&self, reason: Reason, series: Option<MemoryKind>) -> Option<&BudgetPass> {
        self.0.iter().find(|known| known.reason == reason && Some(known.series) == series)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BudgetRecord {
    reason: Reason,
    series: MemoryKind,
    /// Consecutive replacements of processes that exceeded the budget soon after they became ready.
    tries: u32,
    shortfall: Option<BudgetShortfall>,
}

/// Finds budgets too small for what earlier processes held without a leak. `total`: size of a memory.
pub fn find_shortfalls(
    policy: &RecyclePolicy,
    seen: &[Seen],
    total: impl Fn(MemoryKind) -> Option<u64>,
) -> Vec<(MemoryKind, Reason, BudgetShortfall)> {
    let of_one = |seen: &Seen| {
        let (series, at_ready, held) = (seen.series, seen.ready, seen.most.max(seen.ready));
        let facts = SeriesFacts { total: total(series), ..SeriesFacts::from_bytes(series, Some(held)) };
        let too_small = move |budget: u64| {
            // A process that is replaced at its budget has grown slightly beyond it by then.
            at_ready >= budget || held > scale_bytes(budget, policy.levels.kill_over)
        };
        let (soft, hard) = budget_reasons(series);
        let budgets = policy.budget(&facts);
        let all = [(soft, budgets.soft), (hard, budgets.hard)].into_iter();
        let suggested = scale_bytes(held, policy.levels.host_soft);
        all.filter_map(move |(reason, budget)| {
            let budget = budget.filter(|budget| too_small(*budget))?;
            let shortfall = BudgetShortfall { budget, at_ready: Some(at_ready), held, suggested, tries: 0 };
            Some((series, reason, shortfall))
        })
    };
    seen.iter().flat_map(of_one).collect()
}

const fn budget_reasons(series: MemoryKind) -> (Reason, Reason) {
    match series {
        MemoryKind::Host => (Reason::HostSoft, Reason::HostHard),
        MemoryKind::Vram(_) => (Reason::VramSoft, Reason::VramHard),
    }
}

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

    /// Records a judgement of a process over a budget; returns the reason that bars its recycles if the
    /// budget has proved too small. `first`: the first reading above the budget; `now`: the present one.
    pub(super) fn record_pass(
        &mut self,
        first: &BudgetPass,
        now: &BudgetPass,
        load_time: Option<Duration>,
        policy: &RecyclePolicy,
    ) -> Option<HoldReason> {
        let common = &policy.common;
        let entry = self.entry(now.reason, now.series);
        let suggested = scale_bytes(now.held, policy.levels.host_soft);
        let fresh_is_over = first.at_ready.is_some_and(|at_ready| at_ready >= now.budget);
        if !fresh_is_over {
            // Earlier ready processes were above the budget; this one was not, so forget that shortfall.
            entry.shortfall = entry.shortfall.filter(|known| known.tries > 0);
        }
        if let Some(known) = &mut entry.shortfall {
            known.budget = now.budget;
            if now.is_soon(load_time, policy) {
                known.held = known.held.max(now.held);
                known.suggested = known.suggested.max(scale_bytes(known.held, policy.levels.host_soft));
            }
            return None;
        }
        // `max_futile = 0` means unlimited replacements.
        let tried = common.max_futile > 0 && entry.tries >= BUDGET_TRIES.min(common.max_futile);
        if !(fresh_is_over || tried && first.is_soon(load_time, policy)) {
            return None;
        }
        let shortfall = BudgetShortfall {
            budget: now.budget,
            at_ready: now.at_ready,
            held: now.held,
            suggested,
            tries: entry.tries,
        };
        entry.shortfall = Some(shortfall);
        Some(HoldReason::BudgetTooSmall { series: now.series, reason: now.reason, shortfall })
    }

    pub(super) fn record_replacement(
        &mut self,
        first: &BudgetPass,
        load_time: Option<Duration>,
        policy: &RecyclePolicy,
    ) {
        let entry = self.entry(first.reason, first.series);
        entry.tries = if first.is_soon(load_time, policy) { entry.tries.saturating_add(1) } else { 0 };
    }

    /// Returns the reason that bars a budget as too small, if the process holds less than the suggested one.
    /// A hard budget that is too small bars the soft budget as well.
    pub(super) fn find_bar(
        &self,
        reason: Reason,
        series: MemoryKind,
        held: Option<u64>,
    ) -> Option<HoldReason> {
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
            .map(|(reason, shortfall)| HoldReason::BudgetTooSmall { series, reason, shortfall })
    }

    /// Returns true if this process soon exceeded a budget, like its predecessor, which was replaced for it.
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
