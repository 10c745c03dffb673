//! The line fitted to a leg's readings, with its uncertainty, for plots.

use crate::LegReading;
use crate::judge::{after_start, levels};
use warden_policies::growth::IntervalEstimate;
use warden_policies::growth::stats::{median, scatter};
use warden_policies::sample::MemoryKind;
use warden_policies::units::as_f64;

/// A line of bytes over requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FittedLine {
    /// First request of the fit, after the start of the leg.
    pub from: f64,
    /// Last request of the fit.
    pub to: f64,
    slope: IntervalEstimate,
    /// Centre of the readings, where the slope's uncertainty has no effect.
    middle: (f64, f64),
    /// Scatter of the readings about the line: a standard deviation in bytes.
    scatter: f64,
}

impl FittedLine {
    /// Fits a line with this slope through the readings; `None` with fewer than two readings.
    pub fn through_readings(
        series: MemoryKind,
        readings: &[LegReading],
        per_request: IntervalEstimate,
    ) -> Option<Self> {
        let levels = levels(series, readings, true);
        let (xs, ys): (Vec<f64>, Vec<f64>) = after_start(&levels)
            .iter()
            .map(|level| (as_f64(level.work.requests), as_f64(level.bytes)))
            .unzip();
        let (from, to) = (*xs.first()?, *xs.last()?);
        if from >= to {
            return None;
        }
        let center = f64::midpoint(from, to);
        let mut rests: Vec<f64> =
            xs.iter().zip(&ys).map(|(x, y)| y - per_request.value * (x - center)).collect();
        let scatter = scatter(&xs, &ys, per_request.value);
        Some(Self { from, to, slope: per_request, middle: (center, median(&mut rests)?), scatter })
    }

    /// Returns the line's bytes after this many requests. The interval covers the slope's uncertainty and the
    /// scatter of readings.
    pub fn value_at(&self, requests: f64) -> IntervalEstimate {
        let away = requests - self.middle.0;
        let value = self.middle.1 + self.slope.value * away;
        let ends = [self.slope.low, self.slope.high].map(|slope| self.middle.1 + slope * away);
        let (low, high) = (ends[0].min(ends[1]).min(value), ends[0].max(ends[1]).max(value));
        IntervalEstimate { value, low: low - self.scatter, high: high + self.scatter }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use warden_policies::sample::{BackendSample, HostMemory, SampleEdge, WorkDone};

    fn readings(bytes: impl Fn(u64) -> u64) -> Vec<LegReading> {
        let reading = |n: u64| {
            let host = HostMemory { anon: bytes(n), ..HostMemory::default() };
            let work = WorkDone { requests: n, ..WorkDone::default() };
            let sample = BackendSample {
                at: Duration::from_secs(n),
                edge: SampleEdge::Idle,
                host: Some(host),
                vram: Vec::new(),
                pools: Vec::new(),
                in_flight: 0,
                work,
                largest_prompt: 0,
                reclaims: 0,
            };
            LegReading { sample, allowed: 0, graphs: None }
        };
        (1..=60).map(reading).collect()
    }

    #[test]
    fn a_line_goes_through_the_readings_after_the_start_and_its_range_holds_them() {
        // The line leaves out a steep start.
        let bytes = |n: u64| if n < 20 { 10_000 * n } else { 200_000 + 1000 * n + n * 7919 % 300 };
        let readings = readings(bytes);
        let slope = IntervalEstimate { value: 1000.0, low: 990.0, high: 1010.0 };
        let line = FittedLine::through_readings(MemoryKind::Host, &readings, slope).unwrap();
        assert!((line.from, line.to) == (21.0, 60.0), "{line:?}");
        let inside = (21..=60_u32).filter(|n| {
            let (at, read) = (line.value_at(f64::from(*n)), as_f64(bytes(u64::from(*n))));
            at.low <= read && read <= at.high
        });
        assert!(inside.count() >= 26, "two thirds of the readings, as a standard deviation has them");
        let (middle, end) = (line.value_at(40.5), line.value_at(60.0));
        assert!(end.high - end.low > middle.high - middle.low, "the farther, the less is known");
        assert!((end.value - as_f64(bytes(60))).abs() < 300.0);
    }

    #[test]
    fn nothing_is_said_of_too_few_readings_or_of_a_memory_that_was_not_read() {
        let slope = IntervalEstimate { value: 1.0, low: 0.0, high: 2.0 };
        let all = readings(|_| 5);
        assert_eq!(FittedLine::through_readings(MemoryKind::Host, &all[..1], slope), None);
        assert_eq!(
            FittedLine::through_readings(MemoryKind::Vram(warden_policies::GpuIndex(0)), &all, slope),
            None
        );
        assert_eq!(FittedLine::through_readings(MemoryKind::Host, &[], slope), None);
    }
}
