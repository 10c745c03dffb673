//! Extracts the facts for load balancers and endpoint pickers from the fleet's view. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use warden_gateway::ContextHoldings;
use warden_policies::ModelName;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::pool::{BalancedModel, InstanceFacts};
use warden_supervisor::{BackendView, FleetView, ModelState, ModelView};

/// Tokens of one model's context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContextUse {
    pub(crate) used: u64,
    pub(crate) room: u64,
}

/// Leaves out canaries, which clients cannot request.
pub(crate) fn pool_facts(view: &FleetView, draining: bool, full: bool) -> InstanceFacts {
    InstanceFacts { draining, full, models: view.models.iter().map(|model| model_facts(model)).collect() }
}

fn model_facts(model: &ModelView) -> BalancedModel {
    let ready = || model.backends.iter().filter(|backend| backend.phase == BackendPhase::Ready);
    let limits = ready().flat_map(|backend| &backend.memory.forecasts);
    let seconds = limits.filter_map(|limit| Some(limit.forecast.seconds?.value));
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    BalancedModel {
        // A process that does not report its slots counts as one slot.
        slots: ready().map(|backend| backend.slots.unwrap_or(1)).fold(0, u32::saturating_add),
        running: ready().map(|backend| backend.in_flight).fold(0, u32::saturating_add),
        waiting: count(model.waiting),
        depth: count(model.queue_depth),
        refuses: model.state == ModelState::Failed
            || model.outage.as_ref().is_some_and(|outage| outage.refusing),
        limit_in: seconds
            .fold(None, |least: Option<f64>, next| Some(least.map_or(next, |least| least.min(next)))),
    }
}

/// Counts a context that the slots of a process share only once. Leaves out models whose processes have not
/// reported the size of a slot.
pub(crate) fn context_use(
    view: &FleetView,
    held: &BTreeMap<ModelName, ContextHoldings>,
) -> BTreeMap<String, ContextUse> {
    let one = |model: &Arc<ModelView>| {
        let ready = model.backends.iter().filter(|backend| backend.phase == BackendPhase::Ready);
        let pools = |backend: &BackendView| {
            let slots = u64::from(backend.slots?);
            Some(if backend.memory.one_pool { slots.min(1) } else { slots })
        };
        let room = ready.filter_map(pools).sum::<u64>().saturating_mul(model.n_ctx?);
        let used = held.get(&model.name).map_or(0, |holds| holds.tokens);
        (room > 0).then(|| (model.name.as_str().to_owned(), ContextUse { used: used.min(room), room }))
    };
    view.models.iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::growth_fixture::{fleet, leaking};

    #[test]
    fn a_context_that_slots_share_is_room_for_it_once_in_each_process() {
        let process = |phase, one_pool| {
            let mut process = leaking();
            (process.phase, process.slots, process.memory.one_pool) = (phase, Some(4), one_pool);
            process
        };
        let room = |processes: Vec<BackendView>, tokens| {
            let mut view = fleet(processes);
            Arc::make_mut(&mut view.models[0]).n_ctx = Some(1000);
            let held =
                BTreeMap::from([(view.models[0].name.clone(), ContextHoldings { requests: 1, tokens })]);
            context_use(&view, &held).into_values().next()
        };
        let each = ContextUse { used: 600, room: 4000 };
        assert_eq!(
            room(vec![process(BackendPhase::Ready, false)], 600),
            Some(each),
            "a context for each slot"
        );
        let shared = process(BackendPhase::Ready, true);
        assert_eq!(room(vec![shared.clone()], 600), Some(ContextUse { used: 600, room: 1000 }));
        let two = vec![shared.clone(), shared, process(BackendPhase::Draining, true)];
        assert_eq!(room(two, 2600), Some(ContextUse { used: 2000, room: 2000 }), "full is full");
        let silent = BackendView { slots: None, ..process(BackendPhase::Ready, true) };
        assert_eq!(room(vec![silent], 5), None);
    }
}
