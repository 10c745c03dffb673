//! Runs one strategy in one simulated world: a small supervisor on simulated time.

use std::time::Duration;

use super::{RestartStrategy, SimulatedPolicy, SimulationScenario, StrategyOutcome};
use crate::cooldown::working_set::PassedBudgets;
use crate::cooldown::{CooldownQuery, HoldReason, RecycleCooldown, recycle_helped};
use crate::growth::GrowthMonitor;
use crate::recycle::{
    RecycleAction, RecycleDecision, RecycleFacts, SeriesFacts, SeriesReading, decide_without_barred,
};
use crate::replacement_cost::{LullHistory, ReplacementLoad};
use crate::sample::{BackendSample, MemoryKind};
use crate::schedule::{DAY_MINUTES, DayWindows};
use crate::world::WorldRun;

/// A restart that may turn out futile: kind of memory, bytes before, bytes of a fresh process, and the limit.
type PendingVerdict = (MemoryKind, u64, Option<u64>, Option<u64>);

pub(super) struct StrategyRun<'a> {
    scenario: &'a SimulationScenario,
    strategy: &'a RestartStrategy<'a>,
    world: WorldRun,
    outcome: StrategyOutcome,
    /// World clock time in seconds until which no process serves.
    down_until: f64,
    /// Requests of the present process; `shortest`: fewest requests after which memory was exhausted.
    lived: u64,
    shortest: Option<u64>,
    ready_at: f64,
    mind: Option<SimulatedBackend>,
    /// Decision that waits for a quiet moment.
    pending: Option<RecycleDecision>,
}

struct SimulatedBackend {
    monitor: GrowthMonitor,
    cooldown: RecycleCooldown,
    lulls: LullHistory,
    wanted: Option<f64>,
    urgent: Option<f64>,
    last: Option<BackendSample>,
    previous: Option<BackendSample>,
    at_ready: Option<BackendSample>,
    waiting: Option<PendingVerdict>,
    passed: PassedBudgets,
}

impl<'a> StrategyRun<'a> {
    pub(super) fn new(scenario: &'a SimulationScenario, strategy: &'a RestartStrategy<'a>) -> Self {
        let name = match strategy {
            RestartStrategy::Nothing => "no policy".to_owned(),
            RestartStrategy::Every(requests) => format!("every {requests} requests"),
            RestartStrategy::Policy(_) => "policy".to_owned(),
        };
        let mind = match strategy {
            RestartStrategy::Policy(policy) => Some(SimulatedBackend::new(scenario, policy)),
            _ => None,
        };
        Self {
            scenario,
            strategy,
            world: scenario.world.run(),
            outcome: StrategyOutcome { strategy: name, ..StrategyOutcome::default() },
            down_until: 0.0,
            lived: 0,
            shortest: None,
            ready_at: 0.0,
            mind,
            pending: None,
        }
    }

    /// Runs the strategy; also returns the fewest requests after which memory was exhausted.
    pub(super) fn run(mut self) -> (StrategyOutcome, Option<u64>) {
        for _ in 0..self.scenario.requests {
            self.sleep();
            self.request();
            let sample = self.world.sample();
            if self.is_exhausted(&sample) {
                self.exhaust_memory(false);
            } else {
                self.judge(sample);
            }
        }
        self.outcome.hours = self.world.clock() / 3600.0;
        (self.outcome, self.shortest)
    }

    /// Lets a time of the day without requests pass, during which restarts cost least.
    fn sleep(&mut self) {
        let asleep = &self.scenario.asleep;
        let minute = minute(self.world.clock());
        if *asleep == DayWindows::ALWAYS || !asleep.is_open(minute) {
            return;
        }
        let left =
            (1..DAY_MINUTES).find(|ahead| !asleep.is_open((minute + ahead) % DAY_MINUTES)).unwrap_or(0);
        let begun = self.world.clock();
        // Windows of the policy open at full minutes, so ask the policy once a minute.
        for _ in 0..left {
            self.world.wait(60.0);
            self.handle_quiet(begun, self.world.clock());
        }
    }

    fn request(&mut self) {
        let begun = self.world.clock();
        let before = self.pending.is_some().then(|| self.world.clone());
        self.world.request();
        let idle_since = begun + self.scenario.service.as_secs_f64();
        let quiet_at = idle_since + self.quiet_for();
        if self.world.clock() >= quiet_at {
            match (before, &mut self.mind) {
                (Some(before), _) => {
                    // Return to the quiet moment before this request; a fresh process may get the request.
                    let after = std::mem::replace(&mut self.world, before);
                    self.world.wait(quiet_at - begun);
                    if self.handle_quiet(idle_since, quiet_at) {
                        self.world.request();
                    } else {
                        self.world = after;
                    }
                }
                (None, Some(mind)) => mind.lulls.record_lull(duration(idle_since)),
                (None, None) => {}
            }
        }
        self.outcome.requests += 1;
        self.lived += 1;
        let wait = self.down_until - self.world.clock();
        if wait > 0.0 {
            self.outcome.waited += 1;
            self.outcome.waited_minutes += wait / 60.0;
        }
    }

    fn quiet_for(&self) -> f64 {
        match self.strategy {
            RestartStrategy::Policy(policy) => policy.recycle.common.quiet_for.as_secs_f64(),
            _ => 0.0,
        }
    }

    /// Returns the mean number of requests in flight, at least one.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small positive number")]
    fn in_flight(&self) -> u32 {
        (self.scenario.world.load.per_second * self.scenario.service.as_secs_f64()).round().max(1.0) as u32
    }

    fn is_exhausted(&self, sample: &BackendSample) -> bool {
        let over = |series: MemoryKind, limit| sample.charged(series).is_some_and(|bytes| bytes > limit);
        over(MemoryKind::Host, self.scenario.memory)
            || sample.vram.iter().any(|vram| over(MemoryKind::Vram(vram.gpu), self.scenario.device))
    }

    /// Counts exhausted memory: running requests fail, and the process restarts.
    fn exhaust_memory(&mut self, caused: bool) {
        self.outcome.out_of_memory += 1;
        self.outcome.out_of_memory_caused += u64::from(caused);
        self.outcome.failed += u64::from(self.in_flight());
        if !caused {
            self.shortest = Some(self.shortest.map_or(self.lived, |shortest| shortest.min(self.lived)));
        }
        self.start_fresh(self.scenario.load_time.as_secs_f64());
    }

    fn start_fresh(&mut self, gap: f64) {
        self.world.restart();
        self.lived = 0;
        self.ready_at = self.world.clock() + gap;
        self.down_until = self.down_until.max(self.ready_at);
        self.pending = None;
        if let (Some(mind), RestartStrategy::Policy(policy)) = (&mut self.mind, self.strategy) {
            mind.record_respawn(self.scenario, policy);
        }
    }

    /// Carries out a planned restart. `idle`: no request is in flight.
    fn restart(&mut self, reason: &str, idle: bool, kill: bool) {
        self.outcome.restarts += 1;
        match self.outcome.reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, count)) => *count += 1,
            None => self.outcome.reasons.push((reason.to_owned(), 1)),
        }
        let draining = if idle || kill { 0.0 } else { self.scenario.service.as_secs_f64() };
        if kill && !idle {
            self.outcome.failed += u64::from(self.in_flight());
        }
        if !self.scenario.overlap || kill {
            self.start_fresh(draining + self.scenario.load_time.as_secs_f64());
            return;
        }
        let both = |series, fresh: u64, limit: u64| {
            self.mind
                .as_ref()
                .and_then(|mind| mind.last.as_ref()?.charged(series))
                .unwrap_or(0)
                .saturating_add(fresh)
                > limit
        };
        let scenario = self.scenario;
        let vram = scenario.world.vram.unwrap_or(0);
        let gpus = self.mind.as_ref().and_then(|mind| mind.last.as_ref()).map(|sample| sample.vram.clone());
        let full = both(MemoryKind::Host, scenario.world.host, scenario.memory)
            || gpus
                .unwrap_or_default()
                .iter()
                .any(|gpu| both(MemoryKind::Vram(gpu.gpu), vram, scenario.device));
        if full { self.exhaust_memory(true) } else { self.start_fresh(0.0) }
    }

    /// Handles idle time from `since` to `now`. Returns true if a restart took place.
    fn handle_quiet(&mut self, since: f64, now: f64) -> bool {
        let RestartStrategy::Policy(policy) = self.strategy else { return false };
        let idle = duration(now - since);
        let Some(mind) = &mut self.mind else { return false };
        if idle < policy.recycle.common.quiet_for {
            return false;
        }
        mind.lulls.record_lull(duration(since));
        if self.pending.is_none() {
            return false;
        }
        let facts = self.facts(policy, Some(idle));
        self.decide_and_act(policy, &facts, true)
    }

    /// Handles the reading after a request.
    fn judge(&mut self, sample: BackendSample) {
        if let RestartStrategy::Every(requests) = self.strategy
            && self.lived >= *requests
        {
            self.restart("max_requests", false, false);
        }
        let (RestartStrategy::Policy(policy), Some(mind)) = (self.strategy, &mut self.mind) else { return };
        mind.monitor.observe(&sample);
        if let Some((series, before, fresh, limit)) = mind.waiting.take()
            && let Some(after) = sample.charged(series)
            && let Some(held) = mind.cooldown.record_result(
                series,
                recycle_helped(before, after, fresh, limit),
                &policy.recycle,
            )
        {
            record_hold(&mut self.outcome, held);
        }
        mind.at_ready.get_or_insert_with(|| sample.clone());
        mind.previous = mind.last.replace(sample);
        let facts = self.facts(policy, None);
        self.decide_and_act(policy, &facts, false);
    }

    fn facts(&self, policy: &SimulatedPolicy, idle_for: Option<Duration>) -> RecycleFacts {
        let Some(mind) = &self.mind else { return RecycleFacts::default() };
        let now = self.world.clock();
        let since = |at: Option<f64>| at.map(|at| duration(now - at));
        let Some(sample) = &mind.last else { return RecycleFacts::default() };
        let reading = |series, total: u64| SeriesReading {
            series,
            charged: sample.charged(series),
            before: mind.previous.as_ref().and_then(|sample| sample.charged(series)),
            at_ready: mind.at_ready.as_ref().and_then(|sample| sample.charged(series)),
            estimated: false,
            total: Some(total),
            free: sample.charged(series).map(|charged| total.saturating_sub(charged)),
            allowance: if series == MemoryKind::Host { self.scenario.allowance } else { 0 },
        };
        let gpus = sample.vram.iter().map(|vram| reading(MemoryKind::Vram(vram.gpu), self.scenario.device));
        let readings = std::iter::once(reading(MemoryKind::Host, self.scenario.memory)).chain(gpus);
        let requests = if idle_for.is_some() { 0 } else { self.in_flight() };
        let tokens = self.scenario.world.load.output_tokens;
        let seconds = self.scenario.service.as_secs_f64().max(0.001);
        RecycleFacts {
            series: readings
                .map(|reading| SeriesFacts::gather(&policy.recycle, &mind.monitor, &reading))
                .collect(),
            age: duration(now - self.ready_at),
            work: sample.work,
            idle_for,
            wanted_for: since(mind.wanted),
            urgent_for: since(mind.urgent),
            minute: Some(minute(now)),
            load: ReplacementLoad {
                load_time: Some(self.scenario.load_time),
                requests,
                tokens: u64::from(requests) * tokens.1 / 2,
                tokens_per_second: u32::try_from(tokens.1 / 2)
                    .ok()
                    .map(|mean| f64::from(mean * requests) / seconds),
                arrivals: mind.monitor.rate(),
                overlap: self.scenario.overlap,
                lull_every: Some(mind.lulls.expected_interval(duration(now))),
            },
            unit: 0.5,
            ..RecycleFacts::default()
        }
    }

    fn decide_and_act(&mut self, policy: &SimulatedPolicy, facts: &RecycleFacts, idle: bool) -> bool {
        let now = self.world.clock();
        let Some(mind) = &mut self.mind else { return false };
        let load_time = Some(self.scenario.load_time);
        for held in mind.passed.add_facts(facts, load_time, &mut mind.cooldown, &policy.recycle) {
            record_hold(&mut self.outcome, held);
        }
        let held = |series: Option<MemoryKind>| facts.charged(series);
        let barred =
            |reason, series| mind.cooldown.find_bar(reason, series, held(series), &policy.recycle).is_some();
        let decision = decide_without_barred(&policy.recycle, facts, barred);
        let wanted = decision.action != RecycleAction::Observe;
        mind.wanted = wanted.then(|| mind.wanted.unwrap_or(now));
        mind.urgent = (decision.action >= RecycleAction::DrainNow).then(|| mind.urgent.unwrap_or(now));
        self.pending = wanted.then_some(decision);
        let (true, Some(reason)) = (decision.due, decision.reason) else { return false };
        let ask =
            CooldownQuery { now: duration(now), load_time, unit: facts.unit, held: held(decision.series) };
        if let Err(held) = mind.cooldown.check(&decision, &ask, &policy.recycle) {
            record_hold(&mut self.outcome, held);
            return false;
        }
        if let Some(held) = mind.cooldown.record_start(duration(now), reason, &policy.recycle) {
            record_hold(&mut self.outcome, held);
        }
        if let Some(first) = mind.passed.find(reason, decision.series) {
            mind.cooldown.record_replacement(first, load_time, &policy.recycle);
        }
        let series = decision.series.filter(|_| reason.is_memory());
        let waiting = series.and_then(|series| {
            let known = facts.series.iter().find(|known| known.series == series);
            let before = mind.last.as_ref()?.charged(series)?;
            Some((series, before, known.and_then(SeriesFacts::fresh), decision.limit_bytes))
        });
        self.restart(reason.as_str(), idle, decision.action == RecycleAction::KillNow);
        let ready = duration(self.ready_at);
        if let Some(mind) = &mut self.mind {
            mind.cooldown.record_ready(ready);
            mind.waiting = waiting;
        }
        true
    }
}

impl SimulatedBackend {
    fn new(scenario: &SimulationScenario, policy: &SimulatedPolicy) -> Self {
        Self {
            monitor: monitor(scenario, policy, Vec::new()),
            cooldown: RecycleCooldown::default(),
            lulls: LullHistory::new(&crate::defaults().moment, Duration::ZERO),
            wanted: None,
            urgent: None,
            last: None,
            previous: None,
            at_ready: None,
            waiting: None,
            passed: PassedBudgets::default(),
        }
    }

    fn record_respawn(&mut self, scenario: &SimulationScenario, policy: &SimulatedPolicy) {
        self.monitor = monitor(scenario, policy, self.monitor.priors());
        (self.last, self.previous, self.at_ready) = (None, None, None);
        (self.wanted, self.urgent, self.waiting) = (None, None, None);
        self.passed = PassedBudgets::default();
    }
}

fn monitor(
    scenario: &SimulationScenario,
    policy: &SimulatedPolicy,
    priors: Vec<crate::growth::LeakPrior>,
) -> GrowthMonitor {
    let mut monitor = GrowthMonitor::with_prior(&policy.growth, priors);
    monitor.set_allowance(MemoryKind::Host, scenario.allowance);
    monitor
}

/// Records a permanent cooldown reason once.
fn record_hold(outcome: &mut StrategyOutcome, held: HoldReason) {
    if !matches!(held, HoldReason::TooSoon { .. }) {
        let text = held.to_string();
        if !outcome.held.contains(&text) {
            outcome.held.push(text);
        }
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// Returns the minute of the day; the simulated world begins at midnight.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "minutes of the day, 0 to 1439")]
fn minute(clock: f64) -> u16 {
    ((clock / 60.0).rem_euclid(f64::from(DAY_MINUTES))).floor() as u16 % DAY_MINUTES
}
