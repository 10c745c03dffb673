//! Judges one series: from readings to a verdict.
//!
//! ```text
//!                  work done, growth of the start over
//!        Warming ──────────────────────────────────────> judged ──┐
//!           ^                                              ^      │ pools begin or cease to be measured,
//!           └──────────────────────────────────────────────┼──────┘ counters restart
//!                                                          │
//!      judged:            one test              tests in a row
//!         Steady ─────────────────> Suspected ─────────────────> Leaking
//!           ^  beyond the allowance     │                           │
//!           ├───────────────────────────┘ no test                   │
//!           └───────────────────────────────────────────────────────┘ no test, no new height, for long
//!         within the allowance: Bounded, independent of the tests
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::growth::blame::{confirm, explain, hours_pay};
use crate::growth::floors::{FloorPoint, ScaledFloors};
use crate::growth::forecast::LineUncertainty;
use crate::growth::shape::{
    ScaleStatistics, StepGrowth, StretchFinding, examine, has_fallen, scale_statistics,
};
use crate::growth::stats;
use crate::growth::{
    AllowanceFill, GrowthBlame, GrowthLine, GrowthPolicy, GrowthVerdict, IntervalEstimate, LeakPrior,
    SeriesGrowth, WorkUnit,
};
use crate::sample::{BackendSample, MemoryKind, WorkDone};
use crate::units::{self, as_f64};

/// Growth with at least this share of a known leak's slope counts as the same leak under another load.
const PRIOR_SLOPE_RATIO: f64 = 0.5;
/// A leak is over after this many times the requests that it usually needs to reach a new height.
const CALM_FACTOR: f64 = 4.0;
/// Least requests without growth after which a leak is over: other kinds of requests cause shorter pauses.
const CALM_REQUESTS: u64 = 256;
/// Number of latest short floors whose lowest is the present level: this drops peaks and lags little.
const PRESENT_FLOORS: usize = 4;
/// Ratio of slopes from which a shorter stretch's line is shown: late leaks look flat in long stretches.
const LATE_SLOPE_RATIO: f64 = 1.2;
/// Consecutive tests that must blame the same unit before it counts as the cause.
const PAID_TESTS: usize = 5;
/// Least share of the growth that a blamed unit must explain to count as its cause.
const PAID_SHARE: f64 = 0.7;
/// Multiple of the effect for a rise without a straight line: settling heaps rise by some 100 MiB at most.
const LONG_EFFECT_FACTOR: f64 = 3.5;
/// Floors per group. Three groups show if the rise still slows down; a group's median tolerates two peaks.
const SETTLE_FLOORS: usize = 5;
/// Requests after which the warm-up ends even if the rise still slows down; later tests recognise that, too.
const WARM_UP_REQUESTS: u64 = 200;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct ScaleTests {
    last: Option<StretchFinding>,
    /// Findings of the latest tests, newest last.
    recent: VecDeque<StretchFinding>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct MeasuredPools {
    pooled: bool,
    /// Consecutive readings that lack the pool sizes which earlier readings had.
    unmeasured: u32,
    pool: f64,
}

impl MeasuredPools {
    fn bytes(&self) -> f64 {
        if self.pooled { self.pool } else { 0.0 }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct PresentLevel {
    /// Number of reclaims; `lift`: bytes reclaimed so far, added to the readings so that reclaims do not turn
    /// a leak's line into a sawtooth.
    reclaims: u64,
    lift: f64,
    /// Latest floor, with `lift` added.
    lifted: f64,
    /// Request number of the latest floor; `now`: request number of the latest reading.
    #[serde(default)]
    floored: u64,
    #[serde(default)]
    now: u64,
}

/// Line shown to users; `spread`: its uncertainty.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct ShownLine {
    line: Option<StretchFinding>,
    #[serde(default)]
    spread: Option<LineUncertainty>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct StartState {
    warm: bool,
    baseline: Option<f64>,
}

/// Level above which a new height counts, and the request number at which memory last grew.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct GrowthHeight {
    #[serde(with = "height")]
    height: f64,
    grew: u64,
}

/// State of one series; serialized as one flat object.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SeriesWatch {
    #[serde(skip, default = "default_policy")]
    policy: GrowthPolicy,
    prior: Option<LeakPrior>,
    floors: ScaledFloors,
    tracks: Vec<ScaleTests>,
    #[serde(flatten)]
    pools: MeasuredPools,
    #[serde(flatten)]
    present: PresentLevel,
    #[serde(flatten)]
    shown: ShownLine,
    /// Unit blamed by the latest tests, and the number of consecutive tests that blamed it.
    paid: Option<(WorkUnit, usize)>,
    declared: u64,
    #[serde(flatten)]
    start: StartState,
    #[serde(flatten)]
    height: GrowthHeight,
    growth: SeriesGrowth,
}

/// Policy of a deserialized watch until the caller sets one; the policy is not serialized.
pub(super) fn default_policy() -> GrowthPolicy {
    crate::defaults().growth.clone()
}

/// Serializes "no height yet" (`f64::MAX`) as none, because `f64::MAX` does not survive a decimal round trip.
mod height {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
    pub(super) fn serialize<S: Serializer>(height: &f64, to: S) -> Result<S::Ok, S::Error> {
        (*height < f64::MAX).then_some(*height).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        Option::<f64>::deserialize(from).map(|height| height.unwrap_or(f64::MAX))
    }
}

impl SeriesWatch {
    /// Adopts a policy after deserialization; returns false if the stored stretch lengths differ.
    pub(super) fn resume_under(&mut self, policy: &GrowthPolicy) -> bool {
        self.policy = policy.clone();
        let scales = policy.scales.max(1) as usize;
        self.floors.len() == scales && self.tracks.len() == scales
    }

    pub(super) fn new(
        series: MemoryKind,
        declared: u64,
        prior: Option<LeakPrior>,
        policy: &GrowthPolicy,
    ) -> Self {
        Self {
            prior,
            floors: ScaledFloors::new(policy.scales, policy.kept),
            tracks: vec![ScaleTests::default(); policy.scales.max(1) as usize],
            pools: MeasuredPools::default(),
            present: PresentLevel::default(),
            shown: ShownLine::default(),
            paid: None,
            declared,
            start: StartState::default(),
            height: GrowthHeight { height: f64::MAX, grew: 0 },
            growth: SeriesGrowth::without_readings(series),
            policy: policy.clone(),
        }
    }

    pub(super) fn growth(&self) -> &SeriesGrowth {
        &self.growth
    }

    pub(super) fn declare(&mut self, bytes: u64) {
        self.declared = bytes;
        self.update_fill();
    }

    /// Estimates the bytes charged now: the latest floor with measured pools, plus the growth since then.
    pub(super) fn charged_now(&self) -> Option<f64> {
        let floor = as_f64(self.growth.floor?) + self.pools.bytes();
        let since = as_f64(self.present.now.saturating_sub(self.present.floored));
        Some(floor + since * self.growth.slope.map_or(0.0, |slope| slope.value.max(0.0)))
    }

    /// Returns the shown slope, with its interval over the next `left` bytes of rise.
    pub(super) fn project_slope(&self, left: f64) -> Option<IntervalEstimate> {
        let slope = self.growth.slope?;
        Some(self.shown.spread.map_or(slope, |spread| spread.project_slope(slope, left, self.policy.bound_z)))
    }

    fn line_uncertainty(&self, scale: usize) -> Option<LineUncertainty> {
        let line = self.tracks[scale].last?;
        let floors = self.floors.at_scale(scale);
        let from = floors.len().saturating_sub(self.policy.window);
        LineUncertainty::from_floors(floors.range(from..), &line)
    }

    /// Forgets all readings, because further readings measure something else.
    pub(super) fn restart(&mut self) {
        self.floors.clear();
        self.tracks.iter_mut().for_each(|track| *track = ScaleTests::default());
        self.present.lift = 0.0;
        self.start = StartState::default();
        self.paid = None;
        self.growth.baseline = None;
        self.shown = ShownLine::default();
        self.growth.slope = None;
        self.growth.law = None;
        self.growth.blame = None;
    }

    /// Adds a reading; returns true if the verdict changed.
    pub(super) fn observe(&mut self, sample: &BackendSample) -> bool {
        let before = self.growth.verdict;
        if let Some(level) = self.level(sample) {
            let point =
                FloorPoint { level, hours: hours(sample.at), work: sample.work, fresh: WorkDone::default() };
            if self.floors.push(point) || self.growth.floor.is_none() {
                self.record_step(sample.work.requests, level);
            }
        }
        if self.growth.verdict != before {
            self.growth.since_request = sample.work.requests;
            return true;
        }
        false
    }

    /// Returns the reading without measured pools. Restarts the series when pool sizes begin or cease to be
    /// reported, because that is no change of memory. A few readings without pool sizes are skipped instead.
    fn level(&mut self, sample: &BackendSample) -> Option<f64> {
        let charged = as_f64(sample.charged(self.growth.series)?);
        let pool = sample.pooled(self.growth.series).map(as_f64);
        match (pool, self.pools.pooled) {
            (Some(_), true) | (None, false) => self.pools.unmeasured = 0,
            (None, true) => {
                self.pools.unmeasured += 1;
                if self.pools.unmeasured <= self.policy.unmeasured {
                    return None;
                }
                self.set_pooled(false);
            }
            (Some(_), false) => self.set_pooled(true),
        }
        self.pools.pool = pool.unwrap_or(0.0);
        let level = charged - self.pools.pool.min(charged);
        if sample.reclaims > self.present.reclaims && self.growth.floor.is_some() {
            self.present.lift = (self.present.lifted - level).max(self.present.lift);
        }
        self.present.reclaims = sample.reclaims;
        Some(level + self.present.lift)
    }

    fn set_pooled(&mut self, pooled: bool) {
        let seen = self.growth.floor.is_some();
        self.pools.pooled = pooled;
        self.pools.unmeasured = 0;
        if seen {
            self.restart();
            self.growth.floor = None;
        }
    }

    fn record_step(&mut self, requests: u64, level: f64) {
        self.present.now = requests;
        (self.present.lifted, self.present.floored) = self.present_floor(level, requests);
        self.growth.floor = Some(units::truncate_to_u64((self.present.lifted - self.present.lift).max(0.0)));
        if !self.start.warm {
            self.start.warm = self.is_warmed_up(requests);
            if self.start.warm {
                self.floors.clear();
            }
            self.growth.verdict = GrowthVerdict::Warming;
            self.update_fill();
            return;
        }
        let first = self.floors.at_scale(0);
        if self.start.baseline.is_none() && first.len() >= self.policy.baseline_floors {
            let mut levels: Vec<f64> = first.iter().map(|floor| floor.level).collect();
            self.start.baseline = stats::median(&mut levels);
            self.height.height = self.start.baseline.unwrap_or(f64::MAX);
            self.growth.baseline = self.start.baseline.map(units::truncate_to_u64);
        }
        let Some(baseline) = self.start.baseline else { return };
        self.update_fill();
        let effect = self.least_rise(baseline);
        let mut tested = false;
        for scale in 0..self.floors.len() {
            tested |= self.test_scale(scale, effect);
        }
        self.growth.law = self.shown.line.map(|line| self.growth_line(&line, requests));
        self.record_height(requests, effect, tested);
        self.judge(requests, effect, tested);
    }

    fn growth_line(&self, line: &StretchFinding, requests: u64) -> GrowthLine {
        let shift = self.pools.bytes() - self.present.lift;
        let level = line.value_at(requests) + shift;
        let half = self.policy.bound_z * line.scatter;
        let bytes = |level: f64| units::truncate_to_u64(level.max(0.0));
        GrowthLine { level: bytes(level), low: bytes(level - half), high: bytes(level + half) }
    }

    fn least_rise(&self, baseline: f64) -> f64 {
        match self.growth.series {
            MemoryKind::Host => {
                as_f64(self.policy.host_effect.0).max(self.policy.host_effect_share * baseline)
            }
            MemoryKind::Vram(_) => as_f64(self.policy.vram_effect.0),
        }
    }

    /// Returns the lowest of the latest short floors and its request number, or else the reading itself.
    fn present_floor(&self, level: f64, requests: u64) -> (f64, u64) {
        let latest = self.floors.at_scale(0).iter().rev().take(PRESENT_FLOORS);
        let least = |least: (f64, u64), floor: &FloorPoint| {
            if floor.level < least.0 { (floor.level, floor.work.requests) } else { least }
        };
        latest.fold((level, requests), least)
    }

    fn is_warmed_up(&self, requests: u64) -> bool {
        let floors = self.floors.at_scale(0);
        if requests < self.policy.warmup_requests || floors.len() < 3 * SETTLE_FLOORS {
            return false;
        }
        if requests >= WARM_UP_REQUESTS && floors.len() >= self.policy.kept {
            return true;
        }
        let of = |back: usize| {
            let end = floors.len() - back * SETTLE_FLOORS;
            let mut levels: Vec<f64> =
                floors.range(end - SETTLE_FLOORS..end).map(|floor| floor.level).collect();
            stats::median(&mut levels).unwrap_or(0.0)
        };
        let (first, second, third) = (of(2), of(1), of(0));
        let rose = second - first;
        rose < self.least_rise(first) * self.policy.settle_share
            || third - second >= self.policy.brake_ratio * rose
    }

    fn test_scale(&mut self, scale: usize, effect: f64) -> bool {
        let (window, every) = (self.policy.window, self.policy.test_every);
        let floors = self.floors.at_scale(scale);
        if !self.floors.is_due(scale, every) || (floors.len() < window && scale > 0) {
            return false;
        }
        let from = floors.len().saturating_sub(window);
        let Some(mut finding) = examine(floors.range(from..), effect, &self.policy) else { return false };
        finding.grows &= floors.len() >= window;
        let track = &mut self.tracks[scale];
        if track.recent.len() == self.policy.tests {
            track.recent.pop_front();
        }
        track.recent.push_back(finding);
        track.last = Some(finding);
        let shown = self.shown_scale();
        self.shown.line = shown.and_then(|scale| self.tracks[scale].last);
        self.shown.spread = shown.and_then(|scale| self.line_uncertainty(scale));
        self.growth.slope = self.shown.line.map(|line| line.slope);
        true
    }

    fn shown_scale(&self) -> Option<usize> {
        let lines =
            || (0..self.tracks.len()).rev().filter_map(|scale| Some((scale, self.tracks[scale].last?)));
        let grows = || lines().filter(|(_, line)| line.grows);
        // A long stretch is flat before a late leak begins: prefer a shorter one that surely grows faster.
        let outdated = |(scale, line): &(usize, StretchFinding)| {
            grows().any(|(other, shorter)| {
                other < *scale && shorter.slope.low > LATE_SLOPE_RATIO * line.slope.high
            })
        };
        let mut found =
            grows().find(|line| !outdated(line)).or_else(|| grows().next()).or_else(|| lines().next());
        found.take().map(|(scale, _)| scale)
    }

    fn finds_growth(&self) -> bool {
        self.tracks.iter().any(|track| track.last.is_some_and(|last| last.grows))
    }

    /// Returns true if growth was found repeatedly at some scale, and all floors of that scale confirm it.
    fn growth_persists(&self, effect: f64) -> bool {
        (0..self.tracks.len()).any(|scale| self.scale_persists(scale, effect).unwrap_or(false))
    }

    fn scale_persists(&self, scale: usize, effect: f64) -> Option<bool> {
        let (track, policy) = (&self.tracks[scale], &self.policy);
        let last = track.last.filter(|last| last.grows)?;
        if self.matches_prior(last.slope) {
            return Some(true);
        }
        // Use every other test: consecutive tests share most floors, every other ones only half.
        let spaced = || track.recent.iter().rev().step_by(2);
        let first = track.recent.front()?;
        let again = track.recent.iter().rev().take(2).filter(|finding| finding.grows).count() > 1;
        let often = track.recent.len() == policy.tests
            && spaced().all(|finding| finding.grows)
            && last.slope.value >= policy.persist_ratio * first.slope.value;
        let whole =
            scale_statistics(self.floors.at_scale(scale).iter(), WorkUnit::Request, self.grain(), policy)?;
        // Above scale 0, an almost straight line far above the random drift needs only one test.
        let far = scale > 0
            && whole.bent <= policy.broad_scatter * policy.straight_scatter
            && whole.far_drift
            && whole.drift
            && whole.rise >= policy.far_effect * effect;
        if !(often || again || far) {
            return None;
        }
        // Readings with requests in flight vary so much that no rise exceeds a random walk of single steps.
        // Over four steps at a time such variations cancel out, but a random walk does not.
        let rises = often
            && whole.far_drift
            && whole.rise >= policy.paid_effect * effect
            && whole.pace >= policy.paid_pace;
        if !(whole.drift || rises)
            || self.slows_down(scale, &whole, effect)
            || self.has_fallen(scale, whole.rise)
        {
            return None;
        }
        let scatter = whole.bent / policy.straight_scatter;
        let line = whole.pace >= policy.straight_ratio && scatter <= 1.0;
        // Straighter lines need less rise.
        let ruled = line && whole.rise >= policy.swift_effect * scatter.max(policy.straight_share) * effect;
        // Mixed requests bend the line; the required rise then grows with the square of the scatter.
        let broad = whole.pace >= policy.straight_ratio
            && scatter <= policy.broad_scatter
            && whole.rise >= policy.swift_effect * scatter.powi(2) * effect;
        // Only at scale 0: over longer stretches, harmless plateaus may add up to such a rise.
        let steep = scale == 0 && whole.rise >= policy.steep_effect * effect;
        let long = line || whole.rise >= LONG_EFFECT_FACTOR * effect;
        Some(far || again && (ruled || scatter > 1.0 && broad || steep) || often && long)
    }

    /// Returns true if the rise slows down in this stretch or in longer ones.
    fn slows_down(&self, scale: usize, near: &ScaleStatistics, effect: f64) -> bool {
        let far = |scale: usize| {
            let floors = self.floors.at_scale(scale);
            let enough = floors.len() >= 2 * self.policy.baseline_floors;
            enough
                .then(|| scale_statistics(floors.iter(), WorkUnit::Request, self.grain(), &self.policy))
                .flatten()
        };
        let end = self.floors.len().min(scale + 1 + self.policy.past_scales);
        let slows = |whole: &ScaleStatistics| whole.slows(effect, &self.policy);
        slows(near) || (scale + 1..end).filter_map(far).any(|far| slows(&far))
    }

    /// Returns true if memory fell earlier by a good part of its present rise, and so may fall again.
    fn has_fallen(&self, scale: usize, rise: f64) -> bool {
        let far = (scale + self.policy.past_scales).min(self.floors.len() - 1);
        let span = self.floors.at_scale(scale).len() >> (far - scale);
        has_fallen(self.floors.at_scale(far), span, self.policy.fall_share * rise)
    }

    /// Returns the allocation granularity of this memory in bytes.
    fn grain(&self) -> f64 {
        match self.growth.series {
            MemoryKind::Host => 0.0,
            MemoryKind::Vram(_) => as_f64(self.policy.vram_grain.0),
        }
    }

    fn matches_prior(&self, slope: IntervalEstimate) -> bool {
        self.prior.as_ref().is_some_and(|prior| slope.value >= PRIOR_SLOPE_RATIO * prior.slope.value)
    }

    fn record_height(&mut self, requests: u64, effect: f64, tested: bool) {
        let floor = self.present.lifted;
        if floor >= self.height.height + effect * self.policy.height_share {
            self.height.height = floor;
            self.height.grew = requests;
        } else if tested && self.finds_growth() {
            self.height.grew = requests;
        }
    }

    fn judge(&mut self, requests: u64, effect: f64, tested: bool) {
        let fill = self.growth.fill;
        let limited = self.has_allowance();
        let within = limited && fill.used <= fill.allowed;
        let grows = self.finds_growth();
        let leaks = self.growth.verdict == GrowthVerdict::Leaking;
        let stairs = if grows { None } else { self.find_stairs(effect) };
        let verdict = if within && (grows || leaks || as_f64(fill.used) >= effect) {
            GrowthVerdict::Bounded
        } else if within {
            GrowthVerdict::Steady
        } else if (leaks && requests.saturating_sub(self.height.grew) < self.calm_requests(effect))
            || (grows && tested && (self.growth_persists(effect) || self.is_paid(effect)))
        {
            GrowthVerdict::Leaking
        } else if grows || stairs.is_some() {
            GrowthVerdict::Suspected
        } else if limited && as_f64(fill.used) >= effect {
            GrowthVerdict::Bounded
        } else {
            GrowthVerdict::Steady
        };
        let changed = verdict != self.growth.verdict;
        self.growth.verdict = verdict;
        if verdict < GrowthVerdict::Suspected {
            self.growth.blame = None;
            self.paid = None;
        } else if changed || tested {
            self.growth.blame = match stairs {
                Some(stairs) => Some(stepwise_blame(&stairs)),
                None => self.find_blame(),
            };
        }
    }

    /// Finds growth in steps that are too few and too large to form a line.
    fn find_stairs(&self, effect: f64) -> Option<StepGrowth> {
        let longest = (0..self.floors.len())
            .rev()
            .find(|scale| self.floors.at_scale(*scale).len() >= self.policy.window / 2)?;
        StepGrowth::from_floors(self.floors.at_scale(longest), effect, &self.policy)
    }

    /// Counts consecutive tests that blame the same unit for nearly all of the growth.
    fn count_payer(&mut self, explained: &GrowthBlame) {
        let GrowthBlame::Pays { unit, share, .. } = *explained else { return };
        if share < PAID_SHARE || unit == WorkUnit::Hour {
            self.paid = None;
            return;
        }
        let before = self.paid.filter(|(known, _)| *known == unit).map_or(0, |(_, times)| times);
        self.paid = Some((unit, before + 1));
    }

    /// Returns true if tests kept blaming one unit and memory still rises along that unit: with mixed
    /// requests, a leak per image forms a line over images, not over requests.
    fn is_paid(&self, effect: f64) -> bool {
        let policy = &self.policy;
        let Some((unit, _)) = self.paid.filter(|(_, times)| *times >= PAID_TESTS) else {
            return false;
        };
        let long = |scale: &usize| self.floors.at_scale(*scale).len() >= policy.window;
        let Some(longest) = (0..self.floors.len()).rev().find(long) else { return false };
        let floors = self.floors.at_scale(longest);
        let Some(whole) = scale_statistics(floors.iter(), unit, self.grain(), policy) else { return false };
        let even = whole.rise >= policy.paid_effect * effect && whole.pace >= policy.paid_pace;
        // Accept a large rise that slows down, too: settling memory is not blamed on one unit for so long.
        let far = whole.rise >= policy.far_effect * effect
            && whole.end >= policy.brake_ratio
            && whole.pace >= policy.steep_ratio;
        whole.far_drift && (even || far) && !self.has_fallen(longest, whole.rise)
    }

    fn calm_requests(&self, effect: f64) -> u64 {
        let slope = self.growth.slope.map_or(0.0, |slope| slope.value);
        let step = effect * self.policy.height_share;
        let expected = if slope > 0.0 { (step / slope * CALM_FACTOR).min(1e6) } else { 0.0 };
        CALM_REQUESTS.max(units::truncate_to_u64(expected))
    }

    /// Finds the unit that causes the growth. Hours are also sought in short stretches, which average less.
    fn find_blame(&mut self) -> Option<GrowthBlame> {
        let floors = |scale| self.floors.at_scale(scale).iter().copied().collect::<Vec<_>>();
        let long = |scale: &usize| self.floors.at_scale(*scale).len() >= self.policy.window;
        let longest = (0..self.floors.len()).rev().find(long)?;
        let hourly = (0..longest).map(floors).find(|floors| hours_pay(floors, &self.policy));
        // Long stretches average the mix of work; the next shorter stretch may show a unit that they hide.
        let stretches = match hourly {
            Some(hourly) => vec![hourly],
            None => [Some(longest), longest.checked_sub(1)].into_iter().flatten().map(floors).collect(),
        };
        let explained: Vec<GrowthBlame> =
            stretches.iter().map(|floors| explain(floors, &self.policy)).collect();
        let first = explained.iter().position(|found| found.unit().is_some()).unwrap_or(0);
        // For the verdict, one unit must explain the growth, as its cause or only as its trigger.
        self.count_payer(&explained[first]);
        // If `confirm` rejects this unit, a stretch that blames another unit must not replace it.
        let unit = explained[first].unit();
        let same = explained.into_iter().zip(&stretches).filter(|(found, _)| found.unit() == unit);
        let mut confirmed = same.map(|(found, floors)| confirm(found, floors, &self.policy));
        let longest = confirmed.next()?;
        if longest.unit().is_some() {
            return Some(longest);
        }
        Some(confirmed.find(|found| found.unit().is_some()).unwrap_or(longest))
    }

    /// Returns true if growth can be within an allowance: declared memory, or host pools besides the measured
    /// ones. GPU pools are measured completely.
    fn has_allowance(&self) -> bool {
        self.declared > 0 || (self.pools.pooled && self.growth.series == MemoryKind::Host)
    }

    fn update_fill(&mut self) {
        let slack = self.policy.allowance_slack.0;
        let allowed = if self.has_allowance() { self.declared.saturating_add(slack) } else { 0 };
        let used = self.start.baseline.zip(self.growth.floor);
        let used = used.map_or(0, |(baseline, floor)| units::truncate_to_u64(as_f64(floor) - baseline));
        self.growth.fill = AllowanceFill { allowed, used };
    }
}

fn stepwise_blame(stairs: &StepGrowth) -> GrowthBlame {
    let why = format!(
        "it grows in steps: {} of some {:.0} each, one in some {:.0} requests",
        stairs.steps,
        units::ByteAmount(stairs.height),
        stairs.requests
    );
    GrowthBlame::Undecided { why }
}

fn hours(at: Duration) -> f64 {
    at.as_secs_f64() / 3600.0
}
