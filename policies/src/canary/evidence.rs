//! Sequential evidence that may be checked after every request: the wealth of a gambler who bets against a
//! hypothesis, and who gains nothing on average if the hypothesis holds.
//!
//! If the hypothesis holds, the wealth reaches `1 / wrong` with probability at most `wrong`, for any number
//! of checks (Ville's inequality). Several bets share the wealth, because the size of the difference is
//! unknown.

use std::collections::VecDeque;

use super::TrialArm;
use crate::units::as_f64;

/// Stakes of bets on a mean: small stakes find small differences, large stakes decide sooner.
const BET_STAKES: [f64; 5] = [0.1, 0.25, 0.5, 0.75, 0.95];

const BET_FAILURE_RATES: [(f64, f64); 10] = [
    (0.001, 0.02),
    (0.001, 0.1),
    (0.001, 0.4),
    (0.001, 0.95),
    (0.02, 0.1),
    (0.02, 0.3),
    (0.02, 0.8),
    (0.1, 0.25),
    (0.1, 0.6),
    (0.3, 0.7),
];

/// Assumed ratios of the canary's death rate to that of the serving build, to bet on.
const BET_DEATH_FACTORS: [f64; 4] = [4.0, 20.0, 100.0, 1000.0];

/// Wealth of several bets, as logarithms of the factors by which each has grown.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BetWealth(Vec<f64>);

impl BetWealth {
    fn new(bets: usize) -> Self {
        Self(vec![0.0; bets])
    }

    /// Returns the mean wealth of all bets; initially 1.
    pub(super) fn total(&self) -> f64 {
        let (most, count) = (self.0.iter().copied().fold(f64::MIN, f64::max), self.0.len());
        let sum: f64 = self.0.iter().map(|log| (log - most).exp()).sum();
        most.exp() * sum / as_f64(count as u64)
    }
}

/// Bets that the mean of values in [-1, 1] is above 0. If it is not, no bet wins on average.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PositiveMean(BetWealth);

impl PositiveMean {
    pub(super) fn new() -> Self {
        Self(BetWealth::new(BET_STAKES.len()))
    }

    pub(super) fn add_value(&mut self, value: f64) {
        let value = value.clamp(-1.0, 1.0);
        for (log, stake) in self.0.0.iter_mut().zip(BET_STAKES) {
            *log += (stake * value).ln_1p();
        }
    }

    pub(super) fn wealth(&self) -> f64 {
        self.0.total()
    }
}

/// Bets that the canary fails more often. Each block multiplies the wealth by its probability under two given
/// failure rates, divided by its probability under their mean (Turner, Ly and Grünwald: generic E-variables
/// for exact sequential k-sample tests, 2024).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MoreFailures(BetWealth);

impl MoreFailures {
    pub(super) fn new() -> Self {
        Self(BetWealth::new(BET_FAILURE_RATES.len()))
    }

    pub(super) fn add_block(&mut self, failed: bool, beside: u64, failures: u64) {
        let (all, broken) = (as_f64(beside), as_f64(failures.min(beside)));
        let log = |rate: f64, failures: f64, sound: f64| failures * rate.ln() + sound * (-rate).ln_1p();
        let (own, other_sound) = (f64::from(u8::from(failed)), all - broken);
        for (wealth, (serves, tried)) in self.0.0.iter_mut().zip(BET_FAILURE_RATES) {
            let common = (tried + all * serves) / (1.0 + all);
            *wealth += log(tried, own, 1.0 - own) + log(serves, broken, other_sound)
                - log(common, own + broken, 1.0 - own + other_sound);
        }
    }

    pub(super) fn wealth(&self) -> f64 {
        self.0.total()
    }
}

/// Bets that the canary dies more often per request. Each death multiplies the wealth by the assumed
/// probability of its side (canary or serving build), divided by that side's share of the requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MoreDeaths(BetWealth);

impl MoreDeaths {
    pub(super) fn new() -> Self {
        Self(BetWealth::new(BET_DEATH_FACTORS.len()))
    }

    /// Adds a death of the canary (`tried`) or the serving build. `share`: the canary's share of all work.
    pub(super) fn add_death(&mut self, tried: bool, share: f64) {
        for (wealth, times) in self.0.0.iter_mut().zip(BET_DEATH_FACTORS) {
            let own = times * share / (times * share + 1.0 - share);
            *wealth += if tried { (own / share).ln() } else { ((1.0 - own) / (1.0 - share)).ln() };
        }
    }

    pub(super) fn wealth(&self) -> f64 {
        self.0.total()
    }
}

/// Groups requests: one canary request with requests of the serving build that ended at about the same time,
/// so that load and time of day cancel out. The grouping does not depend on the results.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RequestBlocks<T> {
    serves: VecDeque<T>,
    tried: VecDeque<T>,
    most: usize,
}

impl<T> RequestBlocks<T> {
    pub(super) fn new(most: usize) -> Self {
        Self { serves: VecDeque::new(), tried: VecDeque::new(), most: most.max(1) }
    }

    /// Adds a value. Returns a complete block: one canary value and at least one of the serving build.
    pub(super) fn add_value(&mut self, arm: TrialArm, value: T) -> Option<(T, Vec<T>)> {
        let (own, other) = match arm {
            TrialArm::Base => (&mut self.serves, &self.tried),
            TrialArm::Canary => (&mut self.tried, &self.serves),
        };
        if own.len() == self.most && other.is_empty() {
            own.pop_front();
        }
        own.push_back(value);
        if self.serves.is_empty() {
            return None;
        }
        let tried = self.tried.pop_front()?;
        Some((tried, self.serves.drain(..).collect()))
    }
}
