//! What holds a recycle back, and until when.

use super::*;
use crate::sample::GpuIndex;

const POLICY: RestraintPolicy = RestraintPolicy {
    min_interval: Duration::from_secs(600),
    min_interval_hard: Duration::from_secs(60),
    load_factor: 20.0,
    jitter: 0.0,
    max_futile: 3,
    growth_recycles: 3,
    growth_window: Duration::from_secs(6 * 3600),
    unreturned: 1000,
    unreturned_exits: 2,
};

const VRAM: Series = Series::Vram(GpuIndex(0));

fn wish(action: Action, reason: Reason, series: Series) -> Decision {
    Decision { action, reason: Some(reason), due: true, series: Some(series), ..Decision::OBSERVE }
}

fn soft() -> Decision {
    wish(Action::RecycleWhenQuiet, Reason::HostSoft, Series::Host)
}

fn hard() -> Decision {
    wish(Action::DrainNow, Reason::HostHard, Series::Host)
}

fn at(seconds: u64) -> Ask {
    Ask { now: Duration::from_secs(seconds), ..Ask::default() }
}

#[test]
fn the_first_recycle_is_free_and_the_next_waits_its_interval() {
    let mut restraint = Restraint::default();
    assert_eq!(restraint.check(&soft(), &at(5), &POLICY), Ok(()));
    assert_eq!(restraint.began(Duration::from_secs(5), Reason::HostSoft, &POLICY), None);
    assert_eq!(
        restraint.check(&soft(), &at(6), &POLICY),
        Err(Held::TooSoon { seconds_left: 599, rule: Pause::MinInterval })
    );
    assert_eq!(restraint.check(&hard(), &at(65), &POLICY), Ok(()));
    assert_eq!(restraint.check(&soft(), &at(605), &POLICY), Ok(()));
}

#[test]
fn a_machine_that_is_short_waits_for_no_pause_and_what_is_urgent_never_waits_longer() {
    let mut restraint = Restraint::default();
    restraint.began(Duration::ZERO, Reason::HostHard, &POLICY);
    let held = Held::TooSoon { seconds_left: 59, rule: Pause::MinIntervalHard };
    assert_eq!(restraint.check(&hard(), &at(1), &POLICY), Err(held));
    assert!(held.to_string().contains("`policy.min_interval_hard`"), "{held}");
    assert_eq!(restraint.check(&Decision { threat: true, ..hard() }, &at(1), &POLICY), Ok(()));
    let end = wish(Action::KillNow, Reason::MemoryExhausted, Series::Host);
    assert_eq!(restraint.check(&end, &at(1), &POLICY), Ok(()));
    let short = RestraintPolicy { min_interval: Duration::from_secs(10), ..POLICY };
    assert_eq!(restraint.check(&hard(), &at(10), &short), Ok(()), "ten seconds were asked for");
}

#[test]
fn a_model_that_loads_slowly_is_recycled_rarely() {
    let mut restraint = Restraint::default();
    restraint.began(Duration::ZERO, Reason::HostSoft, &POLICY);
    let ask = Ask { load_time: Some(Duration::from_secs(120)), ..at(2399) };
    assert_eq!(
        restraint.check(&soft(), &ask, &POLICY),
        Err(Held::TooSoon { seconds_left: 1, rule: Pause::LoadTime })
    );
    assert_eq!(restraint.check(&hard(), &ask, &POLICY), Ok(()));
}

#[test]
fn intervals_vary_by_the_jitter_both_ways() {
    let mut restraint = Restraint::default();
    restraint.began(Duration::ZERO, Reason::HostSoft, &POLICY);
    let policy = RestraintPolicy { jitter: 0.1, ..POLICY };
    let ask = |seconds, unit| Ask { unit, ..at(seconds) };
    assert_eq!(restraint.check(&soft(), &ask(540, 0.0), &policy), Ok(()));
    assert_eq!(
        restraint.check(&soft(), &ask(540, 0.5), &policy),
        Err(Held::TooSoon { seconds_left: 60, rule: Pause::MinInterval })
    );
    assert_eq!(
        restraint.check(&soft(), &ask(640, 0.999), &policy),
        Err(Held::TooSoon { seconds_left: 20, rule: Pause::MinInterval })
    );
}

#[test]
fn futile_recycles_switch_the_policy_off_once_and_a_useful_one_starts_the_count_again() {
    let mut restraint = Restraint::default();
    let off = Held::Futile { recycles: 3, series: Some(Series::Host) };
    for (helped, expected) in
        [(false, None), (false, None), (true, None), (false, None), (false, None), (false, Some(off))]
    {
        assert_eq!(restraint.ended(Series::Host, helped, &POLICY), expected);
    }
    assert_eq!(restraint.check(&hard(), &at(9999), &POLICY), Err(off));
    restraint.reset();
    assert_eq!(restraint.check(&hard(), &at(9999), &POLICY), Ok(()));
}

#[test]
fn what_does_not_help_one_memory_may_help_another_and_illness_is_not_about_memory() {
    let mut restraint = Restraint::default();
    for _ in 0..3 {
        restraint.ended(VRAM, false, &POLICY);
    }
    restraint.check(&wish(Action::DrainNow, Reason::VramHard, VRAM), &at(0), &POLICY).unwrap_err();
    assert_eq!(restraint.check(&hard(), &at(0), &POLICY), Ok(()));
    let fault = wish(Action::DrainNow, Reason::DeviceFault, VRAM);
    assert_eq!(restraint.check(&fault, &at(0), &POLICY), Ok(()));
}

#[test]
fn growth_that_comes_back_three_times_in_six_hours_recycles_nothing_more_but_budgets_do() {
    let mut restraint = Restraint::default();
    let hours = |n: u64| Duration::from_secs(n * 3600);
    assert_eq!(restraint.began(hours(0), Reason::Growth, &POLICY), None);
    assert_eq!(restraint.began(hours(7), Reason::Growth, &POLICY), None, "the first is out of the window");
    assert_eq!(restraint.began(hours(8), Reason::Growth, &POLICY), None);
    let off = Held::GrowthGoesOn { recycles: 3, seconds: 6 * 3600 };
    assert_eq!(restraint.began(hours(9), Reason::Growth, &POLICY), Some(off));
    let growth = wish(Action::RecycleWhenQuiet, Reason::Growth, Series::Host);
    assert_eq!(restraint.check(&growth, &at(100 * 3600), &POLICY), Err(off));
    assert_eq!(restraint.check(&soft(), &at(100 * 3600), &POLICY), Ok(()));
    assert!(off.to_string().contains("within 6 h"), "{off}");
}

#[test]
fn memory_that_stays_away_after_the_exit_is_the_drivers_and_no_reason_to_restart() {
    let mut restraint = Restraint::default();
    assert_eq!(restraint.exited(VRAM, Some(2000), &POLICY), None, "once may be somebody else");
    let leak = Held::DriverLeak { series: VRAM, bytes: 4000 };
    assert_eq!(restraint.exited(VRAM, Some(4000), &POLICY), Some(leak));
    let vram = wish(Action::DrainNow, Reason::VramHard, VRAM);
    assert_eq!(restraint.check(&vram, &at(0), &POLICY), Err(leak));
    assert_eq!(restraint.check(&hard(), &at(0), &POLICY), Ok(()));
    assert!(leak.to_string().contains("GPU 0"), "{leak}");
    assert_eq!(restraint.exited(VRAM, None, &POLICY), None);
    assert_eq!(restraint.check(&vram, &at(0), &POLICY), Ok(()), "it came back");
}

#[test]
fn a_little_noise_after_an_exit_is_not_missing_memory() {
    assert_eq!(unreturned(10_000, 9_500, 8_000), None);
    assert_eq!(unreturned(10_000, 4_000, 8_000), Some(6_000));
    assert_eq!(unreturned(10_000, 12_000, 8_000), None);
    assert_eq!(unreturned(10_000, 10_000, 0), None);
}

#[test]
fn a_recycle_helped_when_memory_is_clearly_lower_and_under_the_budget() {
    assert!(helped(1000, 100, None, Some(900)));
    assert!(!helped(1000, 950, None, None));
    assert!(!helped(1000, 500, None, Some(400)));
    assert!(helped(1000, 900, None, None));
    // Weights are most of it.
    assert!(helped(3300, 2978, Some(2970), Some(3250)), "all that had grown is gone");
    assert!(!helped(3300, 3100, Some(2970), None), "a third of it is left");
    assert!(!helped(1000, 950, Some(1000), None), "it had not grown: then the tenth counts");
}
