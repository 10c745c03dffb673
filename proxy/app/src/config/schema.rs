//! The JSON Schema of the configuration: what keys exist, and what each takes.
//!
//! Sections that have compiled-in defaults get their schema from `defaults.toml` itself (key, kind of value, default,
//! and the reason as description), so that a key cannot exist in one and be missing in the other. The rest comes from
//! the types in [`super::settings`]. The validation walks this same schema, so that what is published is what is checked.

use std::borrow::Cow;
use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};
use warden_policies::ByteSize;
use warden_policies::defaults::{self, TEXT, parse_duration};

/// Keys of `[lifecycle]` and `[recycle]` in the defaults that hold for all models at once, so that they are taken in
/// `[defaults.lifecycle]` and `[defaults.policy]` but not under one model.
pub(crate) const FLEET_WIDE: [&str; 4] =
    ["failures_told", "unknown_slots", "overlap_headroom", "overlap_floor"];

/// Sections of the defaults that are no keys of a configuration: the numbers behind `auto` and behind admission. `config
/// show --defaults` prints them with their reasons.
pub(crate) const COMPILED_IN: [&str; 3] = ["levels", "moment", "admission"];

/// Whether a key of `[diagnose]` is a key of a configuration.
pub(crate) fn is_set_in_diagnose(key: &str) -> bool {
    defaults::DiagnoseKeys::KEYS.iter().any(|(own, _)| *own == key)
}

/// The schema of a whole configuration file.
pub(crate) fn root() -> &'static Value {
    static ROOT: LazyLock<Value> = LazyLock::new(|| {
        let settings = SchemaSettings::draft2020_12()
            .with(|settings| settings.inline_subschemas = true)
            // Nothing in a configuration file is required: every key has a default.
            .with_transform(RecursiveTransform(|schema: &mut Schema| {
                schema.remove("required");
                without_null(schema);
            }));
        let mut root = settings.into_generator().into_root_schema_for::<super::settings::Settings>();
        root.insert("title".to_owned(), json!("llama-warden configuration"));
        root.to_value()
    });
    &ROOT
}

/// The part of it that is one model's `policy`.
pub(crate) fn policy() -> &'static Value {
    &root()["properties"]["models"]["additionalProperties"]["properties"]["policy"]
}

/// TOML has no null: an absent key says the same.
fn without_null(schema: &mut Schema) {
    let Some(Value::Array(kinds)) = schema.get_mut("type") else { return };
    kinds.retain(|kind| kind != "null");
    if let [only] = kinds.as_slice() {
        let only = only.clone();
        schema.insert("type".to_owned(), only);
    }
}

/// What kind of text a value is; the validation knows these by name.
pub(crate) mod format {
    /// `30s`, `1h30m`.
    pub(crate) const DURATION: &str = "duration-text";
    /// The same, long enough for work to be done in it, and not for ever.
    pub(crate) const LIMIT_OF_WORK: &str = "limit-of-work";
    /// The key with the shortest duration that is taken.
    pub(crate) const LEAST: &str = "x-least";
    /// The key with the longest one.
    pub(crate) const MOST: &str = "x-most";
    /// `12GiB`, or a number of bytes.
    pub(crate) const SIZE: &str = "size";
    /// `12GiB`, or `80%`.
    pub(crate) const LIMIT: &str = "memory-limit";
    /// `12GiB`, `80%`, or `auto`.
    pub(crate) const BUDGET: &str = "memory-budget";
    /// `02:00-05:00`, or a list of such.
    pub(crate) const WINDOWS: &str = "times-of-day";
    /// `mirror`, `off`, or a list of origins.
    pub(crate) const ORIGINS: &str = "origins";
    /// `auto`, `any`, or a list of host names.
    pub(crate) const NAMES: &str = "host-names";
    /// Whatever JSON can say.
    pub(crate) const JSON: &str = "json";
    /// A file or a directory; in a configuration file relative to that file.
    pub(crate) const PATH: &str = "path";
    /// `https://example.org/llama.cpp#v1`, or an absolute path.
    pub(crate) const GIT: &str = "git-source";
}

/// A file or a directory.
pub(crate) fn path(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": format::PATH })
}

/// An age, such as `24h`: nothing is always too old.
pub(crate) fn age(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": format::DURATION, format::LEAST: "1s", "examples": ["24h", "7d"] })
}

/// A budget, such as `12GiB` or `80%`.
pub(crate) fn limit(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "integer"], "format": format::LIMIT, "minimum": 1, "examples": ["12GiB", "80%"] })
}

/// A budget, such as `12GiB`, `80%` or `auto`.
pub(crate) fn budget(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "integer"], "format": format::BUDGET, "minimum": 1, "examples": ["12GiB", "80%", "auto"] })
}

/// Times of day, such as `02:00-05:00`.
pub(crate) fn windows(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["string", "array"], "items": { "type": "string" }, "format": format::WINDOWS,
        "examples": ["02:00-05:00", ["02:00-05:00", "12:30-13:00"]],
    })
}

/// How a generation is replaced.
pub(crate) fn replace(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["auto", "sequential", "overlap"] })
}

/// How an operator's system prompt stands to the client's own.
pub(crate) fn system_prompt_mode(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["missing", "prepend", "replace"] })
}

/// Parameters of a request with their values.
pub(crate) fn parameters(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": { "format": format::JSON } })
}

/// How work for clients that left is ended.
pub(crate) fn cancel(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["auto", "assemble", "off"] })
}

/// What a process listens on.
pub(crate) fn socket(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["auto", "unix", "tcp"] })
}

/// Defines a type whose schema is a section of `defaults.toml`.
macro_rules! default_sections {
    ($($name:ident = $section:literal in $type:ident without $left_out:expr;)*) => { $(
        /// The schema of one section of the defaults.
        pub(crate) struct $name;
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }
            fn inline_schema() -> bool {
                true
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                section($section, defaults::$type::KEYS, &$left_out)
            }
        }
    )* };
}

default_sections! {
    Server = "server" in Server without [];
    Upstream = "upstream" in Upstream without [];
    Sensors = "sensors" in Sensors without [];
    Growth = "growth" in Growth without [];
    Health = "health" in Health without [];
    Child = "child" in Child without [];
    Build = "build" in Build without [];
    Log = "log" in Log without [];
    Queue = "queue" in Queue without [];
    Quarantine = "quarantine" in Quarantine without [];
    Lifecycle = "lifecycle" in Lifecycle without [];
    ModelLifecycle = "lifecycle" in Lifecycle without FLEET_WIDE;
    Recycle = "recycle" in Recycle without [];
    ModelRecycle = "recycle" in Recycle without FLEET_WIDE;
}

/// The schema of what can be set of `[diagnose]`.
pub(crate) struct Diagnose;

impl JsonSchema for Diagnose {
    fn schema_name() -> Cow<'static, str> {
        "Diagnose".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let all = defaults::Diagnose::KEYS.iter().map(|(key, _)| *key);
        let left_out: Vec<&str> = all.filter(|key| !is_set_in_diagnose(key)).collect();
        section("diagnose", defaults::DiagnoseKeys::KEYS, &left_out)
    }
}

fn section(name: &str, meanings: &[(&str, &str)], left_out: &[&str]) -> Schema {
    let mut properties = Map::new();
    if let Some(table) = defaults_document().get(name).and_then(toml_edit::Item::as_table) {
        for (key, item) in table.iter().filter(|(key, _)| !left_out.contains(key)) {
            let reason = table.key(key).map(reason).unwrap_or_default();
            let meaning =
                meanings.iter().find(|(name, _)| *name == key).map_or("", |(_, meaning)| meaning.trim());
            if let Some(names) = item.as_table() {
                properties.insert(key.to_owned(), named(names, meaning));
                continue;
            }
            let Some(value) = item.as_value() else { continue };
            let mut schema = value_schema(name, key, value);
            let value_text = value.to_string();
            let text = format!("{meaning} Default: {}. {reason}", value_text.trim());
            schema.insert("description".to_owned(), json!(text));
            schema.insert("default".to_owned(), plain(value));
            properties.insert(key.to_owned(), Value::Object(schema));
        }
    }
    let mut schema = Map::new();
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("properties".to_owned(), Value::Object(properties));
    schema.insert("additionalProperties".to_owned(), json!(false));
    schema.into()
}

/// A table of the defaults to which people add names of their own.
fn named(table: &toml_edit::Table, meaning: &str) -> Value {
    let known = table.iter().filter_map(|(key, item)| {
        let value = item.as_value()?;
        let reason = table.key(key).map(reason).unwrap_or_default();
        let text = format!("Default: {}. {reason}", value.to_string().trim());
        Some((
            key.to_owned(),
            json!({ "type": "string", "format": format::GIT, "description": text, "default": plain(value) }),
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
    static DOCUMENT: LazyLock<toml_edit::DocumentMut> = LazyLock::new(|| TEXT.parse().unwrap_or_default());
    &DOCUMENT
}

/// The comment above a key.
fn reason(key: &toml_edit::Key) -> String {
    let prefix = key.leaf_decor().prefix().and_then(toml_edit::RawString::as_str).unwrap_or_default();
    let lines = prefix.lines().map(|line| line.trim().trim_start_matches('#').trim());
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// What a key takes, read off its default. The few keys with a smaller range are named here.
fn value_schema(section: &str, key: &str, default: &toml_edit::Value) -> Map<String, Value> {
    let schema = match (section, key) {
        ("server", "cors") => json!({
            "type": ["string", "array"], "items": { "type": "string" }, "format": format::ORIGINS,
            "examples": ["mirror", "off", ["https://app.example"]],
        }),
        ("server", "names") => json!({
            "type": ["string", "array"], "items": { "type": "string" }, "format": format::NAMES,
            "examples": ["auto", "any", ["llm.example"]],
        }),
        ("server", "tls_cert" | "tls_key" | "keys") | ("log", "access") => {
            json!({ "type": "string", "format": format::PATH })
        }
        ("log", "format") => json!({ "type": "string", "enum": ["text", "json"] }),
        ("child", "oom_score_adj") => json!({ "type": "integer", "minimum": -1000, "maximum": 1000 }),
        ("server", "port") => json!({ "type": "integer", "minimum": 0, "maximum": 65535 }),
        ("diagnose", "requests" | "sweep_most") => json!({ "type": "integer", "minimum": 1 }),
        ("diagnose", "leg_limit" | "request_limit") => {
            json!({ "type": "string", "format": format::LIMIT_OF_WORK, format::LEAST: "1s", format::MOST: "365d" })
        }
        // Without any time nothing could be done within it, or it would be done without a pause.
        (
            "server",
            "header_timeout"
            | "body_timeout"
            | "tls_handshake_timeout"
            | "tls_check"
            | "send_timeout"
            | "h2_reset_window"
            | "h2_ping"
            | "h2_ping_timeout",
        )
        | (
            "lifecycle",
            "start_timeout" | "start_probe_interval" | "probe_interval" | "probe_timeout" | "breaker_window",
        )
        | (
            "health",
            "wedged_after" | "wedged_unseen" | "speed_window" | "offload_retry" | "offload_retry_most",
        )
        | ("upstream", "connect_timeout" | "exchange_timeout" | "stream_idle")
        | ("sensors", "interval" | "confirm_interval" | "read_limit")
        | ("child", "version_timeout")
        | ("build", "page_timeout" | "verify_timeout") => {
            json!({ "type": "string", "format": format::DURATION, format::LEAST: "1ms" })
        }
        ("recycle", "growth") => json!({ "type": "string", "enum": ["off", "observe", "recycle"] }),
        ("recycle", "admission") => json!({ "type": "string", "enum": ["off", "warn", "enforce"] }),
        // A test costs the square of its window.
        ("growth", "window" | "kept") => json!({ "type": "integer", "minimum": 8, "maximum": 1024 }),
        ("growth", "scales") => json!({ "type": "integer", "minimum": 1, "maximum": 16 }),
        ("growth", "test_every" | "tests" | "baseline_floors" | "settle_floors" | "floor_steps")
        | ("health", "compute_errors" | "speed_readings" | "speed_baseline" | "speed_persists") => {
            json!({ "type": "integer", "minimum": 1, "maximum": 1024 })
        }
        ("growth", "persist_ratio" | "brake_ratio" | "jump_rest" | "prior_ratio" | "blame_share")
        | ("health", "speed_slow" | "offload_layers" | "offload_vram")
        | ("recycle", "jitter") => json!({ "type": "number", "minimum": 0, "maximum": 1 }),
        _ => match default {
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
        },
    };
    match schema {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn plain(value: &toml_edit::Value) -> Value {
    match value {
        toml_edit::Value::Integer(number) => json!(number.value()),
        toml_edit::Value::Float(number) => json!(number.value()),
        toml_edit::Value::Boolean(flag) => json!(flag.value()),
        toml_edit::Value::String(text) => json!(text.value()),
        other => json!(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at<'a>(path: &[&str]) -> &'a Value {
        path.iter().fold(root(), |schema, key| &schema["properties"][key])
    }

    #[test]
    fn every_default_is_a_key_with_its_reason() {
        for (section, table) in defaults_document().iter().filter(|(name, _)| !COMPILED_IN.contains(name)) {
            let place: &[&str] = match section {
                "queue" => &["defaults", "queue"],
                "quarantine" => &["defaults", "quarantine"],
                "lifecycle" => &["defaults", "lifecycle"],
                "recycle" => &["defaults", "policy"],
                "model" => &["defaults"],
                other => &[other],
            };
            let set = |key: &str| section != "diagnose" || is_set_in_diagnose(key);
            for (key, _) in table.as_table().unwrap().iter().filter(|(key, _)| set(key)) {
                let schema = &at(place)["properties"][key];
                assert!(schema.is_object(), "[{section}] {key} is missing in the schema");
                assert!(
                    schema["description"].as_str().is_some_and(|text| text.len() > 20),
                    "[{section}] {key}: {schema}"
                );
            }
        }
    }

    #[test]
    fn values_have_the_kind_of_their_default() {
        assert_eq!(at(&["server", "header_timeout"])["format"], format::DURATION);
        assert_eq!(at(&["server", "body_bytes"])["format"], format::SIZE);
        assert_eq!(at(&["server", "host"])["format"], Value::Null);
        assert_eq!(at(&["build", "sdist_version"])["format"], Value::Null);
        assert_eq!(at(&["build", "sdist_sha256"])["format"], Value::Null);
        assert_eq!(at(&["defaults", "replicas"])["type"], "integer");
    }

    #[test]
    fn what_holds_for_all_models_is_no_key_of_one_model() {
        let model = &at(&["models"])["additionalProperties"];
        assert!(model["properties"]["lifecycle"]["properties"]["start_timeout"].is_object());
        assert!(model["properties"]["lifecycle"]["properties"]["unknown_slots"].is_null());
        assert!(at(&["defaults", "lifecycle", "unknown_slots"]).is_object());
        assert!(model["properties"]["policy"]["properties"]["overlap_floor"].is_null());
        assert!(model["properties"]["policy"]["properties"]["host"]["properties"]["soft"].is_object());
    }

    /// Keys whose value is a text of any kind, and no path.
    const TEXTS: [&str; 15] = [
        "admin.address",
        "build.sdist_sha256",
        "build.sdist_version",
        "build.source",
        "defaults.args[]",
        "defaults.build",
        "defaults.env.*",
        "defaults.mitigations[]",
        "defaults.request.strip[]",
        "defaults.request.system_prompt",
        "log.level",
        "models.*.aliases[]",
        "models.*.upstream_model",
        "server.api_prefix",
        "server.host",
    ];

    #[test]
    fn every_text_is_known_to_be_a_path_or_none() {
        let mut found = Vec::new();
        texts(root(), String::new(), &mut found);
        // What a model has as all models have is told once.
        let inherited = |key: &String| {
            key.strip_prefix("models.*.")
                .is_some_and(|rest| TEXTS.contains(&format!("defaults.{rest}").as_str()))
        };
        found.retain(|key| !inherited(key));
        found.sort();
        assert_eq!(found, TEXTS, "a new text gets `schema::path` or a line here");
    }

    /// Keys of texts that the schema says nothing more about.
    fn texts(schema: &Value, path: String, found: &mut Vec<String>) {
        let plain = schema["format"].is_null() && schema["enum"].is_null();
        if schema["type"] == "string" && plain {
            found.push(path);
            return;
        }
        let under = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        for (key, inner) in schema["properties"].as_object().into_iter().flatten() {
            texts(inner, under(key), found);
        }
        if schema["additionalProperties"].is_object() {
            texts(&schema["additionalProperties"], under("*"), found);
        }
        if schema["items"].is_object() && plain {
            texts(&schema["items"], format!("{path}[]"), found);
        }
    }

    #[test]
    fn nothing_is_required() {
        assert!(!root().to_string().contains("\"required\""));
    }
}
