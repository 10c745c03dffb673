//! Whether the kernel's exact figure agrees with what is charged.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::sample::Series;
use warden_policies::units::scale;

use super::{Taken, Watched};
use crate::process;

impl Watched {
    /// Notes whether the kernel's exact figure shows the growth, if it was asked for.
    pub(super) fn confirm(&mut self, taken: &Taken, reading: &process::Sample, now: &[(Series, u64)]) {
        let Some(share) = taken.confirm else { return };
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

    /// Whether the last exact reading, which is not older than this, did not show the growth.
    pub(in crate::model) fn denies(&self, now: Instant, interval: Duration) -> bool {
        self.confirmed.is_some_and(|(at, shown)| !shown && now.saturating_duration_since(at) < interval)
    }
}

/// Whether the exact figure shows this share of the growth, too.
fn shows(exact: u64, baseline: u64, growth: u64, share: f64) -> bool {
    exact.saturating_sub(baseline) >= scale(growth, share.min(1.0))
}
