//! Models without requests are unloaded, and loaded again.

use super::*;

async fn rig(ttl: u64) -> Rig {
    Rig::new(move |config, _| config.models[0].ttl = Some(secs(ttl))).await
}

#[tokio::test(start_paused = true)]
async fn a_model_is_unloaded_after_its_time_and_loaded_by_its_next_request() {
    let rig = rig(60).await;
    drop(rig.lease().await.unwrap());
    pass(secs(59)).await;
    assert_eq!((rig.count("unloaded"), rig.script.alive()), (0, 1));
    pass(secs(2)).await;
    assert_eq!((rig.count("unloaded"), rig.script.alive()), (1, 0));
    assert_eq!(rig.state(), ModelState::Unloaded);
    // The model is not loaded without a request, even with preload.
    pass(secs(600)).await;
    assert_eq!((rig.count("unloaded"), rig.script.children().len()), (1, 1));
    let lease = rig.lease().await.unwrap();
    assert_eq!((rig.script.alive(), rig.script.children().len()), (1, 2));
    drop(lease);
    pass(secs(61)).await;
    assert_eq!((rig.count("unloaded"), rig.script.alive()), (2, 0));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_time_begins_with_the_end_of_the_last_request() {
    let rig = rig(60).await;
    let long = rig.lease().await.unwrap();
    pass(secs(500)).await;
    let other = rig.lease().await.unwrap();
    drop(long);
    pass(secs(70)).await;
    drop(other);
    pass(secs(30)).await;
    drop(rig.lease().await.unwrap());
    pass(secs(59)).await;
    assert_eq!(rig.count("unloaded"), 0);
    pass(secs(2)).await;
    assert_eq!(rig.count("unloaded"), 1);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn who_comes_while_it_ends_is_served_by_the_next_process() {
    let rig = rig(60).await;
    drop(rig.lease().await.unwrap());
    pass(secs(60)).await;
    // Each request comes just before or after the stop request; all of them are served.
    for _ in 0..20 {
        let lease = rig.lease().await.unwrap();
        drop(lease);
        pass(Duration::from_millis(59_990)).await;
    }
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_reload_sets_the_time_and_takes_it_away() {
    let mut rig = rig(60).await;
    drop(rig.lease().await.unwrap());
    rig.apply(|config| config.models[0].ttl = None).await;
    pass(secs(600)).await;
    assert_eq!((rig.count("unloaded"), rig.script.alive()), (0, 1));
    rig.apply(|config| config.models[0].ttl = Some(secs(30))).await;
    pass(secs(1)).await;
    assert_eq!((rig.count("unloaded"), rig.script.alive()), (1, 0), "it has rested for longer");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn one_of_several_replicas_that_works_keeps_all() {
    let rig = Rig::new(|config, _| {
        config.models[0].ttl = Some(secs(60));
        config.models[0].run.replicas = 2;
    })
    .await;
    let busy = rig.lease().await.unwrap();
    pass(secs(300)).await;
    assert_eq!((rig.count("unloaded"), rig.script.alive()), (0, 2));
    drop(busy);
    pass(secs(61)).await;
    assert_eq!((rig.count("unloaded"), rig.script.alive()), (1, 0));
    rig.end().await;
}
