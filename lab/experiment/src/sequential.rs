//! Tests if a switch stops the growth of a memory, with as few processes as possible.
//!
//! ```text
//!  legs without the switch ──> growth per request, uncertainty ──┐
//!                                                                ├──> remaining share ──> Stops | Halves | Nothing
//!  legs with it ─────────────> growth per request, uncertainty ──┘      \──> Undecided: one more leg of each
//!
//!  share   0 ──────── stops_share ──────── halves_share ──────── 1
//!            Stops                 Halves               Nothing
//! ```
//!
//! Fieller's test at two limits of the share. At each look the legs may prove that the share is below the
//! first limit, or above one of them. A switch proven to be no cure is `Halves` or `Nothing` by its
//! measured share; no further process is spent on that word. The scatter of legs is estimated from the
//! legs, so the limits are Student's with Welch's degrees of freedom: few legs prove little, even if they
//! agree. Error rates are divided among all possible looks (Bonferroni), so stopping at the first proof
//! keeps the declared rates:
//!
//! - `false_cure`: a switch that leaves `stops_share` of the growth or more is reported to stop it;
//! - `missed_cure`: a switch that leaves less is reported to leave more.
//!
//! The uncertainty of a leg is the larger of two: its own interval, widened for correlated heap readings,
//! and the scatter between legs of its kind. This module runs nothing.

use serde::{Deserialize, Serialize};

use super::student;
use warden_policies::growth::IntervalEstimate;

/// Settings of the cure test. `defaults.toml`, section `[diagnose.cure]`, gives the reasons.
pub type CurePolicy = warden_policies::defaults::Cure;

/// Deviations in half of a leg's 95 % interval.
const INTERVAL_Z: f64 = 1.96;

/// Effect of a switch on the growth of one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchEffect {
    /// More legs are needed.
    Undecided,
    /// The growth ends, but for a small rest.
    Stops,
    /// About half of the growth or more ends, but not all.
    Halves,
    /// Most of the growth remains.
    Nothing,
}

impl SwitchEffect {
    /// Returns the word used in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Undecided => "undecided",
            Self::Stops => "stops",
            Self::Halves => "halves",
            Self::Nothing => "nothing",
        }
    }
}

/// Judgement by the legs so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwitchJudgement {
    /// Effect of the switch.
    pub does: SwitchEffect,
    /// Share of the growth that remains with it, 0 to 1 and beyond, with the test's interval. `None` if
    /// either side was not measured, or there may be no growth without the switch.
    pub share: Option<IntervalEstimate>,
    /// Bytes per request without it.
    pub without: Option<f64>,
    /// Bytes per request with it.
    pub with: Option<f64>,
}

/// Mean growth per request over legs of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
struct MeanGrowth {
    value: f64,
    /// Variance of the value.
    var: f64,
    /// Degrees of freedom of the variance.
    freedom: f64,
    /// Scatter of the legs as a share of their growth.
    scatter: f64,
    legs: usize,
}

impl MeanGrowth {
    /// Averages legs, each with a 95 % interval; `None` without legs. A single leg is assumed to scatter by
    /// as large a share as the legs of `like`.
    fn over_legs(legs: &[IntervalEstimate], like: Option<&Self>, policy: &CurePolicy) -> Option<Self> {
        let count = u32::try_from(legs.len()).ok().filter(|count| *count > 0).map(f64::from)?;
        let value = legs.iter().map(|leg| leg.value).sum::<f64>() / count;
        let own = |leg: &IntervalEstimate| {
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

/// Distance of the growth with a switch from a share of the growth without it.
#[derive(Clone, Copy, Debug)]
struct ShareDistance {
    value: f64,
    error: f64,
    /// Welch's degrees of freedom.
    freedom: f64,
}

impl ShareDistance {
    fn from_share(share: f64, base: &MeanGrowth, new: &MeanGrowth) -> Self {
        let (one, other) = (new.var, share * share * base.var);
        let parts = one * one / new.freedom + other * other / base.freedom;
        let freedom = if parts > 0.0 { (one + other).powi(2) / parts } else { 1.0 };
        Self { value: new.value - share * base.value, error: (one + other).sqrt(), freedom }
    }

    /// Returns the probability of such a distance or a larger one by chance; `below` tests negative
    /// distances.
    fn chance(self, below: bool) -> f64 {
        let t = self.value / self.error.max(f64::MIN_POSITIVE);
        student::upper_tail(if below { -t } else { t }, self.freedom)
    }
}

/// Judges a switch by the growth per request of legs without and with it. Needs two legs without it.
pub fn judge(
    policy: &CurePolicy,
    without: &[IntervalEstimate],
    with: &[IntervalEstimate],
) -> SwitchJudgement {
    let base = MeanGrowth::over_legs(without, None, policy);
    let new = MeanGrowth::over_legs(with, base.as_ref(), policy);
    let mut judgement = SwitchJudgement {
        does: SwitchEffect::Undecided,
        share: None,
        without: base.map(|mean| mean.value),
        with: new.map(|mean| mean.value),
    };
    let Some((base, new)) = base.zip(new) else { return judgement };
    let (wrong, missed) =
        (rate_per_look(policy.false_cure, policy), rate_per_look(policy.missed_cure, policy));
    let grows = ShareDistance { value: base.value, error: base.var.sqrt(), freedom: base.freedom };
    if base.legs < 2 || grows.chance(false) > wrong {
        return judgement;
    }
    let ratio = new.value / base.value;
    let at = ShareDistance::from_share(ratio, &base, &new);
    let wide = |chance: f64| student::quantile(chance, at.freedom) * at.error / base.value;
    judgement.share =
        Some(IntervalEstimate { value: ratio, low: ratio - wide(missed), high: ratio + wide(wrong) });
    let below = |share: f64| ShareDistance::from_share(share, &base, &new).chance(true) <= wrong;
    let above = |share: f64| ShareDistance::from_share(share, &base, &new).chance(false) <= missed;
    // Legs with a switch may scatter more than those without, so two are needed close to a limit.
    let own = new.legs > 1;
    judgement.does = if own && below(policy.stops_share) {
        SwitchEffect::Stops
    } else if above(policy.halves_share) {
        SwitchEffect::Nothing
    } else if own && above(policy.stops_share) {
        // Proven to be no cure, which is the question; the exact share is worth no further process.
        partial_effect(ratio, policy)
    } else {
        SwitchEffect::Undecided
    };
    judgement
}

/// Effect of a switch proven not to stop the growth, by the measured remaining share.
pub(super) fn partial_effect(share: f64, policy: &CurePolicy) -> SwitchEffect {
    if share < policy.halves_share { SwitchEffect::Halves } else { SwitchEffect::Nothing }
}

/// Error rate per look in one trial.
fn rate_per_look(chance: f64, policy: &CurePolicy) -> f64 {
    // Each leg of either kind is followed by one look.
    chance / f64::from((2 * policy.legs_most).max(1))
}

#[cfg(test)]
#[path = "sequential_tests.rs"]
mod tests;
