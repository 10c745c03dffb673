//! Compares the tables of docs/configuration.md, one per section, with the schema. Two comments are around each
//! table. The text around the tables is written by hand.

use serde_json::Value;

use super::values::accepts_type;
use crate::printed::{TABLE_END_MARK, check_page};
use crate::schema::root::root_schema;
use crate::schema::{DEFAULT_PREFIX, format};

/// Sections that get a table, each with its path in the schema; `*` stands for any name.
const DOCUMENTED_SECTIONS: [(&str, &[&str]); 27] = [
    ("server", &["server"]),
    ("admin", &["admin"]),
    ("paths", &["paths"]),
    ("log", &["log"]),
    ("telemetry", &["telemetry"]),
    ("probe", &["probe"]),
    ("upstream", &["upstream"]),
    ("sensors", &["sensors"]),
    ("health", &["health"]),
    ("shared", &["shared"]),
    ("child", &["child"]),
    ("loading", &["loading"]),
    ("build", &["build"]),
    ("build.sources", &["build", "sources"]),
    ("diagnose", &["diagnose"]),
    ("proof", &["proof"]),
    ("update", &["update"]),
    ("models.\"name\"", &["models", "*"]),
    ("models.\"name\".request", &["models", "*", "request"]),
    ("models.\"name\".listing", &["models", "*", "listing"]),
    ("models.\"name\".listing.capabilities", &["models", "*", "listing", "capabilities"]),
    ("models.\"name\".queue", &["models", "*", "queue"]),
    ("models.\"name\".quarantine", &["models", "*", "quarantine"]),
    ("models.\"name\".lifecycle", &["models", "*", "lifecycle"]),
    ("models.\"name\".policy", &["models", "*", "policy"]),
    ("remotes.\"name\"", &["remotes", "*"]),
    ("names.\"name\"", &["names", "*"]),
];

fn all_tables() -> String {
    DOCUMENTED_SECTIONS.iter().map(|(section, path)| table(section, path)).collect::<Vec<_>>().join("\n")
}

fn table(section: &str, path: &[&str]) -> String {
    let rows: String = keys(schema_at(path), "").iter().map(|(key, schema)| table_row(key, schema)).collect();
    let head =
        "| key | takes | default | what it means, and why the default is what it is |\n|---|---|---|---|\n";
    format!("{}{head}{rows}{TABLE_END_MARK}", table_start_mark(section))
}

fn table_start_mark(section: &str) -> String {
    format!("<!-- keys of [{section}], written by a test from the schema -->\n")
}

fn schema_at(path: &[&str]) -> &'static Value {
    path.iter().fold(root_schema(), |schema, key| match *key {
        "*" => &schema["additionalProperties"],
        key => &schema["properties"][key],
    })
}

/// Returns the keys of a section, without the keys of nested sections except `host` and `vram`.
fn keys<'a>(schema: &'a Value, prefix: &str) -> Vec<(String, &'a Value)> {
    let mut all = Vec::new();
    for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
        match (key.as_str(), schema["properties"].is_object()) {
            // The keys of these tables are listed with a dot: `host.soft`.
            ("host" | "vram", true) => all.extend(keys(schema, &format!("{key}."))),
            (_, true) => {}
            _ => all.push((format!("{prefix}{key}"), schema)),
        }
    }
    all
}

fn table_row(key: &str, schema: &Value) -> String {
    let text = schema["description"].as_str().unwrap_or_default().replace('\n', " ");
    let (meaning, rest) = text.split_once(DEFAULT_PREFIX).unwrap_or((&text, "none."));
    let (default, reason) = if schema["default"].is_null() {
        let (default, reason) = rest.split_once(". ").unwrap_or((rest.trim_end_matches('.'), ""));
        (default.to_owned(), reason)
    } else {
        let default = schema["default"].to_string();
        let reason = rest.strip_prefix(&default).unwrap_or(rest).trim_start_matches(". ");
        (format!("`{default}`"), reason)
    };
    let reason = if reason.is_empty() { String::new() } else { format!("*{reason}*") };
    let cells = [
        format!("`{key}`"),
        value_text(schema),
        default,
        format!("{} {reason}", meaning.trim()).trim().to_owned(),
    ];
    format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|")).join(" | "))
}

/// Describes the accepted values of a key, in terms that the page explains.
fn value_text(schema: &Value) -> String {
    if let Some(words) = schema["enum"].as_array() {
        return words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    }
    let word = match schema["format"].as_str() {
        Some(format::DURATION | format::LIMIT_OF_WORK) => "duration",
        Some(format::SIZE) => "size",
        Some(format::LIMIT) => "size or share",
        Some(format::BUDGET) => "budget",
        Some(format::WINDOWS) => "times of day",
        Some(format::ORIGINS) => "text or list of origins",
        Some(format::NAMES) => "text or list of host names",
        Some(format::PATH) => "path",
        Some(format::GIT) => "URL or path",
        _ if schema["additionalProperties"]["format"] == format::JSON => "table",
        _ if accepts_type(schema, "object") => "table of text",
        _ if accepts_type(schema, "array") => "list of text",
        _ if accepts_type(schema, "integer") => "whole number",
        _ if accepts_type(schema, "number") => "number",
        _ if accepts_type(schema, "boolean") => "true or false",
        _ => "text",
    };
    word.to_owned()
}

/// With `WARDEN_RENEW_DOCS=1`, writes the page instead.
#[test]
fn the_tables_of_the_documentation_are_those_that_are_printed() {
    let tables =
        DOCUMENTED_SECTIONS.iter().map(|(section, path)| (table_start_mark(section), table(section, path)));
    check_page("configuration.md", tables).unwrap();
}

#[test]
fn every_key_is_in_one_table_and_there_are_not_too_many() {
    let mut listed: Vec<String> = DOCUMENTED_SECTIONS
        .iter()
        .flat_map(|(section, path)| {
            keys(schema_at(path), "").into_iter().map(move |(key, _)| format!("{section}.{key}"))
        })
        .collect();
    let mut all = Vec::new();
    every(root_schema(), "", &mut all);
    listed.sort();
    all.sort();
    assert_eq!(all, listed);
    // Do not count keys of `listing`, which are only displayed.
    let set = all.iter().filter(|key| !key.contains(".listing.")).count();
    assert!(set <= 155, "{set} keys: each new one needs somebody who would set it");
}

/// All keys of the schema. Skips `[defaults]`, which repeats the keys of models, and repeated `request`
/// tables.
fn every(schema: &Value, path: &str, all: &mut Vec<String>) {
    let under = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    for (key, inner) in schema["properties"].as_object().into_iter().flatten() {
        match (inner["properties"].is_object(), inner["additionalProperties"]["properties"].is_object()) {
            _ if path.is_empty() && key == "defaults" => {}
            _ if ["names.\"name\"", "remotes.\"name\""].contains(&path) && key == "request" => {}
            (true, _) => every(inner, &under(key), all),
            (_, true) => every(&inner["additionalProperties"], &format!("{}.\"name\"", under(key)), all),
            _ => all.push(under(key)),
        }
    }
}

#[test]
fn what_a_key_is_stands_in_its_row() {
    let all = all_tables();
    for part in [
        "| `port` | whole number | `8080` | Port to listen on. *llama-server's own default port, so that clients need no change.* |",
        "| `host.soft` | budget | none | ",
        "| `format` | `\"text\"`, `\"json\"` | `\"text\"` | ",
        "| `directory` | path | that of llama-warden | ",
        "| `jitter` | number | `0.1` | ",
        "| `set` | table | none | ",
    ] {
        assert!(all.contains(part), "{part} is missing in\n{all}");
    }
}
