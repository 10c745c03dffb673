//! The effective configuration as TOML, each value with where it comes from.
//!
//! What it prints can be used as a configuration file: it means the same.

use figment::value::{Dict, Value};

use super::layers::Loaded;
use super::machine::Machine;
use super::mitigations::explain;
use super::problem::{Place, dotted, quoted};

/// Sections in the order in which people think about them. Those about models come last.
const ORDER: [&str; 14] = [
    "server", "admin", "paths", "log", "upstream", "sensors", "growth", "health", "shared", "child", "build",
    "diagnose", "defaults", "models",
];

/// The whole configuration.
pub(crate) fn show(loaded: &Loaded, machine: &Machine) -> String {
    let mut text = String::new();
    for section in ORDER.iter().filter(|section| **section != "models") {
        if let Some(Value::Dict(_, dict)) = loaded.merged.get(*section) {
            table(&mut text, loaded, &[(*section).to_owned()], dict);
        }
    }
    for (name, model, dict) in &loaded.models {
        let told = explain(loaded, machine, name, model);
        if !told.is_empty() {
            text.extend(["\n# What the mitigations of model ", &quoted(name), " come to:\n"]);
        }
        for line in told {
            text.extend(["# - ", &line, "\n"]);
        }
        table(&mut text, loaded, &["models".to_owned(), name.clone()], dict);
    }
    text
}

fn table(text: &mut String, loaded: &Loaded, path: &[String], dict: &Dict) {
    let is_table = |key: &str, value: &Value| matches!(value, Value::Dict(..)) && key != "env";
    let mut lines = Vec::new();
    for (key, value) in dict.iter().filter(|(key, value)| !is_table(key, value) && !fleet_wide(path, key)) {
        let path: Vec<String> = path.iter().cloned().chain([key.clone()]).collect();
        lines.push((format!("{} = {}", quoted(key), toml_text(value)), loaded.place(&path)));
    }
    if !lines.is_empty() {
        if !text.is_empty() {
            text.push('\n');
        }
        text.extend(["[", &dotted(path), "]\n"]);
        for (line, place) in lines {
            let comment = match place {
                Place::Nowhere => String::new(),
                place => format!("  # {place}"),
            };
            text.extend([
                line.as_str(),
                &comment,
                "
",
            ]);
        }
    }
    for (key, value) in dict.iter().filter(|(key, value)| is_table(key, value)) {
        if let Value::Dict(_, inner) = value {
            let path: Vec<String> = path.iter().cloned().chain([key.clone()]).collect();
            table(text, loaded, &path, inner);
        }
    }
}

/// What holds for all models is inherited by each, but is no key there.
fn fleet_wide(path: &[String], key: &str) -> bool {
    path.first().is_some_and(|first| first == "models") && super::schema::FLEET_WIDE.contains(&key)
}

fn toml_text(value: &Value) -> String {
    toml_value(value).to_string().trim().to_owned()
}

fn toml_value(value: &Value) -> toml_edit::Value {
    match value {
        Value::String(_, text) => text.as_str().into(),
        Value::Char(_, one) => one.to_string().into(),
        Value::Bool(_, value) => (*value).into(),
        Value::Num(_, number) => match (number.to_f64(), number.to_i128()) {
            (Some(float), _) => float.into(),
            (None, whole) => whole.and_then(|whole| i64::try_from(whole).ok()).unwrap_or(i64::MAX).into(),
        },
        Value::Empty(..) => "".into(),
        Value::Array(_, items) => items.iter().map(toml_value).collect::<toml_edit::Array>().into(),
        Value::Dict(_, dict) => {
            let pairs = dict.iter().map(|(key, value)| (key.as_str(), toml_value(value)));
            toml_edit::Value::InlineTable(pairs.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::layers::{FlagSetting, Sources, load};

    #[test]
    fn every_value_says_where_it_comes_from_and_the_whole_is_a_configuration_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("w.toml");
        let text = "[server]\nport = 9000\n[models.\"a b\"]\nargs = [\"-c\", \"1\"]\nenv = { X = \"1\" }\npolicy.host.soft = \"1GiB\"\n\
                    mitigations = [\"no-cuda-graphs\", \"cache-ram=64\", \"no-swa-full\", \"cache-rum\"]\n";
        std::fs::write(&file, text).unwrap();
        let loaded = load(Sources {
            file: Some(file.clone()),
            env: vec![("LLAMA_WARDEN_LOG__FORMAT".into(), "json".into())],
            flags: vec![FlagSetting::raw("--host", &["server", "host"], "::1")],
        })
        .unwrap();
        let mut machine = Machine::read();
        machine.env.clear();
        let shown = show(&loaded, &machine);
        for line in [
            format!("port = 9000  # {}:2", file.display()),
            "host = \"::1\"  # flag --host".to_owned(),
            "format = \"json\"  # environment variable LLAMA_WARDEN_LOG__FORMAT".to_owned(),
            "keep_alive = \"75s\"  # default".to_owned(),
            "[models.\"a b\".policy.host]".to_owned(),
            format!("soft = \"1GiB\"  # {}:6", file.display()),
            format!("env = {{ X = \"1\" }}  # {}:5", file.display()),
            "# What the mitigations of model \"a b\" come to:\n\
             # - no-cuda-graphs: sets GGML_CUDA_DISABLE_GRAPHS=1\n\
             # - cache-ram: gives `--cache-ram 64`\n\
             # - no-swa-full: removes LLAMA_ARG_SWA_FULL\n\
             # - error: model `a b`: there is no mitigation `cache-rum`\n\
             \n[models.\"a b\"]\n"
                .to_owned(),
        ] {
            assert!(shown.contains(&line), "{line} is missing in\n{shown}");
        }
        let again = dir.path().join("again.toml");
        std::fs::write(&again, &shown).unwrap();
        let again = load(Sources { file: Some(again), ..Sources::default() }).unwrap();
        assert_eq!(again.settings.server.port, 9000);
        assert_eq!(again.models[0].1.args, ["-c", "1"]);
    }
}
