//! What an operator wants changed in the requests for a model: parameters set, defaulted or stripped, a system prompt, a
//! bound on generated tokens, another name for the backend. Here is what that means; `plan` turns it into edits of a body, and
//! `apply` carries them out.

mod apply;
mod names;
mod plan;

use std::time::Duration;

use serde_json::{Map, Value};
use warden_policies::modes::{OnDeath, WhileLoading};

pub(crate) use apply::apply;
pub use names::Name;
use plan::Plan;

/// What is special about one model. [`Default`] is: nothing, its requests pass as they are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRules {
    /// What is changed in bodies.
    pub request: RequestRules,
    /// The name that the backend sees in place of the client's, for one that looks at it.
    pub upstream_model: Option<String>,
    /// An answer that is no stream is asked for as one and put together here (`assemble`).
    pub assemble: bool,
    /// What becomes of a request whose server dies before it has answered.
    pub on_death: OnDeath,
    /// What the client of a stream gets while the model loads.
    pub loading: WhileLoading,
    /// Somebody else's endpoint serves it: only what computes an answer goes there.
    pub remote: bool,
    /// How long an answer may take in all; `None`: as long as every other.
    pub timeout: Option<Duration>,
    /// What lists of models say of it.
    pub listing: Listing,
}

/// What lists of models say of one, beyond what its process reports. [`Default`] is: nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Listing {
    /// Lists leave it out; requests for it are served.
    pub hidden: bool,
    /// Members of its entry. A table is merged into the one that is there, and what a process reports stays.
    pub fields: Map<String, Value>,
}

impl Listing {
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
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes in the JSON bodies of routes that generate, or that count what a generating route would take in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestRules {
    /// Members that get this value, whatever the client says.
    pub set: Vec<(String, Value)>,
    /// Members that get this value if the client says nothing.
    pub default: Vec<(String, Value)>,
    /// Members that are taken out.
    pub strip: Vec<String>,
    /// A system prompt.
    pub system_prompt: Option<SystemPrompt>,
    /// Tokens that may be generated, at most.
    pub max_tokens: Option<u64>,
    /// A seed of its own for each request that generates and has none, so that its answer can be drawn once more.
    pub fresh_seed: bool,
}

impl RequestRules {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A system prompt of the operator's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemPrompt {
    /// Its text.
    pub text: String,
    /// How it stands to the client's own.
    pub mode: SystemMode,
}

/// How the operator's system prompt stands to the client's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemMode {
    /// Only where the client has none.
    #[default]
    Missing,
    /// In front of the client's, with an empty line between them.
    Prepend,
    /// Instead of the client's.
    Replace,
}
