//! Drop-in mode: llama-warden replaces a single llama-server, accepts every model name, and answers as
//! little as possible itself. llama-server's own answers to a list of models or to a CORS preflight are
//! more complete. The gateway always answers health itself, because that route must work while one process
//! replaces another; it answers like llama-server until the first process is ready.
//!
//! Nothing here waits: a route is forwarded only to a process that is ready.

use warden_supervisor::{FleetView, ModelState};

use crate::route::LocalRoute;
use crate::shared::GatewayShared;

/// Returns whether drop-in mode is on.
pub(crate) fn is_drop_in(shared: &GatewayShared) -> bool {
    shared.upstream.backends.takes_any_name()
}

/// Returns whether the gateway itself answers a local route in drop-in mode.
pub(super) fn answers_locally(shared: &GatewayShared, local: &LocalRoute, asks_for_keys: bool) -> bool {
    let theirs = match local {
        LocalRoute::Models => true,
        // A preflight has no API key, and could not be forwarded if keys are required.
        LocalRoute::Preflight => !asks_for_keys,
        _ => false,
    };
    !(theirs && is_up(&shared.upstream.backends.view()))
}

/// Returns whether health reports a loading process in drop-in mode.
pub(super) fn is_loading(shared: &GatewayShared) -> bool {
    has_never_been_up(&shared.upstream.backends.view())
}

fn is_up(view: &FleetView) -> bool {
    view.models.iter().all(|model| model.state == ModelState::Loaded)
}

/// Returns whether some model has never been ready. The state may be unknown while a process is up, so a
/// model that was ready once does not count.
fn has_never_been_up(view: &FleetView) -> bool {
    view.models.iter().any(|model| model.state != ModelState::Loaded && !model.was_ready)
}
