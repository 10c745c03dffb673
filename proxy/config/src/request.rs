//! The keys of a model's `request`, which change its requests, and their conversion to rules for the
//! gateway. Refuses changes that would alter the meaning of a request for its client.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use warden_gateway::{ModelRules, RequestRules, SystemMode, SystemPrompt};
use warden_policies::modes::CancelMode;

use super::problem::{ConfigPlace, ConfigProblem, dotted_key};
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
    #[schemars(with = "Vec<String>")]
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
    /// Resolves the rules of a model for the gateway.
    pub(super) fn model_rules(&mut self, name: &str, model: &ModelConfig) -> ModelRules {
        let unfit = |name: &String| name.is_empty() || name.chars().any(char::is_control);
        if model.upstream_model.as_ref().is_some_and(unfit) {
            let path = ["models", name, "upstream_model"].map(str::to_owned);
            let place = self.loaded.place(&path);
            let problem = ConfigProblem::new(place, format!("`{}`: this is no name", dotted_key(&path)));
            self.problems.push(problem.with_hint("write the name under which the backend knows the model"));
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

    /// Resolves the request rules written in this table.
    pub(super) fn request_rules(&mut self, table: &[&str; 2], request: &RequestConfig) -> RequestRules {
        let mut problem = |place: ConfigPlace, path: &[&str], message: &str, hint: &str| {
            let path: Vec<String> = table.iter().chain(path).map(|&key| key.to_owned()).collect();
            self.problems.push(
                ConfigProblem::new(place, format!("`{}`: {message}", dotted_key(&path))).with_hint(hint),
            );
        };
        let place = |path: &[&str]| {
            let path: Vec<String> = table.iter().chain(path).map(|&key| key.to_owned()).collect();
            self.loaded.place(&path)
        };
        let tables = [("set", &request.set), ("default", &request.default)];
        let named = tables.iter().flat_map(|(table, all)| all.keys().map(|key| (*table, key.as_str())));
        for (table, key) in named.chain(request.strip.iter().map(|key| ("strip", key.as_str()))) {
            let at = if table == "strip" { vec!["request", "strip"] } else { vec!["request", table, key] };
            if let Some((_, hint)) = FORBIDDEN_PARAMETERS.iter().find(|(name, _)| *name == key) {
                let message = format!("`{key}` says what the request is, and stays the client's");
                problem(place(&at), &at, &message, hint);
            }
            if request.system_prompt.is_some() && PROMPT_PARAMETERS.contains(&key) {
                let message = format!("`{key}` is where `system_prompt` is put");
                problem(place(&at), &at, &message, "keep one of them");
            }
        }
        if request.system_prompt.as_ref().is_some_and(String::is_empty) {
            let at = ["request", "system_prompt"];
            problem(place(&at), &at, "this is empty", "leave it out, or write what the model is to be told");
        }
        let pairs = |table: &BTreeMap<String, Value>| {
            table.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        RequestRules {
            set: pairs(&request.set),
            default: pairs(&request.default),
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
