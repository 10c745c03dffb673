//! Who waits in an instance before us is turned away like our own callers: what that one is told, with which reason, and who is meant.
//!
//! A word of it says when it was, by the clock that all processes of the machine have. So it may be said twice, or late: it is
//! about nobody who came later.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::clock::now_of_machine;
use crate::error::Denied;
use crate::sync::lock;

/// For how long it is told. Whoever has not heard it by then does not listen.
const TOLD_FOR: Duration = Duration::from_secs(10);

/// The callers of a model were turned away by the instance that decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    pub(crate) model: String,
    /// When, since the machine was started: whoever came later is not meant.
    at: Duration,
    /// A [`Denied`]. As it was written, because one of a later version that means nothing here is told on all the same.
    denied: serde_json::Value,
}

impl Refused {
    /// Now. `None` if the reason cannot be written, which cannot be.
    pub(crate) fn now(model: &str, denied: &Denied) -> Option<Self> {
        let denied = serde_json::to_value(denied).ok()?;
        Some(Self { model: model.to_owned(), at: now_of_machine(), denied })
    }

    /// The reason, if it means something here.
    pub(crate) fn denied(&self) -> Option<Denied> {
        Denied::deserialize(&self.denied).ok()
    }

    /// When it was, by our clock.
    pub(crate) fn moment(&self) -> Instant {
        let now = Instant::now();
        now.checked_sub(self.age()).unwrap_or(now)
    }

    fn age(&self) -> Duration {
        now_of_machine().saturating_sub(self.at)
    }
}

/// What is to be told now: of each model the latest.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<BTreeMap<String, Refused>>);

impl Refusals {
    /// An earlier one of the same model is about nobody whom this is not about.
    pub(crate) fn note(&self, refused: Refused) {
        let mut all = lock(&self.0);
        match all.get_mut(&refused.model) {
            Some(known) if known.at >= refused.at => {}
            Some(known) => *known = refused,
            None => drop(all.insert(refused.model.clone(), refused)),
        }
    }

    /// Those that are worth telling.
    pub(crate) fn all(&self) -> Vec<Refused> {
        let mut all = lock(&self.0);
        all.retain(|_, refused| refused.age() < TOLD_FOR);
        all.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_a_model_is_told_and_none_for_ever() {
        let refusals = Refusals::default();
        let first = Refused::now("m", &Denied::Removed).unwrap();
        let later = Refused {
            at: first.at + Duration::from_nanos(1),
            ..Refused::now("m", &Denied::ShuttingDown).unwrap()
        };
        refusals.note(later.clone());
        refusals.note(first.clone());
        assert_eq!(refusals.all(), [later]);
        let old = Refused { model: "n".to_owned(), at: first.at.saturating_sub(TOLD_FOR), ..first };
        refusals.note(old);
        assert_eq!(refusals.all().len(), 1);
    }

    #[test]
    fn a_reason_is_the_same_on_the_other_side_and_an_unknown_one_is_only_told_on() {
        let why = Denied::NeverLoaded("too large".to_owned());
        let told = serde_json::to_string(&Refused::now("m", &why).unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<Refused>(&told).unwrap().denied(), Some(why));
        let later = told.replace("never_loaded", "of_a_later_version");
        let heard: Refused = serde_json::from_str(&later).unwrap();
        assert_eq!(heard.denied(), None);
        assert_eq!(serde_json::to_string(&heard).unwrap(), later);
    }
}
