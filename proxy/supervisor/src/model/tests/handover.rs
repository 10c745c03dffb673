//! Gates and refusals that an instance gets from the next one after it has let go.

use std::path::PathBuf;

use tokio::time::Instant;
use warden_policies::{GenerationId, ServerFacts};

use super::script::Role;
use super::*;
use crate::lease::refused::ModelRefusal;
use crate::process::endpoint::ListenAddress;
use crate::process::heir::OpenGate;
use crate::process::needs::AnswerIdentity;
use crate::{ProcessExit, RemainingWork};

/// An instance that has let its processes go.
async fn let_go(change: impl FnOnce(&mut FleetConfig)) -> Rig {
    let rig = Rig::new(|config, _| change(config)).await;
    let (will, frozen) = rig.fleet.handover().prepare_handover(Instant::now()).await.unwrap();
    frozen.complete_handover();
    assert_eq!(will.process_count(), 0);
    rig.fleet.handover().release_processes().await;
    rig
}

fn gate(generation: u64) -> OpenGate {
    OpenGate {
        model: "m".to_owned(),
        generation: GenerationId(generation),
        endpoint: ListenAddress::Unix(PathBuf::from("/run/m.sock")),
        facts: ServerFacts::default(),
        slots: Some(1),
        kin: None,
        touched: false,
    }
}

const KIN: AnswerIdentity = AnswerIdentity { made_of: u64::MAX, but_for_binary: 2, answer_tokens: Some(3) };

#[tokio::test(start_paused = true)]
async fn what_the_next_instances_process_was_started_from_is_known_here_and_told_on() {
    let rig = let_go(|_| {}).await;
    rig.fleet.handover().follow_gates(&[OpenGate { kin: Some(KIN), ..gate(7) }], &[]);
    let lease = rig.lease().await.unwrap();
    assert_eq!((lease.generation(), lease.kin()), (GenerationId(7), Some(KIN)));
    assert_eq!(rig.fleet.handover().open_gates()[0].kin, Some(KIN), "whoever is before us hears it, too");
    // The next instance has got a setting for this process.
    rig.fleet.handover().follow_gates(&[OpenGate { kin: Some(KIN), touched: true, ..gate(7) }], &[]);
    pass(secs(1)).await;
    assert!(lease.kin().is_none() && rig.fleet.handover().open_gates()[0].touched);
    drop(lease);
    rig.fleet.handover().disband().await;
}

#[test]
fn a_gate_of_a_program_that_does_not_say_what_its_process_was_started_from_can_be_read() {
    let mut older = serde_json::to_value(gate(7)).unwrap();
    let fields = older.as_object_mut().unwrap();
    assert!(fields.remove("kin").is_some() && fields.remove("touched").is_some());
    assert_eq!(serde_json::from_value::<OpenGate>(older).unwrap(), gate(7));
    let newer = serde_json::to_string(&OpenGate { kin: Some(KIN), ..gate(7) }).unwrap();
    assert_eq!(serde_json::from_str::<OpenGate>(&newer).unwrap().kin, Some(KIN), "to the last bit");
}

#[tokio::test(start_paused = true)]
async fn who_waits_here_is_turned_away_with_the_next_instances_reason_which_is_told_on() {
    let rig = let_go(|config| config.models.push(spec("n"))).await;
    let waiting = rig.lease_later().await;
    pass(secs(1)).await;
    let why = LeaseDenied::NeverLoaded("too large".to_owned());
    rig.fleet.handover().follow_gates(&[], &[ModelRefusal::now("n", &why).unwrap()]);
    pass(secs(1)).await;
    assert!(!waiting.is_finished(), "that was another model");
    let refused = ModelRefusal::now("m", &why).unwrap();
    // A serving process overrides an earlier refusal.
    rig.fleet.handover().follow_gates(&[gate(7)], std::slice::from_ref(&refused));
    let lease = waiting.await.unwrap().unwrap();
    let waiting = rig.lease_later().await;
    pass(secs(1)).await;
    assert!(!waiting.is_finished(), "it has its turn when the only slot is free");
    rig.fleet.handover().follow_gates(&[], std::slice::from_ref(&refused));
    assert_eq!(waiting.await.unwrap().unwrap_err(), why);
    assert!(rig.fleet.handover().recent_refusals().contains(&refused), "whoever is before us hears it, too");
    drop(lease);
    rig.fleet.handover().disband().await;
}

/// Refusal for `m` while the previous instance reports this remaining work.
async fn told(rig: &Rig, shares: &mut crate::SlotShares, remains: serde_json::Value) -> Option<LeaseDenied> {
    let remains: RemainingWork = serde_json::from_value(remains).unwrap();
    for _ in 0..60 {
        shares.update(&remains);
        pass(secs(1)).await;
        if let [refused] = rig.fleet.handover().recent_refusals().as_slice() {
            return refused.denied();
        }
    }
    None
}

#[tokio::test(start_paused = true)]
async fn the_instance_before_us_is_told_why_nobody_can_be_helped_who_waits_there() {
    let remains = |waiting: usize| serde_json::json!({ "counts": [], "waiting": { "m": waiting } });
    let mut rig = Rig::new(|_, script| {
        script.set_usual(Role::failing(ProcessExit::Code(1), "error: invalid argument: --nonsense"));
    })
    .await;
    let mut shares = rig.fleet.handover().share_slots();
    assert_eq!(told(&rig, &mut shares, serde_json::json!({ "counts": [] })).await, None);
    let denied = told(&rig, &mut shares, remains(1)).await;
    let own = rig.lease().await.unwrap_err();
    assert!(matches!(denied, Some(LeaseDenied::Failed(..) | LeaseDenied::StartFailed(..))), "{denied:?}");
    assert_eq!(denied.map(|denied| denied.to_string()), Some(own.to_string()), "as our own callers");
    // The model is removed while a request still waits there.
    rig.apply(|config| config.models = vec![spec("n")]).await;
    let refused = rig.fleet.handover().recent_refusals();
    assert!(matches!(refused.as_slice(), [one] if one.denied() == Some(LeaseDenied::Removed)), "{refused:?}");
    drop(shares);
    rig.end().await;
}
