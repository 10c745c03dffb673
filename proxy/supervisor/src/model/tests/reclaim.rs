//! Reclaim before a replacement and by an operator.

use warden_policies::reclaim::ReclaimOutcome;
use warden_policies::recycle::RecycleHindrance;
use warden_policies::{Reason, RecycleAction, WorkDone};

use super::script::{Gives, Role};
use super::*;
use crate::ReclaimEntry;
use crate::process::group::ProcessExit;

fn big() -> u64 {
    600 * MIB
}

/// Frees memory down to `anon` within a second.
const fn down_to(anon: u64) -> Gives {
    Gives { takes: secs(1), outcome: ReclaimOutcome::Done, anon, vram: None }
}

const SILENT: Gives = Gives { takes: secs(0), outcome: ReclaimOutcome::NoAnswer, anon: 0, vram: None };

/// A process of 100 MiB under a soft budget of 500 MiB.
async fn soft(gives: Option<Gives>) -> Rig {
    let rig = Rig::new(|config, _| config.models[0].recycle.host_soft = mib(500)).await;
    drop(rig.lease().await.unwrap());
    rig.script.last().set_gives(gives);
    pass(secs(10)).await;
    rig
}

impl Rig {
    fn reclaims(&self) -> Vec<ReclaimEntry> {
        let text = self.ledger_text();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    async fn reclaim_later(&self) -> AbortOnDropHandle<Result<Vec<ReclaimEntry>, ControlError>> {
        let fleet = self.fleet.clone();
        begun(async move { fleet.reclaim("m").await }).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_leak_that_goes_back_saws_below_its_budget_and_nothing_is_replaced() {
    let rig = soft(Some(down_to(110 * MIB))).await;
    let busy = rig.lease().await.unwrap();
    for round in 1..=4 {
        rig.script.last().set_anon(big());
        pass(secs(20)).await;
        assert_eq!(rig.script.last().anon(), 110 * MIB, "a request in flight is no hindrance");
        assert_eq!(rig.script.last().asked_back(), round);
        pass(secs(60)).await;
    }
    drop(busy);
    pass(secs(60)).await;
    assert_eq!((rig.count("recycle_began"), rig.count("reclaimed"), rig.ledger().len()), (0, 4, 0));
    let entries = rig.reclaims();
    let entry = &entries[0];
    assert_eq!(
        (entry.reason, entry.outcome, entry.helped),
        (Reason::HostSoft, ReclaimOutcome::Done, Some(true))
    );
    assert_eq!((entry.given.heap, entry.ms, entry.generation), (490 * MIB, 7, GenerationId(1)));
    assert_eq!((entry.host_before.unwrap().anon, entry.host_after.unwrap().anon), (big(), 110 * MIB));
    let view = rig.fleet.view();
    let shown = &view.models[0].backends[0].reclaim;
    assert_eq!((shown.count, shown.asking, shown.last.as_ref()), (4, false, entries.last()));
    assert_eq!(view.models[0].reclaims.counts, [(ReclaimOutcome::Done, 4)]);
    assert_eq!(view.models[0].reclaims.given.heap, 4 * 490 * MIB);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_does_not_come_back_is_replaced_as_soon_as_that_is_known_and_not_asked_again() {
    let rig = soft(Some(down_to(550 * MIB))).await;
    rig.script.last().set_anon(big());
    pass(secs(12)).await;
    assert_eq!((rig.count("reclaimed"), rig.count("recycle_began")), (1, 1));
    pass(secs(5)).await;
    let entry = &rig.ledger()[0];
    let words = entry.evidence.words.as_deref().unwrap();
    assert!(words.contains("50.0 MiB were not enough"), "{words}");
    assert_eq!(rig.reclaims()[0].helped, Some(false));
    assert_eq!(entry.helped, Some(true));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn who_cannot_be_asked_or_is_silent_is_replaced_all_the_same() {
    let rig = soft(None).await;
    rig.script.last().set_anon(big());
    pass(secs(10)).await;
    assert_eq!(
        (rig.count("reclaimed"), rig.ledger().len(), rig.script.children()[0].asked_back()),
        (0, 1, 0)
    );
    rig.end().await;

    let rig = soft(Some(SILENT)).await;
    rig.script.last().set_anon(big());
    pass(secs(8)).await;
    let next = rig.fleet.view().models[0].backends[0].next.clone().unwrap();
    assert_eq!(next.decision.why_not, Some(RecycleHindrance::Reclaiming));
    assert_eq!(rig.count("recycle_began"), 0);
    pass(secs(30)).await;
    assert_eq!((rig.ledger().len(), rig.reclaims()[0].outcome), (1, ReclaimOutcome::NoAnswer));
    let words = rig.ledger()[0].evidence.words.clone().unwrap();
    assert!(words.contains("did not answer in time"), "{words}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn at_the_hard_budget_a_drain_comes_no_later_than_by_the_short_limit() {
    let rig = Rig::new(|config, _| config.models[0].recycle.host_hard = mib(500)).await;
    drop(rig.lease().await.unwrap());
    rig.script.last().set_gives(Some(Gives { takes: secs(3600), ..down_to(0) }));
    pass(secs(10)).await;
    rig.script.last().set_anon(big());
    pass(secs(5)).await;
    assert_eq!(rig.script.last().asked_back(), 1);
    assert_eq!(rig.count("recycle_began"), 0);
    let limit = defaults().recycle.reclaim_limit_hard;
    pass(limit + secs(1)).await;
    assert_eq!(rig.count("recycle_began"), 1);
    // An answer of the old process is ignored.
    pass(secs(4000)).await;
    assert_eq!((rig.ledger().len(), rig.reclaims().len()), (1, 1));
    assert_eq!(rig.reclaims()[0].outcome, ReclaimOutcome::NoAnswer);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn without_policy_reclaim_nobody_is_asked_and_nobody_is_told_where() {
    let rig = Rig::new(|config, _| {
        config.models[0].recycle.host_soft = mib(500);
        config.models[0].recycle.common.reclaim = false;
    })
    .await;
    drop(rig.lease().await.unwrap());
    let child = rig.script.last();
    let told = |child: &script::Actor| {
        child.request.command.env.iter().any(|(name, _)| name == "LLAMA_WARDEN_RECLAIM")
    };
    assert!(!told(&child));
    let error = rig.fleet.reclaim("m").await.unwrap_err();
    assert!(error.to_string().contains("`policy.reclaim` is off"), "{error}");
    child.set_gives(Some(down_to(0)));
    child.set_anon(big());
    pass(secs(20)).await;
    assert_eq!((rig.ledger().len(), child.asked_back()), (1, 0));
    rig.end().await;
    let rig = soft(None).await;
    assert!(told(&rig.script.last()));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_operator_asks_all_processes_and_gets_an_entry_for_each() {
    let rig = Rig::new(|config, _| config.models[0].run.replicas = 2).await;
    let (one, two) = (rig.lease().await.unwrap(), rig.lease().await.unwrap());
    let third = rig.lease().await.unwrap();
    assert!(rig.script.children().len() == 2);
    drop((one, two, third));
    for child in rig.script.children() {
        child.set_gives(Some(down_to(50 * MIB)));
    }
    pass(secs(10)).await;
    let entries = rig.fleet.reclaim("m").await.unwrap();
    let facts: Vec<_> = entries.iter().map(|entry| (entry.replica, entry.reason, entry.helped)).collect();
    assert_eq!(facts, [(0, Reason::Operator, None), (1, Reason::Operator, None)]);
    assert!(entries.iter().all(|entry| entry.host_after.unwrap().anon == 50 * MIB));
    assert_eq!(rig.reclaims(), entries);
    // Two operators at the same time are answered by one request.
    let (first, second) = (rig.reclaim_later().await, rig.reclaim_later().await);
    let (first, second) = (first.await.unwrap().unwrap(), second.await.unwrap().unwrap());
    assert_eq!(first, second);
    assert_eq!(rig.script.children()[0].asked_back(), 2);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_operator_is_told_why_nobody_can_be_asked() {
    let rig = Rig::new(|_, _| {}).await;
    let error = rig.fleet.reclaim("m").await.unwrap_err();
    assert!(error.to_string().contains("no process of it serves now"), "{error}");
    drop(rig.lease().await.unwrap());
    pass(secs(10)).await;
    let error = rig.fleet.reclaim("m").await.unwrap_err();
    assert!(error.to_string().contains("its build cannot be asked"), "{error}");
    assert!(rig.fleet.reclaim("x").await.is_err());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_operator_who_waits_is_answered_when_the_process_dies_is_drained_or_everything_ends() {
    let slow = Gives { takes: secs(3600), ..down_to(0) };
    let rig = soft(Some(slow)).await;
    let waiting = rig.reclaim_later().await;
    rig.script.last().crash();
    let entries = waiting.await.unwrap().unwrap();
    assert_eq!((entries[0].outcome, entries[0].host_after), (ReclaimOutcome::NoAnswer, None));
    // The answer of the dead process comes while another one serves.
    drop(rig.lease().await.unwrap());
    rig.script.last().set_gives(Some(slow));
    pass(secs(10)).await;
    let waiting = rig.reclaim_later().await;
    rig.fleet.drain("m").await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap()[0].outcome, ReclaimOutcome::NoAnswer);
    drop(rig.lease().await.unwrap());
    rig.script.last().set_gives(Some(slow));
    pass(secs(10)).await;
    let waiting = rig.reclaim_later().await;
    let (fleet, script) = (rig.fleet.clone(), rig.script.clone());
    fleet.shutdown(secs(30)).await;
    script.assert_all_reaped();
    assert_eq!(waiting.await.unwrap().unwrap()[0].outcome, ReclaimOutcome::NoAnswer);
    assert_eq!(rig.fleet.reclaim("m").await.unwrap_err(), ControlError::ShuttingDown);
}

#[tokio::test(start_paused = true)]
async fn a_drain_in_the_middle_goes_its_way_and_a_late_answer_still_has_its_entry() {
    let rig = soft(Some(Gives { takes: secs(3), ..down_to(100 * MIB) })).await;
    let busy = rig.lease().await.unwrap();
    let waiting = rig.reclaim_later().await;
    pass(secs(1)).await;
    let restart = rig.restart_later().await;
    pass(secs(10)).await;
    assert_eq!(waiting.await.unwrap().unwrap()[0].outcome, ReclaimOutcome::Done, "it drains, and can answer");
    drop(busy);
    assert_eq!(restart.await.unwrap().unwrap().len(), 1);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn memory_that_is_almost_gone_is_not_asked_for() {
    let rig = Rig::new(|_, script| {
        script.next(Role { anon: 100 * MIB, ..Role::default() });
    })
    .await;
    drop(rig.lease().await.unwrap());
    let child = rig.script.last();
    child.set_gives(Some(down_to(0)));
    pass(secs(10)).await;
    child.set_anon(3 << 30);
    rig.script.set_available(64 * MIB);
    pass(secs(10)).await;
    assert_eq!(child.asked_back(), 0);
    assert_eq!(rig.count("recycle_began"), 1);
    child.dies_after(Duration::ZERO, ProcessExit::Signal(9));
    rig.script.set_available(0);
    pass(secs(10)).await;
    assert_eq!(rig.ledger()[0].reason, Reason::MemoryExhausted);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn growth_that_was_given_back_rests_and_is_still_called_a_leak() {
    let rig = Rig::new(|config, _| {
        let nothing_kept = ["--cache-ram", "0", "--ctx-checkpoints", "0"];
        config.models[0].command.args.extend(nothing_kept.map(str::to_owned));
        config.models[0].recycle.host_soft = mib(2000);
        config.models[0].recycle.common.growth = warden_policies::recycle::GrowthMode::Recycle;
    })
    .await;
    drop(rig.lease().await.unwrap());
    let child = rig.script.last();
    child.set_gives(Some(Gives { takes: Duration::from_millis(100), ..down_to(120 * MIB) }));
    let mut rested = false;
    let mut asked_at = Vec::new();
    for request in 0..600_u64 {
        let lease = rig.lease().await.unwrap();
        lease.add_work(WorkDone { requests: 1, prompt_tokens: 300, output_tokens: 64, images: 0, audio: 0 });
        child.set_anon(child.anon() + 4 * MIB);
        drop(lease);
        pass(secs(3)).await;
        let next = rig.fleet.view().models[0].backends[0].next.clone();
        if let Some(RecycleHindrance::Reclaimed { .. }) = next.and_then(|next| next.decision.why_not) {
            rested = true;
        }
        if asked_at.len() < child.asked_back() as usize {
            asked_at.push(request);
        }
    }
    let verdict = rig.fleet.view().models[0].backends[0].memory.growth[0].clone();
    assert!(verdict.verdict.leaks(), "{verdict:?} {asked_at:?}");
    let slope = verdict.slope.unwrap().value / warden_policies::units::as_f64(MIB);
    assert!((3.0..6.5).contains(&slope), "{slope}");
    assert!(rested && asked_at.len() >= 2, "{asked_at:?}");
    assert_eq!((rig.count("recycle_began"), rig.script.children().len()), (0, 1));
    assert_eq!(
        rig.fleet.view().models[0].backends[0].next.as_ref().unwrap().decision.action,
        RecycleAction::Observe
    );
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn growth_that_rests_hides_no_share_of_requests() {
    let rig = Rig::new(|config, _| {
        let nothing_kept = ["--cache-ram", "0", "--ctx-checkpoints", "0"];
        config.models[0].command.args.extend(nothing_kept.map(str::to_owned));
        config.models[0].recycle.host_soft = mib(2000);
        config.models[0].recycle.max_requests = Some(500);
        config.models[0].recycle.common.growth = warden_policies::recycle::GrowthMode::Recycle;
    })
    .await;
    drop(rig.lease().await.unwrap());
    let child = rig.script.last();
    child.set_gives(Some(Gives { takes: Duration::from_millis(100), ..down_to(120 * MIB) }));
    for _ in 0..520_u64 {
        let lease = rig.lease().await.unwrap();
        lease.add_work(WorkDone { requests: 1, prompt_tokens: 300, output_tokens: 64, images: 0, audio: 0 });
        child.set_anon(child.anon() + 4 * MIB);
        drop(lease);
        pass(secs(3)).await;
    }
    pass(secs(60)).await;
    assert!(child.asked_back() >= 1, "it has given memory back, and rests");
    assert_eq!(rig.ledger()[0].reason, Reason::MaxRequests);
    rig.end().await;
}
