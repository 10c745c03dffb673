//! Rooms, turns, promises.

use proptest::prelude::*;

use super::*;
use crate::ModelName;
use crate::book::{Needs, Part};

const GIB: u64 = 1 << 30;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn name(name: &str) -> Who {
    Who { name: ModelName::new(name), life: 0 }
}

fn numbers() -> Numbers {
    let own = crate::defaults().loading.clone();
    Numbers {
        turn_loads: 3.0,
        turn_least: secs(2),
        turn_most: secs(60),
        leaker: 0.1,
        short: 1.25,
        turn_soon: 0.0,
        ..own
    }
}

fn gpus(gib: &[u64]) -> Amounts {
    Amounts { host: 1 << 40, gpus: gib.iter().map(|gib| gib * GIB).collect() }
}

fn model(gib: u64) -> Spec {
    let needs = Needs { gpu: vec![(Part::Weights, gib * GIB)], ..Needs::default() };
    Spec { needs: Some(needs), replicas: 1, ..Spec::default() }
}

fn loading(room: &[u64], models: &[(&str, Spec)]) -> Loading {
    let mut all = Loading::new(numbers());
    all.set_capacity(gpus(room));
    for (of, spec) in models {
        all.set(&name(of), spec.clone());
    }
    all
}

/// Orders in words: `+a` is loaded, `-b` leaves, `?c` is asked for what it hoards, `!d` is called, `=e` stays with other settings, `~f` leaves
/// with them.
fn orders(all: &mut Loading, now: u64, seen: &[(&str, Seen)]) -> Vec<String> {
    let of = |model: &Who| {
        let known = seen.iter().find(|(of, _)| *of == model.name.as_str());
        known.map_or(Seen { idle_for: secs(1000), ..Seen::default() }, |(_, seen)| *seen)
    };
    words(all.next(secs(now), None, of))
}

fn words(told: Vec<Order>) -> Vec<String> {
    told.into_iter()
        .map(|order| match order {
            Order::Load { model, .. } => format!("+{}", model.name),
            Order::Unload { model, .. } => format!("-{}", model.name),
            Order::GiveBack { model } => format!("?{}", model.name),
            Order::Call { model } => format!("!{}", model.name),
            Order::Stay { model, .. } => format!("={}", model.name),
            Order::Anew { model, .. } => format!("~{}", model.name),
        })
        .collect()
}

/// Loads models one after another, each for ten seconds from its minute on.
fn load(all: &mut Loading, models: &[&str]) {
    for (minute, of) in (0..).zip(models) {
        all.wants(&name(of), true);
        assert_eq!(orders(all, minute * 60, &[]), [format!("+{of}")]);
        all.loaded(&name(of), secs(minute * 60 + 10));
    }
}

const IN_USE: Seen =
    Seen { asked: 1, waiting: 0, in_flight: 1, idle_for: Duration::ZERO, conversations: Duration::ZERO };

#[test]
fn who_fits_comes_and_else_one_leaves_and_then_it_comes() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("c", model(10))]);
    load(&mut all, &["a", "b"]);
    all.wants(&name("c"), true);
    let told = orders(&mut all, 200, &[("b", Seen { asked: 5, idle_for: secs(3), ..Seen::default() })]);
    assert_eq!(told, ["-a"], "b was asked a moment ago");
    assert_eq!(orders(&mut all, 201, &[]), [""; 0], "it is on its way");
    all.gone(&name("a"));
    assert_eq!(orders(&mut all, 202, &[]), ["+c"]);
}

#[test]
fn who_has_long_conversations_stays_where_that_is_the_only_difference() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("c", model(10))]);
    load(&mut all, &["a", "b"]);
    all.wants(&name("c"), true);
    let idle = Seen { asked: 5, idle_for: secs(100), ..Seen::default() };
    let talks = Seen { conversations: secs(20), ..idle };
    assert_eq!(orders(&mut all, 300, &[("a", talks), ("b", idle)]), ["-b"]);
}

#[test]
fn only_as_many_leave_as_make_enough_room_and_who_leaks_first() {
    let mut all = loading(&[40], &[("a", model(10)), ("b", model(10)), ("c", model(18)), ("d", model(16))]);
    load(&mut all, &["a", "b", "c"]);
    let held = |gib: u64| Amounts { host: 0, gpus: vec![gib * GIB] };
    all.read(&name("c"), Reading { held: held(19), leaks: true, ..Reading::default() });
    let busy = [("a", 3), ("b", 2), ("c", 1)]
        .map(|(of, idle)| (of, Seen { asked: 50, idle_for: secs(idle), ..Seen::default() }));
    all.wants(&name("d"), true);
    assert_eq!(orders(&mut all, 300, &busy), ["-c"], "its next start is a cure, and it is enough alone");
}

#[test]
fn nobody_is_driven_out_for_one_that_would_not_fit_even_then_and_pins_stay() {
    let pinned = Spec { pin: true, ..model(10) };
    let mut all = loading(&[24], &[("a", pinned), ("b", model(10)), ("c", model(20))]);
    load(&mut all, &["a", "b"]);
    all.wants(&name("c"), true);
    assert_eq!(orders(&mut all, 500, &[]), [""; 0]);
    let needed = Amounts { host: 0, ..gpus(&[20]) };
    let why = Never::Room { needed, left: gpus(&[14]), pinned: vec![ModelName::new("a")] };
    assert_eq!(all.hopeless(), [(name("c"), why)]);
}

#[test]
fn who_waits_for_ever_is_told_why_and_who_waits_for_others_turns_is_not() {
    let pinned = || Spec { pin: true, ..model(10) };
    let rival = Spec { never_with: vec![ModelName::new("a")], ..model(1) };
    let mut all = loading(&[40], &[("a", pinned()), ("b", model(20)), ("c", model(20)), ("rival", rival)]);
    load(&mut all, &["a", "b"]);
    for wish in ["c", "rival"] {
        all.wants(&name(wish), true);
    }
    assert_eq!(all.hopeless(), [(name("rival"), Never::Excluded(vec![ModelName::new("a")]))]);
    all.numbers.max_loaded = 1;
    let count = Never::Count { pinned: vec![ModelName::new("a")], most: 1 };
    assert_eq!(all.hopeless()[0], (name("c"), count), "b leaves, and a does not");
    // An operator drains it.
    all.leaves(&name("a"));
    assert_eq!(all.hopeless(), []);
}

#[test]
fn one_that_is_in_use_has_its_turn() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a"]);
    all.wants(&name("b"), true);
    // It took ten seconds to load, so it stays for thirty; without anybody who uses it it need not.
    assert_eq!(orders(&mut all, 39, &[("a", IN_USE)]), [""; 0]);
    assert_eq!(orders(&mut all, 40, &[("a", IN_USE)]), ["-a"]);
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a"]);
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 11, &[]), ["-a"]);
}

#[test]
fn who_came_first_is_served_first_and_a_later_one_takes_only_what_that_cannot_use() {
    let models = [("a", model(20)), ("big", model(20)), ("small", model(3)), ("middle", model(8))];
    let mut all = loading(&[24], &models);
    load(&mut all, &["a"]);
    for of in ["big", "middle", "small"] {
        all.wants(&name(of), true);
    }
    // `a` has to go for the big one, beside which there are 4 GiB.
    assert_eq!(orders(&mut all, 100, &[]), ["-a", "+small"]);
    all.gone(&name("a"));
    assert_eq!(orders(&mut all, 101, &[]), ["+big"]);
    assert_eq!(orders(&mut all, 102, &[("big", IN_USE), ("small", IN_USE)]), [""; 0]);
}

#[test]
fn what_was_promised_and_is_not_taken_yet_is_not_given_to_others() {
    let mut all = loading(&[24], &[("a", model(12)), ("b", model(8))]);
    all.wants(&name("a"), true);
    let free = |gib: u64| Amounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let next = |all: &mut Loading, gib: u64| all.next(secs(1), Some(&free(gib)), |_| Seen::default()).len();
    // Somebody else's process has 6 GiB.
    assert_eq!(next(&mut all, 18), 1);
    all.wants(&name("b"), true);
    assert_eq!(next(&mut all, 18), 0, "6 are left for b");
    all.loaded(&name("a"), secs(9));
    let held = Amounts { host: 0, gpus: vec![9 * GIB] };
    all.read(&name("a"), Reading { held, ..Reading::default() });
    // It turned out to need less: 18 - 9 are free, and nobody has a right to them.
    assert_eq!(next(&mut all, 9), 1);
}

#[test]
fn what_one_takes_while_it_loads_is_not_counted_twice_and_drives_nobody_out() {
    let mut all = loading(&[24], &[("a", model(6)), ("b", model(8)), ("c", model(8))]);
    let free = |gib: u64| Amounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let next = |all: &mut Loading, gib: u64| {
        all.next(secs(1), Some(&free(gib)), |_| Seen { idle_for: secs(900), ..Seen::default() })
    };
    all.wants(&name("a"), true);
    next(&mut all, 24);
    all.loaded(&name("a"), secs(1));
    let held = Amounts { host: 0, gpus: vec![6 * GIB] };
    all.read(&name("a"), Reading { held, ..Reading::default() });
    all.wants(&name("b"), true);
    next(&mut all, 18);
    // Half loaded: of the 14 that are free, 4 are still its own.
    all.wants(&name("c"), true);
    let told = next(&mut all, 14);
    assert_eq!(told, [Order::Load { model: name("c"), places: vec![vec![0]] }]);
    // Somebody else takes what c was promised: while it comes nobody leaves for it.
    assert_eq!(next(&mut all, 1), []);
}

#[test]
fn what_is_too_large_by_the_book_may_try_where_nobody_else_is() {
    let mut all = loading(&[24], &[("huge", model(30))]);
    all.wants(&name("huge"), true);
    assert_eq!(orders(&mut all, 0, &[]), ["+huge"]);
}

#[test]
fn for_one_that_is_too_large_all_others_leave_and_nobody_comes_in_between() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("huge", model(30))]);
    load(&mut all, &["a", "b"]);
    all.wants(&name("huge"), true);
    assert_eq!(orders(&mut all, 500, &[]), ["-a", "-b"]);
    all.gone(&name("a"));
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 501, &[]), [""; 0]);
    all.gone(&name("b"));
    assert_eq!(orders(&mut all, 502, &[]), ["+huge"]);
    all.loaded(&name("huge"), secs(510));
    assert_eq!(orders(&mut all, 600, &[]), ["-huge"], "a waits");
}

#[test]
fn nobody_leaves_for_one_whom_nobody_waits_for() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a"]);
    all.wants(&name("b"), false);
    assert_eq!(orders(&mut all, 500, &[]), [""; 0]);
    let waits = ("b", Seen { waiting: 1, ..Seen::default() });
    assert_eq!(orders(&mut all, 501, &[waits]), ["-a"]);
}

#[test]
fn who_leaves_by_itself_makes_room_without_anybody_else() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(10)), ("c", model(10))]);
    load(&mut all, &["a", "b"]);
    all.leaves(&name("b"));
    all.wants(&name("c"), true);
    assert_eq!(orders(&mut all, 500, &[]), [""; 0], "it is awaited");
    all.gone(&name("b"));
    assert_eq!(orders(&mut all, 501, &[]), ["+c"]);
}

#[test]
fn a_start_that_found_too_little_asks_for_more_until_one_did() {
    let mut all = loading(&[24], &[("a", model(10)), ("b", model(12))]);
    load(&mut all, &["a"]);
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+b"]);
    assert_eq!(all.owed()[&name("b")].gpus, [12 * GIB]);
    all.short(&name("b"), secs(100));
    all.gone(&name("b"));
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 101, &[]), ["-a"], "15 and 10 are more than there is");
    all.gone(&name("a"));
    assert_eq!(orders(&mut all, 102, &[]), ["+b"]);
    assert_eq!(all.models[&name("b")].promised.gpus, [15 * GIB]);
    all.loaded(&name("b"), secs(110));
    all.read(&name("b"), Reading { held: Amounts { host: 0, gpus: vec![13 * GIB] }, ..Reading::default() });
    assert_eq!(all.models[&name("b")].promised.gpus, [13 * GIB], "what it holds is known now");
}

#[test]
fn a_large_one_is_not_starved_by_small_ones_that_came_later() {
    let small = [("a", model(6)), ("b", model(6)), ("c", model(6)), ("d", model(6)), ("e", model(6))];
    let mut models = small.to_vec();
    models.push(("big", model(20)));
    let mut all = loading(&[24], &models);
    load(&mut all, &["a", "b", "c", "d"]);
    all.wants(&name("big"), true);
    // Their turns end one after another, and each that leaves would be followed by the next.
    let busy = ["a", "b", "c", "d", "e"].map(|of| (of, IN_USE));
    assert_eq!(orders(&mut all, 205, &busy), [""; 0], "d has its turn until 220");
    all.wants(&name("e"), true);
    assert_eq!(orders(&mut all, 210, &busy), [""; 0], "nobody leaves for e");
    let gone = orders(&mut all, 221, &busy);
    assert_eq!(gone, ["-a", "-b", "-c", "-d"], "big had come before");
}

#[test]
fn a_gpu_of_which_nobody_tells_who_holds_what_is_held_as_it_was_promised() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    let free = Amounts { host: 1 << 40, gpus: vec![4 * GIB] };
    load(&mut all, &["a"]);
    all.read(&name("a"), Reading { held: Amounts::none(), gpus_unknown: true, ..Reading::default() });
    all.wants(&name("b"), true);
    let told = all.next(secs(500), Some(&free), |_| Seen { idle_for: secs(900), ..Seen::default() });
    assert_eq!(told, [Order::Unload { model: name("a"), makes_room_for: name("b") }]);
}

#[test]
fn needs_are_never_raised_above_what_can_be_and_come_down_again() {
    let pinned = Spec { pin: true, ..model(4) };
    let mut all = loading(&[24], &[("kept", pinned), ("b", model(14))]);
    load(&mut all, &["kept"]);
    for round in 0..6 {
        all.wants(&name("b"), true);
        assert_eq!(orders(&mut all, 100 + round, &[]), ["+b"], "round {round}");
        all.short(&name("b"), secs(100 + round));
        all.gone(&name("b"));
    }
    assert!(all.models[&name("b")].raised < 1.4);
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 1000, &[]), ["+b"]);
    assert_eq!(all.models[&name("b")].promised.gpus, [14 * GIB], "that was long ago");
    all.loaded(&name("b"), secs(1001));
    all.short(&name("b"), secs(1002));
    assert!(all.models[&name("b")].raised < 1.01, "what it serves with is enough");
}

#[test]
fn where_no_gpu_tells_its_memory_nobody_is_kept_waiting() {
    let mut all = loading(&[], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a", "b"]);
}

#[test]
fn on_the_host_a_plan_is_kept_until_it_is_used_for_the_first_time() {
    let needs = Needs { host: vec![(Part::Cache, 4 * GIB)], ..Needs::default() };
    let mut all = loading(&[], &[("a", Spec { needs: Some(needs), replicas: 1, ..Spec::default() })]);
    load(&mut all, &["a"]);
    let read = |all: &mut Loading, gib: u64| {
        all.read(
            &name("a"),
            Reading { held: Amounts { host: gib * GIB, gpus: Vec::new() }, ..Reading::default() },
        );
        all.models[&name("a")].promised.host
    };
    assert_eq!((read(&mut all, 1), read(&mut all, 6), read(&mut all, 5)), (4 * GIB, 6 * GIB, 6 * GIB));
}

#[test]
fn no_more_are_loaded_than_may_be_and_never_two_that_exclude_each_other() {
    let alone = Spec { never_with: vec![ModelName::new("a")], ..model(1) };
    let models = [("a", model(1)), ("b", model(1)), ("c", model(1)), ("alone", alone)];
    let mut all = loading(&[24], &models);
    all.numbers.max_loaded = 2;
    load(&mut all, &["a", "b"]);
    all.wants(&name("c"), true);
    assert_eq!(orders(&mut all, 300, &[]), ["-a"]);
    all.wants(&name("alone"), true);
    assert_eq!(orders(&mut all, 301, &[]), ["-b"]);
    all.gone(&name("a"));
    assert_eq!(orders(&mut all, 302, &[]), ["+c"]);
    all.gone(&name("b"));
    assert_eq!(orders(&mut all, 303, &[]), ["+alone"]);
    all.loaded(&name("c"), secs(304));
    all.loaded(&name("alone"), secs(304));
    all.wants(&name("a"), true);
    let busy = Seen { asked: 9, idle_for: secs(1), ..Seen::default() };
    assert_eq!(orders(&mut all, 400, &[("alone", busy)]), ["-alone"], "though c would be missed less");
}

#[test]
fn a_mapped_file_counts_on_the_host_though_the_kernel_calls_it_free() {
    let mapped = |gib: u64| {
        let needs = Needs { host: vec![(Part::Fixed, GIB)], mapped: gib * GIB, ..Needs::default() };
        Spec { needs: Some(needs), replicas: 1, ..Spec::default() }
    };
    let mut all = Loading::new(numbers());
    all.set_capacity(Amounts { host: 32 * GIB, gpus: Vec::new() });
    for of in ["a", "b"] {
        all.set(&name(of), mapped(20));
    }
    let free = Amounts { host: 31 * GIB, gpus: Vec::new() };
    let next = |all: &mut Loading| all.next(secs(1), Some(&free), |_| Seen::default());
    all.wants(&name("a"), true);
    assert_eq!(next(&mut all).len(), 1);
    all.loaded(&name("a"), secs(1));
    all.read(&name("a"), Reading { held: Amounts { host: GIB, gpus: Vec::new() }, ..Reading::default() });
    all.wants(&name("b"), true);
    let told = next(&mut all);
    assert_eq!(told, [Order::Unload { model: name("a"), makes_room_for: name("b") }]);
}

proptest! {
    /// Models of any size that are asked at any time: promises never exceed the machine, and everybody has his turn.
    #[test]
    fn promises_are_never_more_than_there_is_and_each_has_its_turn(
        sizes in proptest::collection::vec(1_u64..22, 2..7),
        asks in proptest::collection::vec((0_usize..7, 0_u64..20), 1..60),
        reloads in proptest::collection::vec((0_usize..7, 1_u64..22, 0_u64..200), 0..8),
    ) {
        const LOAD: u64 = 4;
        const SERVICE: u64 = 3;
        let names: Vec<String> = (0..sizes.len()).map(|index| format!("m{index}")).collect();
        let specs: Vec<(&str, Spec)> =
            names.iter().zip(&sizes).map(|(of, gib)| (of.as_str(), model(*gib))).collect();
        let mut all = loading(&[24], &specs);
        // By model: requests that wait, since when; the end of what is answered; when it is loaded.
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
                all.set(&of, model(*gib));
                all.remade(&of, secs(now));
            }
            for index in 0..names.len() {
                let of = name(&names[index]);
                if leaves[index] && until[index] <= now {
                    all.gone(&of);
                    (leaves[index], ready[index]) = (false, None);
                }
                if ready[index] == Some(now) {
                    all.loaded(&of, secs(now));
                }
                let serves = ready[index].is_some_and(|at| at <= now) && !leaves[index];
                if serves && until[index] <= now && !waiting[index].is_empty() {
                    longest = longest.max(now - waiting[index].remove(0));
                    until[index] = now + SERVICE;
                }
                if !waiting[index].is_empty() && ready[index].is_none() {
                    all.wants(&of, true);
                }
            }
            let seen = |of: &Who| {
                let index = names.iter().position(|known| known == of.name.as_str()).unwrap();
                Seen {
                    asked: asked[index],
                    waiting: waiting[index].len(),
                    in_flight: u32::from(until[index] > now),
                    idle_for: secs(now.saturating_sub(until[index])),
                    conversations: Duration::ZERO,
                }
            };
            for order in all.next(secs(now), None, seen) {
                let index = |of: &Who| names.iter().position(|known| known == of.name.as_str()).unwrap();
                match order {
                    Order::Load { model, .. } => ready[index(&model)] = Some(now + LOAD),
                    Order::Unload { model, .. } | Order::Anew { model, .. } => leaves[index(&model)] = true,
                    Order::Stay { .. } => {}
                    Order::GiveBack { .. } | Order::Call { .. } => unreachable!("nobody hoards or has company"),
                }
            }
            let promised = all.models.values().map(|model| model.promised.gpus.first().copied().unwrap_or(0));
            prop_assert!(promised.sum::<u64>() <= 24 * GIB);
            if next_ask.is_none() && waiting.iter().all(Vec::is_empty) {
                break;
            }
        }
        prop_assert!(waiting.iter().all(Vec::is_empty), "{waiting:?} still wait");
        // At most the turns of all models, some times: sixty requests come faster than they can be served.
        prop_assert!(longest <= 60 * (SERVICE + LOAD * 3 + 12), "{longest} s");
    }
}

#[test]
fn who_hoards_is_asked_before_anybody_leaves_and_if_that_does_not_do_somebody_does() {
    let held = |gib: u64, leaks| Reading {
        held: Amounts { host: 0, gpus: vec![gib * GIB] },
        leaks,
        can_give: true,
        ..Reading::default()
    };
    let begin = |reading: Reading| {
        let mut all = loading(&[24], &[("a", model(10)), ("b", model(8)), ("c", model(5))]);
        all.wants(&name("a"), true);
        all.wants(&name("b"), true);
        let idle = |_: &Who| Seen { idle_for: secs(1000), ..Seen::default() };
        assert_eq!(all.next(secs(0), Some(&gpus(&[24])), idle).len(), 2);
        for of in ["a", "b"] {
            all.loaded(&name(of), secs(10));
            all.read(&name(of), held(if of == "a" { 10 } else { 8 }, false));
        }
        all.read(&name("a"), reading);
        all.wants(&name("c"), true);
        all
    };
    let at = |all: &mut Loading, now, free| {
        words(all.next(Duration::from_millis(now), Some(&gpus(&[free])), |_| Seen {
            idle_for: secs(1000),
            ..Seen::default()
        }))
    };
    // It holds three GiB more than it was promised: six are left of the promises, three of the GPU.
    let mut all = begin(held(13, true));
    assert_eq!(at(&mut all, 300_000, 3), ["?a"]);
    assert_eq!(at(&mut all, 300_100, 3), [""; 0], "the answer is awaited");
    all.read(&name("a"), held(10, true));
    all.gave_back(&name("a"));
    assert_eq!(at(&mut all, 300_200, 6), ["+c"], "nobody had to leave");

    let mut all = begin(held(13, true));
    assert_eq!(at(&mut all, 300_000, 3), ["?a"]);
    all.gave_back(&name("a"));
    assert_eq!(at(&mut all, 300_200, 3), ["-a"], "it gave nothing");

    let mut all = begin(held(13, true));
    assert_eq!(at(&mut all, 300_000, 3), ["?a"]);
    assert_eq!(at(&mut all, 302_900, 3), [""; 0]);
    assert_eq!(at(&mut all, 303_000, 3), ["-a"], "no answer is waited for that long");

    let mut all = begin(Reading { can_give: false, ..held(13, true) });
    assert_eq!(at(&mut all, 300_000, 3), ["-a"], "its build cannot be asked");
    let mut all = begin(held(12, true));
    all.set(&name("c"), model(7));
    assert_eq!(at(&mut all, 300_000, 3), ["-a"], "what it can give is not enough");
}

/// A model that is loaded with others.
fn with(gib: u64, others: &[&str]) -> Spec {
    Spec { with: others.iter().map(ModelName::new).collect(), ..model(gib) }
}

/// Lets a model in, and then those that it calls.
fn load_with(all: &mut Loading, of: &str, company: &[&str]) {
    all.wants(&name(of), true);
    let mut told = vec![format!("+{of}")];
    told.extend(company.iter().map(|one| format!("!{one}")));
    assert_eq!(orders(all, 0, &[]), told);
    for one in company {
        all.wants(&name(one), false);
        assert_eq!(orders(all, 1, &[]), [format!("+{one}")]);
    }
    for one in company.iter().chain([&of]) {
        all.loaded(&name(one), secs(10));
    }
}

#[test]
fn who_stays_together_is_loaded_together_and_leaves_together() {
    let models = [("a", with(10, &["b"])), ("b", model(4)), ("c", model(8)), ("d", model(12))];
    let mut all = loading(&[24], &models);
    load_with(&mut all, "a", &["b"]);
    assert_eq!(all.kept_company(|_| Seen::default()), [name("b")]);
    all.wants(&name("c"), true);
    assert_eq!(orders(&mut all, 200, &[]), ["+c"]);
    all.loaded(&name("c"), secs(210));
    // Twelve of 24 GiB: c and b would do, and b stays with a.
    all.wants(&name("d"), true);
    assert_eq!(orders(&mut all, 400, &[]), ["-a"], "b has room");
    all.gone(&name("a"));
    assert_eq!(orders(&mut all, 401, &[]), ["+d"]);
    assert_eq!(all.kept_company(|_| Seen::default()), [], "nobody is there whom it came with");
}

#[test]
fn a_model_waits_until_there_is_room_for_its_company_too_and_that_room_is_nobody_elses() {
    let models = [("a", with(10, &["b"])), ("b", model(6)), ("c", model(6)), ("x", model(10))];
    let mut all = loading(&[24], &models);
    load(&mut all, &["x"]);
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-x"], "a alone would fit");
    all.wants(&name("c"), true);
    assert_eq!(orders(&mut all, 101, &[]), ["+c"], "8 of 24 are left by both");
    all.gone(&name("x"));
    assert_eq!(orders(&mut all, 102, &[]), ["+a", "!b"]);
    all.wants(&name("x"), true);
    assert_eq!(orders(&mut all, 103, &[]), [""; 0], "the rest is b's, which has not asked yet");
    all.wants(&name("b"), false);
    assert_eq!(orders(&mut all, 104, &[]), ["+b"]);
}

#[test]
fn company_that_never_fits_or_does_not_answer_keeps_nobody_waiting() {
    // Together they are too large.
    let mut all = loading(&[24], &[("a", with(20, &["b"])), ("b", model(10)), ("c", model(4))]);
    load_with(&mut all, "a", &[]);
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-a"], "somebody asks for b itself");
    all.gone(&name("a"));
    assert_eq!(orders(&mut all, 101, &[]), ["+b"]);

    // It is pinned beside one that leaves no room for the company.
    let pinned = Spec { pin: true, ..model(10) };
    let mut all = loading(&[24], &[("p", pinned), ("a", with(10, &["b"])), ("b", model(10))]);
    load(&mut all, &["p"]);
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+a"]);

    // It was called, and ends.
    let mut all = loading(&[24], &[("a", with(10, &["b"])), ("b", model(10)), ("c", model(12))]);
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 0, &[]), ["+a", "!b"]);
    all.loaded(&name("a"), secs(1));
    all.wants(&name("c"), true);
    let busy = [("a", IN_USE)];
    assert_eq!(orders(&mut all, 2, &busy), [""; 0], "a has its turn, and b its room");
    assert_eq!(orders(&mut all, 5, &busy), ["+c"], "b does not come");
}

#[test]
fn company_may_be_mutual_has_company_and_excludes_whom_it_excludes() {
    let models = [("a", with(4, &["b"])), ("b", with(4, &["c", "a"])), ("c", model(4)), ("d", model(14))];
    let mut all = loading(&[24], &models);
    load_with(&mut all, "b", &["a", "c"]);
    all.wants(&name("d"), true);
    let told = orders(&mut all, 100, &[]);
    assert_eq!(told, ["-a", "-b"], "c alone is not enough, and neither stays without the other");

    let alone = Spec { never_with: vec![ModelName::new("b")], ..with(4, &["b"]) };
    let mut all = loading(&[24], &[("a", alone), ("b", model(4))]);
    load_with(&mut all, "a", &[]);
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-a"]);
}

#[test]
fn company_is_a_wish_and_keeps_nobody_from_being_served() {
    // More than the book said is held by the one that would call it.
    let mut all =
        loading(&[24], &[("a", with(10, &["b"])), ("b", model(10)), ("w", model(4)), ("v", model(4))]);
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 0, &[]), ["+a", "!b"]);
    all.loaded(&name("a"), secs(1));
    all.gone(&name("b"));
    let held = Amounts { host: 0, gpus: vec![16 * GIB] };
    all.read(&name("a"), Reading { held, ..Reading::default() });
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-a"], "b is asked for, and nobody else has its room");

    // A pinned one holds its company: that is no room for others, and who needs less is served.
    let pinned = Spec { pin: true, ..with(10, &["b"]) };
    let mut all =
        loading(&[24], &[("a", pinned), ("b", model(8)), ("y", model(5)), ("w", model(10)), ("x", model(5))]);
    load_with(&mut all, "a", &["b"]);
    all.wants(&name("y"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+y"]);
    all.loaded(&name("y"), secs(101));
    all.wants(&name("w"), true);
    all.wants(&name("x"), true);
    assert_eq!(orders(&mut all, 200, &[]), ["-y"], "for x");
    assert_eq!(all.hopeless().iter().map(|(who, _)| who.clone()).collect::<Vec<_>>(), [name("w")]);

    // What another program has is no room for company either.
    let mut all =
        loading(&[24], &[("p", Spec { pin: true, ..model(1) }), ("a", with(14, &["b"])), ("b", model(8))]);
    load(&mut all, &["p"]);
    all.read(&name("p"), Reading { held: Amounts { host: 0, gpus: vec![GIB] }, ..Reading::default() });
    all.wants(&name("a"), true);
    let idle = |_: &Who| Seen { idle_for: secs(1000), ..Seen::default() };
    assert_eq!(words(all.next(secs(100), Some(&gpus(&[20])), idle)), ["+a"], "alone");
}

#[test]
fn the_room_of_company_is_kept_once_and_for_those_that_may_come() {
    // Both are asked for at the same time, and a third one is there.
    let mut all = loading(&[24], &[("x", model(6)), ("a", with(10, &["b"])), ("b", model(6))]);
    load(&mut all, &["x"]);
    all.wants(&name("a"), true);
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+a", "+b"]);

    // One that a pinned model excludes does not come, and nobody leaves for it.
    let excludes = Spec { pin: true, never_with: vec![ModelName::new("b")], ..model(4) };
    let mut all =
        loading(&[24], &[("p", excludes), ("x", model(8)), ("a", with(8, &["b"])), ("b", model(8))]);
    load(&mut all, &["p", "x"]);
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 200, &[]), ["+a"]);

    // One that is on its way out comes again.
    let mut all = loading(&[24], &[("a", with(10, &["b"])), ("b", model(6))]);
    load_with(&mut all, "a", &["b"]);
    all.leaves(&name("a"));
    all.leaves(&name("b"));
    all.gone(&name("a"));
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+a"]);
    all.loaded(&name("a"), secs(110));
    all.gone(&name("b"));
    assert!(all.is_moving(), "b is to come");
    assert_eq!(orders(&mut all, 111, &[]), ["!b"]);
    all.wants(&name("b"), false);
    assert_eq!(orders(&mut all, 112, &[]), ["+b"]);
}

#[test]
fn what_is_given_back_while_another_one_comes_is_room_at_once() {
    let idle = |_: &Who| Seen { idle_for: secs(900), ..Seen::default() };
    let held = |gib: u64| Reading { held: Amounts { host: 0, gpus: vec![gib * GIB] }, ..Reading::default() };
    let models =
        [("large", model(14)), ("old", model(8)), ("new", model(8)), ("small", model(2)), ("more", model(2))];
    let mut all = loading(&[26], &models);
    all.wants(&name("old"), true);
    all.next(secs(0), Some(&gpus(&[26])), idle);
    all.loaded(&name("old"), secs(1));
    all.read(&name("old"), held(8));
    all.wants(&name("large"), true);
    assert_eq!(words(all.next(secs(2), Some(&gpus(&[18])), idle)), ["+large"]);
    // It has taken 10 of its 14.
    all.wants(&name("new"), true);
    assert_eq!(words(all.next(secs(3), Some(&gpus(&[8])), idle)), ["-old"]);
    all.gone(&name("old"));
    assert_eq!(words(all.next(secs(4), Some(&gpus(&[16])), idle)), ["+new"], "16 are free, and 4 are owed");

    // What one that serves by now has taken is not taken for another one's.
    let mut all = loading(&[40], &models);
    all.wants(&name("large"), true);
    all.wants(&name("old"), true);
    assert_eq!(words(all.next(secs(0), Some(&gpus(&[26])), idle)), ["+large", "+old"]);
    all.loaded(&name("old"), secs(1));
    all.read(&name("old"), held(8));
    // Of 40 somebody else has 14: 26 less the 8 of one and 2 of the other.
    all.wants(&name("small"), true);
    all.wants(&name("more"), true);
    assert_eq!(words(all.next(secs(2), Some(&gpus(&[16])), idle)), ["+small", "+more"], "12 of 16 are owed");
    all.set(&name("x"), model(1));
    all.wants(&name("x"), false);
    assert_eq!(words(all.next(secs(3), Some(&gpus(&[16])), idle)), [""; 0]);
}

fn holds(gib: u64) -> Reading {
    Reading { held: Amounts { host: 0, gpus: vec![gib * GIB] }, ..Reading::default() }
}

/// A model has other settings, and its processes are to be made anew.
fn remake(all: &mut Loading, of: &str, spec: Spec) {
    all.set(&name(of), spec);
    all.remade(&name(of), Duration::ZERO);
}

#[test]
fn other_settings_take_what_is_left_and_what_is_more_than_that_waits_for_room_like_everybody() {
    let mut all = loading(&[24], &[("a", model(8)), ("b", model(10)), ("c", model(3))]);
    load(&mut all, &["a", "b"]);
    for (of, gib) in [("a", 8), ("b", 10)] {
        all.read(&name(of), holds(gib));
    }
    remake(&mut all, "a", model(13));
    assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    all.wants(&name("c"), false);
    // Its old process is read once more.
    all.read(&name("a"), Reading { outdated: true, ..holds(8) });
    assert_eq!(orders(&mut all, 201, &[]), [""; 0], "what it was promised is nobody else's");
    all.read(&name("a"), holds(12));
    assert_eq!(orders(&mut all, 202, &[]), [""; 0], "24 - 12 - 10 = 2");
    all.gone(&name("c"));
    remake(&mut all, "a", model(15));
    assert_eq!(orders(&mut all, 203, &[]), ["~a"], "12 + 2 are not enough");
    assert_eq!(orders(&mut all, 204, &[]), [""; 0]);
    all.gone(&name("a"));
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 205, &[]), ["-b"]);
    all.gone(&name("b"));
    assert_eq!(orders(&mut all, 206, &[]), ["+a"]);
}

#[test]
fn who_becomes_smaller_keeps_what_it_has_until_it_has_less() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(10))]);
    load(&mut all, &["a"]);
    all.read(&name("a"), holds(20));
    remake(&mut all, "a", model(9));
    all.wants(&name("b"), false);
    assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    all.read(&name("a"), Reading { outdated: true, ..holds(20) });
    assert_eq!(orders(&mut all, 201, &[]), [""; 0]);
    all.read(&name("a"), holds(9));
    assert_eq!(orders(&mut all, 202, &[]), ["+b"]);
}

#[test]
fn one_that_is_alone_leaves_for_nobody_and_one_that_can_do_with_less_starts_over() {
    let mut all = loading(&[24], &[("a", model(20))]);
    load(&mut all, &["a"]);
    remake(&mut all, "a", model(30));
    assert_eq!(orders(&mut all, 200, &[]), ["=a"], "the book may be wrong");
    assert_eq!(all.models[&name("a")].promised.gpus, [24 * GIB]);
    all.read(&name("a"), holds(18));
    assert_eq!(all.models[&name("a")].promised.gpus, [18 * GIB]);
    remake(&mut all, "a", Spec { can_do_with_less: true, ..model(30) });
    assert_eq!(orders(&mut all, 201, &[]), ["~a"]);
}

#[test]
fn processes_stay_on_their_gpus_more_of_them_are_placed_and_one_that_may_not_be_there_leaves() {
    let mut all = loading(&[24, 24], &[("a", model(10))]);
    load(&mut all, &["a"]);
    let place = all.models[&name("a")].places.clone();
    remake(&mut all, "a", Spec { replicas: 3, ..model(12) });
    let Some(Order::Stay { places, .. }) = all.next(secs(100), None, |_| Seen::default()).pop() else {
        panic!()
    };
    assert_eq!(places[0], place[0]);
    assert_eq!(places.len(), 3);
    assert_eq!(all.models[&name("a")].promised.gpus.iter().sum::<u64>(), 36 * GIB);
    let other = 1 - place[0][0];
    remake(&mut all, "a", Spec { gpus: vec![other], ..model(12) });
    assert_eq!(orders(&mut all, 101, &[]), ["~a"]);
}

#[test]
fn what_a_model_has_taken_that_was_not_read_yet_is_counted_once_and_drives_nobody_out() {
    let all_of = |gib: u64| Amounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let idle = |_: &Who| Seen { idle_for: secs(1000), ..Seen::default() };
    let mut all = loading(&[64], &[("a", model(10)), ("b", model(40)), ("c", model(12))]);
    load(&mut all, &["a"]);
    all.read(&name("a"), holds(10));
    all.wants(&name("b"), true);
    assert_eq!(words(all.next(secs(100), Some(&all_of(54)), idle)), ["+b"]);
    all.wants(&name("c"), true);
    all.loaded(&name("b"), secs(110));
    // It has its 40 GiB, as is seen by what is free; how much is whose is not known yet.
    assert_eq!(words(all.next(secs(110), Some(&all_of(14)), idle)), ["+c"]);
    all.read(&name("b"), holds(40));
    all.loaded(&name("c"), secs(115));
    all.gone(&name("c"));
    all.wants(&name("c"), true);
    assert_eq!(words(all.next(secs(116), Some(&all_of(14)), idle)), ["+c"]);
    all.loaded(&name("c"), secs(117));
    // Nobody reads it: after a while it has what it was promised, and who leaves unread leaves so much.
    assert_eq!(words(all.next(secs(130), Some(&all_of(2)), idle)), [""; 0]);
    assert_eq!(all.models[&name("c")].held().gpus, [12 * GIB]);
}

#[test]
fn what_others_have_that_leave_is_waited_for_and_not_for_ever() {
    let mut all = loading(&[24], &[("a", model(8)), ("x", model(14))]);
    load(&mut all, &["a", "x"]);
    for (of, gib) in [("a", 8), ("x", 14)] {
        all.read(&name(of), holds(gib));
    }
    all.leaves(&name("x"));
    all.set(&name("a"), model(20));
    all.remade(&name("a"), secs(200));
    assert_eq!(orders(&mut all, 200, &[]), [""; 0], "it has 14 of the 24 still");
    assert!(all.is_moving());
    let mut patient = loading(&[24], &[("a", model(8)), ("x", model(14))]);
    std::mem::swap(&mut all, &mut patient);
    patient.gone(&name("x"));
    assert_eq!(orders(&mut patient, 205, &[]), ["=a"]);
    let mut all = loading(&[24], &[("a", model(8)), ("x", model(14))]);
    load(&mut all, &["a", "x"]);
    all.leaves(&name("x"));
    all.set(&name("a"), model(20));
    all.remade(&name("a"), secs(200));
    assert_eq!(orders(&mut all, 209, &[]), [""; 0]);
    assert_eq!(orders(&mut all, 210, &[]), ["~a"], "its process may be needed meanwhile");
}

#[test]
fn what_becomes_smaller_stays_whoever_waits_and_what_was_kept_for_one_that_is_gone_is_free() {
    let pinned = |gib: u64| Spec { pin: true, ..model(gib) };
    let mut all = loading(&[24], &[("a", pinned(10)), ("b", model(8)), ("c", model(14))]);
    load(&mut all, &["a", "b"]);
    all.wants(&name("c"), true);
    let busy = [("b", IN_USE)];
    assert_eq!(orders(&mut all, 71, &busy), [""; 0], "it has its turn");
    remake(&mut all, "a", pinned(9));
    assert_eq!(orders(&mut all, 71, &busy), ["=a"]);
    all.read(&name("a"), holds(9));
    // Nobody waits any more.
    all.gone(&name("c"));
    remake(&mut all, "a", pinned(15));
    assert_eq!(orders(&mut all, 72, &busy), ["=a"], "24 - 8");
}

#[test]
fn a_reload_that_is_taken_back_while_its_process_comes_keeps_what_that_takes() {
    let mut all = loading(&[24], &[("a", model(8)), ("b", model(10)), ("c", model(6))]);
    load(&mut all, &["a", "b"]);
    for (of, gib) in [("a", 8), ("b", 10)] {
        all.read(&name(of), holds(gib));
    }
    for gib in [13, 8] {
        remake(&mut all, "a", model(gib));
        assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    }
    all.wants(&name("c"), false);
    assert_eq!(orders(&mut all, 201, &[]), [""; 0], "a process of 13 may be on its way");
    all.read(&name("a"), holds(8));
    assert_eq!(orders(&mut all, 202, &[]), ["+c"]);
}

#[test]
fn one_that_is_alone_goes_to_a_gpu_that_is_large_enough() {
    let mut all = loading(&[24, 48], &[("a", model(10))]);
    load(&mut all, &["a"]);
    assert_eq!(all.models[&name("a")].places, [[0]]);
    remake(&mut all, "a", model(30));
    assert_eq!(orders(&mut all, 200, &[]), ["~a"]);
    all.gone(&name("a"));
    all.wants(&name("a"), false);
    assert_eq!(orders(&mut all, 201, &[]), ["+a"]);
    assert_eq!(all.models[&name("a")].places, [[1]]);
}

#[test]
fn on_gpus_of_which_nothing_is_known_one_that_becomes_smaller_has_less() {
    let mut all = loading(&[24], &[("a", model(20))]);
    load(&mut all, &["a"]);
    let unknown = Reading { gpus_unknown: true, ..Reading::default() };
    all.read(&name("a"), unknown.clone());
    remake(&mut all, "a", model(9));
    assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    all.read(&name("a"), unknown);
    assert_eq!(all.models[&name("a")].promised.gpus, [9 * GIB]);
}

#[test]
fn each_of_many_processes_has_its_own_place() {
    let mut all = loading(&[24; 12], &[("a", Spec { replicas: 12, ..model(20) })]);
    load(&mut all, &["a"]);
    let before = all.models[&name("a")].places.clone();
    remake(&mut all, "a", Spec { replicas: 12, ..model(21) });
    let Some(Order::Stay { places, .. }) = all.next(secs(100), None, |_| Seen::default()).pop() else {
        panic!()
    };
    assert_eq!(places, before);
}

#[test]
fn what_several_take_at_once_is_counted_from_the_first_of_them_on() {
    let free = |gib: u64| Amounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let idle = |_: &Who| Seen { idle_for: secs(1000), ..Seen::default() };
    let mut all = loading(&[80], &[("a", model(40)), ("b", model(20)), ("c", model(18))]);
    all.wants(&name("a"), true);
    assert_eq!(words(all.next(secs(0), Some(&free(80)), idle)), ["+a"]);
    // It has 30 of its 40 by now.
    all.wants(&name("b"), true);
    assert_eq!(words(all.next(secs(5), Some(&free(50)), idle)), ["+b"]);
    all.loaded(&name("a"), secs(6));
    all.read(&name("a"), holds(40));
    // b has 15 of its 20: 80 - 40 - 15 are free, 20 are left.
    all.wants(&name("c"), true);
    assert_eq!(words(all.next(secs(7), Some(&free(25)), idle)), ["+c"]);
}

#[test]
fn company_that_is_there_stays_for_the_one_that_comes_to_it() {
    let mut all = loading(&[24], &[("a", with(10, &["b"])), ("b", model(4)), ("c", model(12))]);
    load(&mut all, &["b", "c"]);
    all.wants(&name("a"), true);
    assert_eq!(orders(&mut all, 500, &[]), ["-c"], "b is worth less, and would have to come again");
    all.gone(&name("c"));
    assert_eq!(orders(&mut all, 501, &[]), ["+a"]);
}

#[test]
fn the_file_of_a_model_is_counted_once_when_it_is_made_anew() {
    let needs =
        |gib: u64| Needs { mapped: 40 * GIB, host: vec![(Part::Cache, gib * GIB)], ..Needs::default() };
    let own = |gib: u64| Spec { needs: Some(needs(gib)), replicas: 1, ..Spec::default() };
    let mut all = Loading::new(numbers());
    all.set_capacity(Amounts { host: 60 * GIB, gpus: Vec::new() });
    all.set(&name("a"), own(4));
    load(&mut all, &["a"]);
    remake(&mut all, "a", own(8));
    assert_eq!(orders(&mut all, 100, &[]), ["=a"]);
    all.set(&name("b"), own(0));
    remake(&mut all, "a", own(19));
    assert_eq!(orders(&mut all, 101, &[]), ["=a"], "40 + 19 of 60");
}

#[test]
fn while_both_processes_are_there_both_have_their_room() {
    let mut all = loading(&[80], &[("a", model(20)), ("b", model(40))]);
    load(&mut all, &["a"]);
    all.read(&name("a"), holds(20));
    remake(&mut all, "a", model(24));
    let free = |gib: u64| Amounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let idle = |_: &Who| Seen { idle_for: secs(1000), ..Seen::default() };
    let told = all.next(secs(100), Some(&free(60)), idle);
    assert!(matches!(&told[..], [Order::Stay { beside: true, .. }]), "{told:?}");
    all.wants(&name("b"), false);
    // The new one has 10 by now.
    assert_eq!(words(all.next(secs(105), Some(&free(50)), idle)), [""; 0], "20 + 24 + 40 are more than 80");
    all.read(&name("a"), holds(24));
    assert_eq!(words(all.next(secs(110), Some(&free(56)), idle)), ["+b"]);
}

#[test]
fn who_waits_to_be_made_anew_came_first_and_whose_process_does_not_come_has_what_it_had() {
    let mut all = loading(&[24], &[("a", model(8)), ("x", model(14)), ("c", model(10))]);
    load(&mut all, &["a", "x"]);
    for (of, gib) in [("a", 8), ("x", 14)] {
        all.read(&name(of), holds(gib));
    }
    all.leaves(&name("x"));
    all.set(&name("a"), model(20));
    all.remade(&name("a"), secs(200));
    assert_eq!(orders(&mut all, 200, &[]), [""; 0]);
    all.wants(&name("c"), false);
    assert_eq!(orders(&mut all, 201, &[]), [""; 0]);
    all.gone(&name("x"));
    assert_eq!(orders(&mut all, 202, &[]), ["=a"]);
    all.kept(&name("a"));
    assert_eq!(all.models[&name("a")].renewed, None);
    assert_eq!(all.models[&name("a")].promised.gpus, [20 * GIB], "it is tried again");
}

#[test]
fn a_guest_comes_only_where_there_is_room_and_leaves_before_anybody_else() {
    let guest = |gib| Spec { guest: true, ..model(gib) };
    let mut all = loading(&[24], &[("a", model(10)), ("g", guest(10)), ("b", model(10)), ("c", model(14))]);
    load(&mut all, &["a", "g"]);
    // Even for one whom nobody waits for, and although it is in use.
    all.wants(&name("b"), false);
    assert_eq!(orders(&mut all, 200, &[("g", IN_USE)]), ["-g"]);
    all.gone(&name("g"));
    assert_eq!(orders(&mut all, 201, &[]), ["+b"]);
    all.loaded(&name("b"), secs(210));
    // Nobody leaves for it, nor waits behind it.
    all.wants(&name("g"), true);
    let waits = Seen { waiting: 3, ..IN_USE };
    assert_eq!(orders(&mut all, 1000, &[("g", waits)]), [""; 0]);
    all.leaves(&name("b"));
    assert_eq!(orders(&mut all, 1001, &[("g", waits)]), [""; 0], "nothing is kept for it");
    all.gone(&name("b"));
    all.wants(&name("c"), true);
    assert_eq!(orders(&mut all, 1002, &[("g", waits)]), ["+c"], "it came later, and is served first");
}

#[test]
fn where_a_guest_is_not_enough_it_leaves_along_with_whom_it_takes_and_counts_as_room() {
    let guest = Spec { guest: true, ..model(8) };
    let mut all = loading(&[24], &[("a", model(14)), ("g", guest), ("b", model(20)), ("c", model(10))]);
    load(&mut all, &["a", "g"]);
    let roomy = all.roomy(None);
    assert!(roomy.contains(&name("c")), "a guest leaves for it: {roomy:?}");
    assert!(!roomy.contains(&name("b")), "somebody else would have to leave, too: {roomy:?}");
    all.wants(&name("b"), true);
    assert_eq!(orders(&mut all, 500, &[]), ["-a", "-g"], "either alone leaves too little");
}

#[test]
fn a_guest_leaves_for_other_settings_of_another_one() {
    let guest = Spec { guest: true, ..model(8) };
    let mut all = loading(&[24], &[("a", model(10)), ("g", guest)]);
    load(&mut all, &["a", "g"]);
    all.set(&name("a"), model(20));
    all.remade(&name("a"), secs(300));
    assert_eq!(orders(&mut all, 300, &[]), ["-g"], "it waits until the guest has left");
    all.gone(&name("g"));
    assert_eq!(orders(&mut all, 301, &[]), ["=a"]);
}
