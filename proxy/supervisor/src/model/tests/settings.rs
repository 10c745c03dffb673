//! A client's settings in one process are applied to the model's others, and to the next one before it
//! serves.

use bytes::Bytes;

use super::script::Role;
use super::*;
use crate::sync::lock;

fn set(rig: &Rig) -> Vec<Vec<String>> {
    rig.script.children().iter().map(|child| lock(&child.set).clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn it_is_set_again_after_a_restart_and_after_a_crash() {
    let rig = Rig::new(|_, _| {}).await;
    let lease = rig.lease().await.unwrap();
    lease.note_setting("/lora-adapters", Bytes::from_static(b"[]"));
    drop(lease);
    rig.fleet.restart("m").await.unwrap();
    rig.script.last().crash();
    pass(secs(30)).await;
    let path = || vec!["/lora-adapters".to_owned()];
    assert_eq!(set(&rig), [Vec::new(), path(), path()]);
    assert_eq!(rig.count("setting_lost"), 0);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_set_again_is_told_and_a_new_command_forgets_it() {
    let mut rig = Rig::new(|_, script| {
        script.all([Role::default(), Role { refuses: true, ..Role::default() }]);
    })
    .await;
    let lease = rig.lease().await.unwrap();
    lease.note_setting("/props", Bytes::from_static(b"{}"));
    drop(lease);
    rig.fleet.restart("m").await.unwrap();
    assert_eq!((rig.state(), rig.count("setting_lost")), (ModelState::Loaded, 1));
    rig.apply(|config| config.models[0].command.args.push("--other".to_owned())).await;
    pass(secs(30)).await;
    assert_eq!(rig.count("setting_lost"), 2);
    assert_eq!(set(&rig).last(), Some(&Vec::new()));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn it_is_set_in_the_other_replicas_too_and_in_those_that_come_later() {
    let mut rig = Rig::new(|config, script| {
        config.models[0].run.replicas = 3;
        script.all([Role::default(), Role::default(), Role { refuses: true, ..Role::default() }]);
    })
    .await;
    let lease = rig.lease().await.unwrap();
    pass(secs(10)).await;
    lease.note_setting("/lora-adapters", Bytes::from_static(b"[]"));
    let own = usize::try_from(lease.generation().0).unwrap() - 1;
    drop(lease);
    pass(secs(1)).await;
    let is = |at: usize| if at == own { Vec::new() } else { vec!["/lora-adapters".to_owned()] };
    assert_eq!(set(&rig), [is(0), is(1), is(2)]);
    let refused = usize::from(own != 2);
    assert_eq!(rig.count("setting_lost"), refused, "told of the one that did not take it");
    rig.apply(|config| config.models[0].run.replicas = 4).await;
    pass(secs(10)).await;
    assert_eq!(set(&rig)[3], ["/lora-adapters"]);
    rig.end().await;
}
