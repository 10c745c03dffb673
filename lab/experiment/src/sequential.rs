//! Tests if a switch stops the growth of one kind of memory, with as few processes as possible.
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
//! The test is Fieller's, at two limits of the remaining share. Each look (after each leg) may prove that the
//! share is below the first limit, or above one of them. For a switch proven to be no cure, the measured
//! share decides between `Halves` and `Nothing`, without further processes. The scatter of legs is estimated
//! from the legs, so the test uses Student's distribution with Welch's degrees of freedom: few legs prove
//! little, even if they agree. Error rates are divided among all possible looks (Bonferroni), so stopping at
//! the first proof keeps the declared rates:
//!
//! - `false_cure`: a switch that leaves `stops_share` of the growth or more is reported to stop it;
//! - `missed_cure`: a switch that leaves less is reported to leave more.
//!
//! The uncertainty of a leg is the larger of its own interval, widened for correlated heap readings, and the
//! scatter between legs of the same kind. This module runs nothing.

use serde::{Deserialize, Serialize};

use super::student;
use warden_policies::growth::IntervalEstimate;

/// Settings of the cure test. `defaults.toml`, section `[diagnose.cure]`, gives the reasons.
pub type CurePolicy = warden_policies::defaults::Cure;

/// Standard deviations in half of a leg's 95 % interval.
const INTERVAL_Z: f64 = 1.96;

/// Effect of a switch on the growth of one kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwitchEffect {
    /// More legs are needed.
    Undecided,
    /// The switch stops the growth, except for a small rest.
    Stops,
    /// The switch stops about half of the growth or more, but not all.
    Halves,
    /// The switch leaves most of the growth.
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

/// Judgement of a switch by the legs so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwitchJudgement {
    /// Effect of the switch.
    pub does: SwitchEffect,
    /// Share of the growth that remains with the switch, with the test's interval; above 1 if growth
    /// increases. `None` without legs of either kind, or if there may be no growth without the switch.
    pub share: Option<IntervalEstimate>,
    /// Growth without the switch, in bytes per request.
    pub without: Option<f64>,
    /// Growth with the switch, in bytes per request.
    pub with: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct MeanGrowth {
    value: f64,
    var: f64,
    freedom: f64,
    /// Scatter between the legs, as a share of their growth.
    scatter: f64,
    legs: usize,
}

impl MeanGrowth {
    /// Averages the growth of legs. A single leg is assumed to scatter by the same share as the legs of
    /// `like`.
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

#[derive(Clone, Copy, Debug)]
struct ShareDistance {
    value: f64,
    error: f64,
    /// Degrees of freedom after Welch.
    freedom: f64,
}

impl ShareDistance {
    fn from_share(share: f64, base: &MeanGrowth, new: &MeanGrowth) -> Self {
        let (one, other) = (new.var, share * share * base.var);
        let parts = one * one / new.freedom + other * other / base.freedom;
        let freedom = if parts > 0.0 { (one + other).powi(2) / parts } else { 1.0 };
        Self { value: new.value - share * base.value, error: (one + other).sqrt(), freedom }
    }

    /// Returns the probability of a distance at least this large by chance; with `below`, at least this
    /// negative.
    fn chance(self, below: bool) -> f64 {
        let t = self.value / self.error.max(f64::MIN_POSITIVE);
        student::upper_tail(if below { -t } else { t }, self.freedom)
    }
}

/// Judges a switch by the growth per request in legs without and with it. Needs two legs without the switch.
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
    // Legs with a switch may scatter more, so one leg proves no cure.
    let own = new.legs > 1;
    judgement.does = if own && below(policy.stops_share) {
        SwitchEffect::Stops
    } else if above(policy.halves_share) {
        SwitchEffect::Nothing
    } else if own && above(policy.stops_share) {
        // A more exact share is not worth a further process.
        partial_effect(ratio, policy)
    } else {
        SwitchEffect::Undecided
    };
    judgement
}

pub(super) fn partial_effect(share: f64, policy: &CurePolicy) -> SwitchEffect {
    if share < policy.halves_share { SwitchEffect::Halves } else { SwitchEffect::Nothing }
}

fn rate_per_look(chance: f64, policy: &CurePolicy) -> f64 {
    // There is one look after each leg, with or without the switch.
    chance / f64::from((2 * policy.legs_most).max(1))
}

#[cfg(test)]
#[path = "sequential_tests.rs"]
mod tests;
