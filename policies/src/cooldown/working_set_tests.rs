//! A budget below the working set is reported after two tries; a leak is not mistaken for such a budget.

use super::working_set::{BudgetPass, PassedBudgets};
use super::*;
use crate::defaults::Recycle;
use crate::recycle::{MemoryBudget, RecycleFacts, SeriesFacts, decide};
use crate::units::{ByteSize, MemoryLimit};

const MIB: u64 = 1 << 20;

fn policy() -> RecyclePolicy {
    let defaults = crate::defaults();
    let common = Recycle { jitter: 0.0, max_futile: 3, ..defaults.recycle };
    RecyclePolicy {
        host_soft: Some(MemoryLimit::Bytes(ByteSize(400 * MIB))),
        host_hard: Some(MemoryLimit::Bytes(ByteSize(500 * MIB))),
        ..RecyclePolicy::new(&common)
    }
}

/// Facts of a process with 100 MiB at ready: it holds `held` MiB, `age` seconds and `requests` later.
fn facts(held: u64, age: u64, requests: u64) -> RecycleFacts {
    let mut host = SeriesFacts::from_bytes(MemoryKind::Host, Some(held * MIB));
    host.at_ready = Some(100 * MIB);
    host.budget = MemoryBudget { soft: Some(400 * MIB), hard: Some(500 * MIB) };
    let work = crate::WorkDone { requests, ..crate::WorkDone::default() };
    RecycleFacts { series: vec![host], age: Duration::from_secs(age), work, ..RecycleFacts::default() }
}

struct Model {
    cooldown: RecycleCooldown,
    passed: PassedBudgets,
    clock: u64,
    recycles: u32,
    said: Vec<HoldReason>,
}

const LOAD: Duration = Duration::from_secs(45);

impl Model {
    fn new() -> Self {
        Self {
            cooldown: RecycleCooldown::default(),
            passed: PassedBudgets::default(),
            clock: 0,
            recycles: 0,
            said: Vec::new(),
        }
    }

    /// Runs one process with a reading each second until its replacement, at most for `seconds`. `of` returns
    /// its MiB and its answered requests.
    fn live(&mut self, seconds: u64, of: impl Fn(u64) -> (u64, u64)) {
        let policy = policy();
        self.passed = PassedBudgets::default();
        for age in 0..seconds {
            self.clock += 1;
            let (held, requests) = of(age);
            let facts = facts(held, age, requests);
            self.said.extend(self.passed.add_facts(&facts, Some(LOAD), &mut self.cooldown, &policy));
            let decision = decide(&policy, &facts);
            let now = Duration::from_secs(self.clock);
            let ask =
                CooldownQuery { now, load_time: Some(LOAD), unit: 0.5, held: facts.charged(decision.series) };
            let Some(reason) = decision.reason.filter(|_| decision.due) else { continue };
            if self.cooldown.check(&decision, &ask, &policy).is_ok() {
                self.recycles += 1;
                assert_eq!(self.cooldown.record_start(now, reason, &policy), None);
                if let Some(first) = self.passed.find(reason, decision.series) {
                    self.cooldown.record_replacement(first, Some(LOAD), &policy);
                }
                self.clock += LOAD.as_secs();
                self.cooldown.record_ready(Duration::from_secs(self.clock));
                return;
            }
        }
    }
}

#[test]
fn a_budget_below_the_working_set_stops_replacements_after_two_tries_and_says_the_figures() {
    let mut model = Model::new();
    for _ in 0..20 {
        model.live(3600, |age| if age < 5 { (100, 0) } else { (620, age) });
    }
    assert_eq!(model.recycles, 2);
    let hard =
        |held: &&HoldReason| matches!(held, HoldReason::BudgetTooSmall { reason: Reason::HostHard, .. });
    let said: Vec<String> = model.said.iter().filter(hard).map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "the budget is below what this model needs to work: `policy.host.hard` is 500.0 MiB, a fresh process holds 100.0 MiB of \
          host memory at ready, 620.0 MiB after work; 2 replacements were undone at once. Below 775.0 MiB nothing is replaced \
          for it: set `policy.host.hard` to 780.0 MiB or more, or give the model less context"
        ]
    );
}

#[test]
fn a_budget_that_a_fresh_process_passes_is_said_to_be_too_small_at_once_and_replaces_nothing() {
    let mut cooldown = RecycleCooldown::default();
    let mut at_ready = facts(600, 0, 0);
    at_ready.series[0].at_ready = Some(600 * MIB);
    let said = PassedBudgets::default().add_facts(&at_ready, None, &mut cooldown, &policy());
    assert_eq!(said.len(), 2, "the soft and the hard one: {said:?}");
    assert!(said[1].to_string().contains("a replacement would bring nothing"), "{}", said[1]);
    let decision = decide(&policy(), &at_ready);
    let ask = CooldownQuery { held: Some(600 * MIB), ..CooldownQuery::default() };
    assert!(matches!(cooldown.check(&decision, &ask, &policy()), Err(HoldReason::BudgetTooSmall { .. })));
    cooldown.reset();
    assert_eq!(cooldown.check(&decision, &ask, &policy()), Ok(()), "an operator acted");
}

#[test]
fn a_leak_that_passes_its_budget_late_is_replaced_again_and_again() {
    let mut model = Model::new();
    for _ in 0..20 {
        // Each process lives twenty minutes and answers 1,200 requests.
        model.live(3600, |age| (100 + age / 3, age));
    }
    assert_eq!((model.recycles, model.said.len()), (20, 0));
}

#[test]
fn a_leak_that_is_known_as_one_makes_no_budget_too_small() {
    let pass = |leaks| BudgetPass {
        reason: Reason::HostHard,
        series: MemoryKind::Host,
        budget: 500,
        at_ready: Some(100),
        held: 510,
        age: Duration::from_secs(3),
        requests: 2,
        leaks,
    };
    assert!(pass(false).is_soon(None, &policy()));
    assert!(!pass(true).is_soon(None, &policy()));
}

#[test]
fn what_grows_beyond_the_suggested_budget_later_is_growth_and_recycles_again() {
    let mut model = Model::new();
    for _ in 0..3 {
        model.live(1200, |age| if age < 5 { (100, 0) } else { (620, age) });
    }
    assert_eq!(model.recycles, 2);
    // The working set plus a leak exceeds 775 MiB after half an hour.
    model.live(7200, |age| if age < 5 { (100, 0) } else { (620 + age / 12, age) });
    assert_eq!(model.recycles, 3);
}

#[test]
fn what_a_young_process_needs_beyond_the_suggested_budget_raises_it() {
    let mut model = Model::new();
    for _ in 0..3 {
        model.live(1200, |age| if age < 5 { (100, 0) } else { (620, age) });
    }
    model.live(7200, |age| if age < 30 { (620, age) } else { (900, age) });
    assert_eq!(model.recycles, 2);
    let decision = decide(&policy(), &facts(900, 60, 60));
    let ask = CooldownQuery { held: Some(900 * MIB), ..CooldownQuery::default() };
    let held = model.cooldown.check(&decision, &ask, &policy()).unwrap_err();
    assert!(held.to_string().contains("900.0 MiB after work"), "{held}");
    assert!(held.to_string().contains("1.1 GiB"), "{held}");
    let kept = serde_json::to_string(&model.cooldown).unwrap();
    assert_eq!(serde_json::from_str::<RecycleCooldown>(&kept).unwrap(), model.cooldown);
}

#[test]
fn what_an_older_program_remembered_has_no_budgets_and_is_read() {
    let mut old = serde_json::to_value(RecycleCooldown::default()).unwrap();
    old.as_object_mut().unwrap().remove("budgets").unwrap();
    assert_eq!(serde_json::from_value::<RecycleCooldown>(old).unwrap(), RecycleCooldown::default());
}

#[test]
fn the_pause_between_recycles_counts_from_ready_and_not_from_the_beginning_of_a_load() {
    let mut cooldown = RecycleCooldown::default();
    let hard = RecycleDecision {
        action: RecycleAction::DrainNow,
        reason: Some(Reason::HostHard),
        due: true,
        series: Some(MemoryKind::Host),
        ..RecycleDecision::OBSERVE
    };
    cooldown.record_ready(Duration::from_secs(1));
    let at =
        |seconds| CooldownQuery { now: Duration::from_secs(seconds), unit: 0.5, ..CooldownQuery::default() };
    assert_eq!(cooldown.check(&hard, &at(1), &policy()), Ok(()), "the first start is no recycle");
    cooldown.record_start(Duration::from_secs(100), Reason::HostHard, &policy());
    cooldown.record_ready(Duration::from_secs(145));
    let held = HoldReason::TooSoon { seconds_left: 45, rule: PauseRule::MinIntervalHard };
    assert_eq!(cooldown.check(&hard, &at(160), &policy()), Err(held));
    assert_eq!(cooldown.check(&hard, &at(205), &policy()), Ok(()));
}

#[test]
fn what_earlier_processes_held_tells_which_budgets_are_too_small() {
    use super::working_set::find_shortfalls;
    let seen = |ready, most| crate::book::held::HeldMemory {
        series: MemoryKind::Host,
        ready: ready * MIB,
        most: most * MIB,
    };
    let found = |ready, most| {
        let found = find_shortfalls(&policy(), &[seen(ready, most)], |_| None);
        found
            .into_iter()
            .map(|(_, reason, shortfall)| (reason, shortfall.suggested / MIB))
            .collect::<Vec<_>>()
    };
    assert_eq!(found(100, 350), []);
    assert_eq!(found(100, 410), [], "it was replaced at its soft budget");
    assert_eq!(found(100, 440), [(Reason::HostSoft, 550)]);
    assert_eq!(found(100, 600), [(Reason::HostSoft, 750), (Reason::HostHard, 750)]);
    assert_eq!(found(405, 405), [(Reason::HostSoft, 506)], "a fresh process is over it");
}
