//! Pools of memory that somebody measured, and whether the kernel's exact figure agrees with what is charged.

use warden_policies::sample::{Series, Vram};
use warden_policies::units::scale;
use warden_sensors::Report;

use super::{Taken, Watched};
use crate::process;

impl Watched {
    /// Pools that were measured: the prompt cache by the log, those of the GPUs by the memory report.
    pub(super) fn pools(&self, reading: &process::Sample) -> Vec<(Series, u64)> {
        let host = self.allowance.measured().map(|bytes| (Series::Host, bytes));
        host.into_iter()
            .chain(reading.report.iter().flat_map(|report| gpu_pools(report, &reading.vram)))
            .collect()
    }

    /// Notes whether the kernel's exact figure shows the growth, if it was asked for.
    pub(super) fn confirm(&mut self, taken: &Taken, reading: &process::Sample, now: &[(Series, u64)]) {
        if !taken.confirm {
            return;
        }
        let share = warden_policies::defaults().sensors.confirm_share;
        let charged = now.iter().find(|(series, _)| *series == Series::Host).map(|(_, bytes)| *bytes);
        let baseline = self.growth(Series::Host).and_then(|growth| growth.baseline);
        let shown = match (reading.confirmed, charged, baseline) {
            (Some(exact), Some(charged), Some(baseline)) => {
                shows(exact, baseline, charged.saturating_sub(baseline), share)
            }
            // Nothing speaks against the kernel's own counters.
            _ => true,
        };
        self.confirmed = Some((taken.at, shown));
    }
}

/// Whether the exact figure shows this share of the growth, too.
fn shows(exact: u64, baseline: u64, growth: u64, share: f64) -> bool {
    exact.saturating_sub(baseline) >= scale(growth, share.min(1.0))
}

/// The pools of the report by GPU. It counts devices as ggml does, which need not be our order: only where both know
/// the same number of them is it clear which is which.
fn gpu_pools(report: &Report, vram: &[Vram]) -> Vec<(Series, u64)> {
    let devices = report.by_device();
    if devices.len() != vram.len() {
        return Vec::new();
    }
    let pools = devices
        .values()
        .map(|totals| totals.counts.pool_bytes.saturating_add(totals.counts.cublas_workspace_bytes));
    vram.iter().map(|vram| Series::Vram(vram.gpu)).zip(pools).collect()
}
