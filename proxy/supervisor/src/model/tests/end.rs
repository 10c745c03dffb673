//! Shutdown of the fleet.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::script::Role;
use super::*;
use crate::{FleetError, FleetEvent};

async fn shutdown_later(rig: &Rig, deadline: Duration) -> AbortOnDropHandle<Duration> {
    let fleet = rig.fleet.clone();
    begun(async move {
        let began = Instant::now();
        fleet.shutdown(deadline).await;
        began.elapsed()
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn running_and_queued_requests_are_served_and_new_ones_are_not() {
    let rig = Rig::new(|config, _| config.models[0].requests.max_in_flight = Some(1)).await;
    let running = rig.lease().await.unwrap();
    let queued = rig.lease_later().await;
    let ending = shutdown_later(&rig, secs(30)).await;
    assert_eq!(rig.lease().await.unwrap_err(), LeaseDenied::ShuttingDown);
    pass(secs(10)).await;
    assert_eq!(rig.script.last().terms.load(Ordering::SeqCst), 0);
    drop(running);
    let served = queued.await.unwrap().unwrap();
    pass(secs(5)).await;
    assert!(!ending.is_finished());
    drop(served);
    let took = ending.await.unwrap();
    assert!((secs(15)..secs(16)).contains(&took), "{took:?}");
    rig.script.assert_all_reaped();
}

#[tokio::test(start_paused = true)]
async fn what_runs_at_the_deadline_is_cut_and_a_process_that_ignores_term_is_killed() {
    let rig = Rig::new(|_, script| {
        script.next(Role { term_takes: None, ..Role::default() });
    })
    .await;
    let held = [rig.lease().await.unwrap(), rig.lease().await.unwrap()];
    let queued = rig.lease_later().await;
    let ending = shutdown_later(&rig, secs(30)).await;
    let took = ending.await.unwrap();
    assert!((secs(40)..secs(41)).contains(&took), "{took:?}");
    assert_eq!(queued.await.unwrap().unwrap_err(), LeaseDenied::ShuttingDown);
    held[0].until_revoked().await;
    rig.script.assert_all_reaped();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_during_a_start_does_not_wait_for_it() {
    for spawn_takes in [Duration::from_millis(1), secs(2)] {
        let slow = Role { spawn_takes, ready_after: secs(600), ..Role::default() };
        let rig = Rig::new(|_, script| script.next(slow)).await;
        let waiting = rig.lease_later().await;
        pass(Duration::from_millis(500)).await;
        let took = shutdown_later(&rig, secs(30)).await.await.unwrap();
        assert!(took <= secs(3), "{took:?}");
        assert_eq!(waiting.await.unwrap().unwrap_err(), LeaseDenied::ShuttingDown);
        rig.script.assert_all_reaped();
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_in_the_middle_of_a_replacement_ends_both_halves() {
    for way in [ReplaceMode::Sequential, ReplaceMode::Overlap] {
        let rig = Rig::new(|config, _| config.models[0].run.replace = way).await;
        let held = rig.lease().await.unwrap();
        rig.script.next(Role { ready_after: secs(600), ..Role::default() });
        let restart = rig.restart_later().await;
        pass(secs(1)).await;
        let ending = shutdown_later(&rig, secs(30)).await;
        assert!(restart.await.unwrap().is_err());
        pass(secs(1)).await;
        drop(held);
        let took = ending.await.unwrap();
        assert!(took <= secs(2), "{way:?} {took:?}");
        rig.script.assert_all_reaped();
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_that_crashes_during_the_end_does_not_come_back() {
    let rig = Rig::new(|config, _| config.models[0].run.replicas = 2).await;
    let held = rig.lease().await.unwrap();
    pass(secs(1)).await;
    let ending = shutdown_later(&rig, secs(30)).await;
    let idle = rig.script.children().into_iter().find(|child| {
        let socket = child.request.command.args.last().unwrap();
        !socket.ends_with(&format!("-{}.sock", held.generation()))
    });
    idle.unwrap().crash();
    pass(secs(20)).await;
    assert_eq!((rig.script.alive(), rig.script.children().len()), (1, 2));
    drop(held);
    let took = ending.await.unwrap();
    assert!((secs(20)..secs(21)).contains(&took), "{took:?}");
    rig.script.assert_all_reaped();
}

#[tokio::test(start_paused = true)]
async fn an_idle_fleet_ends_at_once_and_answers_everything_after_it() {
    let rig = Rig::new(|config, _| config.models.push(spec("n"))).await;
    drop(rig.lease().await.unwrap());
    assert!(shutdown_later(&rig, secs(30)).await.await.unwrap() < secs(1));
    assert!(shutdown_later(&rig, secs(30)).await.await.unwrap() < secs(1), "again");
    assert_eq!(rig.lease().await.unwrap_err(), LeaseDenied::ShuttingDown);
    assert_eq!(rig.fleet.restart("m").await.unwrap_err(), ControlError::ShuttingDown);
    assert_eq!(rig.fleet.drain("m").await.unwrap_err(), ControlError::ShuttingDown);
    assert!(matches!(rig.fleet.apply(rig.config.clone()).await, Err(FleetError::ShuttingDown)));
    rig.script.assert_all_reaped();
}

#[tokio::test(start_paused = true)]
async fn removed_models_that_still_drain_are_ended_too() {
    let mut rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    rig.apply(|config| config.models.clear()).await;
    let took = shutdown_later(&rig, secs(5)).await.await.unwrap();
    assert!((secs(5)..secs(6)).contains(&took), "{took:?}");
    drop(held);
    rig.script.assert_all_reaped();
}

#[tokio::test(start_paused = true)]
async fn listeners_hear_what_happens_and_views_are_numbered() {
    let rig =
        Rig::new(|_, script| script.next(Role { says: vec!["hello".to_owned()], ..Role::default() })).await;
    let (mut events, mut views) = (rig.fleet.events(), rig.fleet.subscribe());
    let before = views.borrow_and_update().number;
    drop(rig.lease().await.unwrap());
    let first: FleetEvent = events.receiver.recv().await.unwrap();
    assert_eq!((first.id, first.model.as_ref().map(ModelName::as_str)), (1, Some("m")));
    views.changed().await.unwrap();
    assert!(views.borrow().number > before);
    let logs = rig.fleet.logs("m").unwrap();
    assert_eq!((logs.lines[0].text.as_str(), logs.lines[0].generation), ("hello", GenerationId(1)));
    assert!(rig.fleet.logs("x").is_none());
    rig.end().await;
}
