//! The JSON Schema of the configuration: its keys and their values.
//!
//! A section with compiled-in defaults gets its schema from `defaults.toml` (default and reason of each
//! key) and from the section's type (meaning and range). So a key cannot exist in one of them and be
//! missing in the other. All other schemas come from the types in [`crate::settings`]. Validation and
//! docs/configuration.md use the same schema.
//!
//! Keys that are not public appear only in the schema of `[internal]`: see `compiled_in`.

pub(crate) mod compiled_in;
#[cfg(test)]
mod markdown_tests;
pub mod root;
#[cfg(test)]
mod tests;
pub mod validate;
mod values;

use std::borrow::Cow;
use std::sync::LazyLock;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};
use warden_policies::ByteSize;
use warden_policies::defaults::{
    AcceptedValues, DEFAULTS_TEXT, DefaultsKey, DefaultsSection, parse_duration,
};

/// Text in a key's description that precedes the default and its reason.
pub const DEFAULT_PREFIX: &str = "Default: ";

/// Names of formats of text values, which the validation checks.
pub mod format {
    /// A duration: `30s`, `1h30m`.
    pub const DURATION: &str = "duration-text";
    /// A duration within which work must be possible, so that a least and a greatest value apply.
    pub const LIMIT_OF_WORK: &str = "limit-of-work";
    /// Schema key with the shortest accepted duration.
    pub const MIN_DURATION: &str = "x-least";
    /// Schema key with the longest accepted duration.
    pub const MAX_DURATION: &str = "x-most";
    /// A size: `12GiB`, or a number of bytes.
    pub const SIZE: &str = "size";
    /// A memory limit: `12GiB`, or `80%`.
    pub const LIMIT: &str = "memory-limit";
    /// A memory budget: `12GiB`, `80%`, or `auto`.
    pub const BUDGET: &str = "memory-budget";
    /// Times of day: `02:00-05:00`, or a list of such windows.
    pub const WINDOWS: &str = "times-of-day";
    /// Allowed origins: `mirror`, `off`, or a list of origins.
    pub const ORIGINS: &str = "origins";
    /// Accepted host names: `auto`, `any`, or a list of names.
    pub const NAMES: &str = "host-names";
    /// Any JSON value.
    pub const JSON: &str = "json";
    /// Path of a file or a directory, relative to the configuration file.
    pub const PATH: &str = "path";
    /// A git source: `https://example.org/llama.cpp#v1`, or an absolute path.
    pub const GIT: &str = "git-source";
}

/// Schema of a file or a directory.
pub fn path(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": format::PATH })
}

/// Schema of a list of files or directories.
pub fn paths(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "string", "format": format::PATH } })
}

/// Schema of an age, such as `24h`; at least 1 s, because a shorter age is always exceeded.
pub fn age(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string", "format": format::DURATION, format::MIN_DURATION: "1s", "examples": ["24h", "7d"],
    })
}

/// Schema of a memory limit, such as `12GiB` or `80%`.
pub fn limit(_: &mut SchemaGenerator) -> Schema {
    let examples = ["12GiB", "80%"];
    json_schema!({ "type": ["string", "integer"], "format": format::LIMIT, "minimum": 1, "examples": examples })
}

/// Schema of a memory budget, such as `12GiB`, `80%` or `auto`.
pub fn budget(_: &mut SchemaGenerator) -> Schema {
    let examples = ["12GiB", "80%", "auto"];
    json_schema!({ "type": ["string", "integer"], "format": format::BUDGET, "minimum": 1, "examples": examples })
}

/// Schema of times of day, such as `02:00-05:00`.
pub fn windows(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["string", "array"], "items": { "type": "string" }, "format": format::WINDOWS,
        "examples": ["02:00-05:00", ["02:00-05:00", "12:30-13:00"]],
    })
}

/// Schema of the mode in which an operator's system prompt is combined with the client's.
pub fn system_prompt_mode(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["missing", "prepend", "replace"] })
}

/// Schema of the rule that chooses among several models that share a name.
pub fn choose(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["loaded", "room"] })
}

/// Schema of request parameters with their values.
pub fn parameters(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": { "format": format::JSON } })
}

/// Schema of the public keys in a section of `defaults.toml`.
pub struct SectionSchema<T>(std::marker::PhantomData<T>);

impl<T: DefaultsSection> JsonSchema for SectionSchema<T> {
    fn schema_name() -> Cow<'static, str> {
        T::NAME.into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        section_schema(T::NAME, T::KEYS.iter().filter(|key| key.is_public))
    }
}

/// Schema of a table whose name the operator chooses.
pub struct NamedTable<T>(std::marker::PhantomData<T>);

impl<T: JsonSchema> JsonSchema for NamedTable<T> {
    fn schema_name() -> Cow<'static, str> {
        format!("One{}", T::schema_name()).into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        close_schema(T::json_schema(generator), &[])
    }
}

/// Keys that can be set only for a single model, not for all models.
pub const SINGLE_MODEL_KEYS: [&str; 7] =
    ["model", "command", "ready", "aliases", "listing", "upstream_model", "with"];

/// Schema of the settings for all models: the settings of a model without [`SINGLE_MODEL_KEYS`].
pub struct AllModels<T>(std::marker::PhantomData<T>);

impl<T: JsonSchema> JsonSchema for AllModels<T> {
    fn schema_name() -> Cow<'static, str> {
        "AllModels".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        close_schema(T::json_schema(generator), &SINGLE_MODEL_KEYS)
    }
}

fn close_schema(mut schema: Schema, without: &[&str]) -> Schema {
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.retain(|key, _| !without.contains(&key.as_str()));
    }
    schema.insert("additionalProperties".to_owned(), json!(false));
    schema
}

/// Returns the schema of some keys in a section of `defaults.toml`.
pub(crate) fn section_schema<'a>(name: &str, keys: impl Iterator<Item = &'a DefaultsKey>) -> Schema {
    let mut properties = Map::new();
    let table = defaults_document().get(name).and_then(toml_edit::Item::as_table);
    for key in keys {
        let Some((table, item)) = table.and_then(|table| Some((table, table.get(key.name)?))) else {
            continue;
        };
        let meaning = key.meaning.trim();
        if key.takes == AcceptedValues::Sources
            && let Some(names) = item.as_table()
        {
            properties.insert(key.name.to_owned(), extensible_table(names, meaning));
            continue;
        }
        let Some(value) = item.as_value() else { continue };
        let mut schema = value_schema(key.takes, value);
        let reason = table.key(key.name).map(key_reason).unwrap_or_default();
        let text = format!("{meaning} {DEFAULT_PREFIX}{}. {reason}", value.to_string().trim());
        schema.insert("description".to_owned(), json!(text));
        schema.insert("default".to_owned(), plain_json(value));
        properties.insert(key.name.to_owned(), Value::Object(schema));
    }
    let mut schema = Map::new();
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("properties".to_owned(), Value::Object(properties));
    schema.insert("additionalProperties".to_owned(), json!(false));
    schema.into()
}

/// Returns the default of a key as TOML text; `None` for a table.
pub(crate) fn default_text(section: &str, key: &str) -> Option<String> {
    let value = defaults_document().get(section)?.as_table()?.get(key)?.as_value()?;
    Some(value.to_string().trim().to_owned())
}

/// Returns the schema of a table in the defaults to which operators may add names.
fn extensible_table(table: &toml_edit::Table, meaning: &str) -> Value {
    let known = table.iter().filter_map(|(key, item)| {
        let value = item.as_value()?;
        let reason = table.key(key).map(key_reason).unwrap_or_default();
        let text = format!("{DEFAULT_PREFIX}{}. {reason}", value.to_string().trim());
        Some((
            key.to_owned(),
            json!({ "type": "string", "format": format::GIT, "description": text, "default": plain_json(value) }),
        ))
    });
    json!({
        "type": "object",
        "description": meaning,
        "properties": known.collect::<Map<String, Value>>(),
        "additionalProperties": { "type": "string", "format": format::GIT },
    })
}

/// `defaults.toml` with its comments.
fn defaults_document() -> &'static toml_edit::DocumentMut {
    static DOCUMENT: LazyLock<toml_edit::DocumentMut> =
        LazyLock::new(|| DEFAULTS_TEXT.parse().unwrap_or_default());
    &DOCUMENT
}

/// Returns the comment above a key in `defaults.toml`, which gives the reason for its default.
fn key_reason(key: &toml_edit::Key) -> String {
    let prefix = key.leaf_decor().prefix().and_then(toml_edit::RawString::as_str).unwrap_or_default();
    let lines = prefix.lines().map(|line| line.trim().trim_start_matches('#').trim());
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

fn value_schema(takes: AcceptedValues, default: &toml_edit::Value) -> Map<String, Value> {
    let schema = match takes {
        AcceptedValues::Usual | AcceptedValues::Sources => schema_of_default(default),
        AcceptedValues::Path => json!({ "type": "string", "format": format::PATH }),
        AcceptedValues::OneOf(words) => json!({ "type": "string", "enum": words }),
        AcceptedValues::Whole(least, i64::MAX) => json!({ "type": "integer", "minimum": least }),
        AcceptedValues::Whole(least, most) => json!({ "type": "integer", "minimum": least, "maximum": most }),
        AcceptedValues::Share => json!({ "type": "number", "minimum": 0, "maximum": 1 }),
        AcceptedValues::AtLeast(least) => {
            json!({ "type": "string", "format": format::DURATION, format::MIN_DURATION: least })
        }
        AcceptedValues::Within(least, most) => {
            let form = format::LIMIT_OF_WORK;
            json!({ "type": "string", "format": form, format::MIN_DURATION: least, format::MAX_DURATION: most })
        }
        AcceptedValues::Origins => json!({
            "type": ["string", "array"], "items": { "type": "string" }, "format": format::ORIGINS,
            "examples": ["mirror", "off", ["https://app.example"]],
        }),
        AcceptedValues::Names => json!({
            "type": ["string", "array"], "items": { "type": "string" }, "format": format::NAMES,
            "examples": ["auto", "any", ["llm.example"]],
        }),
    };
    match schema {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Returns the schema of a key that accepts any value of the same type as its default.
fn schema_of_default(default: &toml_edit::Value) -> Value {
    match default {
        toml_edit::Value::Integer(_) => json!({ "type": "integer", "minimum": 0 }),
        toml_edit::Value::Float(_) => json!({ "type": "number", "minimum": 0 }),
        toml_edit::Value::Boolean(_) => json!({ "type": "boolean" }),
        toml_edit::Value::String(text) if parse_duration(text.value()).is_ok() => {
            json!({ "type": "string", "format": format::DURATION })
        }
        toml_edit::Value::String(text) if text.value().parse::<ByteSize>().is_ok() => {
            json!({ "type": ["string", "integer"], "format": format::SIZE, "minimum": 0 })
        }
        _ => json!({ "type": "string" }),
    }
}

fn plain_json(value: &toml_edit::Value) -> Value {
    match value {
        toml_edit::Value::Integer(number) => json!(number.value()),
        toml_edit::Value::Float(number) => json!(number.value()),
        toml_edit::Value::Boolean(flag) => json!(flag.value()),
        toml_edit::Value::String(text) => json!(text.value()),
        other => json!(other.to_string()),
    }
}
