//! Recycle policy of one model, and its conversion to bytes on this machine.
//!
//! ```text
//!   0 ..... baseline ..... soft ........ hard ..... hard × 1.05 ..... end of the memory
//!           settled size    |  when       |  drain    |  kill, if draining did not suffice
//!                           |  quiet      |  now      |  and the machine is short
//! ```
//!
//! As long as the machine has memory, exceeding a budget does not cut any request.
//!
//! `auto` needs the settled size from the leak detector. Until then only the rule for almost exhausted memory
//! applies.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::facts::SeriesFacts;
use crate::defaults::Recycle;
use crate::replacement_cost::ReplacementCostPolicy;
use crate::sample::MemoryKind;
use crate::schedule::DayWindows;
use crate::units::{ByteSize, MemoryLimit, scale_bytes};

/// Budgets and limits of one model. `None` disables a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct RecyclePolicy {
    /// Host memory above which the backend is replaced when quiet.
    pub host_soft: Option<MemoryLimit>,
    /// Host memory above which the backend is drained now.
    pub host_hard: Option<MemoryLimit>,
    /// VRAM, on each GPU, above which the backend is replaced when quiet.
    pub vram_soft: Option<MemoryLimit>,
    /// VRAM, on each GPU, above which the backend is drained now.
    pub vram_hard: Option<MemoryLimit>,
    /// Requests after which the backend is replaced when quiet.
    pub max_requests: Option<u64>,
    /// Age after which the backend is replaced when quiet.
    pub max_age: Option<Duration>,
    /// Times of the day for deferrable replacements.
    pub only: DayWindows,
    /// Numbers and modes with defaults. `max_requests` and `max_age` vary by `jitter`, so that replicas
    /// started together are not replaced together.
    pub common: Recycle,
    /// Numbers that define `auto`, and limits for killing a backend.
    pub levels: LevelsPolicy,
    /// Settings for choosing the cheapest moment.
    pub replacement_cost: ReplacementCostPolicy,
}

/// Numbers for `auto` and for exhausted memory. `defaults.toml`, section `[levels]`, gives the reasons.
pub type LevelsPolicy = crate::defaults::Levels;

/// A budget in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBudget {
    /// Soft budget; `None` if there is none or it is not known yet.
    pub soft: Option<u64>,
    /// Hard budget; `None` if there is none or it is not known yet.
    pub hard: Option<u64>,
}

impl RecyclePolicy {
    /// Creates a policy without budgets: `common` from the model's configuration, all others from the
    /// defaults.
    pub fn new(common: &Recycle) -> Self {
        let defaults = crate::defaults();
        Self {
            host_soft: None,
            host_hard: None,
            vram_soft: None,
            vram_hard: None,
            max_requests: None,
            max_age: None,
            only: DayWindows::ALWAYS,
            common: *common,
            levels: defaults.levels,
            replacement_cost: defaults.moment,
        }
    }

    /// Returns the free memory in bytes below which the machine or the GPU counts as exhausted.
    pub fn exhaustion_bytes(&self, facts: &SeriesFacts) -> u64 {
        let levels = &self.levels;
        match facts.series {
            MemoryKind::Host => {
                let share = facts.total.map_or(u64::MAX, |total| scale_bytes(total, levels.kill_host_share));
                levels.kill_host.0.min(share)
            }
            MemoryKind::Vram(_) => levels.kill_vram.0,
        }
    }

    /// Returns true if the machine or the GPU is short of this memory. Unknown free memory counts as short.
    pub fn is_short(&self, facts: &SeriesFacts) -> bool {
        facts.free.is_none_or(|free| free < scale_bytes(self.exhaustion_bytes(facts), self.levels.short))
    }

    /// Returns the budgets of one kind of memory in bytes.
    ///
    /// A percentage refers to the memory of the machine or the GPU, and is unknown if that is unknown.
    /// `auto`:
    /// - host: (baseline + allowance) × 1.25, at least baseline + 1 GiB, at most 85 % of the machine; hard is
    ///   soft × 1.15, at most 95 %;
    /// - VRAM: 95 % and 98 % of the GPU memory available to the process (its own and free memory), but at
    ///   least the baseline plus half (soft) and four fifths (hard) of the rest of that available memory.
    ///
    /// Memory measured in an experiment with the largest prompts is not growth: on the host it counts like
    /// the baseline, on a GPU it is a lower limit of the soft budget.
    pub fn budget(&self, facts: &SeriesFacts) -> MemoryBudget {
        let (soft, hard) = match facts.series {
            MemoryKind::Host => (self.host_soft, self.host_hard),
            MemoryKind::Vram(_) => (self.vram_soft, self.vram_hard),
        };
        let auto = self.automatic_budget(facts);
        let resolve = |limit: Option<MemoryLimit>, auto: Option<u64>| match limit? {
            MemoryLimit::Auto => auto,
            MemoryLimit::Bytes(bytes) => Some(bytes.0),
            percent @ MemoryLimit::Percent(_) => percent.resolve(ByteSize(facts.total?)).map(|bytes| bytes.0),
        };
        let soft = resolve(soft, auto.soft);
        // An automatic hard budget is computed from the soft budget in effect, even if that is configured.
        let auto_hard = match (facts.series, soft) {
            (MemoryKind::Host, Some(soft)) => Some(self.host_hard_above(soft, facts.total)),
            _ => auto.hard,
        };
        let hard = resolve(hard, auto_hard);
        MemoryBudget { soft, hard: hard.map(|hard| hard.max(soft.unwrap_or(0))) }
    }

    fn automatic_budget(&self, facts: &SeriesFacts) -> MemoryBudget {
        let levels = &self.levels;
        let Some(baseline) = facts.growth.as_ref().and_then(|growth| growth.baseline) else {
            return MemoryBudget::default();
        };
        match facts.series {
            MemoryKind::Host => {
                let explained = baseline.saturating_add(facts.allowance);
                let wanted =
                    scale_bytes(explained, levels.host_soft).max(baseline.saturating_add(levels.host_room.0));
                let most = facts.total.map_or(u64::MAX, |total| scale_bytes(total, levels.host_soft_most));
                let soft = wanted.min(most);
                MemoryBudget { soft: Some(soft), hard: Some(self.host_hard_above(soft, facts.total)) }
            }
            MemoryKind::Vram(_) => {
                let held = facts.charged.zip(facts.free).map(|(charged, free)| charged.saturating_add(free));
                let Some(can) = held.or(facts.total) else { return MemoryBudget::default() };
                let left = can.saturating_sub(baseline);
                let at = |share: f64, of_left: f64| {
                    scale_bytes(can, share).max(baseline.saturating_add(scale_bytes(left, of_left)))
                };
                let (soft, hard) = (
                    at(levels.vram_soft, levels.vram_soft_left),
                    at(levels.vram_hard, levels.vram_hard_left),
                );
                MemoryBudget { soft: Some(soft), hard: Some(hard) }
            }
        }
    }

    fn host_hard_above(&self, soft: u64, total: Option<u64>) -> u64 {
        let most = total.map_or(u64::MAX, |total| scale_bytes(total, self.levels.host_hard_most));
        scale_bytes(soft, self.levels.host_hard).min(most).max(soft)
    }
}
