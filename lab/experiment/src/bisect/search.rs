//! Chooses the next trial, from the results of finished trials only.

use super::{CureOutcome, CurePhase, CurePlanner};
use crate::sequential::SwitchEffect;
use crate::trial::{SwitchTrial, WorkloadMemory};
use warden_policies::growth::IntervalEstimate;

impl CurePlanner {
    pub(super) fn advance(&mut self) {
        match std::mem::replace(&mut self.phase, CurePhase::Baseline) {
            CurePhase::Baseline => {
                self.leaking = self.baseline.find_leaks();
                self.targets.clone_from(&self.leaking);
                self.phase = match (self.leaking.is_empty(), self.switches) {
                    (true, _) => CurePhase::Over(self.baseline.nothing_found()),
                    (false, 0) => CurePhase::Over(CureOutcome::NotCured),
                    (false, _) => {
                        self.begin_trial(vec![0]);
                        CurePhase::Alone
                    }
                };
            }
            CurePhase::Alone => self.phase = self.after_one(),
            CurePhase::Together => self.phase = self.after_all(),
            CurePhase::Sets(size, queue) => self.phase = self.after_set(size, queue),
            CurePhase::Reduce(good, queue) => self.phase = self.after_reduction(good, queue),
            over @ CurePhase::Over(_) => self.phase = over,
        }
    }

    fn after_one(&mut self) -> CurePhase {
        let best = self.best_alone();
        let dear = |trial: &SwitchTrial| trial.cost(&self.baseline.legs).exceeds(self.policy.dear);
        let enough = best.is_some_and(|trial| !dear(&self.trials[trial]));
        // In this phase each switch has one trial, so the number of trials is the index of the next switch.
        let next = self.trials.len();
        if next < self.switches && !enough {
            self.begin_trial(vec![next]);
            return CurePhase::Alone;
        }
        if let Some(best) = best {
            return self.finish_with(self.trials[best].arm.switches.clone());
        }
        let all = self.compatible_switches();
        if all.len() < 2 {
            return self.fall_back_to_single();
        }
        self.begin_trial(all);
        CurePhase::Together
    }

    fn after_all(&mut self) -> CurePhase {
        let Some(all) = self.trials.last() else { return CurePhase::Over(CureOutcome::NotCured) };
        let started = all.crashed.is_none();
        if started {
            let stopped = |track: &WorkloadMemory| self.trials.iter().any(|trial| trial.stops(*track));
            self.targets = self.leaking.iter().copied().filter(|track| stopped(track)).collect();
        }
        if self.targets.is_empty() {
            return CurePhase::Over(CureOutcome::NotCured);
        }
        // Without the leaks that no switch stops, a single switch may suffice.
        if let Some(best) = self.best_alone() {
            return self.finish_with(self.trials[best].arm.switches.clone());
        }
        self.after_set(1, Vec::new())
    }

    fn after_set(&mut self, size: usize, mut queue: Vec<Vec<usize>>) -> CurePhase {
        if size > 1
            && let Some(trial) = self.trials.last().filter(|trial| trial.stops_all(&self.targets))
        {
            return self.finish_with(trial.arm.switches.clone());
        }
        let mut size = size;
        while self.sets < self.policy.sets_most {
            while let Some(set) = queue.pop() {
                if !self.fails(&set) {
                    self.sets += 1;
                    self.begin_trial(set);
                    return CurePhase::Sets(size, queue);
                }
            }
            size += 1;
            if size >= self.switches || size > self.policy.set_size {
                break;
            }
            queue = self.plausible_sets(size);
        }
        // Only a set that works can be reduced.
        let good = self.trials.iter().find(|trial| trial.stops_all(&self.targets));
        match good.map(|trial| trial.arm.switches.clone()) {
            Some(good) => {
                let queue = self.removal_queue(&good);
                self.after_reduction(good, queue)
            }
            None => self.fall_back_to_single(),
        }
    }

    fn after_reduction(&mut self, mut good: Vec<usize>, mut queue: Vec<Vec<usize>>) -> CurePhase {
        if let Some(trial) = self.trials.last()
            && trial.stops_all(&self.targets)
            && trial.arm.switches.len() < good.len()
        {
            good.clone_from(&trial.arm.switches);
        }
        while let Some(away) = queue.pop() {
            let less: Vec<usize> = good.iter().copied().filter(|one| !away.contains(one)).collect();
            if less.is_empty() || less.len() == good.len() || self.fails(&less) {
                continue;
            }
            self.begin_trial(less);
            return CurePhase::Reduce(good, queue);
        }
        self.finish_with(good)
    }

    fn best_alone(&self) -> Option<usize> {
        let does = |trial: &&(usize, &SwitchTrial)| {
            trial.1.arm.switches.len() == 1 && trial.1.closed && trial.1.stops_all(&self.targets)
        };
        let price = |trial: &SwitchTrial| trial.cost(&self.baseline.legs).lost_share();
        let all: Vec<(usize, &SwitchTrial)> = self.trials.iter().enumerate().collect();
        let cheapest = all.iter().filter(does).min_by(|a, b| price(a.1).total_cmp(&price(b.1)));
        // Of switches with nearly equal cost, take the first in order, because timings are noisy.
        let least = price(cheapest?.1) + self.policy.dear;
        all.iter().filter(does).find(|trial| price(trial.1) <= least).map(|trial| trial.0)
    }

    /// Called if no set stops every leak.
    fn fall_back_to_single(&mut self) -> CurePhase {
        let mut chosen: Vec<usize> = Vec::new();
        for track in self.leaking.clone() {
            let stops = |one: &usize| self.single_trial(*one).is_some_and(|trial| trial.stops(track));
            if chosen.iter().any(stops) {
                continue;
            }
            let free = |one: &usize| chosen.iter().all(|other| !self.clash(*one, *other));
            if let Some(one) = (0..self.switches).filter(stops).find(free) {
                chosen.push(one);
            }
        }
        // Keep one switch, because the combination of several was not tried.
        chosen.truncate(1);
        self.finish_with(chosen)
    }

    fn single_trial(&self, switch: usize) -> Option<&SwitchTrial> {
        self.trials.iter().find(|trial| trial.arm.switches == [switch])
    }

    fn clash(&self, one: usize, other: usize) -> bool {
        self.clashes.iter().any(|pair| *pair == [one, other] || *pair == [other, one])
    }

    fn usable(&self, switch: usize) -> bool {
        self.single_trial(switch).is_none_or(|trial| trial.crashed.is_none())
    }

    /// Returns the share of a leak that remains in the trial of this switch alone.
    fn remaining_share(&self, switch: usize, track: WorkloadMemory) -> Option<IntervalEstimate> {
        self.single_trial(switch)?.judgement(track)?.share
    }

    /// Returns the largest share of a leak that this switch may stop.
    fn largest_effect(&self, switch: usize, track: WorkloadMemory) -> f64 {
        self.remaining_share(switch, track).map_or(1.0, |share| (1.0 - share.low).clamp(0.0, 1.0))
    }

    /// Returns the share of growth that a switch probably stops, summed over all targets.
    fn expected_effect(&self, switch: usize) -> f64 {
        let shares = self.targets.iter().map(|track| self.remaining_share(switch, *track));
        shares.map(|share| share.map_or(0.0, |share| (1.0 - share.value).clamp(0.0, 1.0))).sum()
    }

    fn compatible_switches(&self) -> Vec<usize> {
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
    fn fails(&self, set: &[usize]) -> bool {
        self.trials.iter().any(|trial| {
            trial.closed
                && trial.crashed.is_none()
                && set.iter().all(|one| trial.arm.switches.contains(one))
                && !trial.stops_all(&self.targets)
        })
    }

    fn plausible_sets(&self, size: usize) -> Vec<Vec<usize>> {
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

    fn choose(&self, from: &[usize], size: usize, chosen: &mut Vec<usize>, found: &mut Vec<Vec<usize>>) {
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
    /// switches without an effect of their own, then each single switch.
    fn removal_queue(&self, good: &[usize]) -> Vec<Vec<usize>> {
        let useless = |one: &usize| {
            let does = |track: WorkloadMemory| Some(self.single_trial(*one)?.judgement(track)?.does);
            self.targets.iter().all(|track| does(*track) == Some(SwitchEffect::Nothing))
        };
        let mut order = good.to_vec();
        order.sort_by(|a, b| self.expected_effect(*b).total_cmp(&self.expected_effect(*a)));
        let mut queue: Vec<Vec<usize>> = order.iter().map(|one| vec![*one]).collect();
        queue.push(good.iter().copied().filter(|one| useless(one)).collect());
        queue
    }
}
