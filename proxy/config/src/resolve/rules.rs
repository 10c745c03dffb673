//! Converts the keys of a model that change its requests to rules for the gateway. Refuses changes that
//! would alter the meaning of a request for its client.

use serde_json::json;
use warden_gateway::{ListingRules, ModelRules, RequestRules, SystemPrompt};

use super::model::ModelResolver;
use super::resolver::ConfigResolver;
use crate::problem::{dotted_key, owned_path};
use crate::request::RequestConfig;

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

/// Maximum bytes of one model's fields as JSON, because every list of models contains them.
const MAX_LISTING_BYTES: usize = 16 << 10;

impl ModelResolver<'_, '_> {
    pub(super) fn rules(&mut self) -> ModelRules {
        let model = self.model;
        let unfit = |name: &String| name.is_empty() || name.chars().any(char::is_control);
        if model.upstream_model.as_ref().is_some_and(unfit) {
            let key = ["models", self.name, "upstream_model"];
            let message = format!("`{}`: this is no name", dotted_key(&owned_path(&key)));
            self.config.report(&key, message, "write the name under which the backend knows the model");
        }
        ModelRules {
            on_death: model.run.on_death,
            loading: model.run.loading,
            request: self.config.request_rules(&["models", self.name], &model.request),
            upstream_model: model.upstream_model.clone(),
            remote: false,
            other_program: model.runs_other_program(),
            timeout: None,
            listing: self.listing(),
        }
    }

    fn listing(&mut self) -> ListingRules {
        let fields = self.model.listing.fields();
        let bytes = json!(fields).to_string().len();
        if bytes > MAX_LISTING_BYTES {
            let message = format!("its `listing` has {bytes} bytes, at most {MAX_LISTING_BYTES} are taken");
            self.report(&["listing"], &message, "each list of models has them: say less");
        }
        ListingRules { hidden: self.model.listing.hidden, fields }
    }
}

impl ConfigResolver<'_> {
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
                .map(|text| SystemPrompt { text, mode: request.system_prompt_mode }),
            max_tokens: request.max_tokens,
            fresh_seed: request.fresh_seed,
        }
    }
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
