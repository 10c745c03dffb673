//! Starting, crashing, probing.

use std::sync::atomic::Ordering;

use super::script::Role;
use super::*;
use crate::process::group::ProcessExit;
use crate::{FailureKind, ResolveError};

#[tokio::test(start_paused = true)]
async fn a_model_starts_at_the_first_request_and_the_caller_waits_for_it() {
    let rig = Rig::new(|_, _| {}).await;
    pass(secs(60)).await;
    assert_eq!((rig.script.alive(), rig.state()), (0, ModelState::Unloaded));
    let lease = rig.lease().await.unwrap();
    assert_eq!(lease.generation(), GenerationId(1));
    assert!(lease.queued_for() >= Duration::from_millis(100), "{:?}", lease.queued_for());
    assert_eq!(rig.kinds(), ["starting", "ready"]);
    let view = rig.fleet.view();
    let backend = &view.models[0].backends[0];
    assert_eq!((backend.in_flight, backend.slots, backend.pid), (1, Some(2), Some(1000)));
    assert_eq!((view.models[0].state, view.models[0].n_ctx), (ModelState::Loaded, Some(4096)));
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_preloaded_model_starts_by_itself_with_its_socket_as_the_last_argument() {
    let rig = Rig::new(|config, _| config.models[0].run.preload = true).await;
    rig.until(ModelState::Loaded).await;
    let args = rig.script.last().request.command.args.clone();
    assert_eq!(args[..3], ["-m", "m.gguf", "--host"]);
    assert!(args[3].ends_with("-g1.sock"), "{args:?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn names_aliases_and_any_name_resolve() {
    let mut rig = Rig::new(|config, _| config.models[0].aliases = vec!["a".to_owned()]).await;
    let m = ModelName::new("m");
    for name in [Some("m"), Some("a"), None] {
        assert_eq!(rig.fleet.resolve(name), Ok(m.clone()));
    }
    let known = vec!["m".to_owned(), "a".to_owned()];
    assert_eq!(rig.fleet.resolve(Some("x")), Err(ResolveError::Unknown { name: "x".to_owned(), known }));
    rig.apply(|config| config.any_name = true).await;
    assert_eq!(rig.fleet.resolve(Some("x")), Ok(m));
    rig.apply(|config| config.models.push(spec("n"))).await;
    assert!(matches!(rig.fleet.resolve(Some("x")), Err(ResolveError::Unknown { .. })));
    let known = vec!["m".to_owned(), "n".to_owned()];
    assert_eq!(rig.fleet.resolve(None), Err(ResolveError::Missing { known }));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_callers_wait_through_the_backoff() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    rig.script.last().crash();
    rig.until(ModelState::Backoff).await;
    let lease = rig.lease().await.unwrap();
    assert_eq!(lease.generation(), GenerationId(2));
    assert!(lease.queued_for() >= Duration::from_millis(500), "{:?}", lease.queued_for());
    assert_eq!(rig.fleet.view().models[0].crashes, 1);
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_cannot_succeed_is_told_at_once() {
    let bad =
        || Role::failing(ProcessExit::Code(1), "E gguf_init_from_file: failed to open GGUF file 'm.gguf'");
    let rig = Rig::new(|_, script| script.all([bad(), bad()])).await;
    let Err(LeaseDenied::Failed(failure, after)) = rig.lease().await else { panic!("told") };
    assert_eq!((failure.kind, failure.failures), (FailureKind::BadModel, 1));
    assert!(failure.lines[0].contains("m.gguf") && after == secs(600), "{failure:?} {after:?}");
    let view = rig.fleet.view();
    let outage = view.models[0].outage.clone().unwrap();
    assert!(outage.refusing && outage.watching && outage.cure.contains("restart m"), "{outage:?}");
    assert_eq!(rig.state(), ModelState::Failed);
    // Requests are refused, but starts are tried from time to time, because the classification may be wrong.
    pass(secs(301)).await;
    let Err(LeaseDenied::Failed(_, after)) = rig.lease().await else { panic!("told") };
    assert_eq!((after, rig.script.children().len()), (secs(299), 1));
    pass(secs(301)).await;
    assert_eq!((rig.state(), rig.script.children().len()), (ModelState::Failed, 2));
    // The file appears, and a check finds it.
    rig.script.set_files("m.gguf", None);
    pass(secs(3)).await;
    assert_eq!(rig.state(), ModelState::Loaded);
    drop(rig.lease().await.unwrap());
    let view = rig.fleet.view();
    assert_eq!((&view.models[0].last_failure, &view.models[0].outage), (&None, &None));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_binary_that_is_missing_is_told_at_once() {
    let role = Role { cannot_spawn: true, ..Role::default() };
    let rig = Rig::new(|_, script| script.next(role)).await;
    let Err(LeaseDenied::Failed(failure, _)) = rig.lease().await else { panic!("told") };
    assert_eq!(failure.kind, FailureKind::NotExecutable);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_may_succeed_next_time_is_tried_again_before_callers_are_told() {
    let ill = || Role::failing(ProcessExit::Code(1), "something odd");
    let rig = Rig::new(|_, script| script.next(ill())).await;
    assert!(rig.lease().await.is_ok());
    let rig2 = Rig::new(|_, script| script.all([ill(), ill()])).await;
    let Err(LeaseDenied::StartFailed(failure, _)) = rig2.lease().await else { panic!("told") };
    assert_eq!((failure.kind, failure.failures), (FailureKind::Exit, 2));
    rig.end().await;
    rig2.end().await;
}

#[tokio::test(start_paused = true)]
async fn nine_kills_in_three_minutes_turn_nobody_away() {
    let rig = Rig::new(|config, _| config.models[0].run.preload = true).await;
    for kill in 1..=9 {
        let lease = rig.lease().await.unwrap();
        assert!(lease.queued_for() <= secs(16), "kill {kill}: {:?}", lease.queued_for());
        pass(secs(5)).await;
        drop(lease);
        rig.script.last().say("somebody's prompt");
        pass(Duration::from_millis(100)).await;
        rig.script.last().dies_after(Duration::ZERO, ProcessExit::Signal(9));
        rig.until(ModelState::Backoff).await;
        assert!(!rig.fleet.view().models[0].outage.clone().unwrap().refusing);
    }
    drop(rig.lease().await.unwrap());
    // A crash loop is logged once while it continues.
    assert_eq!((rig.count("crash_loop"), rig.count("failed")), (1, 0));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_process_wrote_while_it_served_is_for_operators_only() {
    let rig = Rig::new(|config, script| {
        config.models[0].run.preload = true;
        script.next(Role::default());
        for _ in 0..3 {
            script.next(Role::failing(ProcessExit::Code(1), "about the start"));
        }
    })
    .await;
    rig.until(ModelState::Loaded).await;
    rig.script.last().say("somebody's prompt");
    pass(Duration::from_millis(100)).await;
    rig.script.last().crash();
    rig.until(ModelState::Backoff).await;
    let seen = rig.fleet.view().models[0].last_failure.clone().unwrap();
    assert!(seen.lines.iter().any(|line| line.contains("prompt")), "{seen:?}");
    let Err(LeaseDenied::StartFailed(failure, _)) = rig.lease().await else { panic!("does not start") };
    assert_eq!(failure.lines, ["about the start"]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn starts_that_fail_go_on_for_ever_and_callers_are_told_when_the_next_one_is() {
    let rig = Rig::new(|config, script| {
        config.models[0].run.preload = true;
        for _ in 0..100 {
            script.next(Role::failing(ProcessExit::Signal(6), "GGML_ASSERT(x) failed"));
        }
    })
    .await;
    pass(secs(3600)).await;
    let starts = rig.script.children().len();
    assert!((60..=100).contains(&starts), "{starts} starts in an hour");
    assert_eq!((rig.count("crash_loop"), rig.count("failed")), (1, 0));
    rig.until(ModelState::Backoff).await;
    let Err(LeaseDenied::StartFailed(failure, Some(after))) = rig.lease().await else { panic!("told") };
    assert_eq!(failure.kind, FailureKind::Signal);
    assert!((secs(1)..=secs(61)).contains(&after), "{after:?}");
    // Let the failure pass without an action.
    rig.script.clear();
    pass(after).await;
    assert!(rig.lease().await.is_ok(), "the time that was told is the time of the next start");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_operator_need_not_wait_for_the_next_start() {
    let rig = Rig::new(|config, script| {
        config.models[0].run.preload = true;
        for _ in 0..5 {
            script.next(Role::failing(ProcessExit::Signal(6), "GGML_ASSERT(x) failed"));
        }
    })
    .await;
    while rig.script.children().len() < 5 {
        pass(secs(1)).await;
    }
    rig.until(ModelState::Backoff).await;
    let entries = rig.fleet.restart("m").await.unwrap();
    assert_eq!((entries[0].from, entries[0].to), (None, Some(GenerationId(6))));
    assert!(rig.lease().await.is_ok());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_takes_too_long_is_killed() {
    let slow = Role { ready_after: secs(9999), ..Role::default() };
    let rig = Rig::new(|config, script| {
        config.models[0].requests.queue.wait = secs(9999);
        script.next(slow);
    })
    .await;
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(2));
    let first = &rig.script.children()[0];
    assert_eq!((first.terms.load(Ordering::SeqCst), first.kills.load(Ordering::SeqCst)), (0, 1));
    let told = rig.events().into_iter().find_map(|(_, event)| match event {
        EventKind::Crashed { failure, .. } => Some(failure.kind),
        _ => None,
    });
    assert_eq!(told, Some(FailureKind::Timeout));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_stands_still_is_killed_before_its_time_is_over_and_one_that_moves_on_is_not() {
    let stuck = Role { ready_after: secs(9999), moves_for: secs(900), ..Role::default() };
    let slow = Role { ready_after: secs(7000), ..Role::default() };
    let rig = Rig::new(|config, script| {
        config.models[0].requests.queue.wait = secs(99_999);
        script.all([stuck, slow]);
    })
    .await;
    let began = tokio::time::Instant::now();
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(2));
    let took = began.elapsed();
    // The limit of 300 s, plus a quarter of it until the stall is detected.
    assert!((secs(7000 + 900 + 300)..secs(7000 + 900 + 380)).contains(&took), "{took:?}");
    let told = rig.events().into_iter().find_map(|(_, event)| match event {
        EventKind::Crashed { failure, .. } => Some(failure.message),
        _ => None,
    });
    assert!(told.as_ref().is_some_and(|told| told.contains("computed nothing for 300 s")), "{told:?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_answers_no_probes_gets_no_requests_until_it_does_again() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    rig.script.last().set_deaf(true);
    rig.until(ModelState::Draining).await;
    let waiting = rig.lease_later().await;
    assert!(!waiting.is_finished());
    rig.script.last().set_deaf(false);
    assert_eq!(waiting.await.unwrap().unwrap().generation(), GenerationId(1));
    assert_eq!(rig.kinds(), ["starting", "ready", "suspect", "recovered"]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_stays_deaf_is_replaced_and_the_ledger_says_why() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    rig.script.last().set_deaf(true);
    rig.until(ModelState::Draining).await;
    let lease = rig.lease().await.unwrap();
    assert_eq!(lease.generation(), GenerationId(2));
    pass(secs(1)).await;
    let entry = &rig.ledger()[0];
    assert_eq!(entry.reason, warden_policies::Reason::Unresponsive);
    assert_eq!((entry.from, entry.to), (Some(GenerationId(1)), Some(GenerationId(2))));
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn bytes_on_a_lease_prove_life_when_probes_are_lost() {
    let rig = Rig::new(|_, _| {}).await;
    let lease = rig.lease().await.unwrap();
    rig.script.last().set_deaf(true);
    for _ in 0..120 {
        pass(secs(1)).await;
        lease.note_progress();
    }
    assert_eq!(rig.count("suspect"), 0);
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_connection_closes_the_backend_until_it_has_answered() {
    let rig = Rig::new(|_, _| {}).await;
    let lease = rig.lease().await.unwrap();
    lease.report_refused();
    drop(lease);
    let again = rig.lease().await.unwrap();
    assert_eq!(rig.kinds(), ["starting", "ready", "suspect", "recovered"]);
    // The process is dead now, and nothing has noticed it yet.
    rig.script.last().crash();
    again.report_refused();
    drop(again);
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(2));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn leases_are_limited_by_the_slots_and_the_setting() {
    let mut rig = Rig::new(|_, _| {}).await;
    let held = [rig.lease().await.unwrap(), rig.lease().await.unwrap()];
    let waiting = rig.lease_later().await;
    pass(secs(1)).await;
    assert!(!waiting.is_finished(), "two slots");
    rig.apply(|config| config.models[0].requests.max_in_flight = Some(3)).await;
    let third = waiting.await.unwrap().unwrap();
    drop((held, third));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn all_replicas_start_and_share_the_requests() {
    let rig = Rig::new(|config, _| config.models[0].run.replicas = 3).await;
    let first = rig.lease().await.unwrap();
    pass(secs(1)).await;
    let (second, third) = (rig.lease().await.unwrap(), rig.lease().await.unwrap());
    let mut generations = [first.generation(), second.generation(), third.generation()];
    generations.sort_unstable();
    assert_eq!(generations, [1, 2, 3].map(GenerationId));
    drop((first, second, third));
    rig.end().await;
}
