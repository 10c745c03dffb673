//! Scaling, time of day and repeated readings change no verdict; a stronger leak is found no later.

use std::time::Duration;

use proptest::prelude::*;
use warden_policies::growth::{GrowthMonitor, GrowthPolicy, GrowthVerdict, WorkUnit};
use warden_policies::units::ByteSize;
use warden_policies::world::{SimulatedWorld, WorldLeak};
use warden_policies::{BackendSample, MemoryKind, defaults};

const MIB: f64 = 1_048_576.0;

/// Returns every change of verdict: series, request, verdict.
fn turns(policy: &GrowthPolicy, samples: &[BackendSample]) -> Vec<(MemoryKind, u64, GrowthVerdict)> {
    let mut monitor = GrowthMonitor::new(policy);
    let turns = samples.iter().flat_map(|sample| monitor.observe(sample));
    turns.map(|turn| (turn.growth.series, turn.request, turn.growth.verdict)).collect()
}

fn recording(seed: u64, mib: f64, requests: usize) -> Vec<BackendSample> {
    let leaks = vec![WorldLeak::per_unit(WorkUnit::Request, mib * MIB)];
    SimulatedWorld { leaks, ..SimulatedWorld::quiet(seed) }.run().take(requests).collect()
}

fn leaking_at(samples: &[BackendSample]) -> Option<u64> {
    let turns = turns(&defaults().growth, samples);
    turns
        .into_iter()
        .find(|(_, _, verdict)| *verdict == GrowthVerdict::Leaking)
        .map(|(_, request, _)| request)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn the_unit_of_bytes_does_not_matter(seed in any::<u64>(), mib in 0.0..10.0_f64) {
        let samples = recording(seed, mib, 600);
        let mut policy = defaults().growth.clone();
        for size in [&mut policy.host_effect, &mut policy.vram_effect, &mut policy.allowance_slack, &mut policy.vram_grain] {
            *size = ByteSize(size.0 * 1024);
        }
        let larger: Vec<BackendSample> = samples.iter().cloned().map(|mut sample| {
            if let Some(host) = &mut sample.host {
                host.anon *= 1024;
            }
            sample
        }).collect();
        prop_assert_eq!(turns(&defaults().growth, &samples), turns(&policy, &larger));
    }

    #[test]
    fn the_time_of_the_start_does_not_matter(seed in any::<u64>(), mib in 0.0..10.0_f64, shift in 0..1_000_000_u64) {
        let samples = recording(seed, mib, 600);
        let later: Vec<BackendSample> = samples.iter().cloned()
            .map(|sample| BackendSample { at: sample.at + Duration::from_secs(shift), ..sample }).collect();
        prop_assert_eq!(turns(&defaults().growth, &samples), turns(&defaults().growth, &later));
    }

    #[test]
    fn readings_taken_twice_change_nothing(seed in any::<u64>(), mib in 0.0..10.0_f64, every in 1..5_usize) {
        let samples = recording(seed, mib, 600);
        let twice: Vec<BackendSample> = samples.iter().enumerate()
            .flat_map(|(number, sample)| vec![sample.clone(); 1 + usize::from(number % every == 0)]).collect();
        prop_assert_eq!(turns(&defaults().growth, &samples), turns(&defaults().growth, &twice));
    }

    // Scales double, so noise may hide a leak at a scale at which a slightly weaker one shows. The stronger
    // one then shows at the next scale, within twice the requests.
    #[test]
    fn a_stronger_leak_is_found_no_later(seed in any::<u64>(), mib in 0.5..8.0_f64, factor in 1.2..20.0_f64) {
        let weak = leaking_at(&recording(seed, mib, 2000));
        let strong = leaking_at(&recording(seed, mib * factor, 2000));
        prop_assert!(strong.is_some(), "{} MiB were not found", mib * factor);
        if let (Some(weak), Some(strong)) = (weak, strong) {
            prop_assert!(strong <= weak * 2, "{strong} against {weak}");
        }
    }
}
