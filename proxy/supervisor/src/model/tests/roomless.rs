//! A model that loses its room during a replacement: its successor does not start, and another model takes
//! the memory.

use super::*;

/// `a` serves, and its successor fails at the first start; the next attempt is a minute away.
async fn without_a_successor(pinned: bool) -> Rig {
    let mut rig = rig(&[("a", 20), ("b", 20)]).await;
    rig.apply(|config| {
        config.models[0].lifecycle.backoff_first = secs(60);
        config.models[1].loading.pin = pinned;
    })
    .await;
    rig.next_takes(20);
    drop(rig.lease_of("a").await.unwrap());
    rig.script.next(Role::failing(crate::ProcessExit::Code(1), "something odd"));
    rig
}

/// Changes a model's arguments: its process is replaced by one with this much memory.
async fn change(rig: &mut Rig, model: usize, gib: u64) {
    rig.next_takes(gib);
    rig.apply(|config| config.models[model].command.args.push("--other".to_owned())).await;
}

#[tokio::test(start_paused = true)]
async fn one_whose_model_can_never_be_loaded_again_is_in_the_ledger_and_gives_its_turn_back() {
    let mut rig = without_a_successor(true).await;
    let fleet = rig.fleet.clone();
    let restart = begun(async move { fleet.restart("a").await }).await;
    pass(secs(5)).await;
    assert!(rig.ledger().is_empty() && !restart.is_finished(), "it is tried again");
    rig.next_takes(20);
    drop(rig.lease_of("b").await.unwrap());
    let told = restart.await.unwrap().unwrap_err().to_string();
    assert!(told.contains("cannot be loaded") && told.contains("(`pin`: `b`)"), "{told}");
    let [entry] = &rig.ledger()[..] else { panic!("{:?}", rig.ledger()) };
    let why = entry.failed.as_deref().unwrap_or_default();
    assert!(entry.to.is_none() && why.contains("cannot be loaded"), "{entry:?}");
    assert_eq!(rig.count("recycle_began"), rig.count("recycle_done"));
    change(&mut rig, 1, 20).await;
    pass(secs(30)).await;
    assert_eq!((rig.script.children().len(), rig.states()), (4, vec![Unloaded, Loaded]));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn one_that_takes_less_where_it_never_fits_whole_is_done() {
    let mut rig = without_a_successor(true).await;
    rig.apply(|config| {
        with_fallback(config, 4);
        needs(&mut config.models[1], 18);
        config.models[1].loading.pin = true;
    })
    .await;
    let restart = {
        let fleet = rig.fleet.clone();
        begun(async move { fleet.restart("a").await }).await
    };
    pass(secs(5)).await;
    rig.next_takes(18);
    drop(rig.lease_of("b").await.unwrap());
    rig.next_takes(4);
    let told = restart.await.unwrap().unwrap();
    assert!(is_reduced(&rig) && told[0].to.is_some(), "{told:?}");
    assert_eq!(rig.states(), [Loaded, Loaded]);
    pass(secs(60)).await;
    assert_eq!((rig.count("recycle_began"), rig.count("recycle_done")), (1, 1));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn while_a_model_waits_for_room_others_are_replaced() {
    let mut rig = without_a_successor(false).await;
    // An operator's restart would evict another model, so use a reload.
    rig.apply(|config| config.models[0].command.args.push("--other".to_owned())).await;
    pass(secs(5)).await;
    rig.next_takes(20);
    drop(rig.lease_of("b").await.unwrap());
    pass(secs(90)).await;
    let seen = |rig: &Rig| (rig.script.children().len(), rig.states());
    assert_eq!(
        seen(&rig),
        (3, vec![ModelState::Backoff, Loaded]),
        "nobody asks for `a`, which waits for room"
    );
    change(&mut rig, 1, 20).await;
    pass(secs(30)).await;
    assert_eq!(seen(&rig), (4, vec![ModelState::Backoff, Loaded]));
    assert_eq!(rig.ledger().len(), 1, "{:?}", rig.ledger());
    // The model is loaded with its latest settings when a request comes.
    rig.next_takes(20);
    drop(rig.lease_of("a").await.unwrap());
    assert_eq!(rig.states(), [Loaded, Unloaded]);
    rig.end().await;
}
