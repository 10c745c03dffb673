//! Drop-in mode: llama-warden replaces a single llama-server that answers to every name, and answers as
//! little as possible itself. The process's own answers to a list of models or to a CORS preflight are
//! better than ours. Health stays ours, because it must not disappear while one process replaces another;
//! it answers like llama-server until the first is up.
//!
//! Nothing here waits: a route is left only to a process that is up.

use warden_supervisor::{FleetView, ModelState};

use crate::route::LocalRoute;
use crate::shared::GatewayShared;

/// Returns whether drop-in mode is on.
pub(crate) fn is_drop_in(shared: &GatewayShared) -> bool {
    shared.upstream.backends.takes_any_name()
}

/// Returns whether the gateway answers one of its own routes itself, in drop-in mode.
pub(super) fn answers_locally(shared: &GatewayShared, local: &LocalRoute, asks_for_keys: bool) -> bool {
    let theirs = match local {
        LocalRoute::Models => true,
        // A preflight has no key, which a forwarded request would need.
        LocalRoute::Preflight => !asks_for_keys,
        _ => false,
    };
    !(theirs && is_up(&shared.upstream.backends.view()))
}

/// Returns whether health reports a loading process, in drop-in mode.
pub(super) fn is_loading(shared: &GatewayShared) -> bool {
    has_never_been_up(&shared.upstream.backends.view())
}

fn is_up(view: &FleetView) -> bool {
    view.models.iter().all(|model| model.state == ModelState::Loaded)
}

/// A process may be up and report nothing about itself, so its first readiness is decisive.
fn has_never_been_up(view: &FleetView) -> bool {
    view.models.iter().any(|model| model.state != ModelState::Loaded && !model.was_ready)
}
