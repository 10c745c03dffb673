//! Checks the declared error rates by enumerating all sequences of deaths and survivals.

use super::*;

fn policy() -> CrashPolicy {
    warden_policies::defaults().diagnose.crash.clone()
}

const fn died(requests: u64) -> CrashRun {
    CrashRun { requests, died: true }
}

const fn survived(requests: u64) -> CrashRun {
    CrashRun { requests, died: false }
}

/// Adds up the probability of each verdict, over all sequences, for a crash with this death probability.
fn course(policy: &CrashPolicy, chance: f64, runs: &mut Vec<CrashRun>, weight: f64, found: &mut [f64; 3]) {
    let place = match judge_recurrence(policy, runs) {
        CrashRecurrence::Undecided => {
            for (run, share) in [(died(20), chance), (survived(100), 1.0 - chance)] {
                runs.push(run);
                course(policy, chance, runs, weight * share, found);
                runs.pop();
            }
            return;
        }
        CrashRecurrence::Always => 0,
        CrashRecurrence::Sometimes => 1,
        CrashRecurrence::NotAgain => 2,
    };
    found[place] += weight;
}

#[test]
fn what_comes_half_of_the_time_is_hardly_ever_called_certain_and_what_is_certain_hardly_ever_not() {
    let policy = policy();
    for (chance, always_most, always_least) in [
        (policy.seldom, policy.false_always, 0.0),
        (0.2, 0.01, 0.0),
        (policy.always, 1.0, 0.75),
        (1.0, 1.0, 1.0),
    ] {
        let mut found = [0.0; 3];
        course(&policy, chance, &mut Vec::new(), 1.0, &mut found);
        assert!((found.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{found:?}");
        assert!(found[0] <= always_most && found[0] >= always_least, "{chance}: {found:?}");
        // Wald's bounds do not hold at the largest number of processes, where the verdict is `Sometimes`.
        if chance >= policy.always {
            assert!(found[2] <= policy.false_seldom, "{chance}: {found:?}");
        }
    }
    assert_eq!(judge_recurrence(&policy, &[]), CrashRecurrence::Undecided);
}

/// Returns the probability that a switch without effect is called a cure. Repetitions run until they are
/// judged; then processes with and without the switch alternate.
fn false_cure(policy: &CrashPolicy, chance: f64) -> f64 {
    fn repeat(policy: &CrashPolicy, chance: f64, runs: &mut Vec<CrashRun>, weight: f64) -> f64 {
        if weight < 1e-8 {
            return 0.0;
        }
        if judge_recurrence(policy, runs) != CrashRecurrence::Undecided {
            return turns(policy, chance, runs, &mut Vec::new(), weight);
        }
        let mut all = 0.0;
        for (run, share) in [(died(30), chance), (survived(180), 1.0 - chance)] {
            runs.push(run);
            all += repeat(policy, chance, runs, weight * share);
            runs.pop();
        }
        all
    }
    fn turns(
        policy: &CrashPolicy,
        chance: f64,
        without: &mut Vec<CrashRun>,
        with: &mut Vec<CrashRun>,
        weight: f64,
    ) -> f64 {
        if weight < 1e-8 || with.len() >= policy.runs_most {
            return 0.0;
        }
        // A death with the switch ends the test without a cure.
        let weight = weight * (1.0 - chance);
        with.push(survived(180));
        let mut all = 0.0;
        if judge(policy, without, with) == SwitchEffect::Stops {
            all += weight;
        } else {
            for (run, share) in [(died(30), chance), (survived(180), 1.0 - chance)] {
                without.push(run);
                if judge(policy, without, with) == SwitchEffect::Stops {
                    all += weight * share;
                } else {
                    all += turns(policy, chance, without, with, weight * share);
                }
                without.pop();
            }
        }
        with.pop();
        all
    }
    repeat(policy, chance, &mut Vec::new(), 1.0)
}

#[test]
fn a_switch_without_effect_is_called_a_cure_as_seldom_as_is_declared_however_often_the_server_dies() {
    let policy = policy();
    for percent in [10, 25, 40, 50, 60, 70, 80, 90, 97] {
        let found = false_cure(&policy, f64::from(percent) / 100.0);
        assert!(found <= policy.false_cure, "{percent} %: {found}");
    }
}

#[test]
fn a_cure_of_a_certain_crash_is_found_after_a_few_processes() {
    let policy = policy();
    let mut without = vec![died(22); 5];
    let mut with = Vec::new();
    let mut legs = 0;
    while judge(&policy, &without, &with) == SwitchEffect::Undecided {
        with.push(survived(184));
        without.push(died(22));
        legs += 1;
        assert!(legs <= 3, "{}", no_effect_probability(&without, &with));
    }
    assert_eq!(judge(&policy, &without, &[survived(184), died(3)]), SwitchEffect::Nothing);
}

#[test]
fn who_survived_fewer_requests_than_it_takes_to_die_has_shown_nothing() {
    let policy = policy();
    assert_eq!(judge(&policy, &[died(100); 8], &[survived(10); 4]), SwitchEffect::Undecided);
    assert_eq!(judge(&policy, &[died(100); 8], &[survived(300); 4]), SwitchEffect::Stops);
    assert!((no_effect_probability(&[survived(9)], &[survived(9)]) - 1.0).abs() < 1e-9, "nothing died");
}
