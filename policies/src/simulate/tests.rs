//! Tests policies against simulated leaks.

use super::*;
use crate::defaults::Recycle;
use crate::growth::WorkUnit;
use crate::recycle::GrowthMode;
use crate::units::{ByteSize, MemoryLimit};
use crate::world::{MemoryBackground, WorldLeak, WorldLoad};

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;

/// A server with 8 GiB and two requests in three seconds, a quarter of them with an image.
fn scenario(leak: Option<WorldLeak>) -> SimulationScenario {
    let mut world = SimulatedWorld::quiet(7);
    world.leaks.extend(leak);
    world.load = WorldLoad { per_second: 0.1, ..WorldLoad::default() };
    SimulationScenario {
        world,
        requests: 12_000,
        memory: 8 * GIB,
        device: 0,
        load_time: Duration::from_secs(20),
        service: Duration::from_secs(4),
        overlap: false,
        asleep: DayWindows::ALWAYS,
        allowance: 0,
    }
}

fn leaking(mib: f64) -> SimulationScenario {
    scenario(Some(WorldLeak::per_unit(WorkUnit::Image, mib * 1024.0 * 1024.0)))
}

fn policy() -> SimulatedPolicy {
    let defaults = crate::defaults();
    let recycle = RecyclePolicy {
        host_soft: Some(MemoryLimit::Percent(80.0)),
        host_hard: Some(MemoryLimit::Percent(92.0)),
        ..RecyclePolicy::new(&Recycle { growth: GrowthMode::Recycle, ..defaults.recycle })
    };
    SimulatedPolicy { recycle, growth: defaults.growth.clone() }
}

#[test]
fn with_a_leak_the_policy_saves_every_process_with_fewer_restarts_than_a_tuned_counter() {
    for mib in [3.0, 8.0, 30.0] {
        let report = compare(&leaking(mib), &policy(), None);
        assert!(report.nothing.out_of_memory >= 1, "{mib}: {report:#?}");
        assert_eq!((report.policy.out_of_memory, report.policy.failed), (0, 0), "{mib}: {report:#?}");
        assert_eq!((report.avoided, report.caused), (report.nothing.out_of_memory, 0));
        let counter = report.counter.as_ref().unwrap();
        assert!(report.policy.restarts < counter.restarts, "{mib}: {report:#?}");
        assert!(report.policy.waited_minutes < counter.waited_minutes, "{mib}: {report:#?}");
    }
}

#[test]
fn without_a_leak_nothing_is_ever_recycled() {
    for seed in 0..4 {
        let mut calm = scenario(None);
        calm.world.seed = seed;
        calm.requests = 5000;
        let report = compare(&calm, &policy(), None);
        assert_eq!((report.policy.restarts, report.nothing.out_of_memory), (0, 0), "{report:#?}");
        assert_eq!(report.counter, None, "there is nothing to tune by");
    }
}

#[test]
fn the_same_scenario_gives_the_same_outcome() {
    let (scenario, policy) = (SimulationScenario { requests: 2000, ..leaking(8.0) }, policy());
    let outcome = run(&scenario, &RestartStrategy::Policy(&policy));
    assert_eq!(run(&scenario, &RestartStrategy::Policy(&policy)), outcome);
    let text = serde_json::to_string(&outcome).unwrap();
    assert_eq!(serde_json::from_str::<StrategyOutcome>(&text).unwrap().restarts, outcome.restarts);
}

#[test]
fn a_counter_restarts_by_its_count_and_its_requests_wait_for_the_load() {
    let outcome = run(&SimulationScenario { requests: 1000, ..scenario(None) }, &RestartStrategy::Every(100));
    assert_eq!((outcome.restarts, outcome.out_of_memory), (10, 0), "{outcome:#?}");
    assert!(outcome.waited > 0 && outcome.waited_minutes > 0.0, "{outcome:#?}");
}

#[test]
fn an_overlap_without_memory_for_both_is_counted_as_caused() {
    let mut tight = SimulationScenario { overlap: true, requests: 3000, ..leaking(30.0) };
    tight.world.host = 3 * GIB;
    let outcome = run(&tight, &RestartStrategy::Policy(&policy()));
    assert!(outcome.out_of_memory_caused > 0, "{outcome:#?}");
    let roomy = SimulationScenario { overlap: false, ..tight };
    assert_eq!(run(&roomy, &RestartStrategy::Policy(&policy())).out_of_memory_caused, 0);
}

#[test]
fn a_backend_whose_clients_sleep_is_replaced_at_night_and_nobody_waits() {
    let mut nightly = leaking(8.0);
    nightly.asleep = "00:00-06:00".parse().unwrap();
    let mut policy = policy();
    policy.recycle.only = "02:00-05:00".parse().unwrap();
    // Three GiB a day: 1,500 requests of 2 MiB each.
    nightly.world.load.per_second = 0.023;
    let outcome = run(&nightly, &RestartStrategy::Policy(&policy));
    assert!(outcome.restarts > 0 && outcome.out_of_memory == 0 && outcome.waited == 0, "{outcome:#?}");
}

#[test]
fn observing_only_restarts_by_budget_and_no_budget_at_all_runs_out() {
    let mut observe = policy();
    observe.recycle.common.growth = GrowthMode::Observe;
    let outcome = run(&leaking(30.0), &RestartStrategy::Policy(&observe));
    assert!(
        outcome.reasons.iter().all(|(reason, _)| reason != "growth") && outcome.restarts > 0,
        "{outcome:#?}"
    );
    observe.recycle.host_soft = None;
    observe.recycle.host_hard = None;
    observe.recycle.levels.kill_host = ByteSize(0);
    assert!(run(&leaking(30.0), &RestartStrategy::Policy(&observe)).out_of_memory > 0);
}

#[test]
fn a_leak_of_vram_is_stopped_before_the_device_is_full() {
    let mut gpu = scenario(None);
    gpu.world.vram = Some(6 * GIB);
    gpu.world
        .vram_leaks
        .push(WorldLeak { step: 2 * MIB, ..WorldLeak::per_unit(WorkUnit::Request, 900.0 * 1024.0) });
    gpu.device = 10 * GIB;
    let mut policy = policy();
    policy.recycle.vram_soft = Some(MemoryLimit::Auto);
    policy.recycle.vram_hard = Some(MemoryLimit::Auto);
    let report = compare(&gpu, &policy, None);
    assert!(report.nothing.out_of_memory >= 1, "{report:#?}");
    assert_eq!((report.policy.out_of_memory, report.policy.failed), (0, 0), "{report:#?}");
    assert!(report.policy.restarts >= 1 && report.policy.restarts <= 4, "{report:#?}");
}

#[test]
fn a_cache_that_fills_as_declared_is_left_alone_and_one_that_nobody_declared_is_not() {
    let mut cache = scenario(None);
    cache.world.backgrounds.push(MemoryBackground::Cache {
        per_request: 1.5 * 1024.0 * 1024.0,
        cap: 2.0 * 1024.0 * 1024.0 * 1024.0,
    });
    cache.requests = 6000;
    cache.allowance = 2 * GIB;
    let mut policy = policy();
    policy.recycle.host_soft = Some(MemoryLimit::Auto);
    policy.recycle.host_hard = Some(MemoryLimit::Auto);
    let told = run(&cache, &RestartStrategy::Policy(&policy));
    assert_eq!((told.restarts, told.out_of_memory), (0, 0), "{told:#?}");
    cache.allowance = 0;
    assert!(run(&cache, &RestartStrategy::Policy(&policy)).restarts > 0);
}
