//! What a new configuration changes that only a restart of llama-warden can take over. Pure.

use crate::config::resolve::Resolved;
use crate::config::resolve::dirs::Dirs;

/// The sections that changed and stay as they were until a restart.
pub(crate) fn needs_restart(old: &Resolved, new: &Resolved) -> Vec<&'static str> {
    // These types come from the defaults and have no equality of their own; their text says all they hold.
    let differs = |a: &dyn std::fmt::Debug, b: &dyn std::fmt::Debug| format!("{a:?}") != format!("{b:?}");
    let mut sections = Vec::new();
    let mut note = |section, differs| {
        if differs {
            sections.push(section);
        }
    };
    // What the gateway is told anew while it serves does not count.
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
    // Folders of models are taken over.
    let dirs = Dirs { models: old.dirs.models.clone(), ..new.dirs.clone() };
    note("paths", old.dirs != dirs);
    sections
}
