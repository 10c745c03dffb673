//! Whether a backend should be replaced: budgets on host memory, requests and age.
//!
//! ```text
//!   host memory  0 ........... soft ............ hard ......>
//!                    observe    |  when quiet,    |  drain
//!                               |  or within a    |  now
//!                               |  bound          |
//! ```
//!
//! The function sees one [`Facts`] and returns one [`Decision`]; it remembers nothing. Whether a decision may be
//! carried out now is [`crate::restraint`]'s business.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sample::Work;
use crate::units::ByteSize;

/// What to do about a backend, in rising urgency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Nothing.
    Observe,
    /// Replace it at the next quiet moment, or when its time is up.
    RecycleWhenQuiet,
    /// Drain and replace it now.
    DrainNow,
    /// End it without draining.
    KillNow,
}

/// Why a backend is replaced. The name is the `reason` label of metrics and the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Host memory passed the soft budget.
    HostSoft,
    /// Host memory passed the hard budget.
    HostHard,
    /// It answered its share of requests.
    MaxRequests,
    /// It is old.
    MaxAge,
    /// An operator asked.
    Operator,
    /// Its configuration changed.
    Configuration,
    /// It stopped answering probes.
    Unresponsive,
}

impl Reason {
    /// The name used in the ledger, events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HostSoft => "host_soft",
            Self::HostHard => "host_hard",
            Self::MaxRequests => "max_requests",
            Self::MaxAge => "max_age",
            Self::Operator => "operator",
            Self::Configuration => "configuration",
            Self::Unresponsive => "unresponsive",
        }
    }

    /// Whether a policy decided it, so that [`crate::restraint`] applies.
    pub const fn is_policy(self) -> bool {
        matches!(self, Self::HostSoft | Self::HostHard | Self::MaxRequests | Self::MaxAge)
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Budgets of one model, resolved to bytes. `None` switches a rule off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecyclePolicy {
    /// Above this the backend is replaced when quiet.
    pub host_soft: Option<ByteSize>,
    /// Above this it is drained now.
    pub host_hard: Option<ByteSize>,
    /// Requests after which it is replaced when quiet.
    pub max_requests: Option<u64>,
    /// Age after which it is replaced when quiet.
    pub max_age: Option<Duration>,
    /// Share by which `max_requests` and `max_age` vary from generation to generation, 0 to 1: replicas started
    /// together must not be replaced together.
    pub jitter: f64,
    /// Quiet means: no request in flight for this long.
    pub quiet_for: Duration,
    /// A replacement that waits for quiet waits no longer than this.
    pub quiet_within: Duration,
}

/// What is known about a generation at the moment of the decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Anonymous host memory in bytes ([`crate::sample::HostMemory::charged`]); `None` if unknown.
    pub host: Option<u64>,
    /// Time since it became ready.
    pub age: Duration,
    /// Work done.
    pub work: Work,
    /// For how long no request has been in flight; `None` while one is.
    pub idle_for: Option<Duration>,
    /// For how long a replacement has been wanted; `None` if it is wanted only now.
    pub wanted_for: Option<Duration>,
    /// This generation's own random number in `[0, 1)`, drawn once.
    pub unit: f64,
}

/// What the policy says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// What to do.
    pub action: Action,
    /// Why; `None` with [`Action::Observe`].
    pub reason: Option<Reason>,
    /// For [`Action::RecycleWhenQuiet`]: whether the moment has come. Always true for stronger actions.
    pub due: bool,
}

impl Decision {
    const OBSERVE: Self = Self { action: Action::Observe, reason: None, due: false };
}

/// Judges one generation.
pub fn decide(policy: &RecyclePolicy, facts: &Facts) -> Decision {
    let over = |limit: Option<ByteSize>| limit.zip(facts.host).is_some_and(|(limit, host)| host >= limit.0);
    if over(policy.host_hard) {
        return Decision { action: Action::DrainNow, reason: Some(Reason::HostHard), due: true };
    }
    let reason = if over(policy.host_soft) {
        Reason::HostSoft
    } else if policy
        .max_requests
        .is_some_and(|max| facts.work.requests >= jittered(max, policy.jitter, facts.unit))
    {
        Reason::MaxRequests
    } else if policy.max_age.is_some_and(|max| facts.age >= jittered_time(max, policy.jitter, facts.unit)) {
        Reason::MaxAge
    } else {
        return Decision::OBSERVE;
    };
    let quiet = facts.idle_for.is_some_and(|idle| idle >= policy.quiet_for);
    let due = quiet || facts.wanted_for.is_some_and(|wanted| wanted >= policy.quiet_within);
    Decision { action: Action::RecycleWhenQuiet, reason: Some(reason), due }
}

/// Between `1 - jitter` and `1`: jitter only ever brings a limit forward, so that the configured one is never passed.
fn factor(jitter: f64, unit: f64) -> f64 {
    1.0 - jitter.clamp(0.0, 1.0) * unit.clamp(0.0, 1.0)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a request count scaled by a factor of at most 1; off by one does not matter"
)]
fn jittered(max: u64, jitter: f64, unit: f64) -> u64 {
    ((max as f64 * factor(jitter, unit)).ceil() as u64).clamp(1, max.max(1))
}

fn jittered_time(max: Duration, jitter: f64, unit: f64) -> Duration {
    max.mul_f64(factor(jitter, unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const POLICY: RecyclePolicy = RecyclePolicy {
        host_soft: Some(ByteSize::mib(100)),
        host_hard: Some(ByteSize::mib(200)),
        max_requests: Some(1000),
        max_age: Some(Duration::from_secs(3600)),
        jitter: 0.1,
        quiet_for: Duration::from_secs(2),
        quiet_within: Duration::from_secs(600),
    };

    fn facts(host_mib: u64) -> Facts {
        Facts {
            host: Some(host_mib * 1024 * 1024),
            age: Duration::ZERO,
            work: Work::default(),
            idle_for: None,
            wanted_for: None,
            unit: 0.5,
        }
    }

    #[test]
    fn below_the_budgets_nothing_happens() {
        assert_eq!(decide(&POLICY, &facts(99)), Decision::OBSERVE);
        assert_eq!(decide(&POLICY, &Facts { host: None, ..facts(0) }), Decision::OBSERVE);
    }

    #[test]
    fn past_the_soft_budget_it_waits_for_quiet_but_not_for_ever() {
        let busy = decide(&POLICY, &facts(100));
        assert_eq!(
            (busy.action, busy.reason, busy.due),
            (Action::RecycleWhenQuiet, Some(Reason::HostSoft), false)
        );
        let quiet = Facts { idle_for: Some(Duration::from_secs(2)), ..facts(100) };
        assert!(decide(&POLICY, &quiet).due);
        let late = Facts { wanted_for: Some(Duration::from_secs(600)), ..facts(100) };
        assert!(decide(&POLICY, &late).due);
    }

    #[test]
    fn past_the_hard_budget_it_drains_now() {
        let decision = decide(&POLICY, &facts(200));
        assert_eq!(
            (decision.action, decision.reason, decision.due),
            (Action::DrainNow, Some(Reason::HostHard), true)
        );
    }

    #[test]
    fn requests_and_age_count_with_jitter_that_never_exceeds_the_limit() {
        let work = Work { requests: 950, ..Work::default() };
        assert_eq!(decide(&POLICY, &Facts { work, ..facts(0) }).reason, Some(Reason::MaxRequests));
        assert_eq!(decide(&POLICY, &Facts { work, unit: 0.0, ..facts(0) }).reason, None);
        let age = Duration::from_secs(3420);
        assert_eq!(decide(&POLICY, &Facts { age, ..facts(0) }).reason, Some(Reason::MaxAge));
    }

    proptest! {
        #[test]
        fn more_memory_never_means_less_urgency(a in 0u64..400, b in 0u64..400, idle in proptest::option::of(0u64..5)) {
            let at = |mib| Facts { idle_for: idle.map(Duration::from_secs), ..facts(mib) };
            let (low, high) = (decide(&POLICY, &at(a.min(b))), decide(&POLICY, &at(a.max(b))));
            prop_assert!(high.action >= low.action);
        }

        #[test]
        fn the_configured_limit_is_never_passed(max in 1u64..1_000_000, jitter in 0.0f64..1.0, unit in 0.0f64..1.0) {
            let policy = RecyclePolicy { max_requests: Some(max), jitter, ..POLICY };
            let work = Work { requests: max, ..Work::default() };
            prop_assert_eq!(decide(&policy, &Facts { work, unit, ..facts(0) }).reason, Some(Reason::MaxRequests));
        }
    }
}
