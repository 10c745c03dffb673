//! What the gateway is told and may be told anew at a reload. Pure.

use std::sync::Arc;

use warden_gateway::{Live, ModelRules};

use crate::config::resolve::Resolved;

/// The picture for the gateway.
pub(crate) fn live(resolved: &Resolved) -> Live {
    let models = resolved.fleet.models.iter();
    let models = models.map(|model| (model.name.clone(), Arc::new(ModelRules::default()))).collect();
    Live { models, keys: None }
}
