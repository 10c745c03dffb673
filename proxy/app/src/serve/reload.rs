//! Finds changes of the configuration that need a restart of llama-warden. Pure.

use crate::config::resolve::ResolvedConfig;
use crate::config::resolve::dirs::WardenDirs;

/// Returns the changed sections that take effect only after a restart.
pub(crate) fn needs_restart(old: &ResolvedConfig, new: &ResolvedConfig) -> Vec<&'static str> {
    // These types come from the defaults and have no `PartialEq`; their debug text contains all values.
    let differs = |a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| format!("{a:?}") != format!("{b:?}");
    let mut sections = Vec::new();
    let mut note = |section, differs| {
        if differs {
            sections.push(section);
        }
    };
    // Settings that the gateway reloads while it serves do not count.
    let mut server = new.server.clone();
    server.keys.clone_from(&old.server.keys);
    server.cors.clone_from(&old.server.cors);
    server.names.clone_from(&old.server.names);
    server.cors_max_age = old.server.cors_max_age;
    note("server", differs(&old.server, &server));
    note("upstream", differs(&old.upstream, &new.upstream));
    note("log", differs(&old.log, &new.log));
    note("series", differs(&old.series, &new.series));
    note("telemetry", old.collector != new.collector);
    note("probe", differs(&old.probe, &new.probe));
    note("admin", old.admin_socket != new.admin_socket || old.admin_address != new.admin_address);
    // Folders of models are reloaded.
    let dirs = WardenDirs { models: old.dirs.models.clone(), ..new.dirs.clone() };
    note("paths", old.dirs != dirs);
    sections
}
