//! Renewed models: new settings, new places.

use super::*;

#[test]
fn other_settings_take_what_is_left_and_what_is_more_than_that_waits_for_room_like_everybody() {
    let mut all = loading(&[24], &[("a", model(8)), ("b", model(10)), ("c", model(3))]);
    load_read(&mut all, &[("a", 8), ("b", 10)]);
    remake(&mut all, "a", model(13));
    assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    all.models.enqueue(&name("c"), false);
    // The old process is read once more, after the new promise.
    all.record_reading(&name("a"), ModelReading { outdated: true, ..holds(8) });
    assert_eq!(orders(&mut all, 201, &[]), [""; 0], "what it was promised is nobody else's");
    all.record_reading(&name("a"), holds(12));
    assert_eq!(orders(&mut all, 202, &[]), [""; 0], "24 - 12 - 10 = 2");
    all.record_gone(&name("c"));
    remake(&mut all, "a", model(15));
    assert_eq!(orders(&mut all, 203, &[]), ["~a"], "12 + 2 are not enough");
    assert_eq!(orders(&mut all, 204, &[]), [""; 0]);
    all.record_gone(&name("a"));
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 205, &[]), ["-b"]);
    all.record_gone(&name("b"));
    assert_eq!(orders(&mut all, 206, &[]), ["+a"]);
}

#[test]
fn who_becomes_smaller_keeps_what_it_has_until_it_has_less() {
    let mut all = loading(&[24], &[("a", model(20)), ("b", model(10))]);
    load(&mut all, &["a"]);
    all.record_reading(&name("a"), holds(20));
    remake(&mut all, "a", model(9));
    all.models.enqueue(&name("b"), false);
    assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    all.record_reading(&name("a"), ModelReading { outdated: true, ..holds(20) });
    assert_eq!(orders(&mut all, 201, &[]), [""; 0]);
    all.record_reading(&name("a"), holds(9));
    assert_eq!(orders(&mut all, 202, &[]), ["+b"]);
}

#[test]
fn one_that_is_alone_leaves_for_nobody_and_one_that_can_do_with_less_starts_over() {
    let mut all = loading(&[24], &[("a", model(20))]);
    load(&mut all, &["a"]);
    remake(&mut all, "a", model(30));
    assert_eq!(orders(&mut all, 200, &[]), ["=a"], "the book may be wrong");
    assert_eq!(all.models.all[&name("a")].admitted.promised.gpus, [24 * GIB]);
    all.record_reading(&name("a"), holds(18));
    assert_eq!(all.models.all[&name("a")].admitted.promised.gpus, [18 * GIB]);
    remake(&mut all, "a", LoadSpec { can_do_with_less: true, ..model(30) });
    assert_eq!(orders(&mut all, 201, &[]), ["~a"]);
}

#[test]
fn processes_stay_on_their_gpus_more_of_them_are_placed_and_one_that_may_not_be_there_leaves() {
    let mut all = loading(&[24, 24], &[("a", model(10))]);
    load(&mut all, &["a"]);
    let place = all.models.all[&name("a")].places.clone();
    remake(&mut all, "a", LoadSpec { replicas: 3, ..model(12) });
    let Some(LoaderOrder::Renew { places, .. }) =
        all.next_orders(secs(100), None, |_| ModelActivity::default()).pop()
    else {
        panic!()
    };
    assert_eq!(places[0], place[0]);
    assert_eq!(places.len(), 3);
    assert_eq!(all.models.all[&name("a")].admitted.promised.gpus.iter().sum::<u64>(), 36 * GIB);
    let other = 1 - place[0][0];
    remake(&mut all, "a", LoadSpec { gpus: vec![other], ..model(12) });
    assert_eq!(orders(&mut all, 101, &[]), ["~a"]);
}

#[test]
fn what_becomes_smaller_stays_whoever_waits_and_what_was_kept_for_one_that_is_gone_is_free() {
    let pinned = |gib: u64| LoadSpec { pin: true, ..model(gib) };
    let mut all = loading(&[24], &[("a", pinned(10)), ("b", model(8)), ("c", model(14))]);
    load(&mut all, &["a", "b"]);
    all.models.enqueue(&name("c"), true);
    let busy = [("b", IN_USE)];
    assert_eq!(orders(&mut all, 71, &busy), [""; 0], "it has its turn");
    remake(&mut all, "a", pinned(9));
    assert_eq!(orders(&mut all, 71, &busy), ["=a"]);
    all.record_reading(&name("a"), holds(9));
    // No other model waits any more.
    all.record_gone(&name("c"));
    remake(&mut all, "a", pinned(15));
    assert_eq!(orders(&mut all, 72, &busy), ["=a"], "24 - 8");
}

#[test]
fn a_reload_that_is_taken_back_while_its_process_comes_keeps_what_that_takes() {
    let mut all = loading(&[24], &[("a", model(8)), ("b", model(10)), ("c", model(6))]);
    load_read(&mut all, &[("a", 8), ("b", 10)]);
    for gib in [13, 8] {
        remake(&mut all, "a", model(gib));
        assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    }
    all.models.enqueue(&name("c"), false);
    assert_eq!(orders(&mut all, 201, &[]), [""; 0], "a process of 13 may be on its way");
    all.record_reading(&name("a"), holds(8));
    assert_eq!(orders(&mut all, 202, &[]), ["+c"]);
}

#[test]
fn one_that_is_alone_goes_to_a_gpu_that_is_large_enough() {
    let mut all = loading(&[24, 48], &[("a", model(10))]);
    load(&mut all, &["a"]);
    assert_eq!(all.models.all[&name("a")].places, [[0]]);
    remake(&mut all, "a", model(30));
    assert_eq!(orders(&mut all, 200, &[]), ["~a"]);
    all.record_gone(&name("a"));
    all.models.enqueue(&name("a"), false);
    assert_eq!(orders(&mut all, 201, &[]), ["+a"]);
    assert_eq!(all.models.all[&name("a")].places, [[1]]);
}

#[test]
fn on_gpus_of_which_nothing_is_known_one_that_becomes_smaller_has_less() {
    let mut all = loading(&[24], &[("a", model(20))]);
    load(&mut all, &["a"]);
    let unknown = ModelReading { gpus_unknown: true, ..ModelReading::default() };
    all.record_reading(&name("a"), unknown.clone());
    remake(&mut all, "a", model(9));
    assert_eq!(orders(&mut all, 200, &[]), ["=a"]);
    all.record_reading(&name("a"), unknown);
    assert_eq!(all.models.all[&name("a")].admitted.promised.gpus, [9 * GIB]);
}

#[test]
fn the_file_of_a_model_is_counted_once_when_it_is_made_anew() {
    let needs = |gib: u64| MemoryNeeds {
        mapped: 40 * GIB,
        host: vec![(NeedPurpose::Cache, gib * GIB)],
        ..MemoryNeeds::default()
    };
    let own = |gib: u64| LoadSpec { needs: Some(needs(gib)), replicas: 1, ..LoadSpec::default() };
    let mut all = LoadingState::new(numbers());
    all.capacity = MemoryAmounts { host: 60 * GIB, gpus: Vec::new() };
    all.models.set_spec(&name("a"), own(4));
    load(&mut all, &["a"]);
    remake(&mut all, "a", own(8));
    assert_eq!(orders(&mut all, 100, &[]), ["=a"]);
    all.models.set_spec(&name("b"), own(0));
    remake(&mut all, "a", own(19));
    assert_eq!(orders(&mut all, 101, &[]), ["=a"], "40 + 19 of 60");
}

#[test]
fn while_both_processes_are_there_both_have_their_room() {
    let mut all = loading(&[80], &[("a", model(20)), ("b", model(40))]);
    load(&mut all, &["a"]);
    all.record_reading(&name("a"), holds(20));
    remake(&mut all, "a", model(24));
    let free = |gib: u64| MemoryAmounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let idle = |_: &ModelId| ModelActivity { idle_for: secs(1000), ..ModelActivity::default() };
    let told = all.next_orders(secs(100), Some(&free(60)), idle);
    assert!(matches!(&told[..], [LoaderOrder::Renew { beside: true, .. }]), "{told:?}");
    all.models.enqueue(&name("b"), false);
    // The new process has taken 10 GiB.
    assert_eq!(
        words(all.next_orders(secs(105), Some(&free(50)), idle)),
        [""; 0],
        "20 + 24 + 40 are more than 80"
    );
    all.record_reading(&name("a"), holds(24));
    assert_eq!(words(all.next_orders(secs(110), Some(&free(56)), idle)), ["+b"]);
}

#[test]
fn what_a_process_takes_that_loads_for_minutes_is_counted_once() {
    let mut all = loading(&[80], &[("a", model(20)), ("b", model(30))]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 0, &[]), ["+a"]);
    all.record_loaded(&name("a"), secs(150));
    all.record_reading(&name("a"), holds(20));
    remake(&mut all, "a", model(24));
    let free = |gib: u64| MemoryAmounts { host: 1 << 40, gpus: vec![gib * GIB] };
    let idle = |_: &ModelId| ModelActivity { idle_for: secs(1000), ..ModelActivity::default() };
    assert_eq!(words(all.next_orders(secs(200), Some(&free(60)), idle)), ["=a"]);
    // After four minutes the new process has taken 20 of its 24 GiB, and the old one serves.
    assert_eq!(words(all.next_orders(secs(440), Some(&free(40)), idle)), [""; 0]);
    all.models.enqueue(&name("b"), false);
    assert_eq!(words(all.next_orders(secs(441), Some(&free(40)), idle)), ["+b"], "80 - 20 - 24 = 36");
}

#[test]
fn who_waits_to_be_made_anew_came_first_and_whose_process_does_not_come_has_what_it_had() {
    let mut all = loading(&[24], &[("a", model(8)), ("x", model(14)), ("c", model(10))]);
    load_read(&mut all, &[("a", 8), ("x", 14)]);
    waits_for_who_leaves(&mut all);
    assert_eq!(orders(&mut all, 200, &[]), [""; 0]);
    all.models.enqueue(&name("c"), false);
    assert_eq!(orders(&mut all, 201, &[]), [""; 0]);
    all.record_gone(&name("x"));
    assert_eq!(orders(&mut all, 202, &[]), ["=a"]);
    all.renewal_failed(&name("a"));
    assert_eq!(all.models.all[&name("a")].renewal.promise, None);
    assert_eq!(all.models.all[&name("a")].admitted.promised.gpus, [20 * GIB], "it is tried again");
}
