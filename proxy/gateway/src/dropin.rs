//! In the place of a single llama-server that answers to every name ("drop-in"), as little as possible is ours: what the
//! process itself would say to a list of models or a browser's question is better than what we know. Health stays ours,
//! because it must not go away while one process replaces another; it says what llama-server says until the first is up.
//!
//! Nothing here waits: a route is only given to a process that is up.

use warden_supervisor::{FleetView, ModelState};

use crate::gateway::Shared;
use crate::routes::Own;

/// Whether we stand in the place of a single llama-server.
pub(crate) fn is(shared: &Shared) -> bool {
    shared.backends.takes_any_name()
}

/// What is left of a route of ours, when we do.
pub(crate) fn own<'a>(shared: &Shared, own: Own<'a>, asks_for_keys: bool) -> Option<Own<'a>> {
    let theirs = match own {
        Own::Models => true,
        // A browser's question comes without a key, which a forwarded request would need.
        Own::Preflight => !asks_for_keys,
        _ => false,
    };
    let given = theirs && is_up(&shared.backends.view());
    (!given).then_some(own)
}

/// Whether health says that the first process loads, when we do.
pub(crate) fn is_loading(shared: &Shared) -> bool {
    has_never_been_up(&shared.backends.view())
}

fn is_up(view: &FleetView) -> bool {
    view.models.iter().all(|model| model.state == ModelState::Loaded)
}

/// Whatever it told of itself: a process may be up and tell nothing.
fn has_never_been_up(view: &FleetView) -> bool {
    view.models.iter().any(|model| model.state != ModelState::Loaded && !model.was_ready)
}
