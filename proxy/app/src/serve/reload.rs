//! Derives the gateway's new configuration at a reload, and the sections that need a restart of
//! llama-warden. Pure.

use std::fmt::Debug;

use warden_config::resolve::ResolvedConfig;
use warden_config::resolve::dirs::WardenDirs;
use warden_gateway::{ApiKeys, CorsConfig, LiveConfig};

pub(crate) fn gateway_config(resolved: &ResolvedConfig) -> LiveConfig {
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
    LiveConfig {
        models,
        keys: resolved.gateway.keys.clone().map(ApiKeys::new),
        cors,
        by_name: resolved.gateway.by_name.clone(),
        names: resolved.gateway.names.clone(),
    }
}

/// Returns the changed sections that take effect only after a restart.
pub(crate) fn needs_restart(old: &ResolvedConfig, new: &ResolvedConfig) -> Vec<&'static str> {
    // These types come from the defaults and have no `PartialEq`; their debug text contains all values.
    let differs = |a: &dyn Debug, b: &dyn Debug| format!("{a:?}") != format!("{b:?}");
    let mut sections = Vec::new();
    let mut note = |section, differs| {
        if differs {
            sections.push(section);
        }
    };
    // Settings that the gateway reloads while it serves do not count.
    let (before, after) = (&old.settings, &new.settings);
    let mut server = after.server.clone();
    server.keys.clone_from(&before.server.keys);
    server.cors.clone_from(&before.server.cors);
    server.names.clone_from(&before.server.names);
    server.cors_max_age = before.server.cors_max_age;
    note("server", differs(&before.server, &server));
    note("upstream", differs(&before.upstream, &after.upstream));
    note("log", differs(&before.log, &after.log));
    note("series", differs(&before.series, &after.series));
    note("telemetry", old.collector != new.collector);
    note("probe", differs(&before.probe, &after.probe));
    let (old_at, new_at) = (&old.addresses, &new.addresses);
    note("admin", old_at.admin_socket != new_at.admin_socket || old_at.admin != new_at.admin);
    // Folders of models are reloaded.
    let dirs = WardenDirs { models: old.dirs.models.clone(), ..new.dirs.clone() };
    note("paths", old.dirs != dirs);
    sections
}
