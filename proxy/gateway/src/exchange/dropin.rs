//! In the place of a single llama-server that answers to every name ("drop-in"), as little as possible is ours: what the
//! process itself would say to a list of models or a browser's question is better than what we know. Health stays ours,
//! because it must not go away while one process replaces another; it says what llama-server says until the first is up.
//!
//! Nothing here waits: a route is only given to a process that is up.

use warden_supervisor::{FleetView, ModelState};

use crate::route::LocalRoute;
use crate::shared::Shared;

/// Whether we stand in the place of a single llama-server.
pub(crate) fn is(shared: &Shared) -> bool {
    shared.upstream.backends.takes_any_name()
}

/// Whether a route of ours is answered by us, when we do.
pub(super) fn is_ours(shared: &Shared, local: &LocalRoute, asks_for_keys: bool) -> bool {
    let theirs = match local {
        LocalRoute::Models => true,
        // A browser's question comes without a key, which a forwarded request would need.
        LocalRoute::Preflight => !asks_for_keys,
        _ => false,
    };
    !(theirs && is_up(&shared.upstream.backends.view()))
}

/// Whether health says that the first process loads, when we do.
pub(super) fn is_loading(shared: &Shared) -> bool {
    has_never_been_up(&shared.upstream.backends.view())
}

fn is_up(view: &FleetView) -> bool {
    view.models.iter().all(|model| model.state == ModelState::Loaded)
}

/// A process may be up and report nothing about itself.
fn has_never_been_up(view: &FleetView) -> bool {
    view.models.iter().any(|model| model.state != ModelState::Loaded && !model.was_ready)
}
