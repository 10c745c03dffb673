//! Who gives back what it hoards, so that nobody has to leave.

use std::time::Duration;

use super::{Amounts, Loading, Model, Numbers, Place, State, Who, Wish};

/// What is done before anybody leaves for a model.
pub(super) enum Giving {
    /// These are asked.
    Asked(Vec<Who>),
    /// Some were asked, and what they give would do.
    Awaited,
    /// Nobody has enough.
    Nobody,
}

impl Loading {
    /// Who is asked to give memory back for this one, where that would make room enough.
    pub(super) fn giving_for(&mut self, wish: &Wish<'_>, now: Duration) -> Giving {
        let Some(free) = wish.free else { return Giving::Nobody };
        let numbers = &self.numbers;
        let hoards = || self.models.values().filter_map(|model| model.hoard(now, numbers));
        let free = hoards().fold(free.clone(), |sum, hoard| sum.plus(&hoard));
        if hoards().next().is_none()
            || matches!(self.place(&Wish { free: Some(&free), ..*wish }, &[]), Place::Nowhere)
        {
            return Giving::Nobody;
        }
        let asked = |model: &Model| model.gives || model.hoard(now, numbers).is_none();
        let asked: Vec<Who> =
            self.models.iter().filter(|(_, model)| !asked(model)).map(|(who, _)| who.clone()).collect();
        if asked.is_empty() {
            return Giving::Awaited;
        }
        for who in &asked {
            if let Some(model) = self.models.get_mut(who) {
                (model.gives, model.asked_back) = (true, Some(now));
            }
        }
        Giving::Asked(asked)
    }

    /// A model's processes have given back what they do, and were read since, or will not.
    pub fn gave_back(&mut self, model: &Who) {
        if let Some(model) = self.models.get_mut(model) {
            model.gives = false;
        }
    }
}

impl Model {
    /// What it may give back: what it holds above its promise, as far as its build can be asked and was not asked in vain a moment ago.
    fn hoard(&self, now: Duration, numbers: &Numbers) -> Option<Amounts> {
        let reading = self.reading.as_ref().filter(|reading| reading.can_give)?;
        let since = self.asked_back.map(|asked| now.saturating_sub(asked));
        let is_asked = match since {
            // An answer that does not come is waited for no longer.
            Some(since) if self.gives => since < numbers.give_back,
            Some(since) => since >= numbers.give_back_again,
            None => true,
        };
        let hoard = reading.held.minus(&self.promised);
        let some = hoard.host > 0 || hoard.gpus.iter().any(|bytes| *bytes > 0);
        (is_asked && some && matches!(self.state, State::Serves { .. })).then_some(hoard)
    }
}
