//! Trial of a canary build: collects evidence on both builds and draws the verdict.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use super::evidence::{MoreDeaths, MoreFailures, PositiveMean, RequestBlocks};
use super::{
    ArmMemory, ArmReport, CanaryConfig, CanaryReport, CanaryVerdict, QuestionEvidence, TrialArm,
    TrialExchange,
};
use crate::growth::stats::median;
use crate::growth::{self, SeriesGrowth};
use crate::units;

/// Successful answers without a token count, as for embeddings, after which token speeds are not needed.
const MISSING_PACE_ANSWERS: u64 = 32;
/// Error rate of each test (failures, latency, pace) that must pass before a canary counts as good.
const WRONG_EQUAL_CHANCE: f64 = 0.05;
/// Number of tests that may call a canary worse by chance: failures, deaths, latency, pace.
const WORSE_TESTS: f64 = 4.0;
/// Most remembered conversations, more than any trial needs; speeds of later conversations are not compared.
const CONVERSATIONS_MOST: usize = 65_536;

/// Trial of a canary build against the serving one.
#[derive(Clone, Debug)]
pub struct CanaryTrial {
    numbers: CanaryConfig,
    base: ArmState,
    canary: ArmState,
    seen: HashSet<(TrialArm, u64)>,
    failures: RequestBlocks<bool>,
    more_failures: MoreFailures,
    not_many_more: PositiveMean,
    more_deaths: MoreDeaths,
    latency: SpeedComparison,
    pace: SpeedComparison,
    /// Successful canary answers before the first one with a token speed.
    paceless: u64,
    slowest_ms: f64,
}

#[derive(Clone, Debug, Default)]
struct ArmState {
    report: ArmReport,
    latencies: VecDeque<f64>,
    paces: VecDeque<f64>,
    growth: Vec<SeriesGrowth>,
}

#[derive(Clone, Debug)]
struct SpeedComparison {
    blocks: RequestBlocks<f64>,
    slower: PositiveMean,
    not_slower: PositiveMean,
    margin: f64,
}

impl SpeedComparison {
    fn new(numbers: &CanaryConfig) -> Self {
        let margin = 1.0 + numbers.slower.max(0.0);
        Self {
            blocks: RequestBlocks::new(numbers.beside),
            slower: PositiveMean::new(),
            not_slower: PositiveMean::new(),
            margin,
        }
    }

    /// Adds a duration. A canary `margin` times as slow as the serving build loses half of the comparisons.
    fn note(&mut self, arm: TrialArm, ms: f64) {
        let Some((tried, others)) = self.blocks.add_value(arm, ms) else { return };
        let lost = |other: f64| match tried.total_cmp(&(other * self.margin)) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 0.5,
            std::cmp::Ordering::Greater => 1.0,
        };
        let count = units::as_f64(others.len() as u64);
        let share = others.iter().map(|other| lost(*other)).sum::<f64>() / count;
        self.slower.add_value(2.0 * share - 1.0);
        self.not_slower.add_value(1.0 - 2.0 * share);
    }
}

impl CanaryTrial {
    /// Creates a trial without evidence.
    pub fn new(numbers: CanaryConfig) -> Self {
        Self {
            numbers,
            base: ArmState::default(),
            canary: ArmState::default(),
            seen: HashSet::new(),
            failures: RequestBlocks::new(numbers.beside),
            more_failures: MoreFailures::new(),
            not_many_more: PositiveMean::new(),
            more_deaths: MoreDeaths::new(),
            latency: SpeedComparison::new(&numbers),
            pace: SpeedComparison::new(&numbers),
            paceless: 0,
            slowest_ms: 0.0,
        }
    }

    fn arm_state(&mut self, arm: TrialArm) -> &mut ArmState {
        match arm {
            TrialArm::Base => &mut self.base,
            TrialArm::Canary => &mut self.canary,
        }
    }

    /// Records an ended request. Callers leave out requests whose result does not depend on the build.
    pub fn record_exchange(&mut self, exchange: &TrialExchange) {
        let TrialExchange { arm, conversation, failed, latency_ms, token_ms } = *exchange;
        let shown = self.numbers.shown;
        let fresh = self.seen.len() < CONVERSATIONS_MOST && self.seen.insert((arm, conversation));
        let sound = |ms: &f64| ms.is_finite() && *ms >= 0.0 && !failed;
        let (latency_ms, token_ms) = (latency_ms.filter(sound), token_ms.filter(sound));
        if arm == TrialArm::Base {
            self.slowest_ms = self.slowest_ms.max(latency_ms.unwrap_or(0.0));
        }
        let side = self.arm_state(arm);
        side.report.requests += 1;
        side.report.failures += u64::from(failed);
        push_bounded(&mut side.latencies, latency_ms, shown);
        push_bounded(&mut side.paces, token_ms, shown);
        if arm == TrialArm::Canary && !failed && self.canary.paces.is_empty() {
            self.paceless += 1;
        }
        if let Some((tried, others)) = self.failures.add_value(arm, failed) {
            let (all, broken) = (others.len() as u64, others.iter().filter(|failed| **failed).count() as u64);
            self.more_failures.add_block(tried, all, broken);
            let more = f64::from(u8::from(tried)) - units::as_f64(broken) / units::as_f64(all);
            self.not_many_more.add_value(self.numbers.failing - more);
        }
        if fresh {
            if let Some(ms) = latency_ms {
                self.latency.note(arm, ms);
            }
            if let Some(ms) = token_ms {
                self.pace.note(arm, ms);
            }
        }
    }

    /// Records the death of a build's process through its own fault.
    pub fn record_death(&mut self, arm: TrialArm) {
        // The request that was running is not counted yet, so add 1.
        let work = |side: &ArmState| units::as_f64(side.report.requests + 1);
        let (tried, other) = (work(&self.canary), work(&self.base));
        self.more_deaths.add_death(arm == TrialArm::Canary, tried / (tried + other));
        self.arm_state(arm).report.deaths += 1;
    }

    /// Records a symptom of a build's process.
    pub fn record_symptom(&mut self, arm: TrialArm, words: String) {
        let most = self.numbers.beside;
        let unwell = &mut self.arm_state(arm).report.unwell;
        if !unwell.contains(&words) && unwell.len() < most {
            unwell.push(words);
        }
    }

    /// Records a build's present memory.
    pub fn record_memory(&mut self, arm: TrialArm, memory: ArmMemory) {
        let side = self.arm_state(arm);
        side.report.growth = memory.growth.iter().map(|growth| growth.verdict).max();
        side.report.host_at_ready = memory.host_at_ready.or(side.report.host_at_ready);
        side.growth = memory.growth;
    }

    /// Returns the time to wait for the canary's answer before the serving build gets the request instead.
    pub fn patience(&self) -> Duration {
        let ms = self.slowest_ms * self.numbers.patience;
        Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX).max(self.numbers.patience_least)
    }

    /// Returns the verdict after `elapsed` time, and true if the trial is over.
    pub fn judge(&self, elapsed: Duration) -> (CanaryVerdict, bool) {
        let reasons = self.reasons();
        if !reasons.is_empty() {
            return (CanaryVerdict::Worse { reasons }, true);
        }
        let mut missing = self.missing();
        if missing.is_empty() {
            return (CanaryVerdict::BetterOrEqual, true);
        }
        let CanaryConfig { requests, time, .. } = self.numbers;
        let ended = if self.canary.report.requests >= requests {
            Some(format!("it has answered {requests} requests, the maximum of a canary"))
        } else if elapsed >= time {
            Some(format!("{} have passed", units::format_span(time)))
        } else {
            None
        };
        let over = ended.is_some();
        missing.splice(0..0, ended);
        (CanaryVerdict::Undecided { missing }, over)
    }

    fn worse_needs(&self) -> f64 {
        WORSE_TESTS / self.numbers.wrong
    }

    fn expects_pace(&self) -> bool {
        self.paceless < MISSING_PACE_ANSWERS
    }

    fn reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        let (base, canary) = (&self.base.report, &self.canary.report);
        let needs = self.worse_needs();
        if self.more_failures.wealth() >= needs {
            reasons.push(format!(
                "it fails more often: {} of {} requests, against {} of {}",
                canary.failures, canary.requests, base.failures, base.requests
            ));
        }
        let slower = |what: &str, ours: Option<f64>, theirs: Option<f64>| {
            let ms = |ms: Option<f64>| ms.map_or_else(|| "?".to_owned(), |ms| format!("{ms:.1} ms"));
            format!("{what}: {} against {} (medians)", ms(ours), ms(theirs))
        };
        let (base_shown, canary_shown) = (self.base.with_medians(), self.canary.with_medians());
        if self.latency.slower.wealth() >= needs {
            reasons.push(slower("its answers begin later", canary_shown.latency_ms, base_shown.latency_ms));
        }
        if self.pace.slower.wealth() >= needs {
            reasons.push(slower("it takes longer for a token", canary_shown.token_ms, base_shown.token_ms));
        }
        if self.more_deaths.wealth() >= needs {
            reasons.push(format!(
                "it died {} times in {} requests, the other {} times in {}",
                canary.deaths, canary.requests, base.deaths, base.requests
            ));
        }
        for words in &canary.unwell {
            if !base.unwell.contains(words) {
                reasons.push(format!("it has a health problem that the other has not: {words}"));
            }
        }
        reasons.extend(self.leak_reason());
        reasons
    }

    fn leak_reason(&self) -> Option<String> {
        self.canary.growth.iter().filter(|growth| growth.verdict.leaks()).find_map(|growth| {
            let other = self.base.growth.iter().find(|other| other.series == growth.series);
            let other = other.filter(|other| other.verdict.leaks());
            let series = growth.series;
            match (other, growth.slope) {
                (None, _) => Some(format!("it leaks {series} memory, and the other does not")),
                (Some(other), Some(slope)) if other.slope.is_some_and(|other| slope.low > other.high) => {
                    Some(format!("both leak {series} memory, and it leaks more"))
                }
                (Some(_), _) => None,
            }
        })
    }

    fn missing(&self) -> Vec<String> {
        let needs = 1.0 / WRONG_EQUAL_CHANCE;
        let mut missing = Vec::new();
        let mut ask = |wealth: f64, what: &str| {
            if wealth < needs {
                missing.push(format!("{what} (evidence {wealth:.1} of {needs:.0})"));
            }
        };
        ask(self.not_many_more.wealth(), "requests, to rule out that it fails more often");
        ask(self.latency.not_slower.wealth(), "conversations, to rule out that its answers begin later");
        if self.expects_pace() {
            ask(self.pace.not_slower.wealth(), "conversations, to rule out that it takes longer for a token");
        }
        let known = |growth: &SeriesGrowth| {
            matches!(growth.verdict, growth::GrowthVerdict::Steady | growth::GrowthVerdict::Bounded)
        };
        let as_the_other = |growth: &SeriesGrowth| {
            let other = self.base.growth.iter().find(|other| other.series == growth.series);
            growth.verdict.is_known() && other.is_some_and(|other| other.verdict >= growth.verdict)
        };
        match self.canary.growth.iter().find(|growth| !known(growth) && !as_the_other(growth)) {
            Some(growth) => missing.push(format!(
                "work, to tell what its memory does ({}: {})",
                growth.series,
                growth.verdict.as_str()
            )),
            None if self.canary.report.requests < self.numbers.memory_requests => {
                let CanaryConfig { memory_requests, .. } = self.numbers;
                missing.push(format!(
                    "work, to tell that it does not leak ({} of {memory_requests} requests)",
                    self.canary.report.requests
                ));
            }
            None if self.canary.growth.is_empty() => missing.push("a reading of its memory".to_owned()),
            None => {}
        }
        missing
    }

    /// Returns the displayed state.
    pub fn report(&self) -> CanaryReport {
        let (worse_needs, not_worse_needs) = (self.worse_needs(), 1.0 / WRONG_EQUAL_CHANCE);
        let weight = |of: &str, worse: f64, not_worse: f64| QuestionEvidence {
            of: of.to_owned(),
            worse: worse.min(f64::MAX),
            worse_needs,
            not_worse: not_worse.min(f64::MAX),
            not_worse_needs,
        };
        let mut evidence = vec![
            weight("failures", self.more_failures.wealth(), self.not_many_more.wealth()),
            weight("latency", self.latency.slower.wealth(), self.latency.not_slower.wealth()),
        ];
        if self.expects_pace() {
            evidence.push(weight("pace", self.pace.slower.wealth(), self.pace.not_slower.wealth()));
        }
        CanaryReport { base: self.base.with_medians(), canary: self.canary.with_medians(), evidence }
    }
}

impl ArmState {
    fn with_medians(&self) -> ArmReport {
        let of = |values: &VecDeque<f64>| median(&mut values.iter().copied().collect::<Vec<_>>());
        ArmReport { latency_ms: of(&self.latencies), token_ms: of(&self.paces), ..self.report.clone() }
    }
}

fn push_bounded(values: &mut VecDeque<f64>, value: Option<f64>, most: usize) {
    let Some(value) = value else { return };
    if values.len() >= most {
        values.pop_front();
    }
    values.push_back(value);
}
