//! Tests of the actions at each level of memory, growth and health.

use proptest::prelude::*;

use super::*;
use crate::cooldown::HoldReason;
use crate::defaults::Recycle;
use crate::growth::{GrowthVerdict, IntervalEstimate, SeriesGrowth};
use crate::health::{HealthSymptom, LimitBasis, SilenceLimit};
use crate::sample::{GpuIndex, WorkDone};
use crate::schedule::DayWindows;
use crate::share::SharedChoice;
use crate::units::{ByteSize, MemoryLimit};

#[expect(clippy::unnecessary_wraps, reason = "every limit may be missing")]
pub(super) fn mib(n: u64) -> Option<MemoryLimit> {
    Some(MemoryLimit::Bytes(ByteSize::mib(n)))
}

pub(super) fn policy() -> RecyclePolicy {
    RecyclePolicy {
        host_soft: mib(100),
        host_hard: mib(200),
        max_requests: Some(1000),
        max_age: Some(Duration::from_secs(3600)),
        ..RecyclePolicy::new(&Recycle {
            jitter: 0.1,
            quiet_for: Duration::from_secs(2),
            quiet_within: Duration::from_secs(600),
            ..crate::defaults().recycle
        })
    }
}

fn with_growth(growth: GrowthMode, policy: RecyclePolicy) -> RecyclePolicy {
    RecyclePolicy { common: Recycle { growth, ..policy.common }, ..policy }
}

fn facts(host_mib: u64) -> RecycleFacts {
    let host = SeriesFacts::from_bytes(MemoryKind::Host, Some(host_mib * 1024 * 1024));
    RecycleFacts { series: vec![host], unit: 0.5, ..RecycleFacts::default() }
}

#[test]
fn below_the_budgets_nothing_happens() {
    assert_eq!(decide(&policy(), &facts(99)), RecycleDecision::OBSERVE);
    let unknown = SeriesFacts::from_bytes(MemoryKind::Host, None);
    assert_eq!(
        decide(&policy(), &RecycleFacts { series: vec![unknown], ..facts(0) }),
        RecycleDecision::OBSERVE
    );
}

#[test]
fn past_the_soft_budget_it_waits_for_quiet_but_not_for_ever() {
    let busy = decide(&policy(), &facts(100));
    assert_eq!(
        (busy.action, busy.reason, busy.due),
        (RecycleAction::RecycleWhenQuiet, Some(Reason::HostSoft), false)
    );
    let quiet = RecycleFacts { idle_for: Some(Duration::from_secs(2)), ..facts(100) };
    assert!(decide(&policy(), &quiet).due);
    let late = RecycleFacts { wanted_for: Some(Duration::from_secs(600)), ..facts(100) };
    assert!(decide(&policy(), &late).due);
}

#[test]
fn past_the_hard_budget_it_drains_now() {
    let decision = decide(&policy(), &facts(200));
    assert_eq!(
        (decision.action, decision.reason, decision.due),
        (RecycleAction::DrainNow, Some(Reason::HostHard), true)
    );
}

#[test]
fn requests_and_age_count_with_jitter_that_never_exceeds_the_limit() {
    let work = WorkDone { requests: 950, ..WorkDone::default() };
    assert_eq!(decide(&policy(), &RecycleFacts { work, ..facts(0) }).reason, Some(Reason::MaxRequests));
    assert_eq!(decide(&policy(), &RecycleFacts { work, unit: 0.0, ..facts(0) }).reason, None);
    let age = Duration::from_secs(3420);
    assert_eq!(decide(&policy(), &RecycleFacts { age, ..facts(0) }).reason, Some(Reason::MaxAge));
}

pub(super) const MIB: u64 = 1024 * 1024;
pub(super) const GIB: u64 = 1024 * MIB;
pub(super) const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));

pub(super) fn growth(series: MemoryKind, verdict: GrowthVerdict, baseline: u64) -> SeriesGrowth {
    SeriesGrowth {
        verdict,
        since_request: 100,
        baseline: Some(baseline),
        ..SeriesGrowth::without_readings(series)
    }
}

#[expect(clippy::unnecessary_wraps, reason = "every forecast may be missing")]
fn forecast(limit: u64, hours: f64) -> Option<GrowthForecast> {
    let at = |value| IntervalEstimate { value, low: value * 0.8, high: value * 1.3 };
    Some(GrowthForecast { limit, requests: at(hours * 1000.0), seconds: Some(at(hours * 3600.0)) })
}

/// A VRAM leak that reaches the soft budget in this many hours, and the hard budget in twice as many.
fn leak(hours: f64) -> SeriesFacts {
    SeriesFacts {
        growth: Some(growth(VRAM, GrowthVerdict::Leaking, 10 * GIB)),
        total: Some(24 * GIB),
        free: Some(10 * GIB),
        to_soft: forecast(20 * GIB, hours),
        to_hard: forecast(22 * GIB, hours * 2.0),
        to_end: forecast(24 * GIB, hours * 3.0),
        ..SeriesFacts::from_bytes(VRAM, Some(14 * GIB))
    }
}

fn only(series: SeriesFacts) -> RecycleFacts {
    RecycleFacts { series: vec![series], ..RecycleFacts::default() }
}

fn recycling() -> RecyclePolicy {
    with_growth(GrowthMode::Recycle, policy())
}

fn brief(decision: RecycleDecision) -> (RecycleAction, Option<Reason>, bool) {
    (decision.action, decision.reason, decision.due)
}

#[test]
fn vram_has_budgets_of_its_own_and_the_decision_says_which_memory_and_limit() {
    let policy = RecyclePolicy {
        vram_soft: Some(MemoryLimit::Percent(50.0)),
        vram_hard: Some(MemoryLimit::Percent(75.0)),
        ..policy()
    };
    let on = |charged| only(SeriesFacts { total: Some(400), ..SeriesFacts::from_bytes(VRAM, charged) });
    let soft = decide(&policy, &on(Some(200)));
    assert_eq!(brief(soft), (RecycleAction::RecycleWhenQuiet, Some(Reason::VramSoft), false));
    assert_eq!((soft.series, soft.limit_bytes), (Some(VRAM), Some(200)));
    let hard = decide(&policy, &on(Some(300)));
    assert_eq!(brief(hard), (RecycleAction::DrainNow, Some(Reason::VramHard), true));
    assert_eq!(
        decide(&policy, &on(None)),
        RecycleDecision::OBSERVE,
        "an unknown figure is not zero and not full"
    );
    let no_total = only(SeriesFacts::from_bytes(VRAM, Some(999)));
    assert_eq!(
        decide(&policy, &no_total),
        RecycleDecision::OBSERVE,
        "a share of an unknown total is unknown"
    );
}

#[test]
fn growth_is_only_told_unless_the_mode_says_recycle() {
    let observing = with_growth(GrowthMode::Observe, policy());
    let told = decide(&observing, &only(leak(1.0)));
    assert_eq!(brief(told), (RecycleAction::Observe, Some(Reason::Growth), false));
    assert_eq!(told.why_not, Some(RecycleHindrance::Observing { would: RecycleAction::RecycleWhenQuiet }));
    assert_eq!((told.series, told.limit_bytes), (Some(VRAM), Some(20 * GIB)));
    let off = with_growth(GrowthMode::Off, policy());
    assert_eq!(decide(&off, &only(leak(0.01))), RecycleDecision::OBSERVE);
    // Budgets apply in every mode, and precede reasons that are only observed.
    let both = RecycleFacts {
        series: vec![leak(1.0), SeriesFacts::from_bytes(MemoryKind::Host, Some(100 * MIB))],
        ..RecycleFacts::default()
    };
    assert_eq!(decide(&off, &both).reason, Some(Reason::HostSoft));
    assert_eq!(decide(&observing, &both).reason, Some(Reason::HostSoft));
}

#[test]
fn growth_recycles_when_the_budget_is_hours_away_and_drains_when_it_is_minutes_away() {
    let later = decide(&recycling(), &only(leak(13.0)));
    assert_eq!(brief(later), (RecycleAction::Observe, Some(Reason::Growth), false));
    let why_not = later.why_not.unwrap();
    let told = RecycleHindrance::NotYet { seconds_to_limit: 13 * 3600, seconds_before: 12 * 3600 };
    assert_eq!((why_not, later.series), (told, Some(VRAM)));
    assert!(why_not.to_string().contains("in about 13 h"), "{why_not}");
    let observing = with_growth(GrowthMode::Observe, recycling());
    assert_eq!(decide(&observing, &only(leak(13.0))), RecycleDecision::OBSERVE);
    let soon = decide(&recycling(), &only(leak(11.0)));
    assert_eq!(brief(soon), (RecycleAction::RecycleWhenQuiet, Some(Reason::Growth), false));
    let now = decide(&recycling(), &only(leak(0.1)));
    assert_eq!(brief(now), (RecycleAction::DrainNow, Some(Reason::Growth), true));
    assert_eq!(now.limit_bytes, Some(22 * GIB), "the hard budget, in 12 minutes");
    let suspected =
        SeriesFacts { growth: Some(growth(VRAM, GrowthVerdict::Suspected, 10 * GIB)), ..leak(0.1) };
    assert_eq!(decide(&recycling(), &only(suspected)), RecycleDecision::OBSERVE);
    let no_rate = GrowthForecast { seconds: None, ..forecast(20 * GIB, 0.1).unwrap() };
    let idle = SeriesFacts { to_soft: Some(no_rate), to_hard: None, to_end: None, ..leak(0.1) };
    assert_eq!(
        decide(&recycling(), &only(idle)),
        RecycleDecision::OBSERVE,
        "nothing comes, so nothing grows"
    );
}

#[test]
fn a_backend_that_often_pauses_is_recycled_later_than_one_that_pauses_once_a_day() {
    let pausing = |every, hours| {
        let load = replacement_cost::ReplacementLoad {
            lull_every: Some(Duration::from_secs(every)),
            ..replacement_cost::ReplacementLoad::default()
        };
        decide(&recycling(), &RecycleFacts { load, ..only(leak(hours)) }).action
    };
    assert_eq!(pausing(86_400, 11.0), RecycleAction::RecycleWhenQuiet);
    assert_eq!(
        pausing(600, 2.1),
        RecycleAction::Observe,
        "a lull each ten minutes: two hours are enough to find one"
    );
    assert_eq!(pausing(600, 1.9), RecycleAction::RecycleWhenQuiet);
    assert_eq!(pausing(1, 0.6), RecycleAction::Observe);
    assert_eq!(pausing(1, 0.4), RecycleAction::RecycleWhenQuiet, "half an hour at least");
}

#[test]
fn a_barred_reason_stands_in_nobodys_way_and_is_told_when_nothing_else_is_wanted() {
    let mut both = only(leak(0.1));
    both.series.push(SeriesFacts::from_bytes(MemoryKind::Host, Some(150 * MIB)));
    assert_eq!(decide(&recycling(), &both).reason, Some(Reason::Growth));
    let barred = |reason, series| reason == Reason::Growth && series == Some(VRAM);
    assert_eq!(decide_without_barred(&recycling(), &both, barred).reason, Some(Reason::HostSoft));
    assert_eq!(decide_without_barred(&recycling(), &only(leak(0.1)), barred).reason, Some(Reason::Growth));
}

#[test]
fn outside_of_the_window_only_what_cannot_wait_happens() {
    let night = RecyclePolicy { only: "02:00-05:00".parse::<DayWindows>().unwrap(), ..recycling() };
    let idle = |minute, host| RecycleFacts {
        idle_for: Some(Duration::from_secs(600)),
        wanted_for: Some(Duration::from_secs(86_400)),
        minute: Some(minute),
        ..facts(host)
    };
    let noon = decide(&night, &idle(720, 150));
    assert_eq!(brief(noon), (RecycleAction::RecycleWhenQuiet, Some(Reason::HostSoft), false));
    assert_eq!(noon.why_not, Some(RecycleHindrance::OutsideWindow { minutes_left: 14 * 60 }));
    assert!(decide(&night, &idle(121, 150)).due);
    assert_eq!(
        brief(decide(&night, &idle(720, 200))),
        (RecycleAction::DrainNow, Some(Reason::HostHard), true)
    );
    let draining = RecycleFacts { minute: Some(720), ..only(leak(0.1)) };
    assert_eq!(decide(&night, &draining).action, RecycleAction::DrainNow);
    let unknown = RecycleFacts { minute: None, ..idle(0, 150) };
    assert!(decide(&night, &unknown).due, "a time of the day that is not known closes no window");
}

#[test]
fn a_leak_that_would_not_last_until_the_next_window_uses_this_one() {
    let night = RecyclePolicy { only: "02:00-05:00".parse::<DayWindows>().unwrap(), ..recycling() };
    let at = |minute| RecycleFacts {
        minute: Some(minute),
        idle_for: Some(Duration::from_secs(9)),
        ..only(leak(20.0))
    };
    assert!(decide(&night, &at(240)).due, "it runs out at midnight, and the next window opens at two");
    assert_eq!(decide(&night, &at(720)).action, RecycleAction::Observe, "the window in 14 hours will do");
}

#[test]
fn a_budget_that_draining_does_not_save_ends_the_process() {
    let over = |charged, urgent| RecycleFacts { urgent_for: urgent, ..facts(charged) };
    let seconds = |n| Some(Duration::from_secs(n));
    assert_eq!(
        decide(&policy(), &over(300, None)).action,
        RecycleAction::DrainNow,
        "a jump is drained first"
    );
    assert_eq!(decide(&policy(), &over(300, seconds(9))).action, RecycleAction::DrainNow);
    assert_eq!(
        brief(decide(&policy(), &over(300, seconds(10)))),
        (RecycleAction::KillNow, Some(Reason::HostHard), true)
    );
    assert_eq!(
        decide(&policy(), &over(205, seconds(99))).action,
        RecycleAction::DrainNow,
        "within five percent"
    );
    // The machine has enough memory, so the drain lasts as long as its requests.
    let mut rich = over(300, seconds(99));
    rich.series[0].free = Some(20 * GIB);
    let patient = decide(&policy(), &rich);
    assert_eq!((patient.action, patient.threat), (RecycleAction::DrainNow, false));
    rich.series[0].free = Some(1500 * MIB);
    assert_eq!(decide(&policy(), &rich).action, RecycleAction::KillNow, "nearly the end of it");
    let mut guessed = over(300, seconds(99));
    guessed.series[0].estimated = true;
    assert_eq!(
        decide(&policy(), &guessed).action,
        RecycleAction::DrainNow,
        "nobody is ended on the word of an estimate"
    );
}

#[test]
fn memory_that_is_almost_gone_ends_whoever_can_give_enough_back() {
    let starved = |charged, at_ready, free, total| {
        let host = SeriesFacts {
            at_ready: Some(at_ready),
            free: Some(free),
            total: Some(total),
            ..SeriesFacts::from_bytes(MemoryKind::Host, Some(charged))
        };
        decide(&RecyclePolicy::new(&crate::defaults().recycle), &only(host))
    };
    let end = starved(9 * GIB, GIB, 900 * MIB, 64 * GIB);
    assert_eq!(brief(end), (RecycleAction::KillNow, Some(Reason::MemoryExhausted), true));
    assert_eq!((end.series, end.limit_bytes), (Some(MemoryKind::Host), Some(GIB)));
    assert_eq!(starved(9 * GIB, GIB, GIB, 64 * GIB), RecycleDecision::OBSERVE);
    assert_eq!(starved(GIB, GIB, 0, 64 * GIB), RecycleDecision::OBSERVE, "it holds no more than a fresh one");
    assert_eq!(
        starved(9 * GIB, GIB, 900 * MIB, 16 * GIB),
        RecycleDecision::OBSERVE,
        "three percent of 16 GiB are left"
    );
}

#[test]
fn a_device_that_is_full_by_design_kills_nobody() {
    let full = |rising, at_ready| SeriesFacts {
        rising,
        at_ready: Some(at_ready),
        free: Some(100 * MIB),
        total: Some(24 * GIB),
        ..SeriesFacts::from_bytes(VRAM, Some(23 * GIB))
    };
    let policy = RecyclePolicy::new(&crate::defaults().recycle);
    let of = |series| brief(decide(&policy, &only(series)));
    assert_eq!(of(full(true, 20 * GIB)), (RecycleAction::KillNow, Some(Reason::MemoryExhausted), true));
    assert_eq!(of(full(false, 20 * GIB)).0, RecycleAction::Observe);
    assert_eq!(of(full(true, 23 * GIB - MIB)).0, RecycleAction::Observe);
    assert_eq!(of(SeriesFacts { estimated: true, ..full(true, 20 * GIB) }).0, RecycleAction::Observe);
}

#[test]
fn illness_drains_and_slowness_is_a_matter_of_the_mode() {
    let ill = |symptom| RecycleFacts {
        symptoms: vec![symptom],
        idle_for: Some(Duration::from_secs(9)),
        ..RecycleFacts::default()
    };
    let limit = SilenceLimit { seconds: 20.0, basis: LimitBasis::Tokens { usual_ms: 40.0 } };
    let wedged = ill(HealthSymptom::Wedged { seconds: 900, limit });
    assert_eq!(brief(decide(&policy(), &wedged)), (RecycleAction::DrainNow, Some(Reason::Wedged), true));
    // A wedged server's requests never end, so its drain is cut before the deadline.
    let drains = |seconds| RecycleFacts { urgent_for: Some(Duration::from_secs(seconds)), ..wedged.clone() };
    assert_eq!(decide(&policy(), &drains(19)).action, RecycleAction::DrainNow);
    assert_eq!(decide(&policy(), &drains(20)).action, RecycleAction::KillNow);
    let slow = ill(HealthSymptom::SlowDecode { now: 1.0, baseline: 9.0 });
    let told = decide(&policy(), &slow);
    assert_eq!(
        (brief(told), told.why_not.is_some()),
        ((RecycleAction::Observe, Some(Reason::SlowDecode), false), true)
    );
    assert_eq!(
        brief(decide(&recycling(), &slow)),
        (RecycleAction::RecycleWhenQuiet, Some(Reason::SlowDecode), true)
    );
}

#[test]
fn a_shared_budget_and_a_waiting_prompt_are_reasons_too() {
    let chosen = |series, level| RecycleFacts {
        shared: Some(SharedChoice { series, level, limit: 7 }),
        ..RecycleFacts::default()
    };
    let host = decide(&policy(), &chosen(MemoryKind::Host, BudgetLevel::Soft));
    assert_eq!(
        (brief(host), host.limit_bytes),
        ((RecycleAction::RecycleWhenQuiet, Some(Reason::SharedHost), false), Some(7))
    );
    let vram = decide(&policy(), &chosen(VRAM, BudgetLevel::Hard));
    assert_eq!(brief(vram), (RecycleAction::DrainNow, Some(Reason::SharedVram), true));
    let waiting = RecycleFacts { admission: Some(VRAM), ..RecycleFacts::default() };
    assert_eq!(brief(decide(&policy(), &waiting)), (RecycleAction::DrainNow, Some(Reason::Admission), true));
}

#[test]
fn a_busy_backend_that_would_run_out_before_its_next_lull_is_recycled_under_load() {
    let load = replacement_cost::ReplacementLoad {
        load_time: Some(Duration::from_secs(5)),
        requests: 3,
        tokens: 100,
        tokens_per_second: Some(100.0),
        arrivals: Some(1.0),
        overlap: false,
        lull_every: Some(Duration::from_secs(86_400)),
    };
    let busy = RecycleFacts { load, ..only(leak(1.0)) };
    assert!(decide(&recycling(), &busy).due);
    let pauses = RecycleFacts {
        load: replacement_cost::ReplacementLoad { lull_every: Some(Duration::from_secs(400)), ..load },
        ..busy
    };
    let waits = decide(&recycling(), &pauses);
    assert_eq!((waits.due, waits.why_not), (false, Some(RecycleHindrance::NotQuiet { seconds_left: 600 })));
}

#[test]
fn reasons_are_named_once_and_every_why_not_is_a_sentence() {
    let mut names: Vec<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
    for (reason, name) in Reason::ALL.iter().zip(&names) {
        assert_eq!(serde_json::to_value(reason).unwrap(), *name);
        assert!(reason.is_policy() || !reason.is_memory());
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Reason::ALL.len());
    let window = RecycleHindrance::OutsideWindow { minutes_left: 85 }.to_string();
    assert!(window.ends_with("1 h 25 min"), "{window}");
    let held = RecycleHindrance::Held {
        by: HoldReason::TooSoon { seconds_left: 5, rule: crate::cooldown::PauseRule::MinInterval },
    };
    let json = serde_json::to_string(&RecycleDecision::OBSERVE.held_back(held)).unwrap();
    assert_eq!(
        serde_json::from_str::<RecycleDecision>(&json).unwrap(),
        RecycleDecision::OBSERVE.held_back(held),
        "{json}"
    );
}

proptest! {
    #[test]
    fn less_time_left_never_means_less_urgency(a in 0.001f64..100.0, b in 0.001f64..100.0, minute in proptest::option::of(0u16..1440)) {
        let at = |hours| RecycleFacts { minute, ..only(leak(hours)) };
        let (soon, late) = (decide(&recycling(), &at(a.min(b))), decide(&recycling(), &at(a.max(b))));
        prop_assert!(soon.action >= late.action);
    }

    #[test]
    fn what_is_due_is_never_held_and_what_is_held_says_why(
        host in 0u64..300, hours in 0.01f64..30.0, idle in proptest::option::of(0u64..5), wanted in proptest::option::of(0u64..900),
        minute in proptest::option::of(0u16..1440), observe in any::<bool>()
    ) {
        let growth = if observe { GrowthMode::Observe } else { GrowthMode::Recycle };
        let policy = RecyclePolicy { only: "02:00-05:00".parse().unwrap(), ..with_growth(growth, policy()) };
        let mut facts = facts(host);
        facts.series.push(leak(hours));
        facts.minute = minute;
        (facts.idle_for, facts.wanted_for) = (idle.map(Duration::from_secs), wanted.map(Duration::from_secs));
        let decision = decide(&policy, &facts);
        prop_assert_eq!(decision.reason.is_some() && !decision.due, decision.why_not.is_some());
        prop_assert!(decision.due || decision.action <= RecycleAction::RecycleWhenQuiet);
        let json = serde_json::to_string(&facts).unwrap();
        prop_assert_eq!(serde_json::from_str::<RecycleFacts>(&json).unwrap().series.len(), 2);
    }

    #[test]
    fn more_memory_never_means_less_urgency(a in 0u64..400, b in 0u64..400, idle in proptest::option::of(0u64..5)) {
        let at = |mib| RecycleFacts { idle_for: idle.map(Duration::from_secs), ..facts(mib) };
        let (low, high) = (decide(&policy(), &at(a.min(b))), decide(&policy(), &at(a.max(b))));
        prop_assert!(high.action >= low.action);
    }

    #[test]
    fn the_configured_limit_is_never_passed(max in 1u64..1_000_000, jitter in 0.0f64..1.0, unit in 0.0f64..1.0) {
        let mut policy = RecyclePolicy { max_requests: Some(max), ..policy() };
        policy.common.jitter = jitter;
        let work = WorkDone { requests: max, ..WorkDone::default() };
        prop_assert_eq!(decide(&policy, &RecycleFacts { work, unit, ..facts(0) }).reason, Some(Reason::MaxRequests));
    }
}

#[test]
fn hours_outside_of_the_window_are_no_waiting_for_quiet() {
    let policy = RecyclePolicy { only: "02:00-05:00".parse().unwrap(), ..policy() };
    let at = |minute| RecycleFacts {
        minute: Some(minute),
        wanted_for: Some(Duration::from_secs(9 * 3600)),
        ..only(SeriesFacts::from_bytes(MemoryKind::Host, Some(100 * MIB)))
    };
    let opened = decide(&policy, &at(120));
    assert_eq!(brief(opened), (RecycleAction::RecycleWhenQuiet, Some(Reason::HostSoft), false));
    assert_eq!(
        opened.why_not,
        Some(RecycleHindrance::NotQuiet { seconds_left: policy.common.quiet_within.as_secs() })
    );
    let quiet = RecycleFacts { idle_for: Some(policy.common.quiet_for), ..at(120) };
    assert!(decide(&policy, &quiet).due);
    let waited = u16::try_from(policy.common.quiet_within.as_secs() / 60).unwrap();
    assert!(decide(&policy, &at(120 + waited)).due, "it has waited within the window");
    let mut short = policy;
    short.common.quiet_within = Duration::from_secs(24 * 3600);
    assert!(!decide(&short, &at(298)).due);
    assert!(decide(&short, &at(299)).due, "the last minute of the window");
}
