//! A reload changes the needs of a loaded model. The model asks whether it may stay, and starts no process
//! before the answer.

use super::*;

#[tokio::test(start_paused = true)]
async fn what_a_reload_adds_is_kept_for_the_model_if_it_is_left_and_else_the_model_waits_for_room() {
    let mut rig = rig(&[("a", 8), ("b", 10), ("c", 4)]).await;
    for (model, gib) in [("a", 8), ("b", 10)] {
        rig.next_takes(gib);
        drop(rig.lease_of(model).await.unwrap());
    }
    pass(secs(100)).await;
    let grow = |config: &mut FleetConfig, gib: u64| {
        needs(&mut config.models[0], gib);
        config.models[0].command.args.push(gib.to_string());
    };
    // While the old process answers, memory for the new one is reserved.
    let long = rig.lease_of("a").await.unwrap();
    rig.apply(|config| grow(config, 13)).await;
    pass(secs(5)).await;
    assert_eq!(
        (rig.states(), rig.script.children().len()),
        (vec![ModelState::Draining, Loaded, Unloaded], 2)
    );
    rig.next_takes(13);
    let other = rig.lease_of_later("c").await;
    pass(secs(1)).await;
    assert_eq!(rig.count("makes_room"), 1, "8 + 10 + 4 would fit, 13 + 10 + 4 do not");
    drop(long);
    rig.next_takes(4);
    drop(other.await.unwrap().unwrap());
    pass(secs(100)).await;
    assert_eq!((rig.states(), rig.count("loads_anew")), (vec![Loaded, Unloaded, Loaded], 0));
    // 24 - 4 GiB are left: the model unloads after its requests, and comes back with its new needs at the
    // next request.
    let long = rig.lease_of("a").await.unwrap();
    rig.apply(|config| grow(config, 21)).await;
    let waiting = rig.lease_of_later("a").await;
    pass(secs(30)).await;
    assert_eq!((rig.count("loads_anew"), rig.script.alive(), waiting.is_finished()), (1, 2, false));
    rig.next_takes(21);
    drop(long);
    drop(waiting.await.unwrap().unwrap());
    assert_eq!(rig.states(), [Loaded, Unloaded, Unloaded]);
    assert_eq!((rig.script.alive(), rig.count("makes_room")), (1, 2));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn more_processes_of_a_loaded_model_are_placed_before_they_start() {
    let mut rig = Rig::new(|config, script| {
        script.set_gpus(&[24 * GIB, 24 * GIB]);
        needs(&mut config.models[0], 16);
        script.set_usual(Role { vram: Some(16 * GIB), ..Role::default() });
    })
    .await;
    drop(rig.lease().await.unwrap());
    rig.apply(|config| config.models[0].run.replicas = 2).await;
    pass(secs(10)).await;
    let only = |child: usize| {
        let env = &rig.script.children()[child].request.command.env;
        env.iter().find(|(name, _)| name == "GPUS").map(|(_, gpus)| gpus.clone()).unwrap()
    };
    assert_eq!(rig.script.children().len(), 2);
    assert_ne!(only(0), only(1));
    rig.end().await;
}

/// `a` is being restarted, which takes its process three seconds, and asks if it may have 20 GiB. Others
/// hold 6 of the 24 GiB, and take so long to unload.
async fn one_that_ends_while_it_asks(
    others_take: Duration,
) -> (Rig, AbortOnDropHandle<Result<Vec<LedgerEntry>, ControlError>>) {
    let mut rig = rig(&[("a", 8), ("b", 6)]).await;
    for (model, gib, term_takes) in [("a", 8, secs(3)), ("b", 6, others_take)] {
        rig.script.next(Role { vram: Some(gib * GIB), term_takes: Some(term_takes), ..Role::default() });
        drop(rig.lease_of(model).await.unwrap());
    }
    pass(secs(100)).await;
    let fleet = rig.fleet.clone();
    let restarted = begun(async move { fleet.restart("a").await }).await;
    rig.apply(|config| drop(config.models.pop())).await;
    rig.apply(|config| {
        needs(&mut config.models[0], 20);
        config.models[0].command.args.push("more".to_owned());
    })
    .await;
    rig.next_takes(20);
    pass(secs(2)).await;
    assert_eq!(rig.script.alive(), 2);
    pass(secs(3)).await;
    assert_eq!(
        (rig.script.alive(), rig.script.children().len()),
        (1, 2),
        "no successor: it is not known if that may be"
    );
    (rig, restarted)
}

#[tokio::test(start_paused = true)]
async fn who_ends_while_it_asks_is_followed_when_the_answer_is_there() {
    let (rig, restarted) = one_that_ends_while_it_asks(secs(8)).await;
    restarted.await.unwrap().unwrap();
    assert_eq!((rig.script.children().len(), rig.count("loads_anew")), (3, 0), "{:#?}", rig.kinds());
    assert!(rig.script.children()[2].request.command.args.contains(&"more".to_owned()));
    assert_eq!(rig.states(), [Loaded]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn who_ends_while_it_asks_in_vain_waits_for_room_like_everybody() {
    let (rig, restarted) = one_that_ends_while_it_asks(secs(25)).await;
    // The restart still needs the model, which asks for room again.
    drop(restarted.await.unwrap());
    drop(rig.lease_of("a").await.unwrap());
    assert_eq!((rig.script.children().len(), rig.count("loads_anew")), (3, 1), "{:#?}", rig.kinds());
    assert_eq!((rig.script.alive(), rig.states()), (1, vec![Loaded]));
    rig.end().await;
}
