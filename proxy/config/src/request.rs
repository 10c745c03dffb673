//! The keys of a model's `request`, which change its requests, and their conversion to rules for the
//! gateway. Refuses changes that would alter the meaning of a request for its client.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use warden_gateway::{ModelRules, RequestRules, SystemMode, SystemPrompt};
use warden_policies::modes::CancelMode;

use super::problem::{dotted_key, owned_path};
use super::resolve::ConfigResolver;
use super::schema;
use super::settings::ModelConfig;

/// Parameters that no rule may change, because the answer would not fit the client's request.
const FORBIDDEN_PARAMETERS: [(&str, &str); 2] = [
    ("model", "use `upstream_model` to give the backend another name"),
    ("stream", "clients that get what they did not ask for cannot read it"),
];

/// Parameters for the maximum number of tokens, in the different interfaces.
pub(super) const TOKEN_LIMIT_PARAMETERS: [&str; 4] =
    ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"];

/// Parameters to which `system_prompt` is added.
pub(super) const PROMPT_PARAMETERS: [&str; 4] = ["messages", "input", "instructions", "system"];

/// Changes to requests.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestConfig {
    /// Parameters that always get this value, whatever the client sends.
    #[serde(default)]
    #[schemars(schema_with = "schema::parameters")]
    pub set: BTreeMap<String, Value>,
    /// Parameters that get this value if the client does not send them.
    #[serde(default)]
    #[schemars(schema_with = "schema::parameters")]
    pub default: BTreeMap<String, Value>,
    /// Parameters that are removed. One that is also in `set` is set.
    #[serde(default)]
    pub strip: Vec<String>,
    /// System prompt for chat, messages and responses.
    pub system_prompt: Option<String>,
    /// Combination with the client's prompt: `missing` uses it only if the client sends none,
    /// `prepend` puts it in front, `replace` replaces the client's. Default: `"missing"`.
    #[serde(default)]
    #[schemars(schema_with = "schema::system_prompt_mode")]
    pub system_prompt_mode: SystemPromptMode,
    /// Maximum number of generated tokens; also applies if the client sends none. Default: no limit.
    #[schemars(range(min = 1))]
    pub max_tokens: Option<u64>,
    /// Add a random seed to each generating request without one, as llama-server would choose. Its answer
    /// can then be generated again, so that any stream continues when its process dies
    /// (docs/continuation.md). Does not apply to `/v1/messages`.
    #[serde(default)]
    pub fresh_seed: bool,
}

/// Combination of the system prompt with the client's.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SystemPromptMode {
    /// Use it if the client sends none.
    #[default]
    Missing,
    /// Put it in front of the client's.
    Prepend,
    /// Replace the client's.
    Replace,
}

impl From<SystemPromptMode> for SystemMode {
    fn from(mode: SystemPromptMode) -> Self {
        match mode {
            SystemPromptMode::Missing => Self::Missing,
            SystemPromptMode::Prepend => Self::Prepend,
            SystemPromptMode::Replace => Self::Replace,
        }
    }
}

impl ConfigResolver<'_> {
    pub(super) fn model_rules(&mut self, name: &str, model: &ModelConfig) -> ModelRules {
        let unfit = |name: &String| name.is_empty() || name.chars().any(char::is_control);
        if model.upstream_model.as_ref().is_some_and(unfit) {
            let key = ["models", name, "upstream_model"];
            let message = format!("`{}`: this is no name", dotted_key(&owned_path(&key)));
            self.report(&key, message, "write the name under which the backend knows the model");
        }
        ModelRules {
            assemble: model.run.cancel == CancelMode::Assemble,
            on_death: model.run.on_death,
            loading: model.run.loading,
            request: self.request_rules(&["models", name], &model.request),
            upstream_model: model.upstream_model.clone(),
            remote: false,
            timeout: None,
            listing: self.listing(name, &model.listing),
        }
    }

    pub(super) fn request_rules(&mut self, table: &[&str; 2], request: &RequestConfig) -> RequestRules {
        let mut report = |key: &[&str], message: &str, hint: &str| {
            let key = [&table[..], &["request"], key].concat();
            self.report(&key, format!("`{}`: {message}", dotted_key(&owned_path(&key))), hint);
        };
        let set = request.set.keys().map(|key| (vec!["set", key.as_str()], key));
        let default = request.default.keys().map(|key| (vec!["default", key.as_str()], key));
        let strip = request.strip.iter().map(|key| (vec!["strip"], key));
        for (path, key) in set.chain(default).chain(strip) {
            if let Some((_, hint)) = FORBIDDEN_PARAMETERS.iter().find(|(name, _)| *name == key) {
                report(&path, &format!("`{key}` says what the request is, and stays the client's"), hint);
            }
            if request.system_prompt.is_some() && PROMPT_PARAMETERS.contains(&key.as_str()) {
                report(&path, &format!("`{key}` is where `system_prompt` is put"), "keep one of them");
            }
        }
        if request.system_prompt.as_ref().is_some_and(String::is_empty) {
            report(
                &["system_prompt"],
                "this is empty",
                "leave it out, or write what the model is to be told",
            );
        }
        RequestRules {
            set: request.set.clone().into_iter().collect(),
            default: request.default.clone().into_iter().collect(),
            strip: request.strip.clone(),
            system_prompt: request
                .system_prompt
                .clone()
                .map(|text| SystemPrompt { text, mode: request.system_prompt_mode.into() }),
            max_tokens: request.max_tokens,
            fresh_seed: request.fresh_seed,
        }
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
