//! llama-swap's `peers`: models that somebody else's endpoint serves.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::llama_swap::{filters, others, texts};
use super::yaml::plain;
use super::{Imported, Model, Remote};

/// Keys of a peer that are read.
const READ: [&str; 4] = ["proxy", "apiKey", "models", "filters"];

/// Those that have no equal, and the nearest thing.
const OF_A_PEER: [(&str, &str); 3] = [
    ("timeouts", "`timeout` of a model in `[remotes]` is for a whole answer"),
    (
        "headers",
        "an endpoint gets the key in `key_file`, and what clients send but for their own keys and cookies",
    ),
    (
        "setHeaders",
        "an endpoint gets the key in `key_file`, and what clients send but for their own keys and cookies",
    ),
];

/// Where a key goes that stood in the file.
const KEY: &str = "write it into a file of its own that nobody else can read, and name that in `key_file`";

/// One model for each that a peer has. What models of this machine are called stays theirs.
pub(super) fn import(top: &Map<String, Value>, imported: &mut Imported) {
    let mut taken: BTreeSet<String> = BTreeSet::new();
    for model in &imported.models {
        let names = model.names.iter().map(|(name, _)| name);
        taken.extend(std::iter::once(&model.name).chain(&model.aliases).chain(names).cloned());
    }
    for (peer, table) in top.get("peers").and_then(Value::as_object).into_iter().flatten() {
        let of = format!("peer `{peer}`: ");
        let Some(table) = table.as_object() else {
            imported
                .left(format!("the peer `{peer}`"), "`[remotes]` has a table for each model, with its `url`");
            continue;
        };
        others(table, &READ, &OF_A_PEER, &of, imported);
        let url = table.get("proxy").map(plain).filter(|url| !url.is_empty());
        let Some(url) = url else {
            imported
                .left(format!("the peer `{peer}`, which has no `proxy`"), "`url` of a model in `[remotes]`");
            continue;
        };
        let has_key = table.get("apiKey").map(plain).is_some_and(|key| !key.is_empty());
        if has_key {
            imported.left(format!("{of}its key"), KEY);
        }
        for name in texts(table.get("models")) {
            if !taken.insert(name.clone()) {
                imported.left(
                    format!("{of}its model `{name}`"),
                    "the name is another model's: give it one in `[remotes]`",
                );
                continue;
            }
            let mut model = Model { name: name.clone(), ..Model::default() };
            filters(table.get("filters"), &of, &mut model, imported);
            let Model { strip, set, names, .. } = model;
            let key_file = has_key.then(|| format!("{peer}.key"));
            imported.remotes.push(Remote { name, url: url.clone(), key_file, strip, set, names });
        }
    }
}
