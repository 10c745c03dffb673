//! Models served by remote endpoints (`[remotes]`).

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use warden_gateway::ModelRules;
use warden_policies::modes::OnDeath;
use warden_policies::{ModelName, secrets};
use warden_supervisor::RemoteOrigin;
use warden_supervisor::spec::RemoteSpec;

use super::policy::optional_duration;
use super::request::RequestConfig;
use super::resolve::ConfigResolver;
use super::schema;

/// Maximum bytes of a key file. A key is one line, so a larger file is not one.
const MAX_KEY_BYTES: usize = 4096;

/// A model served by a remote endpoint.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoteModel {
    /// URL of the endpoint, with the path before `/v1` if there is one: `https://host/api/v1`. Required.
    pub url: String,
    /// Name of the model at the endpoint. Default: its name here.
    pub model: Option<String>,
    /// File with the key for the endpoint. Keys of clients are never passed on. Default: none.
    #[schemars(schema_with = "schema::path")]
    pub key_file: Option<PathBuf>,
    /// Other names that clients may use.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Maximum number of concurrent requests; others wait in the queue. Default: 64.
    pub max_in_flight: Option<u32>,
    /// Time limit for a whole answer. Default: that of `upstream.exchange_timeout`.
    #[serde(default, deserialize_with = "optional_duration")]
    #[schemars(schema_with = "schema::age")]
    pub timeout: Option<Duration>,
    /// Changes to requests.
    #[serde(default)]
    pub request: RequestConfig,
}

impl ConfigResolver<'_> {
    pub(super) fn resolve_remotes(&mut self) -> Vec<(RemoteSpec, Arc<ModelRules>)> {
        let loaded = self.loaded;
        let numbers = loaded.settings.remote;
        let mut all = Vec::new();
        for (name, remote) in &loaded.settings.remotes {
            let model = remote.model.as_ref().unwrap_or(name);
            if model.is_empty() || model.chars().any(char::is_control) {
                self.report_remote(
                    name,
                    "model",
                    "this is no name",
                    "write what the endpoint calls the model",
                );
            }
            if remote.max_in_flight == Some(0) {
                self.report_remote(name, "max_in_flight", "no request could be sent", "give it 1 or more");
            }
            if remote.timeout.is_some_and(|timeout| timeout.is_zero()) {
                let hint = "give it more, or leave it out";
                self.report_remote(name, "timeout", "no answer comes in no time", hint);
            }
            let key = remote.key_file.as_ref().and_then(|path| self.read_remote_key(name, path));
            let origin = match RemoteOrigin::parse(&remote.url, key.as_deref()) {
                Ok(origin) => Arc::new(origin),
                Err(why) => {
                    let message = format!("`{}`: {why}", secrets::redact_text(&remote.url));
                    self.report_remote(name, "url", &message, "write it like `https://host/v1`");
                    continue;
                }
            };
            if origin.has_key() && !origin.is_encrypted() && !origin.is_local() {
                let message =
                    format!("`remotes.{name}`: its key and all requests go over the network unencrypted");
                self.warn(&["remotes", name, "url"], message, "use `https://`");
            }
            let rules = ModelRules {
                request: self.request_rules(&["remotes", name], &remote.request),
                upstream_model: Some(model.clone()),
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
                model: model.clone(),
                // Use the queue settings of all models: a remote model has none of its own.
                queue: loaded.defaults.queue,
                max_in_flight: remote.max_in_flight.unwrap_or(numbers.max_in_flight),
                numbers,
            };
            all.push((spec, Arc::new(rules)));
        }
        all
    }

    fn report_remote(&mut self, name: &str, key: &str, message: &str, hint: &str) {
        self.report(&["remotes", name, key], format!("`remotes.{name}.{key}`: {message}"), hint);
    }

    fn read_remote_key(&mut self, name: &str, path: &Path) -> Option<String> {
        let path = self.absolute(path);
        let hint = "write the endpoint's key into it, and nothing else";
        let text = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) => {
                let message = format!("{} cannot be read: {error}", path.display());
                self.report_remote(name, "key_file", &message, hint);
                return None;
            }
        };
        let key = std::str::from_utf8(&text).map(str::trim).unwrap_or_default();
        if key.is_empty() || key.len() > MAX_KEY_BYTES || key.contains(char::is_whitespace) {
            self.report_remote(name, "key_file", &format!("{} has no key in it", path.display()), hint);
            return None;
        }
        // Check only other users: the file's group may be the service's own, as with `server.keys`.
        if is_open_to_all(&path) {
            let message =
                format!("`remotes.{name}.key_file`: every user of this machine can read {}", path.display());
            self.warn(&["remotes", name, "key_file"], message, "`chmod 600` it");
        }
        Some(key.to_owned())
    }
}

/// Returns true if users other than owner and group have any access to a file.
pub(super) fn is_open_to_all(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|facts| facts.permissions().mode() & 0o007 != 0)
}

#[cfg(test)]
#[path = "remote_tests.rs"]
mod tests;
