//! An operator's rules for the requests to a model: parameters to set, default or strip, a system prompt, a
//! token limit, another name for the backend. This module defines the rules; `plan` turns them into edits
//! of a body, and `apply` carries out the edits.

mod apply;
mod names;
mod plan;

use std::time::Duration;

use serde_json::{Map, Value};
use warden_policies::modes::{OnDeath, WhileLoading};

pub(crate) use apply::apply_rules;
pub use names::VirtualName;
use plan::RulePlan;

/// Rules of one model. [`Default`] changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRules {
    /// Changes in bodies.
    pub request: RequestRules,
    /// Model name that replaces the client's in the body, for a backend that checks the name.
    pub upstream_model: Option<String>,
    /// Non-streaming answers are requested as streams and assembled here (`assemble`).
    pub assemble: bool,
    /// Handling of a request whose server dies before it has answered.
    pub on_death: OnDeath,
    /// Progress messages for a streaming client while the model loads.
    pub loading: WhileLoading,
    /// A remote endpoint serves the model; it gets only requests that compute an answer.
    pub remote: bool,
    /// Time limit of an answer; `None`: the limit for all models.
    pub timeout: Option<Duration>,
    /// Description of the model in lists.
    pub listing: ListingRules,
}

/// Description of a model in lists, in addition to the facts that its process reports. [`Default`] adds
/// nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ListingRules {
    /// Lists omit the model; requests for it are still served.
    pub hidden: bool,
    /// Additional members of the model's list entry. A table is merged into an existing table; values that
    /// a process reports are not replaced.
    pub fields: Map<String, Value>,
}

impl ListingRules {
    /// Adds the fields to an entry of `/v1/models`.
    pub(crate) fn describe(&self, entry: &mut Value) {
        for (name, value) in &self.fields {
            match (value, entry.get_mut(name)) {
                (Value::Object(more), Some(Value::Object(there))) => {
                    more.iter().for_each(|(key, value)| {
                        there.entry(key).or_insert_with(|| value.clone());
                    });
                }
                (value, None) => entry[name] = value.clone(),
                _ => {}
            }
        }
    }
}

impl ModelRules {
    /// Returns whether these rules change nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes in the JSON bodies of routes that generate text, or that count the prompt for such a route.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestRules {
    /// Members that get this value in any case.
    pub set: Vec<(String, Value)>,
    /// Members that get this value if the client does not set them.
    pub default: Vec<(String, Value)>,
    /// Members that are removed.
    pub strip: Vec<String>,
    /// The operator's system prompt.
    pub system_prompt: Option<SystemPrompt>,
    /// Limit for generated tokens.
    pub max_tokens: Option<u64>,
    /// Each generating request without a seed gets one, so that its answer can be reproduced.
    pub fresh_seed: bool,
}

impl RequestRules {
    /// Returns whether these rules change nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A system prompt that the operator adds to requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemPrompt {
    /// Text of the prompt.
    pub text: String,
    /// How the prompt is combined with the client's own system prompt.
    pub mode: SystemMode,
}

/// Ways to combine the operator's system prompt with the client's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemMode {
    /// Adds the operator's prompt only if the client has none.
    #[default]
    Missing,
    /// Puts the operator's prompt before the client's, with an empty line between the two.
    Prepend,
    /// Replaces the client's prompt by the operator's.
    Replace,
}
