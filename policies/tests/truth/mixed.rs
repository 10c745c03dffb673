//! Mixed load, text and images on several slots: shuffled blocks of a recording of a real server, with a
//! known leak or harmless growth added.

use crate::recorded::{Extra, MIB, RecordedLoad, real};
use warden_policies::growth::{GrowthBlame, GrowthMonitor, GrowthVerdict, WorkUnit};
use warden_policies::{BackendSample, MemoryKind, defaults};

const fn host(bytes: f64) -> Extra {
    Extra { host: bytes, cache: 0.0, measured: false, vram: 0.0 }
}

fn recordings() -> [RecordedLoad; 4] {
    [
        RecordedLoad::read("h200-b8827-mixed-np3", 4.0 * MIB),
        RecordedLoad::read("b8827-gemma4-mixed-np3", 4.4 * MIB),
        RecordedLoad::read("h200-b8827-mixed2-graphs", 4.1 * MIB),
        // Nothing leaked, because CUDA graphs were off.
        RecordedLoad::read("h200-b8827-mixed2-nographs", 0.0),
    ]
}

/// Returns the first request with the verdict "leaking", and the unit blamed at the end.
fn judged(samples: &[BackendSample], declared: u64) -> (Option<u64>, Option<WorkUnit>) {
    let mut monitor = GrowthMonitor::new(&defaults().growth);
    monitor.set_allowance(MemoryKind::Host, declared);
    let mut first = None;
    for sample in samples {
        for turn in monitor.observe(sample) {
            if turn.growth.verdict == GrowthVerdict::Leaking && turn.growth.series == MemoryKind::Host {
                first = first.or(Some(turn.request));
            }
        }
    }
    let blame = match monitor.growth()[0].blame {
        Some(GrowthBlame::Pays { unit, .. }) => Some(unit),
        _ => None,
    };
    (first, blame)
}

fn alarms(runs: u64, requests: u64, declared: u64, extra: impl Fn(u64, &BackendSample) -> f64) -> usize {
    let called = |load: &RecordedLoad, seed: u64| {
        judged(&load.run(seed, requests, |now| host(extra(seed, now))), declared).0.is_some()
    };
    recordings()
        .iter()
        .flat_map(|load| (0..runs).map(move |seed| (load, seed)))
        .filter(|(load, seed)| called(load, *seed))
        .count()
}

#[test]
fn a_leak_for_each_image_is_called_one_on_mixed_load_and_put_down_to_images() {
    // 730 requests came within one hour of a real trial.
    for (requests, least) in [(730, 75), (1000, 90)] {
        let (mut found, mut other, mut all) = (0, 0, 0);
        for load in &recordings() {
            for seed in 0..40 {
                let samples = load.run(seed, requests, |now| host(4.0 * MIB * real(now.work.images)));
                let (leaking, blamed) = judged(&samples, 0);
                all += 1;
                found += usize::from(leaking.is_some());
                other += usize::from(blamed.is_some_and(|unit| unit != WorkUnit::Image));
            }
        }
        assert!(found * 100 >= all * least, "{found} of {all} within {requests} requests");
        assert!(other * 100 <= all * 2, "{other} of {all} are put down to something else");
    }
}

#[test]
fn mixed_load_without_a_leak_is_never_called_one() {
    assert_eq!(alarms(100, 1500, 0, |_, _| 0.0), 0);
}

#[test]
fn a_cache_that_fills_with_images_is_no_leak_where_it_is_declared_or_small() {
    // A declared cache is bounded at any size.
    let declared = alarms(40, 1500, 1 << 30, |_, now| (3.0 * MIB * real(now.work.images)).min(1000.0 * MIB));
    // An undeclared cache is full before a leak of its size would be reported.
    let small = alarms(60, 1500, 0, |seed, now| {
        (3.0 * MIB * real(now.work.images)).min(MIB * (50.0 + real(seed % 12) * 10.0))
    });
    // A heap that settles takes less and less.
    let settling = alarms(60, 1500, 0, |seed, now| {
        let half = 20.0 + real(seed % 8) * 10.0;
        200.0 * MIB * (1.0 + real(now.work.images) / half).ln().min(2.0)
    });
    assert!(declared == 0 && small == 0 && settling <= 1, "{declared} {small} {settling}");
}

#[test]
fn text_that_costs_what_it_takes_and_images_that_wander_are_no_leak() {
    // Swings that follow the share of images, and return.
    let swings = alarms(60, 1500, 0, |seed, now| {
        let phase = real(now.work.images) / (30.0 + real(seed % 7) * 10.0);
        40.0 * MIB * (phase + real(seed)).sin()
    });
    assert_eq!(swings, 0);
}
