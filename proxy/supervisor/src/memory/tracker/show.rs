//! View of a generation's memory, for status and metrics.

use warden_policies::recycle::MemoryBudget;
use warden_policies::{MemoryKind, Reason};

use super::MemoryTracker;
use crate::view::{BudgetView, ForecastView, MemoryView};

impl MemoryTracker {
    /// Memory of the process for status and metrics.
    pub(crate) fn show(&self) -> MemoryView {
        let facts = self.facts.iter().flat_map(|facts| &facts.series);
        let forecasts = facts.flat_map(|facts| {
            let (soft, hard) = match facts.series {
                MemoryKind::Host => (Reason::HostSoft, Reason::HostHard),
                MemoryKind::Vram(_) => (Reason::VramSoft, Reason::VramHard),
            };
            let all = [(soft, facts.to_soft), (hard, facts.to_hard), (Reason::MemoryExhausted, facts.to_end)];
            all.into_iter().filter_map(|(reason, forecast)| {
                Some(ForecastView { series: facts.series, reason, forecast: forecast? })
            })
        });
        let facts = self.facts.iter().flat_map(|facts| &facts.series);
        let budgets = facts
            .filter(|facts| facts.budget != MemoryBudget::default())
            .map(|facts| BudgetView { series: facts.series, budget: facts.budget });
        MemoryView {
            budgets: budgets.collect(),
            declared: self.declared.pools(),
            reading: self.last_reading,
            vram: self.vram.clone(),
            vram_unknown: self.no_vram.as_ref().map(|no_vram| no_vram.why.clone()),
            unmeasured: self.unmeasured.clone(),
            group: self.group.clone(),
            growth: self.monitor.growth().to_vec(),
            forecasts: forecasts.collect(),
            request_rate: self.monitor.rate(),
            allowance: self.declared.source_sentences(),
            one_pool: self.declared.is_one_pool(),
        }
    }
}
