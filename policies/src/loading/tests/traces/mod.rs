//! Compares the loading decisions with the rules of other programs on simulated [`RequestTrace`]s: ours are
//! never much worse than the best rule.
//!
//! A request holds one of its model's slots until it is answered. A model that is being unloaded accepts no
//! requests and stops after its last answer. There is no randomness: equal traces give equal scores.

mod made;
mod rivals;
mod run;

use std::time::Duration;

use proptest::prelude::*;

use self::made::made;
use self::rivals::{Rival, RivalRule, safe_count};
use self::run::{play, run};
use crate::loading::LoadingConfig;
use crate::units::MIB;

/// A model of a trace.
#[derive(Clone, Debug)]
struct TraceModel {
    name: String,
    bytes: u64,
    /// Time from the model's start to its first answer.
    load: Duration,
    /// Number of concurrent requests.
    slots: u32,
}

/// A request of a trace.
#[derive(Clone, Copy, Debug)]
struct TraceRequest {
    at: Duration,
    /// Index of the requested model.
    model: usize,
    /// Time that the answer takes.
    duration: Duration,
}

/// Requests in order of arrival, for several models that share one memory.
#[derive(Clone, Debug)]
struct RequestTrace {
    name: String,
    /// Bytes of the shared memory.
    memory: u64,
    models: Vec<TraceModel>,
    requests: Vec<TraceRequest>,
}

/// Result of a trace.
#[derive(Clone, Debug, Default)]
struct TraceScore {
    /// Number of loads.
    loads: u64,
    /// 99th percentile of the waits before an answer began.
    p99: Duration,
    /// Longest wait.
    longest: Duration,
    /// Number of requests that were never answered.
    unserved: usize,
}

fn usual() -> LoadingConfig {
    crate::defaults().loading.clone()
}

fn scores(trace: &RequestTrace) -> (TraceScore, Vec<(String, TraceScore)>) {
    let rivals = [Rival::Count(safe_count(trace)), Rival::Idle(Duration::from_secs(300)), Rival::OneOfAGroup];
    let rivals = rivals.map(|rival| (rival.name(), play(trace, &mut RivalRule { rival, trace })));
    (run(trace, &usual()), rivals.into())
}

/// Checks the table in docs/models.md: loads, and the 99th percentile of waits.
#[test]
fn the_table_of_the_documentation_is_what_is_measured() {
    let cell = |score: &TraceScore| format!("{} / {:.0} s", score.loads, score.p99.as_secs_f64());
    let rows = made().into_iter().map(|trace| {
        let (ours, others) = scores(&trace);
        let cells: Vec<String> =
            std::iter::once(cell(&ours)).chain(others.iter().map(|(_, score)| cell(score))).collect();
        format!("| {} | {} | {} |", trace.name, trace.requests.len(), cells.join(" | "))
    });
    let page = include_str!("../../../../../docs/models.md");
    let missing: Vec<String> = rows.filter(|row| !page.contains(row.as_str())).collect();
    assert!(missing.is_empty(), "rows that docs/models.md lacks:\n{}", missing.join("\n"));
}

#[test]
fn nobody_has_to_wait_longer_than_by_the_best_of_the_other_rules() {
    let all = made();
    assert!(all.len() >= 12);
    for trace in all {
        let (ours, others) = scores(&trace);
        let best = others.iter().map(|(_, score)| score.p99).min().unwrap();
        let bound = best.mul_f64(1.05) + Duration::from_millis(100);
        assert!(ours.p99 <= bound, "{}: {ours:?} against {others:?}", trace.name);
        assert_eq!(ours.unserved, 0, "{}", trace.name);
    }
}

#[test]
fn models_that_alternate_are_swapped_half_as_often() {
    let mut seen = 0;
    for trace in made() {
        let (ours, others) = scores(&trace);
        let count = others.iter().find(|(name, _)| name.contains("at a time, oldest")).unwrap();
        match trace.name.as_str() {
            "two agents that alternate"
            | "planner and coder alternate"
            | "three busy models, room for two"
            | "retrieval, and now and then a large one"
            | "a large one in the place of two" => {
                assert!(ours.loads * 2 <= count.1.loads, "{}: {ours:?} against {count:?}", trace.name);
                seen += 1;
            }
            // Each crowd uses another model: fewer loads would make a whole crowd wait for the next.
            "crowds that alternate" => assert_eq!((ours.loads, ours.p99), (60, count.1.p99)),
            _ => assert!(ours.loads <= count.1.loads + count.1.loads / 10, "{}: {ours:?}", trace.name),
        }
    }
    assert_eq!(seen, 5);
}

proptest! {
    /// Each waiting model waits at most for the turns of the models before it.
    #[test]
    fn nobody_waits_longer_than_the_turns_of_all_others(
        sizes in proptest::collection::vec(2_u64..24, 2..6),
        asks in proptest::collection::vec((0_usize..6, 0_u64..8000, 1_u64..9000), 1..150),
    ) {
        const GIB: u64 = 1024 * MIB;
        let models: Vec<TraceModel> = sizes
            .iter()
            .enumerate()
            .map(|(index, gib)| TraceModel {
                name: format!("m{index}"),
                bytes: gib * GIB,
                load: Duration::from_millis(1000 + gib * 400),
                // Enough slots to answer at once, so that requests wait only for a model.
                slots: u32::MAX,
            })
            .collect();
        let mut at = 0;
        let requests = asks
            .iter()
            .map(|(model, pause, takes)| {
                at += pause;
                let (at, takes) = (Duration::from_millis(at), Duration::from_millis(*takes));
                TraceRequest { at, model: model % models.len(), duration: takes }
            })
            .collect();
        let longest_load = models.iter().map(|model| model.load).max().unwrap();
        let trace = RequestTrace { name: String::new(), memory: 24 * GIB, models, requests };
        let score = run(&trace, &usual());
        // A turn, the end of running answers, the end of the process, and the next load.
        let numbers = usual();
        let turn = longest_load.mul_f64(numbers.turn_loads).max(numbers.turn_least).min(numbers.turn_most);
        let each = turn + Duration::from_secs(9) + Duration::from_millis(700) + longest_load;
        let others = u32::try_from(trace.models.len()).unwrap();
        prop_assert!(score.longest <= each * others, "{score:?}, {each:?} for each of {others}");
        prop_assert_eq!(score.unserved, 0);
    }
}
