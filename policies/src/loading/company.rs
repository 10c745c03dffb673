//! Models that stay together: who is loaded along with another one, and does not leave while that one is there.
//!
//! ```text
//!   a (with b) is let in, with room for both ─> b is called: its room is kept ─> b wants to be loaded ─> b is let in
//!   b is to leave ─> a leaves, too
//! ```
//!
//! Company is a wish: where it cannot fit beside those that never leave, a model is loaded without it.

use std::time::Duration;

use super::room::{self, Amounts};
use super::{Loading, Model, Order, Place, State, Who, Wish};

impl Loading {
    /// Those that are loaded along with a model and are not there, with their own company, as far as all of them fit beside those that
    /// never leave.
    pub(super) fn party(&self, name: &Who) -> Vec<Who> {
        let Some(model) = self.models.get(name).filter(|model| !model.spec.with.is_empty()) else {
            return Vec::new();
        };
        let all = self.along_with(name);
        let party: Vec<Who> = all.iter().filter(|who| !self.models[*who].is_there()).cloned().collect();
        let company: Vec<&Who> = all.iter().filter(|who| self.models[*who].is_there()).collect();
        // Those of them that are there stay for it.
        let mobile: Vec<&Who> = self.mobile().into_iter().filter(|who| !company.contains(who)).collect();
        let left = self.left_if_gone(&mobile);
        let fits =
            room::fit_with((name, model), &self.members(&party), &left, self.numbers.make_room).is_some();
        let wish = Wish { name, kept: &Amounts::none(), kept_for: &party, free: None, party: &[] };
        if fits && !matches!(self.place(&wish, &mobile), Place::Nowhere) { party } else { Vec::new() }
    }

    /// All that are loaded along with a model, directly and through others.
    fn along_with(&self, name: &Who) -> Vec<Who> {
        let mut all = vec![name.clone()];
        let mut next = 0;
        while let Some(model) = all.get(next).and_then(|who| self.models.get(who)) {
            let named = model.spec.with.iter().filter_map(|name| self.living(name));
            let news: Vec<Who> = named.filter(|who| !all.contains(who)).cloned().collect();
            all.extend(news);
            next += 1;
        }
        all.remove(0);
        all
    }

    /// The model of this name that is configured.
    fn living(&self, name: &crate::ModelName) -> Option<&Who> {
        self.models.keys().filter(|who| who.name == *name).max_by_key(|who| who.life)
    }

    pub(super) fn members(&self, all: &[Who]) -> Vec<(&Who, &Model)> {
        all.iter().filter_map(|who| self.models.get_key_value(who)).collect()
    }

    /// Those that are there and stay only together with this one, and so leave with it.
    pub(super) fn who_goes_along(&self, name: &Who) -> Vec<Who> {
        let there = self.models.iter().filter(|(who, model)| {
            *who != name && model.is_there() && model.state != State::Leaves && !model.spec.with.is_empty()
        });
        there.filter(|(who, _)| self.along_with(who).contains(name)).map(|(who, _)| who.clone()).collect()
    }

    /// Those that stay because another one is there.
    pub fn kept_company(&self) -> Vec<Who> {
        let there = self.models.iter().filter(|(_, model)| {
            matches!(model.state, State::Comes { .. } | State::Serves { .. }) && !model.spec.with.is_empty()
        });
        let mut all: Vec<Who> = there.flat_map(|(who, _)| self.along_with(who)).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Calls those that are loaded along with a model that was let in.
    pub(super) fn call(&mut self, party: Vec<Who>, now: Duration) -> Vec<Order> {
        party
            .into_iter()
            .filter_map(|who| {
                let model = self.models.get_mut(&who)?;
                let is_out = model.state == State::Out;
                if is_out {
                    model.state = State::Called { since: now };
                }
                is_out.then_some(Order::Call { model: who })
            })
            .collect()
    }

    /// The room that is kept for those that were called and have not answered; who does not answer is not waited for.
    pub(super) fn kept_for_called(&mut self, now: Duration, free: Option<&Amounts>) -> (Amounts, Vec<Who>) {
        let patience = self.numbers.called;
        for model in self.models.values_mut() {
            if matches!(model.state, State::Called { since } if now.saturating_sub(since) >= patience) {
                model.state = State::Out;
            }
        }
        let called = self.models.iter().filter(|(_, model)| matches!(model.state, State::Called { .. }));
        let called: Vec<Who> = called.map(|(who, _)| who.clone()).collect();
        let mut kept = (Amounts::none(), Vec::new());
        for who in called {
            let wish = Wish { name: &who, kept: &kept.0, kept_for: &kept.1, free, party: &[] };
            if let Place::Now(_, promised, _) | Place::Later(promised) = self.place(&wish, &[]) {
                kept.0 = kept.0.plus(&promised);
            }
            kept.1.push(who);
        }
        kept
    }
}
