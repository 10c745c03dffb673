//! Writes the imported configuration as a `warden.toml`.

use serde_json::Value;
use toml_edit::{Array, InlineTable, Key, Value as Toml};

use super::imported::{ImportedConfig, ImportedListener, ImportedModel, NameVariant};
use crate::out;

pub(super) fn render_config(imported: &ImportedConfig, from: &str) -> String {
    let mut page = ImportWriter::default();
    page.comment(&format!("Made by `llama-warden import` from {from}."));
    page.comment("Check it with `llama-warden config check`, and see what fits with `llama-warden plan`.");
    let ImportedListener { host, port, tls_cert, tls_key, api_prefix } = &imported.listener;
    page.section("server", |page| {
        page.pair("host", host.clone());
        page.pair("port", port.map(i64::from));
        page.pair("tls_cert", tls_cert.clone());
        page.pair("tls_key", tls_key.clone());
        page.pair("api_prefix", api_prefix.clone());
    });
    page.section("paths", |page| {
        page.list("models", &imported.folders);
        if imported.has_folder && imported.folders.is_empty() {
            page.comment("Models without a file are those of a folder: name it, and take the `#` away.");
            page.comment("models = [\"/path/to/models\"]");
        }
    });
    page.section("log", |page| page.pair("level", imported.log_level.clone()));
    page.section("loading", |page| {
        if imported.max_loaded.is_some() {
            page.comment("So it was; without it as many models are loaded as memory holds.");
        }
        page.pair("max_loaded", imported.max_loaded.map(i64::from));
    });
    if let Some(model) = &imported.defaults {
        page.section("defaults", |page| write_model(page, model));
    }
    page.section("defaults.lifecycle", |page| {
        page.pair("start_timeout", imported.start_timeout.map(duration_text));
        page.pair("stop_grace", imported.stop_grace.map(duration_text));
    });
    for model in &imported.models {
        page.text.push_str(&model_text(model));
    }
    for remote in &imported.remotes {
        page.section(&format!("remotes.{}", Key::new(&remote.name)), |page| {
            page.pair("url", Some(remote.url.as_str()));
            page.pair("model", remote.model.clone());
            page.list("aliases", &remote.aliases);
            if let Some(file) = &remote.key_file {
                page.comment("Write its key into this file (mode 600), and take the `#` away.");
                page.comment(&format!("key_file = {}", Toml::from(file.as_str())));
            }
            page.list("request.strip", &remote.requests.strip);
            page.parameters("request.set.", &remote.requests.set);
        });
        write_names(&mut page, &remote.name, &remote.requests.names);
    }
    for selector in &imported.selectors {
        page.section(&format!("names.{}", Key::new(&selector.name)), |page| {
            page.list("models", &selector.models);
        });
    }
    if !imported.unmatched.is_empty() {
        let count = imported.unmatched.len();
        page.text.push('\n');
        page.comment(&format!(
            "{} of it without an equal here, each with the nearest thing:",
            out::count_noun(count, "part")
        ));
        for left in &imported.unmatched {
            page.comment(&format!("- {}", left.describe(usize::MAX)));
        }
    }
    page.text
}

fn write_names(page: &mut ImportWriter, model: &String, names: &[NameVariant]) {
    for variant in names {
        page.section(&format!("names.{}", Key::new(&variant.name)), |page| {
            page.list("models", std::slice::from_ref(model));
            page.parameters("request.set.", &variant.set);
        });
    }
}

pub(super) fn model_text(model: &ImportedModel) -> String {
    let mut page = ImportWriter::default();
    page.section(&format!("models.{}", Key::new(&model.name)), |page| write_model(page, model));
    write_names(&mut page, &model.name, &model.requests.names);
    page.text
}

fn write_model(page: &mut ImportWriter, model: &ImportedModel) {
    for note in &model.notes {
        page.comment(note);
    }
    page.list("wrapper", &model.command.wrapper);
    page.list("command", &model.command.other_program);
    page.pair("ready", model.command.ready.clone());
    page.pair("binary", model.command.binary.clone());
    page.pair("model", model.model.clone());
    page.pair("directory", model.command.directory.clone());
    page.list("args", &model.command.args);
    page.list("mitigations", &model.command.mitigations);
    page.list("aliases", &model.aliases);
    page.pair("preload", model.loading.preload.then_some(true));
    page.pair("pin", model.loading.pin.then_some(true));
    page.list("groups", &model.loading.groups);
    page.pair("max_in_flight", model.max_in_flight.and_then(toml_integer));
    page.pair("upstream_model", model.upstream_model.clone());
    page.pair("ttl", model.loading.ttl.map(duration_text));
    page.pair("loading", model.loading.is_shown.then_some("reasoning"));
    for (name, value) in last_values(&model.command.env) {
        page.pair(&format!("env.{}", Key::new(name)), Some(value.as_str()));
    }
    page.pair("lifecycle.stop_grace", model.stop_grace.map(duration_text));
    page.list("request.strip", &model.requests.strip);
    page.parameters("request.set.", &model.requests.set);
    page.parameters("request.default.", &model.requests.default);
    page.pair("request.system_prompt", model.requests.system_prompt.clone());
    page.parameters("listing.", &model.listing);
}

fn last_values(env: &[(String, String)]) -> impl Iterator<Item = &(String, String)> {
    env.iter()
        .enumerate()
        .filter(|(at, (name, _))| !env[at + 1..].iter().any(|(later, _)| later == name))
        .map(|(_, pair)| pair)
}

fn duration_text(count: u64) -> String {
    if count > 0 && count.is_multiple_of(60) { format!("{}m", count / 60) } else { format!("{count}s") }
}

fn toml_integer(count: u64) -> Option<i64> {
    i64::try_from(count).ok()
}

/// Returns `None` for a value that contains a null.
fn toml_value(value: &Value) -> Option<Toml> {
    Some(match value {
        Value::Null => return None,
        Value::Bool(is) => Toml::from(*is),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => Toml::from(whole),
            None => Toml::from(number.as_f64()?),
        },
        Value::String(text) => Toml::from(text.as_str()),
        Value::Array(list) => Toml::Array(list.iter().map(toml_value).collect::<Option<Array>>()?),
        Value::Object(map) => {
            let pairs = map.iter().map(|(key, value)| Some((Key::new(key), toml_value(value)?)));
            Toml::InlineTable(pairs.collect::<Option<InlineTable>>()?)
        }
    })
}

#[derive(Default)]
struct ImportWriter {
    text: String,
}

impl ImportWriter {
    /// Omits an empty section, unless it is a model's.
    fn section(&mut self, name: &str, fill: impl FnOnce(&mut Self)) {
        let mut inside = Self::default();
        fill(&mut inside);
        if !inside.text.is_empty() || name.starts_with("models.") {
            self.text.extend(["\n[", name, "]\n", &inside.text]);
        }
    }

    fn parameters(&mut self, table: &str, pairs: &[(impl AsRef<str>, Value)]) {
        for (name, value) in pairs {
            let key = format!("{table}{}", Key::new(name.as_ref()));
            match toml_value(value) {
                Some(value) => self.pair(&key, Some(value)),
                None => self.comment(&format!("`{key}` is null, which TOML cannot write: left out")),
            }
        }
    }

    fn pair(&mut self, key: &str, value: Option<impl Into<Toml>>) {
        if let Some(value) = value {
            self.text.extend([key, " = ", &value.into().to_string(), "\n"]);
        }
    }

    /// Splits a long list over several lines, but keeps a flag and its value on one line.
    fn list(&mut self, key: &str, words: &[String]) {
        let quoted: Vec<String> = words.iter().map(|word| Toml::from(word.as_str()).to_string()).collect();
        match quoted.join(", ") {
            short if short.len() < 90 => {
                if !short.is_empty() {
                    self.text.extend([key, " = [", &short, "]\n"]);
                }
            }
            _ => {
                self.text.extend([key, " = ["]);
                let mut after_flag = false;
                for (word, quoted) in words.iter().zip(&quoted) {
                    let is_flag = word.starts_with('-') && word.parse::<f64>().is_err();
                    self.text.push_str(if after_flag && !is_flag { " " } else { "\n    " });
                    self.text.extend([quoted, ","]);
                    after_flag = is_flag;
                }
                self.text.push_str("\n]\n");
            }
        }
    }

    fn comment(&mut self, text: &str) {
        // TOML forbids control characters in comments.
        let is_odd = |letter: char| letter.is_control() && letter != '\t';
        for line in text.lines() {
            self.text.extend(["# ", &line.trim_end().replace(is_odd, "?"), "\n"]);
        }
    }
}
