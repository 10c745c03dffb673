//! Measures how soon the growth detector finds leaks, its false alarms, and the cost of a reading.
//!
//! `cargo bench -p warden-tests --bench detect [-- RUNS [FIRST_SEED]]`: simulated worlds of 10,000 requests
//! (leaks: 12,000) with the variation of a real heap, 40 runs of each kind by default.

use tokio::time::Instant;
use warden_policies::growth::{GrowthMonitor, GrowthVerdict};
use warden_policies::world::SimulatedWorld;
use warden_policies::{BackendSample, MemoryKind, defaults};
use warden_rig::{Context as _, Trouble};

use catalogue::{Harmless, leaking, leaking_now_and_then};

#[path = "../../policies/tests/catalogue/mod.rs"]
mod catalogue;

const MIB: f64 = 1_048_576.0;

/// Returns the request at which a leak is first reported.
fn found(world: &SimulatedWorld, declared: u64, requests: u64) -> Option<u64> {
    let mut monitor = GrowthMonitor::new(&defaults().growth);
    monitor.set_allowance(MemoryKind::Host, declared);
    for sample in world.run() {
        let turns = monitor.observe(&sample);
        if let Some(turn) = turns.iter().find(|turn| turn.growth.verdict == GrowthVerdict::Leaking) {
            return Some(turn.request);
        }
        if sample.work.requests >= requests {
            break;
        }
    }
    None
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn leaks(seeds: &std::ops::Range<u64>) {
    println!("| leak | found | median requests | nine in ten within |\n|---|---|---|---|");
    let row = |name: &str, world: &dyn Fn(u64) -> SimulatedWorld| {
        let mut delays: Vec<u64> = seeds.clone().filter_map(|seed| found(&world(seed), 0, 12_000)).collect();
        delays.sort_unstable();
        let at =
            |tenths: usize| delays.get(delays.len() * tenths / 10).map_or("-".to_owned(), u64::to_string);
        let all = seeds.end - seeds.start;
        println!("| {name} | {} of {all} | {} | {} |", delays.len(), at(5), at(9));
    };
    for mib in [126.0, 8.0, 3.0, 1.0, 0.3, 0.1, 0.04] {
        row(&format!("{mib} MiB per request"), &|seed| leaking(seed, mib * MIB));
    }
    for mib in [30.0, 5.0] {
        row(&format!("{mib} MiB in one request of ten"), &|seed| leaking_now_and_then(seed, mib * MIB));
    }
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn harmless(seeds: &std::ops::Range<u64>) {
    println!("\n| no leak | runs of 10,000 requests | called a leak |\n|---|---|---|");
    for kind in Harmless::ALL {
        let alarms = seeds.clone().filter(|seed| {
            let case = kind.case(*seed);
            found(&case.world, case.declared, 10_000).is_some()
        });
        println!("| {} | {} | {} |", kind.as_str(), seeds.end - seeds.start, alarms.count());
    }
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
fn cost() {
    println!("\n| readings | ns each |\n|---|---|");
    for (name, world) in [("without a leak", SimulatedWorld::quiet(1)), ("of a leak", leaking(1, 3.0 * MIB))]
    {
        let samples: Vec<BackendSample> = world.run().take(50_000).collect();
        let mut monitor = GrowthMonitor::new(&defaults().growth);
        let start = Instant::now();
        for sample in &samples {
            monitor.observe(sample);
        }
        println!("| {name} | {} |", start.elapsed().as_nanos() / 50_000);
    }
}

fn main() -> Result<(), Trouble> {
    let number = |text: String| text.parse::<u64>().context(text);
    let mut given = std::env::args().skip(1).filter(|word| !word.starts_with("--"));
    let runs = given.next().map_or(Ok(40), number)?;
    let first = given.next().map_or(Ok(0), number)?;
    let seeds = first..first.saturating_add(runs);
    leaks(&seeds);
    harmless(&seeds);
    cost();
    Ok(())
}
