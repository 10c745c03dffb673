//! Tests the first step of decisions, and that a reclaim delays a replacement by no more than its limit.

use proptest::prelude::*;

use super::*;
use crate::growth::SeriesGrowth;
use crate::sample::GpuIndex;
use crate::units::MIB;

const BOTH: ReclaimParts = ReclaimParts { heap: true, cuda: true };
const HEAP: ReclaimParts = ReclaimParts { heap: true, cuda: false };

fn policy() -> Recycle {
    crate::defaults().recycle
}

fn decision(reason: Reason, limit: Option<u64>) -> RecycleDecision {
    let action = match reason {
        Reason::HostHard | Reason::VramHard => RecycleAction::DrainNow,
        Reason::MemoryExhausted => RecycleAction::KillNow,
        _ => RecycleAction::RecycleWhenQuiet,
    };
    let series = match reason {
        Reason::VramSoft | Reason::VramHard | Reason::SharedVram => MemoryKind::Vram(GpuIndex(0)),
        _ => MemoryKind::Host,
    };
    RecycleDecision {
        action,
        reason: Some(reason),
        series: Some(series),
        limit_bytes: limit,
        ..RecycleDecision::OBSERVE
    }
}

/// Facts of a process that held 1,000 MiB when fresh.
fn facts(series: MemoryKind, charged: u64) -> SeriesFacts {
    let growth = SeriesGrowth { baseline: Some(1000 * MIB), ..SeriesGrowth::without_readings(series) };
    SeriesFacts { growth: Some(growth), ..SeriesFacts::from_bytes(series, Some(charged * MIB)) }
}

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A request at 2,010 MiB for a budget of 2,000 MiB, and a reading of `left` MiB two seconds later.
fn after(reason: Reason, at: u64, left: u64) -> ReclaimHistory {
    let decision = decision(reason, Some(2000 * MIB));
    let series = decision.series.unwrap();
    let mut reclaims = ReclaimHistory::default();
    reclaims.record_request(&policy(), Some((&decision, Some(&facts(series, 2010)))), s(at));
    assert!(reclaims.record_answer(ReclaimOutcome::Done, s(at + 1)));
    assert_eq!(
        reclaims.add_reading(s(at), |_| Some(0)),
        None,
        "a reading from before the answer says nothing"
    );
    let worth =
        if left <= 1750 || reason == Reason::Growth { ReclaimWorth::Enough } else { ReclaimWorth::NotEnough };
    assert_eq!(reclaims.add_reading(s(at + 2), |_| Some(left * MIB)), Some(worth));
    reclaims
}

fn rung(reclaims: &ReclaimHistory, reason: Reason, charged: u64, now: u64) -> ReclaimDecision {
    let decision = decision(reason, Some(2000 * MIB));
    let facts = facts(decision.series.unwrap(), charged);
    reclaims.decide(&policy(), Some(BOTH), &decision, Some(&facts), s(now))
}

#[test]
fn memory_is_asked_for_first_where_somebody_has_it_and_nothing_else_ever_is() {
    let fresh = ReclaimHistory::default();
    let of = |policy: &Recycle, parts, reason| {
        let decision = decision(reason, Some(2000 * MIB));
        let facts = facts(decision.series.unwrap(), 2010);
        fresh.decide(policy, parts, &decision, Some(&facts), s(100))
    };
    let first = [
        Reason::HostSoft,
        Reason::HostHard,
        Reason::VramSoft,
        Reason::VramHard,
        Reason::Growth,
        Reason::SharedHost,
        Reason::SharedVram,
    ];
    for reason in Reason::ALL.iter().copied() {
        let wanted = if first.contains(&reason) {
            ReclaimDecision::Reclaim
        } else {
            ReclaimDecision::Replace(NoReclaim::NotMemory)
        };
        assert_eq!(of(&policy(), Some(BOTH), reason), wanted, "{reason}");
    }
    assert_eq!(of(&policy(), Some(HEAP), Reason::HostSoft), ReclaimDecision::Reclaim);
    for (parts, reason) in [
        (Some(HEAP), Reason::VramSoft),
        (Some(ReclaimParts::default()), Reason::HostSoft),
        (None, Reason::HostSoft),
    ] {
        assert_eq!(of(&policy(), parts, reason), ReclaimDecision::Replace(NoReclaim::CannotAsk), "{parts:?}");
    }
    let off = Recycle { reclaim: false, ..policy() };
    assert_eq!(of(&off, Some(BOTH), Reason::HostSoft), ReclaimDecision::Replace(NoReclaim::Off));
    // Decisions that are only reported, and unknown memory, cause no reclaim.
    let told = RecycleDecision { action: RecycleAction::Observe, ..decision(Reason::Growth, None) };
    let known = facts(MemoryKind::Host, 2010);
    let unknown = SeriesFacts::from_bytes(MemoryKind::Host, None);
    let soft = decision(Reason::HostSoft, Some(2000 * MIB));
    for (decision, facts) in [(&told, Some(&known)), (&soft, Some(&unknown)), (&soft, None)] {
        let rung = fresh.decide(&policy(), Some(BOTH), decision, facts, s(100));
        assert_eq!(rung, ReclaimDecision::Replace(NoReclaim::NotMemory));
    }
}

#[test]
fn what_helped_is_asked_for_again_when_the_budget_is_passed_again_and_not_too_often() {
    let again = policy().reclaim_again.as_secs();
    let helped = after(Reason::HostSoft, 100, 1200);
    assert_eq!(rung(&helped, Reason::HostSoft, 2001, 101 + again), ReclaimDecision::Reclaim);
    let soon = ReclaimDecision::Replace(NoReclaim::TooOften { seconds: again - 1 });
    assert_eq!(rung(&helped, Reason::HostSoft, 2001, 100 + again), soon);
    // A reclaim helps if it frees at least a quarter of the range up to the budget.
    assert_eq!(
        rung(&after(Reason::HostSoft, 100, 1750), Reason::HostSoft, 2001, 500),
        ReclaimDecision::Reclaim
    );
    let vain = ReclaimDecision::Replace(NoReclaim::NoHelp { bytes: 259 * MIB });
    assert_eq!(rung(&after(Reason::HostSoft, 100, 1751), Reason::HostSoft, 2001, 102), vain);
    assert_eq!(rung(&after(Reason::HostSoft, 100, 1751), Reason::HostSoft, 2001, 99_999), vain);
    let mut forgiven = after(Reason::HostSoft, 100, 1751);
    forgiven.handle_new_limits();
    // A process refuses a request that comes too soon: wait, unless the budget is hard.
    assert_eq!(rung(&forgiven, Reason::HostSoft, 2001, 102), ReclaimDecision::Wait);
    let hard = ReclaimDecision::Replace(NoReclaim::TooOften { seconds: 1 });
    assert_eq!(rung(&forgiven, Reason::HostHard, 2001, 102), hard);
    assert_eq!(rung(&forgiven, Reason::HostSoft, 2001, 101 + again), ReclaimDecision::Reclaim);
    // Each kind of memory is judged separately.
    assert_eq!(
        rung(&after(Reason::HostSoft, 100, 1900), Reason::VramSoft, 2001, 500),
        ReclaimDecision::Reclaim
    );
}

#[test]
fn growth_rests_until_as_much_is_held_as_before_and_a_shared_budget_does_not_rest() {
    let helped = after(Reason::Growth, 100, 1400);
    let rest = ReclaimDecision::Rest { seconds: 9, bytes: 610 * MIB };
    assert_eq!(rung(&helped, Reason::Growth, 1500, 110), rest);
    assert_eq!(
        rung(&helped, Reason::Growth, 2009, 50_000),
        ReclaimDecision::Rest { seconds: 49_899, bytes: 610 * MIB }
    );
    assert_eq!(rung(&helped, Reason::Growth, 2010, 50_000), ReclaimDecision::Reclaim);
    // A reclaim that frees everything spares a fast-leaking process far below its budget, but not above it.
    assert_eq!(rung(&helped, Reason::Growth, 2500, 110), rest);
    assert_eq!(
        rung(&helped, Reason::HostSoft, 2500, 110),
        ReclaimDecision::Replace(NoReclaim::TooOften { seconds: 9 })
    );
    let shared = after(Reason::SharedHost, 100, 1400);
    assert_eq!(
        rung(&shared, Reason::SharedHost, 1400, 102),
        ReclaimDecision::Replace(NoReclaim::TooOften { seconds: 1 })
    );
}

#[test]
fn an_answer_is_waited_for_within_its_limit_and_one_that_does_not_come_is_the_last_question() {
    let policy = policy();
    let soft = decision(Reason::HostSoft, Some(2000 * MIB));
    let known = facts(MemoryKind::Host, 2010);
    let mut asked = ReclaimHistory::default();
    asked.record_request(&policy, Some((&soft, Some(&known))), s(100));
    assert!(asked.asked.is_some());
    assert_eq!(rung(&asked, Reason::HostSoft, 2050, 101), ReclaimDecision::Wait);
    let late = 100 + policy.reclaim_limit.as_secs();
    assert_eq!(rung(&asked, Reason::HostSoft, 2050, late - 1), ReclaimDecision::Wait);
    assert_eq!(rung(&asked, Reason::HostSoft, 2050, late), ReclaimDecision::Replace(NoReclaim::NoAnswer));
    // At the hard budget the wait is shorter.
    let hard = 100 + policy.reclaim_limit_hard.as_secs();
    assert_eq!(rung(&asked, Reason::HostHard, 2300, hard), ReclaimDecision::Replace(NoReclaim::NoAnswer));
    assert!(!asked.record_answer(ReclaimOutcome::NoAnswer, s(110)));
    assert_eq!(rung(&asked, Reason::HostSoft, 2050, 111), ReclaimDecision::Replace(NoReclaim::NoAnswer));
    assert!(!asked.record_answer(ReclaimOutcome::Done, s(112)), "nobody asked");
    // An operator's request is no evidence against the process.
    let mut by_hand = ReclaimHistory::default();
    by_hand.record_request(&policy, None, s(100));
    assert!(!by_hand.record_answer(ReclaimOutcome::NoAnswer, s(110)));
    assert_eq!(rung(&by_hand, Reason::HostSoft, 2050, 111), ReclaimDecision::Reclaim);
}

#[test]
fn refused_is_as_good_as_nothing_and_a_process_without_a_known_size_has_to_fall_below_the_limit() {
    let refused = after(Reason::HostSoft, 100, 2010);
    assert_eq!(
        rung(&refused, Reason::HostSoft, 2010, 103),
        ReclaimDecision::Replace(NoReclaim::NoHelp { bytes: 0 })
    );
    let soft = decision(Reason::HostSoft, Some(2000 * MIB));
    let bare = SeriesFacts::from_bytes(MemoryKind::Host, Some(2010 * MIB));
    for (left, helps) in [(1999, true), (2000, false)] {
        let mut reclaims = ReclaimHistory::default();
        reclaims.record_request(&policy(), Some((&soft, Some(&bare))), s(100));
        reclaims.record_answer(ReclaimOutcome::Done, s(101));
        reclaims.add_reading(s(102), |_| Some(left * MIB));
        let rung = reclaims.decide(&policy(), Some(BOTH), &soft, Some(&bare), s(500));
        assert_eq!(rung == ReclaimDecision::Reclaim, helps, "{left}");
    }
}

#[test]
fn two_answers_are_one_outcome() {
    use ReclaimOutcome::{Done, NoAnswer, OtherAllocator, Partly, Refused, TooSoon};
    for (one, other, both) in [
        (Done, Done, Done),
        (Done, Partly, Partly),
        (Done, TooSoon, Partly),
        (NoAnswer, Done, Partly),
        (Refused, OtherAllocator, OtherAllocator),
        (Refused, Refused, Refused),
        (NoAnswer, TooSoon, NoAnswer),
    ] {
        assert_eq!((one.combine(other), other.combine(one)), (both, both), "{one:?} {other:?}");
    }
}

#[test]
fn what_is_said_of_it() {
    let given = ReclaimedBytes {
        graphs_host: 1 << 30,
        graphs_device: 300 * MIB,
        pools: 512 * MIB,
        cublas: 0,
        heap: 80 * MIB,
    };
    let mut text = format!("{given}\n{}\n", ReclaimedBytes::default());
    for why in [
        NoReclaim::NotMemory,
        NoReclaim::Off,
        NoReclaim::CannotAsk,
        NoReclaim::NoHelp { bytes: 0 },
        NoReclaim::NoHelp { bytes: MIB },
        NoReclaim::NoAnswer,
        NoReclaim::TooOften { seconds: 12 },
    ] {
        text.extend([why.to_string(), "\n".to_owned()]);
    }
    for outcome in ReclaimOutcome::ALL {
        text.extend([outcome.phrase(), "\n"]);
    }
    insta::assert_snapshot!(text);
}

/// History of a leak under a budget: times of requests and of the replacement.
#[derive(Debug, Default)]
struct Story {
    asked: Vec<u64>,
    replaced: Option<u64>,
    most: u64,
}

/// Simulates one second at a time. `gone`: share of the growth that a reclaim frees; `answers`: false for a
/// process that never answers.
fn live(leak_kib: u64, gone: f64, answers: bool, seconds: u64) -> Story {
    let policy = policy();
    let soft = decision(Reason::HostSoft, Some(2000 * MIB));
    let (mut grown, mut reclaims, mut story) = (0, ReclaimHistory::default(), Story::default());
    let mut answer_at = None;
    for now in 0..seconds {
        grown += leak_kib * 1024;
        let charged = 1000 * MIB + grown;
        story.most = story.most.max(charged);
        if answer_at == Some(now) {
            answer_at = None;
            if answers {
                grown = scale_bytes(grown, 1.0 - gone);
                reclaims.record_answer(ReclaimOutcome::Done, s(now));
            } else {
                reclaims.record_answer(ReclaimOutcome::NoAnswer, s(now));
            }
        }
        reclaims.add_reading(s(now), |_| Some(1000 * MIB + grown));
        if 1000 * MIB + grown < 2000 * MIB {
            continue;
        }
        let known = SeriesFacts {
            growth: Some(SeriesGrowth {
                baseline: Some(1000 * MIB),
                ..SeriesGrowth::without_readings(MemoryKind::Host)
            }),
            ..SeriesFacts::from_bytes(MemoryKind::Host, Some(1000 * MIB + grown))
        };
        match reclaims.decide(&policy, Some(BOTH), &soft, Some(&known), s(now)) {
            ReclaimDecision::Reclaim => {
                reclaims.record_request(&policy, Some((&soft, Some(&known))), s(now));
                story.asked.push(now);
                answer_at = Some(now + if answers { 2 } else { policy.reclaim_wait.as_secs() + 2 });
            }
            ReclaimDecision::Wait | ReclaimDecision::Rest { .. } => {}
            ReclaimDecision::Replace(_) => {
                story.replaced = Some(now);
                return story;
            }
        }
    }
    story
}

proptest! {
    #[test]
    fn a_leak_is_asked_for_no_more_often_than_the_bound_and_replaced_no_later_than_by_its_limit(
        leak_kib in 64_u64..40_000, gone in 0.0_f64..1.0, answers: bool,
    ) {
        let policy = policy();
        let story = live(leak_kib, gone, answers, 40_000);
        for two in story.asked.windows(2) {
            prop_assert!(two[1] - two[0] >= policy.reclaim_again.as_secs(), "{story:?}");
        }
        let without = (1000 * 1024_u64).div_ceil(leak_kib).saturating_sub(1);
        // A process that does not answer, or frees too little, is asked once, then replaced as without
        // reclaim.
        if !answers || gone < policy.reclaim_room {
            prop_assert_eq!(story.asked.len(), usize::from(without < 40_000), "{:?}", story);
            // Freed memory has to grow again.
            let back = if answers { scale_bytes(1100 * 1024, gone) / leak_kib + 1 } else { 0 };
            let latest = without + policy.reclaim_limit.as_secs() + back;
            prop_assert!(story.replaced.map_or(latest >= 40_000, |at| at <= latest), "{story:?} {latest}");
        }
        // The process exceeds the budget for no longer than one request takes.
        let worst = 2000 * MIB + (policy.reclaim_limit.as_secs() + 1) * leak_kib * 1024;
        prop_assert!(story.most <= worst, "{story:?}");
    }

    #[test]
    fn a_leak_that_goes_back_whole_is_never_replaced_unless_it_comes_back_within_moments(
        leak_kib in 64_u64..40_000,
    ) {
        let story = live(leak_kib, 1.0, true, 40_000);
        let tooth = (1000 * 1024_u64).div_ceil(leak_kib);
        if tooth > crate::defaults().recycle.reclaim_again.as_secs() + 3 {
            prop_assert_eq!(story.replaced, None);
        }
        if tooth < crate::defaults().recycle.reclaim_again.as_secs() {
            prop_assert!(story.replaced.is_some());
        }
    }
}

#[test]
fn a_request_for_something_else_ends_no_rest_and_makes_none_too_often() {
    let again = policy().reclaim_again.as_secs();
    let mut rests = after(Reason::Growth, 100, 1200);
    let asked_by_hand = |reclaims: &mut ReclaimHistory, at: u64| {
        reclaims.record_request(&policy(), None, s(at));
        assert!(reclaims.record_answer(ReclaimOutcome::Done, s(at)));
        assert_eq!(reclaims.add_reading(s(at), |_| Some(1100 * MIB)), Some(ReclaimWorth::Unknown));
    };
    asked_by_hand(&mut rests, 200);
    for at in [201, 300] {
        let rung = rung(&rests, Reason::Growth, 1300, at);
        assert_eq!(rung, ReclaimDecision::Rest { seconds: at - 101, bytes: 810 * MIB });
    }
    // After an operator's request, growth waits for the next reclaim and causes no replacement.
    let mut new = ReclaimHistory::default();
    asked_by_hand(&mut new, 200);
    assert_eq!(rung(&new, Reason::Growth, 1900, 201), ReclaimDecision::Wait);
    assert_eq!(rung(&new, Reason::Growth, 1900, 200 + again), ReclaimDecision::Reclaim);
    // A process above its budget does not wait.
    assert_eq!(
        rung(&new, Reason::HostSoft, 2001, 201),
        ReclaimDecision::Replace(NoReclaim::TooOften { seconds: 1 })
    );
}

#[test]
fn a_request_that_came_too_soon_is_made_once_more_and_not_for_ever() {
    let again = policy().reclaim_again.as_secs();
    let mut reclaims = ReclaimHistory::default();
    let ask = |reclaims: &mut ReclaimHistory, at: u64| {
        reclaims.record_request(
            &policy(),
            Some((&decision(Reason::HostSoft, Some(2000 * MIB)), Some(&facts(MemoryKind::Host, 2010)))),
            s(at),
        );
        reclaims.record_answer(ReclaimOutcome::TooSoon, s(at))
    };
    assert!(!ask(&mut reclaims, 100), "nothing is read for it");
    assert_eq!(rung(&reclaims, Reason::HostSoft, 2010, 101), ReclaimDecision::Wait);
    assert_eq!(rung(&reclaims, Reason::HostSoft, 2010, 100 + again), ReclaimDecision::Reclaim);
    assert!(ask(&mut reclaims, 100 + again));
    assert_eq!(reclaims.add_reading(s(101 + again), |_| Some(2010 * MIB)), Some(ReclaimWorth::NotEnough));
    assert!(matches!(
        rung(&reclaims, Reason::HostSoft, 2010, 1000),
        ReclaimDecision::Replace(NoReclaim::NoHelp { .. })
    ));
}
