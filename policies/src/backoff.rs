//! Delay before a crashed backend is started again.
//!
//! The delay grows exponentially, with a cap and jitter. The delay is never zero, so that a backend that dies
//! at once is not restarted in a busy loop.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Parameters of the delay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackoffPolicy {
    /// Delay after the first failure, before jitter. Above zero.
    pub first: Duration,
    /// Longest delay, jitter included.
    pub cap: Duration,
}

/// Shortest delay ever returned: a floor for misconfigured or jittered values.
pub const DELAY_LEAST: Duration = Duration::from_millis(10);

/// Returns the delay after this many consecutive failures, 1 or more; `unit`: a random number in `[0, 1)`.
///
/// Equal jitter: the delay is a random point between half and all of the doubled value, so replicas that died
/// together restart apart.
pub fn delay(policy: &BackoffPolicy, failures: u32, unit: f64) -> Duration {
    let doublings = failures.saturating_sub(1).min(20);
    let full = policy.first.saturating_mul(1 << doublings).min(policy.cap);
    let unit = if unit.is_finite() { unit.clamp(0.0, 1.0) } else { 0.0 };
    full.mul_f64(0.5 + unit / 2.0).max(DELAY_LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const POLICY: BackoffPolicy =
        BackoffPolicy { first: Duration::from_secs(1), cap: Duration::from_secs(60) };

    #[test]
    fn it_doubles_up_to_the_cap() {
        let full: Vec<u64> = (1..=9).map(|n| delay(&POLICY, n, 1.0).as_secs()).collect();
        assert_eq!(full, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    }

    proptest! {
        #[test]
        fn it_is_never_zero_never_over_the_cap_and_never_less_for_more_failures(
            failures in 0u32..1000, unit in 0.0f64..1.0, first in 0u64..10_000, cap in 10u64..100_000
        ) {
            let policy = BackoffPolicy { first: Duration::from_millis(first), cap: Duration::from_millis(cap) };
            let now = delay(&policy, failures, unit);
            prop_assert!(now >= DELAY_LEAST && now <= policy.cap.max(DELAY_LEAST));
            prop_assert!(delay(&policy, failures + 1, unit) >= now);
        }
    }
}
