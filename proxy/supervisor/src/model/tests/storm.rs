//! Random events in any order: requests that are served, cut or given up, operators, reloads, crashes,
//! hangs, processes that do not start or do not end. Invariants: every request is answered, no lease is
//! granted on a stopped process, the shutdown is in time and no process is left.

use std::sync::Arc;

use proptest::prelude::*;
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_policies::recycle::GrowthMode;
use warden_sensors::gpu::GpuFault;

use super::script::{Actor, Role};
use super::*;
use crate::ExchangeOutcome;
use crate::process::group::ProcessExit;

#[derive(Clone, Debug)]
enum Op {
    Pass(u64),
    /// Holds a lease for so many milliseconds.
    Request(u64),
    /// Leaves after so many milliseconds, served or not.
    Impatient(u64),
    Refused,
    Restart,
    Drain,
    Command(u8),
    Replicas(u32),
    Remove,
    Way(bool),
    Crash(usize),
    Deaf(usize, bool),
    Grow(usize),
    /// VRAM of a process, in GiB.
    Gpu(usize, u64),
    /// VRAM becomes unknown.
    Blind,
    Xid(u64),
    /// Number of answers with a compute error.
    Errors(u32),
    Growth(u8),
    Say(usize),
    Next(Fate),
}

#[derive(Clone, Copy, Debug)]
enum Fate {
    Fails,
    CannotSpawn,
    SpawnsSlowly,
    NeverReady,
    IgnoresTerm,
    DiesSoon,
}

fn op() -> impl Strategy<Value = Op> {
    let fate = prop_oneof![
        Just(Fate::Fails),
        Just(Fate::CannotSpawn),
        Just(Fate::SpawnsSlowly),
        Just(Fate::NeverReady),
        Just(Fate::IgnoresTerm),
        Just(Fate::DiesSoon),
    ];
    prop_oneof![
        8 => prop_oneof![0u64..20, 0u64..2000, 0u64..30_000].prop_map(Op::Pass),
        8 => (0u64..4000).prop_map(Op::Request),
        4 => (0u64..400).prop_map(Op::Impatient),
        1 => Just(Op::Refused),
        4 => Just(Op::Restart),
        2 => Just(Op::Drain),
        2 => (0u8..3).prop_map(Op::Command),
        1 => (1u32..4).prop_map(Op::Replicas),
        1 => Just(Op::Remove),
        1 => any::<bool>().prop_map(Op::Way),
        3 => any::<usize>().prop_map(Op::Crash),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(n, deaf)| Op::Deaf(n, deaf)),
        2 => any::<usize>().prop_map(Op::Grow),
        3 => (any::<usize>(), 1u64..81).prop_map(|(n, gib)| Op::Gpu(n, gib)),
        1 => Just(Op::Blind),
        1 => prop_oneof![Just(31u64), Just(79)].prop_map(Op::Xid),
        1 => (1u32..12).prop_map(Op::Errors),
        1 => (0u8..3).prop_map(Op::Growth),
        1 => any::<usize>().prop_map(Op::Say),
        3 => fate.prop_map(Op::Next),
    ]
}

fn role(fate: Fate) -> Role {
    let good = Role { vram: Some(1 << 30), ..Role::default() };
    match fate {
        Fate::Fails => Role::failing(ProcessExit::Code(1), "something odd"),
        Fate::CannotSpawn => Role { cannot_spawn: true, ..good },
        Fate::SpawnsSlowly => Role { spawn_takes: secs(3), ..good },
        Fate::NeverReady => Role { ready_after: secs(99_999), ..good },
        Fate::IgnoresTerm => Role { term_takes: None, ..good },
        Fate::DiesSoon => Role { dies: Some((Duration::from_millis(700), ProcessExit::Signal(11))), ..good },
    }
}

/// Process of a generation, by the number in its socket's name.
fn actor(rig: &Script, generation: GenerationId) -> Arc<Actor> {
    let ends = format!("-{generation}.sock");
    let of = |child: &Arc<Actor>| child.request.command.args.last().unwrap().ends_with(&ends);
    rig.children().into_iter().find(of).unwrap()
}

async fn storm(ops: Vec<Op>, calm: bool) {
    let mut rig = Rig::new(|config, script| {
        let model = &mut config.models[0];
        model.requests.queue.wait = secs(60);
        model.requests.queue.depth = 6;
        model.recycle.host_soft = mib(500);
        model.recycle.host_hard = mib(900);
        model.lifecycle.start_timeout = secs(20);
        model.lifecycle.drain_deadline = secs(8);
        model.lifecycle.suspect_timeout = secs(10);
        model.lifecycle.probe_timeout = secs(1);
        model.recycle.common.min_interval = secs(5);
        model.recycle.common.min_interval_hard = secs(1);
        model.recycle.vram_soft = mib(40 * 1024);
        model.recycle.vram_hard = mib(60 * 1024);
        model.run.record = true;
        script.set_gpus(&[80 << 30]);
    })
    .await;
    let mut tasks = JoinSet::new();
    for op in ops {
        let (fleet, script) = (rig.fleet.clone(), rig.script.clone());
        let child = |n: usize| {
            let children = rig.script.children();
            (!children.is_empty()).then(|| Arc::clone(&children[n % children.len()]))
        };
        match op {
            Op::Pass(ms) => pass(Duration::from_millis(ms)).await,
            Op::Request(ms) => {
                drop(tasks.spawn(async move {
                    let asked = Instant::now();
                    if let Ok(lease) = fleet.lease(&ModelName::new("m"), LeaseKind::Slot).await {
                        let actor = actor(&script, lease.generation());
                        let granted = asked + lease.queued_for();
                        assert!(!actor.was_to_end(granted), "a lease on a process told to end");
                        tokio::select! {
                            () = pass(Duration::from_millis(ms)) => lease.note_progress(),
                            () = lease.until_revoked() => {}
                        }
                    }
                }));
            }
            Op::Impatient(ms) => {
                drop(tasks.spawn(async move {
                    let name = ModelName::new("m");
                    let lease = fleet.lease(&name, LeaseKind::Slot);
                    drop(tokio::time::timeout(Duration::from_millis(ms), lease).await);
                }));
            }
            Op::Refused => {
                drop(tasks.spawn(async move {
                    if let Ok(lease) = fleet.lease(&ModelName::new("m"), LeaseKind::Aux).await {
                        lease.report_refused();
                    }
                }));
            }
            Op::Restart => drop(tasks.spawn(async move { drop(fleet.restart("m").await) })),
            Op::Drain => drop(tasks.spawn(async move { drop(fleet.drain("m").await) })),
            Op::Command(n) => drop(rig.apply(|config| model(config).command.args[1] = n.to_string()).await),
            Op::Replicas(n) => drop(rig.apply(|config| model(config).run.replicas = n).await),
            Op::Remove => {
                let models = rig.config.models.clone();
                rig.apply(|config| config.models.clear()).await;
                pass(Duration::from_millis(1)).await;
                rig.apply(|config| config.models = models).await;
            }
            Op::Way(overlap) => {
                let way = if overlap { ReplaceMode::Overlap } else { ReplaceMode::Sequential };
                rig.apply(|config| model(config).run.replace = way).await;
            }
            Op::Crash(n) => drop(child(n).inspect(|child| child.crash())),
            Op::Deaf(n, deaf) => drop(child(n).inspect(|child| child.set_deaf(deaf))),
            Op::Grow(n) => drop(
                child(n).inspect(|child| child.set_anon(if n % 2 == 0 { 600 * MIB } else { 1000 * MIB })),
            ),
            Op::Gpu(n, gib) => drop(child(n).inspect(|child| child.set_vram((gib << 30) - (100 << 20)))),
            Op::Blind => rig.script.hide_vram("nobody tells"),
            Op::Xid(xid) => rig.script.fault(GpuFault::Xid(Some(xid))),
            Op::Errors(count) => {
                drop(tasks.spawn(async move {
                    let failed = ExchangeOutcome {
                        status: Some(500),
                        compute_error: true,
                        ..ExchangeOutcome::default()
                    };
                    for _ in 0..count {
                        let Ok(lease) = fleet.lease(&ModelName::new("m"), LeaseKind::Slot).await else {
                            return;
                        };
                        lease.note_outcome(&failed);
                    }
                }));
            }
            Op::Growth(n) => {
                let mode = GrowthMode::ALL[usize::from(n)];
                drop(rig.apply(|config| model(config).recycle.common.growth = mode).await);
            }
            Op::Say(n) => drop(child(n).inspect(|child| {
                child.say("srv  update: - cache state: 3 prompts, 210.938 MiB (limits: 8192.000 MiB)");
            })),
            Op::Next(fate) => rig.script.next(role(fate)),
        }
        let alive = rig.script.alive();
        assert!(alive <= 24, "{alive} processes");
    }
    if calm {
        recover(&mut rig).await;
    }
    let began = Instant::now();
    rig.fleet.shutdown(secs(5)).await;
    let took = began.elapsed();
    // The shutdown waits for a process that is being created.
    assert!(took <= secs(5) + secs(10) + secs(4), "the end took {took:?}");
    rig.script.assert_all_reaped();
    let answered = async {
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    };
    // Requests that got a lease earlier may still sleep on it.
    tokio::time::timeout(secs(5), answered).await.expect("a caller is not answered");
}

/// Checks that after the faults one restart is enough for normal operation.
async fn recover(rig: &mut Rig) {
    rig.script.clear();
    for child in rig.script.children() {
        child.set_deaf(false);
        child.set_anon(MIB);
        child.set_vram(MIB);
    }
    // With another command, no history shows that a process lost its GPU.
    rig.apply(|config| "calm".clone_into(&mut model(config).command.args[1])).await;
    let served = async {
        while rig.fleet.restart("m").await.is_err() {
            pass(secs(1)).await;
        }
        rig.lease().await.unwrap();
    };
    tokio::time::timeout(secs(300), served).await.expect("it does not recover");
    pass(secs(120)).await;
    let view = rig.fleet.view();
    let model = &view.models[0];
    let backends =
        model.backends.iter().filter(|backend| backend.in_flight == 0 && backend.pid.is_some()).count();
    let all = rig.config.models[0].run.replicas as usize;
    assert_eq!((model.state, model.waiting, backends), (ModelState::Loaded, 0, all), "{model:#?}");
    assert_eq!((model.backends.len(), rig.script.alive()), (all, all), "{model:#?}");
}

fn model(config: &mut FleetConfig) -> &mut ModelSpec {
    &mut config.models[0]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_storm_is_weathered(ops in proptest::collection::vec(op(), 1..60), calm: bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(storm(ops, calm));
    }
}
