//! Processes that answer probes but show symptoms.

use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::Reason;
use warden_policies::health::SlotActivity;
use warden_policies::quarantine::{self, RequestFingerprint};
use warden_sensors::ProcessRunState;
use warden_sensors::gpu::GpuFault;

use super::script::Role;
use super::*;
use crate::{ExchangeOutcome, SentRequest, SolitudeResult};

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
    let failed = ExchangeOutcome { status: Some(500), compute_error: true, ..ExchangeOutcome::default() };
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

/// A prompt with this many bytes, sent whole.
struct Text(u64);

impl SentRequest for Text {
    fn is_whole(&self) -> bool {
        true
    }
    fn bytes(&self) -> u64 {
        self.0
    }
    fn media_count(&self) -> u64 {
        0
    }
    fn fingerprint(&self) -> Option<RequestFingerprint> {
        Some(RequestFingerprint(u128::from(self.0)))
    }
}

/// A stream that has received some tokens, one every 50 ms, and waits for the next.
async fn streaming(rig: &Rig) -> Lease {
    let lease = rig.lease().await.unwrap();
    lease.note_sent(Arc::new(Text(300)), true);
    lease.note_answered(true, true);
    for _ in 0..20 {
        lease.note_waiting(Instant::now());
        pass(Duration::from_millis(50)).await;
        lease.note_events(1);
    }
    lease.note_waiting(Instant::now());
    lease
}

const WORKS: SlotActivity = SlotActivity { busy: 1, mark: 1 };

async fn with_slots() -> Rig {
    let role = Role { work: Some(WORKS), ..Role::default() };
    Rig::new(|_, script| script.all([role.clone(), role])).await
}

#[tokio::test(start_paused = true)]
async fn a_wedged_process_is_found_by_its_own_pace_drained_and_ended_after_the_same_time_again() {
    let rig = with_slots().await;
    let wedged = streaming(&rig).await;
    let stalled = Instant::now();
    rig.script.last().set_work(None);
    let cut = tokio::time::timeout(secs(400), wedged.until_revoked()).await;
    assert!(cut.is_ok(), "{:?}", rig.kinds());
    let took = stalled.elapsed();
    assert!(took < secs(70), "the drain was waited for: {took:?}");
    // The gateway does this with a revoked request.
    wedged.report_lost(RequestFingerprint(300));
    drop(wedged);
    pass(secs(10)).await;
    let model = ModelName::new("m");
    assert_eq!(
        rig.fleet.request_standing(&model, RequestFingerprint(300)),
        quarantine::RequestStanding::Suspect,
        "it may hang in this request"
    );
    assert_eq!((unwell(&rig), rig.ledger()[0].reason), (vec![Reason::Wedged], Reason::Wedged));
    let words = rig.ledger()[0].evidence.words.clone().unwrap();
    assert!(words.contains("nothing has moved for 2") && words.contains("99 of 100 tokens"), "{words}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_in_which_its_server_hangs_twice_is_refused_also_if_its_client_does_not_wait() {
    for patient in [true, false] {
        let role = Role { work: Some(WORKS), ..Role::default() };
        let mut rig =
            Rig::new(|_, script| script.all([role.clone(), role.clone(), role.clone(), role])).await;
        let (model, print) = (ModelName::new("m"), RequestFingerprint(300));
        for time in 0..2 {
            let stuck = streaming(&rig).await;
            if time == 1 {
                assert_eq!(stuck.wait_alone(print).await, SolitudeResult::Granted);
            }
            rig.script.last().set_work(None);
            if patient {
                stuck.until_revoked().await;
                stuck.report_lost(print);
                drop(stuck);
            } else {
                // The process was found wedged and drains: the request leaves now.
                let drains = async {
                    while rig.count("draining") <= time {
                        pass(secs(1)).await;
                    }
                };
                assert!(tokio::time::timeout(secs(3600), drains).await.is_ok(), "{:?}", rig.kinds());
                drop(stuck);
            }
            pass(secs(60)).await;
            let standing = rig.fleet.request_standing(&model, print);
            let right = match time {
                0 => standing == quarantine::RequestStanding::Suspect,
                _ => matches!(standing, quarantine::RequestStanding::Refused { .. }),
            };
            assert!(right, "patient {patient}, time {time}: {standing:?} {:?}", rig.kinds());
        }
        // Another start with the same command changes nothing; other arguments may help.
        rig.apply(|config| config.models[0].command.args.push("--no-mmap".to_owned())).await;
        pass(secs(60)).await;
        let released = (rig.count("requests_released"), rig.fleet.request_standing(&model, print));
        assert_eq!(released, (1, quarantine::RequestStanding::Clear), "{:?}", rig.kinds());
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_moves_and_what_waits_for_somebody_else_is_not_wedged() {
    for case in 0..5 {
        let rig = with_slots().await;
        let lease = streaming(&rig).await;
        let process = rig.script.last();
        process.set_work(None);
        for round in 0..100 {
            pass(secs(5)).await;
            match case {
                // The process generates a token from time to time.
                0 => lease.note_events(u64::from(round % 3 == 0)),
                // The process generates tokens of a tool call without events.
                1 => process.set_work(Some(SlotActivity { mark: round, ..WORKS })),
                // The client does not read, so the last data is still on its way.
                2 if round == 0 => lease.note_events(1),
                // The process is stopped (SIGSTOP).
                3 => process.set_standing(ProcessRunState { stopped: true, major_faults: 0 }),
                // The machine swaps.
                4 => process.set_standing(ProcessRunState { stopped: false, major_faults: round * 5000 }),
                _ => {}
            }
            if case != 2 {
                lease.note_waiting(Instant::now());
            }
        }
        assert_eq!((unwell(&rig), rig.script.children().len()), (Vec::new(), 1), "case {case}");
        drop(lease);
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn comments_on_a_stream_are_a_sign_of_life_and_none_of_work() {
    let rig = with_slots().await;
    let lease = streaming(&rig).await;
    rig.script.last().set_work(None);
    for _ in 0..12 {
        pass(secs(5)).await;
        lease.note_progress();
        lease.note_events(0);
        lease.note_waiting(Instant::now());
    }
    assert_eq!(unwell(&rig), [Reason::Wedged]);
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_sleeps_is_asked_for_its_counters_only_while_it_works() {
    let rig = Rig::new(|config, _| {
        config.models[0].command.args.extend(["--metrics", "--sleep-idle-seconds", "60"].map(str::to_owned));
    })
    .await;
    let lease = rig.lease().await.unwrap();
    rig.script.last().set_decodes(7);
    pass(secs(60)).await;
    let busy = rig.script.last().metrics_asked();
    assert!(busy >= 10, "{busy}");
    drop(lease);
    pass(secs(1)).await;
    let left = rig.script.last().metrics_asked();
    pass(secs(300)).await;
    assert_eq!(rig.script.last().metrics_asked(), left);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_ends_a_gpu_replaces_those_who_use_it_and_only_a_new_one_does() {
    let rig = Rig::new(|_, script| {
        script.set_gpus(&[80 << 30]);
        script.all((0..2).map(|_| Role { vram: Some(3 << 30), ..Role::default() }));
        script.fault(GpuFault::Xid(Some(79)));
    })
    .await;
    drop(rig.lease().await.unwrap());
    pass(secs(30)).await;
    assert_eq!(rig.count("recycle_began"), 0, "that was before its time");
    assert_eq!(rig.fleet.view().devices[0].xid, Some(79));
    rig.script.fault(GpuFault::Xid(Some(31)));
    pass(secs(30)).await;
    assert_eq!(rig.count("recycle_began"), 0, "one program's own fault");
    rig.script.fault(GpuFault::Xid(Some(79)));
    pass(secs(10)).await;
    assert_eq!(rig.ledger()[0].reason, Reason::DeviceFault);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_gpu_that_is_lost_takes_its_figures_with_it_and_still_replaces_those_who_used_it() {
    for fault in [GpuFault::Xid(Some(79)), GpuFault::Lost] {
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
