//! The `listing` of a model: name for people, capabilities and metadata. Written in `/v1/models` like
//! llama-swap and llama-server's router do.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use warden_gateway::ListingRules as Listed;

use super::problem::ConfigProblem;
use super::resolve::ConfigResolver;
use super::schema;

/// Maximum bytes of one model's fields as JSON, because every list of models contains them.
const MAX_LISTING_BYTES: usize = 16 << 10;

/// Description of a model in lists of models.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelListing {
    /// Display name, next to the name that requests use.
    pub name: Option<String>,
    /// Description of the model.
    pub description: Option<String>,
    /// Tags by which clients group models.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub tags: Vec<String>,
    /// Leaves the model out of lists. Its requests are served.
    #[serde(default)]
    pub hidden: bool,
    /// Capabilities of the model.
    #[serde(default)]
    pub capabilities: ModelCapabilities,
    /// Further metadata for clients: `meta.llamaswap` of the entry, as in llama-swap.
    #[serde(default)]
    #[schemars(schema_with = "schema::parameters")]
    pub metadata: BTreeMap<String, Value>,
}

/// Capabilities of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelCapabilities {
    /// Input: `text`, `image`, `audio`.
    #[serde(default, rename = "in")]
    #[schemars(with = "Vec<ContentModality>")]
    pub inputs: Vec<ContentModality>,
    /// Output: `text`, `image`, `audio`.
    #[serde(default, rename = "out")]
    #[schemars(with = "Vec<ContentModality>")]
    pub outputs: Vec<ContentModality>,
    /// The model calls tools.
    #[serde(default)]
    pub tools: bool,
    /// The model ranks documents.
    #[serde(default)]
    pub reranker: bool,
    /// Context size in tokens. The value that a loaded model reports has priority.
    pub context: Option<u64>,
}

/// Kind of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum ContentModality {
    Text,
    Image,
    Audio,
}

impl ModelListing {
    /// Members of the model's entry in `/v1/models`.
    fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| {
            fields.insert(name.to_owned(), value);
        };
        let text = |text: &Option<String>| {
            text.as_deref().map(str::trim).filter(|text| !text.is_empty()).map(Value::from)
        };
        for (key, words) in [("name", &self.name), ("description", &self.description)] {
            if let Some(words) = text(words) {
                put(key, words);
            }
        }
        if !self.tags.is_empty() {
            put("tags", json!(self.tags));
        }
        let able = &self.capabilities;
        let (inputs, outputs) = (&able.inputs, &able.outputs);
        let mut architecture = Map::new();
        for (name, kinds) in [("input_modalities", inputs), ("output_modalities", outputs)] {
            if !kinds.is_empty() {
                architecture.insert(name.to_owned(), json!(kinds));
            }
        }
        if !architecture.is_empty() {
            put("architecture", Value::Object(architecture));
        }
        let (takes, gives) = (|kind| inputs.contains(&kind), |kind| outputs.contains(&kind));
        let words: Map<String, Value> = [
            ("vision", takes(ContentModality::Image)),
            ("audio_transcriptions", takes(ContentModality::Audio) && gives(ContentModality::Text)),
            ("audio_speech", takes(ContentModality::Text) && gives(ContentModality::Audio)),
            ("image_generation", takes(ContentModality::Text) && gives(ContentModality::Image)),
            ("image_to_image", takes(ContentModality::Image) && gives(ContentModality::Image)),
            ("function_calling", able.tools),
            ("reranker", able.reranker),
        ]
        .into_iter()
        .filter(|(_, is)| *is)
        .map(|(name, _)| (name.to_owned(), Value::Bool(true)))
        .collect();
        if !words.is_empty() {
            put("capabilities", Value::Object(words));
        }
        if able.tools {
            put("supported_parameters", json!(["tools", "tool_choice"]));
        }
        let mut meta = Map::new();
        if let Some(context) = able.context {
            put("context_length", json!(context));
            meta.insert("n_ctx".to_owned(), json!(context));
        }
        if !self.metadata.is_empty() {
            meta.insert("llamaswap".to_owned(), json!(self.metadata));
        }
        if !meta.is_empty() {
            put("meta", Value::Object(meta));
        }
        fields
    }
}

impl ConfigResolver<'_> {
    /// Resolves the listing of a model for the gateway.
    pub(super) fn listing(&mut self, name: &str, listing: &ModelListing) -> Listed {
        let fields = listing.fields();
        let bytes = json!(fields).to_string().len();
        if bytes > MAX_LISTING_BYTES {
            let message = format!(
                "model `{name}`: its `listing` has {bytes} bytes, at most {MAX_LISTING_BYTES} are taken"
            );
            let place = self.place(&["models", name, "listing"]);
            self.problems
                .push(ConfigProblem::new(place, message).with_hint("each list of models has them: say less"));
        }
        Listed { hidden: listing.hidden, fields }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_described_as_llama_swap_describes_it() {
        let text = "name = \" Big \"\ndescription = \"\"\ntags = [\"a\"]\nhidden = true\nmetadata = { size = 7, list = [1.5] }\n\
                    capabilities = { in = [\"text\", \"image\", \"audio\"], out = [\"text\"], tools = true, context = 4096 }";
        let listing: ModelListing = toml::from_str(text).unwrap();
        let wanted = json!({
            "name": "Big",
            "tags": ["a"],
            "architecture": { "input_modalities": ["text", "image", "audio"], "output_modalities": ["text"] },
            "capabilities": { "vision": true, "audio_transcriptions": true, "function_calling": true },
            "supported_parameters": ["tools", "tool_choice"],
            "context_length": 4096,
            "meta": { "n_ctx": 4096, "llamaswap": { "size": 7, "list": [1.5] } },
        });
        assert_eq!(Value::Object(listing.fields()), wanted);
        assert_eq!(ModelListing::default().fields(), Map::new());
    }
}
