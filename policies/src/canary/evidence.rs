//! Evidence that may be looked at after every request: the wealth of somebody who bets against a hypothesis, and who cannot be
//! expected to win if it holds.
//!
//! Whatever the number of looks, the chance that such a wealth ever reaches `1 / wrong` is at most `wrong` while the hypothesis holds
//! (Ville's inequality), so stopping as soon as it does keeps to the declared error. Several bets are played at a time, each with an equal
//! share of the wealth: then nobody has to know beforehand how large the difference is.

/// Stakes of bets on a mean: small ones find small differences, large ones are quick.
const STAKES: [f64; 5] = [0.1, 0.25, 0.5, 0.75, 0.95];

/// Rates of failure of the build that serves, and of the other one, that are bet on.
const RATES: [(f64, f64); 10] = [
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

/// How many times as often the build that is tried dies, that are bet on.
const DEADLIER: [f64; 4] = [4.0, 20.0, 100.0, 1000.0];

/// The wealth of several bets, as logarithms.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wealth(Vec<f64>);

impl Wealth {
    fn new(bets: usize) -> Self {
        Self(vec![0.0; bets])
    }

    /// All of it; 1 at the beginning.
    pub(super) fn all(&self) -> f64 {
        let (most, count) = (self.0.iter().copied().fold(f64::MIN, f64::max), self.0.len());
        let sum: f64 = self.0.iter().map(|log| (log - most).exp()).sum();
        most.exp() * sum / crate::units::exact(count as u64)
    }
}

/// Bets that a mean of values from -1 to 1 is above 0: fair, or worse, if it is not.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Above(Wealth);

impl Above {
    pub(super) fn new() -> Self {
        Self(Wealth::new(STAKES.len()))
    }

    /// One value. Values beyond -1 and 1 count as these.
    pub(super) fn note(&mut self, value: f64) {
        let value = value.clamp(-1.0, 1.0);
        for (log, stake) in self.0.0.iter_mut().zip(STAKES) {
            *log += (stake * value).ln_1p();
        }
    }

    pub(super) fn wealth(&self) -> f64 {
        self.0.all()
    }
}

/// Bets that one build fails more often than the other: for each request of it with some of the other beside, the chance of what
/// happened if the two fail so and so often, against the chance if both fail as often as all of them together. That is fair whatever the
/// common rate is, and a losing game if the other one fails less (Turner, Ly and Grünwald: generic E-variables for exact sequential k-sample tests, 2024).
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MoreFailures(Wealth);

impl MoreFailures {
    pub(super) fn new() -> Self {
        Self(Wealth::new(RATES.len()))
    }

    /// One request of the build that is tried, and those of the other beside it: how many, and how many failed.
    pub(super) fn note(&mut self, failed: bool, beside: u64, failures: u64) {
        let (all, broken) = (crate::units::exact(beside), crate::units::exact(failures.min(beside)));
        let log = |rate: f64, failures: f64, sound: f64| failures * rate.ln() + sound * (-rate).ln_1p();
        let (own, other_sound) = (f64::from(u8::from(failed)), all - broken);
        for (wealth, (serves, tried)) in self.0.0.iter_mut().zip(RATES) {
            let common = (tried + all * serves) / (1.0 + all);
            *wealth += log(tried, own, 1.0 - own) + log(serves, broken, other_sound)
                - log(common, own + broken, 1.0 - own + other_sound);
        }
    }

    pub(super) fn wealth(&self) -> f64 {
        self.0.all()
    }
}

/// Bets that one build dies more often for its work: for each death, the chance that it is a process of that build which died, against its
/// share of the work.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MoreDeaths(Wealth);

impl MoreDeaths {
    pub(super) fn new() -> Self {
        Self(Wealth::new(DEADLIER.len()))
    }

    /// One death, when the build that is tried has done this share of all work, above 0 and below 1.
    pub(super) fn note(&mut self, tried: bool, share: f64) {
        for (wealth, times) in self.0.0.iter_mut().zip(DEADLIER) {
            let own = times * share / (times * share + 1.0 - share);
            *wealth += if tried { (own / share).ln() } else { ((1.0 - own) / (1.0 - share)).ln() };
        }
    }

    pub(super) fn wealth(&self) -> f64 {
        self.0.all()
    }
}
