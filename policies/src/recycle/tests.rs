use proptest::prelude::*;

use super::*;
use crate::sample::Work;
use crate::units::{ByteSize, MemoryLimit};

fn mib(n: u64) -> Option<MemoryLimit> {
    Some(MemoryLimit::Bytes(ByteSize::mib(n)))
}

fn policy() -> RecyclePolicy {
    RecyclePolicy {
        host_soft: mib(100),
        host_hard: mib(200),
        max_requests: Some(1000),
        max_age: Some(Duration::from_secs(3600)),
        jitter: 0.1,
        quiet_for: Duration::from_secs(2),
        quiet_within: Duration::from_secs(600),
        ..RecyclePolicy::new(&crate::defaults().recycle)
    }
}

fn facts(host_mib: u64) -> Facts {
    let host = SeriesFacts::of(Series::Host, Some(host_mib * 1024 * 1024));
    Facts { series: vec![host], unit: 0.5, ..Facts::default() }
}

#[test]
fn below_the_budgets_nothing_happens() {
    assert_eq!(decide(&policy(), &facts(99)), Decision::OBSERVE);
    let unknown = SeriesFacts::of(Series::Host, None);
    assert_eq!(decide(&policy(), &Facts { series: vec![unknown], ..facts(0) }), Decision::OBSERVE);
}

#[test]
fn past_the_soft_budget_it_waits_for_quiet_but_not_for_ever() {
    let busy = decide(&policy(), &facts(100));
    assert_eq!(
        (busy.action, busy.reason, busy.due),
        (Action::RecycleWhenQuiet, Some(Reason::HostSoft), false)
    );
    let quiet = Facts { idle_for: Some(Duration::from_secs(2)), ..facts(100) };
    assert!(decide(&policy(), &quiet).due);
    let late = Facts { wanted_for: Some(Duration::from_secs(600)), ..facts(100) };
    assert!(decide(&policy(), &late).due);
}

#[test]
fn past_the_hard_budget_it_drains_now() {
    let decision = decide(&policy(), &facts(200));
    assert_eq!(
        (decision.action, decision.reason, decision.due),
        (Action::DrainNow, Some(Reason::HostHard), true)
    );
}

#[test]
fn requests_and_age_count_with_jitter_that_never_exceeds_the_limit() {
    let work = Work { requests: 950, ..Work::default() };
    assert_eq!(decide(&policy(), &Facts { work, ..facts(0) }).reason, Some(Reason::MaxRequests));
    assert_eq!(decide(&policy(), &Facts { work, unit: 0.0, ..facts(0) }).reason, None);
    let age = Duration::from_secs(3420);
    assert_eq!(decide(&policy(), &Facts { age, ..facts(0) }).reason, Some(Reason::MaxAge));
}

proptest! {
    #[test]
    fn more_memory_never_means_less_urgency(a in 0u64..400, b in 0u64..400, idle in proptest::option::of(0u64..5)) {
        let at = |mib| Facts { idle_for: idle.map(Duration::from_secs), ..facts(mib) };
        let (low, high) = (decide(&policy(), &at(a.min(b))), decide(&policy(), &at(a.max(b))));
        prop_assert!(high.action >= low.action);
    }

    #[test]
    fn the_configured_limit_is_never_passed(max in 1u64..1_000_000, jitter in 0.0f64..1.0, unit in 0.0f64..1.0) {
        let policy = RecyclePolicy { max_requests: Some(max), jitter, ..policy() };
        let work = Work { requests: max, ..Work::default() };
        prop_assert_eq!(decide(&policy, &Facts { work, unit, ..facts(0) }).reason, Some(Reason::MaxRequests));
    }
}
