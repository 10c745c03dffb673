//! Refusals that the next instance passes to the previous one for its waiting requests.
//!
//! A refusal is dated by the machine's clock, so it may arrive late or twice without affecting later
//! requests.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::clock::monotonic_now;
use crate::error::LeaseDenied;
use crate::sync::lock;

/// Lifetime of a refusal. An instance that has not received it by then is not listening.
const REFUSAL_LIFETIME: Duration = Duration::from_secs(10);

/// Refusal of a model's requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRefusal {
    pub(crate) model: String,
    /// Time since the machine's boot. Later requests are not affected.
    at: Duration,
    /// Serialized [`LeaseDenied`], to pass on reasons unknown to this version.
    denied: serde_json::Value,
}

impl ModelRefusal {
    /// Returns `None` if the reason cannot be serialized, which does not happen.
    pub(crate) fn now(model: &str, denied: &LeaseDenied) -> Option<Self> {
        let denied = serde_json::to_value(denied).ok()?;
        Some(Self { model: model.to_owned(), at: monotonic_now(), denied })
    }

    pub(crate) fn denied(&self) -> Option<LeaseDenied> {
        LeaseDenied::deserialize(&self.denied).ok()
    }

    /// Time of the refusal by tokio's clock.
    pub(crate) fn moment(&self) -> Instant {
        let now = Instant::now();
        now.checked_sub(self.age()).unwrap_or(now)
    }

    fn age(&self) -> Duration {
        monotonic_now().saturating_sub(self.at)
    }
}

/// Latest refusal of each model, for the previous instance.
#[derive(Debug, Default)]
pub(crate) struct RecentRefusals(Mutex<BTreeMap<String, ModelRefusal>>);

impl RecentRefusals {
    /// Replaces an earlier refusal of the same model, whose requests it covers.
    pub(crate) fn note(&self, refused: ModelRefusal) {
        let mut all = lock(&self.0);
        match all.get_mut(&refused.model) {
            Some(known) if known.at >= refused.at => {}
            Some(known) => *known = refused,
            None => drop(all.insert(refused.model.clone(), refused)),
        }
    }

    pub(crate) fn all(&self) -> Vec<ModelRefusal> {
        let mut all = lock(&self.0);
        all.retain(|_, refused| refused.age() < REFUSAL_LIFETIME);
        all.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_a_model_is_told_and_none_for_ever() {
        let refusals = RecentRefusals::default();
        let first = ModelRefusal::now("m", &LeaseDenied::Removed).unwrap();
        let later = ModelRefusal {
            at: first.at + Duration::from_nanos(1),
            ..ModelRefusal::now("m", &LeaseDenied::ShuttingDown).unwrap()
        };
        refusals.note(later.clone());
        refusals.note(first.clone());
        assert_eq!(refusals.all(), [later]);
        let old =
            ModelRefusal { model: "n".to_owned(), at: first.at.saturating_sub(REFUSAL_LIFETIME), ..first };
        refusals.note(old);
        assert_eq!(refusals.all().len(), 1);
    }

    #[test]
    fn a_reason_is_the_same_on_the_other_side_and_an_unknown_one_is_only_told_on() {
        let why = LeaseDenied::NeverLoaded("too large".to_owned());
        let told = serde_json::to_string(&ModelRefusal::now("m", &why).unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<ModelRefusal>(&told).unwrap().denied(), Some(why));
        let later = told.replace("never_loaded", "of_a_later_version");
        let heard: ModelRefusal = serde_json::from_str(&later).unwrap();
        assert_eq!(heard.denied(), None);
        assert_eq!(serde_json::to_string(&heard).unwrap(), later);
    }
}
