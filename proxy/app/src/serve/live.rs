//! Builds the part of the gateway's configuration that a reload may change. Pure.

use warden_gateway::{ApiKeys, CorsConfig, LiveConfig};

use crate::config::resolve::ResolvedConfig;
use crate::request_recorder::RecorderSet;

/// Returns the gateway's configuration after a reload.
pub(crate) fn gateway_config(resolved: &ResolvedConfig, recorders: &RecorderSet) -> LiveConfig {
    // Leave out models without rules: every request searches this list, so it should be short.
    let models = resolved.fleet.models.iter().zip(&resolved.models);
    let ruled = models.filter(|(_, model)| !model.rules.is_empty());
    let models = ruled.map(|(spec, model)| (spec.name.clone(), model.rules.clone()));
    let remotes = resolved.fleet.remotes.iter().zip(&resolved.gateway.remotes);
    let remotes = remotes.map(|(remote, rules)| (remote.name.clone(), rules.clone()));
    let models = models.chain(remotes).collect();
    let server = &resolved.settings.server;
    let cors = CorsConfig {
        origins: server.cors.clone(),
        max_age: server.cors_max_age,
        with_keys: resolved.gateway.keys.is_some(),
    };
    let recorders = recorders.by_model(resolved);
    LiveConfig {
        models,
        keys: resolved.gateway.keys.clone().map(ApiKeys::new),
        cors,
        by_name: resolved.gateway.by_name.clone(),
        names: resolved.gateway.names.clone(),
        recorders,
    }
}
