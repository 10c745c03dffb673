//! Imports a model's entry in llama-swap's `/v1/models`: name, description, capabilities and metadata.

use serde_json::{Map, Value, json};

use super::imported::{ImportedConfig, ImportedModel};

const MODALITIES: [&str; 3] = ["text", "image", "audio"];
/// Leaves room for the rest of `listing`.
const MAX_METADATA_BYTES: usize = 12 << 10;

pub(super) fn import_listing(
    table: &Map<String, Value>,
    model: &mut ImportedModel,
    imported: &mut ImportedConfig,
) {
    for key in ["name", "description"] {
        let text = table.get(key).and_then(Value::as_str).map(str::trim).filter(|text| !text.is_empty());
        model.listing.extend(text.map(|text| (key, Value::from(text))));
    }
    if table.get("unlisted") == Some(&Value::Bool(true)) {
        model.listing.push(("hidden", Value::Bool(true)));
    }
    let able = table.get("capabilities").and_then(Value::as_object);
    let able =
        able.map(|able| import_capabilities(able, &model.name, imported)).filter(|able| !able.is_empty());
    model.listing.extend(able.map(|able| ("capabilities", Value::Object(able))));
    let metadata = table
        .get("metadata")
        .map(without_nulls)
        .filter(|all| all.as_object().is_some_and(|all| !all.is_empty()));
    match metadata {
        Some(all) if all.to_string().len() > MAX_METADATA_BYTES => {
            imported.add_unsupported_of(&model.name, "`metadata`", "`listing.metadata` takes 12 KiB");
        }
        all => model.listing.extend(all.map(|all| ("metadata", all))),
    }
}

fn import_capabilities(
    table: &Map<String, Value>,
    model: &str,
    imported: &mut ImportedConfig,
) -> Map<String, Value> {
    let mut all = Map::new();
    for (key, value) in table {
        let taken = match (key.as_str(), value) {
            (_, Value::Null | Value::Bool(false)) => continue,
            ("in" | "out", Value::Array(kinds)) => {
                let known = |kind: &&Value| kind.as_str().is_some_and(|kind| MODALITIES.contains(&kind));
                let kinds: Vec<&Value> = kinds.iter().filter(known).collect();
                if kinds.is_empty() {
                    continue;
                }
                json!(kinds)
            }
            ("tools" | "reranker", Value::Bool(true)) => Value::Bool(true),
            ("context", Value::Number(_) | Value::String(_)) => {
                match super::yaml::plain_text(value).parse::<u64>() {
                    Ok(0) => continue,
                    Ok(tokens) => json!(tokens),
                    Err(_) => {
                        imported.add_unsupported_of(
                            model,
                            "`capabilities.context`",
                            "this is no number of tokens",
                        );
                        continue;
                    }
                }
            }
            _ => {
                let nearest = "`listing.capabilities` has `in`, `out`, `tools`, `reranker` and `context`";
                imported.add_unsupported_of(model, format!("`capabilities.{key}`"), nearest);
                continue;
            }
        };
        all.insert(key.clone(), taken);
    }
    all
}

/// TOML has no null.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().filter(|one| !one.is_null()).map(without_nulls).collect(),
        Value::Object(map) => {
            let pairs = map.iter().filter(|(_, one)| !one.is_null());
            Value::Object(pairs.map(|(key, one)| (key.clone(), without_nulls(one))).collect())
        }
        other => other.clone(),
    }
}
