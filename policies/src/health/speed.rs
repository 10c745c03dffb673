//! Detects slow decoding by medians of time windows, so that single slow answers have no effect.

use std::time::Duration;

use super::HealthSymptom;

/// Consecutive slow windows, together half an hour: other programs' batch jobs are over by then.
const SLOW_WINDOWS: usize = 6;
/// Share of the baseline speed below which a window is slow. Context growth or other load can halve the
/// speed, too, but hardly for half an hour.
const SLOW_SHARE: f64 = 0.5;
/// Number of first windows, together half an hour, whose median is the baseline.
const BASELINE_WINDOWS: usize = 6;
/// Least readings per window: with fewer, single slow answers change the median.
const WINDOW_READINGS: usize = 5;
/// Least duration of a window: enough answers to average their lengths.
const WINDOW_TIME: Duration = Duration::from_secs(5 * 60);

#[derive(Clone, Debug, Default)]
pub(super) struct SpeedTrend {
    /// Start of the present window; `None` before the first answer.
    begun: Option<Duration>,
    readings: Vec<f64>,
    first: Vec<f64>,
    /// Consecutive slow windows; `now`: median of the last slow window.
    slow: usize,
    now: f64,
}

/// Readings kept per window: more do not improve the median.
const READINGS_KEPT: usize = 1024;

impl SpeedTrend {
    pub(super) fn add_reading(&mut self, at: Duration, speed: f64) {
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

    pub(super) fn symptom(&self) -> Option<HealthSymptom> {
        let baseline = self.baseline().filter(|_| self.slow >= SLOW_WINDOWS)?;
        Some(HealthSymptom::SlowDecode { now: self.now, baseline })
    }
}

/// Returns the median (for an even count, the upper of the two middle values); 0 if empty.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
