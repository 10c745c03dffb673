//! Mixed load: text and images on several slots. Made of a recording, whose residual movement, order of work and readings
//! with requests in flight are a real server's, block by block in another order; the leak is put back, or something else.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its recordings has failed")]

use std::path::Path;
use std::time::Duration;

use warden_policies::growth::{Blame, Monitor, Unit, Verdict};
use warden_policies::sample::HostMemory;
use warden_policies::world::SplitMix;
use warden_policies::{MemoryKind, Sample, defaults, trace};

const MIB: f64 = 1_048_576.0;
/// Readings that stay together.
const BLOCK: u64 = 12;

/// A recording without its leak: for each reading what was done since the one before, and the movement of the heap.
struct Load {
    steps: Vec<(Sample, f64)>,
    base: f64,
}

impl Load {
    /// `per_image`: what the recorded server leaked for each.
    fn of(name: &str, per_image: f64) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(format!("{name}.jsonl"));
        let all = trace::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
        // Without the start, which is no part of what goes on for long.
        let all: Vec<Sample> = all.into_iter().filter(|sample| sample.work.requests > 30).collect();
        let level = |sample: &Sample| {
            real(sample.host.map_or(0, HostMemory::charged)) - per_image * real(sample.work.images)
        };
        // What is left of a trend is not part of the movement.
        let (first, last) = (&all[..20], &all[all.len() - 20..]);
        let mean = |part: &[Sample]| part.iter().map(level).sum::<f64>() / 20.0;
        let per_step = (mean(last) - mean(first)) / real(all.len() as u64 - 20);
        let base = mean(first);
        let mut steps = Vec::new();
        for (at, two) in all.windows(2).enumerate() {
            let mut done = two[1].clone();
            done.work = two[1].work - two[0].work;
            done.at = two[1].at.saturating_sub(two[0].at);
            steps.push((done, level(&two[1]) - base - per_step * real(at as u64)));
        }
        Self { steps, base }
    }

    /// So many requests, in blocks that are drawn at random. `extra`: bytes beside the movement, by the work done.
    fn run(&self, seed: u64, requests: u64, extra: impl Fn(&Sample) -> f64) -> Vec<Sample> {
        let mut random = SplitMix::new(seed ^ 0x9E37_79B9_7F4A_7C15);
        let mut now = Sample {
            work: warden_policies::sample::Work::default(),
            at: Duration::ZERO,
            ..self.steps[0].0.clone()
        };
        let mut all = Vec::new();
        while now.work.requests < requests {
            let from = usize::try_from(random.below(self.steps.len() as u64 - BLOCK)).unwrap();
            for (step, movement) in &self.steps[from..from + usize::try_from(BLOCK).unwrap()] {
                now = Sample { at: now.at + step.at, work: now.work + step.work, ..step.clone() };
                let bytes = self.base + movement + extra(&now);
                now.host = now.host.map(|host| HostMemory { anon: whole(bytes), swap: 0, ..host });
                all.push(now.clone());
            }
        }
        all
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes and counts of one machine")]
fn real(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of one machine")]
fn whole(bytes: f64) -> u64 {
    bytes.max(0.0) as u64
}

fn recordings() -> [Load; 4] {
    [
        Load::of("h200-b8827-mixed-np3", 4.0 * MIB),
        Load::of("b8827-gemma4-mixed-np3", 4.4 * MIB),
        Load::of("h200-b8827-mixed2-graphs", 4.1 * MIB),
        // CUDA graphs were off: nothing leaked.
        Load::of("h200-b8827-mixed2-nographs", 0.0),
    ]
}

/// The first request at which it was called a leak, and who was blamed at the end.
fn judged(samples: &[Sample], declared: u64) -> (Option<u64>, Option<Unit>) {
    let mut monitor = Monitor::new(&defaults().growth);
    monitor.allow(MemoryKind::Host, declared);
    let mut first = None;
    for sample in samples {
        for turn in monitor.observe(sample) {
            if turn.growth.verdict == Verdict::Leaking && turn.growth.series == MemoryKind::Host {
                first = first.or(Some(turn.request));
            }
        }
    }
    let blame = match monitor.growth()[0].blame {
        Some(Blame::Pays { unit, .. }) => Some(unit),
        _ => None,
    };
    (first, blame)
}

/// How many of so many runs were called a leak.
fn alarms(runs: u64, requests: u64, declared: u64, extra: impl Fn(u64, &Sample) -> f64) -> usize {
    let called = |load: &Load, seed: u64| {
        judged(&load.run(seed, requests, |now| extra(seed, now)), declared).0.is_some()
    };
    recordings()
        .iter()
        .flat_map(|load| (0..runs).map(move |seed| (load, seed)))
        .filter(|(load, seed)| called(load, *seed))
        .count()
}

#[test]
fn a_leak_for_each_image_is_called_one_on_mixed_load_and_put_down_to_images() {
    // 730 requests are what an hour of somebody's trial brought.
    for (requests, least) in [(730, 75), (1000, 90)] {
        let (mut found, mut other, mut all) = (0, 0, 0);
        for load in &recordings() {
            for seed in 0..40 {
                let samples = load.run(seed, requests, |now| 4.0 * MIB * real(now.work.images));
                let (leaking, blamed) = judged(&samples, 0);
                all += 1;
                found += usize::from(leaking.is_some());
                other += usize::from(blamed.is_some_and(|unit| unit != Unit::Image));
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
    // Declared: bounded, however large.
    let declared = alarms(40, 1500, 1 << 30, |_, now| (3.0 * MIB * real(now.work.images)).min(1000.0 * MIB));
    // Not declared: what ends before a leak of its size would be told.
    let small = alarms(60, 1500, 0, |seed, now| {
        (3.0 * MIB * real(now.work.images)).min(MIB * (50.0 + real(seed % 12) * 10.0))
    });
    // One that takes less and less, as a heap that settles.
    let settling = alarms(60, 1500, 0, |seed, now| {
        let half = 20.0 + real(seed % 8) * 10.0;
        200.0 * MIB * (1.0 + real(now.work.images) / half).ln().min(2.0)
    });
    assert!(declared == 0 && small == 0 && settling <= 1, "{declared} {small} {settling}");
}

#[test]
fn text_that_costs_what_it_takes_and_images_that_wander_are_no_leak() {
    // Swings that go along with the share of images of the last while, and come back.
    let swings = alarms(60, 1500, 0, |seed, now| {
        let phase = real(now.work.images) / (30.0 + real(seed % 7) * 10.0);
        40.0 * MIB * (phase + real(seed)).sin()
    });
    assert_eq!(swings, 0);
}
