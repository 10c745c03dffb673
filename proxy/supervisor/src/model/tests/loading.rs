//! More models than memory: loading, eviction, and no request that waits for ever.

use proptest::prelude::*;
use warden_policies::book::{MemoryNeeds, NeedPurpose};
use warden_policies::loading::LoadSpec;

use warden_policies::WorkDone;
use warden_policies::reclaim::ReclaimOutcome;

use super::script::{Gives, Role};
use super::*;
use crate::spec::FallbackSpec;
use crate::view::entry::PinView;

#[path = "roomless.rs"]
mod roomless;
#[path = "stays.rs"]
mod stays;

const GIB: u64 = 1 << 30;

/// Sets the GPU memory that a model needs and uses, in GiB.
fn needs(spec: &mut ModelSpec, gib: u64) {
    let needs = MemoryNeeds { gpu: vec![(NeedPurpose::Weights, gib * GIB)], ..MemoryNeeds::default() };
    spec.loading = LoadSpec { needs: Some(needs), replicas: 1, ..LoadSpec::default() };
}

/// Models with these names and needs, on a machine with a GPU of 24 GiB.
async fn rig(models: &[(&str, u64)]) -> Rig {
    let models: Vec<SharedSpec> = models
        .iter()
        .map(|(name, gib)| {
            let mut spec = spec(name);
            needs(&mut spec, *gib);
            spec
        })
        .collect();
    Rig::new(move |config, script| {
        script.set_gpus(&[24 * GIB]);
        config.models = models;
    })
    .await
}

impl Rig {
    async fn lease_of(&self, model: &str) -> Result<Lease, LeaseDenied> {
        self.fleet.lease(&ModelName::new(model), LeaseKind::Slot).await
    }

    async fn lease_of_later(&self, model: &str) -> AbortOnDropHandle<Result<Lease, LeaseDenied>> {
        let (fleet, model) = (self.fleet.clone(), ModelName::new(model));
        begun(async move { fleet.lease(&model, LeaseKind::Slot).await }).await
    }

    /// Sets the GPU memory of the next process in GiB.
    fn next_takes(&self, gib: u64) {
        self.script.next(Role { vram: Some(gib * GIB), ..Role::default() });
    }

    fn states(&self) -> Vec<ModelState> {
        self.fleet.view().models.iter().map(|model| model.state).collect()
    }
}

use ModelState::{Loaded, Unloaded};

#[tokio::test(start_paused = true)]
async fn models_that_fit_are_loaded_together_and_one_leaves_for_one_that_does_not() {
    let rig = rig(&[("a", 10), ("b", 10), ("c", 10)]).await;
    for model in ["a", "b"] {
        rig.next_takes(10);
        drop(rig.lease_of(model).await.unwrap());
        pass(secs(30)).await;
    }
    assert_eq!(rig.states(), [Loaded, Loaded, Unloaded]);
    drop(rig.lease_of("b").await.unwrap());
    rig.next_takes(10);
    drop(rig.lease_of("c").await.unwrap());
    assert_eq!(rig.states(), [Unloaded, Loaded, Loaded], "a was asked longest ago");
    assert_eq!((rig.count("makes_room"), rig.script.alive()), (1, 2));
    rig.next_takes(10);
    drop(rig.lease_of("a").await.unwrap());
    assert_eq!(rig.script.alive(), 2);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_answered_is_never_cut_and_those_who_come_meanwhile_are_served_afterwards() {
    let rig = rig(&[("a", 20), ("b", 20)]).await;
    rig.next_takes(20);
    let long = rig.lease_of("a").await.unwrap();
    rig.next_takes(20);
    let other = rig.lease_of_later("b").await;
    // The first model serves for its minimum time, and then drains.
    pass(secs(4)).await;
    assert_eq!((rig.count("makes_room"), rig.count("waits_for_room")), (0, 1));
    pass(secs(10)).await;
    assert_eq!(rig.count("makes_room"), 1);
    let again = rig.lease_of_later("a").await;
    pass(secs(10)).await;
    assert!(rig.script.alive() == 1 && !other.is_finished() && !again.is_finished());
    drop(long);
    let other = other.await.unwrap().unwrap();
    assert_eq!(rig.states()[1], Loaded);
    pass(secs(3)).await;
    assert!(!again.is_finished(), "now the other one has its turn");
    pass(secs(10)).await;
    rig.next_takes(20);
    drop(other);
    drop(again.await.unwrap().unwrap());
    assert_eq!(rig.script.alive(), 1);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn at_the_start_models_are_loaded_in_order_as_long_as_they_fit_and_nobody_leaves_for_nobody() {
    let rig = Rig::new(|config, script| {
        script.set_gpus(&[24 * GIB]);
        config.models = [("a", 10), ("b", 10), ("c", 10), ("d", 3)]
            .map(|(name, gib)| {
                let mut spec = spec(name);
                needs(&mut spec, gib);
                spec.run.preload = true;
                spec
            })
            .to_vec();
        for gib in [10, 10, 3] {
            script.next(Role { vram: Some(gib * GIB), ..Role::default() });
        }
    })
    .await;
    pass(secs(30)).await;
    assert_eq!(rig.states(), [Loaded, Loaded, Unloaded, Loaded]);
    assert_eq!((rig.count("makes_room"), rig.count("waits_for_room")), (0, 1));
    // A request for an unloaded model evicts another one.
    rig.next_takes(10);
    drop(rig.lease_of("c").await.unwrap());
    assert_eq!(rig.states()[2], Loaded);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_model_that_does_not_start_gives_its_room_back_and_drives_nobody_out_again() {
    let rig = rig(&[("good", 20), ("bad", 20)]).await;
    for _ in 0..50 {
        rig.script.next(Role::failing(crate::ProcessExit::Code(1), "error loading model"));
    }
    assert!(rig.lease_of("bad").await.is_err());
    let tried = rig.script.children().len();
    rig.script.clear();
    rig.next_takes(20);
    let lease = rig.lease_of("good").await.unwrap();
    assert_eq!(rig.script.alive(), 1);
    // The next starts of the bad model wait for room, for which no model is evicted.
    pass(secs(900)).await;
    assert_eq!((rig.script.children().len(), rig.count("makes_room")), (tried + 1, 0));
    // For a waiting request the other model is evicted, because the failure may have passed.
    drop(lease);
    drop(rig.lease_of("bad").await.unwrap());
    assert_eq!(rig.states(), [Unloaded, Loaded]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_found_too_little_memory_asks_for_more() {
    let rig = rig(&[("a", 9), ("b", 12)]).await;
    rig.next_takes(9);
    drop(rig.lease_of("a").await.unwrap());
    pass(secs(60)).await;
    rig.script.next(Role::failing(crate::ProcessExit::Code(1), "cudaMalloc failed: out of memory"));
    rig.next_takes(15);
    // By their declared needs 9 and 12 fit, but in fact they do not.
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!(rig.states(), [Unloaded, Loaded]);
    assert_eq!(rig.count("makes_room"), 1);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_pinned_model_stays_and_a_reload_that_takes_the_pin_lets_it_go() {
    let mut rig = rig(&[("a", 20), ("b", 20)]).await;
    rig.apply(|config| config.models[0].loading.pin = true).await;
    rig.next_takes(20);
    drop(rig.lease_of("a").await.unwrap());
    rig.next_takes(20);
    let LeaseDenied::NeverLoaded(why) = rig.lease_of("b").await.unwrap_err() else { panic!("it is no room") };
    assert!(why.contains("needs") && why.contains("(`pin`: `a`) leave"), "{why}");
    assert!(rig.states()[0] == Loaded);
    rig.apply(|config| config.models[0].loading.pin = false).await;
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!(rig.states(), [Unloaded, Loaded]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_pin_by_hand_overrules_the_configuration_through_reloads_and_is_told_once() {
    let mut rig = rig(&[("a", 20), ("b", 20)]).await;
    rig.next_takes(20);
    drop(rig.lease_of("a").await.unwrap());
    for _ in 0..2 {
        let shown = rig.fleet.pin("a", true, "a test").await.unwrap();
        assert_eq!(shown, PinView { pinned: true, by: Some("a test".to_owned()) });
    }
    rig.apply(|config| config.models[0].requests.max_in_flight = Some(7)).await;
    let LeaseDenied::NeverLoaded(why) = rig.lease_of("b").await.unwrap_err() else { panic!("it is no room") };
    assert!(why.contains("(`pin`: `a`) leave"), "{why}");
    // The configuration does not matter after an operator's command.
    rig.apply(|config| config.models[0].loading.pin = true).await;
    assert!(!rig.fleet.pin("a", false, "another").await.unwrap().pinned);
    rig.next_takes(20);
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!((rig.states(), rig.count("pinned")), (vec![Unloaded, Loaded], 2));
    assert!(!rig.fleet.view().models[0].pin.pinned);
    let lines = rig.ledger_text();
    let pins: Vec<crate::PinEntry> =
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let told: Vec<_> = pins.iter().map(|pin| (pin.pinned, pin.configured, pin.by.as_str())).collect();
    assert_eq!(told, [(true, false, "a test"), (false, true, "another")]);
    assert!(rig.fleet.pin("nobody", true, "a test").await.is_err());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_model_that_is_removed_makes_room_and_comes_again_as_another_one() {
    let mut rig = rig(&[("a", 20), ("b", 20)]).await;
    rig.next_takes(20);
    let lease = rig.lease_of("a").await.unwrap();
    let models = rig.config.models.clone();
    rig.apply(|config| drop(config.models.remove(0))).await;
    // The pin is still in force when the model comes back.
    rig.apply(|config| config.models = models).await;
    rig.next_takes(20);
    let again = rig.lease_of_later("a").await;
    pass(secs(20)).await;
    assert!(!again.is_finished() && rig.script.alive() == 1);
    drop(lease);
    drop(again.await.unwrap().unwrap());
    rig.next_takes(20);
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!(rig.script.alive(), 1);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_long_answer_outlasts_the_drain_deadline_when_another_model_wants_the_room() {
    let mut rig = rig(&[("a", 20), ("b", 20)]).await;
    rig.apply(|config| config.models[0].lifecycle.drain_deadline = secs(10)).await;
    rig.next_takes(20);
    let long = rig.lease_of("a").await.unwrap();
    rig.next_takes(20);
    let other = rig.lease_of_later("b").await;
    pass(secs(120)).await;
    assert!(rig.count("makes_room") == 1 && rig.script.alive() == 1 && !other.is_finished());
    drop(long);
    drop(other.await.unwrap().unwrap());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_does_not_start_keeps_nobody_waiting() {
    let mut rig = rig(&[("a", 8), ("b", 20)]).await;
    rig.script.set_usual(Role::failing(crate::ProcessExit::Code(1), "something odd"));
    rig.apply(|config| config.models[0].run.replicas = 2).await;
    rig.next_takes(8);
    drop(rig.lease_of("a").await.unwrap());
    pass(secs(60)).await;
    rig.script.set_usual(Role { vram: Some(20 * GIB), ..Role::default() });
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!(rig.states(), [Unloaded, Loaded]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_operators_restart_makes_room_even_if_nobody_waits() {
    let rig = rig(&[("a", 20), ("b", 20)]).await;
    rig.next_takes(20);
    drop(rig.lease_of("a").await.unwrap());
    rig.next_takes(20);
    rig.fleet.restart("b").await.unwrap();
    assert_eq!(rig.states(), [Unloaded, Loaded]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_process_is_put_on_the_gpu_that_has_room_and_its_successor_too() {
    let rig = Rig::new(|config, script| {
        script.set_gpus(&[8 * GIB, 24 * GIB]);
        config.models = vec![spec("m"), spec("n")];
        needs(&mut config.models[0], 10);
        needs(&mut config.models[1], 6);
    })
    .await;
    drop(rig.lease_of("m").await.unwrap());
    drop(rig.lease_of("n").await.unwrap());
    rig.fleet.restart("m").await.unwrap();
    let only = |child: usize| {
        let env = &rig.script.children()[child].request.command.env;
        env.iter().find(|(name, _)| name == "GPUS").map(|(_, gpus)| gpus.clone())
    };
    let one = |gpu: &str| Some(gpu.to_owned());
    assert_eq!([only(0), only(1), only(2)], [one("1"), one("0"), one("1")]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn models_whose_needs_are_not_known_are_loaded_as_before() {
    let rig = Rig::new(|config, script| {
        script.set_gpus(&[24 * GIB]);
        config.models = ["a", "b", "c"].map(spec).to_vec();
    })
    .await;
    for model in ["a", "b", "c"] {
        drop(rig.lease_of(model).await.unwrap());
    }
    assert_eq!((rig.script.alive(), rig.count("makes_room")), (3, 0));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn requests_for_many_models_are_all_answered_in_little_memory() {
    let names: Vec<String> = (0..6).map(|index| format!("m{index}")).collect();
    let models: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 10)).collect();
    let rig = rig(&models).await;
    rig.script.set_usual(Role { vram: Some(10 * GIB), ..Role::default() });
    let mut waiting = Vec::new();
    for round in 0..60_usize {
        waiting.push(rig.lease_of_later(&names[round * 7 % 6]).await);
        pass(secs(1)).await;
    }
    let mut rounds = 0;
    while !waiting.is_empty() {
        let (done, rest): (Vec<_>, Vec<_>) = waiting.into_iter().partition(AbortOnDropHandle::is_finished);
        for lease in done {
            drop(lease.await.unwrap().unwrap());
        }
        assert!(rig.script.alive() <= 2);
        waiting = rest;
        rounds += 1;
        assert!(rounds < 3000, "{} still wait", waiting.len());
        pass(Duration::from_millis(100)).await;
    }
    rig.end().await;
}

/// Action on one of several models.
#[derive(Clone, Copy, Debug)]
enum Op {
    Pass(u64),
    /// Holds a lease for so many milliseconds.
    Request(usize, u64),
    /// Leaves after so many milliseconds, served or not.
    Impatient(usize, u64),
    Restart(usize),
    Drain(usize),
    /// Removes the model, and adds it again after so many milliseconds.
    Remove(usize, u64),
    Pin(usize, bool),
    Most(u32),
    /// Loads the model together with this one from now on.
    With(usize, usize),
    Command(usize, u8),
    /// Another command that needs so many GiB, with so many processes.
    Size(usize, u64, u32),
    Crash(usize),
    Fails,
    Short,
    DiesSoon,
    Slow,
}

fn op() -> impl Strategy<Value = Op> {
    let model = 0_usize..4;
    prop_oneof![
        8 => prop_oneof![0u64..20, 0u64..2000, 0u64..30_000].prop_map(Op::Pass),
        8 => (model.clone(), 0u64..6000).prop_map(|(of, ms)| Op::Request(of, ms)),
        4 => (model.clone(), 0u64..400).prop_map(|(of, ms)| Op::Impatient(of, ms)),
        3 => model.clone().prop_map(Op::Restart),
        2 => model.clone().prop_map(Op::Drain),
        2 => (model.clone(), 0u64..3000).prop_map(|(of, ms)| Op::Remove(of, ms)),
        1 => (model.clone(), any::<bool>()).prop_map(|(of, pin)| Op::Pin(of, pin)),
        1 => (0u32..3).prop_map(Op::Most),
        2 => (model.clone(), model.clone()).prop_map(|(of, other)| Op::With(of, other)),
        2 => (model.clone(), 0u8..3).prop_map(|(of, n)| Op::Command(of, n)),
        2 => (model, 1u64..26, 1u32..3).prop_map(|(of, gib, replicas)| Op::Size(of, gib, replicas)),
        2 => any::<usize>().prop_map(Op::Crash),
        2 => Just(Op::Fails),
        2 => Just(Op::Short),
        1 => Just(Op::DiesSoon),
        1 => Just(Op::Slow),
    ]
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Invariant: in the end every model is served in its turn, and never two that do not fit.
async fn storm(ops: Vec<Op>) {
    let mut rig = rig(&[("a", 14), ("b", 14), ("c", 20), ("d", 4)]).await;
    rig.apply(|config| {
        for model in &mut config.models {
            model.requests.queue.wait = secs(120);
            model.lifecycle.drain_deadline = secs(8);
            model.lifecycle.start_timeout = secs(20);
        }
        with_fallback(config, 12);
    })
    .await;
    let good = || Role { vram: Some(14 * GIB), ..Role::default() };
    rig.script.set_usual(good());
    let mut tasks = tokio::task::JoinSet::new();
    for op in ops {
        let fleet = rig.fleet.clone();
        match op {
            Op::Pass(ms) => pass(Duration::from_millis(ms)).await,
            Op::Request(of, ms) => drop(tasks.spawn(async move {
                if let Ok(lease) = fleet.lease(&ModelName::new(NAMES[of]), LeaseKind::Slot).await {
                    tokio::select! {
                        () = pass(Duration::from_millis(ms)) => {}
                        () = lease.until_revoked() => {}
                    }
                }
            })),
            Op::Impatient(of, ms) => drop(tasks.spawn(async move {
                let name = ModelName::new(NAMES[of]);
                let lease = fleet.lease(&name, LeaseKind::Slot);
                drop(tokio::time::timeout(Duration::from_millis(ms), lease).await);
            })),
            Op::Restart(of) => drop(tasks.spawn(async move { drop(fleet.restart(NAMES[of]).await) })),
            Op::Drain(of) => drop(tasks.spawn(async move { drop(fleet.drain(NAMES[of]).await) })),
            Op::Remove(of, ms) => {
                let models = rig.config.models.clone();
                rig.apply(|config| drop(config.models.remove(of))).await;
                pass(Duration::from_millis(ms)).await;
                rig.apply(|config| config.models = models).await;
            }
            Op::Pin(of, pin) => drop(rig.apply(|config| config.models[of].loading.pin = pin).await),
            Op::Most(most) => drop(rig.apply(|config| config.loading.max_loaded = most).await),
            Op::With(of, other) => {
                let with = if of == other { Vec::new() } else { vec![ModelName::new(NAMES[other])] };
                rig.apply(|config| config.models[of].loading.companions = with).await;
            }
            Op::Command(of, n) => {
                rig.apply(|config| config.models[of].command.args[1] = n.to_string()).await;
            }
            Op::Size(of, gib, replicas) => {
                rig.apply(|config| {
                    config.models[of].command.args[1] = format!("{gib} GiB");
                    needs_whole(&mut config.models[of], gib);
                    config.models[of].run.replicas = replicas;
                })
                .await;
            }
            Op::Crash(n) => {
                let children = rig.script.children();
                if !children.is_empty() {
                    children[n % children.len()].crash();
                }
            }
            Op::Fails => rig.script.next(Role::failing(crate::ProcessExit::Code(1), "something odd")),
            Op::Short => {
                rig.script.next(Role::failing(crate::ProcessExit::Code(1), "cudaMalloc: out of memory"));
            }
            Op::DiesSoon => {
                let dies = Some((Duration::from_millis(700), crate::ProcessExit::Signal(11)));
                rig.script.next(Role { dies, ..good() });
            }
            Op::Slow => rig.script.next(Role { ready_after: secs(9), ..good() }),
        }
    }
    rig.script.clear();
    rig.apply(|config| {
        config.loading.max_loaded = 0;
        for (model, gib) in config.models.iter_mut().zip([14, 14, 20, 4]) {
            (model.loading.pin, model.loading.companions) = (false, Vec::new());
            needs_whole(model, gib);
            model.run.replicas = 1;
            // Another command: failed models get a new chance.
            "calm".clone_into(&mut model.command.args[1]);
        }
    })
    .await;
    for name in [0, 3, 1, 2, 1, 0, 3, 2].map(|of| NAMES[of]) {
        let served = async {
            while rig.lease_of(name).await.is_err() {
                pass(secs(1)).await;
            }
        };
        tokio::time::timeout(secs(600), served).await.unwrap_or_else(|_| panic!("{name} is never served"));
    }
    // Requests on earlier processes have left by now.
    pass(secs(60)).await;
    assert_eq!(rig.states().iter().filter(|state| **state == Loaded).count(), 1, "{:#?}", rig.fleet.view());
    assert_eq!(rig.script.alive(), 1);
    rig.fleet.shutdown(secs(5)).await;
    rig.script.assert_all_reaped();
    let answered = async {
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    };
    tokio::time::timeout(secs(10), answered).await.expect("a caller is not answered");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_storm_over_several_models_ends_with_all_of_them_served(ops in proptest::collection::vec(op(), 1..50)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(storm(ops));
    }
}

/// True if the last process was started with the fallback arguments.
fn is_reduced(rig: &Rig) -> bool {
    rig.script.last().request.command.args.iter().any(|word| word == "--less")
}

fn with_fallback(config: &mut FleetConfig, gib: u64) {
    let less = MemoryNeeds { gpu: vec![(NeedPurpose::Weights, gib * GIB)], ..MemoryNeeds::default() };
    let spec = &mut config.models[0];
    spec.start.fallback = Some(FallbackSpec { args: vec!["--less".to_owned()], needs: Some(less) });
}

#[tokio::test(start_paused = true)]
async fn a_model_that_does_not_fit_is_started_with_its_fallback_arguments_until_it_is_unloaded() {
    let mut rig = rig(&[("a", 30), ("b", 20)]).await;
    rig.apply(|config| with_fallback(config, 12)).await;
    rig.next_takes(12);
    drop(rig.lease_of("a").await.unwrap());
    assert!(is_reduced(&rig) && rig.count("falls_back") == 1);
    // A reload without a change does not affect the model.
    let before = rig.script.children().len();
    rig.apply(|config| config.models[0].requests.queue.depth += 1).await;
    pass(secs(100)).await;
    assert_eq!((rig.script.children().len(), rig.states()[0]), (before, Loaded));
    // After its eviction, a model with smaller needs starts with the configured arguments.
    rig.next_takes(20);
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!(rig.states(), [Unloaded, Loaded]);
    pass(secs(100)).await;
    rig.apply(|config| needs_whole(&mut config.models[0], 22)).await;
    rig.next_takes(22);
    drop(rig.lease_of("a").await.unwrap());
    assert!(!is_reduced(&rig) && rig.count("falls_back") == 1);
    rig.end().await;
}

fn needs_whole(spec: &mut ModelSpec, gib: u64) {
    let needs = MemoryNeeds { gpu: vec![(NeedPurpose::Weights, gib * GIB)], ..MemoryNeeds::default() };
    spec.loading.needs = Some(needs);
}

#[tokio::test(start_paused = true)]
async fn two_starts_that_found_too_little_are_enough_for_a_fallback_and_pins_are_heeded() {
    let mut rig = rig(&[("a", 10), ("b", 18)]).await;
    rig.apply(|config| with_fallback(config, 4)).await;
    for _ in 0..2 {
        rig.script.next(Role::failing(crate::ProcessExit::Code(1), "cudaMalloc failed: out of memory"));
    }
    rig.next_takes(4);
    drop(rig.lease_of("a").await.unwrap());
    assert!(is_reduced(&rig) && rig.count("falls_back") == 1);
    // Next to a pinned model there is only room for the fallback.
    rig.apply(|config| config.models[1].loading.pin = true).await;
    rig.next_takes(18);
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!(rig.states(), [Loaded, Loaded]);
    rig.fleet.drain("a").await.unwrap();
    rig.next_takes(4);
    drop(rig.lease_of("a").await.unwrap());
    assert!(is_reduced(&rig) && rig.count("falls_back") == 2);
    // A changed command replaces the process with the fallback arguments, too.
    let before = rig.script.children().len();
    rig.next_takes(4);
    rig.apply(|config| config.models[0].command.args.push("--other".to_owned())).await;
    pass(secs(100)).await;
    assert!(rig.script.children().len() > before);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_fallback_after_failed_starts_requests_less_room() {
    let mut rig = rig(&[("a", 10), ("b", 18)]).await;
    rig.apply(|config| with_fallback(config, 4)).await;
    for _ in 0..2 {
        rig.script.next(Role::failing(crate::ProcessExit::Code(1), "cudaMalloc failed: out of memory"));
    }
    rig.script.next(Role { vram: Some(4 * GIB), ready_after: secs(200), ..Role::default() });
    let first = rig.lease_of_later("a").await;
    pass(secs(60)).await;
    assert!(is_reduced(&rig) && !first.is_finished(), "the process with the fallback still loads");
    rig.next_takes(18);
    let second = rig.lease_of_later("b").await;
    pass(secs(60)).await;
    assert!(second.is_finished() && !first.is_finished(), "the other model waits for room that nobody needs");
    drop(second.await.unwrap().unwrap());
    pass(secs(200)).await;
    drop(first.await.unwrap().unwrap());
    assert_eq!((rig.states(), rig.count("makes_room")), (vec![Loaded, Loaded], 0));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_model_with_a_fallback_is_loaded_at_the_start_and_a_restart_in_vain_is_answered() {
    let mut rig = rig(&[("a", 30), ("b", 20)]).await;
    rig.next_takes(12);
    rig.apply(|config| {
        with_fallback(config, 12);
        config.models[0].run.preload = true;
        config.models[0].loading.pin = true;
    })
    .await;
    pass(secs(10)).await;
    assert!(is_reduced(&rig) && rig.states() == [Loaded, Unloaded], "nobody has asked for it");
    let refused = rig.fleet.restart("b").await.unwrap_err().to_string();
    assert!(refused.contains("are never unloaded (`pin`: `a`) leave"), "{refused}");
    assert!(
        rig.fleet.refuses_requests(&ModelName::new("b")) && !rig.fleet.refuses_requests(&ModelName::new("a"))
    );
    assert!(rig.fleet.has_room(&ModelName::new("a")) && !rig.fleet.has_room(&ModelName::new("b")));
    // After it is unloaded there is room for the other model.
    rig.fleet.drain("a").await.unwrap();
    rig.next_takes(20);
    drop(rig.lease_of("b").await.unwrap());
    assert_eq!(rig.states(), [Unloaded, Loaded]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_excluded_does_not_fall_back_and_is_whole_when_it_may_come() {
    let mut rig = rig(&[("a", 10), ("b", 10)]).await;
    rig.apply(|config| {
        with_fallback(config, 4);
        config.models[1].loading.pin = true;
        config.models[0].loading.never_with = vec![ModelName::new("b")];
    })
    .await;
    rig.next_takes(10);
    drop(rig.lease_of("b").await.unwrap());
    let refused = rig.lease_of("a").await.unwrap_err();
    assert!(matches!(&refused, LeaseDenied::NeverLoaded(why) if why.contains("exclude it")), "{refused:?}");
    rig.fleet.drain("b").await.unwrap();
    rig.next_takes(10);
    drop(rig.lease_of("a").await.unwrap());
    assert!(!is_reduced(&rig) && rig.count("falls_back") == 0);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn who_hoards_gives_back_for_another_model_and_nobody_leaves() {
    for gives in [10 * GIB, 13 * GIB] {
        let rig = rig(&[("m", 10), ("b", 8), ("c", 5)]).await;
        rig.next_takes(10);
        drop(rig.lease().await.unwrap());
        let hoards = rig.script.last();
        hoards.set_gives(Some(Gives {
            takes: secs(1),
            outcome: ReclaimOutcome::Done,
            anon: 100 * MIB,
            vram: Some(gives),
        }));
        rig.next_takes(8);
        drop(rig.lease_of("b").await.unwrap());
        for _ in 0..300 {
            let lease = rig.lease().await.unwrap();
            pass(Duration::from_millis(200)).await;
            lease.add_work(WorkDone {
                requests: 1,
                prompt_tokens: 300,
                output_tokens: 64,
                images: 1,
                audio: 0,
            });
            hoards.vram.fetch_add(10 * MIB, std::sync::atomic::Ordering::SeqCst);
            drop(lease);
            pass(Duration::from_millis(300)).await;
        }
        pass(secs(30)).await;
        rig.next_takes(5);
        drop(rig.lease_of("c").await.unwrap());
        let is_enough = gives < 13 * GIB;
        assert_eq!(
            (rig.count("reclaimed"), rig.count("makes_room")),
            (1, usize::from(!is_enough)),
            "{:?}",
            rig.states()
        );
        // Otherwise the model with the fewest requests is evicted.
        assert_eq!(rig.states(), [Loaded, if is_enough { Loaded } else { Unloaded }, Loaded]);
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_model_comes_with_another_one_and_stays_while_that_is_there() {
    let rig = Rig::new(|config, script| {
        script.set_gpus(&[24 * GIB]);
        config.models = [("a", 10), ("b", 4), ("c", 12)]
            .map(|(name, gib)| {
                let mut spec = spec(name);
                needs(&mut spec, gib);
                spec
            })
            .into();
        config.models[0].loading.companions = vec![ModelName::new("b")];
        config.models[1].ttl = Some(secs(20));
    })
    .await;
    rig.next_takes(10);
    rig.next_takes(4);
    drop(rig.lease_of("a").await.unwrap());
    pass(secs(60)).await;
    assert_eq!(rig.states(), [Loaded, Loaded, Unloaded], "nobody asks for b, and its time is over");
    rig.next_takes(12);
    drop(rig.lease_of("c").await.unwrap());
    assert_eq!(rig.states()[0], Unloaded, "b alone was not enough");
    pass(secs(30)).await;
    assert_eq!(rig.states(), [Unloaded, Unloaded, Loaded], "b is alone, and its time is over");
    rig.next_takes(10);
    rig.next_takes(4);
    drop(rig.lease_of("a").await.unwrap());
    pass(secs(10)).await;
    assert_eq!(rig.states(), [Loaded, Loaded, Unloaded], "room was made for both");
    rig.end().await;
}
