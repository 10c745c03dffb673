//! Whether decoding has become slow: medians of windows against the medians of the first windows, so that neither a slow
//! answer nor a slow minute counts.

use std::time::Duration;

use super::{HealthPolicy, Symptom};

/// Speeds at about the same number of busy slots.
#[derive(Clone, Debug, Default)]
pub(super) struct Speed {
    /// When the present window began; `None` before the first answer.
    begun: Option<Duration>,
    readings: Vec<f64>,
    /// Medians of the first windows.
    first: Vec<f64>,
    /// Slow windows in a row, and the last median of them.
    slow: usize,
    now: f64,
}

/// Readings of one window that are kept: their median is as good as that of more.
const READINGS_KEPT: usize = 1024;

impl Speed {
    pub(super) fn take(&mut self, at: Duration, speed: f64, policy: &HealthPolicy) {
        let begun = *self.begun.get_or_insert(at);
        if at.saturating_sub(begun) >= policy.speed_window
            && self.readings.len() >= policy.speed_readings.max(1)
        {
            let median = median(&mut self.readings);
            self.readings.clear();
            self.begun = Some(at);
            self.judge(median, policy);
        }
        if self.readings.len() < READINGS_KEPT {
            self.readings.push(speed);
        }
    }

    fn judge(&mut self, median: f64, policy: &HealthPolicy) {
        if self.first.len() < policy.speed_baseline.max(1) {
            self.first.push(median);
            return;
        }
        let slow = self.baseline().is_some_and(|baseline| median < baseline * policy.speed_slow);
        self.now = median;
        self.slow = if slow { self.slow.saturating_add(1) } else { 0 };
    }

    fn baseline(&self) -> Option<f64> {
        let mut first = self.first.clone();
        (!first.is_empty()).then(|| median(&mut first))
    }

    pub(super) fn symptom(&self, policy: &HealthPolicy) -> Option<Symptom> {
        let baseline = self.baseline().filter(|_| self.slow >= policy.speed_persists.max(1))?;
        Some(Symptom::SlowDecode { now: self.now, baseline })
    }
}

/// The middle one, the upper of two; 0 of none.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
