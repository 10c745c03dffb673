//! Whether decoding has become slow: medians of windows against the medians of the first windows, so that neither a slow
//! answer nor a slow minute counts.

use std::time::Duration;

use super::Symptom;

/// Six windows in a row are half an hour: a neighbour's batch job is over by then.
const SLOW_WINDOWS: usize = 6;
/// Speed halves when a context grows or a neighbour is busy; a third less for long is how leaks and throttling begin,
/// and half is beyond doubt.
const SLOW_SHARE: f64 = 0.5;
/// The median of six windows, half an hour, is the speed that this backend can do.
const BASELINE_WINDOWS: usize = 6;
/// The median of fewer readings jumps with single slow answers.
const WINDOW_READINGS: usize = 5;
/// Five minutes hold enough answers to make their mix of lengths even out.
const WINDOW_TIME: Duration = Duration::from_secs(5 * 60);

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
    pub(super) fn take(&mut self, at: Duration, speed: f64) {
        let begun = *self.begun.get_or_insert(at);
        if at.saturating_sub(begun) >= WINDOW_TIME && self.readings.len() >= WINDOW_READINGS {
            let median = median(&mut self.readings);
            self.readings.clear();
            self.begun = Some(at);
            self.judge(median);
        }
        if self.readings.len() < READINGS_KEPT {
            self.readings.push(speed);
        }
    }

    fn judge(&mut self, median: f64) {
        if self.first.len() < BASELINE_WINDOWS {
            self.first.push(median);
            return;
        }
        let slow = self.baseline().is_some_and(|baseline| median < baseline * SLOW_SHARE);
        self.now = median;
        self.slow = if slow { self.slow.saturating_add(1) } else { 0 };
    }

    fn baseline(&self) -> Option<f64> {
        let mut first = self.first.clone();
        (!first.is_empty()).then(|| median(&mut first))
    }

    pub(super) fn symptom(&self) -> Option<Symptom> {
        let baseline = self.baseline().filter(|_| self.slow >= SLOW_WINDOWS)?;
        Some(Symptom::SlowDecode { now: self.now, baseline })
    }
}

/// The middle one, the upper of two; 0 of none.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
