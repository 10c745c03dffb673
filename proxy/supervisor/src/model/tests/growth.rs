//! Growth on the host and on a GPU: events, actions, holds, and history.

use warden_policies::growth::GrowthVerdict;
use warden_policies::recycle::{GrowthMode, RecycleHindrance};
use warden_policies::trace;
use warden_policies::{GpuIndex, MemoryKind, Reason, RecycleAction, WorkDone};

use super::script::{Actor, Role};
use super::*;
use crate::view::BackendView;
use crate::{LedgerEntry, ModelView};

const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));
const GIB: u64 = 1024 * MIB;

/// Sends one request with one image, changes the process by `after`, and pauses for a reading.
async fn request(rig: &Rig, after: impl FnOnce(&Actor)) {
    let lease = rig.lease().await.unwrap();
    pass(Duration::from_millis(200)).await;
    lease.add_work(WorkDone { requests: 1, prompt_tokens: 300, output_tokens: 64, images: 1, audio: 0 });
    after(&rig.script.last());
    drop(lease);
    pass(Duration::from_millis(300)).await;
}

fn grows_on_the_gpu(mib: u64) -> impl Fn(&Actor) {
    move |actor| {
        actor.vram.fetch_add(mib * MIB, std::sync::atomic::Ordering::SeqCst);
    }
}

fn on_gpu(script: &Script, sizes: &[u64], processes: usize) {
    script.set_gpus(sizes);
    script.all((0..processes).map(|_| Role { vram: Some(3 * GIB), ..Role::default() }));
}

fn model(rig: &Rig) -> ModelView {
    rig.fleet.view().models[0].as_ref().clone()
}

fn backend(rig: &Rig) -> BackendView {
    model(rig).backends[0].clone()
}

fn verdict(rig: &Rig, series: MemoryKind) -> GrowthVerdict {
    let growth = backend(rig).memory.growth;
    growth.iter().find(|growth| growth.series == series).map(|growth| growth.verdict).unwrap_or_default()
}

fn last(rig: &Rig) -> LedgerEntry {
    rig.ledger().pop().expect("no replacement")
}

#[tokio::test(start_paused = true)]
async fn a_leak_on_the_gpu_is_recycled_by_its_slope_long_before_its_budget() {
    let rig = Rig::new(|config, script| {
        let policy = &mut config.models[0].recycle;
        policy.common.growth = GrowthMode::Recycle;
        policy.vram_hard = mib(30 * 1024);
        on_gpu(script, &[80 * GIB], 2);
    })
    .await;
    for _ in 0..300 {
        request(&rig, grows_on_the_gpu(8)).await;
    }
    pass(secs(5)).await;
    let entry = last(&rig);
    assert_eq!((entry.reason, entry.helped), (Reason::Growth, Some(true)), "{entry:#?}");
    let evidence = &entry.evidence;
    assert_eq!((evidence.series, evidence.verdict), (Some(VRAM), Some(GrowthVerdict::Leaking)));
    assert!(evidence.words.as_ref().unwrap().starts_with("vram0 holds"), "{evidence:#?}");
    let slope = evidence.slope.unwrap().value;
    // The leak is 8 MiB per request.
    assert!((7.5e6..9.3e6).contains(&slope) && evidence.forecast.is_some(), "{evidence:#?}");
    let (before, after) = (entry.vram_before[0].bytes, entry.vram_after[0].bytes);
    assert!(before > 3 * GIB + 100 * MIB && before < 6 * GIB && after == 3 * GIB, "{entry:#?}");
    let exit = entry.vram_after_exit[0];
    assert_eq!(exit.free_after_exit, exit.free_before_spawn, "all of it came back");
    assert!(rig.count("verdict") >= 2 && rig.count("driver_leak") == 0, "{:?}", rig.kinds());
    // The next run gets the history.
    assert!(rig.fleet.state_writer().flush(secs(30)));
    let known = std::fs::read_to_string(rig.config.state_dir.join("growth.json")).unwrap();
    assert!(known.contains("vram0"), "{known}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_process_showed_until_the_end_of_the_fleet_is_remembered() {
    let rig = Rig::new(|_, script| on_gpu(script, &[80 * GIB], 1)).await;
    for _ in 0..300 {
        request(&rig, grows_on_the_gpu(8)).await;
    }
    assert_eq!(verdict(&rig, VRAM), GrowthVerdict::Leaking);
    rig.fleet.shutdown(secs(30)).await;
    assert!(rig.fleet.state_writer().flush(secs(30)));
    let known = std::fs::read_to_string(rig.config.state_dir.join("growth.json")).unwrap();
    assert!(known.contains("vram0"), "{known}");
}

#[tokio::test(start_paused = true)]
async fn a_leak_of_a_tenth_of_mostly_weights_is_helped_and_its_events_speak_of_vram() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.vram_soft = mib(3200);
        on_gpu(script, &[80 * GIB], 2);
    })
    .await;
    drop(rig.lease().await.unwrap());
    pass(secs(1)).await;
    let busy = rig.lease().await.unwrap();
    rig.script.last().set_vram(3 * GIB + 250 * MIB);
    pass(secs(6)).await;
    drop(busy);
    pass(secs(10)).await;
    let entry = last(&rig);
    assert_eq!((entry.reason, entry.helped), (Reason::VramSoft, Some(true)), "{entry:#?}");
    assert!(entry.evidence.words.unwrap().contains("3.0 GiB when it was young"));
    let wanted = rig.events().into_iter().find_map(|(_, kind)| match kind {
        EventKind::RecycleWanted { decision, series_bytes, .. } => Some((decision.series, series_bytes)),
        _ => None,
    });
    assert_eq!(wanted, Some((Some(VRAM), Some(3 * GIB + 250 * MIB))));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_leak_with_its_budget_far_away_says_what_it_waits_for() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.common.growth = GrowthMode::Recycle;
        on_gpu(script, &[8000 * GIB], 1);
    })
    .await;
    for _ in 0..100 {
        request(&rig, grows_on_the_gpu(8)).await;
    }
    pass(secs(5)).await;
    assert_eq!(verdict(&rig, VRAM), GrowthVerdict::Leaking);
    let next = backend(&rig).next.unwrap().decision;
    assert_eq!(
        (next.action, next.reason, next.series),
        (RecycleAction::Observe, Some(Reason::Growth), Some(VRAM))
    );
    assert!(matches!(next.why_not, Some(RecycleHindrance::NotYet { .. })), "{next:?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_mode_that_observes_tells_what_it_would_do_and_does_nothing() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.common.growth = GrowthMode::Observe;
        config.models[0].recycle.vram_hard = mib(30 * 1024);
        on_gpu(script, &[80 * GIB], 1);
    })
    .await;
    for _ in 0..300 {
        request(&rig, grows_on_the_gpu(8)).await;
    }
    pass(secs(10)).await;
    assert_eq!(verdict(&rig, VRAM), GrowthVerdict::Leaking);
    let next = model(&rig).policy.unwrap();
    assert_eq!((next.decision.action, next.decision.reason), (RecycleAction::Observe, Some(Reason::Growth)));
    assert!(matches!(next.decision.why_not, Some(RecycleHindrance::Observing { .. })), "{next:?}");
    let backend = backend(&rig);
    assert_eq!(backend.next.map(|next| next.decision.reason), Some(Some(Reason::Growth)));
    let reasons: Vec<Reason> = backend.memory.forecasts.iter().map(|forecast| forecast.reason).collect();
    assert!(reasons.contains(&Reason::VramHard) && reasons.contains(&Reason::MemoryExhausted), "{reasons:?}");
    assert_eq!((rig.script.children().len(), rig.count("recycle_began")), (1, 0));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_figure_of_vram_its_policy_is_off_and_says_why() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.common.growth = GrowthMode::Recycle;
        config.models[0].recycle.vram_hard = mib(4 * 1024);
        on_gpu(script, &[80 * GIB], 1);
        script.hide_vram("the VRAM policy is off because nobody tells");
    })
    .await;
    for _ in 0..200 {
        request(&rig, grows_on_the_gpu(50)).await;
    }
    pass(secs(10)).await;
    assert_eq!((rig.script.children().len(), rig.count("vram_unknown")), (1, 1));
    let memory = backend(&rig).memory;
    assert_eq!(memory.vram, []);
    assert!(memory.vram_unknown.unwrap().contains("nobody tells"));
    assert!(memory.growth.iter().all(|growth| growth.series == MemoryKind::Host));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn growth_of_host_memory_is_confirmed_page_by_page_before_anything_is_done() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.common.growth = GrowthMode::Recycle;
        config.models[0].recycle.host_hard = mib(8 * 1024);
        config.models[0].command.args.extend(["--cache-ram".to_owned(), "0".to_owned()]);
        script.set_available(100 * GIB);
    })
    .await;
    let grow = |actor: &Actor| {
        let anon = actor.anon() + 8 * MIB;
        actor.set_anon(anon);
        // The exact reading does not show it.
        actor.set_exact(100 * MIB);
    };
    for _ in 0..300 {
        request(&rig, grow).await;
    }
    pass(secs(200)).await;
    assert_eq!(verdict(&rig, MemoryKind::Host), GrowthVerdict::Leaking);
    assert_eq!(rig.count("recycle_began"), 0);
    assert_eq!(backend(&rig).next.unwrap().decision.why_not, Some(RecycleHindrance::NotConfirmed));
    let confirms = rig.script.last().confirms();
    assert!((2..=8).contains(&confirms), "{confirms} slow readings in some minutes");
    let first = rig.script.last();
    first.set_exact(first.anon());
    pass(secs(70)).await;
    let entry = last(&rig);
    assert_eq!((entry.reason, entry.evidence.series), (Reason::Growth, Some(MemoryKind::Host)));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn growth_that_its_pages_do_not_show_stands_before_no_other() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.common.growth = GrowthMode::Recycle;
        config.models[0].recycle.host_hard = mib(4 * 1024);
        config.models[0].recycle.vram_hard = mib(30 * 1024);
        config.models[0].command.args.extend(["--cache-ram".to_owned(), "0".to_owned()]);
        script.set_available(100 * GIB);
        on_gpu(script, &[80 * GIB], 2);
    })
    .await;
    let grow = |actor: &Actor| {
        actor.set_anon(actor.anon() + 8 * MIB);
        actor.set_exact(100 * MIB);
        grows_on_the_gpu(8)(actor);
    };
    for _ in 0..400 {
        request(&rig, grow).await;
        if rig.count("recycle_began") > 0 {
            break;
        }
    }
    pass(secs(10)).await;
    let entry = last(&rig);
    assert_eq!((entry.reason, entry.evidence.series), (Reason::Growth, Some(VRAM)));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_the_server_is_told_to_keep_is_read_from_its_arguments_and_its_log() {
    let rig = Rig::new(|config, script| {
        config.models[0].command.args.extend(["--cache-ram".to_owned(), "2048".to_owned()]);
        script.set_available(100 * GIB);
    })
    .await;
    for _ in 0..60 {
        request(&rig, |actor| actor.set_anon(actor.anon() + 8 * MIB)).await;
    }
    let growth = backend(&rig).memory.growth[0].clone();
    assert!(growth.verdict <= GrowthVerdict::Bounded && growth.fill.allowed >= 2 * GIB, "{growth:#?}");
    let words = backend(&rig).memory.allowance;
    assert!(words.iter().any(|words| words.contains("--cache-ram")), "{words:?}");
    rig.script.last().say("srv  load_model: prompt cache is enabled, size limit: 512 MiB");
    pass(secs(6)).await;
    let fill = backend(&rig).memory.growth[0].fill;
    assert!(fill.allowed < GIB, "the log beats the arguments: {fill:?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_window_of_the_day_holds_what_can_wait() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.host_soft = mib(500);
        config.models[0].recycle.only = "02:00-05:00".parse().unwrap();
        script.set_minute(10 * 60);
    })
    .await;
    drop(rig.lease().await.unwrap());
    rig.script.last().set_anon(600 * MIB);
    pass(secs(4 * 3600)).await;
    assert_eq!((rig.count("recycle_wanted"), rig.count("recycle_began")), (1, 0));
    let why = backend(&rig).next.unwrap().decision.why_not;
    assert_eq!(why, Some(RecycleHindrance::OutsideWindow { minutes_left: 16 * 60 }));
    rig.script.set_minute(2 * 60);
    pass(secs(10)).await;
    assert_eq!(last(&rig).reason, Reason::HostSoft);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn when_a_gpu_is_almost_full_the_process_that_fills_it_is_ended_without_draining() {
    let rig = Rig::new(|_, script| on_gpu(script, &[10 * GIB], 2)).await;
    let busy = rig.lease().await.unwrap();
    pass(secs(6)).await;
    rig.script.last().set_vram(8 * GIB);
    pass(secs(6)).await;
    assert_eq!(rig.count("recycle_began"), 0);
    rig.script.last().set_vram(10 * GIB - 100 * MIB);
    let cut = tokio::time::timeout(secs(10), busy.until_revoked()).await;
    assert!(cut.is_ok(), "its request is cut: {:?}", rig.kinds());
    drop(busy);
    pass(secs(10)).await;
    let entry = last(&rig);
    assert_eq!((entry.reason, entry.cut), (Reason::MemoryExhausted, 1));
    assert!(entry.gap_ms < 10_000, "{entry:#?}");
    let first = &rig.script.children()[0];
    assert_eq!(first.terms.load(std::sync::atomic::Ordering::SeqCst), 1, "asked first");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_ended_in_a_hurry_gets_two_seconds_and_not_ten() {
    let rig = Rig::new(|_, script| {
        script.set_gpus(&[10 * GIB]);
        let stubborn = Role { vram: Some(3 * GIB), term_takes: None, ..Role::default() };
        script.all([stubborn, Role { vram: Some(3 * GIB), ..Role::default() }]);
    })
    .await;
    let busy = rig.lease().await.unwrap();
    pass(secs(6)).await;
    rig.script.last().set_vram(10 * GIB - 100 * MIB);
    busy.until_revoked().await;
    drop(busy);
    pass(Duration::from_millis(1900)).await;
    assert_eq!(rig.script.children().len(), 1);
    pass(Duration::from_millis(300)).await;
    assert_eq!(rig.script.children().len(), 2, "killed after two seconds");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_drain_is_cut_short_when_memory_runs_out_meanwhile() {
    let rig = Rig::new(|config, script| {
        config.models[0].recycle.vram_hard = mib(6 * 1024);
        on_gpu(script, &[10 * GIB], 2);
    })
    .await;
    let busy = rig.lease().await.unwrap();
    pass(secs(6)).await;
    rig.script.last().set_vram(6 * GIB + GIB / 2);
    pass(secs(6)).await;
    assert_eq!(rig.state(), ModelState::Draining);
    rig.script.last().set_vram(10 * GIB - 50 * MIB);
    let cut = tokio::time::timeout(secs(10), busy.until_revoked()).await;
    assert!(cut.is_ok(), "{:?}", rig.kinds());
    drop(busy);
    pass(secs(5)).await;
    assert_eq!(last(&rig).reason, Reason::VramHard);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_recording_replays_to_the_same_verdicts() {
    let rig = Rig::new(|config, script| {
        config.models[0].run.record = true;
        on_gpu(script, &[80 * GIB], 1);
    })
    .await;
    for _ in 0..200 {
        request(&rig, grows_on_the_gpu(8)).await;
    }
    pass(secs(6)).await;
    let told: Vec<(MemoryKind, GrowthVerdict, u64)> = rig
        .events()
        .into_iter()
        .filter_map(|(_, kind)| match kind {
            EventKind::Verdict { growth, request, .. } => Some((growth.series, growth.verdict, request)),
            _ => None,
        })
        .collect();
    assert!(
        told.iter().any(|(series, verdict, _)| (*series, *verdict) == (VRAM, GrowthVerdict::Leaking)),
        "{told:?}"
    );
    assert!(rig.fleet.state_writer().flush(secs(30)));
    let path = rig.config.state_dir.join("traces/m-g1.jsonl");
    let samples = trace::parse_recording(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut monitor = warden_policies::growth::GrowthMonitor::new(&rig.config.growth);
    monitor
        .set_allowance(MemoryKind::Host, warden_policies::declared_memory::DeclaredMemory::default().bytes());
    let turns = samples.iter().flat_map(|sample| monitor.observe(sample));
    let replayed: Vec<_> =
        turns.map(|turn| (turn.growth.series, turn.growth.verdict, turn.request)).collect();
    assert_eq!(told, replayed);
    rig.end().await;
}
