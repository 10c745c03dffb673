//! Chooses plausible sets of switches from the results of single switches. Only finished trials count.

use super::CurePlanner;
use crate::sequential::SwitchEffect;
use crate::trial::{SwitchTrial, WorkloadMemory};

impl CurePlanner {
    pub(super) fn single_trial(&self, switch: usize) -> Option<&SwitchTrial> {
        self.trials.iter().find(|trial| trial.arm.switches == [switch])
    }

    pub(super) fn clash(&self, one: usize, other: usize) -> bool {
        self.clashes.iter().any(|pair| *pair == [one, other] || *pair == [other, one])
    }

    pub(super) fn usable(&self, switch: usize) -> bool {
        self.single_trial(switch).is_none_or(|trial| trial.crashed.is_none())
    }

    /// Returns the largest share of a leak that a switch may stop, according to its own trial.
    pub(super) fn largest_effect(&self, switch: usize, track: WorkloadMemory) -> f64 {
        let share =
            self.single_trial(switch).and_then(|trial| trial.judgement(track)).and_then(|found| found.share);
        share.map_or(1.0, |share| (1.0 - share.low).clamp(0.0, 1.0))
    }

    /// Returns the share of growth that a switch probably stops, summed over all targets.
    pub(super) fn expected_effect(&self, switch: usize) -> f64 {
        let share = |track: &WorkloadMemory| {
            self.single_trial(switch).and_then(|trial| trial.judgement(*track)).and_then(|found| found.share)
        };
        let gone =
            |track: &WorkloadMemory| share(track).map_or(0.0, |share| (1.0 - share.value).clamp(0.0, 1.0));
        self.targets.iter().map(gone).sum()
    }

    /// Returns as many switches as can be combined, the most effective ones first.
    pub(super) fn compatible_switches(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.switches).filter(|one| self.usable(*one)).collect();
        order.sort_by(|a, b| self.expected_effect(*b).total_cmp(&self.expected_effect(*a)));
        let mut all: Vec<usize> = Vec::new();
        for one in order {
            if all.iter().all(|other| !self.clash(one, *other)) {
                all.push(one);
            }
        }
        all
    }

    /// Returns true if a trial has shown that this set, or a set that includes it, fails.
    pub(super) fn fails(&self, set: &[usize]) -> bool {
        self.trials.iter().any(|trial| {
            trial.closed
                && trial.crashed.is_none()
                && set.iter().all(|one| trial.arm.switches.contains(one))
                && !trial.stops_all(&self.targets)
        })
    }

    /// Returns the sets of this size that may work, the likeliest last.
    pub(super) fn plausible_sets(&self, size: usize) -> Vec<Vec<usize>> {
        let usable: Vec<usize> = (0..self.switches).filter(|one| self.usable(*one)).collect();
        let mut found = Vec::new();
        let mut chosen = Vec::new();
        self.choose(&usable, size, &mut chosen, &mut found);
        let merit = |set: &Vec<usize>| set.iter().map(|one| self.expected_effect(*one)).sum::<f64>();
        // The sort is stable and the list is read from its end, so of equally likely sets the one with
        // earlier switches is tried first.
        found.reverse();
        found.sort_by(|a, b| merit(a).total_cmp(&merit(b)));
        found
    }

    pub(super) fn choose(
        &self,
        from: &[usize],
        size: usize,
        chosen: &mut Vec<usize>,
        found: &mut Vec<Vec<usize>>,
    ) {
        if size == 0 {
            let reaches = |track: &WorkloadMemory| {
                let gone: f64 = chosen.iter().map(|one| self.largest_effect(*one, *track)).sum();
                gone >= 1.0 - self.policy.stops_share
            };
            if self.targets.iter().all(reaches) {
                found.push(chosen.clone());
            }
            return;
        }
        for (at, one) in from.iter().enumerate() {
            if found.len() >= self.policy.sets_listed {
                return;
            }
            if chosen.iter().all(|other| !self.clash(*one, *other)) {
                chosen.push(*one);
                self.choose(&from[at + 1..], size - 1, chosen, found);
                chosen.pop();
            }
        }
    }

    /// Returns the groups of switches to remove from a set that works, the first to try last: first all
    /// switches that have no effect in their own trial, then each single switch.
    pub(super) fn removal_queue(&self, good: &[usize]) -> Vec<Vec<usize>> {
        let useless = |one: &usize| {
            let does = |track: &WorkloadMemory| {
                self.single_trial(*one).and_then(|trial| trial.judgement(*track)).map(|found| found.does)
            };
            self.targets.iter().all(|track| does(track) == Some(SwitchEffect::Nothing))
        };
        let mut order = good.to_vec();
        order.sort_by(|a, b| self.expected_effect(*b).total_cmp(&self.expected_effect(*a)));
        let mut queue: Vec<Vec<usize>> = order.iter().map(|one| vec![*one]).collect();
        queue.push(good.iter().copied().filter(|one| useless(one)).collect());
        queue
    }
}
