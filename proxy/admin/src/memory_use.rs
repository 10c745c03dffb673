//! Splits the memory that a process holds into parts: weights, declared caches, growth beyond both, the
//! rest. The parts always add up to the bytes held. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use warden_policies::book::{MemoryNeeds, NeedPurpose};
use warden_policies::sample::HostMemory;
use warden_policies::{ByteSize, MemoryKind, MemoryLimit, Reason};
use warden_supervisor::{BackendView, FleetView, SharedSpec};

/// Budgets by model; models without a budget are left out.
pub type BudgetsByModel = BTreeMap<String, ModelBudget>;

/// Budgets of one model; each is a number of bytes, a share like `"80%"`, or `"auto"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelBudget {
    /// Host memory above which the process is replaced at a quiet moment.
    pub soft: Option<MemoryLimit>,
    /// Host memory above which the process is drained now.
    pub hard: Option<MemoryLimit>,
    /// VRAM on each GPU above which the process is replaced at a quiet moment.
    #[serde(default)]
    pub vram_soft: Option<MemoryLimit>,
    /// VRAM on each GPU above which the process is drained now.
    #[serde(default)]
    pub vram_hard: Option<MemoryLimit>,
}

/// Returns the budgets that the configuration sets.
pub fn budgets_by_model(models: &[SharedSpec]) -> BudgetsByModel {
    let budget = |model: &SharedSpec| ModelBudget {
        soft: model.recycle.host_soft,
        hard: model.recycle.host_hard,
        vram_soft: model.recycle.vram_soft,
        vram_hard: model.recycle.vram_hard,
    };
    let all = models.iter().map(|model| (model.name.as_str().to_owned(), budget(model)));
    all.filter(|(_, budget)| *budget != ModelBudget::default()).collect()
}

/// Bytes that a model was planned to need of one kind of memory before it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlannedBytes {
    weights: u64,
    cache: u64,
}

/// Bytes that a model was planned to need, of host memory and of GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlannedNeeds {
    host: PlannedBytes,
    gpus: PlannedBytes,
}

/// Planned needs by model; models without known needs are left out.
pub type PlannedModels = BTreeMap<String, PlannedNeeds>;

/// Returns the needs that are known before models are loaded.
pub fn planned_needs(models: &[SharedSpec]) -> PlannedModels {
    let known = models.iter().filter_map(|model| {
        let needs = model.loading.needs.as_ref()?;
        Some((model.name.as_str().to_owned(), PlannedNeeds::from_needs(needs)))
    });
    known.collect()
}

impl PlannedNeeds {
    fn from_needs(needs: &MemoryNeeds) -> Self {
        let sum = |parts: &[(NeedPurpose, u64)], wanted: &[NeedPurpose]| {
            parts.iter().filter(|(part, _)| wanted.contains(part)).map(|(_, bytes)| bytes).sum()
        };
        let plan = |parts: &[(NeedPurpose, u64)]| PlannedBytes {
            weights: sum(parts, &[NeedPurpose::Weights, NeedPurpose::Projector]),
            cache: sum(parts, &[NeedPurpose::Cache, NeedPurpose::State]),
        };
        Self { host: plan(&needs.host), gpus: plan(&needs.gpu) }
    }
}

/// Memory of one kind that a process holds, split by purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Kind of memory.
    pub series: MemoryKind,
    /// Bytes held.
    pub held: u64,
    /// Part of `held`: tensors of the model.
    pub weights: u64,
    /// Part of `held`: KV cache and declared caches.
    pub cache: u64,
    /// Part of `held`: growth beyond the declared caches since the process settled.
    pub growth: u64,
    /// Rest of `held`: code, buffers, contexts.
    pub other: u64,
    /// Soft budget in bytes.
    pub soft: Option<u64>,
    /// Hard budget in bytes.
    pub hard: Option<u64>,
    /// The machine's total memory of this kind.
    pub total: Option<u64>,
}

impl MemoryUse {
    /// Returns the value of a full bar: the first budget, else the machine's total, else the bytes held.
    pub fn limit(&self) -> u64 {
        self.soft.or(self.hard).or(self.total).unwrap_or(self.held).max(1)
    }

    /// Returns the bytes held as a share of [`Self::limit`]; may exceed 1.
    pub fn share(&self) -> f64 {
        warden_policies::units::as_f64(self.held) / warden_policies::units::as_f64(self.limit())
    }
}

/// Returns all kinds of memory of a process that were read: the host's first, then each GPU's.
pub fn backend_memory_use(
    backend: &BackendView,
    budget: ModelBudget,
    plan: Option<PlannedNeeds>,
    fleet: &FleetView,
) -> Vec<MemoryUse> {
    let plan = plan.unwrap_or_default();
    let gpus = (backend.memory.vram.len() as u64).max(1);
    let host = backend.host.map(|host| (MemoryKind::Host, host.charged()));
    let vram = backend.memory.vram.iter().map(|vram| (MemoryKind::Vram(vram.gpu), vram.bytes));
    let one = |(series, held): (MemoryKind, u64)| {
        let growth = backend.memory.growth.iter().find(|growth| growth.series == series);
        let at_ready = match series {
            MemoryKind::Host => backend.host_at_ready.map(HostMemory::charged),
            MemoryKind::Vram(_) => None,
        };
        let plan = match series {
            MemoryKind::Host => plan.host,
            MemoryKind::Vram(_) => {
                PlannedBytes { weights: plan.gpus.weights / gpus, cache: plan.gpus.cache / gpus }
            }
        };
        let settled = growth.and_then(|growth| growth.baseline).or(at_ready).unwrap_or(held).min(held);
        let kept = growth.map_or(0, |growth| growth.fill.used.min(growth.fill.allowed)).min(held - settled);
        let weights = plan.weights.min(settled);
        let cache = plan.cache.min(settled - weights);
        let (soft, hard, total) = match series {
            MemoryKind::Host => (budget.soft, budget.hard, fleet.host.map(|host| host.total)),
            MemoryKind::Vram(gpu) => {
                let device = fleet.devices.iter().find(|device| device.gpu == gpu);
                (budget.vram_soft, budget.vram_hard, device.and_then(|device| device.total))
            }
        };
        let forecast = |reasons: [Reason; 2]| {
            let all = backend.memory.forecasts.iter().filter(|one| one.series == series);
            all.filter(|one| reasons.contains(&one.reason)).map(|one| one.forecast.limit).next()
        };
        // An `auto` budget is computed when a process has settled; the forecast contains the computed limit.
        let bytes = |limit: Option<MemoryLimit>, reasons| {
            let limit = limit?;
            let whole = limit.bytes().or_else(|| limit.resolve(ByteSize(total?)));
            whole.map(|bytes| bytes.0).or_else(|| forecast(reasons))
        };
        MemoryUse {
            series,
            held,
            weights,
            cache: cache + kept,
            growth: held - settled - kept,
            other: settled - weights - cache,
            soft: bytes(soft, [Reason::HostSoft, Reason::VramSoft]),
            hard: bytes(hard, [Reason::HostHard, Reason::VramHard]),
            total,
        }
    };
    host.into_iter().chain(vram).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::growth_fixture::{fleet, leaking};
    use warden_policies::growth::AllowanceFill;

    #[test]
    fn the_parts_add_up_to_what_is_held_whatever_is_known() {
        let (fleet, mut backend) = (fleet(Vec::new()), leaking());
        let needs = MemoryNeeds {
            host: vec![
                (NeedPurpose::Weights, 1 << 30),
                (NeedPurpose::Cache, 2 << 30),
                (NeedPurpose::Fixed, 40 << 20),
            ],
            gpu: vec![(NeedPurpose::Weights, 8 << 30)],
            ..MemoryNeeds::default()
        };
        let budget =
            ModelBudget { hard: Some(MemoryLimit::Bytes(ByteSize(10 << 30))), ..ModelBudget::default() };
        for held in [0, 1 << 20, 3 << 30, 1 << 40] {
            backend.host = Some(HostMemory { anon: held, swap: 0, rss: 0 });
            for baseline in [None, Some(0), Some(2 << 30), Some(u64::MAX)] {
                for (allowed, used) in [(0, 0), (1 << 20, u64::MAX), (u64::MAX, 1 << 20)] {
                    let growth = &mut backend.memory.growth[0];
                    (growth.baseline, growth.fill) = (baseline, AllowanceFill { allowed, used });
                    for plan in [None, Some(PlannedNeeds::from_needs(&needs))] {
                        for holds in backend_memory_use(&backend, budget, plan, &fleet) {
                            let sum = holds.weights + holds.cache + holds.growth + holds.other;
                            assert_eq!(sum, holds.held, "{holds:?}");
                            assert!(holds.limit() > 0 && holds.share() >= 0.0);
                        }
                    }
                }
            }
        }
    }
}
