//! What the gateway is told and may be told anew at a reload. Pure.

use std::sync::Arc;

use warden_gateway::{Cors, Keys, Live, ModelRules};

use crate::config::resolve::Resolved;

/// The picture for the gateway.
pub(crate) fn live(resolved: &Resolved) -> Live {
    let models = resolved.fleet.models.iter();
    let models = models.map(|model| (model.name.clone(), Arc::new(ModelRules::default()))).collect();
    let server = &resolved.server;
    let cors = Cors {
        origins: server.cors.clone(),
        max_age: server.cors_max_age,
        with_keys: resolved.keys.is_some(),
    };
    Live { models, keys: resolved.keys.clone().map(Keys::new), cors }
}
