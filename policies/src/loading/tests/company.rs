//! Companions: models that are loaded together.

use super::*;

fn with(gib: u64, others: &[&str]) -> LoadSpec {
    LoadSpec { companions: others.iter().map(ModelName::new).collect(), ..model(gib) }
}

/// Loads a model, then its companions.
fn load_with(all: &mut LoadingState, of: &str, company: &[&str]) {
    all.models.enqueue(&name(of), true);
    let mut told = vec![format!("+{of}")];
    told.extend(company.iter().map(|one| format!("!{one}")));
    assert_eq!(orders(all, 0, &[]), told);
    for one in company {
        all.models.enqueue(&name(one), false);
        assert_eq!(orders(all, 1, &[]), [format!("+{one}")]);
    }
    for one in company.iter().chain([&of]) {
        all.record_loaded(&name(one), secs(10));
    }
}

#[test]
fn who_stays_together_is_loaded_together_and_leaves_together() {
    let models = [("a", with(10, &["b"])), ("b", model(4)), ("c", model(8)), ("d", model(12))];
    let mut all = loading(&[24], &models);
    load_with(&mut all, "a", &["b"]);
    assert_eq!(all.models.held_companions(|_| ModelActivity::default()), [name("b")]);
    all.models.enqueue(&name("c"), true);
    assert_eq!(orders(&mut all, 200, &[]), ["+c"]);
    all.record_loaded(&name("c"), secs(210));
    // 12 of 24 GiB: unloading b and c would suffice, but b stays with a.
    all.models.enqueue(&name("d"), true);
    assert_eq!(orders(&mut all, 400, &[]), ["-a"], "b has room");
    all.record_gone(&name("a"));
    assert_eq!(orders(&mut all, 401, &[]), ["+d"]);
    assert_eq!(
        all.models.held_companions(|_| ModelActivity::default()),
        [],
        "nobody is there whom it came with"
    );
}

#[test]
fn a_model_waits_until_there_is_room_for_its_company_too_and_that_room_is_nobody_elses() {
    let models = [("a", with(10, &["b"])), ("b", model(6)), ("c", model(6)), ("x", model(10))];
    let mut all = loading(&[24], &models);
    load(&mut all, &["x"]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-x"], "a alone would fit");
    all.models.enqueue(&name("c"), true);
    assert_eq!(orders(&mut all, 101, &[]), ["+c"], "8 of 24 are left by both");
    all.record_gone(&name("x"));
    assert_eq!(orders(&mut all, 102, &[]), ["+a", "!b"]);
    all.models.enqueue(&name("x"), true);
    assert_eq!(orders(&mut all, 103, &[]), [""; 0], "the rest is b's, which has not asked yet");
    all.models.enqueue(&name("b"), false);
    assert_eq!(orders(&mut all, 104, &[]), ["+b"]);
}

#[test]
fn company_that_never_fits_or_does_not_answer_keeps_nobody_waiting() {
    // The model and its companion together exceed the memory.
    let mut all = loading(&[24], &[("a", with(20, &["b"])), ("b", model(10)), ("c", model(4))]);
    load_with(&mut all, "a", &[]);
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-a"], "somebody asks for b itself");
    all.record_gone(&name("a"));
    assert_eq!(orders(&mut all, 101, &[]), ["+b"]);

    // A pinned model, next to another one that leaves no room for its companion.
    let pinned = LoadSpec { pin: true, ..model(10) };
    let mut all = loading(&[24], &[("p", pinned), ("a", with(10, &["b"])), ("b", model(10))]);
    load(&mut all, &["p"]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+a"]);

    // A called companion is loaded and ends.
    let mut all = loading(&[24], &[("a", with(10, &["b"])), ("b", model(10)), ("c", model(12))]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 0, &[]), ["+a", "!b"]);
    all.record_loaded(&name("a"), secs(1));
    all.models.enqueue(&name("c"), true);
    let busy = [("a", IN_USE)];
    assert_eq!(orders(&mut all, 2, &busy), [""; 0], "a has its turn, and b its room");
    assert_eq!(orders(&mut all, 5, &busy), ["+c"], "b does not come");
}

#[test]
fn company_may_be_mutual_has_company_and_excludes_whom_it_excludes() {
    let models = [("a", with(4, &["b"])), ("b", with(4, &["c", "a"])), ("c", model(4)), ("d", model(14))];
    let mut all = loading(&[24], &models);
    load_with(&mut all, "b", &["a", "c"]);
    all.models.enqueue(&name("d"), true);
    let told = orders(&mut all, 100, &[]);
    assert_eq!(told, ["-a", "-b"], "c alone is not enough, and neither stays without the other");

    let alone = LoadSpec { never_with: vec![ModelName::new("b")], ..with(4, &["b"]) };
    let mut all = loading(&[24], &[("a", alone), ("b", model(4))]);
    load_with(&mut all, "a", &[]);
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-a"]);
}

#[test]
fn company_is_a_wish_and_keeps_nobody_from_being_served() {
    // `a`, which would call `b`, holds more than predicted.
    let mut all =
        loading(&[24], &[("a", with(10, &["b"])), ("b", model(10)), ("w", model(4)), ("v", model(4))]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 0, &[]), ["+a", "!b"]);
    all.record_loaded(&name("a"), secs(1));
    all.record_gone(&name("b"));
    let held = MemoryAmounts { host: 0, gpus: vec![16 * GIB] };
    all.record_reading(&name("a"), ModelReading { held, ..ModelReading::default() });
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["-a"], "b is asked for, and nobody else has its room");

    // A pinned model holds its companion, whose room is unavailable; a smaller model is served.
    let pinned = LoadSpec { pin: true, ..with(10, &["b"]) };
    let mut all =
        loading(&[24], &[("a", pinned), ("b", model(8)), ("y", model(5)), ("w", model(10)), ("x", model(5))]);
    load_with(&mut all, "a", &["b"]);
    all.models.enqueue(&name("y"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+y"]);
    all.record_loaded(&name("y"), secs(101));
    all.models.enqueue(&name("w"), true);
    all.models.enqueue(&name("x"), true);
    assert_eq!(orders(&mut all, 200, &[]), ["-y"], "for x");
    assert_eq!(all.hopeless_models().iter().map(|(who, _)| who.clone()).collect::<Vec<_>>(), [name("w")]);

    // Companions cannot use memory of another program.
    let mut all = loading(
        &[24],
        &[("p", LoadSpec { pin: true, ..model(1) }), ("a", with(14, &["b"])), ("b", model(8))],
    );
    load(&mut all, &["p"]);
    all.record_reading(
        &name("p"),
        ModelReading { held: MemoryAmounts { host: 0, gpus: vec![GIB] }, ..ModelReading::default() },
    );
    all.models.enqueue(&name("a"), true);
    let idle = |_: &ModelId| ModelActivity { idle_for: secs(1000), ..ModelActivity::default() };
    assert_eq!(words(all.next_orders(secs(100), Some(&gpus(&[20])), idle)), ["+a"], "alone");
}

#[test]
fn the_room_of_company_is_kept_once_and_for_those_that_may_come() {
    // A model and its companion are requested at the same time, while a third one is loaded.
    let mut all = loading(&[24], &[("x", model(6)), ("a", with(10, &["b"])), ("b", model(6))]);
    load(&mut all, &["x"]);
    all.models.enqueue(&name("a"), true);
    all.models.enqueue(&name("b"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+a", "+b"]);

    // A companion that a pinned model excludes is not loaded, and no model is unloaded for it.
    let excludes = LoadSpec { pin: true, never_with: vec![ModelName::new("b")], ..model(4) };
    let mut all =
        loading(&[24], &[("p", excludes), ("x", model(8)), ("a", with(8, &["b"])), ("b", model(8))]);
    load(&mut all, &["p", "x"]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 200, &[]), ["+a"]);

    // A companion is called while it is being unloaded.
    let mut all = loading(&[24], &[("a", with(10, &["b"])), ("b", model(6))]);
    load_with(&mut all, "a", &["b"]);
    all.record_leaving(&name("a"));
    all.record_leaving(&name("b"));
    all.record_gone(&name("a"));
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 100, &[]), ["+a"]);
    all.record_loaded(&name("a"), secs(110));
    all.record_gone(&name("b"));
    assert!(all.models.has_waiters(), "b is to come");
    assert_eq!(orders(&mut all, 111, &[]), ["!b"]);
    all.models.enqueue(&name("b"), false);
    assert_eq!(orders(&mut all, 112, &[]), ["+b"]);
}

#[test]
fn company_that_is_there_stays_for_the_one_that_comes_to_it() {
    let mut all = loading(&[24], &[("a", with(10, &["b"])), ("b", model(4)), ("c", model(12))]);
    load(&mut all, &["b", "c"]);
    all.models.enqueue(&name("a"), true);
    assert_eq!(orders(&mut all, 500, &[]), ["-c"], "b is worth less, and would have to come again");
    all.record_gone(&name("c"));
    assert_eq!(orders(&mut all, 501, &[]), ["+a"]);
}
