//! Tests the schema of each kind of key.

use super::root::root_schema;
use super::*;

fn at<'a>(path: &[&str]) -> &'a Value {
    path.iter().fold(root_schema(), |schema, key| &schema["properties"][key])
}

#[test]
fn every_public_key_has_a_meaning_a_default_and_its_reason() {
    fn check(schema: &Value) {
        for (key, inner) in schema["properties"].as_object().into_iter().flatten() {
            let text = inner["description"].as_str().unwrap_or_default();
            assert!(inner["properties"].is_object() || text.len() > 20, "{key}: {inner}");
            check(inner);
        }
    }
    check(root_schema());
    assert!(at(&["server", "tls_handshake_timeout"]).is_null() && at(&["growth"]).is_null());
}

#[test]
fn values_have_the_kind_of_their_default() {
    assert_eq!(at(&["server", "header_timeout"])["format"], format::DURATION);
    assert_eq!(at(&["server", "body_bytes"])["format"], format::SIZE);
    assert_eq!(at(&["server", "host"])["format"], Value::Null);
    assert_eq!(at(&["build", "source"])["format"], Value::Null);
    assert_eq!(at(&["defaults", "replicas"])["type"], "integer");
}

#[test]
fn what_only_one_model_can_have_is_no_default() {
    let model = &at(&["models"])["additionalProperties"];
    assert!(model["properties"]["lifecycle"]["properties"]["start_timeout"].is_object());
    assert!(at(&["defaults", "lifecycle", "start_timeout"]).is_object());
    assert!(model["properties"]["policy"]["properties"]["host"]["properties"]["soft"].is_object());
    for key in SINGLE_MODEL_KEYS {
        assert!(model["properties"][key].is_object() && at(&["defaults", key]).is_null(), "{key}");
    }
}

/// Keys whose value is a text of any kind, and no path.
const TEXTS: [&str; 30] = [
    "admin.address",
    "build.source",
    "defaults.args[]",
    "defaults.build",
    "defaults.env.*",
    "defaults.fallback[]",
    "defaults.groups[]",
    "defaults.mitigations[]",
    "defaults.request.strip[]",
    "defaults.request.system_prompt",
    "defaults.wrapper[]",
    "log.level",
    "models.*.aliases[]",
    "models.*.command[]",
    "models.*.listing.description",
    "models.*.listing.name",
    "models.*.listing.tags[]",
    "models.*.ready",
    "models.*.upstream_model",
    "models.*.with[]",
    "names.*.models[]",
    "probe.address",
    "probe.agent",
    "remotes.*.aliases[]",
    "remotes.*.model",
    "remotes.*.url",
    "server.api_prefix",
    "server.host",
    "telemetry.endpoint",
    "update.track",
];

#[test]
fn every_text_is_known_to_be_a_path_or_none() {
    let mut found = Vec::new();
    texts(root_schema(), String::new(), &mut found);
    // Skip keys of a model that are listed under the defaults.
    let inherited = |key: &String| {
        let tables = ["models.*.", "names.*.", "remotes.*."];
        let rest = tables.iter().find_map(|table| key.strip_prefix(table));
        rest.is_some_and(|rest| TEXTS.contains(&format!("defaults.{rest}").as_str()))
    };
    found.retain(|key| !inherited(key));
    found.sort();
    assert_eq!(found, TEXTS, "a new text gets `schema::path` or a line here");
}

/// Text keys that the schema describes no further.
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
    assert!(!root_schema().to_string().contains("\"required\""));
}

#[test]
fn every_table_says_which_keys_it_takes() {
    fn check(schema: &Value, path: &str) {
        let properties = schema["properties"].as_object();
        assert!(properties.is_none() || !schema["additionalProperties"].is_null(), "{path}");
        for (key, inner) in properties.into_iter().flatten() {
            check(inner, &format!("{path}.{key}"));
        }
        if schema["additionalProperties"].is_object() {
            check(&schema["additionalProperties"], &format!("{path}.*"));
        }
    }
    check(root_schema(), "");
}
