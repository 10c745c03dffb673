//! Imports llama-swap's `peers`: models served by other endpoints.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::imported::{ImportedConfig, ImportedModel, ImportedRemote, ImportedSelector};
use super::llama_swap::{import_filters, report_unsupported, text_list, text_of};
use super::yaml::unset_variable;

const PEER_KEYS: &str = "proxy apiKey models filters";

const UNSUPPORTED_PEER_KEYS: [(&str, &str); 3] = [
    ("timeouts", "`timeout` of a model in `[remotes]` is for a whole answer"),
    ("headers", HEADERS_NOTE),
    ("setHeaders", HEADERS_NOTE),
];
const HEADERS_NOTE: &str =
    "an endpoint gets the key in `key_file`, and what clients send but for their own keys and cookies";

const KEY_FILE_ADVICE: &str =
    "write it into a file of its own that nobody else can read, and name that in `key_file`";

/// Names each model `PEER/MODEL`, or only `MODEL` if no other model has that name.
pub(super) fn import_peers(top: &Map<String, Value>, imported: &mut ImportedConfig) {
    let models = imported.models.iter().flat_map(ImportedModel::all_names);
    let remotes = imported.remotes.iter().flat_map(ImportedRemote::all_names);
    let mut taken: BTreeSet<String> = models.chain(remotes).cloned().collect();
    let peers = || top.get("peers").and_then(Value::as_object).into_iter().flatten();
    let mut counts = BTreeMap::<String, usize>::new();
    for (_, table) in peers() {
        let own: BTreeSet<String> = text_list(table.get("models")).into_iter().collect();
        for name in own {
            *counts.entry(name).or_default() += 1;
        }
    }
    for (peer, table) in peers() {
        let of = format!("peer `{peer}`: ");
        let Some(table) = table.as_object() else {
            imported.add_unsupported(
                format!("the peer `{peer}`"),
                "`[remotes]` has a table for each model, with its `url`",
            );
            continue;
        };
        report_unsupported(table, PEER_KEYS, &UNSUPPORTED_PEER_KEYS, None, imported);
        let url = text_of(table, "proxy").filter(|url| unset_variable(url).is_none());
        let Some(url) = url else {
            imported.add_unsupported(
                format!("the peer `{peer}`, which has no `proxy`"),
                "`url` of a model in `[remotes]`",
            );
            continue;
        };
        let has_key = text_of(table, "apiKey").is_some();
        if has_key {
            imported.add_unsupported(format!("{of}its key"), KEY_FILE_ADVICE);
        }
        for own in text_list(table.get("models")) {
            let whole = format!("{peer}/{own}");
            if !taken.insert(whole.clone()) {
                imported.add_unsupported(
                    format!("{of}its model `{own}`"),
                    "the name `PEER/MODEL` is another model's: give it one in `[remotes]`",
                );
                continue;
            }
            let is_free = counts.get(&own) == Some(&1) && taken.insert(own.clone());
            let (name, aliases, called) =
                if is_free { (own, vec![whole], None) } else { (whole, Vec::new(), Some(own)) };
            let requests = import_filters(table.get("filters"), &name, &mut Vec::new(), imported);
            let key_file = has_key.then(|| format!("{peer}.key"));
            let url = url.clone();
            imported.remotes.push(ImportedRemote { name, url, model: called, aliases, key_file, requests });
        }
    }
    import_selectors(top, imported);
}

/// A selector is a name for the first loaded one of several models, or always for the first model.
fn import_selectors(top: &Map<String, Value>, imported: &mut ImportedConfig) {
    for (name, selector) in top.get("selectors").and_then(Value::as_object).into_iter().flatten() {
        let targets = text_list(selector.get("targets"));
        let real = |target: &String| {
            let here = imported.models.iter().find(|model| model.answers_to(target)).map(|model| &model.name);
            let there = imported.remotes.iter().find(|remote| remote.all_names().any(|own| own == target));
            here.or(there.map(|remote| &remote.name)).cloned()
        };
        let mut models: Vec<String> = Vec::new();
        for model in targets.iter().filter_map(real) {
            if !models.contains(&model) {
                models.push(model);
            }
        }
        match selector["strategy"].as_str() {
            Some("pin") => models.truncate(1),
            Some("warm") => {}
            _ => {
                let nearest =
                    "a name in `[names]` means the best of several models that is loaded or has room";
                imported.add_unsupported(format!("the selector `{name}`"), nearest);
                continue;
            }
        }
        if models.is_empty() {
            imported.add_unsupported(
                format!("the selector `{name}`"),
                "none of its models is in what was imported",
            );
            continue;
        }
        for key in ["name", "description", "metadata", "unlisted"] {
            if !matches!(selector[key], Value::Null | Value::Bool(false)) {
                imported.add_unsupported(
                    format!("the selector `{name}`: `{key}`"),
                    "a list has of a name what it has of its model",
                );
            }
        }
        imported.selectors.push(ImportedSelector { name: name.clone(), models });
    }
}
