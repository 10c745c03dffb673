//! Resolves models served by remote endpoints.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use warden_gateway::ModelRules;
use warden_policies::modes::OnDeath;
use warden_policies::{ModelName, secrets};
use warden_supervisor::RemoteOrigin;
use warden_supervisor::spec::RemoteSpec;

use super::resolver::ConfigResolver;
use crate::remote::RemoteModel;

/// Maximum bytes of a key file. A key is one line, so a larger file is not one.
const MAX_KEY_BYTES: usize = 4096;

impl ConfigResolver<'_> {
    pub(super) fn resolve_remotes(&mut self) -> Vec<(RemoteSpec, Arc<ModelRules>)> {
        let remotes = self.loaded.settings.remotes.iter();
        remotes
            .filter_map(|(name, remote)| RemoteResolver { config: &mut *self, name, remote }.resolve())
            .collect()
    }
}

/// Resolves one remote model.
struct RemoteResolver<'r, 'a> {
    config: &'r mut ConfigResolver<'a>,
    name: &'a str,
    remote: &'a RemoteModel,
}

impl RemoteResolver<'_, '_> {
    fn resolve(mut self) -> Option<(RemoteSpec, Arc<ModelRules>)> {
        let Self { name, remote, .. } = self;
        let loaded = self.config.loaded;
        let numbers = loaded.settings.remote;
        let model = remote.model.as_deref().unwrap_or(name);
        if model.is_empty() || model.chars().any(char::is_control) {
            self.report("model", "this is no name", "write what the endpoint calls the model");
        }
        if remote.max_in_flight == Some(0) {
            self.report("max_in_flight", "no request could be sent", "give it 1 or more");
        }
        if remote.timeout.is_some_and(|timeout| timeout.is_zero()) {
            self.report("timeout", "no answer comes in no time", "give it more, or leave it out");
        }
        let key = remote.key_file.as_ref().and_then(|path| self.read_key(path));
        let origin = match RemoteOrigin::parse(&remote.url, key.as_deref()) {
            Ok(origin) => Arc::new(origin),
            Err(why) => {
                let message = format!("`{}`: {why}", secrets::redact_text(&remote.url));
                self.report("url", &message, "write it like `https://host/v1`");
                return None;
            }
        };
        if origin.has_key() && !origin.is_encrypted() && !origin.is_local() {
            let message =
                format!("`remotes.{name}`: its key and all requests go over the network unencrypted");
            self.config.warn(&["remotes", name, "url"], message, "use `https://`");
        }
        let rules = ModelRules {
            request: self.config.request_rules(&["remotes", name], &remote.request),
            upstream_model: Some(model.to_owned()),
            // Never resend: the endpoint charges for work that it has begun.
            on_death: OnDeath::Error,
            remote: true,
            timeout: remote.timeout,
            ..ModelRules::default()
        };
        let spec = RemoteSpec {
            name: ModelName::new(name),
            aliases: remote.aliases.clone(),
            origin,
            model: model.to_owned(),
            // Use the queue settings of all models: a remote model has no queue settings.
            queue: loaded.defaults.queue,
            max_in_flight: remote.max_in_flight.unwrap_or(numbers.max_in_flight),
            numbers,
        };
        Some((spec, Arc::new(rules)))
    }

    fn report(&mut self, key: &str, message: &str, hint: &str) {
        let name = self.name;
        self.config.report(&["remotes", name, key], format!("`remotes.{name}.{key}`: {message}"), hint);
    }

    fn read_key(&mut self, path: &Path) -> Option<String> {
        let path = self.config.absolute(path);
        let hint = "write the endpoint's key into it, and nothing else";
        let text = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                let message = format!("{} cannot be read: {error}", path.display());
                self.report("key_file", &message, hint);
                return None;
            }
        };
        let key = std::str::from_utf8(&text).map(str::trim).unwrap_or_default();
        if key.is_empty() || key.len() > MAX_KEY_BYTES || key.contains(char::is_whitespace) {
            self.report("key_file", &format!("{} has no key in it", path.display()), hint);
            return None;
        }
        // Check only other users: the file may belong to the group of the service, as with `server.keys`.
        if is_open_to_all(&path) {
            let name = self.name;
            let message =
                format!("`remotes.{name}.key_file`: every user of this machine can read {}", path.display());
            self.config.warn(&["remotes", name, "key_file"], message, "`chmod 600` it");
        }
        Some(key.to_owned())
    }
}

/// Returns true if users other than owner and group have any access to a file.
pub(super) fn is_open_to_all(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|facts| facts.permissions().mode() & 0o007 != 0)
}

#[cfg(test)]
#[path = "remotes_tests.rs"]
mod tests;
