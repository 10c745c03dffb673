//! Guests give way to any other model.

use super::*;

#[test]
fn a_guest_comes_only_where_there_is_room_and_leaves_before_anybody_else() {
    let guest = |gib| LoadSpec { guest: true, ..model(gib) };
    let mut all = loading(&[24], &[("a", model(10)), ("g", guest(10)), ("b", model(10)), ("c", model(14))]);
    load(&mut all, &["a", "g"]);
    // The guest is unloaded while in use, even for a model without waiting requests.
    all.models.enqueue(&name("b"), false);
    assert_eq!(orders(&mut all, 200, &[("g", IN_USE)]), ["-g"]);
    all.record_gone(&name("g"));
    assert_eq!(orders(&mut all, 201, &[]), ["+b"]);
    all.record_loaded(&name("b"), secs(210));
    // No model is unloaded for a guest, and no model waits behind one.
    all.models.enqueue(&name("g"), true);
    let waits = ModelActivity { waiting: 3, ..IN_USE };
    assert_eq!(orders(&mut all, 1000, &[("g", waits)]), [""; 0]);
    all.record_leaving(&name("b"));
    assert_eq!(orders(&mut all, 1001, &[("g", waits)]), [""; 0], "nothing is kept for it");
    all.record_gone(&name("b"));
    all.models.enqueue(&name("c"), true);
    assert_eq!(orders(&mut all, 1002, &[("g", waits)]), ["+c"], "it came later, and is served first");
}

fn look(all: &mut LoadingState, ms: u64, gib: u64) -> Vec<String> {
    let idle = |_: &ModelId| ModelActivity { idle_for: secs(1000), waiting: 1, ..ModelActivity::default() };
    words(all.next_orders(secs(500) + Duration::from_millis(ms), Some(&gpus(&[gib])), idle))
}

fn held(gib: u64) -> ModelReading {
    ModelReading { held: MemoryAmounts { host: 0, ..gpus(&[gib]) }, ..ModelReading::default() }
}

/// Of 24 GiB, `a` and `g` hold 8 each, and `b` needs 12.
fn two_of_three(guest: bool) -> LoadingState {
    let second = LoadSpec { guest, ..model(8) };
    let mut all = loading(&[24], &[("a", model(8)), ("g", second), ("b", model(12))]);
    load(&mut all, &["a", "g"]);
    for of in ["a", "g"] {
        all.record_reading(&name(of), held(8));
    }
    all
}

#[test]
fn nobody_leaves_for_what_the_driver_gives_back_a_moment_later() {
    let mut all = two_of_three(true);
    all.models.enqueue(&name("b"), true);
    assert_eq!(look(&mut all, 0, 8), ["-g"]);
    all.record_gone(&name("g"));
    // The process has ended, but its memory is not free yet.
    for ms in [3, 40, 200] {
        assert_eq!(look(&mut all, ms, 8), [""; 0], "after {ms} ms");
        let roomy = all.models_with_room(Some(&gpus(&[8])));
        assert!(!roomy.contains(&name("b")), "it is not there: {roomy:?}");
    }
    assert_eq!(look(&mut all, 220, 16), ["+b"]);
}

#[test]
fn what_does_not_come_back_in_time_is_somebody_elses() {
    let mut all = two_of_three(false);
    all.record_leaving(&name("g"));
    all.models.enqueue(&name("b"), true);
    assert_eq!(look(&mut all, 0, 8), [""; 0]);
    all.record_gone(&name("g"));
    assert_eq!(look(&mut all, 3, 8), [""; 0]);
    assert_eq!(look(&mut all, 400, 8), ["-a"]);
    // Memory of a process that ended long after the last reading is not awaited.
    let mut all = two_of_three(false);
    assert_eq!(look(&mut all, 0, 8), [""; 0]);
    all.record_leaving(&name("g"));
    all.record_gone(&name("g"));
    all.models.enqueue(&name("b"), true);
    assert_eq!(look(&mut all, 60_000, 8), ["-a"]);
}

#[test]
fn a_guest_that_is_only_coming_gives_back_what_it_has_taken_so_far() {
    let guest = LoadSpec { guest: true, ..model(8) };
    let mut all = loading(&[24], &[("a", model(8)), ("g", guest), ("b", model(12))]);
    load(&mut all, &["a"]);
    all.record_reading(&name("a"), held(8));
    all.models.enqueue(&name("g"), true);
    assert_eq!(look(&mut all, 0, 16), ["+g"]);
    // The guest has taken 7 of its 8 GiB.
    assert_eq!(look(&mut all, 20, 9), [""; 0]);
    all.models.enqueue(&name("b"), true);
    assert_eq!(look(&mut all, 40, 9), ["-g"]);
    all.record_gone(&name("g"));
    assert_eq!(look(&mut all, 60, 9), [""; 0]);
    assert_eq!(look(&mut all, 80, 16), ["+b"]);
}

#[test]
fn where_a_guest_is_not_enough_it_leaves_along_with_whom_it_takes_and_counts_as_room() {
    let guest = LoadSpec { guest: true, ..model(8) };
    let mut all = loading(&[24], &[("a", model(14)), ("g", guest), ("b", model(20)), ("c", model(10))]);
    load(&mut all, &["a", "g"]);
    let roomy = all.models_with_room(None);
    assert!(roomy.contains(&name("c")), "a guest leaves for it: {roomy:?}");
    assert!(!roomy.contains(&name("b")), "somebody else would have to leave, too: {roomy:?}");
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 500, &[]), ["-a", "-g"], "either alone leaves too little");
}

#[test]
fn a_guest_leaves_for_other_settings_of_another_one() {
    let guest = LoadSpec { guest: true, ..model(8) };
    let mut all = loading(&[24], &[("a", model(10)), ("g", guest)]);
    load(&mut all, &["a", "g"]);
    all.models.set_spec(&name("a"), model(20));
    all.models.request_renewal(&name("a"), secs(300));
    assert_eq!(orders(&mut all, 300, &[]), ["-g"], "it waits until the guest has left");
    all.record_gone(&name("g"));
    assert_eq!(orders(&mut all, 301, &[]), ["=a"]);
}
