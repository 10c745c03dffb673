//! What is known of a generation, for status and metrics.

use std::time::Duration;

use warden_policies::health::Symptom;
use warden_policies::{Reason, Series};

use super::Watched;
use crate::lease::Cell;
use crate::view::{ForecastView, HealthView, MemoryView};

/// Silence that is worth showing: less is the pause between two looks.
const STALL_SHOWN: Duration = Duration::from_secs(10);

impl Watched {
    /// For status and metrics.
    pub(in crate::model) fn show(&self) -> MemoryView {
        let facts = self.facts.iter().flat_map(|facts| &facts.series);
        let forecasts = facts.flat_map(|facts| {
            let (soft, hard) = match facts.series {
                Series::Host => (Reason::HostSoft, Reason::HostHard),
                Series::Vram(_) => (Reason::VramSoft, Reason::VramHard),
            };
            let all = [(soft, facts.to_soft), (hard, facts.to_hard), (Reason::MemoryExhausted, facts.to_end)];
            all.into_iter().filter_map(|(reason, forecast)| {
                Some(ForecastView { series: facts.series, reason, forecast: forecast? })
            })
        });
        MemoryView {
            vram: self.vram.clone(),
            vram_unknown: self.no_vram.as_ref().map(|no_vram| no_vram.why.clone()),
            group: self.group.clone(),
            growth: self.monitor.growth().to_vec(),
            forecasts: forecasts.collect(),
            allowance: self.allowance.words(),
        }
    }

    pub(in crate::model) fn show_health(&self, cell: &Cell) -> HealthView {
        let slow = self.symptoms().into_iter().find_map(|symptom| match symptom {
            Symptom::SlowDecode { baseline, .. } => Some(baseline),
            _ => None,
        });
        let stalled = self.health.stalled().filter(|(stalled, _)| *stalled >= STALL_SHOWN);
        HealthView {
            compute_errors: cell.compute_errors(),
            decode_rate: self.speed,
            decode_baseline: slow,
            stalled_for: stalled.map(|(stalled, _)| stalled),
            stalled_limit: stalled.and_then(|(_, limit)| Duration::try_from_secs_f64(limit.seconds).ok()),
        }
    }
}
