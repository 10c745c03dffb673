//! Other settings for a model that is there: it stays where it is if what it needs now fits there beside what the others were promised.
//! Else it leaves, and waits for room like everybody who is not loaded.

use super::room::{self, Ledger};
use super::state::State;
use super::{Amounts, Lacks, Loading, Order, Who};

/// What becomes of one with other settings.
enum Fate {
    /// It stays: its processes on these GPUs, with this promise, which is everything if it is alone.
    Stays(Vec<Vec<usize>>, Amounts, bool),
    /// It leaves: so much is left for it.
    Leaves(Amounts),
}

impl Loading {
    /// A model was told what it is from now on ([`Loading::set`]) and is about to make its processes anew. [`Loading::next`] says whether it
    /// may do that while it is loaded. Nothing, if it is not.
    pub fn remade(&mut self, model: &Who) {
        if let Some(model) = self.models.get_mut(model) {
            model.remade = matches!(model.state, State::Comes { .. } | State::Serves { .. });
        }
    }

    /// Says so.
    pub(super) fn renew(&mut self, free: Option<&Amounts>) -> Vec<Order> {
        let remade: Vec<Who> =
            self.models.iter().filter(|(_, model)| model.remade).map(|(who, _)| who.clone()).collect();
        remade.into_iter().filter_map(|who| self.renew_one(who, free)).collect()
    }

    fn renew_one(&mut self, who: Who, free: Option<&Amounts>) -> Option<Order> {
        let fate = self.fate(&who, free)?;
        let model = self.models.get_mut(&who)?;
        model.remade = false;
        match fate {
            Fate::Stays(places, promised, alone) => {
                // Until its processes are new ones the old ones have what they have.
                let has = model.reading.as_ref().map_or(&model.promised, |reading| &reading.held);
                (model.promised, model.renewed) = (promised.max(has), Some(promised));
                (model.mapped, model.alone) = (room::mapped(model).host.max(model.mapped), alone);
                model.places.clone_from(&places);
                Some(Order::Stay { model: who, places })
            }
            Fate::Leaves(left) => {
                let lacks = Lacks { needed: room::needed(model), left, company: false };
                self.part(&who);
                Some(Order::Anew { model: who, lacks })
            }
        }
    }

    fn fate(&self, who: &Who, free: Option<&Amounts>) -> Option<Fate> {
        let model = self.models.get(who)?;
        let may_be_on = |place: &Vec<usize>| {
            model.spec.gpus.is_empty() || place.iter().all(|gpu| model.spec.gpus.contains(gpu))
        };
        let kept = self.kept.iter().filter(|(other, _)| other != who);
        let kept = kept.fold(Amounts::none(), |sum, (_, amounts)| sum.plus(amounts));
        let left = Ledger::of(&self.models, &self.capacity, free, &[who]).soon.minus(&kept);
        if !model.places.iter().all(may_be_on) {
            return Some(Fate::Leaves(left));
        }
        let fit = |room: &Amounts| room::fit_at(who, model, &model.places, room, self.numbers.make_room);
        if let Some((places, promised)) = fit(&left) {
            return Some(Fate::Stays(places, promised, false));
        }
        let has_company = self.models.iter().any(|(other, model)| other != who && model.is_there());
        match fit(&self.capacity) {
            _ if has_company => Some(Fate::Leaves(left)),
            None if model.spec.can_do_with_less => Some(Fate::Leaves(left)),
            // Nobody would leave for it.
            Some((places, promised)) => Some(Fate::Stays(places, promised, false)),
            None => Some(Fate::Stays(model.places.clone(), self.capacity.clone(), true)),
        }
    }
}
