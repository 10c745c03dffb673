//! Plays a trace under a rule, from one event to the next.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::{Rule, Score, Trace};
use crate::ModelName;
use crate::book::{Needs, Part};
use crate::loading::{Amounts, Loading, Numbers, Order, Reading, Seen, Spec, Who};

/// From the end of the last request of a model that leaves until its memory is free.
const GONE: Duration = Duration::from_millis(500);

/// While somebody waits we look so often.
const LOOK: Duration = Duration::from_millis(100);

/// What is not answered so long after the last request has come never is.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Where a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Here {
    Out,
    Loading,
    Loaded,
    Leaving,
}

/// What a rule sees of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight {
    pub(super) here: Here,
    pub(super) waiting: usize,
    /// When the first of those who wait came.
    pub(super) oldest: Option<Duration>,
    pub(super) in_flight: u32,
    /// When it was used last.
    pub(super) used: Duration,
    asked: u64,
}

/// What a rule does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Do {
    Load(usize),
    Unload(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Done(usize),
    Gone(usize),
    Loaded(usize),
    Comes(usize),
    Look,
}

struct World<'a> {
    trace: &'a Trace,
    sights: Vec<Sight>,
    queues: Vec<VecDeque<usize>>,
    events: BinaryHeap<Reverse<(Duration, What)>>,
    waits: Vec<Duration>,
    score: Score,
}

/// Plays a trace under a rule. `numbers` are ours.
pub fn run(trace: &Trace, rule: Rule, numbers: &Numbers) -> Score {
    let out =
        Sight { here: Here::Out, waiting: 0, oldest: None, in_flight: 0, used: Duration::ZERO, asked: 0 };
    let mut world = World {
        trace,
        sights: vec![out; trace.models.len()],
        queues: vec![VecDeque::new(); trace.models.len()],
        events: BinaryHeap::new(),
        waits: Vec::with_capacity(trace.requests.len()),
        score: Score::default(),
    };
    for (number, request) in trace.requests.iter().enumerate() {
        world.events.push(Reverse((request.at, What::Comes(number))));
    }
    let end = trace.requests.last().map_or(Duration::ZERO, |last| last.at) + PATIENCE;
    let mut ours = Ours::new(trace, numbers);
    let mut looks = false;
    while let Some(Reverse((now, what))) = world.events.pop() {
        if now > end {
            break;
        }
        looks &= what != What::Look;
        world.take(now, what, &mut ours);
        // What has just been loaded serves before anybody thinks of unloading it.
        for model in 0..trace.models.len() {
            world.serve(now, model);
        }
        let orders = match rule {
            Rule::Ours => ours.decide(now, &world.sights),
            Rule::Rival(rival) => rival.decide(now, trace, &world.sights),
        };
        for order in orders {
            world.carry_out(now, order);
        }
        let waits = world.sights.iter().any(|sight| sight.waiting > 0);
        let expires =
            matches!(rule, Rule::Rival(_)) && world.sights.iter().any(|one| one.here == Here::Loaded);
        if !looks && (waits || expires) && world.waits.len() < trace.requests.len() {
            let pause = if waits { LOOK } else { Duration::from_secs(10) };
            world.events.push(Reverse((now + pause, What::Look)));
            looks = true;
        }
    }
    world.finish()
}

impl World<'_> {
    fn take(&mut self, now: Duration, what: What, ours: &mut Ours) {
        match what {
            What::Comes(number) => {
                let model = self.trace.requests[number].model;
                self.queues[model].push_back(number);
                let sight = &mut self.sights[model];
                sight.asked += 1;
                sight.used = now;
            }
            What::Done(model) => {
                let sight = &mut self.sights[model];
                sight.in_flight -= 1;
                sight.used = now;
                if sight.here == Here::Leaving && sight.in_flight == 0 {
                    self.events.push(Reverse((now + GONE, What::Gone(model))));
                }
            }
            What::Gone(model) => {
                self.sights[model].here = Here::Out;
                ours.all.gone(&ours.names[model]);
            }
            What::Loaded(model) => {
                // A model that was unloaded while it was still loading does not serve.
                if self.sights[model].here == Here::Loading {
                    self.sights[model].here = Here::Loaded;
                    ours.loaded(model, now, self.trace.models[model].bytes);
                }
            }
            What::Look => {}
        }
        self.count();
    }

    fn count(&mut self) {
        for (sight, queue) in self.sights.iter_mut().zip(&self.queues) {
            sight.waiting = queue.len();
            sight.oldest = queue.front().map(|number| self.trace.requests[*number].at);
        }
    }

    fn carry_out(&mut self, now: Duration, order: Do) {
        match order {
            Do::Load(model) => {
                let tenant = &self.trace.models[model];
                self.sights[model].here = Here::Loading;
                self.score.loads += 1;
                self.score.bytes += tenant.bytes;
                self.events.push(Reverse((now + tenant.load, What::Loaded(model))));
            }
            Do::Unload(model) => {
                let sight = &mut self.sights[model];
                sight.here = Here::Leaving;
                if sight.in_flight == 0 {
                    self.events.push(Reverse((now + GONE, What::Gone(model))));
                }
            }
        }
    }

    fn serve(&mut self, now: Duration, model: usize) {
        let slots = self.trace.models[model].slots;
        while self.sights[model].here == Here::Loaded && self.sights[model].in_flight < slots {
            let Some(number) = self.queues[model].pop_front() else { break };
            let request = self.trace.requests[number];
            self.waits.push(now.saturating_sub(request.at));
            self.sights[model].in_flight += 1;
            self.events.push(Reverse((now + request.takes, What::Done(model))));
        }
        self.count();
    }

    fn finish(mut self) -> Score {
        self.waits.sort_unstable();
        let at = |share: usize| {
            let index = (self.waits.len() * share).div_ceil(100).saturating_sub(1);
            self.waits.get(index).copied().unwrap_or_default()
        };
        Score {
            median: at(50),
            p99: at(99),
            longest: at(100),
            unserved: self.trace.requests.len() - self.waits.len(),
            ..self.score
        }
    }
}

/// Our own decisions, as they are made for real models.
struct Ours {
    all: Loading,
    names: Vec<Who>,
}

impl Ours {
    fn new(trace: &Trace, numbers: &Numbers) -> Self {
        let mut all = Loading::new(numbers.clone());
        all.set_capacity(Amounts { host: u64::MAX, gpus: vec![trace.memory] });
        let name = |model: &super::Tenant| Who { name: ModelName::new(&model.name), life: 0 };
        let names: Vec<Who> = trace.models.iter().map(name).collect();
        for (who, model) in names.iter().zip(&trace.models) {
            let needs = Needs { gpu: vec![(Part::Weights, model.bytes)], ..Needs::default() };
            all.set(who, Spec { needs: Some(needs), replicas: 1, ..Spec::default() });
        }
        Self { all, names }
    }

    fn loaded(&mut self, model: usize, now: Duration, bytes: u64) {
        let who = &self.names[model];
        self.all.loaded(who, now);
        self.all.read(who, Reading { held: Amounts { host: 0, gpus: vec![bytes] }, ..Reading::default() });
    }

    fn decide(&mut self, now: Duration, sights: &[Sight]) -> Vec<Do> {
        for (who, sight) in self.names.iter().zip(sights) {
            if sight.here == Here::Out && sight.waiting > 0 {
                self.all.wants(who, false);
            }
        }
        let names = &self.names;
        let number = |who: &Who| names.iter().position(|name| name == who);
        let seen = |who: &Who| {
            let Some(sight) = number(who).map(|number| sights[number]) else { return Seen::default() };
            let rests = sight.waiting == 0 && sight.in_flight == 0;
            Seen {
                asked: sight.asked,
                waiting: sight.waiting,
                in_flight: sight.in_flight,
                idle_for: if rests { now.saturating_sub(sight.used) } else { Duration::ZERO },
                conversations: Duration::ZERO,
            }
        };
        let orders = self.all.next(now, None, seen);
        let order = |order: Order| match order {
            Order::Load { model, .. } => Some(Do::Load(number(&model)?)),
            Order::Unload { model, .. } => Some(Do::Unload(number(&model)?)),
            // Nobody hoards here, and nobody comes along.
            Order::GiveBack { .. } | Order::Call { .. } | Order::Stay { .. } | Order::Anew { .. } => None,
        };
        orders.into_iter().filter_map(order).collect()
    }
}
