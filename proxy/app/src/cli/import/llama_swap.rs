//! Imports the models of llama-swap's YAML. [`super::routing`] imports the rules about models loaded
//! together.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::imported::{
    EnvLookup, ImportedConfig, ImportedModel, ImportedRemote, ImportedRequests, NameVariant, is_listed,
};
use super::yaml::{
    MacroError, MacroScope, inherited_note, is_inherited, line_of, plain_text, unset_variable,
};
use super::{command, listing, other_program, peers, routing, shell, write, yaml};
use crate::exit::CommandError;

/// llama-swap's first port for `${PORT}`. llama-warden gives the model a socket instead.
const FIRST_PORT: u64 = 5800;

/// Global keys without an equivalent, each with the nearest alternative.
const UNSUPPORTED_KEYS: [(&str, &str); 13] = [
    ("apiKeys", "`llama-warden keys new NAME --file keys.toml` for each, and `server.keys = \"keys.toml\"`"),
    ("profiles", "`aliases` of a model say which names it answers to; they are changed by a reload"),
    (
        "upstream",
        "a path that begins with `/upstream/MODEL/` reaches that model's own server, for all models alike",
    ),
    ("store", "`log.access` writes a line for each request, and `llama-warden history` has the rest"),
    ("metricsMaxInMemory", "metrics are counters, which take no memory for each request"),
    ("captureBuffer", "requests are listed on the page and by `llama-warden requests`, never their texts"),
    ("performance", "`sensors.interval` says how often memory is read"),
    ("ui", "the page for operators shows requests, and whose they are (docs/page.md)"),
    ("logTimeFormat", "lines of the log have the time as RFC 3339"),
    ("logToStdout", "`log.children` says whether the lines of llama-servers are in the log"),
    ("logRequests", "each request has a line in the log, or in `log.access`"),
    ("includeAliasesInList", "`/v1/models` lists models; aliases are answered all the same"),
    ("scheduler", "requests of a model are served in the order in which they came"),
];

const UNSUPPORTED_MODEL_KEYS: [(&str, &str); 5] = [
    ("cmdStop", "a process gets SIGTERM, and `lifecycle.stop_grace` to end"),
    ("checkEndpoint", "`/health` of llama-server is asked"),
    ("timeouts", "`[upstream]` has the limits of all models"),
    ("compat", "no connection is an upgrade to a web socket"),
    ("healthCheckTimeout", "`lifecycle.start_timeout`"),
];

const ENDPOINT_KEYS: &str = "cmd proxy aliases filters useModelName";
const UNSUPPORTED_ENDPOINT_KEYS: [(&str, &str); 9] = [
    ("headers", "`key_file` of a model in `[remotes]` names a file with its key"),
    ("apiKey", "`key_file` of a model in `[remotes]` names a file with its key"),
    ("concurrencyLimit", "`max_in_flight` of a model in `[remotes]`"),
    ("timeouts", "`timeout` of a model in `[remotes]` is for a whole answer"),
    ("name", "a list has only the names of a model in `[remotes]`"),
    ("description", "a list has only the names of a model in `[remotes]`"),
    ("capabilities", "a list has only the names of a model in `[remotes]`"),
    ("metadata", "a list has only the names of a model in `[remotes]`"),
    ("ttl", "nothing is loaded for a model in `[remotes]`, and nothing unloaded"),
];

/// Global keys that other functions import, or that do not matter here, such as ports.
const GLOBAL_KEYS: &str = "peers selectors sendLoadingState models macros groups matrix routing hooks \
    healthCheckTimeout unloadTimeout globalTTL logLevel startPort";
const MODEL_KEYS: &str = "name description metadata capabilities unlisted sendLoadingState cmd proxy aliases env ttl \
    unloadTimeout useModelName concurrencyLimit filters macros";

/// Note on a key that this program does not know: llama-swap ignores it as well, or the key is newer.
pub(super) const UNKNOWN_KEY_NOTE: &str = "no key of llama-swap that is known here";
const OMITTED_MODEL_NOTE: &str = "left out";

pub(super) fn import_llama_swap(
    text: &str,
    from: &str,
    env: EnvLookup<'_>,
) -> Result<ImportedConfig, CommandError> {
    let raw = yaml::read_yaml(text, from)?;
    let macros = MacroScope::new(env).with(raw.get("macros"));
    let wrong = |wrong: MacroError| wrong.at(from, &line_of(text, &wrong.written));
    let mut top = Map::new();
    for (key, value) in raw.iter().filter(|(key, _)| *key != "models" && *key != "macros") {
        top.insert(key.clone(), macros.expand(value).map_err(wrong)?);
    }
    let none = Map::new();
    let models = match raw.get("models") {
        Some(Value::Object(models)) => models,
        // A file that only has peers is valid.
        None | Some(Value::Null) if raw.keys().any(|key| is_known(key)) => &none,
        _ => {
            return Err(CommandError::usage(
                format!("{from}: there is no table `models`"),
                "give a configuration of llama-swap, or say what it is with `--from`",
            ));
        }
    };
    let mut imported = ImportedConfig {
        start_timeout: number_of(&top, "healthCheckTimeout").map(|seconds| seconds.max(15)),
        stop_grace: number_of(&top, "unloadTimeout").filter(|seconds| *seconds > 0),
        log_level: top.get("logLevel").map(plain_text),
        ..ImportedConfig::default()
    };
    report_unsupported(&top, GLOBAL_KEYS, &UNSUPPORTED_KEYS, None, &mut imported);
    for (key, value) in top.iter().filter(|(key, _)| is_listed(GLOBAL_KEYS, key) && *key != "peers") {
        if let Some(variable) = unset_variable(&value.to_string()) {
            let why = format!("the variable {variable} is not set here: set it for the import");
            imported.add_unsupported(format!("`{key}`, as far as it is `${{env.{variable}}}`"), why);
        }
    }
    let ports = number_of(&top, "startPort").unwrap_or(FIRST_PORT)..;
    let file = LlamaSwapFile { text, from, macros: &macros, top: &top };
    let mut first = None;
    for (port, (name, value)) in ports.zip(models) {
        // Report a faulty model, and still import the others.
        if let Err(failure) = file.import_model(name, value, port, &mut imported) {
            let lines = failure.lines();
            let told = lines.iter().map(|line| line.split_once(": ").map_or(line.as_str(), |(_, rest)| rest));
            let told = told.collect::<Vec<_>>().join("; ").replace(&format!("model `{name}`: "), "");
            imported.add_unsupported_of(name, OMITTED_MODEL_NOTE, told);
            first.get_or_insert(failure);
        }
    }
    peers::import_peers(&top, &mut imported);
    if let Some(failure) = first.filter(|_| imported.models.is_empty() && imported.remotes.is_empty()) {
        return Err(failure);
    }
    routing::import_routing(&top, &mut imported, from)?;
    Ok(imported)
}

struct LlamaSwapFile<'a> {
    text: &'a str,
    from: &'a str,
    macros: &'a MacroScope<'a>,
    top: &'a Map<String, Value>,
}

impl LlamaSwapFile<'_> {
    fn import_model(
        &self,
        name: &str,
        value: &Value,
        port: u64,
        imported: &mut ImportedConfig,
    ) -> Result<(), CommandError> {
        let text = self.text;
        let from = self.from;
        let at = line_of(text, name);
        let Some(table) = value.as_object() else {
            return Err(CommandError::usage(
                format!("{from}{at}: the model `{name}` is no table"),
                "give it at least a `cmd`",
            ));
        };
        let place = |written: &str| yaml::line_after(text, name, written);
        let wrong = |wrong: MacroError| wrong.at(from, &place(&wrong.written));
        let mut own = self.macros.with(table.get("macros"));
        own.set("MODEL_ID", Value::from(name));
        own.set("PORT", Value::from(port));
        let mut expanded = Map::new();
        for (key, value) in table.iter().filter(|(key, _)| *key != "macros") {
            // Strip comments first, because macros in them may be invalid.
            let value = match value {
                Value::String(text) if key.starts_with("cmd") => Value::from(without_comments(text)),
                // Do not write down variables that the process inherits anyway: their values may be secret.
                Value::Array(list) if key == "env" => {
                    let inherits = |one: &Value| {
                        one.as_str()
                            .and_then(|text| text.split_once('='))
                            .is_some_and(|(name, value)| is_inherited(name, value))
                    };
                    let each =
                        list.iter().map(|one| if inherits(one) { Ok(one.clone()) } else { own.expand(one) });
                    expanded
                        .insert(key.clone(), Value::Array(each.collect::<Result<_, _>>().map_err(wrong)?));
                    continue;
                }
                other => other.clone(),
            };
            expanded.insert(key.clone(), own.expand(&value).map_err(wrong)?);
        }
        if let Some(url) = remote_endpoint(&expanded) {
            let remote = import_remote(name, url, &expanded, imported);
            imported.remotes.push(remote);
            return Ok(());
        }
        let Some(mut model) = model(name, &expanded, &format!("{from}{at}: model `{name}`"), port, imported)?
        else {
            return Ok(());
        };
        if let Some(variable) = unset_variable(&write::model_text(&model)) {
            let written = format!("${{env.{variable}}}");
            return Err(CommandError::usage(
                format!("{from}{}: {written}: the variable {variable} is not set here", place(&written)),
                "set it for the import",
            ));
        }
        // 0 means never, even with a global TTL; -1 means the global TTL.
        let ttl = expanded.get("ttl").and_then(Value::as_i64).filter(|ttl| *ttl >= 0);
        let ttl = ttl.map_or_else(|| number_of(self.top, "globalTTL"), |ttl| u64::try_from(ttl).ok());
        model.loading.ttl = ttl.filter(|seconds| *seconds > 0);
        let shows = |table: &Map<String, Value>| table.get("sendLoadingState").and_then(Value::as_bool);
        model.loading.is_shown = shows(&expanded).or_else(|| shows(self.top)).unwrap_or(false);
        imported.models.push(model);
        Ok(())
    }
}

/// Returns the endpoint of a model without a command, whose `proxy` is on another machine.
fn remote_endpoint(table: &Map<String, Value>) -> Option<String> {
    let started = text_of(table, "cmd").is_some_and(|cmd| !cmd.trim().is_empty());
    text_of(table, "proxy").filter(|proxy| !started && !is_local(proxy))
}

pub(super) fn is_local(proxy: &str) -> bool {
    ["://localhost", "://127.0.0.1", "://[::1]"].iter().any(|host| proxy.contains(host))
}

fn import_remote(
    name: &str,
    url: String,
    table: &Map<String, Value>,
    imported: &mut ImportedConfig,
) -> ImportedRemote {
    let mut aliases = text_list(table.get("aliases"));
    let requests = import_filters(table.get("filters"), name, &mut aliases, imported);
    report_unsupported(table, ENDPOINT_KEYS, &UNSUPPORTED_ENDPOINT_KEYS, Some(name), imported);
    let model = text_of(table, "useModelName");
    ImportedRemote { name: name.to_owned(), url, model, aliases, key_file: None, requests }
}

fn is_known(key: &str) -> bool {
    is_listed(GLOBAL_KEYS, key) || UNSUPPORTED_KEYS.iter().any(|(known, _)| *known == key)
}

fn without_comments(text: &str) -> String {
    text.lines().filter(|line| !line.trim_start().starts_with('#')).collect::<Vec<_>>().join("\n")
}

/// Returns the key's value as text; `None` if it is missing or empty.
pub(super) fn text_of(table: &Map<String, Value>, key: &str) -> Option<String> {
    table.get(key).map(plain_text).filter(|text| !text.is_empty())
}

fn number_of(table: &Map<String, Value>, key: &str) -> Option<u64> {
    let value = table.get(key)?;
    value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
}

pub(super) fn text_list(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::Array(list)) => list.iter().map(plain_text).collect(),
        Some(Value::Null) | None => Vec::new(),
        Some(one) => vec![plain_text(one)],
    }
}

/// Skips keys that are empty or off.
pub(super) fn report_unsupported(
    table: &Map<String, Value>,
    read: &str,
    known: &[(&str, &str)],
    model: Option<&str>,
    imported: &mut ImportedConfig,
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
        if is_listed(read, key) || empty {
            continue;
        }
        // Report only the name of a key, because its value may be secret.
        let nearest = known.iter().find(|(name, _)| name == key).map_or(UNKNOWN_KEY_NOTE, |(_, to)| to);
        match model {
            Some(model) => imported.add_unsupported_of(model, format!("`{key}`"), nearest),
            None => imported.add_unsupported(format!("`{key}`"), nearest),
        }
    }
}

/// Returns `None` for a model that cannot be started as it is.
fn model(
    name: &str,
    table: &Map<String, Value>,
    at: &str,
    port: u64,
    imported: &mut ImportedConfig,
) -> Result<Option<ImportedModel>, CommandError> {
    let cmd = table.get("cmd").map(plain_text).unwrap_or_default();
    let words = shell::split_words(&cmd, at)?;
    if words.is_empty() {
        return Err(CommandError::usage(
            format!("{at}: it has no `cmd`"),
            "give it the command that starts its llama-server",
        ));
    }
    let taken = match command::parse_command(&words) {
        Ok(taken) => taken,
        Err(why) => {
            imported.add_unsupported_of(name, OMITTED_MODEL_NOTE, why);
            return Ok(None);
        }
    };
    for (what, nearest) in taken.unsupported {
        imported.add_unsupported_of(name, what, nearest);
    }
    let mut model = taken.model;
    name.clone_into(&mut model.name);
    let is_other_program = !model.command.other_program.is_empty();
    let chosen = port.to_string();
    for (flag, value, _) in taken.listening.iter().filter(|(_, value, _)| *value != chosen) {
        model.notes.push(format!("`{flag} {value}` left out: it listens where only llama-warden reaches it"));
    }
    for word in text_list(table.get("env")) {
        match word.split_once('=') {
            Some((variable, value)) if is_inherited(variable, value) => {
                model.notes.push(inherited_note(variable));
            }
            Some((variable, value)) => model.command.env.push((variable.to_owned(), value.to_owned())),
            None => {
                return Err(CommandError::usage(
                    format!("{at}: `env`: an entry is no `NAME=VALUE`"),
                    "write each entry as `NAME=VALUE`",
                ));
            }
        }
    }
    if is_other_program && let Err(why) = other_program::set_port(&mut model.command, table, port) {
        imported.add_unsupported_of(name, OMITTED_MODEL_NOTE, why);
        return Ok(None);
    }
    model.aliases = text_list(table.get("aliases"));
    model.upstream_model = text_of(table, "useModelName");
    model.stop_grace = number_of(table, "unloadTimeout").filter(|seconds| *seconds > 0);
    model.max_in_flight = number_of(table, "concurrencyLimit").filter(|limit| *limit > 0);
    if model.max_in_flight.is_some() {
        model.notes.push(
            "requests above `max_in_flight` wait in the queue, where llama-swap answers 429".to_owned(),
        );
    }
    if table.get("proxy").map(plain_text).is_some_and(|proxy| !is_local(&proxy)) {
        imported.add_unsupported_of(
            name,
            "`proxy`",
            "a model is served by processes of this machine, or named in `[remotes]`",
        );
    }
    model.requests = import_filters(table.get("filters"), name, &mut model.aliases, imported);
    listing::import_listing(table, &mut model, imported);
    let mut read = MODEL_KEYS.to_owned();
    let endpoint = text_of(table, "checkEndpoint");
    if is_other_program || endpoint.as_deref() == Some("/health") {
        // llama-warden checks `/health`, too.
        read.push_str(" checkEndpoint");
    }
    if is_other_program {
        model.command.ready = endpoint.filter(|path| path.starts_with('/') && path != "/health");
    }
    report_unsupported(table, &read, &UNSUPPORTED_MODEL_KEYS, Some(name), imported);
    Ok(Some(model))
}

pub(super) fn import_filters(
    filters: Option<&Value>,
    model: &str,
    aliases: &mut Vec<String>,
    imported: &mut ImportedConfig,
) -> ImportedRequests {
    let mut table: BTreeMap<&str, &Value> = filters
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(key, value)| (key.as_str(), value))
        .collect();
    let mut requests = ImportedRequests::default();
    // Older files spell the key with an underscore.
    for key in ["stripParams", "strip_params"] {
        let text = table.remove(key).map(plain_text).unwrap_or_default();
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty() && *name != "model");
        requests.strip.extend(names.map(str::to_owned));
    }
    requests.set = import_parameters(table.remove("setParams"), "setParams", model, imported);
    let by_name = table.remove("setParamsByID").and_then(Value::as_object).into_iter().flatten();
    for (name, value) in by_name {
        let set = import_parameters(Some(value), "setParamsByID", model, imported);
        requests.names.push(NameVariant { name: name.clone(), set });
    }
    for key in table.keys() {
        let nearest = "`request` of a model has what can be changed";
        imported.add_unsupported_of(model, format!("`filters.{key}`"), nearest);
    }
    aliases.retain(|alias| requests.names.iter().all(|variant| variant.name != *alias));
    // A model without other names needs no variant, so set the parameters on the model.
    if aliases.is_empty() && matches!(requests.names.as_slice(), [only] if only.name == model) {
        for (key, value) in requests.names.drain(..).flat_map(|only| only.set) {
            requests.set.retain(|(known, _)| *known != key);
            requests.set.push((key, value));
        }
    }
    requests
}

fn import_parameters(
    value: Option<&Value>,
    key: &str,
    model: &str,
    imported: &mut ImportedConfig,
) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    for (name, value) in value.and_then(Value::as_object).into_iter().flatten() {
        match name.as_str() {
            // llama-swap never sets the name of the model.
            "model" => {}
            "stream" => {
                imported.add_unsupported_of(model, format!("`{key}` of `stream`"), "that stays the client's");
            }
            _ => all.push((name.clone(), value.clone())),
        }
    }
    all
}
