//! Judges one leg: turns readings into a finding, and decides if more readings would help.

use crate::{
    CorrelatedHandles, GrowthAttribution, GrowthEnd, LegEnd, LegFinding, LegReading, LegSpeed, SeriesFinding,
    TracedMoment, Workload,
};
use warden_policies::defaults::Diagnose;
use warden_policies::growth::stats::median;
use warden_policies::growth::{
    GrowthBlame, GrowthMonitor, GrowthPolicy, GrowthVerdict, IntervalEstimate, MemoryLevel, SeriesGrowth,
    blame_processes, slope,
};
use warden_policies::sample::{BackendSample, MemoryKind, WorkDone};
use warden_policies::units::{as_f64, scale_bytes};

/// Rise that still counts as settled, as a share of the least rise that counts (8 MiB of host memory, 3 MiB
/// of VRAM). A heap moves less than that in a minute of even work.
const NEAR_SHARE: f64 = 0.125;
/// Growth per request that counts as none. Servers without a leak have constant VRAM; the smallest known leak
/// is 0.22 MiB per request.
const STILL_VRAM_BYTES: u64 = 50 << 10;
/// Growth per request that counts as none. Servers without a leak grew by up to 0.05 MiB of host memory per
/// request; the smallest known leak is 1.1 MiB.
const STILL_HOST_BYTES: u64 = 100 << 10;
/// Share of the leg's readings that is added if a leak is suspected. The next three or four tests find a leak
/// that the last test missed by chance. A slowly filling cache would need many times more readings.
const DOUBT_SHARE: f64 = 0.5;

/// Decision after a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegDecision {
    /// More readings may help.
    Continue,
    /// More readings would change nothing.
    Decided,
}

/// Judge of one leg.
#[derive(Clone, Debug)]
pub struct LegJudge {
    workload: Workload,
    policy: GrowthPolicy,
    numbers: Diagnose,
    steps: u64,
    monitor: GrowthMonitor,
    readings: Vec<LegReading>,
}

fn still_bytes(series: MemoryKind) -> u64 {
    match series {
        MemoryKind::Host => STILL_HOST_BYTES,
        MemoryKind::Vram(_) => STILL_VRAM_BYTES,
    }
}

impl LegJudge {
    /// Creates a judge for a leg of at most `steps` readings. `numbers` adapts the leak detector's `policy`
    /// to experiments.
    pub fn new(workload: Workload, steps: u64, policy: &GrowthPolicy, numbers: &Diagnose) -> Self {
        let policy = GrowthPolicy { allowance_slack: numbers.allowance_slack, ..policy.clone() };
        Self {
            workload,
            monitor: GrowthMonitor::new(&policy),
            policy,
            numbers: numbers.clone(),
            steps,
            readings: Vec::new(),
        }
    }

    /// Returns all readings so far.
    pub fn readings(&self) -> &[LegReading] {
        &self.readings
    }

    /// Returns the leak detector's present state for each kind of memory.
    pub fn growth(&self) -> &[SeriesGrowth] {
        self.monitor.growth()
    }

    /// Returns the most readings of this leg. A suspected leak extends the leg, because an undecided result
    /// is useless.
    pub fn readings_most(&self) -> u64 {
        let taken = u64::try_from(self.readings.len()).unwrap_or(u64::MAX);
        let suspected = self.growth().iter().any(|growth| match growth.verdict {
            GrowthVerdict::Suspected => true,
            // Computed only at the regular end of the leg.
            GrowthVerdict::Steady if taken >= self.steps => {
                let levels = levels(growth.series, &self.readings, true);
                self.cautious_verdict(growth, &levels) == GrowthVerdict::Suspected
            }
            _ => false,
        });
        self.steps.saturating_add(if suspected { scale_bytes(self.steps, DOUBT_SHARE) } else { 0 })
    }

    /// Adds a reading. `allowed` is host memory that the server may cache and that is not measured. `graphs`
    /// is the number of captured CUDA graphs in the server's memory report; `None` if unknown or limited.
    pub fn observe(&mut self, sample: BackendSample, allowed: u64, graphs: Option<u64>) -> LegDecision {
        self.monitor.set_allowance(MemoryKind::Host, allowed);
        self.monitor.observe(&sample);
        self.readings.push(LegReading { sample, allowed, graphs });
        let taken = u64::try_from(self.readings.len()).unwrap_or(u64::MAX);
        // A complete judgement costs some milliseconds.
        let look = taken >= self.numbers.decide_after && taken.is_multiple_of(self.policy.test_every.max(1));
        if look && self.monitor.growth().iter().all(|growth| self.is_decided(growth)) {
            LegDecision::Decided
        } else {
            LegDecision::Continue
        }
    }

    fn is_decided(&self, growth: &SeriesGrowth) -> bool {
        // Growth of measured pools is known not to be a leak.
        let levels = levels(growth.series, &self.readings, false);
        let slope = slope(after_start(&levels), &self.policy);
        match growth.verdict {
            GrowthVerdict::Warming | GrowthVerdict::Suspected => false,
            GrowthVerdict::Leaking => slope
                .is_some_and(|slope| (slope.high - slope.low) <= self.numbers.tight * slope.value.max(0.0)),
            // Decided if even the interval's upper end cannot become a leak in the rest of the leg.
            GrowthVerdict::Steady | GrowthVerdict::Bounded => slope.is_some_and(|slope| {
                let whole = slope.high * as_f64(self.steps) * requests_per_step(&levels);
                whole < as_f64(self.least_rise(&levels, growth.series)) * self.policy.settle_share
            }),
        }
    }

    fn least_rise(&self, levels: &[MemoryLevel], series: MemoryKind) -> u64 {
        match series {
            MemoryKind::Host => {
                let first = levels.first().map_or(0, |level| level.bytes);
                self.policy.host_effect.0.max(scale_bytes(first, self.policy.host_effect_share))
            }
            MemoryKind::Vram(_) => self.policy.vram_effect.0,
        }
    }

    /// Returns the finding of the leg.
    pub fn finding(&self, speed: LegSpeed, ended: LegEnd) -> LegFinding {
        let work = self.readings.last().map_or_else(WorkDone::default, |reading| reading.sample.work);
        LegFinding {
            workload: self.workload,
            steps: u64::try_from(self.readings.len()).unwrap_or(u64::MAX),
            enough: self.readings_needed(),
            requests: work.requests,
            work,
            series: self.monitor.growth().iter().map(|growth| self.series_finding(growth)).collect(),
            speed,
            ended,
            crash: None,
            control: false,
        }
    }

    /// A leg without a verdict after the fewest sufficient readings had a long start, and needs twice as
    /// many.
    fn readings_needed(&self) -> u64 {
        let taken = u64::try_from(self.readings.len()).unwrap_or(u64::MAX);
        let least = fewest_readings(&self.policy, &self.numbers);
        if taken < least { least } else { taken.saturating_mul(2) }
    }

    fn series_finding(&self, growth: &SeriesGrowth) -> SeriesFinding {
        let levels = levels(growth.series, &self.readings, true);
        let judged = after_start(&levels);
        let per_request = slope(judged, &self.policy);
        let work = match (judged.first(), judged.last()) {
            (Some(first), Some(last)) => last.work - first.work,
            _ => WorkDone::default(),
        };
        let (verdict, graphs) = self.apply_graphs(growth.series, self.cautious_verdict(growth, &levels));
        let per = |units: u64| {
            let rise = per_request?.value * as_f64(work.requests);
            (units > 0).then(|| rise / as_f64(units))
        };
        let bytes = || levels.iter().map(|level| level.bytes);
        SeriesFinding {
            series: growth.series,
            verdict,
            per_request,
            pooled_per_request: slope(after_start(&pools(growth.series, &self.readings)), &self.policy)
                .map(|slope| slope.value),
            per_prompt_token: per(work.prompt_tokens),
            per_output_token: per(work.output_tokens),
            per_image: per(work.images),
            settles: self.settles(&levels, growth.series, verdict, per_request),
            blame: growth.blame.clone(),
            first: bytes().next().unwrap_or(0),
            last: bytes().next_back().unwrap_or(0),
            peak: bytes().max().unwrap_or(0),
            sees: self.detection_limit(&levels, growth.series),
            graphs,
        }
    }

    /// Confirms a suspected leak if the number of CUDA graphs grows with every request, and the memory with
    /// it.
    fn apply_graphs(
        &self,
        series: MemoryKind,
        verdict: GrowthVerdict,
    ) -> (GrowthVerdict, Option<CorrelatedHandles>) {
        let trace = |reading: &LegReading| {
            let sample = &reading.sample;
            // Measured pools do not belong to graphs.
            let measured = sample.charged(series)?.saturating_sub(sample.pooled(series).unwrap_or(0));
            let handles = [as_f64(reading.graphs?), 0.0];
            Some(TracedMoment { requests: sample.work.requests, measured, counted: 0, handles })
        };
        let traces: Option<Vec<TracedMoment>> = self.readings.iter().map(trace).collect();
        let Some(found) = traces.as_deref().and_then(GrowthAttribution::from_readings) else {
            return (verdict, None);
        };
        let verdict = found.confirm_verdict(verdict);
        (verdict, found.along.filter(|_| verdict.grows()))
    }

    /// The leak detector ignores measured pools; growth within them is reported as bounded.
    fn verdict(&self, growth: &SeriesGrowth, levels: &[MemoryLevel]) -> GrowthVerdict {
        let pools = pools(growth.series, &self.readings);
        let bytes = || pools.iter().map(|level| level.bytes);
        let rose = bytes().max().unwrap_or(0) - bytes().min().unwrap_or(0);
        let much = rose >= scale_bytes(self.least_rise(levels, growth.series), self.policy.settle_share);
        let slope = slope(after_start(&pools), &self.policy);
        let fills = much || slope.is_some_and(|slope| slope.value > as_f64(still_bytes(growth.series)));
        if fills && growth.verdict == GrowthVerdict::Steady { GrowthVerdict::Bounded } else { growth.verdict }
    }

    /// Replaces `Steady` if the memory rises up to the end of the leg. The detector ignores so small a rise,
    /// because it must avoid false alarms for years.
    fn cautious_verdict(&self, growth: &SeriesGrowth, levels: &[MemoryLevel]) -> GrowthVerdict {
        let verdict = self.verdict(growth, levels);
        let per_request = slope(after_start(levels), &self.policy);
        let settles = self.settles(levels, growth.series, verdict, per_request);
        let rises = settles == GrowthEnd::No && per_request.is_some_and(|slope| slope.low > 0.0);
        if verdict == GrowthVerdict::Steady && rises { GrowthVerdict::Suspected } else { verdict }
    }

    fn settles(
        &self,
        levels: &[MemoryLevel],
        series: MemoryKind,
        verdict: GrowthVerdict,
        whole: Option<IntervalEstimate>,
    ) -> GrowthEnd {
        let third = levels.len() / 3;
        if third < self.policy.baseline_floors || whole.is_none() {
            return GrowthEnd::Unknown;
        }
        let step = scale_bytes(self.least_rise(levels, series), NEAR_SHARE);
        let end = &levels[levels.len() - third..];
        let rises = slope(end, &self.policy)
            .is_some_and(|slope| slope.low > 0.0 && slope.value > as_f64(still_bytes(series)));
        if rises || verdict.grows() {
            let unbounded =
                matches!(verdict, GrowthVerdict::Steady | GrowthVerdict::Suspected | GrowthVerdict::Leaking);
            return if unbounded { GrowthEnd::No } else { GrowthEnd::Unknown };
        }
        let mut last: Vec<f64> = end.iter().map(|level| as_f64(level.bytes)).collect();
        let settled = median(&mut last).unwrap_or(0.0) - as_f64(step);
        let below = levels.iter().rposition(|level| as_f64(level.bytes) < settled);
        let from = below.map_or(0, |index| index + 1);
        // Memory still moved in the last third, too late to see the growth stop.
        if from > levels.len() - third {
            return GrowthEnd::Unknown;
        }
        GrowthEnd::Yes { at_request: levels[from].work.requests }
    }

    /// Returns the smallest slope, in bytes per request, that the detector can call a leak after these
    /// readings. A window of floors must rise by the least effect in two consecutive tests, and all windows
    /// together by somewhat more.
    fn detection_limit(&self, levels: &[MemoryLevel], series: MemoryKind) -> f64 {
        let policy = &self.policy;
        let effect = as_f64(self.least_rise(levels, series));
        let judged = u64::try_from(levels.len()).unwrap_or(0).saturating_sub(policy.warmup_requests + 1);
        let window = u64::try_from(policy.window).unwrap_or(u64::MAX);
        let mut least = f64::MAX;
        for power in 0..policy.scales {
            let steps = 1_u64.checked_shl(power).unwrap_or(u64::MAX);
            if judged < (window + policy.test_every).saturating_mul(steps) {
                break;
            }
            least = effect / as_f64(window.saturating_mul(steps));
        }
        let whole = policy.swift_effect * policy.straight_share * effect / as_f64(judged.max(1));
        least.max(whole) / requests_per_step(levels).max(1.0)
    }
}

/// Finds the unit of work that causes the growth of one kind of memory. `legs` holds each leg's readings in
/// order; the start of each leg and growth within measured pools are left out.
///
/// Requests of one leg do much the same work, so leaks per request, per image and per token look alike. Legs
/// with different work separate them: if text causes no growth, the leak is not one per request.
pub fn blame_across(series: MemoryKind, legs: &[&[LegReading]], policy: &GrowthPolicy) -> GrowthBlame {
    let without_start = |readings: &&[LegReading]| after_start(&levels(series, readings, false)).to_vec();
    let processes: Vec<_> = legs.iter().map(without_start).collect();
    blame_processes(&processes, policy)
}

/// Returns the fewest readings that can suffice for a verdict: the start, one window, and one test after it.
pub fn fewest_readings(policy: &GrowthPolicy, numbers: &Diagnose) -> u64 {
    let window = u64::try_from(policy.window).unwrap_or(u64::MAX);
    let least = (policy.warmup_requests + 1 + policy.test_every).saturating_add(window);
    least.max(numbers.decide_after)
}

pub(super) fn levels(series: MemoryKind, readings: &[LegReading], with_pools: bool) -> Vec<MemoryLevel> {
    let level = |reading: &LegReading| {
        let sample = &reading.sample;
        let pool = if with_pools { 0 } else { sample.pooled(series).unwrap_or(0) };
        let bytes = sample.charged(series)?.saturating_sub(pool);
        Some(MemoryLevel { at: sample.at, work: sample.work, bytes })
    };
    readings.iter().filter_map(level).collect()
}

fn pools(series: MemoryKind, readings: &[LegReading]) -> Vec<MemoryLevel> {
    let level = |reading: &LegReading| {
        let sample = &reading.sample;
        Some(MemoryLevel { at: sample.at, work: sample.work, bytes: sample.pooled(series)? })
    };
    readings.iter().filter_map(level).collect()
}

pub(super) fn after_start(levels: &[MemoryLevel]) -> &[MemoryLevel] {
    &levels[levels.len() / 3..]
}

fn requests_per_step(levels: &[MemoryLevel]) -> f64 {
    let (Some(first), Some(last)) = (levels.first(), levels.last()) else { return 1.0 };
    let steps = u64::try_from(levels.len().saturating_sub(1)).unwrap_or(0);
    if steps == 0 { 1.0 } else { as_f64(last.work.requests - first.work.requests) / as_f64(steps) }
}
