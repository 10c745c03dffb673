//! Limits attempts with wrong keys by client address. Beyond the limit, a wrong key is refused with the time
//! to wait; a right key is accepted. Other addresses are not affected.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::rate::{RateNanos, as_nanos};
use warden_policies::{RateLimit, client_network};
use warden_supervisor::sync::lock;

/// Wrong keys allowed in [`ATTEMPT_PERIOD`] from one address: a person may paste a wrong key a few times.
const MAX_WRONG_KEYS: u64 = 10;
const ATTEMPT_PERIOD: Duration = Duration::from_secs(60);
/// Most addresses with a separate count; all others share one count.
const MAX_ADDRESSES: usize = 1024;

#[derive(Debug)]
pub(super) struct SignInAttempts {
    base: Instant,
    used: Mutex<HashMap<Option<IpAddr>, RateNanos>>,
}

impl Default for SignInAttempts {
    fn default() -> Self {
        Self { base: Instant::now(), used: Mutex::default() }
    }
}

impl SignInAttempts {
    /// Fails with the time to wait if the address sent too many wrong keys.
    pub(super) fn check(&self, from: IpAddr, now: Instant) -> Result<(), Duration> {
        let used = lock(&self.used);
        let now = self.since(now);
        let known = match used.get(&Some(client_network(from))) {
            // An address without a separate count uses the shared one.
            None if used.len() >= MAX_ADDRESSES => used.get(&None),
            known => known,
        };
        let Some(rate) = RateLimit::new(MAX_WRONG_KEYS, ATTEMPT_PERIOD) else { return Ok(()) };
        rate.check(known.copied().unwrap_or_default(), now)
    }

    pub(super) fn count_wrong(&self, from: IpAddr, now: Instant) {
        let mut used = lock(&self.used);
        let now = self.since(now);
        let mut place = Some(client_network(from));
        if !used.contains_key(&place) && used.len() >= MAX_ADDRESSES {
            used.retain(|_, until| *until > now);
            if used.len() >= MAX_ADDRESSES {
                place = None;
            }
        }
        let until = used.entry(place).or_default();
        if let Some(rate) = RateLimit::new(MAX_WRONG_KEYS, ATTEMPT_PERIOD) {
            // Attempts beyond the limit do not count.
            *until = rate.take_unit(*until, now).unwrap_or(*until);
        }
    }

    fn since(&self, now: Instant) -> RateNanos {
        as_nanos(now.saturating_duration_since(self.base))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_guesses_waits_and_others_do_not() {
        let attempts = SignInAttempts::default();
        let mut now = attempts.base;
        let (one, other): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        for _ in 0..MAX_WRONG_KEYS {
            assert_eq!(attempts.check(one, now), Ok(()));
            attempts.count_wrong(one, now);
        }
        assert!(
            attempts.check(one, now).is_err()
                && attempts.check("::ffff:10.0.0.1".parse().unwrap(), now).is_err()
        );
        assert_eq!(attempts.check(other, now), Ok(()));
        now += ATTEMPT_PERIOD / 2;
        assert_eq!(attempts.check(one, now), Ok(()));
        for last in 0..2 * MAX_WRONG_KEYS {
            attempts.count_wrong(format!("2001:db8::{last:x}").parse().unwrap(), now);
        }
        assert!(attempts.check("2001:db8::ffff".parse().unwrap(), now).is_err(), "one network");
    }

    #[test]
    fn many_addresses_share_what_is_left_and_no_memory_is_taken_for_them() {
        let attempts = SignInAttempts::default();
        let mut now = attempts.base;
        for n in 0..u16::MAX {
            attempts.count_wrong(IpAddr::from([10, 1, n.to_be_bytes()[0], n.to_be_bytes()[1]]), now);
        }
        assert!(lock(&attempts.used).len() <= MAX_ADDRESSES + 1);
        assert!(attempts.check("10.9.9.9".parse().unwrap(), now).is_err());
        now += 2 * ATTEMPT_PERIOD;
        assert_eq!(attempts.check("10.9.9.9".parse().unwrap(), now), Ok(()));
    }
}
