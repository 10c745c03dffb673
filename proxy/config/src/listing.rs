//! The `listing` of a model: name for people, capabilities and metadata. Written in `/v1/models` like
//! llama-swap and llama-server's router do.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::schema;

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
    pub inputs: Vec<ContentModality>,
    /// Output: `text`, `image`, `audio`.
    #[serde(default, rename = "out")]
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
    pub(crate) fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        for (key, text) in [("name", &self.name), ("description", &self.description)] {
            let text = text.as_deref().map(str::trim).unwrap_or_default();
            if !text.is_empty() {
                fields.insert(key.to_owned(), json!(text));
            }
        }
        let able = &self.capabilities;
        let mut meta = Map::new();
        if let Some(context) = able.context {
            meta.insert("n_ctx".to_owned(), json!(context));
        }
        if !self.metadata.is_empty() {
            meta.insert("llamaswap".to_owned(), json!(self.metadata));
        }
        for (key, value) in [
            ("tags", json!(self.tags)),
            ("architecture", able.architecture()),
            ("capabilities", able.words()),
            ("supported_parameters", if able.tools { json!(["tools", "tool_choice"]) } else { Value::Null }),
            ("context_length", json!(able.context)),
            ("meta", Value::Object(meta)),
        ] {
            // Leave out members that the configuration does not set.
            if ![Value::Null, json!([]), json!({})].contains(&value) {
                fields.insert(key.to_owned(), value);
            }
        }
        fields
    }
}

impl ModelCapabilities {
    fn architecture(&self) -> Value {
        let all = [("input_modalities", &self.inputs), ("output_modalities", &self.outputs)];
        let named = all.into_iter().filter(|(_, kinds)| !kinds.is_empty());
        Value::Object(named.map(|(name, kinds)| (name.to_owned(), json!(kinds))).collect())
    }

    fn words(&self) -> Value {
        use ContentModality::{Audio, Image, Text};
        let takes = |kind| self.inputs.contains(&kind);
        let gives = |kind| self.outputs.contains(&kind);
        let words = [
            ("vision", takes(Image)),
            ("audio_transcriptions", takes(Audio) && gives(Text)),
            ("audio_speech", takes(Text) && gives(Audio)),
            ("image_generation", takes(Text) && gives(Image)),
            ("image_to_image", takes(Image) && gives(Image)),
            ("function_calling", self.tools),
            ("reranker", self.reranker),
        ];
        let words = words.into_iter().filter(|(_, is)| *is);
        Value::Object(words.map(|(name, is)| (name.to_owned(), json!(is))).collect())
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
