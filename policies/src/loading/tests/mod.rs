//! Tests of room, turns and promises.

mod company;
mod guests;
mod readings;
mod renewed;
mod traces;

use proptest::prelude::*;

use super::*;
use crate::ModelName;
use crate::book::{MemoryNeeds, NeedPurpose};

const GIB: u64 = 1 << 30;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn name(name: &str) -> ModelId {
    ModelId { name: ModelName::new(name), incarnation: 0 }
}

fn numbers() -> LoadingConfig {
    let own = crate::defaults().loading.clone();
    LoadingConfig {
        turn_loads: 3.0,
        turn_least: secs(2),
        turn_most: secs(60),
        leaker: 0.1,
        short: 1.25,
        turn_soon: 0.0,
        ..own
    }
}

fn gpus(gib: &[u64]) -> MemoryAmounts {
    MemoryAmounts { host: 1 << 40, gpus: gib.iter().map(|gib| gib * GIB).collect() }
}

fn model(gib: u64) -> LoadSpec {
    let needs = MemoryNeeds { gpu: vec![(NeedPurpose::Weights, gib * GIB)], ..MemoryNeeds::default() };
    LoadSpec { needs: Some(needs), replicas: 1, ..LoadSpec::default() }
}

fn loading(room: &[u64], models: &[(&str, LoadSpec)]) -> LoadingState {
    let mut all = LoadingState::new(numbers());
    all.capacity = gpus(room);
    for (of, spec) in models {
        all.models.set_spec(&name(of), spec.clone());
    }
    all
}

/// Formats orders: `+a` is loaded, `-b` unloaded, `?c` asked to reclaim, `!d` called, `=e` renewed in
/// place, `~f` restarted with new settings.
fn orders(all: &mut LoadingState, now: u64, seen: &[(&str, ModelActivity)]) -> Vec<String> {
    let of = |model: &ModelId| {
        let known = seen.iter().find(|(of, _)| *of == model.name.as_str());
        known.map_or(ModelActivity { idle_for: secs(1000), ..ModelActivity::default() }, |(_, seen)| *seen)
    };
    words(all.next_orders(secs(now), None, of))
}

fn words(told: Vec<LoaderOrder>) -> Vec<String> {
    told.into_iter()
        .map(|order| match order {
            LoaderOrder::Load { model, .. } => format!("+{}", model.name),
            LoaderOrder::Unload { model, .. } => format!("-{}", model.name),
            LoaderOrder::Reclaim { model } => format!("?{}", model.name),
            LoaderOrder::CallCompanion { model } => format!("!{}", model.name),
            LoaderOrder::Renew { model, .. } => format!("={}", model.name),
            LoaderOrder::Restart { model, .. } => format!("~{}", model.name),
        })
        .collect()
}

/// Loads models one after another, each for ten seconds from its own minute on.
fn load(all: &mut LoadingState, models: &[&str]) {
    for (minute, of) in (0..).zip(models) {
        all.models.enqueue(&name(of), true);
        assert_eq!(orders(all, minute * 60, &[]), [format!("+{of}")]);
        all.record_loaded(&name(of), secs(minute * 60 + 10));
    }
}

fn holds(gib: u64) -> ModelReading {
    ModelReading { held: MemoryAmounts { host: 0, gpus: vec![gib * GIB] }, ..ModelReading::default() }
}

fn load_read(all: &mut LoadingState, models: &[(&str, u64)]) {
    load(all, &models.iter().map(|(of, _)| *of).collect::<Vec<_>>());
    for (of, gib) in models {
        all.record_reading(&name(of), holds(*gib));
    }
}

/// Unloads `x`, whose place `a` needs for its renewal with 20 GiB at 200 s.
fn waits_for_who_leaves(all: &mut LoadingState) {
    all.record_leaving(&name("x"));
    all.models.set_spec(&name("a"), model(20));
    all.models.request_renewal(&name("a"), secs(200));
}

fn remake(all: &mut LoadingState, of: &str, spec: LoadSpec) {
    all.models.set_spec(&name(of), spec);
    all.models.request_renewal(&name(of), Duration::ZERO);
}

const IN_USE: ModelActivity = ModelActivity {
    requests: 1,
    waiting: 0,
    in_flight: 1,
    idle_for: Duration::ZERO,
    conversations: Duration::ZERO,
};

#[test]
fn who_fits_comes_and_else_one_leaves_and_then_it_comes() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("c", model(10))]);
    load(&mut all, &["a", "b"]);
    all.models.enqueue(&name("c"), true);
    let told = orders(
        &mut all,
        200,
        &[("b", ModelActivity { requests: 5, idle_for: secs(3), ..ModelActivity::default() })],
    );
    assert_eq!(told, ["-a"], "b was asked a moment ago");
    assert_eq!(orders(&mut all, 201, &[]), [""; 0], "it is on its way");
    all.record_gone(&name("a"));
    assert_eq!(orders(&mut all, 202, &[]), ["+c"]);
}

#[test]
fn who_has_long_conversations_stays_where_that_is_the_only_difference() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("c", model(10))]);
    load(&mut all, &["a", "b"]);
    all.models.enqueue(&name("c"), true);
    let idle = ModelActivity { requests: 5, idle_for: secs(100), ..ModelActivity::default() };
    let talks = ModelActivity { conversations: secs(20), ..idle };
    assert_eq!(orders(&mut all, 300, &[("a", talks), ("b", idle)]), ["-b"]);
}

#[test]
fn only_as_many_leave_as_make_enough_room_and_who_leaks_first() {
    let mut all = loading(&[40], &[("a", model(10)), ("b", model(10)), ("c", model(18)), ("d", model(16))]);
    load(&mut all, &["a", "b", "c"]);
    let held = |gib: u64| MemoryAmounts { host: 0, gpus: vec![gib * GIB] };
    all.record_reading(&name("c"), ModelReading { held: held(19), leaks: true, ..ModelReading::default() });
    let busy = [("a", 3), ("b", 2), ("c", 1)].map(|(of, idle)| {
        (of, ModelActivity { requests: 50, idle_for: secs(idle), ..ModelActivity::default() })
    });
    all.models.enqueue(&name("d"), true);
    assert_eq!(orders(&mut all, 300, &busy), ["-c"], "its next start is a cure, and it is enough alone");
}

#[test]
fn nobody_is_driven_out_for_one_that_would_not_fit_even_then_and_pins_stay() {
    let pinned = LoadSpec { pin: true, ..model(10) };
    let mut all = loading(&[24], &[("a", pinned), ("b", model(10)), ("c", model(20))]);
    load(&mut all, &["a", "b"]);
    all.models.enqueue(&name("c"), true);
    assert_eq!(orders(&mut all, 500, &[]), [""; 0]);
    let needed = MemoryAmounts { host: 0, ..gpus(&[20]) };
    let why = LoadRefusal::Room { needed, left: gpus(&[14]), pinned: vec![ModelName::new("a")] };
    assert_eq!(all.hopeless_models(), [(name("c"), why)]);
}

#[test]
fn who_waits_for_ever_is_told_why_and_who_waits_for_others_turns_is_not() {
    let pinned = || LoadSpec { pin: true, ..model(10) };
    let rival = LoadSpec { never_with: vec![ModelName::new("a")], ..model(1) };
    let mut all = loading(&[40], &[("a", pinned()), ("b", model(20)), ("c", model(20)), ("rival", rival)]);
    load(&mut all, &["a", "b"]);
    for wish in ["c", "rival"] {
        all.models.enqueue(&name(wish), true);
    }
    assert_eq!(all.hopeless_models(), [(name("rival"), LoadRefusal::Excluded(vec![ModelName::new("a")]))]);
    all.numbers.max_loaded = 1;
    let count = LoadRefusal::Count { pinned: vec![ModelName::new("a")], most: 1 };
    assert_eq!(all.hopeless_models()[0], (name("c"), count), "b leaves, and a does not");
    // An operator drains the pinned model.
    all.record_leaving(&name("a"));
    assert_eq!(all.hopeless_models(), []);
}

#[test]
fn one_that_is_in_use_has_its_turn() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a"]);
    all.models.enqueue(&name("b"), true);
    // The load took ten seconds, so a model in use keeps its turn for thirty.
    assert_eq!(orders(&mut all, 39, &[("a", IN_USE)]), [""; 0]);
    assert_eq!(orders(&mut all, 40, &[("a", IN_USE)]), ["-a"]);
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a"]);
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 11, &[]), ["-a"]);
}

#[test]
fn who_came_first_is_served_first_and_a_later_one_takes_only_what_that_cannot_use() {
    let models = [("a", model(20)), ("big", model(20)), ("small", model(3)), ("middle", model(8))];
    let mut all = loading(&[24], &models);
    load(&mut all, &["a"]);
    for of in ["big", "middle", "small"] {
        all.models.enqueue(&name(of), true);
    }
    // The big model needs `a` unloaded; next to the big one, 4 GiB are free for the small one.
    assert_eq!(orders(&mut all, 100, &[]), ["-a", "+small"]);
    all.record_gone(&name("a"));
    assert_eq!(orders(&mut all, 101, &[]), ["+big"]);
    assert_eq!(orders(&mut all, 102, &[("big", IN_USE), ("small", IN_USE)]), [""; 0]);
}

#[test]
fn what_was_promised_and_is_not_taken_yet_is_not_given_to_others() {
    let mut all = loading(&[24], &[("a", model(12)), ("b", model(8))]);
    all.models.enqueue(&name("a"), true);
    let free = |gib: u64| MemoryAmounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let next = |all: &mut LoadingState, gib: u64| {
        all.next_orders(secs(1), Some(&free(gib)), |_| ModelActivity::default()).len()
    };
    // Another program holds 6 GiB.
    assert_eq!(next(&mut all, 18), 1);
    all.models.enqueue(&name("b"), true);
    assert_eq!(next(&mut all, 18), 0, "6 are left for b");
    all.record_loaded(&name("a"), secs(9));
    let held = MemoryAmounts { host: 0, gpus: vec![9 * GIB] };
    all.record_reading(&name("a"), ModelReading { held, ..ModelReading::default() });
    // The model needs less than expected: 18 - 9 GiB are free and not reserved.
    assert_eq!(next(&mut all, 9), 1);
}

#[test]
fn what_is_too_large_by_the_book_may_try_where_nobody_else_is() {
    let mut all = loading(&[24], &[("huge", model(30))]);
    all.models.enqueue(&name("huge"), true);
    assert_eq!(orders(&mut all, 0, &[]), ["+huge"]);
}

#[test]
fn for_one_that_is_too_large_all_others_leave_and_nobody_comes_in_between() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("huge", model(30))]);
    load(&mut all, &["a", "b"]);
    all.models.enqueue(&name("huge"), true);
    assert_eq!(orders(&mut all, 500, &[]), ["-a", "-b"]);
    all.record_gone(&name("a"));
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 501, &[]), [""; 0]);
    all.record_gone(&name("b"));
    assert_eq!(orders(&mut all, 502, &[]), ["+huge"]);
    all.record_loaded(&name("huge"), secs(510));
    assert_eq!(orders(&mut all, 600, &[]), ["-huge"], "a waits");
}

#[test]
fn nobody_leaves_for_one_whom_nobody_waits_for() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a"]);
    all.models.enqueue(&name("b"), false);
    assert_eq!(orders(&mut all, 500, &[]), [""; 0]);
    let waits = ("b", ModelActivity { waiting: 1, ..ModelActivity::default() });
    assert_eq!(orders(&mut all, 501, &[waits]), ["-a"]);
}

#[test]
fn who_leaves_by_itself_makes_room_without_anybody_else() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("c", model(10))]);
    load(&mut all, &["a", "b"]);
    all.record_leaving(&name("b"));
    all.models.enqueue(&name("c"), true);
    assert_eq!(orders(&mut all, 500, &[]), [""; 0], "it is awaited");
    all.record_gone(&name("b"));
    assert_eq!(orders(&mut all, 501, &[]), ["+c"]);
}

#[test]
fn a_start_that_found_too_little_asks_for_more_until_one_did() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(12))]);
    load(&mut all, &["a"]);
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+b"]);
    assert_eq!(all.models.owed()[&name("b")].gpus, [12 * GIB]);
    all.raise_needs(&name("b"), secs(100));
    all.record_gone(&name("b"));
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 101, &[]), ["-a"], "15 and 10 are more than there is");
    all.record_gone(&name("a"));
    assert_eq!(orders(&mut all, 102, &[]), ["+b"]);
    assert_eq!(all.models.all[&name("b")].admitted.promised.gpus, [15 * GIB]);
    all.record_loaded(&name("b"), secs(110));
    all.record_reading(
        &name("b"),
        ModelReading { held: MemoryAmounts { host: 0, gpus: vec![13 * GIB] }, ..ModelReading::default() },
    );
    assert_eq!(all.models.all[&name("b")].admitted.promised.gpus, [13 * GIB], "what it holds is known now");
}

#[test]
fn a_large_one_is_not_starved_by_small_ones_that_came_later() {
    let small = [("a", model(6)), ("b", model(6)), ("c", model(6)), ("d", model(6)), ("e", model(6))];
    let mut models = small.to_vec();
    models.push(("big", model(20)));
    let mut all = loading(&[24], &models);
    load(&mut all, &["a", "b", "c", "d"]);
    all.models.enqueue(&name("big"), true);
    // Turns end one after another; each unloaded model would be followed by the next.
    let busy = ["a", "b", "c", "d", "e"].map(|of| (of, IN_USE));
    assert_eq!(orders(&mut all, 205, &busy), [""; 0], "d has its turn until 220");
    all.models.enqueue(&name("e"), true);
    assert_eq!(orders(&mut all, 210, &busy), [""; 0], "nobody leaves for e");
    let gone = orders(&mut all, 221, &busy);
    assert_eq!(gone, ["-a", "-b", "-c", "-d"], "big had come before");
}

#[test]
fn no_more_are_loaded_than_may_be_and_never_two_that_exclude_each_other() {
    let alone = LoadSpec { never_with: vec![ModelName::new("a")], ..model(1) };
    let models = [("a", model(1)), ("b", model(1)), ("c", model(1)), ("alone", alone)];
    let mut all = loading(&[24], &models);
    all.numbers.max_loaded = 2;
    load(&mut all, &["a", "b"]);
    all.models.enqueue(&name("c"), true);
    assert_eq!(orders(&mut all, 300, &[]), ["-a"]);
    all.models.enqueue(&name("alone"), true);
    assert_eq!(orders(&mut all, 301, &[]), ["-b"]);
    all.record_gone(&name("a"));
    assert_eq!(orders(&mut all, 302, &[]), ["+c"]);
    all.record_gone(&name("b"));
    assert_eq!(orders(&mut all, 303, &[]), ["+alone"]);
    all.record_loaded(&name("c"), secs(304));
    all.record_loaded(&name("alone"), secs(304));
    all.models.enqueue(&name("a"), true);
    let busy = ModelActivity { requests: 9, idle_for: secs(1), ..ModelActivity::default() };
    assert_eq!(orders(&mut all, 400, &[("alone", busy)]), ["-alone"], "though c would be missed less");
}

proptest! {
    /// Promises never exceed the memory of the machine, and each model gets its turn.
    #[test]
    fn promises_are_never_more_than_there_is_and_each_has_its_turn(
        sizes in proptest::collection::vec(1_u64..22, 2..7),
        asks in proptest::collection::vec((0_usize..7, 0_u64..20), 1..60),
        reloads in proptest::collection::vec((0_usize..7, 1_u64..22, 0_u64..200), 0..8),
    ) {
        const LOAD: u64 = 4;
        const SERVICE: u64 = 3;
        let names: Vec<String> = (0..sizes.len()).map(|index| format!("m{index}")).collect();
        let specs: Vec<(&str, LoadSpec)> =
            names.iter().zip(&sizes).map(|(of, gib)| (of.as_str(), model(*gib))).collect();
        let mut all = loading(&[24], &specs);
        // For each model: arrivals of waiting requests, ends of running ones, end of the load.
        let mut waiting = vec![Vec::<u64>::new(); names.len()];
        let (mut until, mut ready) = (vec![0; names.len()], vec![None; names.len()]);
        let (mut asked, mut leaves) = (vec![0; names.len()], vec![false; names.len()]);
        let mut asks = asks.into_iter();
        let mut next_ask = Some((0, 0));
        let mut longest = 0;
        for now in 0..4000_u64 {
            while let Some((at, of)) = next_ask.filter(|(at, _)| *at <= now) {
                let of = of % names.len();
                waiting[of].push(now);
                asked[of] += 1;
                next_ask = asks.next().map(|(of, pause)| (at + pause, of));
            }
            for (of, gib, _) in reloads.iter().filter(|(_, _, at)| *at == now) {
                let of = name(&names[of % names.len()]);
                all.models.set_spec(&of, model(*gib));
                all.models.request_renewal(&of, secs(now));
            }
            for index in 0..names.len() {
                let of = name(&names[index]);
                if leaves[index] && until[index] <= now {
                    all.record_gone(&of);
                    (leaves[index], ready[index]) = (false, None);
                }
                if ready[index] == Some(now) {
                    all.record_loaded(&of, secs(now));
                }
                let serves = ready[index].is_some_and(|at| at <= now) && !leaves[index];
                if serves && until[index] <= now && !waiting[index].is_empty() {
                    longest = longest.max(now - waiting[index].remove(0));
                    until[index] = now + SERVICE;
                }
                if !waiting[index].is_empty() && ready[index].is_none() {
                    all.models.enqueue(&of, true);
                }
            }
            let seen = |of: &ModelId| {
                let index = names.iter().position(|known| known == of.name.as_str()).unwrap();
                ModelActivity {
                    requests: asked[index],
                    waiting: waiting[index].len(),
                    in_flight: u32::from(until[index] > now),
                    idle_for: secs(now.saturating_sub(until[index])),
                    conversations: Duration::ZERO,
                }
            };
            for order in all.next_orders(secs(now), None, seen) {
                let index = |of: &ModelId| names.iter().position(|known| known == of.name.as_str()).unwrap();
                match order {
                    LoaderOrder::Load { model, .. } => ready[index(&model)] = Some(now + LOAD),
                    LoaderOrder::Unload { model, .. } | LoaderOrder::Restart { model, .. } => leaves[index(&model)] = true,
                    LoaderOrder::Renew { .. } => {}
                    LoaderOrder::Reclaim { .. } | LoaderOrder::CallCompanion { .. } => unreachable!("nobody hoards or has company"),
                }
            }
            let all_gpus = all.models.all.values().map(|model| &model.admitted.promised.gpus);
            let promised = all_gpus.map(|gpus| gpus.first().copied().unwrap_or(0));
            prop_assert!(promised.sum::<u64>() <= 24 * GIB);
            if next_ask.is_none() && waiting.iter().all(Vec::is_empty) {
                break;
            }
        }
        prop_assert!(waiting.iter().all(Vec::is_empty), "{waiting:?} still wait");
        // At most several turns of all models, because sixty requests arrive faster than they can be served.
        prop_assert!(longest <= 60 * (SERVICE + LOAD * 3 + 12), "{longest} s");
    }
}
