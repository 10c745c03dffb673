//! Verdicts on recordings of real servers, and on variants of these: cut, thinned, shaken.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its recordings has failed")]

use std::path::Path;

use warden_policies::growth::{GrowthBlame, GrowthMonitor, GrowthVerdict, SeriesGrowth, WorkUnit};
use warden_policies::sample::SampleEdge;
use warden_policies::world::SplitMix;
use warden_policies::{BackendSample, GpuIndex, MemoryKind, defaults, trace};

const MIB: u64 = 1 << 20;
const MIB_F: f64 = 1_048_576.0;
const HOST: MemoryKind = MemoryKind::Host;
const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));

fn read(name: &str) -> Vec<BackendSample> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(format!("{name}.jsonl"));
    trace::parse_recording(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The detector's verdicts on a recording.
struct Said {
    first_leaking: Vec<(MemoryKind, u64)>,
    last: Vec<SeriesGrowth>,
    blamed: Vec<WorkUnit>,
}

impl Said {
    fn last(&self, series: MemoryKind) -> &SeriesGrowth {
        self.last.iter().find(|growth| growth.series == series).unwrap()
    }

    fn leaking_at(&self, series: MemoryKind) -> Option<u64> {
        self.first_leaking.iter().find(|(of, _)| *of == series).map(|(_, request)| *request)
    }
}

fn judge(samples: &[BackendSample], declared: u64) -> Said {
    let mut monitor = GrowthMonitor::new(&defaults().growth);
    monitor.set_allowance(HOST, declared);
    let (mut first_leaking, mut blamed) = (vec![], vec![]);
    for sample in samples {
        for turn in monitor.observe(sample) {
            if turn.growth.verdict == GrowthVerdict::Leaking {
                first_leaking.push((turn.growth.series, turn.request));
            }
        }
        for growth in monitor.growth() {
            if let Some(GrowthBlame::Pays { unit, .. }) = growth.blame {
                blamed.push(unit);
            }
        }
    }
    Said { first_leaking, last: monitor.growth().to_vec(), blamed }
}

/// Variants of a recording that other observers could have made.
fn variants(samples: &[BackendSample]) -> Vec<(&'static str, Vec<BackendSample>)> {
    let only = |edge| samples.iter().filter(|sample| sample.edge == edge).cloned().collect();
    let mut random = SplitMix::new(3);
    let thinned = samples.iter().filter(|_| random.chance(0.7)).cloned().collect();
    let shifted =
        samples.iter().map(|sample| BackendSample { at: sample.at * 7, ..sample.clone() }).collect();
    let mut random = SplitMix::new(4);
    let mut shake = |sample: &BackendSample| {
        let mut sample = sample.clone();
        if let Some(host) = &mut sample.host {
            host.anon += random.below(3 * MIB);
        }
        sample
    };
    let shaken = samples.iter().map(&mut shake).collect();
    let doubled = samples.iter().flat_map(|sample| [sample.clone(), sample.clone()]).collect();
    vec![
        ("whole", samples.to_vec()),
        ("without timers", only(SampleEdge::Idle)),
        ("thinned", thinned),
        ("slower", shifted),
        ("shaken", shaken),
        ("doubled", doubled),
    ]
}

#[test]
fn an_image_leak_is_found_on_host_and_gpu_in_time_with_its_slope() {
    for (name, samples) in variants(&read("b8827-long-gemma4-image-fixed")) {
        let said = judge(&samples, 0);
        assert!(said.leaking_at(HOST).is_some_and(|at| at <= 120), "{name}: {:?}", said.leaking_at(HOST));
        assert!(said.leaking_at(VRAM).is_some_and(|at| at <= 400), "{name}: {:?}", said.leaking_at(VRAM));
        for (series, truth) in [(HOST, 4.42), (VRAM, 0.95)] {
            let growth = said.last(series);
            assert_eq!(growth.verdict, GrowthVerdict::Leaking, "{name} {series}");
            let slope = growth.slope.unwrap().value / MIB_F;
            assert!((slope / truth - 1.0).abs() < 0.1, "{name} {series}: {slope}");
        }
        assert!(!said.blamed.contains(&WorkUnit::Hour), "{name}");
    }
}

#[test]
fn a_busy_server_that_is_only_read_by_a_timer_is_judged_too() {
    let samples = read("b8827-long-gemma4-image-fixed");
    let ticks: Vec<BackendSample> =
        samples.into_iter().filter(|sample| sample.edge == SampleEdge::Tick).collect();
    let said = judge(&ticks, 0);
    for (series, truth) in [(HOST, 4.42), (VRAM, 0.95)] {
        let growth = said.last(series);
        assert_eq!(growth.verdict, GrowthVerdict::Leaking, "{series}");
        let slope = growth.slope.unwrap().value / MIB_F;
        assert!((slope / truth - 1.0).abs() < 0.1, "{series}: {slope}");
    }
}

#[test]
fn leaks_of_short_recordings_are_found() {
    for (name, series) in [
        ("h200-b8827-images-vary", vec![HOST, VRAM]),
        ("h200-b8827-images-out1", vec![HOST]),
        ("h200-b8827-images-out256", vec![VRAM]),
    ] {
        let said = judge(&read(name), 0);
        for series in series {
            assert_eq!(said.last(series).verdict, GrowthVerdict::Leaking, "{name} {series}");
        }
    }
}

#[test]
fn servers_that_do_not_leak_are_steady() {
    for name in [
        "b8827-gemma4-image-nographs",
        "h200-b8827-conversations",
        "h200-b8827-text-llama",
        "h200-b10587-images-fixed",
        "h200-b8827-mixed2-nographs",
        "h200-b8827-mixed-long-nographs",
    ] {
        for (variant, samples) in variants(&read(name)) {
            let said = judge(&samples, 0);
            assert_eq!(said.first_leaking, [], "{name} {variant}");
            for growth in &said.last {
                // A server that is hardly ever idle has too few idle edges for a verdict.
                let few = variant == "without timers" && growth.verdict == GrowthVerdict::Warming;
                assert!(few || growth.verdict == GrowthVerdict::Steady, "{name} {variant} {}", growth.series);
            }
        }
    }
}

#[test]
fn a_cache_is_bounded_if_it_was_declared_and_a_leak_if_not() {
    for name in ["b8827-llama-text-promptcache", "h200-b8827-distinct-2048"] {
        for (variant, samples) in variants(&read(name)) {
            let said = judge(&samples, 2048 * MIB);
            let growth = said.last(HOST);
            assert_eq!(
                (growth.verdict, &said.first_leaking),
                (GrowthVerdict::Bounded, &vec![]),
                "{name} {variant}"
            );
            assert!(
                growth.fill.used > 1024 * MIB && growth.fill.used <= growth.fill.allowed,
                "{:?}",
                growth.fill
            );
            if variant != "thinned" {
                assert_eq!(judge(&samples, 0).last(HOST).verdict, GrowthVerdict::Leaking, "{name} {variant}");
            }
        }
    }
}

#[test]
fn four_hundred_requests_of_mixed_load_are_enough_to_suspect_a_leak_and_no_more() {
    for name in ["h200-b8827-mixed2-graphs", "h200-b8827-mixed2-vary"] {
        let mut monitor = GrowthMonitor::new(&defaults().growth);
        let mut suspected = Vec::new();
        for sample in read(name) {
            let turns = monitor.observe(&sample);
            suspected.extend(
                turns
                    .iter()
                    .filter(|turn| turn.growth.verdict >= GrowthVerdict::Suspected)
                    .map(|turn| turn.growth.series),
            );
        }
        assert!(suspected.contains(&HOST) && suspected.contains(&VRAM), "{name} {suspected:?}");
    }
    // A declared cache is not suspected.
    let said = judge(&read("h200-b8827-mixed2-reuse"), 8192 * MIB);
    assert_eq!(said.last(HOST).verdict, GrowthVerdict::Bounded);
}

#[test]
fn long_mixed_load_is_called_a_leak_with_its_slope() {
    // Slopes by least squares over the last two thirds of the recording.
    for (name, host, vram) in
        [("h200-b8827-mixed-long-graphs", 1.19, 0.235), ("h200-b8827-mixed-long-vary", 1.05, 0.212)]
    {
        for (variant, samples) in variants(&read(name)) {
            let said = judge(&samples, 0);
            for (series, truth) in [(HOST, host), (VRAM, vram)] {
                let at = said.leaking_at(series);
                assert!(at.is_some_and(|at| at <= 1200), "{name} {variant} {series}: {at:?}");
                let growth = said.last(series);
                let slope = growth.slope.unwrap().value / MIB_F;
                assert_eq!(growth.verdict, GrowthVerdict::Leaking, "{name} {variant} {series}");
                assert!((slope / truth - 1.0).abs() < 0.15, "{name} {variant} {series}: {slope}");
            }
        }
    }
}

/// Made after the detector's rules and numbers were fixed, so these cannot be fitted to it.
#[test]
fn a_leak_under_mixed_load_that_no_rule_was_made_for_is_found_on_host_and_gpu() {
    for (variant, samples) in variants(&read("h200-b8827-mixed-held-out")) {
        let said = judge(&samples, 0);
        for (series, truth) in [(HOST, 1.214), (VRAM, 0.223)] {
            let growth = said.last(series);
            let slope = growth.slope.unwrap().value / MIB_F;
            println!(
                "{variant} {series}: leaking at {:?}, {slope:.3}, {:?}",
                said.leaking_at(series),
                growth.blame
            );
            assert_eq!(growth.verdict, GrowthVerdict::Leaking, "{variant} {series}");
            assert!(said.leaking_at(series).unwrap() <= 800, "{variant} {series}");
            assert!((slope / truth - 1.0).abs() < 0.15, "{variant} {series}: {slope}");
        }
        assert!(said.blamed.iter().all(|unit| *unit == WorkUnit::Image), "{variant}: {:?}", said.blamed);
    }
}

#[test]
fn mixed_load_on_three_slots_is_never_blamed_on_prompt_tokens() {
    for name in [
        "b8827-gemma4-mixed-np3",
        "h200-b8827-mixed-np3",
        "h200-b8827-mixed2-graphs",
        "h200-b8827-mixed2-vary",
        "h200-b8827-mixed-long-graphs",
        "h200-b8827-mixed-long-vary",
    ] {
        for (variant, samples) in variants(&read(name)) {
            let blamed = judge(&samples, 0).blamed;
            assert!(
                !blamed.contains(&WorkUnit::PromptToken) && !blamed.contains(&WorkUnit::Hour),
                "{name} {variant}"
            );
        }
    }
}

#[test]
fn trained_weights_are_called_what_is_known_of_them() {
    let steady = read("h200-b11549-smollm2-text");
    let cache = read("h200-b11549-gemma3-talks-512");
    for (samples, declared) in [(steady, 0), (cache, 512 * MIB)] {
        for (variant, samples) in variants(&samples) {
            let said = judge(&samples, declared);
            assert_eq!((&said.first_leaking, &said.blamed), (&vec![], &vec![]), "{variant}");
        }
    }
    // A preloaded library leaks this many MiB per request.
    for (name, declared, truth) in
        [("h200-b11549-smollm2-text-leak", 0, 0.25), ("h200-b11549-gemma3-talks-512-leak", 512 * MIB, 0.5)]
    {
        for (variant, samples) in variants(&read(name)) {
            let said = judge(&samples, declared);
            let growth = said.last(HOST);
            // Three busy slots are hardly ever idle at once, so only few readings remain while the cache
            // fills.
            if declared > 0 && variant == "without timers" {
                assert_eq!(growth.verdict, GrowthVerdict::Bounded, "{name}");
                continue;
            }
            let slope = growth.slope.unwrap().value / MIB_F;
            assert!(growth.verdict >= GrowthVerdict::Suspected, "{name} {variant}: {:?}", growth.verdict);
            assert!((slope / truth - 1.0).abs() < 0.05, "{name} {variant}: {slope}");
            assert!(
                said.blamed.iter().all(|unit| *unit == WorkUnit::Request),
                "{name} {variant}: {:?}",
                said.blamed
            );
            assert!(said.first_leaking.iter().all(|(series, _)| *series == HOST), "{name} {variant}");
        }
    }
}

#[test]
fn pictures_between_texts_are_a_leak_only_where_a_library_leaks() {
    let samples = read("h200-b11549-gemma4-mixed");
    for (variant, samples) in variants(&samples) {
        let said = judge(&samples, 0);
        assert_eq!((&said.first_leaking, &said.blamed), (&vec![], &vec![]), "{variant}");
    }
    // MiB per request: a preloaded library leaks 1 MiB per image (28 in 100 requests), or 0.25 MiB per
    // request.
    for (name, truth) in
        [("h200-b11549-gemma4-mixed-image-leak", 0.284), ("h200-b11549-gemma4-mixed-request-leak", 0.25)]
    {
        for (variant, samples) in variants(&read(name)) {
            let said = judge(&samples, 0);
            let growth = said.last(HOST);
            println!("{name} {variant}: {:?} {:?} {:?}", growth.verdict, growth.slope, said.blamed.last());
            assert!(said.first_leaking.iter().all(|(series, _)| *series == HOST), "{name} {variant}");
            // Leaked blocks fill the holes of freed images, so memory rises at the next image for either
            // leak.
            let wrong = if name.ends_with("image-leak") { WorkUnit::Request } else { WorkUnit::Image };
            assert!(!said.blamed.contains(&wrong), "{name} {variant}: {:?}", said.blamed);
            // Three busy slots are hardly ever idle at once, so there are few idle edges.
            if variant == "without timers" {
                continue;
            }
            let slope = growth.slope.unwrap().value / MIB_F;
            assert!(growth.verdict >= GrowthVerdict::Suspected, "{name} {variant}: {:?}", growth.verdict);
            assert!((slope / truth - 1.0).abs() < 0.15, "{name} {variant}: {slope}");
            assert!(!said.blamed.contains(&WorkUnit::Hour), "{name} {variant}");
            if name.ends_with("image-leak") {
                let right = said.blamed.iter().all(|unit| *unit == WorkUnit::Image);
                assert!(right && !said.blamed.is_empty(), "{name} {variant}: {:?}", said.blamed);
            }
        }
    }
}
