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
//! It is a test after Fieller at two limits of the share: at each look the legs so far may prove that the share is below a
//! limit, or above it, or neither. The chance of a wrong proof is divided among all looks that there can be (Bonferroni),
//! so stopping at the first proof keeps to the declared rates:
//!
//! - `false_cure`: that a switch which leaves `stops_share` of the growth or more is said to stop it;
//! - `missed_cure`: that one which leaves less is said to leave more.
//!
//! How sure a leg is comes from its own interval, widened because readings of a heap hang together, and from how much legs
//! of the same kind differ, whichever says less. Nothing here runs anything.

use serde::{Deserialize, Serialize};

use crate::growth::Interval;

/// The numbers. Reasons: `defaults.toml`, section `[diagnose.cure]`.
pub type CurePolicy = crate::defaults::Cure;

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
}

impl Mean {
    /// Over these legs, each with a 95 % interval; `None` for none.
    fn of(legs: &[Interval], policy: &CurePolicy) -> Option<Self> {
        let count = u32::try_from(legs.len()).ok().filter(|count| *count > 0).map(f64::from)?;
        let value = legs.iter().map(|leg| leg.value).sum::<f64>() / count;
        let own = |leg: &Interval| {
            let half = (leg.high - leg.value).max(leg.value - leg.low);
            let noise = (policy.widen * half / INTERVAL_Z).max(policy.least_noise);
            noise.powi(2) + (policy.leg_scatter * leg.value).powi(2)
        };
        let within = legs.iter().map(own).sum::<f64>() / (count * count);
        let between = if count > 1.0 {
            legs.iter().map(|leg| (leg.value - value).powi(2)).sum::<f64>() / (count - 1.0) / count
        } else {
            0.0
        };
        Some(Self { value, var: within.max(between) })
    }
}

/// Judges a switch by the growth per request of legs without it and with it.
pub fn judge(policy: &CurePolicy, without: &[Interval], with: &[Interval]) -> Judgement {
    let (base, new) = (Mean::of(without, policy), Mean::of(with, policy));
    let mut judgement = Judgement {
        does: Does::Undecided,
        share: None,
        without: base.map(|mean| mean.value),
        with: new.map(|mean| mean.value),
    };
    let Some((base, new)) = base.zip(new) else { return judgement };
    let (wrong, missed) = (quantile(policy.false_cure, policy), quantile(policy.missed_cure, policy));
    if base.value <= wrong * base.var.sqrt() {
        return judgement;
    }
    let ratio = new.value / base.value;
    let error = (new.var + ratio * ratio * base.var).sqrt() / base.value;
    judgement.share =
        Some(Interval { value: ratio, low: ratio - missed * error, high: ratio + wrong * error });
    // How far the growth with the switch is from this share of the growth without it, and how sure that is.
    let from = |share: f64| {
        let error = (new.var + share * share * base.var).sqrt();
        (new.value - share * base.value, error)
    };
    let below = |share: f64| {
        let (distance, error) = from(share);
        distance + wrong * error < 0.0
    };
    let above = |share: f64| {
        let (distance, error) = from(share);
        distance - missed * error > 0.0
    };
    judgement.does = if below(policy.stops_share) {
        Does::Stops
    } else if above(policy.halves_share) {
        Does::Nothing
    } else if above(policy.stops_share) && below(policy.halves_share) {
        Does::Halves
    } else {
        Does::Undecided
    };
    judgement
}

/// Deviations that a mistake of this chance needs, divided among all looks of one trial.
fn quantile(chance: f64, policy: &CurePolicy) -> f64 {
    // A look after each leg of either kind.
    normal_tail(chance / f64::from((2 * policy.legs_most).max(1)))
}

/// The deviation that a normal number exceeds with this chance, from 0 for one half; right to 0.0005.
/// Source: Abramowitz and Stegun, *Handbook of Mathematical Functions*, 26.2.23.
fn normal_tail(chance: f64) -> f64 {
    let t = (-2.0 * chance.clamp(1e-12, 0.5).ln()).sqrt();
    let top = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let bottom = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    t - top / bottom
}

#[cfg(test)]
#[path = "sequential_tests.rs"]
mod tests;
