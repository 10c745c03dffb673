//! Replacements by operators, in both modes.

use std::sync::atomic::Ordering;

use warden_policies::Reason;

use super::script::Role;
use super::*;
use crate::ReplacementMode;
use crate::process::group::ProcessExit;

#[tokio::test(start_paused = true)]
async fn a_sequential_restart_waits_for_its_leases_and_carries_the_queue_over() {
    let rig = Rig::new(|_, _| {}).await;
    let old = rig.lease().await.unwrap();
    old.add_work(warden_policies::WorkDone { requests: 5, ..Default::default() });
    pass(secs(6)).await;
    let restart = rig.restart_later().await;
    let waiting = [rig.lease_later().await, rig.lease_later().await];
    pass(secs(10)).await;
    assert!(waiting.iter().all(|lease| !lease.is_finished()) && rig.script.alive() == 1);
    assert_eq!(rig.script.last().terms.load(Ordering::SeqCst), 0, "TERM would abort what runs");
    drop(old);
    for lease in waiting {
        assert_eq!(lease.await.unwrap().unwrap().generation(), GenerationId(2));
    }
    let entries = restart.await.unwrap().unwrap();
    let [entry] = entries.as_slice() else { panic!("one entry") };
    assert_eq!((entry.reason, entry.mode, entry.replica), (Reason::Operator, ReplacementMode::Sequential, 0));
    assert_eq!((entry.from, entry.to), (Some(GenerationId(1)), Some(GenerationId(2))));
    assert_eq!((entry.carried_over, entry.drained, entry.cut), (2, 1, 0));
    assert_eq!(entry.drain_ms, 10_000);
    assert!((10_100..10_300).contains(&entry.gap_ms), "{}", entry.gap_ms);
    assert!(entry.start_ms.is_some_and(|ms| (100..150).contains(&ms)), "{:?}", entry.start_ms);
    assert_eq!(entry.evidence.requests, 5);
    assert_eq!(entry.host_after.unwrap().anon, 100 * MIB);
    assert_eq!(rig.ledger(), entries);
    assert_eq!(rig.fleet.view().models[0].recycles, [(Reason::Operator, 1)]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn leases_beyond_the_drain_deadline_are_cut_and_told() {
    let rig = Rig::new(|config, script| {
        config.models[0].lifecycle.drain_deadline = secs(20);
        // The process ignores SIGTERM, as llama-server does while a request hangs.
        script.next(Role { term_takes: None, ..Role::default() });
    })
    .await;
    let held = rig.lease().await.unwrap();
    let restart = rig.restart_later().await;
    tokio::time::timeout(secs(19), held.until_revoked()).await.expect_err("too early");
    tokio::time::timeout(secs(2), held.until_revoked()).await.expect("the deadline has passed");
    let entry = restart.await.unwrap().unwrap().remove(0);
    assert_eq!((entry.cut, entry.drained, entry.drain_ms), (1, 0, 20_000));
    let old = &rig.script.children()[0];
    assert_eq!((old.terms.load(Ordering::SeqCst), old.kills.load(Ordering::SeqCst)), (1, 1));
    assert!(entry.gap_ms >= 30_000, "the grace: {}", entry.gap_ms);
    drop(held);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_overlap_has_no_gap_and_the_old_one_drains_while_the_new_one_serves() {
    let rig = Rig::new(|config, _| config.models[0].run.replace = ReplaceMode::Overlap).await;
    let old = rig.lease().await.unwrap();
    let restart = rig.restart_later().await;
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(1), "until the new one is ready");
    pass(secs(1)).await;
    assert_eq!((rig.script.alive(), rig.state()), (2, ModelState::Loaded));
    let new = rig.lease().await.unwrap();
    assert_eq!((new.generation(), new.queued_for()), (GenerationId(2), Duration::ZERO));
    assert!(!restart.is_finished());
    drop(old);
    let entry = restart.await.unwrap().unwrap().remove(0);
    assert_eq!(
        (entry.mode, entry.gap_ms, entry.carried_over, entry.drained),
        (ReplacementMode::Overlap, 0, 0, 1)
    );
    assert_eq!(rig.script.alive(), 1);
    drop(new);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_overlap_whose_new_process_fails_leaves_the_old_one_in_service() {
    let rig = Rig::new(|config, _| config.models[0].run.replace = ReplaceMode::Overlap).await;
    drop(rig.lease().await.unwrap());
    rig.script.next(Role::failing(ProcessExit::Code(1), "error: invalid argument: --x"));
    let error = rig.fleet.restart("m").await.unwrap_err();
    assert!(matches!(error, ControlError::StartFailed { .. }), "{error}");
    let lease = rig.lease().await.unwrap();
    assert_eq!((lease.generation(), lease.queued_for()), (GenerationId(1), Duration::ZERO));
    let entry = &rig.ledger()[0];
    assert!(entry.failed.as_ref().unwrap().contains("--x") && entry.to.is_none(), "{entry:?}");
    assert_eq!(rig.fleet.view().models[0].backends.len(), 1);
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn when_the_old_process_dies_in_an_overlap_the_new_one_takes_its_place() {
    let rig = Rig::new(|config, _| config.models[0].run.replace = ReplaceMode::Overlap).await;
    drop(rig.lease().await.unwrap());
    rig.script.next(Role { ready_after: secs(30), ..Role::default() });
    let restart = rig.restart_later().await;
    pass(secs(1)).await;
    rig.script.children()[0].crash();
    rig.until(ModelState::Loading).await;
    let lease = rig.lease().await.unwrap();
    assert_eq!(lease.generation(), GenerationId(2));
    let entry = restart.await.unwrap().unwrap().remove(0);
    assert!(entry.failed.is_none() && entry.gap_ms > 20_000, "{entry:?}");
    assert_eq!((rig.script.alive(), rig.script.children().len()), (1, 2));
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn when_both_halves_of_an_overlap_die_the_model_recovers() {
    let rig = Rig::new(|config, _| config.models[0].run.replace = ReplaceMode::Overlap).await;
    drop(rig.lease().await.unwrap());
    rig.script.next(Role {
        ready_after: secs(30),
        dies: Some((secs(5), ProcessExit::Signal(11))),
        ..Role::default()
    });
    let restart = rig.restart_later().await;
    pass(secs(5)).await;
    rig.script.children()[0].crash();
    rig.until(ModelState::Backoff).await;
    assert!(matches!(rig.lease().await.unwrap().generation(), GenerationId(3)));
    restart.await.unwrap().unwrap();
    assert_eq!(rig.script.alive(), 1);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn replicas_are_replaced_one_after_another() {
    let rig = Rig::new(|config, _| {
        config.models[0].run.replicas = 3;
        config.models[0].run.preload = true;
    })
    .await;
    pass(secs(1)).await;
    let restart = rig.restart_later().await;
    let mut fewest = 3;
    while !restart.is_finished() {
        pass(Duration::from_millis(5)).await;
        let ready =
            |backend: &&crate::BackendView| backend.phase == warden_policies::lifecycle::BackendPhase::Ready;
        fewest = fewest.min(rig.fleet.view().models[0].backends.iter().filter(ready).count());
    }
    let entries = restart.await.unwrap().unwrap();
    assert_eq!(entries.iter().map(|entry| entry.gap_ms).collect::<Vec<_>>(), [0, 0, 0]);
    assert_eq!((fewest, entries.iter().map(|entry| entry.replica).collect::<Vec<_>>()), (2, vec![0, 1, 2]));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn restarts_that_come_together_share_what_is_not_begun_yet() {
    let rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    let all = [rig.restart_later().await, rig.restart_later().await, rig.restart_later().await];
    pass(secs(1)).await;
    drop(held);
    for restart in all {
        assert_eq!(restart.await.unwrap().unwrap()[0].to, Some(GenerationId(2)));
    }
    assert_eq!(rig.script.children().len(), 2);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_that_cannot_succeed_says_why_and_keeps_trying_in_the_background() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    rig.script.next(Role::failing(ProcessExit::Code(1), "error: invalid argument: --x"));
    let error = rig.fleet.restart("m").await.unwrap_err();
    assert!(error.to_string().contains("--x"), "{error}");
    assert!(rig.ledger()[0].failed.is_some());
    rig.until(ModelState::Loaded).await;
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_crash_while_draining_still_leads_to_the_next_generation() {
    let rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    let restart = rig.restart_later().await;
    pass(secs(1)).await;
    rig.script.last().crash();
    let entry = restart.await.unwrap().unwrap().remove(0);
    assert_eq!((entry.cut, entry.drained, entry.to), (1, 0, Some(GenerationId(2))));
    drop(held);
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(2));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_drained_model_stays_down_until_it_is_needed() {
    let rig = Rig::new(|config, _| config.models[0].run.preload = true).await;
    let held = rig.lease().await.unwrap();
    let fleet = rig.fleet.clone();
    let drain = begun(async move { fleet.drain("m").await }).await;
    pass(secs(5)).await;
    assert!(!drain.is_finished());
    drop(held);
    drain.await.unwrap().unwrap();
    assert_eq!(rig.state(), ModelState::Unloaded, "what is answered is shown");
    pass(secs(600)).await;
    assert_eq!((rig.script.alive(), rig.state()), (0, ModelState::Unloaded));
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(2));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_during_a_drain_starts_the_model_again_after_it() {
    let rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    let fleet = rig.fleet.clone();
    let drain = begun(async move { fleet.drain("m").await }).await;
    let waiting = rig.lease_later().await;
    pass(secs(5)).await;
    drop(held);
    drain.await.unwrap().unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().generation(), GenerationId(2));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_drain_gives_up_a_restart_in_either_way() {
    for way in [ReplaceMode::Sequential, ReplaceMode::Overlap] {
        let rig = Rig::new(|config, _| config.models[0].run.replace = way).await;
        let held = rig.lease().await.unwrap();
        rig.script.next(Role { ready_after: secs(30), ..Role::default() });
        let restart = rig.restart_later().await;
        pass(secs(2)).await;
        drop(held);
        rig.fleet.drain("m").await.unwrap();
        assert!(matches!(restart.await.unwrap(), Err(ControlError::GivenUp { .. })));
        assert_eq!(rig.script.alive(), 0);
        let [entry] = &rig.ledger()[..] else { panic!("{:?}", rig.ledger()) };
        assert!(entry.given_up && entry.to.is_none(), "{entry:?}");
        assert_eq!(entry.failed.as_deref(), Some("the model was drained"));
        assert_eq!(entry.helped, None, "it says nothing about memory");
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_replacement_that_was_not_measured_to_its_end_stands_in_the_ledger_all_the_same() {
    let rig = Rig::new(|config, _| config.models[0].run.replace = ReplaceMode::Overlap).await;
    let held = rig.lease().await.unwrap();
    let restart = rig.restart_later().await;
    pass(secs(5)).await;
    // The new process serves, and a request keeps the old one.
    assert_eq!((rig.script.alive(), rig.ledger().len()), (2, 0));
    let fleet = rig.fleet.clone();
    let drain = begun(async move { fleet.drain("m").await }).await;
    drop(held);
    drain.await.unwrap().unwrap();
    let told = restart.await.unwrap().unwrap();
    assert_eq!(told[0].to, Some(GenerationId(2)), "it was restarted: {told:?}");
    let [entry] = &rig.ledger()[..] else { panic!("{:?}", rig.ledger()) };
    assert_eq!((entry.from, entry.to), (Some(GenerationId(1)), Some(GenerationId(2))));
    assert!(entry.failed.is_none() && !entry.given_up, "{entry:?}");
    assert_eq!((entry.drained, entry.cut, entry.exit_ms), (0, 0, None), "what still ran then is not known");
    assert_eq!(rig.count("recycle_began"), rig.count("recycle_done"));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_process_is_not_stopped_for_one_that_could_not_start() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    rig.script.set_files("m.gguf", Some("cannot use m.gguf: it is gone"));
    let error = rig.fleet.restart("m").await.unwrap_err();
    assert!(error.to_string().contains("cannot use m.gguf"), "{error}");
    let lease = rig.lease().await.unwrap();
    assert_eq!((lease.generation(), lease.queued_for()), (GenerationId(1), Duration::ZERO));
    drop(lease);
    let entry = &rig.ledger()[0];
    assert!(
        entry.failed.as_ref().is_some_and(|why| why.contains("was kept")) && entry.to.is_none(),
        "{entry:?}"
    );
    assert_eq!((rig.count("draining"), rig.count("recycle_began")), (0, 0), "{:?}", rig.kinds());
    let note = rig.fleet.view().models[0].replace_note.clone().unwrap();
    assert!(note.contains("m.gguf"), "{note}");
    // The file exists again.
    rig.script.set_files("m.gguf", None);
    pass(secs(3)).await;
    assert_eq!(rig.fleet.restart("m").await.unwrap()[0].to, Some(GenerationId(2)));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_policy_waits_for_what_the_next_process_needs() {
    let rig = Rig::new(|config, _| {
        config.models[0].run.preload = true;
        config.models[0].recycle.host_hard = mib(500);
    })
    .await;
    rig.until(ModelState::Loaded).await;
    rig.script.set_files("m.gguf", Some("cannot use m.gguf: it is gone"));
    rig.script.last().set_anon(600 * MIB);
    pass(secs(60)).await;
    assert_eq!((rig.script.alive(), rig.script.children().len()), (1, 1));
    assert_eq!(rig.ledger().len(), 1, "told once");
    let held = rig.fleet.view().models[0].policy.as_ref().and_then(|policy| policy.held);
    assert_eq!(held, Some(warden_policies::cooldown::HoldReason::CannotStart));
    rig.script.set_files("m.gguf", None);
    pass(secs(15)).await;
    assert_eq!(rig.script.children().len(), 2);
    let entry = &rig.ledger()[1];
    assert!(
        entry.failed.is_none() && entry.exit_ms == Some(50) && entry.ours_ms.is_some_and(|ms| ms < 30),
        "{entry:?}"
    );
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn who_waits_from_the_beginning_of_a_replacement_is_served_however_long_a_lease_lasts() {
    let rig = Rig::new(|config, script| {
        config.models[0].requests.queue.wait = secs(3);
        config.models[0].lifecycle.drain_deadline = secs(30);
        script.next(Role::default());
        script.next(Role { ready_after: secs(2), ..Role::default() });
    })
    .await;
    let long = rig.lease().await.unwrap();
    let restart = rig.restart_later().await;
    pass(Duration::from_millis(10)).await;
    let waiting = rig.lease_later().await;
    pass(secs(20)).await;
    assert!(!waiting.is_finished());
    drop(long);
    let served = waiting.await.unwrap().unwrap();
    assert_eq!(served.generation(), GenerationId(2));
    assert!(served.queued_for() >= secs(22), "{:?}", served.queued_for());
    restart.await.unwrap().unwrap();
    // Without a replacement, the time limit is the usual one.
    let _other = rig.lease().await.unwrap();
    let late = rig.lease().await.unwrap_err();
    assert!(matches!(late, LeaseDenied::Deadline { waited } if waited < secs(4)), "{late:?}");
    drop(served);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_watcher_holds_no_drain_and_ends_with_the_process() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    let watcher = rig.fleet.lease(&ModelName::new("m"), LeaseKind::Watch).await.unwrap();
    assert_eq!(rig.fleet.view().models[0].backends[0].in_flight, 0, "nobody is busy");
    let entries = rig.fleet.restart("m").await.unwrap();
    assert_eq!((entries[0].cut, entries[0].drain_ms), (0, 0));
    watcher.until_revoked().await;
    drop(watcher);
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(2));
    rig.end().await;
}

/// One model over its hard budget, with a long request.
async fn over_budget(available: u64) -> (Rig, Lease) {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.host_hard = mib(180);
        config.models[0].lifecycle.drain_deadline = secs(60);
        script.set_available(available);
    })
    .await;
    let long = rig.lease().await.unwrap();
    pass(secs(1)).await;
    rig.script.last().set_anon(517 * MIB);
    (rig, long)
}

#[tokio::test(start_paused = true)]
async fn a_budget_cuts_no_request_while_the_machine_has_memory() {
    let (rig, long) = over_budget(20 << 30).await;
    rig.until(ModelState::Draining).await;
    pass(secs(50)).await;
    assert_eq!(rig.script.last().terms.load(Ordering::SeqCst), 0, "{:?}", rig.kinds());
    // At the deadline other requests have waited long enough, so the process serves again.
    rig.until(ModelState::Loaded).await;
    drop(rig.lease().await.unwrap());
    let entry = &rig.ledger()[0];
    assert!(
        entry.failed.as_ref().is_some_and(|why| why.contains("continues to serve")) && entry.helped.is_none(),
        "{entry:?}"
    );
    pass(secs(10)).await;
    let held = rig.fleet.view().models[0].policy.as_ref().and_then(|policy| policy.held);
    assert!(held.is_some(), "{:?}", rig.kinds());
    drop(long);
    pass(secs(200)).await;
    assert_eq!((rig.script.children().len(), rig.script.alive()), (2, 1));
    assert!(rig.ledger()[1].failed.is_none());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_budget_cuts_requests_when_the_machine_itself_is_short() {
    let (rig, long) = over_budget(1500 * MIB).await;
    rig.until(ModelState::Draining).await;
    pass(secs(30)).await;
    long.until_revoked().await;
    assert_eq!(rig.script.children().len(), 2, "{:?}", rig.kinds());
    drop(long);
    rig.end().await;
}
