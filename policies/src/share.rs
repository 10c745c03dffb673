//! Backends that share a budget or a GPU: decides which one is replaced first.
//!
//! - [`choose_first`] chooses the backend to replace if the sum exceeds a shared budget: the one that frees
//!   the most memory for the cost of its replacement.
//! - [`ReplacementArbiter`] allows one replacement per model and per GPU at a time, and one kill for lack of
//!   memory at a time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::names::ModelName;
use crate::sample::{GpuIndex, MemoryKind};
use crate::units::as_f64;

/// Exceeded level of a shared budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetLevel {
    /// Soft budget: replace when quiet.
    Soft,
    /// Hard budget: replace now.
    Hard,
}

/// Choice of a backend because a shared budget is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedChoice {
    /// Kind of memory that the budget limits.
    pub series: MemoryKind,
    /// Exceeded level.
    pub level: BudgetLevel,
    /// Shared budget in bytes.
    pub limit: u64,
}

/// Facts about one backend that shares a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedMember {
    /// Bytes held; `None` if unknown.
    pub charged: Option<u64>,
    /// Bytes of a fresh, settled process; `None` if unknown.
    pub fresh: Option<u64>,
    /// Waiting time caused by a replacement: zero with overlap, else the load time; `None` if unknown.
    pub cost: Option<Duration>,
    /// True if the backend may be replaced: it is ready, not held back, and not being replaced.
    pub free_to_go: bool,
}

/// A shared budget in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedBudget {
    /// Soft budget: when exceeded, a backend is replaced at a quiet moment.
    pub soft: Option<u64>,
    /// Hard budget: when exceeded, a backend is replaced now.
    pub hard: Option<u64>,
}

/// Returns the index of the backend to replace. Unknown values count as zero, so the sum is a lower bound.
pub fn choose_first(
    series: MemoryKind,
    members: &[SharedMember],
    budget: SharedBudget,
) -> Option<(usize, SharedChoice)> {
    let sum = members.iter().filter_map(|member| member.charged).fold(0, u64::saturating_add);
    let over = |limit: Option<u64>| limit.filter(|limit| sum >= *limit);
    let (level, limit) = match (over(budget.hard), over(budget.soft)) {
        (Some(limit), _) => (BudgetLevel::Hard, limit),
        (None, Some(limit)) => (BudgetLevel::Soft, limit),
        (None, None) => return None,
    };
    let gains = members.iter().enumerate().filter_map(|(index, member)| {
        let gain = member.charged?.saturating_sub(member.fresh?);
        (member.free_to_go && gain > 0).then_some((index, gain, member))
    });
    let best = gains.max_by(|(_, a, first), (_, b, second)| {
        gain_per_cost(*a, first).total_cmp(&gain_per_cost(*b, second))
    })?;
    Some((best.0, SharedChoice { series, level, limit }))
}

/// Returns the bytes freed per second of waiting; an added second keeps tiny gains without cost from winning.
fn gain_per_cost(gain: u64, member: &SharedMember) -> f64 {
    as_f64(gain) / (1.0 + member.cost.unwrap_or_default().as_secs_f64())
}

/// Identifies a slot for a replacement; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReplacementSlotId(u64);

/// Answer to a request for a replacement slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplacementSlot {
    /// The replacement may begin; the slot must be returned.
    Granted(ReplacementSlotId),
    /// Another replacement must end first.
    Wait {
        /// Model of that replacement.
        model: ModelName,
        /// Replica of that replacement.
        replica: u32,
        /// GPU that both share; `None` for replicas of one model, or if the host memory is the reason.
        gpu: Option<GpuIndex>,
    },
}

#[derive(Clone, Debug)]
struct SlotHolder {
    id: ReplacementSlotId,
    model: ModelName,
    replica: u32,
    gpus: Vec<GpuIndex>,
}

/// Resources that a replacement must not share with another replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplacementReach {
    /// The GPUs of the replica.
    Gpus,
    /// The host memory, which is compared with the needs of two processes: no other replacement may run.
    Machine,
}

/// Grants replacement slots for all models; kept behind a lock.
#[derive(Clone, Debug, Default)]
pub struct ReplacementArbiter {
    next: u64,
    holders: Vec<SlotHolder>,
    /// For each kind of memory, the time of the last kill because it was almost exhausted.
    ended: Vec<(MemoryKind, Duration)>,
}

impl ReplacementArbiter {
    /// Creates an arbiter without holders.
    pub const fn new() -> Self {
        Self { next: 0, holders: Vec::new(), ended: Vec::new() }
    }

    /// Requests a slot for one replica that uses these GPUs; a replica's existing slot is returned again.
    pub fn request(
        &mut self,
        model: &ModelName,
        replica: u32,
        gpus: &[GpuIndex],
        reach: ReplacementReach,
    ) -> ReplacementSlot {
        for holder in &self.holders {
            let gpu = holder.gpus.iter().copied().find(|gpu| gpus.contains(gpu));
            if holder.model == *model {
                if holder.replica == replica {
                    return ReplacementSlot::Granted(holder.id);
                }
                return ReplacementSlot::Wait {
                    model: holder.model.clone(),
                    replica: holder.replica,
                    gpu: None,
                };
            }
            if gpu.is_some() || reach == ReplacementReach::Machine {
                return ReplacementSlot::Wait { model: holder.model.clone(), replica: holder.replica, gpu };
            }
        }
        ReplacementSlot::Granted(self.claim(model, replica, gpus))
    }

    /// Takes a slot without waiting, for an operator's request or an unavoidable replacement.
    pub fn claim(&mut self, model: &ModelName, replica: u32, gpus: &[GpuIndex]) -> ReplacementSlotId {
        self.next += 1;
        let id = ReplacementSlotId(self.next);
        self.holders.push(SlotHolder { id, model: model.clone(), replica, gpus: gpus.to_vec() });
        id
    }

    /// Releases a slot whose replacement has ended or does not take place. Repetition has no effect.
    pub fn release(&mut self, slot: ReplacementSlotId) {
        self.holders.retain(|holder| holder.id != slot);
    }

    /// Returns true if a backend may be killed because this memory is almost exhausted; the caller must then
    /// kill it. After each kill the others wait for `pause`, so that the memory can return.
    pub fn may_end(&mut self, series: MemoryKind, now: Duration, pause: Duration) -> bool {
        let last = self.ended.iter().find(|(of, _)| *of == series).map(|(_, at)| *at);
        if last.is_some_and(|at| now < at.saturating_add(pause)) {
            return false;
        }
        self.ended.retain(|(of, _)| *of != series);
        self.ended.push((series, now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMBER: SharedMember = SharedMember { charged: None, fresh: None, cost: None, free_to_go: true };
    const BUDGET: SharedBudget = SharedBudget { soft: Some(100), hard: Some(200) };

    fn holds(charged: u64, fresh: u64) -> SharedMember {
        SharedMember { charged: Some(charged), fresh: Some(fresh), ..MEMBER }
    }

    #[test]
    fn within_the_budget_nobody_goes() {
        assert_eq!(choose_first(MemoryKind::Host, &[holds(60, 0), holds(39, 0)], BUDGET), None);
        assert_eq!(choose_first(MemoryKind::Host, &[holds(999, 0)], SharedBudget::default()), None);
    }

    #[test]
    fn what_is_judged_by_the_memory_of_the_machine_waits_for_every_other() {
        let mut arbiter = ReplacementArbiter::new();
        let [a, b] = ["a", "b"].map(ModelName::new);
        let ReplacementSlot::Granted(first) = arbiter.request(&a, 0, &[], ReplacementReach::Machine) else {
            panic!("nobody else")
        };
        assert!(matches!(
            arbiter.request(&b, 0, &[], ReplacementReach::Machine),
            ReplacementSlot::Wait { gpu: None, .. }
        ));
        arbiter.release(first);
        assert!(matches!(
            arbiter.request(&b, 0, &[], ReplacementReach::Machine),
            ReplacementSlot::Granted(_)
        ));
    }

    #[test]
    fn whoever_gives_back_most_goes_first() {
        let members = [holds(90, 80), holds(60, 10), holds(20, 0)];
        let chosen = |level, limit| SharedChoice { series: MemoryKind::Host, level, limit };
        assert_eq!(
            choose_first(MemoryKind::Host, &members, BUDGET),
            Some((1, chosen(BudgetLevel::Soft, 100)))
        );
        let tight = SharedBudget { hard: Some(150), ..BUDGET };
        assert_eq!(
            choose_first(MemoryKind::Host, &members, tight),
            Some((1, chosen(BudgetLevel::Hard, 150)))
        );
    }

    #[test]
    fn a_slow_load_has_to_give_back_more() {
        let slow = SharedMember { cost: Some(Duration::from_secs(60)), ..holds(60, 10) };
        assert_eq!(
            choose_first(MemoryKind::Host, &[slow, holds(60, 50)], BUDGET).map(|(index, _)| index),
            Some(1)
        );
    }

    #[test]
    fn who_may_not_go_or_gains_nothing_is_passed_over() {
        let held = SharedMember { free_to_go: false, ..holds(90, 0) };
        assert_eq!(choose_first(MemoryKind::Host, &[held, holds(50, 50)], BUDGET), None);
        assert_eq!(
            choose_first(MemoryKind::Host, &[held, holds(50, 40)], BUDGET).map(|(index, _)| index),
            Some(1)
        );
        assert_eq!(
            choose_first(MemoryKind::Host, &[MEMBER, holds(50, 0)], BUDGET),
            None,
            "an unknown figure counts as nothing"
        );
    }

    fn model(name: &str) -> ModelName {
        ModelName::new(name)
    }

    #[track_caller]
    fn granted(slot: &ReplacementSlot) -> ReplacementSlotId {
        match slot {
            ReplacementSlot::Granted(id) => *id,
            ReplacementSlot::Wait { .. } => panic!("{slot:?}"),
        }
    }

    #[test]
    fn replicas_of_one_model_take_turns() {
        let mut arbiter = ReplacementArbiter::new();
        let first = granted(&arbiter.request(&model("a"), 0, &[], ReplacementReach::Gpus));
        assert_eq!(
            granted(&arbiter.request(&model("a"), 0, &[], ReplacementReach::Gpus)),
            first,
            "it has the slot already"
        );
        let wait = ReplacementSlot::Wait { model: model("a"), replica: 0, gpu: None };
        assert_eq!(arbiter.request(&model("a"), 1, &[], ReplacementReach::Gpus), wait);
        granted(&arbiter.request(&model("b"), 0, &[], ReplacementReach::Gpus));
        arbiter.release(first);
        granted(&arbiter.request(&model("a"), 1, &[], ReplacementReach::Gpus));
    }

    #[test]
    fn one_replacement_at_a_time_on_a_gpu_and_a_turn_is_given_back_once() {
        let mut arbiter = ReplacementArbiter::new();
        let (zero, one) = (GpuIndex(0), GpuIndex(1));
        let both = granted(&arbiter.request(&model("a"), 0, &[zero, one], ReplacementReach::Gpus));
        let wait = ReplacementSlot::Wait { model: model("a"), replica: 0, gpu: Some(one) };
        assert_eq!(arbiter.request(&model("b"), 0, &[one], ReplacementReach::Gpus), wait);
        granted(&arbiter.request(&model("c"), 0, &[GpuIndex(2)], ReplacementReach::Gpus));
        arbiter.release(both);
        let next = granted(&arbiter.request(&model("b"), 0, &[one], ReplacementReach::Gpus));
        arbiter.release(both);
        assert_eq!(arbiter.holders.len(), 2, "giving back an old slot takes nobody else's");
        arbiter.release(next);
        assert_eq!(arbiter.holders.len(), 1);
    }

    #[test]
    fn a_shortage_ends_one_backend_at_a_time_and_each_memory_counts_by_itself() {
        let mut arbiter = ReplacementArbiter::new();
        let mut may =
            |series, second| arbiter.may_end(series, Duration::from_secs(second), Duration::from_secs(20));
        assert!(may(MemoryKind::Host, 100));
        assert!(!may(MemoryKind::Host, 101) && !may(MemoryKind::Host, 119));
        assert!(may(MemoryKind::Vram(GpuIndex(0)), 101));
        assert!(may(MemoryKind::Host, 120), "it was not enough");
        assert!(!may(MemoryKind::Host, 125));
    }

    proptest! {
        #[test]
        fn no_two_turns_share_a_model_or_a_gpu(
            steps in proptest::collection::vec((0u8..4, 0u32..3, proptest::collection::vec(0u32..4, 0..3), any::<bool>()), 1..80)
        ) {
            let mut arbiter = ReplacementArbiter::new();
            let mut slots: Vec<ReplacementSlotId> = Vec::new();
            for (name, replica, gpus, release) in steps {
                let gpus: Vec<GpuIndex> = gpus.into_iter().map(GpuIndex).collect();
                if let ReplacementSlot::Granted(id) = arbiter.request(&model(&format!("m{name}")), replica, &gpus, ReplacementReach::Gpus) {
                    slots.push(id);
                }
                if release && let Some(id) = slots.pop() {
                    arbiter.release(id);
                }
                for (index, a) in arbiter.holders.iter().enumerate() {
                    for b in &arbiter.holders[index + 1..] {
                        prop_assert!(a.model != b.model && a.gpus.iter().all(|gpu| !b.gpus.contains(gpu)));
                    }
                }
            }
        }

        #[test]
        fn the_chosen_one_may_go_and_gains(members in proptest::collection::vec((0u64..1000, 0u64..1000, any::<bool>()), 0..8)) {
            let members: Vec<SharedMember> =
                members.into_iter().map(|(charged, fresh, free_to_go)| SharedMember { free_to_go, ..holds(charged, fresh) }).collect();
            if let Some((index, _)) = choose_first(MemoryKind::Host, &members, BUDGET) {
                prop_assert!(members[index].free_to_go && members[index].charged > members[index].fresh);
            }
        }
    }
}
