//! llama-swap's YAML. Keys that shape a model are here; those that say who is loaded beside whom are in [`super::routing`].

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::macros::{Macros, Wrong};
use super::yaml::{line_of, plain};
use super::{Env, Imported, Model, command, peers, routing, split, yaml};
use crate::exit::Failure;

/// llama-swap's first port for `${PORT}`; a model of ours gets a socket.
const FIRST_PORT: u64 = 5800;

/// Keys of the whole file that have no equal, and the nearest thing.
const OF_ALL: [(&str, &str); 14] = [
    ("apiKeys", "`llama-warden keys new NAME --file keys.toml` for each, and `server.keys = \"keys.toml\"`"),
    ("profiles", "`aliases` of a model say which names it answers to; they are changed by a reload"),
    ("selectors", "a name in `[names]` means the best of several models that is loaded or has room"),
    (
        "upstream",
        "a path that begins with `/upstream/MODEL/` reaches that model's own server, for all models alike",
    ),
    ("store", "`log.access` writes a line for each request, and `llama-warden history` has the rest"),
    ("metricsMaxInMemory", "metrics are counters, which take no memory for each request"),
    ("captureBuffer", "`record_requests` of a model keeps requests, with their texts replaced"),
    ("performance", "`sensors.interval` says how often memory is read"),
    ("ui", "there is no page; `llama-warden status` shows the models"),
    ("logTimeFormat", "lines of the log have the time as RFC 3339"),
    ("logToStdout", "`log.children` says whether the lines of llama-servers are in the log"),
    ("logRequests", "each request has a line in the log, or in `log.access`"),
    ("includeAliasesInList", "`/v1/models` lists models; aliases are answered all the same"),
    ("scheduler", "requests of a model are served in the order in which they came"),
];

/// The same, of a model.
const OF_A_MODEL: [(&str, &str); 10] = [
    ("cmdStop", "a process gets SIGTERM, and `lifecycle.stop_grace` to end"),
    ("checkEndpoint", "`/health` of llama-server is asked"),
    ("unlisted", "all models are in `/v1/models`"),
    ("name", "`/v1/models` has the model's own name"),
    ("description", "`/v1/models` has no descriptions"),
    ("metadata", "`/v1/models` has no metadata"),
    ("capabilities", "clients are told what llama-server says of itself"),
    ("timeouts", "`[upstream]` has the limits of all models"),
    ("compat", "no connection is an upgrade to a web socket"),
    ("healthCheckTimeout", "`lifecycle.start_timeout`"),
];

/// What is read elsewhere, or means nothing here: ports are nobody's to choose.
const READ: [&str; 13] = [
    "peers",
    "sendLoadingState",
    "models",
    "macros",
    "groups",
    "matrix",
    "routing",
    "hooks",
    "healthCheckTimeout",
    "unloadTimeout",
    "globalTTL",
    "logLevel",
    "startPort",
];
const READ_OF_A_MODEL: [&str; 11] = [
    "sendLoadingState",
    "cmd",
    "proxy",
    "aliases",
    "env",
    "ttl",
    "unloadTimeout",
    "useModelName",
    "concurrencyLimit",
    "filters",
    "macros",
];

pub(super) fn import(text: &str, from: &str, env: Env<'_>) -> Result<Imported, Failure> {
    let raw = yaml::read(text, from)?;
    let macros = Macros::new(env).with(raw.get("macros"));
    let wrong = |wrong: Wrong| {
        Failure::usage(
            format!("{from}{}: {}: {}", line_of(text, &wrong.written), wrong.written, wrong.why),
            wrong.hint,
        )
    };
    let mut top = Map::new();
    for (key, value) in raw.iter().filter(|(key, _)| *key != "models" && *key != "macros") {
        top.insert(key.clone(), macros.expand(value).map_err(wrong)?);
    }
    let none = Map::new();
    let models = match raw.get("models") {
        Some(Value::Object(models)) => models,
        // One of peers alone is a configuration, too.
        None | Some(Value::Null) if raw.keys().any(|key| is_known(key)) => &none,
        _ => {
            return Err(Failure::usage(
                format!("{from}: there is no table `models`"),
                "give a configuration of llama-swap, or say what it is with `--from`",
            ));
        }
    };
    let mut imported = Imported {
        start_timeout: number(&top, "healthCheckTimeout").map(|seconds| seconds.max(15)),
        stop_grace: number(&top, "unloadTimeout").filter(|seconds| *seconds > 0),
        log_level: top.get("logLevel").map(plain),
        ..Imported::default()
    };
    others(&top, &READ, &OF_ALL, "", &mut imported);
    let ports = number(&top, "startPort").unwrap_or(FIRST_PORT)..;
    for (port, (name, value)) in ports.zip(models) {
        let at = line_of(text, name);
        let Some(table) = value.as_object() else {
            return Err(Failure::usage(
                format!("{from}{at}: the model `{name}` is no table"),
                "give it at least a `cmd`",
            ));
        };
        let mut own = macros.with(table.get("macros"));
        own.set("MODEL_ID", Value::from(name.as_str()));
        own.set("PORT", Value::from(port));
        let mut expanded = Map::new();
        for (key, value) in table.iter().filter(|(key, _)| *key != "macros") {
            // A comment of a command may hold what is no macro any more.
            let value = match value.as_str().filter(|_| key.starts_with("cmd")) {
                Some(text) => Value::from(without_comments(text)),
                None => value.clone(),
            };
            expanded.insert(key.clone(), own.expand(&value).map_err(wrong)?);
        }
        if let Some(mut model) =
            model(name, &expanded, &format!("{from}{at}: model `{name}`"), port, &mut imported)?
        {
            let ttl = expanded.get("ttl").and_then(Value::as_i64).filter(|ttl| *ttl >= 0);
            let ttl = ttl.map_or_else(|| number(&top, "globalTTL"), |ttl| u64::try_from(ttl).ok());
            model.ttl = ttl.filter(|seconds| *seconds > 0);
            let shows = |table: &Map<String, Value>| table.get("sendLoadingState").and_then(Value::as_bool);
            model.shows_loading = shows(&expanded).or_else(|| shows(&top)).unwrap_or(false);
            imported.models.push(model);
        }
    }
    peers::import(&top, &mut imported);
    routing::import(&top, &mut imported, from)?;
    Ok(imported)
}

fn is_known(key: &str) -> bool {
    READ.contains(&key) || OF_ALL.iter().any(|(known, _)| *known == key)
}

fn without_comments(text: &str) -> String {
    text.lines().filter(|line| !line.trim_start().starts_with('#')).collect::<Vec<_>>().join("\n")
}

fn number(table: &Map<String, Value>, key: &str) -> Option<u64> {
    let value = table.get(key)?;
    value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
}

/// Texts of a list; one text is a list of one.
pub(super) fn texts(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::Array(list)) => list.iter().map(plain).collect(),
        Some(Value::Null) | None => Vec::new(),
        Some(one) => vec![plain(one)],
    }
}

/// Lists the keys of a table that have no equal. What is empty or switched off says nothing.
pub(super) fn others(
    table: &Map<String, Value>,
    read: &[&str],
    known: &[(&str, &str)],
    of: &str,
    imported: &mut Imported,
) {
    for (key, value) in table {
        let empty = match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::Bool(true) => false,
        };
        if read.contains(&key.as_str()) || empty {
            continue;
        }
        // Of a key only its name: what it holds may be secret.
        let nearest = known
            .iter()
            .find(|(name, _)| name == key)
            .map_or("no key of llama-swap that is known here", |(_, to)| to);
        imported.left(format!("{of}`{key}`"), nearest);
    }
}

/// A model; `None` where its command starts something else.
fn model(
    name: &str,
    table: &Map<String, Value>,
    at: &str,
    port: u64,
    imported: &mut Imported,
) -> Result<Option<Model>, Failure> {
    let cmd = table.get("cmd").map(plain).unwrap_or_default();
    let words = split::words(&cmd, at)?;
    if words.is_empty() {
        return Err(Failure::usage(
            format!("{at}: it has no `cmd`"),
            "give it the command that starts its llama-server",
        ));
    }
    let taken = match command::take(&words) {
        Ok(taken) => taken,
        Err(why) => {
            imported.left(format!("model `{name}`"), format!("{why}; llama-warden runs llama-server alone"));
            return Ok(None);
        }
    };
    let of = format!("model `{name}`: ");
    for (what, nearest) in taken.left {
        imported.left(format!("{of}{what}"), nearest);
    }
    let mut model = taken.model;
    name.clone_into(&mut model.name);
    let chosen = port.to_string();
    for (flag, value, _) in taken.listening.iter().filter(|(_, value, _)| *value != chosen) {
        model.notes.push(format!("`{flag} {value}` left out: it listens where only llama-warden reaches it"));
    }
    for word in texts(table.get("env")) {
        match word.split_once('=') {
            Some((variable, value)) => model.env.push((variable.to_owned(), value.to_owned())),
            None => {
                return Err(Failure::usage(
                    format!("{at}: `env`: an entry is no `NAME=VALUE`"),
                    "write each entry as `NAME=VALUE`",
                ));
            }
        }
    }
    model.aliases = texts(table.get("aliases"));
    model.upstream_model = table.get("useModelName").map(plain).filter(|name| !name.is_empty());
    model.stop_grace = number(table, "unloadTimeout").filter(|seconds| *seconds > 0);
    model.max_in_flight = number(table, "concurrencyLimit").filter(|limit| *limit > 0);
    if model.max_in_flight.is_some() {
        model.notes.push(
            "requests above `max_in_flight` wait in the queue, where llama-swap answers 429".to_owned(),
        );
    }
    let local =
        |proxy: &String| ["://localhost", "://127.0.0.1", "://[::1]"].iter().any(|host| proxy.contains(host));
    if table.get("proxy").map(plain).is_some_and(|proxy| !local(&proxy)) {
        imported.left(format!("{of}`proxy`"), "a model is served by processes of this machine");
    }
    filters(table.get("filters"), &of, &mut model, imported);
    let mut read = READ_OF_A_MODEL.to_vec();
    if table.get("checkEndpoint").and_then(Value::as_str) == Some("/health") {
        // As is done here.
        read.push("checkEndpoint");
    }
    others(table, &read, &OF_A_MODEL, &of, imported);
    Ok(Some(model))
}

pub(super) fn filters(filters: Option<&Value>, of: &str, model: &mut Model, imported: &mut Imported) {
    let mut table: BTreeMap<&str, &Value> = filters
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(key, value)| (key.as_str(), value))
        .collect();
    // Older files write it in another way.
    for key in ["stripParams", "strip_params"] {
        let text = table.remove(key).map(plain).unwrap_or_default();
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty() && *name != "model");
        model.strip.extend(names.map(str::to_owned));
    }
    for (key, value) in table.remove("setParams").and_then(Value::as_object).into_iter().flatten() {
        if key == "model" || key == "stream" {
            imported.left(
                format!("{of}`setParams` of `{key}`"),
                "that stays the client's; `upstream_model` renames",
            );
        } else {
            model.set.push((key.clone(), value.clone()));
        }
    }
    for (name, value) in table.remove("setParamsByID").and_then(Value::as_object).into_iter().flatten() {
        if *name == model.name {
            let own =
                value.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone()));
            own.for_each(|pair| {
                model.set.retain(|(key, _)| *key != pair.0);
                model.set.push(pair);
            });
            imported.left(
                format!("{of}`setParamsByID` of its own name"),
                "`request.set` holds for its aliases, too",
            );
            continue;
        }
        let own =
            value.as_object().into_iter().flatten().filter(|(key, _)| *key != "model" && *key != "stream");
        model.names.push((name.clone(), own.map(|(key, value)| (key.clone(), value.clone())).collect()));
        model.aliases.retain(|alias| alias != name);
    }
    for key in table.keys() {
        imported.left(format!("{of}`filters.{key}`"), "`request` of a model has what can be changed");
    }
}
