//! Reasons that hold a recycle back, and their ends.

use super::*;
use crate::defaults::{Levels, Recycle};
use crate::sample::GpuIndex;
use crate::units::ByteSize;

fn policy() -> RecyclePolicy {
    let defaults = crate::defaults();
    let common = Recycle {
        min_interval: Duration::from_secs(600),
        min_interval_hard: Duration::from_secs(60),
        load_factor: 20.0,
        jitter: 0.0,
        max_futile: 3,
        growth_recycles: 3,
        growth_window: Duration::from_secs(6 * 3600),
        ..defaults.recycle
    };
    let levels = Levels { unreturned: ByteSize(1000), unreturned_exits: 2, ..defaults.levels };
    RecyclePolicy { levels, ..RecyclePolicy::new(&common) }
}

fn with(change: impl FnOnce(&mut Recycle)) -> RecyclePolicy {
    let mut changed = policy();
    change(&mut changed.common);
    changed
}

const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));

fn wish(action: RecycleAction, reason: Reason, series: MemoryKind) -> RecycleDecision {
    RecycleDecision {
        action,
        reason: Some(reason),
        due: true,
        series: Some(series),
        ..RecycleDecision::OBSERVE
    }
}

fn soft() -> RecycleDecision {
    wish(RecycleAction::RecycleWhenQuiet, Reason::HostSoft, MemoryKind::Host)
}

fn hard() -> RecycleDecision {
    wish(RecycleAction::DrainNow, Reason::HostHard, MemoryKind::Host)
}

fn at(seconds: u64) -> CooldownQuery {
    CooldownQuery { now: Duration::from_secs(seconds), ..CooldownQuery::default() }
}

#[test]
fn the_first_recycle_is_free_and_the_next_waits_its_interval() {
    let mut cooldown = RecycleCooldown::default();
    assert_eq!(cooldown.check(&soft(), &at(5), &policy()), Ok(()));
    assert_eq!(cooldown.record_start(Duration::from_secs(5), Reason::HostSoft, &policy()), None);
    assert_eq!(
        cooldown.check(&soft(), &at(6), &policy()),
        Err(HoldReason::TooSoon { seconds_left: 599, rule: PauseRule::MinInterval })
    );
    assert_eq!(cooldown.check(&hard(), &at(65), &policy()), Ok(()));
    assert_eq!(cooldown.check(&soft(), &at(605), &policy()), Ok(()));
}

#[test]
fn a_machine_that_is_short_waits_for_no_pause_and_what_is_urgent_never_waits_longer() {
    let mut cooldown = RecycleCooldown::default();
    cooldown.record_start(Duration::ZERO, Reason::HostHard, &policy());
    let held = HoldReason::TooSoon { seconds_left: 59, rule: PauseRule::MinIntervalHard };
    assert_eq!(cooldown.check(&hard(), &at(1), &policy()), Err(held));
    assert!(held.to_string().contains("`policy.min_interval_hard`"), "{held}");
    assert_eq!(cooldown.check(&RecycleDecision { threat: true, ..hard() }, &at(1), &policy()), Ok(()));
    let end = wish(RecycleAction::KillNow, Reason::MemoryExhausted, MemoryKind::Host);
    assert_eq!(cooldown.check(&end, &at(1), &policy()), Ok(()));
    let short = with(|common| common.min_interval = Duration::from_secs(10));
    assert_eq!(cooldown.check(&hard(), &at(10), &short), Ok(()), "ten seconds were asked for");
}

#[test]
fn a_model_that_loads_slowly_is_recycled_rarely() {
    let mut cooldown = RecycleCooldown::default();
    cooldown.record_start(Duration::ZERO, Reason::HostSoft, &policy());
    let ask = CooldownQuery { load_time: Some(Duration::from_secs(120)), ..at(2399) };
    assert_eq!(
        cooldown.check(&soft(), &ask, &policy()),
        Err(HoldReason::TooSoon { seconds_left: 1, rule: PauseRule::LoadTime })
    );
    assert_eq!(cooldown.check(&hard(), &ask, &policy()), Ok(()));
}

#[test]
fn intervals_vary_by_the_jitter_both_ways() {
    let mut cooldown = RecycleCooldown::default();
    cooldown.record_start(Duration::ZERO, Reason::HostSoft, &policy());
    let policy = with(|common| common.jitter = 0.1);
    let ask = |seconds, unit| CooldownQuery { unit, ..at(seconds) };
    assert_eq!(cooldown.check(&soft(), &ask(540, 0.0), &policy), Ok(()));
    assert_eq!(
        cooldown.check(&soft(), &ask(540, 0.5), &policy),
        Err(HoldReason::TooSoon { seconds_left: 60, rule: PauseRule::MinInterval })
    );
    assert_eq!(
        cooldown.check(&soft(), &ask(640, 0.999), &policy),
        Err(HoldReason::TooSoon { seconds_left: 20, rule: PauseRule::MinInterval })
    );
}

#[test]
fn futile_recycles_switch_the_policy_off_once_and_a_useful_one_starts_the_count_again() {
    let mut cooldown = RecycleCooldown::default();
    let off = HoldReason::Futile { recycles: 3, series: Some(MemoryKind::Host) };
    for (helped, expected) in
        [(false, None), (false, None), (true, None), (false, None), (false, None), (false, Some(off))]
    {
        assert_eq!(cooldown.record_result(MemoryKind::Host, helped, &policy()), expected);
    }
    assert_eq!(cooldown.check(&hard(), &at(9999), &policy()), Err(off));
    cooldown.reset();
    assert_eq!(cooldown.check(&hard(), &at(9999), &policy()), Ok(()));
}

#[test]
fn what_does_not_help_one_memory_may_help_another_and_illness_is_not_about_memory() {
    let mut cooldown = RecycleCooldown::default();
    for _ in 0..3 {
        cooldown.record_result(VRAM, false, &policy());
    }
    cooldown.check(&wish(RecycleAction::DrainNow, Reason::VramHard, VRAM), &at(0), &policy()).unwrap_err();
    assert_eq!(cooldown.check(&hard(), &at(0), &policy()), Ok(()));
    let fault = wish(RecycleAction::DrainNow, Reason::DeviceFault, VRAM);
    assert_eq!(cooldown.check(&fault, &at(0), &policy()), Ok(()));
}

#[test]
fn growth_that_comes_back_three_times_in_six_hours_recycles_nothing_more_but_budgets_do() {
    let mut cooldown = RecycleCooldown::default();
    let hours = |n: u64| Duration::from_secs(n * 3600);
    assert_eq!(cooldown.record_start(hours(0), Reason::Growth, &policy()), None);
    assert_eq!(
        cooldown.record_start(hours(7), Reason::Growth, &policy()),
        None,
        "the first is out of the window"
    );
    assert_eq!(cooldown.record_start(hours(8), Reason::Growth, &policy()), None);
    let off = HoldReason::GrowthGoesOn { recycles: 3, seconds: 6 * 3600 };
    assert_eq!(cooldown.record_start(hours(9), Reason::Growth, &policy()), Some(off));
    let growth = wish(RecycleAction::RecycleWhenQuiet, Reason::Growth, MemoryKind::Host);
    assert_eq!(cooldown.check(&growth, &at(100 * 3600), &policy()), Err(off));
    assert_eq!(cooldown.check(&soft(), &at(100 * 3600), &policy()), Ok(()));
    assert!(off.to_string().contains("within 6 h"), "{off}");
}

#[test]
fn memory_that_stays_away_after_the_exit_is_the_drivers_and_no_reason_to_restart() {
    let mut cooldown = RecycleCooldown::default();
    assert_eq!(cooldown.record_exit(VRAM, Some(2000), &policy()), None, "once may be somebody else");
    let leak = HoldReason::DriverLeak { series: VRAM, bytes: 4000 };
    assert_eq!(cooldown.record_exit(VRAM, Some(4000), &policy()), Some(leak));
    let vram = wish(RecycleAction::DrainNow, Reason::VramHard, VRAM);
    assert_eq!(cooldown.check(&vram, &at(0), &policy()), Err(leak));
    assert_eq!(cooldown.check(&hard(), &at(0), &policy()), Ok(()));
    assert!(leak.to_string().contains("GPU 0"), "{leak}");
    assert_eq!(cooldown.record_exit(VRAM, None, &policy()), None);
    assert_eq!(cooldown.check(&vram, &at(0), &policy()), Ok(()), "it came back");
}

#[test]
fn a_little_noise_after_an_exit_is_not_missing_memory() {
    assert_eq!(unreturned_bytes(10_000, 9_500, 8_000), None);
    assert_eq!(unreturned_bytes(10_000, 4_000, 8_000), Some(6_000));
    assert_eq!(unreturned_bytes(10_000, 12_000, 8_000), None);
    assert_eq!(unreturned_bytes(10_000, 10_000, 0), None);
}

#[test]
fn a_recycle_helped_when_memory_is_clearly_lower_and_under_the_budget() {
    assert!(recycle_helped(1000, 100, None, Some(900)));
    assert!(!recycle_helped(1000, 950, None, None));
    assert!(!recycle_helped(1000, 500, None, Some(400)));
    assert!(recycle_helped(1000, 900, None, None));
    // Most of this process's memory is weights.
    assert!(recycle_helped(3300, 2978, Some(2970), Some(3250)), "all that had grown is gone");
    assert!(!recycle_helped(3300, 3100, Some(2970), None), "a third of it is left");
    assert!(!recycle_helped(1000, 950, Some(1000), None), "it had not grown: then the tenth counts");
}

#[test]
fn faulty_answers_of_a_second_process_within_six_hours_recycle_nothing_more_but_budgets_do() {
    let policy = policy();
    let time = |hours: u64| Duration::from_secs(hours * 3600);
    let (first, second, third) = (GenerationId(1), GenerationId(2), GenerationId(3));
    let ill = wish(RecycleAction::DrainNow, Reason::EmptyAnswers, MemoryKind::Host);
    let mut cooldown = RecycleCooldown::default();
    assert_eq!(cooldown.record_faulty_answers(time(0), first, &policy), None);
    cooldown.record_answers_recycle(time(0), first);
    // The old process still drains, and the next one was sound for seven hours.
    assert_eq!(cooldown.record_faulty_answers(time(0), first, &policy), None);
    let replica = GenerationId(0);
    assert_eq!(cooldown.record_faulty_answers(time(1), replica, &policy), None, "it ran at the recycle");
    assert_eq!(cooldown.record_faulty_answers(time(7), second, &policy), None);
    assert_eq!(cooldown.check(&ill, &at(7 * 3600), &policy), Ok(()));
    cooldown.record_answers_recycle(time(7), second);
    let held = HoldReason::AnswersStayFaulty;
    assert_eq!(cooldown.record_faulty_answers(time(12), third, &policy), Some(held));
    assert_eq!(cooldown.record_faulty_answers(time(12), third, &policy), None, "only once");
    for reason in Reason::ALL.iter().filter(|reason| reason.is_policy()) {
        let bar = cooldown.find_bar(*reason, None, None, &policy);
        assert_eq!(bar, reason.is_answers().then_some(held), "{reason}");
    }
    let kept: RecycleCooldown = serde_json::from_str(&serde_json::to_string(&cooldown).unwrap()).unwrap();
    assert_eq!(kept, cooldown, "the next instance knows it, too");
    cooldown.reset();
    assert_eq!(cooldown.check(&ill, &at(13 * 3600), &policy), Ok(()), "after an operator's restart");
}
