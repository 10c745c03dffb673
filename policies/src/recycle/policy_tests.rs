//! Tests of automatic budgets.

use super::tests::{GIB, MIB, VRAM, growth, mib, policy};
use super::*;
use crate::growth::GrowthVerdict;
use crate::units::MemoryLimit;

#[test]
fn automatic_budgets_leave_room_for_what_is_told_and_need_a_settled_backend() {
    let policy = RecyclePolicy {
        host_soft: Some(MemoryLimit::Auto),
        host_hard: Some(MemoryLimit::Auto),
        vram_soft: Some(MemoryLimit::Auto),
        vram_hard: Some(MemoryLimit::Auto),
        ..policy()
    };
    let host = |baseline: u64, allowance, total| SeriesFacts {
        growth: Some(growth(MemoryKind::Host, GrowthVerdict::Steady, baseline)),
        allowance,
        total: Some(total),
        ..SeriesFacts::from_bytes(MemoryKind::Host, Some(baseline))
    };
    let budget = |soft, hard| MemoryBudget { soft: Some(soft), hard: Some(hard) };
    assert_eq!(policy.budget(&host(4 * GIB, 8 * GIB, 64 * GIB)), budget(15 * GIB, 18_522_046_464));
    assert_eq!(policy.budget(&host(GIB, 0, 64 * GIB)), budget(2 * GIB, 2_469_606_195), "at least a GiB more");
    let small = policy.budget(&host(4 * GIB, 8 * GIB, 10 * GIB));
    assert_eq!(small, budget(9_126_805_504, 10_200_547_328), "85 and 95 percent of the machine");
    let unsettled = SeriesFacts { growth: None, ..host(GIB, 0, 64 * GIB) };
    assert_eq!(policy.budget(&unsettled), MemoryBudget::default());

    let vram = |baseline: u64, charged: u64, free| SeriesFacts {
        growth: Some(growth(VRAM, GrowthVerdict::Steady, baseline)),
        free: Some(free),
        total: Some(24_000),
        ..SeriesFacts::from_bytes(VRAM, Some(charged))
    };
    assert_eq!(policy.budget(&vram(10_000, 10_000, 10_000)), budget(19_000, 19_600), "of what it can get");
    assert_eq!(
        policy.budget(&vram(19_800, 19_800, 200)),
        budget(19_900, 19_960),
        "a device that is full by design"
    );
}

#[test]
fn an_automatic_hard_budget_follows_the_soft_one_that_is_set() {
    let policy = RecyclePolicy { host_soft: mib(1000), host_hard: Some(MemoryLimit::Auto), ..policy() };
    let host = SeriesFacts { total: Some(64 * GIB), ..SeriesFacts::from_bytes(MemoryKind::Host, Some(MIB)) };
    assert_eq!(policy.budget(&host).hard, Some(1150 * MIB));
}
