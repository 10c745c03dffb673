//! Compares the declared error rates with those on simulated servers.

use super::*;
use crate::{LegDecision, LegEnd, LegJudge, LegSpeed, Workload};
use warden_policies::growth::WorkUnit;
use warden_policies::world::{MemoryBackground, SimulatedWorld, SplitMix, WorldLeak, WorldLoad, WorldNoise};

const MIB: f64 = 1024.0 * 1024.0;

fn policy() -> CurePolicy {
    warden_policies::defaults().diagnose.cure.clone()
}

fn tight(value: f64) -> IntervalEstimate {
    IntervalEstimate { value, low: value * 0.99 - 1.0, high: value * 1.01 + 1.0 }
}

/// Returns the effect and the number of processes.
fn run(
    without: &mut dyn FnMut() -> IntervalEstimate,
    with: &mut dyn FnMut() -> IntervalEstimate,
) -> (SwitchEffect, usize) {
    let policy = policy();
    let (mut base, mut new) = ((0..policy.baseline_least).map(|_| without()).collect::<Vec<_>>(), Vec::new());
    loop {
        new.push(with());
        let confirmed = |does| does != SwitchEffect::Stops || new.len() >= policy.legs_least as usize;
        let does = judge(&policy, &base, &new).does;
        if does != SwitchEffect::Undecided && confirmed(does) || new.len() >= policy.legs_most as usize {
            return (does, base.len() + new.len());
        }
        base.push(without());
        let does = judge(&policy, &base, &new).does;
        if does != SwitchEffect::Undecided && confirmed(does) {
            return (does, base.len() + new.len());
        }
    }
}

fn leg(world: &SimulatedWorld) -> IntervalEstimate {
    let defaults = warden_policies::defaults();
    let numbers = &defaults.diagnose;
    let mut judge = LegJudge::new(Workload::SameImage, numbers.requests, &defaults.growth, numbers);
    let mut ended = LegEnd::Complete;
    for sample in world.run().take(usize::try_from(numbers.requests).unwrap()) {
        if judge.observe(sample, 0, None) == LegDecision::Decided {
            ended = LegEnd::Early;
            break;
        }
    }
    let finding = judge.finding(LegSpeed::default(), ended);
    finding.series[0].per_request.unwrap()
}

/// A kind of server, by seed and leaked bytes per request.
type Kind = fn(u64, f64) -> SimulatedWorld;

fn load() -> WorldLoad {
    WorldLoad { images: 1.0, per_second: 3.0, ..WorldLoad::default() }
}

fn leaking(seed: u64, bytes: f64, noise: WorldNoise) -> SimulatedWorld {
    SimulatedWorld {
        leaks: vec![WorldLeak::per_unit(WorkUnit::Request, bytes)],
        noise,
        load: load(),
        ..SimulatedWorld::quiet(seed)
    }
}

/// Resembles measured processes: the heap varies by 2 MiB.
fn quiet(seed: u64, bytes: f64) -> SimulatedWorld {
    leaking(seed, bytes, WorldNoise { sigma: 2.0 * MIB, phi: 0.7, spikes: 0.02, spike: 20.0 * MIB })
}

/// The heap is busy, with peaks of 80 MiB.
fn heap(seed: u64, bytes: f64) -> SimulatedWorld {
    leaking(seed, bytes, WorldNoise::HEAP)
}

/// A fresh heap fills its arenas ever more slowly.
fn settling(seed: u64, bytes: f64) -> SimulatedWorld {
    let ratchet = MemoryBackground::Ratchet { first: 2.0 * MIB, half: 6.0 };
    SimulatedWorld { backgrounds: vec![ratchet], ..quiet(seed, bytes) }
}

fn uneven(seed: u64, bytes: f64) -> SimulatedWorld {
    let leak = WorldLeak { chance: 1.0 / 3.0, ..WorldLeak::per_unit(WorkUnit::Request, 3.0 * bytes) };
    SimulatedWorld { leaks: vec![leak], ..quiet(seed, bytes) }
}

struct Rates {
    stops: f64,
    halves: f64,
    nothing: f64,
    legs: f64,
}

/// `legs` creates a leg from a seed; with `true`, a leg with the switch.
fn rates(runs: u64, legs: impl Fn(u64, bool) -> IntervalEstimate) -> Rates {
    let (mut counts, mut taken) = ([0_u32; 4], 0);
    for number in 0..runs {
        let (mut one, mut other) = (number * 1000, number * 1000 + 500);
        let mut without = || {
            one += 1;
            legs(one, false)
        };
        let mut with = || {
            other += 1;
            legs(other, true)
        };
        let (does, processes) = run(&mut without, &mut with);
        counts[does as usize] += 1;
        taken += processes;
    }
    let count = f64::from(u32::try_from(runs).unwrap());
    let [_, stops, halves, nothing] = counts.map(|number| f64::from(number) / count);
    Rates { stops, halves, nothing, legs: f64::from(u32::try_from(taken).unwrap()) / count }
}

fn of_kind(kind: Kind, bytes: f64, share: f64, runs: u64) -> Rates {
    rates(runs, |seed, with| leg(&kind(seed, if with { bytes * share } else { bytes })))
}

/// Returns the highest share that chance reaches once in a thousand times, at this true rate and number of
/// runs.
fn margin(rate: f64, runs: u64) -> f64 {
    let runs = f64::from(u32::try_from(runs).unwrap());
    rate + 3.1 * (rate * (1.0 - rate) / runs).sqrt() + 1.0 / runs
}

const KINDS: [(&str, Kind); 4] =
    [("quiet", quiet), ("heap", heap), ("settling", settling), ("uneven", uneven)];

/// Returns a leg with an error as large as its interval, from a process that differs from others of its kind.
fn ideal(seed: u64, rate: f64, noise: f64, scatter: f64) -> IntervalEstimate {
    let mut random = SplitMix::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let rate = rate * (1.0 + scatter * random.normal());
    let value = rate + noise * random.normal();
    // A real interval is estimated from some thirty floors.
    let half = INTERVAL_Z * noise * (1.0 + 0.15 * random.normal()).max(0.4);
    IntervalEstimate { value, low: value - half, high: value + half }
}

#[test]
fn however_much_legs_differ_both_errors_keep_to_what_is_declared() {
    let (policy, runs) = (policy(), 800);
    let base = 2.0 * MIB;
    let noise = 0.01 * base;
    // Scatter of legs without and with the switch.
    for (apart, with_apart) in [(0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.4, 0.4), (0.05, 0.4), (0.4, 0.05)] {
        let of = |share: f64| {
            rates(runs, |seed, with| {
                if with {
                    ideal(seed, base * share, noise, with_apart)
                } else {
                    ideal(seed, base, noise, apart)
                }
            })
        };
        for share in [policy.stops_share, policy.halves_share] {
            let stops = of(share).stops;
            assert!(
                stops <= margin(policy.false_cure, runs),
                "{apart} and {with_apart} apart, {share} left: {stops} cures"
            );
        }
        for share in [0.1, policy.stops_share] {
            let found = of(share);
            let missed = found.halves + found.nothing;
            assert!(
                missed <= margin(policy.missed_cure, runs),
                "{apart} and {with_apart} apart, {share} left: {missed} missed"
            );
        }
        // A cure as strong as the measured ones is found nevertheless.
        let cured = of(0.05);
        assert!(cured.stops > 0.85, "{apart} and {with_apart} apart: {} found", cured.stops);
    }
}

#[test]
fn legs_that_are_less_sure_cost_more_of_them_and_no_more_errors() {
    let (policy, runs) = (policy(), 800);
    let base = 2.0 * MIB;
    for noise in [0.05 * base, 0.15 * base, 0.4 * base] {
        let of = |share: f64| {
            rates(runs, |seed, with| ideal(seed, if with { base * share } else { base }, noise, 0.06))
        };
        let stops = of(policy.stops_share).stops;
        assert!(stops <= margin(policy.false_cure, runs), "noise {noise}: {stops} cures");
        let found = of(0.2);
        let missed = found.halves + found.nothing;
        assert!(missed <= margin(policy.missed_cure, runs), "noise {noise}: {missed} missed");
    }
    let sure = rates(runs, |seed, with| ideal(seed, if with { 0.0 } else { base }, 0.01 * base, 0.06));
    assert!(sure.stops > 0.99 && sure.legs < 9.0, "{} {}", sure.stops, sure.legs);
}

/// Full number only in the nightly run (`WARDEN_LONG`): each simulates processes with thousands of readings.
fn heaps() -> u64 {
    if std::env::var_os("WARDEN_LONG").is_some() { 60 } else { 15 }
}

#[test]
fn on_heaps_as_they_are_a_switch_that_leaves_too_much_is_called_a_cure_no_oftener_than_declared() {
    let (policy, runs) = (policy(), heaps());
    for (name, kind) in KINDS {
        // Shares above the limit; at the limit itself, the rates are those of ideal legs.
        for (bytes, share) in [(0.6 * MIB, 0.4), (1.2 * MIB, 0.4), (4.4 * MIB, 0.4), (1.2 * MIB, 1.0)] {
            let stops = of_kind(kind, bytes, share, runs).stops;
            let most = margin(policy.false_cure, runs);
            assert!(stops <= most, "{name}, {bytes:.0} bytes, {share} left: {stops} are called cures");
        }
    }
}

#[test]
fn on_heaps_as_they_are_a_cure_is_overlooked_no_oftener_than_declared_and_mostly_seen_soon() {
    let (policy, runs) = (policy(), 60);
    for (name, kind) in KINDS {
        let small = of_kind(kind, 1.2 * MIB, 0.0, runs);
        let missed = small.halves + small.nothing;
        assert!(missed <= margin(policy.missed_cure, runs), "{name}: {missed} are overlooked");
        // A leak and a cure as measured on a real server.
        let large = of_kind(kind, 4.4 * MIB, 0.01, runs);
        assert!(large.stops > 0.95, "{name}: only {} are seen", large.stops);
        assert!(large.legs < 10.0, "{name}: {} processes", large.legs);
    }
}

#[test]
fn what_does_nothing_is_given_up_after_a_process_or_two_mostly() {
    let useless = of_kind(quiet, 4.4 * MIB, 1.0, 100);
    assert!(useless.nothing > 0.98 && useless.legs < 5.5, "{} {}", useless.nothing, useless.legs);
    let half = of_kind(quiet, 4.4 * MIB, 0.48, 100);
    assert!(half.halves > 0.95 && half.legs < 12.0, "{} {}", half.halves, half.legs);
}

#[test]
fn a_share_close_to_a_limit_stays_undecided_instead_of_being_guessed() {
    let policy = policy();
    let mut without = || tight(4.4 * MIB);
    let mut with = || tight(4.4 * MIB * policy.stops_share);
    assert_eq!(
        run(&mut without, &mut with),
        (SwitchEffect::Undecided, 2 * policy.legs_most as usize + policy.baseline_least - 1)
    );
}

#[test]
fn the_bands_are_where_they_are_declared() {
    let policy = policy();
    let legs = |share: f64| vec![tight(4.4 * MIB * share); 6];
    let does = |share: f64| judge(&policy, &legs(1.0), &legs(share)).does;
    assert_eq!(does(0.0), SwitchEffect::Stops);
    assert_eq!(does(policy.stops_share * 0.7), SwitchEffect::Stops);
    assert_eq!(does(f64::midpoint(policy.stops_share, policy.halves_share)), SwitchEffect::Halves);
    assert_eq!(does(0.95), SwitchEffect::Nothing);
    assert_eq!(does(1.3), SwitchEffect::Nothing);
    let share = judge(&policy, &legs(1.0), &legs(0.5)).share.unwrap();
    assert!((share.value - 0.5).abs() < 1e-9 && share.low < 0.5 && share.high > 0.5, "{share:?}");
}

#[test]
fn a_leg_that_jumps_is_not_believed_alone() {
    let policy = policy();
    let base = vec![tight(1.0 * MIB), tight(1.0 * MIB)];
    let jump = IntervalEstimate { value: 1.0 * MIB, low: 0.2 * MIB, high: 3.0 * MIB };
    assert_eq!(judge(&policy, &base, &[jump]).does, SwitchEffect::Undecided);
    // Legs of one kind that differ widen the interval, however narrow their own intervals are.
    let apart = judge(&policy, &base, &[tight(0.0), tight(0.5 * MIB)]);
    assert_eq!(apart.does, SwitchEffect::Undecided);
}

#[test]
fn without_growth_or_without_legs_nothing_is_said() {
    let policy = policy();
    let legs = [tight(MIB)];
    assert_eq!(judge(&policy, &[], &legs).does, SwitchEffect::Undecided);
    assert_eq!(judge(&policy, &legs, &[]).does, SwitchEffect::Undecided);
    let flat = [IntervalEstimate { value: 0.0, low: -MIB, high: MIB }];
    let found = judge(&policy, &flat, &legs);
    assert_eq!((found.does, found.share), (SwitchEffect::Undecided, None));
    let blind = [IntervalEstimate { value: 0.0, low: -f64::MAX, high: f64::MAX }];
    assert_eq!(judge(&policy, &legs, &blind).does, SwitchEffect::Undecided);
}
