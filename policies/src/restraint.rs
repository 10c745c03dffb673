//! When a policy may not recycle: too soon after the last time, or when recycling has proved futile.
//!
//! A recycle that leaves the next generation as big as the last did not help: the budget is too small, or the memory
//! is not the backend's. After a few of those in a row the policy stops and says so, instead of restarting for ever.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::recycle::Action;

/// The limits on recycling by policy. Operators are not bound by them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestraintPolicy {
    /// Least time between two recycles of one model by soft rules.
    pub min_interval: Duration,
    /// Least time between two recycles when the hard budget is passed.
    pub min_interval_hard: Duration,
    /// This many recycles in a row that did not help switch the policy off. 0 never does.
    pub max_futile: u32,
}

/// Why a recycle that is due does not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Held {
    /// The last one was too recent; this much time is missing.
    TooSoon {
        /// Time until it is allowed, in whole seconds, rounded up.
        seconds_left: u64,
    },
    /// Recycling did not help this many times in a row, so the policy is off until an operator acts.
    Futile {
        /// Recycles in a row that did not help.
        recycles: u32,
    },
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooSoon { seconds_left } => {
                write!(f, "the last recycle was too recent: {seconds_left} s to wait")
            }
            Self::Futile { recycles } => write!(
                f,
                "the last {recycles} recycles did not bring memory down, so recycling by policy is off: raise the budget, \
                 lower --cache-ram or change the build, then `llama-warden restart` switches it on again"
            ),
        }
    }
}

/// What is remembered about recycles of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restraint {
    last: Option<Duration>,
    futile: u32,
}

impl Restraint {
    /// Whether a recycle for `action` may happen at `now` (time since the caller's epoch).
    pub fn check(&self, action: Action, now: Duration, policy: &RestraintPolicy) -> Result<(), Held> {
        if policy.max_futile > 0 && self.futile >= policy.max_futile {
            return Err(Held::Futile { recycles: self.futile });
        }
        let interval =
            if action >= Action::DrainNow { policy.min_interval_hard } else { policy.min_interval };
        let allowed = self.last.map_or(Duration::ZERO, |last| last.saturating_add(interval));
        if now < allowed {
            let left = allowed.saturating_sub(now);
            return Err(Held::TooSoon { seconds_left: left.as_secs() + u64::from(left.subsec_nanos() > 0) });
        }
        Ok(())
    }

    /// A recycle by policy began.
    pub fn began(&mut self, now: Duration) {
        self.last = Some(now);
    }

    /// The generation that followed has settled. Returns true when this switches the policy off.
    pub fn ended(&mut self, helped: bool, policy: &RestraintPolicy) -> bool {
        self.futile = if helped { 0 } else { self.futile.saturating_add(1) };
        policy.max_futile > 0 && self.futile == policy.max_futile
    }

    /// An operator restarted the model: the policy starts afresh.
    pub fn reset(&mut self) {
        self.futile = 0;
    }
}

/// Whether a recycle helped: the next generation holds clearly less, and is under the budget that called for it.
///
/// "Clearly" is a tenth: less could be noise of the allocator.
pub fn helped(before: u64, after: u64, budget: Option<u64>) -> bool {
    after <= before.saturating_sub(before / 10) && budget.is_none_or(|budget| after < budget)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RestraintPolicy = RestraintPolicy {
        min_interval: Duration::from_secs(600),
        min_interval_hard: Duration::from_secs(60),
        max_futile: 3,
    };

    #[test]
    fn the_first_recycle_is_free_and_the_next_waits_its_interval() {
        let mut restraint = Restraint::default();
        let now = Duration::from_secs(5);
        assert_eq!(restraint.check(Action::RecycleWhenQuiet, now, &POLICY), Ok(()));
        restraint.began(now);
        let held = restraint.check(Action::RecycleWhenQuiet, Duration::from_secs(6), &POLICY);
        assert_eq!(held, Err(Held::TooSoon { seconds_left: 599 }));
        assert_eq!(restraint.check(Action::DrainNow, Duration::from_secs(65), &POLICY), Ok(()));
        assert_eq!(restraint.check(Action::RecycleWhenQuiet, Duration::from_secs(605), &POLICY), Ok(()));
    }

    #[test]
    fn futile_recycles_switch_the_policy_off_once_and_a_useful_one_starts_the_count_again() {
        let mut restraint = Restraint::default();
        assert!(!restraint.ended(false, &POLICY));
        assert!(!restraint.ended(false, &POLICY));
        assert!(!restraint.ended(true, &POLICY));
        assert_eq!(
            [false, false, false].map(|helped| restraint.ended(helped, &POLICY)),
            [false, false, true]
        );
        let held = restraint.check(Action::DrainNow, Duration::from_secs(9999), &POLICY);
        assert_eq!(held, Err(Held::Futile { recycles: 3 }));
        restraint.reset();
        assert_eq!(restraint.check(Action::DrainNow, Duration::from_secs(9999), &POLICY), Ok(()));
    }

    #[test]
    fn a_recycle_helped_when_memory_is_clearly_lower_and_under_the_budget() {
        assert!(helped(1000, 100, Some(900)));
        assert!(!helped(1000, 950, None));
        assert!(!helped(1000, 500, Some(400)));
        assert!(helped(1000, 900, None));
    }
}
