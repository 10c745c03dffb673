//! Runs the simulation of a trace, event by event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::{RequestTrace, TraceModel, TraceScore};
use crate::ModelName;
use crate::book::{MemoryNeeds, NeedPurpose};
use crate::loading::{
    LoadSpec, LoaderOrder, LoadingConfig, LoadingState, MemoryAmounts, ModelActivity, ModelId, ModelReading,
};

/// Delay from the last answer of a model that is being unloaded until its memory is free.
const MEMORY_FREE_DELAY: Duration = Duration::from_millis(500);

/// Pause between decisions while requests wait.
const WAITING_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time after the last arrival at which an unanswered request counts as never answered.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ModelPlace {
    #[default]
    Out,
    Loading,
    Loaded,
    Leaving,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ModelSight {
    pub(super) here: ModelPlace,
    pub(super) waiting: usize,
    /// Arrival time of the first waiting request.
    pub(super) oldest: Option<Duration>,
    pub(super) in_flight: u32,
    pub(super) used: Duration,
    asked: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelOrder {
    Load(usize),
    Unload(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TraceEvent {
    Done(usize),
    Gone(usize),
    Loaded(usize),
    Comes(usize),
    Look,
}

struct TraceRun<'a> {
    trace: &'a RequestTrace,
    sights: Vec<ModelSight>,
    queues: Vec<VecDeque<usize>>,
    events: BinaryHeap<Reverse<(Duration, TraceEvent)>>,
    waits: Vec<Duration>,
    score: TraceScore,
}

pub(super) trait LoadingRule {
    fn decide(&mut self, now: Duration, sights: &[ModelSight]) -> Vec<ModelOrder>;

    fn note_loaded(&mut self, _model: usize, _now: Duration) {}

    fn note_gone(&mut self, _model: usize) {}

    /// Returns the pause until the next decision if nothing happens and no request waits.
    fn idle_interval(&self) -> Option<Duration> {
        None
    }
}

/// Simulates a trace under the loading decisions of this crate.
pub(super) fn run(trace: &RequestTrace, numbers: &LoadingConfig) -> TraceScore {
    play(trace, &mut OwnRule::new(trace, numbers))
}

pub(super) fn play(trace: &RequestTrace, rule: &mut dyn LoadingRule) -> TraceScore {
    let mut run = TraceRun {
        trace,
        sights: vec![ModelSight::default(); trace.models.len()],
        queues: vec![VecDeque::new(); trace.models.len()],
        events: BinaryHeap::new(),
        waits: Vec::with_capacity(trace.requests.len()),
        score: TraceScore::default(),
    };
    for (number, request) in trace.requests.iter().enumerate() {
        run.events.push(Reverse((request.at, TraceEvent::Comes(number))));
    }
    let end = trace.requests.last().map_or(Duration::ZERO, |last| last.at) + ANSWER_TIMEOUT;
    let mut looks = false;
    while let Some(Reverse((now, event))) = run.events.pop() {
        if now > end {
            break;
        }
        looks &= event != TraceEvent::Look;
        run.take(now, event, rule);
        // Let newly loaded models serve before the rule can unload them.
        for model in 0..trace.models.len() {
            run.serve(now, model);
        }
        for order in rule.decide(now, &run.sights) {
            run.carry_out(now, order);
        }
        let waits = run.sights.iter().any(|sight| sight.waiting > 0);
        let loaded = run.sights.iter().any(|sight| sight.here == ModelPlace::Loaded);
        let pause = if waits { Some(WAITING_POLL_INTERVAL) } else { rule.idle_interval().filter(|_| loaded) };
        if !looks
            && let Some(pause) = pause
            && run.waits.len() < trace.requests.len()
        {
            run.events.push(Reverse((now + pause, TraceEvent::Look)));
            looks = true;
        }
    }
    run.finish()
}

impl TraceRun<'_> {
    fn take(&mut self, now: Duration, event: TraceEvent, rule: &mut dyn LoadingRule) {
        match event {
            TraceEvent::Comes(number) => {
                let model = self.trace.requests[number].model;
                self.queues[model].push_back(number);
                let sight = &mut self.sights[model];
                sight.asked += 1;
                sight.used = now;
            }
            TraceEvent::Done(model) => {
                let sight = &mut self.sights[model];
                sight.in_flight -= 1;
                sight.used = now;
                if sight.here == ModelPlace::Leaving && sight.in_flight == 0 {
                    self.events.push(Reverse((now + MEMORY_FREE_DELAY, TraceEvent::Gone(model))));
                }
            }
            TraceEvent::Gone(model) => {
                self.sights[model].here = ModelPlace::Out;
                rule.note_gone(model);
            }
            TraceEvent::Loaded(model) => {
                // A model that was unloaded while it was still loading does not become loaded.
                if self.sights[model].here == ModelPlace::Loading {
                    self.sights[model].here = ModelPlace::Loaded;
                    rule.note_loaded(model, now);
                }
            }
            TraceEvent::Look => {}
        }
        self.count();
    }

    fn count(&mut self) {
        for (sight, queue) in self.sights.iter_mut().zip(&self.queues) {
            sight.waiting = queue.len();
            sight.oldest = queue.front().map(|number| self.trace.requests[*number].at);
        }
    }

    fn carry_out(&mut self, now: Duration, order: ModelOrder) {
        match order {
            ModelOrder::Load(model) => {
                let tenant = &self.trace.models[model];
                self.sights[model].here = ModelPlace::Loading;
                self.score.loads += 1;
                self.events.push(Reverse((now + tenant.load, TraceEvent::Loaded(model))));
            }
            ModelOrder::Unload(model) => {
                let sight = &mut self.sights[model];
                sight.here = ModelPlace::Leaving;
                if sight.in_flight == 0 {
                    self.events.push(Reverse((now + MEMORY_FREE_DELAY, TraceEvent::Gone(model))));
                }
            }
        }
    }

    fn serve(&mut self, now: Duration, model: usize) {
        let slots = self.trace.models[model].slots;
        while self.sights[model].here == ModelPlace::Loaded && self.sights[model].in_flight < slots {
            let Some(number) = self.queues[model].pop_front() else { break };
            let request = self.trace.requests[number];
            self.waits.push(now.saturating_sub(request.at));
            self.sights[model].in_flight += 1;
            self.events.push(Reverse((now + request.duration, TraceEvent::Done(model))));
        }
        self.count();
    }

    fn finish(mut self) -> TraceScore {
        self.waits.sort_unstable();
        let at = |share: usize| {
            let index = (self.waits.len() * share).div_ceil(100).saturating_sub(1);
            self.waits.get(index).copied().unwrap_or_default()
        };
        TraceScore {
            p99: at(99),
            longest: at(100),
            unserved: self.trace.requests.len() - self.waits.len(),
            ..self.score
        }
    }
}

/// The loading decisions of this crate, as made for real models.
struct OwnRule<'a> {
    loading: LoadingState,
    models: &'a [TraceModel],
    names: Vec<ModelId>,
}

impl<'a> OwnRule<'a> {
    fn new(trace: &'a RequestTrace, numbers: &LoadingConfig) -> Self {
        let mut loading = LoadingState::new(numbers.clone());
        loading.capacity = MemoryAmounts { host: u64::MAX, gpus: vec![trace.memory] };
        let name = |model: &TraceModel| ModelId { name: ModelName::new(&model.name), incarnation: 0 };
        let names: Vec<ModelId> = trace.models.iter().map(name).collect();
        for (who, model) in names.iter().zip(&trace.models) {
            let needs =
                MemoryNeeds { gpu: vec![(NeedPurpose::Weights, model.bytes)], ..MemoryNeeds::default() };
            loading.models.set_spec(who, LoadSpec { needs: Some(needs), replicas: 1, ..LoadSpec::default() });
        }
        Self { loading, models: &trace.models, names }
    }
}

impl LoadingRule for OwnRule<'_> {
    fn decide(&mut self, now: Duration, sights: &[ModelSight]) -> Vec<ModelOrder> {
        for (who, sight) in self.names.iter().zip(sights) {
            if sight.here == ModelPlace::Out && sight.waiting > 0 {
                self.loading.models.enqueue(who, false);
            }
        }
        let names = &self.names;
        let number = |who: &ModelId| names.iter().position(|name| name == who);
        let seen = |who: &ModelId| {
            let Some(sight) = number(who).map(|number| sights[number]) else {
                return ModelActivity::default();
            };
            let rests = sight.waiting == 0 && sight.in_flight == 0;
            ModelActivity {
                requests: sight.asked,
                waiting: sight.waiting,
                in_flight: sight.in_flight,
                idle_for: if rests { now.saturating_sub(sight.used) } else { Duration::ZERO },
                conversations: Duration::ZERO,
            }
        };
        let orders = self.loading.next_orders(now, None, seen);
        let order = |order: LoaderOrder| match order {
            LoaderOrder::Load { model, .. } => Some(ModelOrder::Load(number(&model)?)),
            LoaderOrder::Unload { model, .. } => Some(ModelOrder::Unload(number(&model)?)),
            // The models of a trace have no reclaimable memory, no companions and no guests.
            LoaderOrder::Reclaim { .. }
            | LoaderOrder::CallCompanion { .. }
            | LoaderOrder::Renew { .. }
            | LoaderOrder::Restart { .. } => None,
        };
        orders.into_iter().filter_map(order).collect()
    }

    fn note_loaded(&mut self, model: usize, now: Duration) {
        let who = &self.names[model];
        self.loading.record_loaded(who, now);
        let held = MemoryAmounts { host: 0, gpus: vec![self.models[model].bytes] };
        self.loading.record_reading(who, ModelReading { held, ..ModelReading::default() });
    }

    fn note_gone(&mut self, model: usize) {
        self.loading.record_gone(&self.names[model]);
    }
}
