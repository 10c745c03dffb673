//! Memory readings while models are loaded and unloaded.

use super::*;

#[test]
fn what_one_takes_while_it_loads_is_not_counted_twice_and_drives_nobody_out() {
    let mut all = loading(&[24], &[("a", model(6)), ("b", model(8)), ("c", model(8))]);
    let free = |gib: u64| MemoryAmounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let next = |all: &mut LoadingState, gib: u64| {
        all.next_orders(secs(1), Some(&free(gib)), |_| ModelActivity {
            idle_for: secs(900),
            ..ModelActivity::default()
        })
    };
    all.models.enqueue(&name("a"), true);
    next(&mut all, 24);
    all.record_loaded(&name("a"), secs(1));
    let held = MemoryAmounts { host: 0, gpus: vec![6 * GIB] };
    all.record_reading(&name("a"), ModelReading { held, ..ModelReading::default() });
    all.models.enqueue(&name("b"), true);
    next(&mut all, 18);
    // Half of the model is loaded: 4 of the 14 free GiB are still reserved for it.
    all.models.enqueue(&name("c"), true);
    let told = next(&mut all, 14);
    assert_eq!(told, [LoaderOrder::Load { model: name("c"), places: vec![vec![0]] }]);
    // Another program takes c's promised memory: during c's start, no model is unloaded for it.
    assert_eq!(next(&mut all, 1), []);
}

#[test]
fn a_gpu_of_which_nobody_tells_who_holds_what_is_held_as_it_was_promised() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(20))]);
    let free = MemoryAmounts { host: 1 << 40, gpus: vec![4 * GIB] };
    load(&mut all, &["a"]);
    all.record_reading(
        &name("a"),
        ModelReading { held: MemoryAmounts::none(), gpus_unknown: true, ..ModelReading::default() },
    );
    all.models.enqueue(&name("b"), true);
    let told = all.next_orders(secs(500), Some(&free), |_| ModelActivity {
        idle_for: secs(900),
        ..ModelActivity::default()
    });
    assert_eq!(told, [LoaderOrder::Unload { model: name("a"), replaced_by: name("b") }]);
}

#[test]
fn needs_are_never_raised_above_what_can_be_and_come_down_again() {
    let pinned = LoadSpec { pin: true, ..model(4) };
    let mut all = loading(&[24], &[("kept", pinned), ("b", model(14))]);
    load(&mut all, &["kept"]);
    for round in 0..6 {
        all.models.enqueue(&name("b"), true);
        assert_eq!(orders(&mut all, 100 + round, &[]), ["+b"], "round {round}");
        all.raise_needs(&name("b"), secs(100 + round));
        all.record_gone(&name("b"));
    }
    assert!(all.models.all[&name("b")].raised.factor < 1.4);
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 1000, &[]), ["+b"]);
    assert_eq!(all.models.all[&name("b")].admitted.promised.gpus, [14 * GIB], "that was long ago");
    all.record_loaded(&name("b"), secs(1001));
    all.raise_needs(&name("b"), secs(1002));
    assert!(all.models.all[&name("b")].raised.factor < 1.01, "what it serves with is enough");
}

#[test]
fn where_no_gpu_tells_its_memory_nobody_is_kept_waiting() {
    let mut all = loading(&[], &[("a", model(20)), ("b", model(20))]);
    load(&mut all, &["a", "b"]);
}

#[test]
fn on_the_host_a_plan_is_kept_until_it_is_used_for_the_first_time() {
    let needs = MemoryNeeds { host: vec![(NeedPurpose::Cache, 4 * GIB)], ..MemoryNeeds::default() };
    let mut all = loading(&[], &[("a", LoadSpec { needs: Some(needs), replicas: 1, ..LoadSpec::default() })]);
    load(&mut all, &["a"]);
    let read = |all: &mut LoadingState, gib: u64| {
        all.record_reading(
            &name("a"),
            ModelReading {
                held: MemoryAmounts { host: gib * GIB, gpus: Vec::new() },
                ..ModelReading::default()
            },
        );
        all.models.all[&name("a")].admitted.promised.host
    };
    assert_eq!((read(&mut all, 1), read(&mut all, 6), read(&mut all, 5)), (4 * GIB, 6 * GIB, 6 * GIB));
}

#[test]
fn a_mapped_file_counts_on_the_host_though_the_kernel_calls_it_free() {
    let mapped = |gib: u64| {
        let needs = MemoryNeeds {
            host: vec![(NeedPurpose::Fixed, GIB)],
            mapped: gib * GIB,
            ..MemoryNeeds::default()
        };
        LoadSpec { needs: Some(needs), replicas: 1, ..LoadSpec::default() }
    };
    let mut all = LoadingState::new(numbers());
    all.capacity = MemoryAmounts { host: 32 * GIB, gpus: Vec::new() };
    for of in ["a", "b"] {
        all.models.set_spec(&name(of), mapped(20));
    }
    let free = MemoryAmounts { host: 31 * GIB, gpus: Vec::new() };
    let next = |all: &mut LoadingState| all.next_orders(secs(1), Some(&free), |_| ModelActivity::default());
    all.models.enqueue(&name("a"), true);
    assert_eq!(next(&mut all).len(), 1);
    all.record_loaded(&name("a"), secs(1));
    all.record_reading(
        &name("a"),
        ModelReading { held: MemoryAmounts { host: GIB, gpus: Vec::new() }, ..ModelReading::default() },
    );
    all.models.enqueue(&name("b"), true);
    let told = next(&mut all);
    assert_eq!(told, [LoaderOrder::Unload { model: name("a"), replaced_by: name("b") }]);
}

#[test]
fn who_hoards_is_asked_before_anybody_leaves_and_if_that_does_not_do_somebody_does() {
    let held = |gib: u64, leaks| ModelReading {
        held: MemoryAmounts { host: 0, gpus: vec![gib * GIB] },
        leaks,
        can_reclaim: true,
        ..ModelReading::default()
    };
    let begin = |reading: ModelReading| {
        let mut all = loading(&[24], &[("a", model(10)), ("b", model(8)), ("c", model(5))]);
        all.models.enqueue(&name("a"), true);
        all.models.enqueue(&name("b"), true);
        let idle = |_: &ModelId| ModelActivity { idle_for: secs(1000), ..ModelActivity::default() };
        assert_eq!(all.next_orders(secs(0), Some(&gpus(&[24])), idle).len(), 2);
        for of in ["a", "b"] {
            all.record_loaded(&name(of), secs(10));
            all.record_reading(&name(of), held(if of == "a" { 10 } else { 8 }, false));
        }
        all.record_reading(&name("a"), reading);
        all.models.enqueue(&name("c"), true);
        all
    };
    let at = |all: &mut LoadingState, now, free| {
        words(all.next_orders(Duration::from_millis(now), Some(&gpus(&[free])), |_| ModelActivity {
            idle_for: secs(1000),
            ..ModelActivity::default()
        }))
    };
    // `a` holds three GiB more than promised; six GiB of promises and three of the GPU are left.
    let mut all = begin(held(13, true));
    assert_eq!(at(&mut all, 300_000, 3), ["?a"]);
    assert_eq!(at(&mut all, 300_100, 3), [""; 0], "the answer is awaited");
    all.record_reading(&name("a"), held(10, true));
    all.models.reclaim_ended(&name("a"));
    assert_eq!(at(&mut all, 300_200, 6), ["+c"], "nobody had to leave");

    let mut all = begin(held(13, true));
    assert_eq!(at(&mut all, 300_000, 3), ["?a"]);
    all.models.reclaim_ended(&name("a"));
    assert_eq!(at(&mut all, 300_200, 3), ["-a"], "it gave nothing");

    let mut all = begin(held(13, true));
    assert_eq!(at(&mut all, 300_000, 3), ["?a"]);
    assert_eq!(at(&mut all, 302_900, 3), [""; 0]);
    assert_eq!(at(&mut all, 303_000, 3), ["-a"], "no answer is waited for that long");

    let mut all = begin(ModelReading { can_reclaim: false, ..held(13, true) });
    assert_eq!(at(&mut all, 300_000, 3), ["-a"], "its build cannot be asked");
    let mut all = begin(held(12, true));
    all.models.set_spec(&name("c"), model(7));
    assert_eq!(at(&mut all, 300_000, 3), ["-a"], "what it can give is not enough");
}

#[test]
fn what_is_given_back_while_another_one_comes_is_room_at_once() {
    let idle = |_: &ModelId| ModelActivity { idle_for: secs(900), ..ModelActivity::default() };
    let held = |gib: u64| ModelReading {
        held: MemoryAmounts { host: 0, gpus: vec![gib * GIB] },
        ..ModelReading::default()
    };
    let models =
        [("large", model(14)), ("old", model(8)), ("new", model(8)), ("small", model(2)), ("more", model(2))];
    let mut all = loading(&[26], &models);
    all.models.enqueue(&name("old"), true);
    all.next_orders(secs(0), Some(&gpus(&[26])), idle);
    all.record_loaded(&name("old"), secs(1));
    all.record_reading(&name("old"), held(8));
    all.models.enqueue(&name("large"), true);
    assert_eq!(words(all.next_orders(secs(2), Some(&gpus(&[18])), idle)), ["+large"]);
    // The large model has taken 10 of its 14 GiB.
    all.models.enqueue(&name("new"), true);
    assert_eq!(words(all.next_orders(secs(3), Some(&gpus(&[8])), idle)), ["-old"]);
    all.record_gone(&name("old"));
    assert_eq!(
        words(all.next_orders(secs(4), Some(&gpus(&[16])), idle)),
        ["+new"],
        "16 are free, and 4 are owed"
    );

    // Memory taken by a serving model is not attributed to another one.
    let mut all = loading(&[40], &models);
    all.models.enqueue(&name("large"), true);
    all.models.enqueue(&name("old"), true);
    assert_eq!(words(all.next_orders(secs(0), Some(&gpus(&[26])), idle)), ["+large", "+old"]);
    all.record_loaded(&name("old"), secs(1));
    all.record_reading(&name("old"), held(8));
    // Another program holds 14 of 40 GiB: 26 are left, less 8 of `old` and 2 still reserved.
    all.models.enqueue(&name("small"), true);
    all.models.enqueue(&name("more"), true);
    assert_eq!(
        words(all.next_orders(secs(2), Some(&gpus(&[16])), idle)),
        ["+small", "+more"],
        "12 of 16 are owed"
    );
    all.models.set_spec(&name("x"), model(1));
    all.models.enqueue(&name("x"), false);
    assert_eq!(words(all.next_orders(secs(3), Some(&gpus(&[16])), idle)), [""; 0]);
}

#[test]
fn what_a_model_has_taken_that_was_not_read_yet_is_counted_once_and_drives_nobody_out() {
    let all_of = |gib: u64| MemoryAmounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let idle = |_: &ModelId| ModelActivity { idle_for: secs(1000), ..ModelActivity::default() };
    let mut all = loading(&[64], &[("a", model(10)), ("b", model(40)), ("c", model(12))]);
    load(&mut all, &["a"]);
    all.record_reading(&name("a"), holds(10));
    all.models.enqueue(&name("b"), true);
    assert_eq!(words(all.next_orders(secs(100), Some(&all_of(54)), idle)), ["+b"]);
    all.models.enqueue(&name("c"), true);
    all.record_loaded(&name("b"), secs(110));
    // Free memory shows that 40 GiB were taken, but not yet by which model.
    assert_eq!(words(all.next_orders(secs(110), Some(&all_of(14)), idle)), ["+c"]);
    all.record_reading(&name("b"), holds(40));
    all.record_loaded(&name("c"), secs(115));
    all.record_gone(&name("c"));
    all.models.enqueue(&name("c"), true);
    assert_eq!(words(all.next_orders(secs(116), Some(&all_of(14)), idle)), ["+c"]);
    all.record_loaded(&name("c"), secs(117));
    // A model without a reading counts with its promise after a while.
    assert_eq!(words(all.next_orders(secs(130), Some(&all_of(2)), idle)), [""; 0]);
    assert_eq!(all.models.all[&name("c")].held().gpus, [12 * GIB]);
}

#[test]
fn what_others_have_that_leave_is_waited_for_and_not_for_ever() {
    let mut all = loading(&[24], &[("a", model(8)), ("x", model(14))]);
    load_read(&mut all, &[("a", 8), ("x", 14)]);
    waits_for_who_leaves(&mut all);
    assert_eq!(orders(&mut all, 200, &[]), [""; 0], "it has 14 of the 24 still");
    assert!(all.models.has_waiters());
    all.record_gone(&name("x"));
    assert_eq!(orders(&mut all, 205, &[]), ["=a"]);
    let mut all = loading(&[24], &[("a", model(8)), ("x", model(14))]);
    load(&mut all, &["a", "x"]);
    waits_for_who_leaves(&mut all);
    assert_eq!(orders(&mut all, 209, &[]), [""; 0]);
    assert_eq!(orders(&mut all, 210, &[]), ["~a"], "its process may be needed meanwhile");
}

#[test]
fn each_of_many_processes_has_its_own_place() {
    let mut all = loading(&[24; 12], &[("a", LoadSpec { replicas: 12, ..model(20) })]);
    load(&mut all, &["a"]);
    let before = all.models.all[&name("a")].places.clone();
    remake(&mut all, "a", LoadSpec { replicas: 12, ..model(21) });
    let Some(LoaderOrder::Renew { places, .. }) =
        all.next_orders(secs(100), None, |_| ModelActivity::default()).pop()
    else {
        panic!()
    };
    assert_eq!(places, before);
}

#[test]
fn what_several_take_at_once_is_counted_from_the_first_of_them_on() {
    let free = |gib: u64| MemoryAmounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let idle = |_: &ModelId| ModelActivity { idle_for: secs(1000), ..ModelActivity::default() };
    let mut all = loading(&[80], &[("a", model(40)), ("b", model(20)), ("c", model(18))]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(words(all.next_orders(secs(0), Some(&free(80)), idle)), ["+a"]);
    // `a` has taken 30 of its 40 GiB.
    all.models.enqueue(&name("b"), true);
    assert_eq!(words(all.next_orders(secs(5), Some(&free(50)), idle)), ["+b"]);
    all.record_loaded(&name("a"), secs(6));
    all.record_reading(&name("a"), holds(40));
    // `b` has taken 15 of its 20 GiB: 80 - 40 - 15 are free, 20 are left.
    all.models.enqueue(&name("c"), true);
    assert_eq!(words(all.next_orders(secs(7), Some(&free(25)), idle)), ["+c"]);
}
