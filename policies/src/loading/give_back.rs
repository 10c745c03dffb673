//! Who gives back what it hoards, so that nobody has to leave.

use std::time::Duration;

use super::{Amounts, Loading, Model, Numbers, Place, State, Who, Wish, room};

/// A model that grows faster has a leak that nothing but a fresh process cures.
const GIVE_BACK_INTERVAL: Duration = Duration::from_secs(60);

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
        let short = self.is_short_of(wish);
        let helps = |model: &Model| model.hoard(now, numbers).is_some_and(|hoard| hoard.is_any_of(short));
        let able = self.models.iter().filter(|(_, model)| !model.gives && helps(model));
        let asked: Vec<Who> = able.map(|(who, _)| who.clone()).collect();
        if asked.is_empty() {
            let awaited =
                self.models.values().any(|model| model.gives && model.hoard(now, numbers).is_some());
            return if awaited { Giving::Awaited } else { Giving::Nobody };
        }
        for who in &asked {
            if let Some(model) = self.models.get_mut(who) {
                (model.gives, model.asked_back) = (true, Some(now));
            }
        }
        Giving::Asked(asked)
    }

    /// Whether a model that finds no room lacks memory of the host, and of GPUs. Where neither alone explains it, both.
    fn is_short_of(&self, wish: &Wish<'_>) -> (bool, bool) {
        let left = self.left(wish.free);
        let Some(needed) = self.models.get(wish.name).and_then(room::needed) else { return (true, true) };
        match needed.exceeds(&left) {
            (false, false) => (true, true),
            short => short,
        }
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
            Some(since) => since >= GIVE_BACK_INTERVAL,
            None => true,
        };
        let hoard = reading.held.minus(&self.promised);
        (is_asked && hoard.is_any_of((true, true)) && matches!(self.state, State::Serves { .. }))
            .then_some(hoard)
    }
}
