//! Holds back recycles by policy: too soon after the last one, or when recycling has proved futile.
//!
//! | reason | details | held back until |
//! |---|---|---|
//! | too soon | the last recycle is more recent than an interval, or a multiple of the load time | time passes |
//! | futile | several times the new process was as big as the old one | an operator restarts the model |
//! | budget too small | a fresh process exceeds it when ready or at its first work | an operator restarts the model |
//! | growth | several recycles because of growth in a few hours | an operator restarts the model |
//! | answers | the answers of a second process became faulty within a few hours | an operator restarts the model |
//! | driver | memory did not return after the process exited | memory returns, or an operator restarts the model |
//!
//! Each kind of memory counts separately: a recycle that does not help VRAM may still help the host.

mod hold;
#[cfg(test)]
mod tests;
pub mod working_set;
#[cfg(test)]
mod working_set_tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::names::GenerationId;
use crate::recycle::{Reason, RecycleAction, RecycleDecision, RecyclePolicy};
use crate::sample::MemoryKind;
use working_set::{BudgetPass, BudgetRecords};

pub use hold::{BudgetShortfall, HoldReason, PauseRule};

/// Facts for a cooldown check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CooldownQuery {
    /// Present time, as the time since the caller's epoch.
    pub now: Duration,
    /// Time that the last start took from spawn to ready; `None` if unknown.
    pub load_time: Option<Duration>,
    /// Random number in `[0, 1)`, fixed for a process, for the jitter.
    pub unit: f64,
    /// Bytes that the process holds of the memory in question; `None` if unknown.
    pub held: Option<u64>,
}

/// History of one model's recycles.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecycleCooldown {
    last: Option<Duration>,
    /// Consecutive recycles that did not help, by kind of memory.
    futile: Vec<(MemoryKind, u32)>,
    growth: Vec<Duration>,
    growth_off: Option<HoldReason>,
    /// Last recycle because of faulty answers, and the newest process at that time.
    #[serde(default)]
    answers: Option<(Duration, GenerationId)>,
    /// True if a recycle does not help against faulty answers.
    #[serde(default)]
    answers_off: bool,
    /// Consecutive exits after which memory was missing, and the bytes missing after the last exit.
    unreturned: Vec<(MemoryKind, u32, u64)>,
    #[serde(default)]
    budgets: BudgetRecords,
}

impl RecycleCooldown {
    /// Checks that a recycle for this decision may happen now.
    ///
    /// # Errors
    /// The cooldown holds the recycle back, for the returned reason.
    pub fn check(
        &self,
        decision: &RecycleDecision,
        ask: &CooldownQuery,
        policy: &RecyclePolicy,
    ) -> Result<(), HoldReason> {
        let barred = |reason| self.find_bar(reason, decision.series, ask.held, policy);
        if let Some(held) = decision.reason.and_then(barred) {
            return Err(held);
        }
        // Intervals prevent useless recycles; they must not delay one while the machine runs out of memory.
        if decision.threat || decision.action == RecycleAction::KillNow {
            return Ok(());
        }
        let (interval, rule) = least_interval(decision.action, ask, policy);
        let allowed = self.last.map_or(Duration::ZERO, |last| last.saturating_add(interval));
        if ask.now < allowed {
            let left = allowed.saturating_sub(ask.now);
            let seconds_left = left.as_secs() + u64::from(left.subsec_nanos() > 0);
            return Err(HoldReason::TooSoon { seconds_left, rule });
        }
        Ok(())
    }

    /// Returns the reason that bars a recycle until an operator acts. `held`: bytes of the process.
    pub fn find_bar(
        &self,
        reason: Reason,
        series: Option<MemoryKind>,
        held: Option<u64>,
        policy: &RecyclePolicy,
    ) -> Option<HoldReason> {
        if reason.is_answers() && self.answers_off {
            return Some(HoldReason::AnswersStayFaulty);
        }
        if !reason.is_memory() {
            return None;
        }
        let series = series.unwrap_or(MemoryKind::Host);
        self.budgets.find_bar(reason, series, held).or_else(|| self.check_cure(reason, series, policy).err())
    }

    /// Records a recycle because of a budget. `first`: the first reading above that budget.
    pub fn record_replacement(
        &mut self,
        first: &BudgetPass,
        load_time: Option<Duration>,
        policy: &RecyclePolicy,
    ) {
        self.budgets.record_replacement(first, load_time, policy);
    }

    /// Returns true if a recycle for this budget is futile: process and predecessor soon exceeded the budget.
    pub fn is_repeated(
        &self,
        first: &BudgetPass,
        load_time: Option<Duration>,
        policy: &RecyclePolicy,
    ) -> bool {
        self.budgets.is_repeated(first, load_time, policy)
    }

    /// Records that the process after a recycle is ready. Intervals exclude the load time.
    pub fn record_ready(&mut self, now: Duration) {
        self.last = self.last.map(|last| last.max(now));
    }

    fn check_cure(
        &self,
        reason: Reason,
        series: MemoryKind,
        policy: &RecyclePolicy,
    ) -> Result<(), HoldReason> {
        let missing = self.unreturned.iter().find(|(of, exits, _)| {
            *of == series && policy.levels.unreturned_exits > 0 && *exits >= policy.levels.unreturned_exits
        });
        if let Some((series, _, bytes)) = missing {
            return Err(HoldReason::DriverLeak { series: *series, bytes: *bytes });
        }
        let futile = self.futile.iter().find(|(of, _)| *of == series).map_or(0, |(_, count)| *count);
        if policy.common.max_futile > 0 && futile >= policy.common.max_futile {
            return Err(HoldReason::Futile { recycles: futile, series: Some(series) });
        }
        if reason == Reason::Growth
            && let Some(held) = self.growth_off
        {
            return Err(held);
        }
        Ok(())
    }

    /// Records a recycle by policy; returns the reason that bars further recycles if this is one too many.
    pub fn record_start(
        &mut self,
        now: Duration,
        reason: Reason,
        policy: &RecyclePolicy,
    ) -> Option<HoldReason> {
        self.last = Some(now);
        if reason != Reason::Growth || policy.common.growth_recycles == 0 {
            return None;
        }
        self.growth.retain(|at| now.saturating_sub(*at) < policy.common.growth_window);
        self.growth.push(now);
        let recycles = u32::try_from(self.growth.len()).unwrap_or(u32::MAX);
        if recycles < policy.common.growth_recycles {
            return None;
        }
        let held = HoldReason::GrowthGoesOn { recycles, seconds: policy.common.growth_window.as_secs() };
        self.growth_off = Some(held);
        Some(held)
    }

    /// Records a recycle because of faulty answers. `newest`: the model's newest process so far.
    pub fn record_answers_recycle(&mut self, now: Duration, newest: GenerationId) {
        self.answers = Some((now, newest));
    }

    /// Records that the answers of this process have become faulty. Returns the reason that bars further
    /// recycles if it was started after a recent recycle for such answers: a recycle does not help. A replica
    /// that ran at that recycle may have become faulty for the same cause.
    pub fn record_faulty_answers(
        &mut self,
        now: Duration,
        process: GenerationId,
        policy: &RecyclePolicy,
    ) -> Option<HoldReason> {
        let is_second = self.answers.is_some_and(|(at, newest)| {
            process > newest && now.saturating_sub(at) < policy.common.growth_window
        });
        if is_second { self.bar_answers() } else { None }
    }

    /// Bars recycles because of faulty answers; returns the reason if they were allowed before.
    pub fn bar_answers(&mut self) -> Option<HoldReason> {
        let was_off = std::mem::replace(&mut self.answers_off, true);
        (!was_off).then_some(HoldReason::AnswersStayFaulty)
    }

    /// Records if a recycle helped; returns the reason that bars further ones if too many in a row did not.
    pub fn record_result(
        &mut self,
        series: MemoryKind,
        helped: bool,
        policy: &RecyclePolicy,
    ) -> Option<HoldReason> {
        let before = self.futile.iter().find(|(of, _)| *of == series).map_or(0, |(_, count)| *count);
        let recycles = if helped { 0 } else { before.saturating_add(1) };
        self.futile.retain(|(of, _)| *of != series);
        self.futile.push((series, recycles));
        (policy.common.max_futile > 0 && recycles == policy.common.max_futile)
            .then_some(HoldReason::Futile { recycles, series: Some(series) })
    }

    /// Records an exit after which memory had time to return. `missing` comes from [`unreturned_bytes`]. If
    /// it is set after too many exits, returns the reason that bars further recycles.
    pub fn record_exit(
        &mut self,
        series: MemoryKind,
        missing: Option<u64>,
        policy: &RecyclePolicy,
    ) -> Option<HoldReason> {
        let before = self.unreturned.iter().find(|(of, ..)| *of == series).map_or(0, |(_, exits, _)| *exits);
        self.unreturned.retain(|(of, ..)| *of != series);
        let bytes =
            missing.filter(|bytes| policy.levels.unreturned.0 > 0 && *bytes >= policy.levels.unreturned.0)?;
        let exits = before.saturating_add(1);
        self.unreturned.push((series, exits, bytes));
        (policy.levels.unreturned_exits > 0 && exits == policy.levels.unreturned_exits)
            .then_some(HoldReason::DriverLeak { series, bytes })
    }

    /// Resets the policy after an operator's restart, but keeps the time of the last recycle.
    pub fn reset(&mut self) {
        *self = Self { last: self.last, ..Self::default() };
    }
}

fn least_interval(
    action: RecycleAction,
    ask: &CooldownQuery,
    policy: &RecyclePolicy,
) -> (Duration, PauseRule) {
    let (plain, rule) = if action >= RecycleAction::DrainNow {
        if policy.common.min_interval < policy.common.min_interval_hard {
            (policy.common.min_interval, PauseRule::MinInterval)
        } else {
            (policy.common.min_interval_hard, PauseRule::MinIntervalHard)
        }
    } else {
        let loads = ask.load_time.unwrap_or_default().as_secs_f64() * policy.common.load_factor.max(0.0);
        let loads = Duration::try_from_secs_f64(loads).unwrap_or(Duration::MAX);
        if loads > policy.common.min_interval {
            (loads, PauseRule::LoadTime)
        } else {
            (policy.common.min_interval, PauseRule::MinInterval)
        }
    };
    let jitter = policy.common.jitter.clamp(0.0, 1.0) * (2.0 * ask.unit.clamp(0.0, 1.0) - 1.0);
    (Duration::try_from_secs_f64(plain.as_secs_f64() * (1.0 + jitter)).unwrap_or(plain), rule)
}

/// Returns true if a recycle helped: the next process is clearly smaller, and within the budget that caused
/// the recycle.
///
/// `fresh` is the old process's size when young; three quarters of the growth since then must be gone.
/// Without `fresh`, a tenth of the size must be gone: less may be allocator noise.
pub fn recycle_helped(before: u64, after: u64, fresh: Option<u64>, budget: Option<u64>) -> bool {
    let most = match fresh.filter(|fresh| *fresh < before) {
        Some(fresh) => fresh.saturating_add((before - fresh) / 4),
        None => before.saturating_sub(before / 10),
    };
    after <= most && budget.is_none_or(|budget| after < budget)
}

/// Returns the bytes that are missing after the exit; `None` below a quarter of the process's last size.
pub fn unreturned_bytes(free_before_spawn: u64, free_after_exit: u64, held_at_end: u64) -> Option<u64> {
    let missing = free_before_spawn.saturating_sub(free_after_exit);
    (missing > 0 && missing >= held_at_end / 4).then_some(missing)
}
