//! Several models on one machine: permits, shared budgets, memory that does not come back.

use warden_policies::recycle::{GrowthMode, RecycleHindrance};
use warden_policies::{GpuIndex, MemoryKind, MemoryLimit, Reason, RecycleAction};

use super::script::{Actor, Role};
use super::*;
use crate::ReplacementMode;

const GIB: u64 = 1 << 30;

/// Models `a` and `b`, one process each, both on one GPU of 80 GiB.
async fn two(change: impl Fn(&mut ModelSpec), fleet: impl FnOnce(&mut FleetConfig)) -> Rig {
    let rig = Rig::new(|config, script| {
        config.models = vec![spec("a"), spec("b")];
        config.models.iter_mut().for_each(|spec| change(spec));
        fleet(config);
        script.set_gpus(&[80 * GIB]);
        script.all((0..8).map(|_| Role { vram: Some(3 * GIB), ..Role::default() }));
    })
    .await;
    for name in ["a", "b"] {
        drop(lease(&rig, name).await);
        pass(secs(6)).await;
    }
    rig
}

async fn lease(rig: &Rig, name: &str) -> Lease {
    rig.fleet.lease(&ModelName::new(name), LeaseKind::Slot).await.unwrap()
}

fn first_of(rig: &Rig, index: usize) -> std::sync::Arc<Actor> {
    std::sync::Arc::clone(&rig.script.children()[index])
}

fn replaced(rig: &Rig) -> Vec<(String, Reason)> {
    rig.ledger().iter().map(|entry| (entry.model.to_string(), entry.reason)).collect()
}

#[tokio::test(start_paused = true)]
async fn two_models_on_one_gpu_are_never_recycled_at_once() {
    let rig = two(|model| model.recycle.vram_hard = mib(10 * 1024), |_| {}).await;
    let (of_a, of_b) = (lease(&rig, "a").await, lease(&rig, "b").await);
    for index in [0, 1] {
        // The process exceeds the budget only slightly, so that no drain is cut short.
        first_of(&rig, index).set_vram(10 * GIB + GIB / 5);
    }
    pass(secs(60)).await;
    assert_eq!(rig.count("draining"), 1, "{:?}", rig.kinds());
    let view = rig.fleet.view();
    let waits = |model: &crate::ModelView| {
        model.backends[0]
            .next
            .as_ref()
            .is_some_and(|next| next.decision.why_not == Some(RecycleHindrance::InTurn))
    };
    assert_eq!(view.models.iter().filter(|model| waits(model)).count(), 1);
    drop((of_a, of_b));
    pass(secs(30)).await;
    let mut names: Vec<String> = replaced(&rig).into_iter().map(|(name, _)| name).collect();
    names.sort();
    assert_eq!(names, ["a", "b"]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_for_its_turn_far_over_its_budget_is_not_ended_but_drained_when_it_comes() {
    let rig = two(|model| model.recycle.vram_hard = mib(10 * 1024), |_| {}).await;
    let (of_a, of_b) = (lease(&rig, "a").await, lease(&rig, "b").await);
    first_of(&rig, 0).set_vram(10 * GIB + GIB / 5);
    pass(secs(6)).await;
    first_of(&rig, 1).set_vram(12 * GIB);
    pass(secs(60)).await;
    assert_eq!(rig.count("draining"), 1, "one at a time: {:?}", rig.kinds());
    drop(of_a);
    let cut = tokio::time::timeout(secs(8), of_b.until_revoked()).await;
    assert!(cut.is_err() && rig.count("draining") == 2, "its answers get their time: {:?}", rig.kinds());
    let cut = tokio::time::timeout(secs(200), of_b.until_revoked()).await;
    assert!(cut.is_err(), "the device has 58 GiB left: {:?}", rig.kinds());
    drop(of_b);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_drain_is_not_cut_short_over_memory_that_no_restart_brings_back() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.vram_hard = mib(10 * 1024);
        config.models[0].recycle.common.max_futile = 1;
        script.set_gpus(&[80 * GIB]);
        let big = Role { vram: Some(12 * GIB), ..Role::default() };
        script.all([Role { vram: Some(3 * GIB), ..Role::default() }, big]);
    })
    .await;
    drop(rig.lease().await.unwrap());
    pass(secs(6)).await;
    rig.script.last().set_vram(12 * GIB);
    pass(secs(60)).await;
    assert_eq!((rig.ledger()[0].helped, rig.count("policy_off")), (Some(false), 1), "{:?}", rig.kinds());
    let busy = rig.lease().await.unwrap();
    pass(secs(30)).await;
    let fleet = rig.fleet.clone();
    let drained = begun(async move { fleet.drain("m").await }).await;
    let cut = tokio::time::timeout(secs(200), busy.until_revoked()).await;
    assert!(cut.is_err(), "it has until the drain's deadline: {:?}", rig.kinds());
    drop(busy);
    drained.await.unwrap().unwrap();
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn whoever_an_operator_restarts_out_of_turn_is_waited_for_all_the_same() {
    let rig = Rig::new(|config, script| {
        config.models = vec![spec("a"), spec("b"), spec("c")];
        for model in &mut config.models {
            model.recycle.vram_hard = mib(10 * 1024);
        }
        script.set_gpus(&[80 * GIB]);
        script.all((0..8).map(|_| Role { vram: Some(3 * GIB), ..Role::default() }));
    })
    .await;
    let mut leases = Vec::new();
    for name in ["a", "b", "c"] {
        leases.push(lease(&rig, name).await);
        pass(secs(6)).await;
    }
    first_of(&rig, 0).set_vram(10 * GIB + GIB / 5);
    pass(secs(6)).await;
    let fleet = rig.fleet.clone();
    let restarted = begun(async move { fleet.restart("b").await }).await;
    pass(secs(1)).await;
    assert_eq!(rig.count("draining"), 2, "operators do not wait: {:?}", rig.kinds());
    first_of(&rig, 2).set_vram(10 * GIB + GIB / 5);
    // The first permit becomes free, and the operator's restart continues.
    drop(leases.remove(0));
    pass(secs(30)).await;
    assert_eq!(rig.count("draining"), 2, "{:?}", rig.kinds());
    drop(leases.remove(0));
    restarted.await.unwrap().unwrap();
    pass(secs(10)).await;
    assert_eq!(rig.count("draining"), 3, "{:?}", rig.kinds());
    drop(leases);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_replica_that_serves_is_not_recycled_while_the_other_one_comes_back_from_a_crash() {
    let rig = Rig::new(|config, script| {
        config.models[0].run.replicas = 2;
        config.models[0].run.preload = true;
        config.models[0].recycle.vram_hard = mib(10 * 1024);
        script.set_gpus(&[80 * GIB]);
        let role = Role { vram: Some(3 * GIB), ..Role::default() };
        script.all([role.clone(), role.clone()]);
        // The process after the crash loads for a minute.
        script.all([Role { ready_after: secs(60), ..role.clone() }, role]);
    })
    .await;
    pass(secs(10)).await;
    first_of(&rig, 0).crash();
    pass(secs(3)).await;
    first_of(&rig, 1).set_vram(10 * GIB + GIB / 5);
    pass(secs(45)).await;
    assert_eq!((rig.script.children().len(), rig.count("draining")), (3, 0), "{:?}", rig.kinds());
    let why = |view: &crate::BackendView| view.next.as_ref().and_then(|next| next.decision.why_not);
    let view = rig.fleet.view();
    assert!(view.models[0].backends.iter().any(|view| why(view) == Some(RecycleHindrance::InTurn)));
    pass(secs(30)).await;
    assert_eq!(rig.ledger()[0].reason, Reason::VramHard, "{:?}", rig.kinds());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_replacement_that_fails_lets_the_next_one_go() {
    let rig = two(
        |model| {
            model.recycle.vram_hard = mib(10 * 1024);
        },
        |_| {},
    )
    .await;
    rig.script.clear();
    let odd = || Role::failing(crate::process::group::ProcessExit::Code(1), "something odd");
    rig.script.all([odd(), odd()]);
    rig.script.next(Role { vram: Some(3 * GIB), ..Role::default() });
    for index in [0, 1] {
        first_of(&rig, index).set_vram(12 * GIB);
    }
    pass(secs(60)).await;
    let entries = rig.ledger();
    let by_budget = entries.iter().filter(|entry| entry.reason == Reason::VramHard);
    let failed: Vec<bool> = by_budget.map(|entry| entry.failed.is_some()).collect();
    assert_eq!(failed, [true, false], "{entries:#?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn of_two_over_a_shared_budget_the_one_that_gains_most_gives_way() {
    let rig = two(|_| {}, |config| config.shared.vram_soft = Some(MemoryLimit::Percent(25.0))).await;
    first_of(&rig, 0).set_vram(5 * GIB);
    first_of(&rig, 1).set_vram(16 * GIB);
    pass(secs(30)).await;
    assert_eq!(replaced(&rig), [("b".to_owned(), Reason::SharedVram)]);
    let entry = &rig.ledger()[0];
    assert_eq!((entry.evidence.budget_bytes, entry.helped), (Some(20 * GIB), Some(true)));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn memory_that_does_not_come_back_is_told_as_the_drivers_and_not_answered_with_restarts() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.common.growth = GrowthMode::Recycle;
        config.models[0].recycle.vram_hard = mib(10 * 1024);
        config.models[0].recycle.max_age = Some(secs(1000));
        script.set_gpus(&[80 * GIB]);
        script.all((0..8).map(|_| Role { vram: Some(3 * GIB), ..Role::default() }));
    })
    .await;
    drop(rig.lease().await.unwrap());
    for lost in 1..=2 {
        pass(secs(900)).await;
        // The memory stays in use after the process has ended.
        rig.script.lose(lost * 2 * GIB);
        pass(secs(130)).await;
        assert_eq!(rig.count("driver_leak"), usize::from(lost == 2), "{:?}", rig.kinds());
    }
    let entry = &rig.ledger()[1];
    let exit = entry.vram_after_exit[0];
    assert_eq!(exit.free_before_spawn - exit.free_after_exit, 2 * GIB);
    pass(secs(10)).await;
    assert!(rig.fleet.view().devices[0].leak.as_ref().unwrap().contains("did not come back"));
    rig.script.last().set_vram(10 * GIB + GIB / 5);
    pass(secs(600)).await;
    assert_eq!(rig.script.children().len(), 3, "no restart by policy: {:?}", rig.kinds());
    let next = rig.fleet.view().models[0].policy.clone().unwrap();
    assert_eq!(
        (next.decision.action, next.decision.series),
        (RecycleAction::DrainNow, Some(MemoryKind::Vram(GpuIndex(0))))
    );
    assert!(next.held.is_some(), "{next:?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn auto_overlaps_on_a_gpu_that_holds_two_and_not_where_that_is_unknown() {
    for (size, hidden, mode) in [
        (80, false, ReplacementMode::Overlap),
        (7, false, ReplacementMode::Sequential),
        (80, true, ReplacementMode::Sequential),
    ] {
        let rig = Rig::new(|config, script| {
            config.models[0].run.replace = ReplaceMode::Auto;
            script.set_available(100 * GIB);
            script.set_gpus(&[size * GIB]);
            script.all((0..2).map(|_| Role { vram: Some(3 * GIB), ..Role::default() }));
            if hidden {
                script.hide_vram("the VRAM policy is off because nobody tells");
            }
        })
        .await;
        drop(rig.lease().await.unwrap());
        pass(secs(1)).await;
        let entry = rig.fleet.restart("m").await.unwrap().remove(0);
        let note = entry.evidence.note.unwrap();
        assert_eq!(entry.mode, mode, "{note}");
        assert!(note.contains(if hidden { "nobody tells" } else { "on GPU 0" }), "{note}");
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn each_task_gives_a_word_when_it_is_asked_and_nothing_changes_by_that() {
    let rig = two(|_| {}, |_| {}).await;
    let number = rig.fleet.view().number;
    let asked = rig.fleet.check_tasks();
    let names: Vec<&str> = asked.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    for (name, answer) in asked {
        assert!(answer.await.is_ok(), "{name}");
    }
    assert_eq!(rig.fleet.view().number, number, "no new picture is published");
    rig.fleet.shutdown(Duration::ZERO).await;
    for (name, answer) in rig.fleet.check_tasks() {
        assert!(answer.await.is_err(), "the task of {name} has ended");
    }
}
