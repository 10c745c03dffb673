//! Whether a switch stops the growth of a memory, from as few runs as that takes.
//!
//! ```text
//!  legs without the switch ──> growth per request, and how sure ──┐
//!                                                                  ├──> share that is left ──> Stops | Halves | Nothing
//!  legs with it ─────────────> growth per request, and how sure ──┘          \──> Undecided: one more leg of each
//!
//!  share   0 ──────── stops_share ──────── halves_share ──────── 1
//!            Stops                 Halves               Nothing
//! ```
//!
//! It is a test after Fieller at two limits of the share: at each look the legs so far may prove that the share is below the
//! first limit, or above one of them, or nothing. What is proven to be no cure is `Halves` or `Nothing` as it was measured: close to the
//! second limit no further process is spent on the word. How much legs of a kind differ is known from themselves alone, so the limits of the test
//! are Student's, with Welch's degrees of freedom for legs that differ by other amounts with a switch than without it: few
//! legs prove little, however close they happen to be. The chance of a wrong proof is divided among all looks that there can be (Bonferroni),
//! so stopping at the first proof keeps to the declared rates:
//!
//! - `false_cure`: that a switch which leaves `stops_share` of the growth or more is said to stop it;
//! - `missed_cure`: that one which leaves less is said to leave more.
//!
//! How sure a leg is comes from its own interval, widened because readings of a heap hang together, and from how much legs
//! of the same kind differ, whichever says less. Nothing here runs anything.

use serde::{Deserialize, Serialize};

use super::student;
use warden_policies::growth::Interval;

/// The numbers. Reasons: `defaults.toml`, section `[diagnose.cure]`.
pub type CurePolicy = warden_policies::defaults::Cure;

/// Deviations in half of a 95 % interval, as legs give it.
const INTERVAL_Z: f64 = 1.96;

/// What a switch does to the growth of one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Does {
    /// More legs are needed to say.
    Undecided,
    /// It ends the growth, but for a small rest.
    Stops,
    /// It takes about half of it away, or more, but not all.
    Halves,
    /// It leaves most of it.
    Nothing,
}

impl Does {
    /// The word in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Undecided => "undecided",
            Self::Stops => "stops",
            Self::Halves => "halves",
            Self::Nothing => "nothing",
        }
    }
}

/// What the legs so far say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// What the switch does.
    pub does: Does,
    /// Share of the growth that is left with it, 0 to 1 and beyond, with the ends of the interval that the test uses;
    /// `None` where one of the two was not measured, or the growth without the switch may be none.
    pub share: Option<Interval>,
    /// Bytes per request without it.
    pub without: Option<f64>,
    /// Bytes per request with it.
    pub with: Option<f64>,
}

/// Growth per request over legs of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mean {
    value: f64,
    /// Variance of the value.
    var: f64,
    /// Degrees of freedom of that.
    freedom: f64,
    /// By what share of their growth the legs differ.
    scatter: f64,
    legs: usize,
}

impl Mean {
    /// Over these legs, each with a 95 % interval; `None` for none. One leg alone does not say how much legs differ: it is
    /// taken to differ by as large a share of itself as those of `like`.
    fn of(legs: &[Interval], like: Option<&Self>, policy: &CurePolicy) -> Option<Self> {
        let count = u32::try_from(legs.len()).ok().filter(|count| *count > 0).map(f64::from)?;
        let value = legs.iter().map(|leg| leg.value).sum::<f64>() / count;
        let own = |leg: &Interval| {
            let half = (leg.high - leg.value).max(leg.value - leg.low);
            (policy.widen * half / INTERVAL_Z).max(policy.least_noise).powi(2)
        };
        let within = legs.iter().map(own).sum::<f64>() / count;
        let (between, freedom) = match like {
            _ if legs.len() > 1 => {
                let squares = legs.iter().map(|leg| (leg.value - value).powi(2)).sum::<f64>();
                (squares / (count - 1.0), count - 1.0)
            }
            Some(like) => ((like.scatter * value).powi(2), like.freedom),
            None => (f64::MAX, 1.0),
        };
        let scatter = between.sqrt() / value.abs().max(f64::MIN_POSITIVE);
        Some(Self { value, var: within.max(between) / count, freedom, scatter, legs: legs.len() })
    }
}

/// How far the growth with a switch is from a share of the growth without it.
#[derive(Clone, Copy, Debug)]
struct Distance {
    value: f64,
    error: f64,
    /// Welch's degrees of freedom.
    freedom: f64,
}

impl Distance {
    fn from(share: f64, base: &Mean, new: &Mean) -> Self {
        let (one, other) = (new.var, share * share * base.var);
        let parts = one * one / new.freedom + other * other / base.freedom;
        let freedom = if parts > 0.0 { (one + other).powi(2) / parts } else { 1.0 };
        Self { value: new.value - share * base.value, error: (one + other).sqrt(), freedom }
    }

    /// The chance of such a distance or a larger one where there is none: below for negative ones, above for positive ones.
    fn chance(self, below: bool) -> f64 {
        let t = self.value / self.error.max(f64::MIN_POSITIVE);
        student::tail(if below { -t } else { t }, self.freedom)
    }
}

/// Judges a switch by the growth per request of legs without it and with it. It takes two legs without it to say anything.
pub fn judge(policy: &CurePolicy, without: &[Interval], with: &[Interval]) -> Judgement {
    let base = Mean::of(without, None, policy);
    let new = Mean::of(with, base.as_ref(), policy);
    let mut judgement = Judgement {
        does: Does::Undecided,
        share: None,
        without: base.map(|mean| mean.value),
        with: new.map(|mean| mean.value),
    };
    let Some((base, new)) = base.zip(new) else { return judgement };
    let (wrong, missed) = (each(policy.false_cure, policy), each(policy.missed_cure, policy));
    let grows = Distance { value: base.value, error: base.var.sqrt(), freedom: base.freedom };
    if base.legs < 2 || grows.chance(false) > wrong {
        return judgement;
    }
    let ratio = new.value / base.value;
    let at = Distance::from(ratio, &base, &new);
    let wide = |chance: f64| student::quantile(chance, at.freedom) * at.error / base.value;
    judgement.share = Some(Interval { value: ratio, low: ratio - wide(missed), high: ratio + wide(wrong) });
    let below = |share: f64| Distance::from(share, &base, &new).chance(true) <= wrong;
    let above = |share: f64| Distance::from(share, &base, &new).chance(false) <= missed;
    // Legs with a switch may differ more than those without it: what is close to a limit takes two of them.
    let own = new.legs > 1;
    judgement.does = if own && below(policy.stops_share) {
        Does::Stops
    } else if above(policy.halves_share) {
        Does::Nothing
    } else if own && above(policy.stops_share) {
        // It is no cure, which is what the test is about: by how much it is none is worth no further process.
        partly(ratio, policy)
    } else {
        Does::Undecided
    };
    judgement
}

/// What a switch does that is known not to stop the growth, by the share that is left with it as it was measured.
pub(super) fn partly(share: f64, policy: &CurePolicy) -> Does {
    if share < policy.halves_share { Does::Halves } else { Does::Nothing }
}

/// The chance of a mistake at each look, of those that there can be in one trial.
fn each(chance: f64, policy: &CurePolicy) -> f64 {
    // A look after each leg of either kind.
    chance / f64::from((2 * policy.legs_most).max(1))
}

#[cfg(test)]
#[path = "sequential_tests.rs"]
mod tests;
