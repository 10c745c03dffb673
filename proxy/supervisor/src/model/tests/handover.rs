//! What an instance that has let go hears from the next one: where requests go now.

use std::path::PathBuf;

use tokio::time::Instant;
use warden_policies::{GenerationId, ServerFacts};

use super::*;
use crate::process::endpoint::Endpoint;
use crate::process::heir::Gate;
use crate::process::needs::Kin;

/// One whose processes are another instance's.
async fn let_go(change: impl FnOnce(&mut FleetConfig)) -> Rig {
    let rig = Rig::new(|config, _| change(config)).await;
    let will = rig.fleet.bequeath(Instant::now()).await.unwrap();
    assert_eq!(will.processes(), 0);
    rig.fleet.let_go().await;
    rig
}

fn gate(generation: u64) -> Gate {
    Gate {
        model: "m".to_owned(),
        generation: GenerationId(generation),
        endpoint: Endpoint::Unix(PathBuf::from("/run/m.sock")),
        facts: ServerFacts::default(),
        slots: Some(1),
        kin: None,
        touched: false,
    }
}

const KIN: Kin = Kin { made_of: u64::MAX, but_for_binary: 2, answer_tokens: Some(3) };

#[tokio::test(start_paused = true)]
async fn what_the_next_instances_process_was_started_from_is_known_here_and_told_on() {
    let rig = let_go(|_| {}).await;
    rig.fleet.follow_gates(&[Gate { kin: Some(KIN), ..gate(7) }]);
    let lease = rig.lease().await.unwrap();
    assert_eq!((lease.generation(), lease.kin()), (GenerationId(7), Some(KIN)));
    assert_eq!(rig.fleet.gates()[0].kin, Some(KIN), "whoever is before us hears it, too");
    // Something was set in it, there.
    rig.fleet.follow_gates(&[Gate { kin: Some(KIN), touched: true, ..gate(7) }]);
    rig.fleet.followed().await;
    assert!(lease.kin().is_none() && rig.fleet.gates()[0].touched);
    drop(lease);
    rig.fleet.disband().await;
}

#[test]
fn a_gate_of_a_program_that_does_not_say_what_its_process_was_started_from_can_be_read() {
    let mut older = serde_json::to_value(gate(7)).unwrap();
    let fields = older.as_object_mut().unwrap();
    assert!(fields.remove("kin").is_some() && fields.remove("touched").is_some());
    assert_eq!(serde_json::from_value::<Gate>(older).unwrap(), gate(7));
    let newer = serde_json::to_string(&Gate { kin: Some(KIN), ..gate(7) }).unwrap();
    assert_eq!(serde_json::from_str::<Gate>(&newer).unwrap().kin, Some(KIN), "to the last bit");
}
