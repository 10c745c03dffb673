//! Rules about files that are used for two purposes.

use std::path::Path;

use super::{ConfigSummary, RuleFinding};
use crate::arguments;

/// Finds log files that are also used as a model, a key file or another log.
pub(super) fn files_with_two_uses(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let settings = whole.settings;
    let access = Path::new(&settings.log.access);
    let mut written = vec![(vec!["log", "access"], access)];
    for one in &whole.models {
        let path = one.model.record_requests.as_deref().unwrap_or_else(|| Path::new(""));
        written.push((vec!["models", one.name, "record_requests"], path));
    }
    let mut others = vec![
        ("server.tls_cert".to_owned(), Path::new(&settings.server.tls_cert)),
        ("server.tls_key".to_owned(), Path::new(&settings.server.tls_key)),
        ("server.keys".to_owned(), Path::new(&settings.server.keys)),
    ];
    for one in &whole.models {
        let model = one.model.model.as_deref().or_else(|| arguments::model_path(one.args).map(Path::new));
        let files = [("model", model), ("binary", one.model.binary.as_deref())];
        let named = |(key, path): (_, Option<_>)| Some((format!("models.{}.{key}", one.name), path?));
        others.extend(files.into_iter().filter_map(named));
    }
    let mut found = Vec::new();
    for (at, (keys, path)) in written.iter().enumerate().filter(|(_, (_, path))| !path.as_os_str().is_empty())
    {
        // Request recordings of several models may share a file, but not with the access log.
        let log = (at > 0 && *path == access).then(|| "log.access".to_owned());
        let other = others.iter().find(|(_, other)| other == path).map(|(name, _)| name.clone());
        let Some(other) = other.or(log) else { continue };
        let key = keys.join(".");
        let message = format!("`{key}` is written to, and `{other}` is the same file, {}", path.display());
        found.push(RuleFinding::new(keys, message, format!("name another file for `{key}`")).fatal());
    }
    found
}
