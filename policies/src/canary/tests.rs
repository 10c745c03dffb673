//! Simulated trials: error rates stay below the declared ones with a check after every request, and planted
//! faults are found.

use std::time::Duration;

use super::evidence::MoreDeaths;
use super::*;
use crate::growth::IntervalEstimate;
use crate::sample::MemoryKind;
use crate::world::SplitMix;

#[derive(Clone, Copy)]
struct Made {
    fails: f64,
    /// Factor on all times.
    slow: f64,
}

const SOUND: Made = Made { fails: 0.0, slow: 1.0 };

fn numbers() -> CanaryConfig {
    CanaryConfig { memory_requests: 0, ..crate::defaults().canary }
}

fn steady() -> ArmMemory {
    let growth =
        SeriesGrowth { verdict: GrowthVerdict::Steady, ..SeriesGrowth::without_readings(MemoryKind::Host) };
    ArmMemory { growth: vec![growth], host_at_ready: Some(1 << 30) }
}

fn ready(numbers: CanaryConfig) -> CanaryTrial {
    let mut trial = CanaryTrial::new(numbers);
    trial.record_memory(TrialArm::Base, steady());
    trial.record_memory(TrialArm::Canary, steady());
    trial
}

/// Plays a trial until it is over, with several similar requests per conversation. `noise`: deviation of a
/// latency's logarithm.
fn play(seed: u64, share: f64, noise: f64, base: Made, canary: Made) -> (CanaryVerdict, u64) {
    let mut random = SplitMix::new(seed);
    let mut trial = ready(CanaryConfig { requests: 600, ..numbers() });
    let mut conversation = 0_u64;
    loop {
        conversation += 1;
        let arm = if random.chance(share) { TrialArm::Canary } else { TrialArm::Base };
        let made = if arm == TrialArm::Canary { canary } else { base };
        // All turns of a conversation share the noise of its prompt.
        let own = random.normal() * noise;
        for _ in 0..=random.below(4) {
            let mut ms = |mean: f64| mean * made.slow * (own + random.normal() * noise / 4.0).exp();
            let (latency_ms, token_ms) = (Some(ms(300.0)), Some(ms(20.0)));
            let failed = random.chance(made.fails);
            trial.record_exchange(&TrialExchange { arm, conversation, failed, latency_ms, token_ms });
            let (verdict, over) = trial.judge(Duration::ZERO);
            if over {
                return (verdict, trial.report().canary.requests);
            }
        }
    }
}

/// Returns the share of trials with this verdict, and the mean number of canary requests.
fn rate(of: &str, share: f64, noise: f64, base: Made, canary: Made) -> (f64, f64) {
    const TRIALS: u32 = 100;
    let played: Vec<_> = (0..TRIALS).map(|seed| play(u64::from(seed), share, noise, base, canary)).collect();
    let hits = played.iter().filter(|(verdict, _)| verdict.as_str() == of).count();
    let requests: u64 = played.iter().map(|(_, requests)| requests).sum();
    let trials = f64::from(TRIALS);
    (units(hits as u64) / trials, units(requests) / trials)
}

fn units(value: u64) -> f64 {
    crate::units::as_f64(value)
}

#[test]
fn equal_builds_are_called_worse_as_rarely_as_declared_and_are_let_go_early() {
    for (share, noise, fails) in [(0.1, 0.2, 0.0), (0.5, 0.2, 0.02), (0.1, 0.5, 0.05), (0.5, 1.0, 0.2)] {
        let both = Made { fails, ..SOUND };
        let (worse, _) = rate("worse", share, noise, both, both);
        // At a rate of 0.01, 5 or more of 100 occur once in two hundred times.
        assert!(worse <= 0.04, "share {share}, noise {noise}, fails {fails}: {worse}");
    }
    let (equal, requests) = rate("better_or_equal", 0.1, 0.2, SOUND, SOUND);
    assert!(equal >= 0.95 && requests < 250.0, "{equal} after {requests}");
    let faster = Made { slow: 0.7, ..SOUND };
    let (better, _) = rate("better_or_equal", 0.1, 0.4, SOUND, faster);
    assert!(better >= 0.95, "{better}");
}

#[test]
fn a_build_that_fails_more_often_is_found_and_stopped_early() {
    for (share, fails, most) in [(0.1, 1.0, 8.0), (0.1, 0.3, 30.0), (0.1, 0.1, 120.0), (0.5, 0.3, 90.0)] {
        let (worse, requests) = rate("worse", share, 0.2, SOUND, Made { fails, ..SOUND });
        assert!(worse >= 0.95 && requests <= most, "share {share}, fails {fails}: {worse} after {requests}");
    }
    let (worse, _) = rate("worse", 0.1, 0.2, Made { fails: 0.05, ..SOUND }, Made { fails: 0.3, ..SOUND });
    assert!(worse >= 0.95, "{worse}");
}

#[test]
fn a_build_that_is_slower_is_found_and_one_at_the_margin_is_not_called_as_good() {
    for (noise, slow) in [(0.2, 1.5), (0.4, 2.0), (1.0, 4.0)] {
        let (worse, requests) = rate("worse", 0.1, noise, SOUND, Made { slow, ..SOUND });
        assert!(worse >= 0.95 && requests <= 300.0, "noise {noise}, {slow}: {worse} after {requests}");
    }
    // Latency and pace must agree, so the error rate is below that of each alone.
    let (equal, _) = rate("better_or_equal", 0.5, 0.1, SOUND, Made { slow: 1.0 + numbers().slower, ..SOUND });
    assert!(equal <= 0.08, "{equal}");
}

#[test]
fn requests_of_one_conversation_count_once_for_speeds() {
    let mut trial = ready(numbers());
    for _ in 0..1000 {
        for (arm, conversation, ms) in [(TrialArm::Base, 1, 10.0), (TrialArm::Canary, 2, 900.0)] {
            let (latency_ms, token_ms) = (Some(ms), Some(ms));
            trial.record_exchange(&TrialExchange { arm, conversation, failed: false, latency_ms, token_ms });
        }
    }
    let (verdict, over) = trial.judge(Duration::ZERO);
    assert!(!over && verdict.words().iter().all(|words| words.contains("conversations")), "{verdict:?}");
    assert_eq!(trial.patience(), numbers().patience_least);
}

#[test]
fn builds_that_die_alike_are_called_deadlier_as_seldom_as_declared_and_worse_ones_soon() {
    let called = |share: f64, times: f64, deaths: u32| {
        let rounds = 2000_u32;
        let (mut count, mut needed) = (0_u32, 0_u32);
        for seed in 0..rounds {
            let mut dice = SplitMix::new(u64::from(seed));
            let mut bets = MoreDeaths::new();
            let own = times * share / (times * share + 1.0 - share);
            for death in 1..=deaths {
                bets.add_death(dice.chance(own), share);
                if bets.wealth() >= 4.0 / numbers().wrong {
                    (count, needed) = (count + 1, needed + death);
                    break;
                }
            }
        }
        (f64::from(count) / f64::from(rounds), needed.checked_div(count).unwrap_or(0))
    };
    for share in [0.01, 0.1, 0.5] {
        let (rate, _) = called(share, 1.0, 100);
        assert!(rate <= numbers().wrong / 4.0 + 0.003, "{share}: {rate}");
        let (rate, deaths) = called(share, 200.0, 100);
        assert!(rate >= 0.98 && deaths <= 14, "{share}: {rate} after {deaths} deaths");
    }
}

#[test]
fn deaths_symptoms_and_leaks_of_one_build_only_are_reasons() {
    let worse = |trial: &CanaryTrial| match trial.judge(Duration::ZERO) {
        (CanaryVerdict::Worse { reasons }, true) => reasons,
        (verdict, _) => panic!("{verdict:?}"),
    };
    let undecided =
        |trial: &CanaryTrial| assert!(!trial.judge(Duration::ZERO).1, "{:?}", trial.judge(Duration::ZERO));
    let mut trial = ready(numbers());
    let request =
        |arm| TrialExchange { arm, conversation: 0, failed: false, latency_ms: None, token_ms: None };
    for _ in 0..9 {
        trial.record_exchange(&request(TrialArm::Canary));
        (0..9).for_each(|_| trial.record_exchange(&request(TrialArm::Base)));
    }
    for _ in 0..2 {
        trial.record_death(TrialArm::Canary);
        undecided(&trial);
    }
    trial.record_death(TrialArm::Canary);
    assert_eq!(worse(&trial), ["it died 3 times in 9 requests, the other 0 times in 81"]);
    (0..3).for_each(|_| trial.record_death(TrialArm::Base));
    undecided(&trial);

    let mut trial = ready(numbers());
    trial.record_symptom(TrialArm::Canary, "nothing moves".into());
    assert_eq!(worse(&trial), ["it has a health problem that the other has not: nothing moves"]);
    trial.record_symptom(TrialArm::Base, "nothing moves".into());
    undecided(&trial);

    let leak = |low, high| {
        let slope = Some(IntervalEstimate { value: f64::midpoint(low, high), low, high });
        let growth = SeriesGrowth {
            verdict: GrowthVerdict::Leaking,
            slope,
            ..SeriesGrowth::without_readings(MemoryKind::Host)
        };
        ArmMemory { growth: vec![growth], host_at_ready: None }
    };
    let mut trial = ready(numbers());
    trial.record_memory(TrialArm::Canary, leak(10.0, 20.0));
    assert_eq!(worse(&trial), ["it leaks host memory, and the other does not"]);
    trial.record_memory(TrialArm::Base, leak(15.0, 25.0));
    undecided(&trial);
    trial.record_memory(TrialArm::Base, leak(1.0, 2.0));
    assert_eq!(worse(&trial), ["both leak host memory, and it leaks more"]);
    assert_eq!(trial.report().canary.host_at_ready, Some(1 << 30));
}

#[test]
fn a_trial_has_an_end_and_says_what_is_missing() {
    let mut trial = CanaryTrial::new(CanaryConfig { requests: 3, memory_requests: 400, ..numbers() });
    let (verdict, over) = trial.judge(Duration::ZERO);
    assert!(!over);
    insta::assert_snapshot!(verdict.words().join("\n"));
    assert!(trial.judge(numbers().time).1, "time");
    for conversation in 0..3 {
        let (latency_ms, token_ms) = (Some(1.0), None);
        trial.record_exchange(&TrialExchange {
            arm: TrialArm::Canary,
            conversation,
            failed: false,
            latency_ms,
            token_ms,
        });
    }
    let (verdict, over) = trial.judge(Duration::ZERO);
    assert!(over && !verdict.is_decided(), "{verdict:?}");
    assert!(verdict.words()[0].contains("3 requests"), "{verdict:?}");
}

#[test]
fn memory_that_had_no_time_to_show_itself_is_missing() {
    let mut trial = ready(CanaryConfig { memory_requests: 300, ..numbers() });
    for conversation in 0..300 {
        let (verdict, _) = trial.judge(Duration::ZERO);
        assert_ne!(verdict, CanaryVerdict::BetterOrEqual, "after {conversation}");
        for arm in [TrialArm::Base, TrialArm::Canary] {
            let (latency_ms, token_ms) = (Some(5.0), Some(5.0));
            trial.record_exchange(&TrialExchange { arm, conversation, failed: false, latency_ms, token_ms });
        }
    }
    assert_eq!(trial.judge(Duration::ZERO), (CanaryVerdict::BetterOrEqual, true));
    trial.record_memory(TrialArm::Canary, ArmMemory::default());
    let (verdict, over) = trial.judge(Duration::ZERO);
    assert!(!over && verdict.words() == ["a reading of its memory"], "{verdict:?}");
}

#[test]
fn what_has_no_tokens_is_judged_without_them() {
    let mut trial = ready(numbers());
    for conversation in 0..400 {
        for arm in [TrialArm::Base, TrialArm::Canary] {
            let (latency_ms, token_ms) = (Some(5.0), None);
            trial.record_exchange(&TrialExchange { arm, conversation, failed: false, latency_ms, token_ms });
        }
    }
    assert_eq!(trial.judge(Duration::ZERO), (CanaryVerdict::BetterOrEqual, true));
}

#[test]
fn a_verdict_is_one_flat_object() {
    let json = serde_json::to_value(CanaryVerdict::worse("x")).unwrap();
    assert_eq!(json, serde_json::json!({"verdict": "worse", "reasons": ["x"]}));
    assert_eq!(serde_json::from_value::<CanaryVerdict>(json).unwrap(), CanaryVerdict::worse("x"));
}
