//! Attributes growth of memory to counted allocations, and the rest to handles (such as CUDA graphs).
//!
//! A tracer counts allocations; the kernel and the driver measure memory. A driver keeps memory of its own
//! for each handle, so handles whose number grows in step explain growth without counted allocations.

use serde::{Deserialize, Serialize};

use warden_policies::defaults::{self, defaults};
use warden_policies::growth::GrowthVerdict;
use warden_policies::growth::stats::sen_slope;
use warden_policies::units::as_f64;

/// Share of a leg's readings left out at its start, while caches fill.
const WARM_UP_SHARE: f64 = 0.3333;

/// Values of a tracer at one moment of a leg.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TracedMoment {
    /// Number of requests answered so far.
    pub requests: u64,
    /// Bytes of memory as measured by the kernel or the driver.
    pub measured: u64,
    /// Bytes in counted allocations that are not freed.
    pub counted: i64,
    /// Number of existing handles of each kind, in the caller's order of kinds.
    pub handles: [f64; 2],
}

/// Handles whose number grows in step with memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CorrelatedHandles {
    /// Kind of handle, as an index into [`TracedMoment::handles`].
    pub kind: usize,
    /// Growth of the handle count per request.
    pub per_request: f64,
    /// Bytes per handle that counted allocations do not explain.
    pub bytes_each: f64,
    /// Correlation of the handle count with the bytes, 0 to 1.
    pub correlation: f64,
}

/// Attribution of the growth of one kind of memory in a leg.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GrowthAttribution {
    /// Measured bytes per request.
    pub measured: f64,
    /// Bytes per request in counted allocations.
    pub counted: f64,
    /// Handles that explain the rest; `None` if the rest is small or no handles grow with it.
    pub follows: Option<CorrelatedHandles>,
    /// Handles whose number grows with the requests, and with which the whole memory rises at each reading.
    pub along: Option<CorrelatedHandles>,
    /// True if counted allocations grow with every request up to the end and make up the growth, and the
    /// memory rises with them.
    #[serde(default)]
    pub retained: bool,
}

impl GrowthAttribution {
    /// Attributes the growth in a leg's readings; `None` if there are too few readings.
    pub fn from_readings(readings: &[TracedMoment]) -> Option<Self> {
        let numbers = attribution_config();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a place in a list"
        )]
        let first = (readings.len() as f64 * WARM_UP_SHARE) as usize;
        let readings = readings.get(first..).filter(|rest| rest.len() >= numbers.fewest)?;
        let requests: Vec<f64> = readings.iter().map(|reading| as_f64(reading.requests)).collect();
        let measured: Vec<f64> = readings.iter().map(|reading| as_f64(reading.measured)).collect();
        let counted: Vec<f64> = readings.iter().map(|reading| signed_as_f64(reading.counted)).collect();
        let (measured_slope, counted_slope) =
            (sen_slope(&requests, &measured)?, sen_slope(&requests, &counted)?);
        let rest: Vec<f64> = measured.iter().zip(&counted).map(|(all, counted)| all - counted).collect();
        // The kind of handle whose number correlates best with these bytes, if closely enough.
        let closest = |bytes: &[f64], bytes_slope: f64, least: f64| {
            let along = |kind: usize| {
                let handles: Vec<f64> = readings.iter().map(|reading| reading.handles[kind]).collect();
                let per_request = sen_slope(&requests, &handles)?;
                let correlation = correlation(&handles, bytes);
                let bytes_each = bytes_slope / per_request;
                let fits = per_request >= numbers.least_handles && correlation >= least;
                fits.then_some(CorrelatedHandles { kind, per_request, bytes_each, correlation })
            };
            let both = (0..2).filter_map(along);
            both.reduce(|one, other| if other.correlation > one.correlation { other } else { one })
        };
        let (grows, is_explained) =
            (measured_slope > 0.0, counted_slope >= numbers.explained * measured_slope);
        let along = closest(&measured, measured_slope, numbers.proves).filter(|_| grows);
        let follows = closest(&rest, measured_slope - counted_slope, numbers.follows);
        let follows = follows.filter(|_| grows && !is_explained);
        let retained = is_explained
            && grows
            && correlation(&counted, &measured) >= numbers.proves
            && keeps_rising(&requests, &counted);
        Some(Self { measured: measured_slope, counted: counted_slope, follows, along, retained })
    }

    /// Turns a suspected leak into a certain one if handles or allocations grow with every request and the
    /// memory rises with them. The leak detector sees only bytes.
    pub fn confirm_verdict(&self, verdict: GrowthVerdict) -> GrowthVerdict {
        let proven = self.along.is_some() || self.retained;
        if verdict == GrowthVerdict::Suspected && proven { GrowthVerdict::Leaking } else { verdict }
    }

    /// Returns the share of the growth that counted allocations explain, 0 to 1; 1 without growth.
    pub fn explained_share(&self) -> f64 {
        if self.measured <= 0.0 { 1.0 } else { (self.counted / self.measured).clamp(0.0, 1.0) }
    }

    /// Returns true if counted allocations explain the growth.
    pub fn is_explained(&self) -> bool {
        self.explained_share() >= attribution_config().explained
    }
}

fn attribution_config() -> &'static defaults::Attribution {
    &defaults().diagnose.attribution
}

#[expect(clippy::cast_precision_loss, reason = "bytes of one machine, far below 2^53")]
fn signed_as_f64(number: i64) -> f64 {
    number as f64
}

/// A cache that fills has slowed down by the last third.
fn keeps_rising(along: &[f64], values: &[f64]) -> bool {
    let third = along.len() - along.len() / 3;
    let rises = sen_slope(along, values).zip(sen_slope(&along[third..], &values[third..]));
    rises.is_some_and(|(all, last)| all > 0.0 && last >= attribution_config().goes_on * all)
}

/// Returns Pearson's correlation; 0 if either side is constant.
fn correlation(one: &[f64], other: &[f64]) -> f64 {
    let count = one.len().min(other.len());
    let number = as_f64(count as u64);
    let mean = |values: &[f64]| values.iter().take(count).sum::<f64>() / number;
    let (mean_one, mean_other) = (mean(one), mean(other));
    let (mut both, mut squares_one, mut squares_other) = (0.0, 0.0, 0.0);
    for (value, counterpart) in one.iter().zip(other) {
        let (value, counterpart) = (value - mean_one, counterpart - mean_other);
        both += value * counterpart;
        squares_one += value * value;
        squares_other += counterpart * counterpart;
    }
    let spread = (squares_one * squares_other).sqrt();
    if spread > 0.0 { both / spread } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Creates a leg in which each request adds these amounts to measured bytes, counted bytes and handles.
    fn leg(measured: u64, counted: u64, handles: [f64; 2]) -> Vec<TracedMoment> {
        (0..30_u64)
            .map(|requests| TracedMoment {
                requests,
                measured: 100 * MIB + requests * measured,
                counted: (50 * MIB + requests * counted).cast_signed(),
                handles: handles.map(|each| as_f64(requests) * each),
            })
            .collect()
    }

    #[test]
    fn growth_that_is_asked_for_is_explained() {
        let found = GrowthAttribution::from_readings(&leg(4 * MIB, 4 * MIB - 1000, [3.0, 0.0])).unwrap();
        assert!(found.is_explained() && found.follows.is_none());
        assert!((found.explained_share() - 1.0).abs() < 0.01);
    }

    #[test]
    fn growth_that_nobody_asks_for_follows_the_handles_that_become_more() {
        let found = GrowthAttribution::from_readings(&leg(900_000, 0, [3.0, 0.0])).unwrap();
        let follows = found.follows.unwrap();
        assert!(!found.is_explained() && follows.kind == 0);
        assert!((follows.bytes_each - 300_000.0).abs() < 1.0 && follows.correlation > 0.999);
    }

    #[test]
    fn handles_that_become_more_with_every_request_settle_what_bytes_leave_in_doubt() {
        let found = GrowthAttribution::from_readings(&leg(900_000, 899_000, [3.0, 0.0])).unwrap();
        assert!(found.is_explained() && found.along.is_some_and(|along| along.kind == 0));
        assert_eq!(found.confirm_verdict(GrowthVerdict::Suspected), GrowthVerdict::Leaking);
        // Certain leaks, declared caches and constant memory keep their verdict.
        for verdict in
            [GrowthVerdict::Warming, GrowthVerdict::Steady, GrowthVerdict::Bounded, GrowthVerdict::Leaking]
        {
            assert_eq!(found.confirm_verdict(verdict), verdict);
        }
        // Allocations kept by each request are evidence if they make up the growth up to the end.
        let kept = GrowthAttribution::from_readings(&leg(900_000, 890_000, [0.0; 2])).unwrap();
        assert!(
            kept.retained && kept.confirm_verdict(GrowthVerdict::Suspected) == GrowthVerdict::Leaking,
            "{kept:?}"
        );
        let mut fills = leg(900_000, 890_000, [0.0; 2]);
        for reading in &mut fills[20..] {
            reading.counted = 50 * MIB.cast_signed() + 20 * 890_000;
        }
        let part = GrowthAttribution::from_readings(&leg(900_000, 500_000, [0.0; 2])).unwrap();
        for found in [GrowthAttribution::from_readings(&fills).unwrap(), part] {
            assert_eq!(
                found.confirm_verdict(GrowthVerdict::Suspected),
                GrowthVerdict::Suspected,
                "{found:?}"
            );
        }
        // Constant handles, or memory that does not follow them, are no evidence.
        let still = GrowthAttribution::from_readings(&leg(900_000, 0, [0.0; 2])).unwrap();
        let mut apart = leg(0, 0, [3.0, 0.0]);
        for reading in &mut apart {
            reading.measured += (reading.requests * 7919 % 13) * MIB;
        }
        let apart = GrowthAttribution::from_readings(&apart).unwrap();
        for found in [still, apart] {
            assert_eq!(
                found.confirm_verdict(GrowthVerdict::Suspected),
                GrowthVerdict::Suspected,
                "{found:?}"
            );
        }
    }

    #[test]
    fn handles_that_stay_the_same_explain_nothing() {
        let found = GrowthAttribution::from_readings(&leg(900_000, 0, [0.0, 0.0])).unwrap();
        assert!(!found.is_explained() && found.follows.is_none());
    }

    #[test]
    fn what_does_not_grow_needs_no_explanation_and_a_few_readings_give_none() {
        assert!(GrowthAttribution::from_readings(&leg(0, 0, [3.0, 0.0])).unwrap().is_explained());
        assert_eq!(GrowthAttribution::from_readings(&leg(MIB, 0, [3.0, 0.0])[..4]), None);
    }

    #[test]
    fn what_a_cache_takes_at_the_start_is_left_out() {
        let mut readings = leg(0, 0, [0.0; 2]);
        for reading in &mut readings[..9] {
            reading.measured -= (9 - reading.requests) * 10 * MIB;
        }
        assert!(GrowthAttribution::from_readings(&readings).unwrap().measured.abs() < 1.0);
    }
}
