//! Replays a recording through the leak detector and a policy, reading by reading, with the functions that
//! run for a live backend. Returns verdicts and decisions, and carries out none.
//!
//! A recording covers one process. So a decided replacement does not restart the detector: all later readings
//! are of the same process.

mod json;
mod text;

use std::time::Duration;

use warden_policies::cooldown::{CooldownQuery, HoldReason, RecycleCooldown};
use warden_policies::growth::{GrowthMonitor, GrowthPolicy, SeriesGrowth, VerdictChange};
use warden_policies::recycle::{
    RecycleFacts, RecyclePolicy, SeriesFacts, SeriesReading, decide_without_barred,
};
use warden_policies::replacement_cost::ReplacementLoad;
use warden_policies::schedule::DAY_MINUTES;
use warden_policies::{
    BackendSample, MemoryKind, Reason, RecycleAction, RecycleDecision, VramSource, WorkDone,
};

pub(crate) use json::replay_json;
pub(crate) use text::replay_text;

#[derive(Clone, Debug)]
pub(crate) struct ReplaySettings {
    pub(crate) policy: RecyclePolicy,
    pub(crate) growth: GrowthPolicy,
    /// Bytes of host memory in declared caches.
    pub(crate) allowance: u64,
    /// Host memory of the machine in bytes, as if no other process used any. Without it, budgets in percent
    /// and forecasts of exhaustion are off.
    pub(crate) host_total: Option<u64>,
    /// Like `host_total`, for the VRAM of each GPU.
    pub(crate) gpu_total: Option<u64>,
    /// Minute of the day of the first reading. With `None`, every replacement window counts as open.
    pub(crate) starts_at: Option<u16>,
}

#[derive(Clone, Debug)]
pub(crate) struct ReplayDecision {
    pub(crate) request: u64,
    /// Time since the process was spawned.
    pub(crate) at: Duration,
    pub(crate) decision: RecycleDecision,
    /// Reason why the cooldown held the decision back.
    pub(crate) held: Option<HoldReason>,
    /// Bytes of the series that caused the decision.
    pub(crate) bytes: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct ReplayResult {
    pub(crate) readings: usize,
    /// Work of the process up to the last reading.
    pub(crate) work: WorkDone,
    /// Time from the first reading to the last.
    pub(crate) lasted: Duration,
    pub(crate) changes: Vec<VerdictChange>,
    pub(crate) actions: Vec<ReplayDecision>,
    /// Replacements that the policy would decide if its mode were not `observe`.
    pub(crate) observed: Vec<ReplayDecision>,
    pub(crate) series: Vec<SeriesFacts>,
}

impl ReplayResult {
    pub(crate) fn growth(&self) -> impl Iterator<Item = (&SeriesFacts, &SeriesGrowth)> {
        self.series.iter().filter_map(|facts| Some((facts, facts.growth.as_ref()?)))
    }
}

struct ReplayRun<'a> {
    settings: &'a ReplaySettings,
    monitor: GrowthMonitor,
    cooldown: RecycleCooldown,
    first: Option<&'a BackendSample>,
    previous: Option<&'a BackendSample>,
    idle_since: Option<Duration>,
    wanted_since: Option<Duration>,
    urgent_since: Option<Duration>,
    /// Used to report each decision only once.
    reported: Vec<(RecycleAction, Option<Reason>, Option<MemoryKind>, bool)>,
}

pub(crate) fn replay_samples(told: &ReplaySettings, samples: &[BackendSample]) -> ReplayResult {
    let mut monitor = GrowthMonitor::new(&told.growth);
    // Recorded pools are measured and subtracted, so they need no allowance.
    let measured = samples.iter().any(|sample| sample.pooled(MemoryKind::Host).is_some());
    if told.allowance > 0 && !measured {
        monitor.set_allowance(MemoryKind::Host, told.allowance);
    }
    let mut run = ReplayRun {
        settings: told,
        monitor,
        cooldown: RecycleCooldown::default(),
        first: samples.first(),
        previous: None,
        idle_since: None,
        wanted_since: None,
        urgent_since: None,
        reported: Vec::new(),
    };
    let from = samples.first().map(|sample| sample.at).unwrap_or_default();
    let last = samples.last();
    let mut done = ReplayResult {
        readings: samples.len(),
        work: last.map(|sample| sample.work).unwrap_or_default(),
        lasted: last.map_or(Duration::ZERO, |sample| sample.at.saturating_sub(from)),
        changes: Vec::new(),
        actions: Vec::new(),
        observed: Vec::new(),
        series: Vec::new(),
    };
    for sample in samples {
        done.changes.extend(run.monitor.observe(sample));
        run.watch_idle(sample);
        let facts = run.facts(sample);
        if let Some(act) = run.decide(sample, &facts) {
            let into = if act.decision.action == RecycleAction::Observe {
                &mut done.observed
            } else {
                &mut done.actions
            };
            into.push(act);
        }
        done.series = facts.series;
        run.previous = Some(sample);
    }
    done
}

impl<'a> ReplayRun<'a> {
    /// A process is idle if nothing is in flight and no request has ended since the last reading.
    fn watch_idle(&mut self, sample: &BackendSample) {
        let still = self.previous.is_some_and(|before| before.work.requests == sample.work.requests);
        self.idle_since = match (sample.in_flight, self.idle_since) {
            (0, Some(since)) if still => Some(since),
            (0, _) => Some(sample.at),
            _ => None,
        };
    }

    fn facts(&self, sample: &'a BackendSample) -> RecycleFacts {
        let since = |from: Option<Duration>| from.map(|from| sample.at.saturating_sub(from));
        let starts = self.first.map(|first| first.at).unwrap_or_default();
        let age = sample.at.saturating_sub(starts);
        let minute = self.settings.starts_at.map(|start| {
            let passed = age.as_secs() / 60 % u64::from(DAY_MINUTES);
            u16::try_from((u64::from(start) + passed) % u64::from(DAY_MINUTES)).unwrap_or_default()
        });
        RecycleFacts {
            series: self.series(sample),
            age,
            work: sample.work,
            idle_for: since(self.idle_since),
            wanted_for: since(self.wanted_since),
            urgent_for: since(self.urgent_since),
            minute,
            load: ReplacementLoad {
                requests: sample.in_flight,
                arrivals: self.monitor.rate(),
                ..ReplacementLoad::default()
            },
            ..RecycleFacts::default()
        }
    }

    fn series(&self, sample: &BackendSample) -> Vec<SeriesFacts> {
        let all = self.monitor.growth().iter().map(|growth| {
            let series = growth.series;
            let of = |sample: Option<&BackendSample>| sample.and_then(|sample| sample.charged(series));
            let (estimated, total, allowance) = match series {
                MemoryKind::Host => (false, self.settings.host_total, self.settings.allowance),
                MemoryKind::Vram(gpu) => {
                    let vram = sample.vram.iter().find(|vram| vram.gpu == gpu);
                    let guess = vram.is_some_and(|vram| vram.source == VramSource::Estimate);
                    (guess, self.settings.gpu_total, 0)
                }
            };
            let reading = SeriesReading {
                series,
                charged: sample.charged(series),
                before: of(self.previous),
                at_ready: of(self.first),
                estimated,
                total,
                // A recording lacks the memory of other programs, so assume that there are none.
                free: total.zip(sample.charged(series)).map(|(total, held)| total.saturating_sub(held)),
                allowance,
            };
            SeriesFacts::gather(&self.settings.policy, &self.monitor, &reading)
        });
        all.collect()
    }

    /// Asks the policy, and for a due replacement also the cooldown. Returns only a decision that was not
    /// reported before.
    fn decide(&mut self, sample: &BackendSample, facts: &RecycleFacts) -> Option<ReplayDecision> {
        let held = |series: Option<MemoryKind>| series.and_then(|series| sample.charged(series));
        let barred = |reason, series| {
            self.cooldown.find_bar(reason, series, held(series), &self.settings.policy).is_some()
        };
        let decision = decide_without_barred(&self.settings.policy, facts, barred);
        let since = |wanted: bool, since: Option<Duration>| wanted.then(|| since.unwrap_or(sample.at));
        self.wanted_since = since(decision.action > RecycleAction::Observe, self.wanted_since);
        self.urgent_since = since(decision.action >= RecycleAction::DrainNow, self.urgent_since);
        let reason = decision.reason?;
        let asked = decision.due && decision.action > RecycleAction::Observe;
        let ask = CooldownQuery { now: sample.at, held: held(decision.series), ..CooldownQuery::default() };
        let held = asked.then(|| self.cooldown.check(&decision, &ask, &self.settings.policy).err()).flatten();
        // Report a decision again once nothing holds it back, but do not report a due decision again when it
        // is held back.
        let key = |due| (decision.action, decision.reason, decision.series, due);
        let due = decision.due && held.is_none();
        if self.reported.contains(&key(due)) || (held.is_some() && self.reported.contains(&key(true))) {
            return None;
        }
        self.reported.push(key(due));
        if asked && held.is_none() {
            // If this call switches the reason off, the next decision shows it.
            let _switched_off = self.cooldown.record_start(sample.at, reason, &self.settings.policy);
        }
        Some(ReplayDecision {
            request: sample.work.requests,
            at: sample.at,
            bytes: decision.series.and_then(|series| sample.charged(series)),
            decision,
            held,
        })
    }
}
