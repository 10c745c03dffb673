//! Tests the planner with simulated servers whose cures are known.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::sequential::SwitchEffect;
use crate::{GrowthEnd, LegEnd, LegSpeed, SeriesFinding, Workload};
use warden_policies::growth::{GrowthVerdict, IntervalEstimate};
use warden_policies::sample::{GpuIndex, MemoryKind, WorkDone};

const MIB: f64 = 1024.0 * 1024.0;
const SERIES: [MemoryKind; 3] =
    [MemoryKind::Host, MemoryKind::Vram(GpuIndex(0)), MemoryKind::Vram(GpuIndex(1))];

/// A leak, and the switches that each stop it alone; with no such switch, the leak cannot be stopped.
#[derive(Clone, Debug)]
struct OneLeak {
    series: usize,
    bytes: f64,
    cured_by: Vec<usize>,
}

#[derive(Clone, Debug, Default)]
struct Server {
    switches: usize,
    leaks: Vec<OneLeak>,
    clashes: Vec<[usize; 2]>,
    crash: Vec<usize>,
    /// Tokens per second with each switch, as a share.
    speed: Vec<(usize, f64)>,
    /// The server leaks unless all of these are on.
    only_together: Vec<usize>,
}

impl Server {
    fn finding(&self, arm: &SwitchSet) -> LegFinding {
        let on = |one: &usize| arm.switches.contains(one);
        let mut series: Vec<SeriesFinding> = Vec::new();
        for (index, name) in SERIES.iter().enumerate() {
            let mut rate = 0.0;
            for leak in self.leaks.iter().filter(|leak| leak.series == index) {
                if !leak.cured_by.iter().any(on) {
                    rate += leak.bytes;
                }
            }
            if index == 0 && !self.only_together.is_empty() && !self.only_together.iter().all(on) {
                rate += 3.0 * MIB;
            }
            series.push(found(*name, rate));
        }
        let slower: f64 = self.speed.iter().filter(|(one, _)| on(one)).map(|(_, share)| *share).product();
        let ended = if self.crash.iter().any(on) {
            LegEnd::Crashed { why: "exit status 1".into() }
        } else {
            LegEnd::Complete
        };
        finding(series, 100.0 * slower, ended)
    }

    /// Returns the size of the smallest set that stops all curable leaks, and the memories of those leaks.
    fn smallest(&self) -> (usize, Vec<usize>) {
        let leaking = |series: usize| self.leaks.iter().any(|leak| leak.series == series);
        let curable = |series: usize| {
            leaking(series)
                && self
                    .leaks
                    .iter()
                    .filter(|leak| leak.series == series)
                    .all(|leak| !leak.cured_by.is_empty())
        };
        let targets: Vec<usize> = (0..SERIES.len()).filter(|series| curable(*series)).collect();
        let does = |set: &usize| {
            let on = |one: &usize| set & (1 << one) != 0;
            let of = |leak: &&OneLeak| targets.contains(&leak.series);
            self.leaks.iter().filter(of).all(|leak| leak.cured_by.iter().any(on))
        };
        let least = (0..1_usize << self.switches).filter(does).map(usize::count_ones).min();
        (least.map_or(0, |count| count as usize), targets)
    }
}

fn found(series: MemoryKind, rate: f64) -> SeriesFinding {
    let interval = IntervalEstimate { value: rate, low: rate * 0.98 - 100.0, high: rate * 1.02 + 100.0 };
    SeriesFinding {
        series,
        verdict: if rate > 0.0 { GrowthVerdict::Leaking } else { GrowthVerdict::Steady },
        per_request: Some(interval),
        pooled_per_request: None,
        per_prompt_token: None,
        per_output_token: None,
        per_image: None,
        settles: GrowthEnd::Unknown,
        blame: None,
        first: 0,
        last: 0,
        peak: 0,
        sees: 1.0,
        graphs: None,
    }
}

fn finding(series: Vec<SeriesFinding>, rate: f64, ended: LegEnd) -> LegFinding {
    LegFinding {
        workload: Workload::SameImage,
        steps: 100,
        enough: 64,
        requests: 100,
        work: WorkDone::default(),
        series,
        speed: LegSpeed {
            tokens_per_second: Some(rate),
            first_token: Some(Duration::from_millis(50)),
            requests: 100,
        },
        ended,
        crash: None,
        control: false,
    }
}

fn numbers() -> CurePolicy {
    warden_policies::defaults().diagnose.cure.clone()
}

/// Returns the conclusion, and the tried sets in running order.
fn cure(server: &Server, policy: &CurePolicy) -> (CureConclusion, Vec<SwitchSet>) {
    let mut planner = CurePlanner::new(policy, server.switches, server.clashes.clone());
    let mut arms = Vec::new();
    loop {
        match planner.next() {
            CureStep::Done(conclusion) => return (conclusion, arms),
            CureStep::Run(arm) => {
                assert_eq!(planner.next(), CureStep::Run(arm.clone()), "asking twice changes nothing");
                for pair in &server.clashes {
                    assert!(!pair.iter().all(|one| arm.switches.contains(one)), "{arm:?} with {pair:?}");
                }
                planner.observe(&arm, &[server.finding(&arm)]);
                arms.push(arm);
                assert!(arms.len() < 2000, "it does not end");
            }
        }
    }
}

fn leak(series: usize, cured_by: &[usize]) -> OneLeak {
    OneLeak { series, bytes: 4.0 * MIB, cured_by: cured_by.to_vec() }
}

#[test]
fn a_server_without_a_leak_has_nothing_to_cure() {
    let (conclusion, arms) = cure(&Server { switches: 3, ..Server::default() }, &numbers());
    assert_eq!((conclusion.outcome, arms.len()), (CureOutcome::NothingToCure, 1));
}

#[test]
fn the_switch_that_cures_is_named_and_no_other() {
    for curing in 0..5 {
        let leaks = vec![leak(0, &[curing]), leak(1, &[curing])];
        let (conclusion, _) = cure(&Server { switches: 5, leaks, ..Server::default() }, &numbers());
        assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::Cured, vec![curing]));
        assert_eq!(conclusion.stopped.len(), 2);
    }
}

#[test]
fn a_cure_is_seen_twice_and_every_trial_alternates_with_the_baseline() {
    let server = Server { switches: 3, leaks: vec![leak(0, &[1])], ..Server::default() };
    let (conclusion, arms) = cure(&server, &numbers());
    let of = |switches: &[usize]| arms.iter().filter(|arm| arm.switches == switches).count();
    assert_eq!((of(&[]), of(&[0]), of(&[1]), of(&[2])), (4, 1, 2, 0), "{arms:?}");
    let order: Vec<&[usize]> = arms.iter().map(|arm| arm.switches.as_slice()).collect();
    assert_eq!(order, [&[] as &[usize], &[], &[], &[0], &[1], &[], &[1]]);
    assert_eq!(conclusion.legs, arms.len());
}

#[test]
fn two_leaks_in_one_memory_need_both_switches_and_useless_ones_are_left_out() {
    let leaks = vec![
        OneLeak { series: 0, bytes: 3.0 * MIB, cured_by: vec![1] },
        OneLeak { series: 0, bytes: 1.5 * MIB, cured_by: vec![4] },
    ];
    let (conclusion, _) = cure(&Server { switches: 6, leaks, ..Server::default() }, &numbers());
    assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::Cured, vec![1, 4]));
}

#[test]
fn each_memory_may_have_its_own_cure() {
    let leaks = vec![leak(0, &[2]), leak(1, &[0])];
    let (conclusion, _) = cure(&Server { switches: 3, leaks, ..Server::default() }, &numbers());
    assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::Cured, vec![0, 2]));
    let of = |series: MemoryKind| {
        conclusion.by_track.iter().find(|(track, _)| track.series == series).map(|(_, set)| set.clone())
    };
    assert_eq!((of(SERIES[0]), of(SERIES[1])), (Some(vec![2]), Some(vec![0])));
}

#[test]
fn what_nothing_stops_is_left_and_told() {
    let leaks = vec![leak(0, &[1]), leak(1, &[])];
    let (conclusion, _) = cure(&Server { switches: 3, leaks, ..Server::default() }, &numbers());
    assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::PartlyCured, vec![1]));
    assert_eq!(conclusion.stopped.iter().map(|track| track.series).collect::<Vec<_>>(), [MemoryKind::Host]);
    let (conclusion, _) =
        cure(&Server { switches: 3, leaks: vec![leak(0, &[])], ..Server::default() }, &numbers());
    assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::NotCured, vec![]));
    let (conclusion, _) = cure(&Server { leaks: vec![leak(0, &[])], ..Server::default() }, &numbers());
    assert_eq!(conclusion.outcome, CureOutcome::NotCured, "no switches at all");
}

#[test]
fn switches_that_help_only_together_are_found_and_nothing_can_be_spared_of_them() {
    let server = Server { switches: 6, only_together: vec![1, 3, 4], ..Server::default() };
    let (conclusion, _) = cure(&server, &numbers());
    assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::Cured, vec![1, 3, 4]));
}

#[test]
fn a_dear_cure_is_beaten_by_a_cheap_one_later_in_the_list() {
    let both = vec![leak(0, &[0, 2])];
    let server =
        Server { switches: 4, leaks: both.clone(), speed: vec![(0, 0.8), (2, 0.99)], ..Server::default() };
    let (conclusion, _) = cure(&server, &numbers());
    assert_eq!(conclusion.cure, [2]);
    let first = conclusion.trials.iter().find(|trial| trial.switches == [0]).unwrap();
    let rate = first.cost.tokens_per_second.unwrap();
    assert!((rate.change() + 0.2).abs() < 1e-9, "{rate:?}");
    let cheap = Server { switches: 4, leaks: both, speed: vec![(0, 0.99)], ..Server::default() };
    let (conclusion, arms) = cure(&cheap, &numbers());
    assert_eq!(conclusion.cure, [0], "the first, when it is cheap");
    assert!(arms.iter().all(|arm| arm.switches.len() < 2 && !arm.switches.contains(&1)), "{arms:?}");
    let only = Server { switches: 2, leaks: vec![leak(0, &[1])], speed: vec![(1, 0.7)], ..Server::default() };
    assert_eq!(cure(&only, &numbers()).0.cure, [1], "a dear cure is one, too");
}

#[test]
fn a_switch_with_which_the_server_does_not_start_is_told_and_never_used_again() {
    let leaks = vec![leak(0, &[1]), leak(1, &[2])];
    let server = Server { switches: 3, leaks, crash: vec![0], ..Server::default() };
    let (conclusion, arms) = cure(&server, &numbers());
    assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::Cured, vec![1, 2]));
    assert_eq!(arms.iter().filter(|arm| arm.switches.contains(&0)).count(), 1);
    assert_eq!(conclusion.trials[0].crashed.as_deref(), Some("exit status 1"));
}

#[test]
fn a_server_that_fails_by_itself_ends_the_experiment() {
    let policy = numbers();
    let mut planner = CurePlanner::new(&policy, 2, Vec::new());
    let crash = finding(Vec::new(), 1.0, LegEnd::Crashed { why: "no model".into() });
    for _ in 0..policy.baseline_failures {
        assert_eq!(planner.next(), CureStep::Run(SwitchSet::default()));
        planner.observe(&SwitchSet::default(), std::slice::from_ref(&crash));
    }
    let CureStep::Done(conclusion) = planner.next() else { panic!("it goes on") };
    assert_eq!(conclusion.outcome, CureOutcome::BaselineFailed { why: "no model".into() });
}

#[test]
fn a_suspicion_is_looked_at_twice() {
    let policy = numbers();
    let suspected = |rate: f64| {
        let series = SeriesFinding { verdict: GrowthVerdict::Suspected, ..found(MemoryKind::Host, rate) };
        finding(vec![series], 100.0, LegEnd::Complete)
    };
    let mut planner = CurePlanner::new(&policy, 1, Vec::new());
    planner.observe(&SwitchSet::default(), &[suspected(MIB)]);
    assert_eq!(planner.next(), CureStep::Run(SwitchSet::default()));
    let mut again = planner.clone();
    planner.observe(&SwitchSet::default(), &[suspected(MIB)]);
    assert_eq!(
        planner.next(),
        CureStep::Run(SwitchSet::default()),
        "twice is a leak, and how much processes differ is not known yet"
    );
    planner.observe(&SwitchSet::default(), &[suspected(MIB)]);
    assert_eq!(planner.next(), CureStep::Run(SwitchSet { switches: vec![0] }));
    again.observe(
        &SwitchSet::default(),
        &[finding(vec![found(MemoryKind::Host, 0.0)], 100.0, LegEnd::Complete)],
    );
    assert!(
        matches!(again.next(), CureStep::Done(conclusion) if conclusion.outcome == CureOutcome::NothingToCure)
    );
}

fn leg(verdicts: &[(MemoryKind, GrowthVerdict)]) -> LegFinding {
    let one = |(series, verdict): &(MemoryKind, GrowthVerdict)| {
        let rate = if *verdict >= GrowthVerdict::Suspected { MIB } else { 0.0 };
        SeriesFinding { verdict: *verdict, ..found(*series, rate) }
    };
    finding(verdicts.iter().map(one).collect(), 100.0, LegEnd::Complete)
}

#[test]
fn a_suspicion_beside_a_clear_leak_is_looked_at_twice_and_has_to_be_cured_too() {
    let [host, vram] = [SERIES[0], SERIES[1]];
    let mut planner = CurePlanner::new(&numbers(), 2, Vec::new());
    let both = leg(&[(host, GrowthVerdict::Leaking), (vram, GrowthVerdict::Suspected)]);
    planner.observe(&SwitchSet::default(), std::slice::from_ref(&both));
    assert_eq!(planner.next(), CureStep::Run(SwitchSet::default()));
    let mut again = planner.clone();
    planner.observe(&SwitchSet::default(), &[both]);
    again.observe(
        &SwitchSet::default(),
        &[leg(&[(host, GrowthVerdict::Leaking), (vram, GrowthVerdict::Steady)])],
    );
    for (mut planner, leaks) in [(planner, vec![host, vram]), (again, vec![host])] {
        assert_eq!(planner.next(), CureStep::Run(SwitchSet::default()));
        planner.observe(
            &SwitchSet::default(),
            &[leg(&[(host, GrowthVerdict::Leaking), (vram, GrowthVerdict::Steady)])],
        );
        assert_eq!(planner.next(), CureStep::Run(SwitchSet { switches: vec![0] }));
        let leaking: Vec<MemoryKind> = planner.interrupt().leaking.iter().map(|track| track.series).collect();
        assert_eq!(leaking, leaks);
    }
}

#[test]
fn too_few_readings_are_no_proof_that_nothing_leaks() {
    let mut planner = CurePlanner::new(&numbers(), 1, Vec::new());
    while let CureStep::Run(arm) = planner.next() {
        planner.observe(&arm, &[leg(&[(MemoryKind::Host, GrowthVerdict::Warming)])]);
    }
    let outcome = planner.interrupt().outcome;
    assert!(matches!(&outcome, CureOutcome::NotKnown { why } if why.contains("too few")), "{outcome:?}");
}

#[test]
fn what_the_detector_still_calls_a_leak_is_not_stopped() {
    let policy = numbers();
    let mut planner = CurePlanner::new(&policy, 1, Vec::new());
    while let CureStep::Run(arm) = planner.next() {
        let rate = if arm.is_baseline() { 10.0 * MIB } else { 0.5 * MIB };
        planner.observe(&arm, &[finding(vec![found(MemoryKind::Host, rate)], 100.0, LegEnd::Complete)]);
    }
    let conclusion = planner.interrupt();
    assert_eq!((conclusion.outcome, conclusion.cure), (CureOutcome::NotCured, vec![]));
    assert_eq!(conclusion.trials[0].tracks[0].1.does, SwitchEffect::Halves);
}

#[test]
fn an_interruption_tells_what_is_known() {
    let server = Server { switches: 3, leaks: vec![leak(0, &[2])], ..Server::default() };
    let mut planner = CurePlanner::new(&numbers(), 3, Vec::new());
    for _ in 0..5 {
        let CureStep::Run(arm) = planner.next() else { panic!("it ended") };
        planner.observe(&arm, &[server.finding(&arm)]);
    }
    let conclusion = planner.interrupt();
    assert_eq!((conclusion.outcome, conclusion.legs), (CureOutcome::Interrupted, 5));
    assert_eq!(conclusion.trials.len(), 2);
    assert_eq!(conclusion.trials[0].tracks[0].1.does, SwitchEffect::Nothing);
}

#[test]
fn what_is_known_to_be_no_cure_takes_no_more_processes_however_close_to_a_limit_it_is() {
    // Three similar leaks: each switch alone leaves about two thirds, and two of them about a third.
    let sized = |bytes: f64, cured_by: &[usize]| OneLeak { series: 1, bytes, cured_by: cured_by.to_vec() };
    let leaks = vec![sized(5_391_621.0, &[0, 2]), sized(4_913_028.0, &[1, 4]), sized(4_554_770.0, &[3])];
    let (conclusion, arms) = cure(&Server { switches: 5, leaks, ..Server::default() }, &numbers());
    assert_eq!((conclusion.outcome, conclusion.cure.len()), (CureOutcome::Cured, 3));
    for trial in &conclusion.trials {
        assert!(trial.legs <= 2 && trial.tracks[0].1.does != SwitchEffect::Undecided, "{trial:?}");
    }
    assert!(arms.len() < 80, "{} processes", arms.len());
}

fn leaks(switches: usize) -> impl Strategy<Value = Vec<OneLeak>> {
    let one = (0..SERIES.len(), 1.0..6.0_f64, proptest::collection::btree_set(0..switches, 0..3)).prop_map(
        |(series, mib, cured_by)| OneLeak {
            series,
            bytes: mib * MIB,
            cured_by: cured_by.into_iter().collect(),
        },
    );
    proptest::collection::vec(one, 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_smallest_set_is_found_within_a_bound(server in (1..7_usize).prop_flat_map(|switches| {
        leaks(switches).prop_map(move |leaks| Server { switches, leaks, ..Server::default() })
    })) {
        let policy = CurePolicy { sets_most: 1000, set_size: 7, sets_listed: 10_000, ..numbers() };
        let (least, targets) = server.smallest();
        let (conclusion, arms) = cure(&server, &policy);
        let stopped: Vec<MemoryKind> = conclusion.stopped.iter().map(|track| track.series).collect();
        for target in &targets {
            prop_assert!(stopped.contains(&SERIES[*target]), "{:?} is not stopped", SERIES[*target]);
        }
        prop_assert_eq!(conclusion.cure.len(), least, "{:?}", conclusion.cure);
        prop_assert!(arms.len() <= 8 * ((1 << server.switches) + 4), "{} processes", arms.len());
        let all = conclusion.leaking.len() == targets.len();
        prop_assert_eq!(conclusion.outcome == CureOutcome::Cured, all && !targets.is_empty());
    }

    #[test]
    fn with_the_default_numbers_it_ends_soon_and_what_it_names_cures(server in (1..16_usize).prop_flat_map(|switches| {
        let pairs = proptest::collection::vec((0..switches, 0..switches), 0..4);
        let crash = proptest::collection::vec(0..switches, 0..2);
        (leaks(switches), pairs, crash).prop_map(move |(leaks, pairs, crash)| {
            let clashes = pairs.into_iter().filter(|(a, b)| a != b).map(|(a, b)| [a, b]).collect();
            Server { switches, leaks, clashes, crash, ..Server::default() }
        })
    })) {
        let policy = numbers();
        let (conclusion, arms) = cure(&server, &policy);
        let trials = 2 * server.switches + policy.sets_most as usize + 3;
        prop_assert!(arms.len() <= 4 * trials, "{} processes for {} switches", arms.len(), server.switches);
        let set = SwitchSet { switches: conclusion.cure.clone() };
        let seen = server.finding(&set);
        for track in &conclusion.stopped {
            prop_assert_eq!(seen.series_of(track.series).unwrap().verdict, GrowthVerdict::Steady);
        }
        prop_assert!(conclusion.cure.iter().all(|one| !server.crash.contains(one)));
        for spared in &conclusion.cure {
            let less: Vec<usize> = conclusion.cure.iter().copied().filter(|one| one != spared).collect();
            let rest = server.finding(&SwitchSet { switches: less });
            let stops = |track: &WorkloadMemory| rest.series_of(track.series).unwrap().verdict == GrowthVerdict::Steady;
            prop_assert!(!conclusion.stopped.iter().all(stops), "{} can be spared", spared);
        }
    }
}
