//! Processes that answer probes and are ill all the same.

use warden_policies::Reason;
use warden_sensors::gpu::Fault;

use super::script::Role;
use super::*;
use crate::Outcome;

fn unwell(rig: &Rig) -> Vec<Reason> {
    let reason = |(_, kind)| match kind {
        EventKind::Unwell { reason, .. } => Some(reason),
        _ => None,
    };
    rig.events().into_iter().filter_map(reason).collect()
}

#[tokio::test(start_paused = true)]
async fn a_process_that_answers_nothing_but_compute_errors_is_replaced() {
    let rig = Rig::new(|_, _| {}).await;
    let failed = Outcome { status: Some(500), compute_error: true, ..Outcome::default() };
    let enough = defaults().health.compute_errors;
    for _ in 1..enough {
        rig.lease().await.unwrap().note_outcome(&failed);
    }
    pass(secs(30)).await;
    assert_eq!((unwell(&rig), rig.script.children().len()), (Vec::new(), 1));
    let health = rig.fleet.view().models[0].backends[0].health;
    assert_eq!(health.compute_errors, enough - 1);
    rig.lease().await.unwrap().note_outcome(&failed);
    pass(secs(10)).await;
    assert_eq!(unwell(&rig), [Reason::ComputeErrors]);
    let entry = &rig.ledger()[0];
    assert_eq!((entry.reason, entry.helped), (Reason::ComputeErrors, None));
    assert!(entry.evidence.words.as_ref().unwrap().contains("computing failed"), "{entry:#?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_wedged_process_is_drained_and_ends_by_the_deadline() {
    let rig = Rig::new(|_, _| {}).await;
    let wedged = rig.lease().await.unwrap();
    rig.script.last().set_decodes(7);
    let patience = defaults().health.wedged_after;
    pass(patience.saturating_sub(secs(30))).await;
    assert_eq!(rig.count("recycle_began"), 0);
    assert!(rig.fleet.view().models[0].backends[0].health.stalled_for.is_some());
    let cut = tokio::time::timeout(secs(400), wedged.revoked()).await;
    assert!(cut.is_ok(), "{:?}", rig.kinds());
    drop(wedged);
    pass(secs(5)).await;
    assert_eq!((unwell(&rig), rig.ledger()[0].reason), (vec![Reason::Wedged], Reason::Wedged));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn bytes_or_its_own_counter_show_that_it_is_not_wedged() {
    let rig = Rig::new(|_, _| {}).await;
    let slow = rig.lease().await.unwrap();
    for minute in 0..60 {
        pass(secs(60)).await;
        if minute < 30 {
            slow.note_progress(1);
        } else {
            // A long prompt, of which the counter tells.
            rig.script.last().set_decodes(minute);
        }
    }
    assert_eq!((unwell(&rig), rig.script.children().len()), (Vec::new(), 1));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_ends_a_gpu_replaces_those_who_use_it_and_only_a_new_one_does() {
    let rig = Rig::new(|_, script| {
        script.set_gpus(&[80 << 30]);
        script.all((0..2).map(|_| Role { vram: Some(3 << 30), ..Role::default() }));
        script.fault(Fault::Xid(Some(79)));
    })
    .await;
    drop(rig.lease().await.unwrap());
    pass(secs(30)).await;
    assert_eq!(rig.count("recycle_began"), 0, "that was before its time");
    assert_eq!(rig.fleet.view().devices[0].xid, Some(79));
    rig.script.fault(Fault::Xid(Some(31)));
    pass(secs(30)).await;
    assert_eq!(rig.count("recycle_began"), 0, "one program's own fault");
    rig.script.fault(Fault::Xid(Some(79)));
    pass(secs(10)).await;
    assert_eq!(rig.ledger()[0].reason, Reason::DeviceFault);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_is_lost_takes_its_figures_with_it_and_still_replaces_those_who_used_it() {
    for fault in [Fault::Xid(Some(79)), Fault::Lost] {
        let rig = Rig::new(|_, script| {
            script.set_gpus(&[80 << 30]);
            script.all((0..2).map(|_| Role { vram: Some(3 << 30), ..Role::default() }));
        })
        .await;
        drop(rig.lease().await.unwrap());
        pass(secs(30)).await;
        rig.script.hide_vram("the VRAM policy is off because the GPU is lost");
        rig.script.fault(fault);
        pass(secs(10)).await;
        assert_eq!(rig.ledger()[0].reason, Reason::DeviceFault, "{fault:?}");
        rig.end().await;
    }
}
