//! Compares the measured growth with the kernel's exact figure, read page by page.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::sample::MemoryKind;
use warden_policies::units::scale_bytes;

use super::{MemoryTracker, ReadingContext};
use crate::process;

impl MemoryTracker {
    /// Records whether the exact figure shows the growth, if that figure was read.
    pub(super) fn note_confirmation(
        &mut self,
        taken: &ReadingContext,
        reading: &process::ProcessSample,
        now: &[(MemoryKind, u64)],
    ) {
        let Some(share) = taken.confirm else { return };
        let charged = now.iter().find(|(series, _)| *series == MemoryKind::Host).map(|(_, bytes)| *bytes);
        let baseline = self.growth(MemoryKind::Host).and_then(|growth| growth.baseline);
        let shown = match (reading.confirmed, charged, baseline) {
            (Some(exact), Some(charged), Some(baseline)) => {
                shows_growth(exact, baseline, charged.saturating_sub(baseline), share)
            }
            // There is nothing to compare, so the kernel's own counters are believed.
            _ => true,
        };
        self.confirmed = Some((taken.at, shown));
    }

    /// Result of the last exact reading, if the reading is not older than `interval`.
    pub(crate) fn confirmation(&self, now: Instant, interval: Duration) -> Option<bool> {
        let (at, shown) = self.confirmed?;
        (now.saturating_duration_since(at) < interval).then_some(shown)
    }

    /// Requests an exact figure with the next reading.
    pub(crate) fn confirm_next(&mut self) {
        self.confirm_next = true;
    }
}

/// True if the exact figure has grown by at least this share of `growth`, too.
fn shows_growth(exact: u64, baseline: u64, growth: u64, share: f64) -> bool {
    exact.saturating_sub(baseline) >= scale_bytes(growth, share.min(1.0))
}
