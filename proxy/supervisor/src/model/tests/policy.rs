//! Samples, budgets, cooldown, replacement mode.

use warden_policies::{Reason, RecycleAction, WorkDone};

use super::script::Role;
use super::*;
use crate::ReplacementMode;
use crate::process::group::ProcessExit;

fn big() -> u64 {
    600 * MIB
}

#[tokio::test(start_paused = true)]
async fn past_the_soft_budget_a_backend_is_replaced_at_the_first_quiet_moment() {
    let rig = Rig::new(|config, _| config.models[0].recycle.host_soft = mib(500)).await;
    let busy = rig.lease().await.unwrap();
    rig.script.last().set_anon(big());
    pass(secs(60)).await;
    assert_eq!((rig.count("recycle_wanted"), rig.count("recycle_began")), (1, 0));
    let policy = rig.fleet.view().models[0].policy.clone().unwrap();
    assert_eq!(
        (policy.decision.action, policy.decision.due, policy.held),
        (RecycleAction::RecycleWhenQuiet, false, None)
    );
    drop(busy);
    pass(Duration::from_millis(1900)).await;
    drop(rig.lease().await.unwrap());
    pass(Duration::from_millis(1900)).await;
    assert_eq!(rig.count("recycle_began"), 0, "not quiet yet");
    pass(Duration::from_millis(200)).await;
    assert_eq!(rig.count("recycle_began"), 1);
    pass(secs(1)).await;
    let entry = &rig.ledger()[0];
    assert_eq!((entry.reason, entry.helped), (Reason::HostSoft, Some(true)));
    let evidence = (entry.evidence.host_bytes, entry.evidence.budget_bytes);
    assert_eq!(evidence, (Some(big()), Some(500 * MIB)));
    assert_eq!((entry.host_before.unwrap().anon, entry.host_after.unwrap().anon), (big(), 100 * MIB));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_is_never_quiet_is_replaced_within_the_bound() {
    let rig = Rig::new(|config, _| {
        config.models[0].recycle.host_soft = mib(500);
        config.models[0].recycle.common.quiet_within = secs(100);
    })
    .await;
    let busy = rig.lease().await.unwrap();
    rig.script.last().set_anon(big());
    pass(secs(104)).await;
    assert_eq!(rig.count("recycle_began"), 0);
    pass(secs(2)).await;
    assert_eq!(rig.count("recycle_began"), 1);
    drop(busy);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn past_the_hard_budget_a_backend_drains_now() {
    let rig = Rig::new(|config, _| config.models[0].recycle.host_hard = mib(500)).await;
    let busy = rig.lease().await.unwrap();
    rig.script.last().set_anon(big());
    pass(secs(6)).await;
    assert_eq!(rig.state(), ModelState::Draining);
    drop(busy);
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(2));
    pass(secs(1)).await;
    assert_eq!(rig.ledger()[0].reason, Reason::HostHard);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn memory_is_read_a_moment_after_the_last_request_and_not_only_at_the_tick() {
    let rig = Rig::new(|config, _| config.watch.sensors.interval = secs(3600)).await;
    let lease = rig.lease().await.unwrap();
    rig.script.last().set_anon(big());
    pass(secs(60)).await;
    let host = |rig: &Rig| rig.fleet.view().models[0].backends[0].host.unwrap().anon;
    assert_eq!(host(&rig), 100 * MIB);
    drop(lease);
    pass(Duration::from_millis(249)).await;
    assert_eq!(host(&rig), 100 * MIB);
    pass(Duration::from_millis(2)).await;
    assert_eq!(host(&rig), big());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_second_recycle_waits_its_interval_and_the_reason_is_shown_once() {
    let rig = Rig::new(|config, _| config.models[0].recycle.host_hard = mib(500)).await;
    drop(rig.lease().await.unwrap());
    for _ in 0..2 {
        rig.script.last().set_anon(big());
        pass(secs(20)).await;
    }
    assert_eq!((rig.count("recycle_done"), rig.count("recycle_held")), (1, 1));
    pass(secs(60)).await;
    assert_eq!((rig.count("recycle_done"), rig.count("recycle_held")), (2, 1));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_fresh_process_over_its_budget_is_not_replaced_and_the_figures_are_said_at_once() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.host_hard = mib(500);
        script.next(Role { anon: big(), ..Role::default() });
    })
    .await;
    drop(rig.lease().await.unwrap());
    pass(secs(1)).await;
    assert_eq!(rig.count("policy_off"), 1, "{:?}", rig.kinds());
    pass(secs(3600)).await;
    assert_eq!((rig.script.children().len(), rig.count("policy_off"), rig.ledger().len()), (1, 1, 0));
    let policy = rig.fleet.view().models[0].policy.clone().unwrap();
    let held = policy.held.unwrap().to_string();
    assert!(held.contains("below what this model needs") && held.contains("750.0 MiB"), "{held}");
    assert!(rig.lease().await.is_ok(), "it serves on");
    rig.fleet.restart("m").await.unwrap();
    rig.script.last().set_anon(big());
    pass(secs(300)).await;
    assert_eq!(rig.ledger().last().unwrap().reason, Reason::HostHard);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_budget_below_the_working_set_replaces_twice_and_then_says_so() {
    let rig = Rig::new(|config, _| config.models[0].recycle.host_hard = mib(500)).await;
    for _ in 0..20 {
        drop(rig.lease().await.unwrap());
        rig.script.last().set_anon(big());
        pass(secs(300)).await;
    }
    let helped: Vec<_> = rig.ledger().iter().map(|entry| entry.helped).collect();
    assert_eq!(helped, [Some(true), Some(false)], "the second one is known to be in vain");
    assert_eq!(rig.count("policy_off"), 1, "{:?}", rig.kinds());
    let view = rig.fleet.view();
    let policy = view.models[0].policy.clone().unwrap();
    let held = policy.held.unwrap().to_string();
    for figure in ["500.0 MiB", "100.0 MiB", "600.0 MiB", "750.0 MiB"] {
        assert!(held.contains(figure), "{figure} is missing: {held}");
    }
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_soft_budget_below_the_working_set_is_named_although_no_moment_is_quiet() {
    let rig = Rig::new(|config, _| config.models[0].recycle.host_soft = mib(500)).await;
    for _ in 0..8 {
        drop(rig.lease().await.unwrap());
        rig.script.last().set_anon(big());
        pass(secs(1800)).await;
    }
    let busy = rig.lease().await.unwrap();
    pass(secs(10)).await;
    assert_eq!((rig.ledger().len(), rig.count("policy_off")), (2, 1), "{:?}", rig.kinds());
    let policy = rig.fleet.view().models[0].policy.clone().unwrap();
    assert!(policy.held.unwrap().to_string().contains("policy.host.soft"), "{policy:?}");
    drop(busy);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn requests_and_age_are_reasons_too_and_say_nothing_about_memory() {
    let rig = Rig::new(|config, _| {
        config.models[0].recycle.max_requests = Some(3);
        config.models[0].recycle.max_age = Some(secs(3000));
    })
    .await;
    let lease = rig.lease().await.unwrap();
    lease.add_work(WorkDone { requests: 3, ..WorkDone::default() });
    drop(lease);
    pass(secs(10)).await;
    pass(secs(3100)).await;
    let reasons: Vec<_> = rig.ledger().iter().map(|entry| (entry.reason, entry.helped)).collect();
    assert_eq!(reasons, [(Reason::MaxRequests, None), (Reason::MaxAge, None)]);
    rig.end().await;
}

async fn way(change: impl FnOnce(&Script)) -> (ReplacementMode, String) {
    let rig = Rig::new(|config, _| config.models[0].run.replace = ReplaceMode::Auto).await;
    drop(rig.lease().await.unwrap());
    pass(secs(1)).await;
    change(&rig.script);
    let entry = rig.fleet.restart("m").await.unwrap().remove(0);
    let note = rig.fleet.view().models[0].replace_note.clone().unwrap();
    assert_eq!(entry.evidence.note.as_ref(), Some(&note));
    rig.end().await;
    (entry.mode, note)
}

#[tokio::test(start_paused = true)]
async fn auto_overlaps_where_memory_allows_and_no_gpu_is_present() {
    let (mode, note) = way(|script| script.set_available(384 * MIB)).await;
    assert_eq!(
        (mode, note.as_str()),
        (ReplacementMode::Overlap, "overlap: 384.0 MiB available, 384.0 MiB needed")
    );
    let (mode, note) = way(|script| script.set_available(383 * MIB)).await;
    assert_eq!(
        (mode, note.as_str()),
        (ReplacementMode::Sequential, "sequential: 383.0 MiB available, 384.0 MiB needed")
    );
    let (mode, note) = way(|script| {
        script.set_available(u64::MAX);
        script.set_gpu();
    })
    .await;
    assert!(mode == ReplacementMode::Sequential && note.contains("GPU"), "{note}");
}

#[tokio::test(start_paused = true)]
async fn a_failed_overlap_by_policy_counts_as_futile_and_is_tried_again_after_the_interval() {
    let rig = Rig::new(|config, _| {
        config.models[0].recycle.host_soft = mib(500);
        config.models[0].run.replace = ReplaceMode::Overlap;
    })
    .await;
    drop(rig.lease().await.unwrap());
    rig.script.last().set_anon(big());
    rig.script.next(Role::failing(ProcessExit::Code(1), "failed to allocate"));
    pass(secs(300)).await;
    assert_eq!((rig.ledger().len(), rig.ledger()[0].helped), (1, Some(false)));
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(1));
    pass(secs(400)).await;
    let second = &rig.ledger()[1];
    assert_eq!((second.to, second.helped), (Some(GenerationId(3)), Some(true)));
    rig.end().await;
}
