//! Redacts requests: replaces texts and names by others of the same length, and pictures and sounds by
//! generated ones of the same size. Fields that are not known to be harmless are dropped.
//!
//! ```text
//!   body ─ field by field ─┬─ kept: numbers, roles, types ([`fields`])
//!                          ├─ texts, names, arguments of tools ── others of the same length and shape ([`made`])
//!                          ├─ tools, schemas ── the same form under other names ([`tools`])
//!                          ├─ pictures, sounds ── ours ([`media`])
//!                          └─ the rest: dropped
//! ```
//!
//! Everything that affects memory stays: roles, lengths, sizes, numbers of images, sampling, and common parts
//! of requests. Equal texts get equal replacements, and common beginnings stay common, so a conversation
//! still shares its beginning with its earlier requests. The keys of the hash are drawn at every start and
//! never written, so that no reader can test guesses of a text. Fields that a server requires stay, too.

mod fields;
mod made;
mod media;
mod tools;

use std::cell::Cell;

use serde_json::{Map, Value, json};

use self::fields::LISTS;
use self::made::ReplacementMaker;

/// Redacts requests of one run.
#[derive(Debug, Default)]
pub struct Redactor {
    maker: ReplacementMaker,
    bytes_left: Cell<usize>,
}

/// Limit of a recorded line, with the pictures and sounds generated for it. A request has at most 8 MiB, but a
/// few of its bytes can declare a large picture, which one of the same size replaces.
const MAX_LINE_BYTES: usize = 32 << 20;

impl Redactor {
    /// Creates a redactor with random keys that are stored nowhere.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a line for a recording; `None` if the body is no JSON object, has content that cannot be
    /// replaced (videos), or would become too large: a few bytes may declare a large picture.
    pub fn redact_line(&self, method: &str, path: &str, body: &[u8]) -> Option<String> {
        let body: Value = serde_json::from_slice(body).ok()?;
        let body = self.redact_body(&body)?;
        // A query may name persons.
        let path = path.split('?').next().unwrap_or_default();
        let line = json!({ "method": method, "path": path, "body": body }).to_string();
        (line.len() <= MAX_LINE_BYTES).then_some(line)
    }

    /// Returns `None` in the same cases as [`Redactor::redact_line`].
    pub(crate) fn redact_body(&self, body: &Value) -> Option<Value> {
        self.bytes_left.set(MAX_LINE_BYTES);
        let body = self.redact_fields(body.as_object()?);
        (self.bytes_left.get() > 0).then_some(body)
    }

    fn redact_fields(&self, fields: &Map<String, Value>) -> Value {
        let is = |kind: &str| fields.get("type").and_then(Value::as_str) == Some(kind);
        let mut kept = Map::new();
        for (name, value) in fields {
            let other = match (name.as_str(), value) {
                // Arguments of a tool.
                ("input", _) if is("tool_use") => Some(self.maker.replace_value(value)),
                ("schema", _) => Some(self.maker.replace_schema(value)),
                // In `response_format`, `json_schema` holds a name and a schema; next to a prompt, it is the
                // schema.
                ("json_schema", Value::Object(inner)) if !is("json_schema") => {
                    Some(self.maker.replace_schema(&Value::Object(inner.clone())))
                }
                ("json_schema", Value::Object(inner)) => Some(self.redact_fields(inner)),
                _ => self.redact_field(name, value),
            };
            if let Some(other) = other {
                kept.insert(name.clone(), other);
            }
        }
        Value::Object(kept)
    }

    fn redact_field(&self, name: &str, value: &Value) -> Option<Value> {
        match (name, value) {
            _ if LISTS.unreplaceable_fields.contains(name) => {
                self.take_budget(usize::MAX);
                None
            }
            ("image_url", _) => Some(self.replace_image(value)),
            ("source", Value::Object(source)) => self.replace_source(source),
            ("input_audio", Value::Object(sound)) => Some(self.replace_audio(sound)),
            ("lora", Value::Array(all)) => Some(all.iter().map(adapter_numbers).collect()),
            ("tools", Value::Array(all)) => Some(all.iter().map(|tool| self.redact_tool(tool)).collect()),
            (_, Value::Bool(_) | Value::Number(_)) if LISTS.kept_fields.contains(name) => Some(value.clone()),
            (_, Value::String(text)) if LISTS.word_fields.contains(name) => {
                let known = LISTS.kept_words.contains(text);
                let other =
                    || LISTS.required_fields.contains(name).then(|| json!(self.maker.replace_name(text)));
                if known { Some(value.clone()) } else { other() }
            }
            ("name", Value::String(text)) => Some(json!(self.maker.replace_name(text))),
            (_, Value::String(text)) if LISTS.id_fields.contains(name) => {
                Some(json!(self.maker.replace_id(text, 0)))
            }
            (_, Value::Number(number)) if LISTS.id_fields.contains(name) => {
                Some(self.maker.replace_number(&number.to_string()))
            }
            ("arguments", Value::String(text)) => Some(self.within_budget(self.maker.replace_json(text))),
            ("arguments", _) => Some(self.maker.replace_value(value)),
            _ if LISTS.text_fields.contains(name) => Some(self.redact_content(value)),
            (_, Value::Array(_) | Value::Object(_)) if LISTS.nested_fields.contains(name) => {
                Some(self.redact_content(value))
            }
            _ => None,
        }
    }

    fn redact_content(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.within_budget(self.maker.replace_text(text)),
            Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_number) => {
                self.maker.replace_tokens(items)
            }
            Value::Array(items) => items.iter().map(|item| self.redact_content(item)).collect(),
            Value::Object(fields) => self.redact_fields(fields),
            Value::Number(_) => self.maker.replace_token(value),
            Value::Bool(_) | Value::Null => value.clone(),
        }
    }

    fn take_budget(&self, bytes: usize) -> bool {
        let left = self.bytes_left.get().saturating_sub(bytes);
        self.bytes_left.set(left);
        left > 0
    }

    fn within_budget(&self, text: String) -> Value {
        if self.take_budget(text.len()) { Value::String(text) } else { Value::Null }
    }

    /// The result may be longer, because short names grow.
    fn redact_tool(&self, tool: &Value) -> Value {
        if self.take_budget(tool.to_string().len().saturating_mul(2)) {
            self.maker.replace_tool(tool)
        } else {
            Value::Null
        }
    }

    fn replace_image(&self, value: &Value) -> Value {
        let own = |url: &str| {
            let data = url.split_once(";base64,").map_or(url, |(_, data)| data);
            json!(format!("data:image/png;base64,{}", self.replace_picture(data)))
        };
        match value {
            Value::String(url) => own(url),
            Value::Object(fields) => {
                json!({ "url": own(fields.get("url").and_then(Value::as_str).unwrap_or_default()) })
            }
            _ => Value::Null,
        }
    }

    /// Replaces a picture in Anthropic's form; servers ignore documents.
    fn replace_source(&self, source: &Map<String, Value>) -> Option<Value> {
        let text = |name: &str| source.get(name).and_then(Value::as_str);
        let is_picture =
            text("type") == Some("url") || text("media_type").is_none_or(|kind| kind.starts_with("image/"));
        is_picture.then(|| {
            let data = self.replace_picture(text("data").unwrap_or_default());
            json!({ "type": "base64", "media_type": "image/png", "data": data })
        })
    }

    fn replace_picture(&self, data: &str) -> String {
        let size = media::size_for(data);
        if self.take_budget(media::picture_cost(size)) { media::encode_picture(size) } else { String::new() }
    }

    fn replace_audio(&self, sound: &Map<String, Value>) -> Value {
        let data = sound.get("data").or_else(|| sound.get("url")).and_then(Value::as_str);
        let seconds = media::sound_seconds(data.unwrap_or_default());
        let data = if self.take_budget(media::sound_cost(seconds)) {
            media::encode_sound(seconds)
        } else {
            String::new()
        };
        json!({ "data": data, "format": "wav" })
    }
}

fn adapter_numbers(one: &Value) -> Value {
    let fields = one.as_object().into_iter().flatten();
    let kept =
        fields.filter(|(name, value)| LISTS.adapter_fields.contains(name.as_str()) && value.is_number());
    Value::Object(kept.map(|(name, value)| (name.clone(), value.clone())).collect())
}

#[cfg(test)]
mod tests;
