//! Additional names that stand for a model with other request rules, or for the best available of several
//! models.

use std::sync::Arc;

use warden_policies::ModelName;
use warden_policies::modes::ChooseMode;
use warden_supervisor::{FleetView, ModelState};

use super::ModelRules;

/// Meaning of an additional name.
#[derive(Clone, Debug)]
pub struct VirtualName {
    /// Models, the best first, each with its rules for requests under this name. At least one.
    pub models: Vec<(ModelName, Arc<ModelRules>)>,
    /// Method of choosing among the models.
    pub choose: ChooseMode,
}

impl VirtualName {
    /// Chooses the model for a request, among the models that its client may use; `None` if the client may
    /// use none.
    pub(crate) fn choose(
        &self,
        view: &FleetView,
        may_use: impl Fn(&ModelName) -> bool,
        has_room: impl Fn(&ModelName) -> bool,
        refuses: impl Fn(&ModelName) -> bool,
    ) -> Option<&(ModelName, Arc<ModelRules>)> {
        let allowed: Vec<_> = self.models.iter().filter(|(model, _)| may_use(model)).collect();
        let shown = |model: &ModelName| view.models.iter().find(|shown| shown.name == *model);
        let sound: Vec<_> = allowed.iter().filter(|(model, _)| !refuses(model)).copied().collect();
        let candidates = if sound.is_empty() { allowed } else { sound };
        let state = |model: &ModelName| shown(model).map(|model| model.state);
        let is_loaded = |model: &ModelName| state(model) == Some(ModelState::Loaded);
        let find =
            |wanted: &dyn Fn(&ModelName) -> bool| candidates.iter().find(|(model, _)| wanted(model)).copied();
        let best = match self.choose {
            ChooseMode::Loaded => {
                find(&is_loaded).or_else(|| find(&|model| state(model) == Some(ModelState::Loading)))
            }
            ChooseMode::Room => {
                find(&|model| is_loaded(model) || has_room(model)).or_else(|| find(&is_loaded))
            }
        };
        best.or_else(|| candidates.first().copied())
    }
}

#[cfg(test)]
mod tests {
    use warden_supervisor::ModelView;

    use super::*;
    use crate::tests::unloaded;

    fn view(states: [(ModelState, bool); 3]) -> FleetView {
        let models = ["a", "b", "c"]
            .into_iter()
            .zip(states)
            .map(|(name, (state, _))| ModelView { state, ..unloaded(&ModelName::new(name), Vec::new()) });
        FleetView { models: models.map(Arc::new).collect(), ..FleetView::default() }
    }

    #[test]
    fn the_best_that_is_there_is_taken_and_else_the_best() {
        use ModelState::{Failed, Loaded, Loading, Unloaded};
        let models = ["a", "b", "c"].map(|name| (ModelName::new(name), Arc::default()));
        let chosen = |choose, states: [(ModelState, bool); 3], allowed: &str, room: &str| {
            let name = VirtualName { models: models.to_vec(), choose };
            let is_in = |of: &str, model: &ModelName| of.contains(model.as_str());
            let refuses = |model: &ModelName| states[usize::from(model.as_str().as_bytes()[0] - b'a')].1;
            let (may_use, has_room) = (|model: &_| is_in(allowed, model), |model: &_| is_in(room, model));
            let model = name.choose(&view(states), may_use, has_room, refuses);
            model.map(|(model, _)| model.to_string()).unwrap_or_default()
        };
        let (no, yes) = (false, true);
        let some = [(Unloaded, no), (Loaded, no), (Loaded, no)];
        let none = [(Unloaded, no), (Unloaded, no), (Unloaded, no)];
        let comes = [(Unloaded, no), (Unloaded, no), (Loading, no)];
        let broken = [(Failed, yes), (Unloaded, no), (Unloaded, no)];
        let all_broken = [(Failed, yes), (Failed, yes), (Failed, yes)];
        for (choose, states, allowed, room, wanted) in [
            (ChooseMode::Loaded, some, "abc", "abc", "b"),
            (ChooseMode::Loaded, some, "ac", "", "c"),
            (ChooseMode::Loaded, none, "abc", "bc", "a"),
            (ChooseMode::Loaded, comes, "abc", "", "c"),
            (ChooseMode::Loaded, broken, "abc", "", "b"),
            (ChooseMode::Loaded, all_broken, "abc", "", "a"),
            (ChooseMode::Room, some, "abc", "a", "a"),
            (ChooseMode::Room, some, "abc", "", "b"),
            (ChooseMode::Room, none, "abc", "c", "c"),
            (ChooseMode::Room, none, "abc", "", "a"),
            (ChooseMode::Room, broken, "abc", "a", "b"),
            (ChooseMode::Room, none, "", "", ""),
        ] {
            assert_eq!(
                chosen(choose, states, allowed, room),
                wanted,
                "{choose:?} {states:?} {allowed} {room}"
            );
        }
    }
}
