//! A process that logs a crash and does not end: some builds wait for a debugger.

use std::sync::atomic::Ordering;

use tokio::time::Instant;
use warden_policies::{GenerationId, Reason};

use super::script::Role;
use super::*;
use crate::ProcessExit;
use crate::view::event::EventKind;

const LINE: &str = "CUDA error: an illegal instruction was encountered";

/// Time from the crash line to the next process, with the reason of the replacement.
async fn until_the_next(rig: &Rig) -> (Duration, Reason) {
    let logged = Instant::now();
    rig.script.last().say(LINE);
    let lease = loop {
        let lease = rig.lease().await.unwrap();
        if lease.generation() == GenerationId(2) {
            break lease;
        }
        drop(lease);
        pass(Duration::from_millis(20)).await;
    };
    let took = logged.elapsed();
    drop(lease);
    pass(secs(1)).await;
    (took, rig.ledger()[0].reason)
}

#[tokio::test(start_paused = true)]
async fn it_is_replaced_when_its_time_to_end_is_over_and_not_when_three_slow_probes_are_lost() {
    // The crash comes between two probes, and during a probe that would be lost only after ten seconds.
    for after in [secs(1), secs(6)] {
        let rig = Rig::new(|_, _| {}).await;
        drop(rig.lease().await.unwrap());
        rig.script.last().set_deaf(true);
        pass(after).await;
        let (took, reason) = until_the_next(&rig).await;
        assert!(took >= secs(10) && took < secs(11), "{took:?}");
        assert_eq!(reason, Reason::Crashed);
        let told = rig.events().into_iter().find_map(|(_, event)| match event {
            EventKind::Suspect { crash, .. } => crash,
            _ => None,
        });
        assert_eq!(told.as_deref(), Some(LINE));
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_answers_for_a_moment_longer_is_replaced_as_soon() {
    for after in [Duration::from_millis(100), secs(1), Duration::from_millis(2400)] {
        let rig = Rig::new(|_, _| {}).await;
        drop(rig.lease().await.unwrap());
        let first = rig.script.last();
        let deaf = begun(async move {
            pass(after).await;
            first.set_deaf(true);
        });
        let deaf = deaf.await;
        let (took, reason) = until_the_next(&rig).await;
        assert!(took >= secs(10) && took < secs(11), "{took:?} with {after:?}");
        assert_eq!(reason, Reason::Crashed);
        deaf.await.unwrap();
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_that_looks_like_a_crash_is_only_a_text_while_probes_are_answered() {
    let rig = Rig::new(|_, _| {}).await;
    let lease = rig.lease().await.unwrap();
    for _ in 0..300 {
        rig.script.last().say(LINE);
        pass(Duration::from_millis(200)).await;
    }
    assert_eq!((rig.count("suspect"), rig.script.children().len()), (0, 1));
    // Probes that are lost later do not count either.
    pass(secs(5)).await;
    rig.script.last().set_deaf(true);
    pass(secs(20)).await;
    assert_eq!(rig.count("suspect"), 0);
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_still_gives_tokens_has_not_crashed() {
    let rig = Rig::new(|_, _| {}).await;
    let lease = rig.lease().await.unwrap();
    rig.script.last().set_deaf(true);
    rig.script.last().say(LINE);
    for _ in 0..120 {
        lease.note_events(1);
        pass(secs(1)).await;
    }
    assert_eq!(rig.count("suspect"), 0);
    drop(lease);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_a_drain_of_what_has_crashed() {
    for before in [false, true] {
        let rig = Rig::new(|_, _| {}).await;
        let held = rig.lease().await.unwrap();
        let old = rig.script.last();
        old.set_deaf(true);
        if before {
            old.say(LINE);
        }
        let restart = rig.restart_later().await;
        pass(secs(1)).await;
        let logged = Instant::now();
        if !before {
            old.say(LINE);
        }
        held.until_revoked().await;
        assert!(logged.elapsed() < secs(11), "{:?}", logged.elapsed());
        assert_eq!(old.terms.load(Ordering::SeqCst), 1);
        drop(held);
        assert_eq!(restart.await.unwrap().unwrap()[0].to, Some(GenerationId(2)));
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn whose_process_died_is_not_told_that_it_was_stopped() {
    for stopped in [false, true] {
        let rig = Rig::new(|_, script| {
            script.next(Role { term_takes: Some(Duration::ZERO), ..Role::default() });
        })
        .await;
        let held = rig.lease().await.unwrap();
        assert!(!held.was_stopped());
        if stopped {
            rig.fleet.shutdown(Duration::ZERO).await;
        } else {
            rig.script.last().dies_after(Duration::ZERO, ProcessExit::Signal(11));
        }
        held.until_revoked().await;
        assert_eq!(held.was_stopped(), stopped);
        drop(held);
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_is_not_cut_short_by_a_line_while_probes_are_answered() {
    let rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    let restart = rig.restart_later().await;
    for _ in 0..60 {
        rig.script.children()[0].say(LINE);
        pass(secs(1)).await;
    }
    assert_eq!(rig.script.children()[0].terms.load(Ordering::SeqCst), 0);
    drop(held);
    assert_eq!(restart.await.unwrap().unwrap()[0].cut, 0);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_answers_no_probe_and_moves_no_token_gets_the_short_drain_of_a_crash() {
    for drains in [false, true] {
        let rig = Rig::new(|_, _| {}).await;
        let held = rig.lease().await.unwrap();
        let old = rig.script.last();
        let restart = if drains { Some(rig.restart_later().await) } else { None };
        pass(secs(1)).await;
        let stopped = Instant::now();
        old.set_deaf(true);
        held.until_revoked().await;
        // Three probes of ten seconds, the minute for a swapping process, and the ten seconds of a crash.
        assert!(stopped.elapsed() < secs(125), "{:?}, in a drain: {drains}", stopped.elapsed());
        drop(held);
        if let Some(restart) = restart {
            assert_eq!(restart.await.unwrap().unwrap()[0].to, Some(GenerationId(2)));
        }
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_process_that_answers_again_has_all_the_time_of_a_drain() {
    let rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    let old = rig.script.last();
    old.set_deaf(true);
    while rig.count("draining") == 0 {
        pass(secs(1)).await;
    }
    pass(secs(3)).await;
    old.set_deaf(false);
    let well = Instant::now();
    pass(secs(250)).await;
    assert_eq!(old.terms.load(Ordering::SeqCst), 0, "it answers probes");
    held.until_revoked().await;
    assert!(well.elapsed() > secs(290), "{:?}", well.elapsed());
    drop(held);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_gap_of_a_process_that_did_not_answer_is_told_whole() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    rig.script.last().set_deaf(true);
    while rig.count("suspect") == 0 {
        pass(secs(1)).await;
    }
    let closed = Instant::now();
    drop(rig.lease().await.unwrap());
    let outage = u64::try_from(closed.elapsed().as_millis()).unwrap();
    pass(secs(1)).await;
    let entry = &rig.ledger()[0];
    assert_eq!(entry.reason, Reason::Unresponsive);
    assert!(outage >= 58_000 && entry.gap_ms >= outage, "{outage} ms, {entry:?}");
    assert!(entry.ours_ms.is_some_and(|ours| ours < 1000), "the minute was not ours: {entry:?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_model_that_was_meant_to_have_no_process_had_no_outage() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    rig.fleet.drain("m").await.unwrap();
    pass(secs(3600)).await;
    rig.fleet.restart("m").await.unwrap();
    let gap = rig.ledger()[0].gap_ms;
    assert!(gap < 60_000, "{gap}");
    rig.end().await;
}
