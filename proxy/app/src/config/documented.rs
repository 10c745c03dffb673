//! docs/configuration.md against the schema: each key has one row in its section, with its default, and no row is of a key
//! that does not exist.

use serde_json::Value;

use super::schema::{FLEET_WIDE, root};

fn at(path: &[&str]) -> &'static Value {
    path.iter().fold(root(), |schema, key| &schema["properties"][key])
}

/// The rows of each section of the documentation: section, key, default as written.
fn documented() -> Vec<(String, String, String)> {
    let mut section = String::new();
    let mut rows = Vec::new();
    for line in include_str!("../../../../docs/configuration.md").lines() {
        if let Some(title) = line.strip_prefix('#') {
            let title = title.trim_start_matches('#').trim();
            let name = title.strip_prefix('[').and_then(|title| title.strip_suffix(']'));
            section = name.unwrap_or_default().to_owned();
        }
        let cells: Vec<&str> = line.split(" | ").collect();
        if let [key, _, default, _, ..] = cells.as_slice()
            && let Some(key) = key.strip_prefix("| `").and_then(|key| key.strip_suffix('`'))
            && !section.is_empty()
        {
            rows.push((section.clone(), key.to_owned(), (*default).to_owned()));
        }
    }
    rows
}

/// The keys of the schema: section of the documentation, key, default.
fn keys() -> Vec<(&'static str, String, &'static Value)> {
    let mut all = Vec::new();
    let mut see = |section: &'static str, prefix: &str, schema: &'static Value| {
        for (key, schema) in schema["properties"].as_object().unwrap() {
            if !schema["properties"].is_object() {
                all.push((section, format!("{prefix}{key}"), &schema["default"]));
            }
        }
    };
    for section in [
        "server", "admin", "paths", "log", "upstream", "sensors", "growth", "health", "child", "build",
        "diagnose",
    ] {
        see(section, "", at(&[section]));
    }
    see("build.sources", "", at(&["build", "sources"]));
    let model = &at(&["models"])["additionalProperties"];
    see("models.\"name\"", "", model);
    for (section, part) in [
        ("models.\"name\".queue", "queue"),
        ("models.\"name\".quarantine", "quarantine"),
        ("models.\"name\".lifecycle", "lifecycle"),
        ("models.\"name\".policy", "policy"),
        ("models.\"name\".request", "request"),
    ] {
        see(section, "", &model["properties"][part]);
    }
    for (memory, prefix) in [("host", "host."), ("vram", "vram.")] {
        see("models.\"name\".policy", prefix, &model["properties"]["policy"]["properties"][memory]);
        see("shared", prefix, at(&["shared", memory]));
    }
    for (part, prefix) in [("lifecycle", "lifecycle."), ("policy", "policy.")] {
        for (key, schema) in at(&["defaults", part])["properties"].as_object().unwrap() {
            if FLEET_WIDE.contains(&key.as_str()) {
                all.push(("defaults", format!("{prefix}{key}"), &schema["default"]));
            }
        }
    }
    all
}

#[test]
fn the_documentation_has_every_key_once_in_its_section_with_its_default_and_no_other() {
    let mut rows = documented();
    assert!(rows.len() > 200, "the tables are gone: {}", rows.len());
    let mut wrong = Vec::new();
    for (section, key, default) in keys() {
        let (own, others): (Vec<_>, Vec<_>) =
            rows.into_iter().partition(|(at, name, _)| at == section && *name == key);
        rows = others;
        match own.as_slice() {
            [] => wrong.push(format!("[{section}] `{key}` = {default} has no row")),
            [(_, _, told)] if !default.is_null() && *told != format!("`{default}`") => {
                wrong.push(format!("[{section}] `{key}` is {default}, and the row says {told}"));
            }
            [_] => {}
            several => wrong.push(format!("[{section}] `{key}` has {} rows", several.len())),
        }
    }
    wrong.extend(rows.into_iter().map(|(section, key, _)| format!("[{section}] there is no key `{key}`")));
    assert_eq!(wrong, Vec::<String>::new(), "docs/configuration.md");
}
