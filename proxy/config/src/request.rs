//! The keys of a model's `request`, which change its requests.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use warden_gateway::SystemMode;

use super::schema;

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
    pub system_prompt_mode: SystemMode,
    /// Maximum number of generated tokens; also applies if the client sends none. Default: no limit.
    #[schemars(range(min = 1))]
    pub max_tokens: Option<u64>,
    /// Add a random seed to each generating request without one, as llama-server would choose. Its answer
    /// can then be generated again, so that any stream continues when its process dies
    /// (docs/continuation.md). Does not apply to `/v1/messages`.
    #[serde(default)]
    pub fresh_seed: bool,
}
