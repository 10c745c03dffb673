//! Simulated traces of typical use; equal on every machine.

use std::time::Duration;

use super::{RequestTrace, TraceModel, TraceRequest};
use crate::units::MIB;
use crate::world::SplitMix;

const GIB: u64 = 1024 * MIB;

/// Bytes per second of a fast disk.
const DISK: f64 = 2.5e9;

fn tenant(name: &str, gib: u64) -> TraceModel {
    let bytes = gib * GIB;
    #[expect(clippy::cast_precision_loss, reason = "sizes of models")]
    let load = Duration::from_secs_f64(2.0 + bytes as f64 / DISK);
    TraceModel { name: name.to_owned(), bytes, load, slots: 4 }
}

struct Maker {
    random: SplitMix,
    requests: Vec<TraceRequest>,
}

impl Maker {
    fn new(seed: u64) -> Self {
        Self { random: SplitMix::new(seed), requests: Vec::new() }
    }

    fn ask(&mut self, at: f64, model: usize, takes: f64) {
        let of = |seconds: f64| Duration::from_secs_f64(seconds.max(0.0));
        self.requests.push(TraceRequest { at: of(at), model, duration: of(takes) });
    }

    /// Adds a person's chat of some turns, each followed by a pause for thought.
    fn chat(&mut self, mut at: f64, model: usize, turns: u64, thinks: f64) {
        for _ in 0..turns {
            let takes = self.random.between(2.0, 12.0);
            self.ask(at, model, takes);
            at += takes + self.random.exponential(thinks);
        }
    }

    /// Adds chats of people who arrive at random.
    fn chats(&mut self, hours: f64, every: f64, models: &[usize]) {
        let mut at = 0.0;
        while at < hours * 3600.0 {
            let turns = 2 + self.random.below(8);
            let model = models[usize::try_from(self.random.below(models.len() as u64)).unwrap_or(0)];
            self.chat(at, model, turns, 30.0);
            at += self.random.exponential(every);
        }
    }

    /// Adds independent requests at random times.
    fn random(&mut self, hours: f64, every: f64, model: usize, takes: f64) {
        let mut at = self.random.exponential(every);
        while at < hours * 3600.0 {
            let takes = self.random.between(takes / 2.0, takes * 1.5);
            self.ask(at, model, takes);
            at += self.random.exponential(every);
        }
    }

    fn burst(&mut self, at: f64, model: usize, count: u64, within: f64) {
        for _ in 0..count {
            let (at, takes) = (at + self.random.between(0.0, within), self.random.between(2.0, 10.0));
            self.ask(at, model, takes);
        }
    }

    fn add(&mut self, other: &Self, later: Duration) {
        self.requests.extend(other.requests.iter().map(|one| TraceRequest { at: one.at + later, ..*one }));
    }

    fn trace(mut self, name: &str, gib: u64, models: Vec<TraceModel>) -> RequestTrace {
        self.requests.sort_by(|a, b| a.at.cmp(&b.at).then(a.model.cmp(&b.model)));
        RequestTrace { name: name.to_owned(), memory: gib * GIB, models, requests: self.requests }
    }
}

pub(super) fn made() -> Vec<RequestTrace> {
    vec![
        chats_over_three(),
        chats_over_eight(),
        two_agents(),
        planner_and_coder(),
        crowds_that_alternate(),
        two_busy_models(),
        retrieval(),
        nights(),
        favourite_and_rare(),
        small_among_large(),
        one_large_two_small(),
        changing_favourites(),
        mornings(),
        trickle(),
    ]
}

fn chats_over_three() -> RequestTrace {
    let mut maker = Maker::new(1);
    maker.chats(8.0, 120.0, &[0, 1, 2]);
    maker.trace("people chat with three models", 24, vec![tenant("a", 10), tenant("b", 10), tenant("c", 12)])
}

fn chats_over_eight() -> RequestTrace {
    let mut maker = Maker::new(2);
    maker.chats(8.0, 90.0, &[0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7]);
    let sizes = [10, 8, 6, 14, 18, 5, 20, 12];
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    maker.trace(
        "people chat with eight models",
        40,
        names.iter().zip(sizes).map(|(n, s)| tenant(n, s)).collect(),
    )
}

/// Two agents use a model each; memory holds only one of the models.
fn two_agents() -> RequestTrace {
    let mut maker = Maker::new(3);
    for model in [0, 1] {
        maker.random(4.0, 12.0, model, 6.0);
    }
    maker.trace("two agents that alternate", 24, vec![tenant("a", 18), tenant("b", 20)])
}

/// In each round, one request to the planner, then several to the coder.
fn planner_and_coder() -> RequestTrace {
    let mut maker = Maker::new(4);
    for start in [0.0, 7.0, 31.0] {
        let mut at = start;
        while at < 3.0 * 3600.0 {
            maker.ask(at, 0, 8.0);
            at += 14.0;
            for _ in 0..3 {
                maker.ask(at, 1, 6.0);
                at += 9.0;
            }
            at += maker.random.exponential(10.0);
        }
    }
    maker.trace("planner and coder alternate", 24, vec![tenant("planner", 20), tenant("coder", 14)])
}

fn crowds_that_alternate() -> RequestTrace {
    let mut maker = Maker::new(5);
    for round in 0..60_u32 {
        maker.burst(f64::from(round) * 45.0, usize::from(round % 2 == 1), 20, 20.0);
    }
    maker.trace("crowds that alternate", 24, vec![tenant("a", 16), tenant("b", 16)])
}

fn two_busy_models() -> RequestTrace {
    let mut maker = Maker::new(6);
    for model in [0, 1, 2] {
        maker.random(2.0, 6.0, model, 4.0);
    }
    maker.trace(
        "three busy models, room for two",
        48,
        vec![tenant("a", 20), tenant("b", 22), tenant("c", 18)],
    )
}

/// Each question requests an embedding, a reranking and an answer.
fn retrieval() -> RequestTrace {
    let mut maker = Maker::new(7);
    let mut at = 0.0;
    while at < 6.0 * 3600.0 {
        maker.ask(at, 0, 0.1);
        maker.ask(at + 0.2, 1, 0.3);
        let takes = maker.random.between(3.0, 9.0);
        maker.ask(at + 0.6, 2, takes);
        if maker.random.chance(0.1) {
            maker.ask(at + 12.0, 3, 15.0);
        }
        at += maker.random.exponential(40.0);
    }
    let models = vec![tenant("embed", 1), tenant("rank", 2), tenant("chat", 14), tenant("large", 19)];
    maker.trace("retrieval, and now and then a large one", 24, models)
}

/// People chat by day; a batch uses another model at night.
fn nights() -> RequestTrace {
    let mut maker = Maker::new(8);
    maker.chats(10.0, 180.0, &[0, 1]);
    for number in 0..800_u32 {
        maker.ask(12.0 * 3600.0 + f64::from(number) * 4.0, 2, 8.0);
    }
    let mut late = Maker::new(9);
    late.chats(1.0, 600.0, &[0]);
    maker.add(&late, Duration::from_secs(12 * 3600 + 600));
    maker.trace(
        "chats by day, a batch by night",
        24,
        vec![tenant("a", 9), tenant("b", 12), tenant("batch", 20)],
    )
}

fn favourite_and_rare() -> RequestTrace {
    let mut maker = Maker::new(10);
    maker.random(8.0, 15.0, 0, 5.0);
    for model in 1..6 {
        maker.random(8.0, 1500.0, model, 8.0);
    }
    let models = ["favourite", "b", "c", "d", "e", "f"].map(|name| tenant(name, 11));
    maker.trace("a favourite and five rare ones", 24, models.to_vec())
}

fn small_among_large() -> RequestTrace {
    let mut maker = Maker::new(11);
    for model in 0..4 {
        maker.random(6.0, 60.0, model, 1.0);
    }
    maker.random(6.0, 300.0, 4, 20.0);
    maker.random(6.0, 300.0, 5, 20.0);
    let mut models: Vec<TraceModel> = ["s", "t", "u", "v"].map(|name| tenant(name, 2)).to_vec();
    models.extend([tenant("large", 18), tenant("larger", 22)]);
    maker.trace("four small ones among two large ones", 32, models)
}

fn one_large_two_small() -> RequestTrace {
    let mut maker = Maker::new(12);
    maker.random(5.0, 200.0, 0, 15.0);
    maker.random(5.0, 25.0, 1, 3.0);
    maker.random(5.0, 25.0, 2, 3.0);
    maker.trace(
        "a large one in the place of two",
        24,
        vec![tenant("large", 22), tenant("b", 11), tenant("c", 11)],
    )
}

/// The most used model changes every hour.
fn changing_favourites() -> RequestTrace {
    let mut maker = Maker::new(13);
    for hour in 0..8_u32 {
        let favourite = usize::try_from(hour % 5).unwrap_or(0);
        let mut own = Maker::new(100 + u64::from(hour));
        own.chats(1.0, 60.0, &[favourite, favourite, favourite, (favourite + 2) % 5]);
        maker.add(&own, Duration::from_secs(u64::from(hour) * 3600));
    }
    let models = ["a", "b", "c", "d", "e"].map(|name| tenant(name, 12));
    maker.trace("favourites that change by the hour", 30, models.to_vec())
}

/// All users start at nine, with four models.
fn mornings() -> RequestTrace {
    let mut maker = Maker::new(14);
    for day in 0..3_u32 {
        for model in 0..4 {
            maker.burst(f64::from(day) * 7200.0, model, 40, 300.0);
        }
    }
    let models = [("a", 10), ("b", 12), ("c", 16), ("d", 20)].map(|(name, gib)| tenant(name, gib));
    maker.trace("mornings with four models", 32, models.to_vec())
}

fn trickle() -> RequestTrace {
    let mut maker = Maker::new(15);
    for model in 0..5 {
        maker.random(12.0, 900.0, model, 6.0);
    }
    let models = [("a", 14), ("b", 15), ("c", 16), ("d", 17), ("e", 18)].map(|(name, gib)| tenant(name, gib));
    maker.trace("five models, all of them rarely", 24, models.to_vec())
}
