//! Prints the effective configuration as TOML, with the source of each value.
//!
//! If secrets are included, the output is an equivalent configuration file. Secrets are included only on
//! request, because operators share this output.

use std::slice::from_ref;
use std::sync::Arc;

use warden_policies::secrets;

use super::machine::HostMachine;
use super::problem::{ConfigPlace, dotted_key, owned_path, quoted_key};
use super::resolve::model_mitigations::explain_mitigations;
use super::schema::compiled_in;
use super::source::layers::LoadedConfig;
use super::source::tree::{ConfigNode, ConfigValue, TableEntry};

/// Order of the printed sections, most important first; the models follow.
const SECTION_ORDER: [&str; 16] = [
    "server",
    "admin",
    "paths",
    "log",
    "telemetry",
    "probe",
    "upstream",
    "sensors",
    "health",
    "shared",
    "child",
    "build",
    "diagnose",
    "proof",
    "update",
    "defaults",
];

/// The configuration that is kept to be displayed.
#[derive(Clone)]
pub struct DisplayedConfig {
    /// Configuration as written.
    pub loaded: Arc<LoadedConfig>,
    /// Facts about the machine on which the configuration was read.
    pub machine: Arc<HostMachine>,
    /// Changed sections that take effect at the next start of llama-warden.
    pub pending: Vec<&'static str>,
}

/// Prints only the pending sections, because the configuration contains secrets.
impl std::fmt::Debug for DisplayedConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DisplayedConfig({:?})", self.pending)
    }
}

impl DisplayedConfig {
    /// Prints the configuration without its secrets.
    pub fn text(&self) -> String {
        print_config(&self.loaded, &self.machine, false)
    }
}

/// Prints the whole configuration; with `reveal`, including secrets.
pub fn print_config(loaded: &LoadedConfig, machine: &HostMachine, reveal: bool) -> String {
    let mut text = String::new();
    let shown = ConfigPrinter { loaded, reveal };
    for section in SECTION_ORDER {
        if section == "paths" {
            print_paths(&mut text, loaded, machine);
        } else if let Some(table) = loaded.tree.find(&[section]) {
            shown.print_table(&mut text, &[section.to_owned()], table);
        }
    }
    for (name, model) in &loaded.models {
        let told = explain_mitigations(loaded, machine, name, model);
        if !told.is_empty() {
            text.extend(["\n# What the mitigations of model ", &quoted_key(name), " come to:\n"]);
        }
        for line in told {
            let line = if reveal { line } else { secrets::redact_text(&line) };
            text.extend(["# - ", &line, "\n"]);
        }
        shown.print_table(&mut text, &["models".to_owned(), name.clone()], &loaded.merged_table(name));
    }
    print_internal(&mut text, loaded);
    if secrets::is_hidden(&text) {
        text.insert_str(0, "# Secrets are hidden (***); --reveal shows them.\n\n");
    }
    text
}

/// Prints the directories in effect, configured or default. If the socket directory is not configured, the
/// directory of this instance is printed.
fn print_paths(text: &mut String, loaded: &LoadedConfig, machine: &HostMachine) {
    text.push_str("\n[paths]\n");
    let Ok(dirs) = loaded.dirs(machine) else {
        text.push_str("# none: there is no home directory to put them in\n");
        return;
    };
    let configured = loaded.settings.paths.runtime_dir.is_some();
    for (key, dir) in [
        ("state_dir", dirs.state),
        // Print the configured directory itself, in which each instance creates a directory of its own.
        ("runtime_dir", if configured { dirs.runtime_base } else { dirs.runtime }),
        ("data_dir", dirs.data),
        ("cache_dir", dirs.cache),
    ] {
        let place = loaded.place(&owned_path(&["paths", key]));
        let dir = toml_edit::Value::from(dir.to_string_lossy().into_owned()).to_string();
        let line = match place {
            ConfigPlace::Nowhere if key == "runtime_dir" => {
                format!("# {key}: a new directory for each instance, like {dir}\n")
            }
            ConfigPlace::Nowhere => format!("{key} = {dir}  # {}\n", ConfigPlace::Default),
            place => format!("{key} = {dir}  # {place}\n"),
        };
        text.push_str(&line);
    }
    let patches = &loaded.settings.paths.patches;
    if !patches.is_empty() {
        let place = loaded.place(&owned_path(&["paths", "patches"]));
        let all: toml_edit::Array = patches
            .iter()
            .map(|path| loaded.absolute(machine, path).to_string_lossy().into_owned())
            .collect();
        text.extend(["patches = ", &all.to_string(), "  # ", &place.to_string(), "\n"]);
    }
}

fn print_internal(text: &mut String, loaded: &LoadedConfig) {
    let mut last = "";
    for (section, home, name) in compiled_in::settable_numbers() {
        let path: Vec<String> = home.into_iter().chain([name.to_owned()]).collect();
        let place = loaded.place(&path);
        let Some(value) = loaded.tree.find(&path) else { continue };
        if place == ConfigPlace::Default {
            continue;
        }
        if section != last {
            text.extend(["\n[", compiled_in::INTERNAL, ".", section, "]\n"]);
            last = section;
        }
        let value = toml_value(value).to_string();
        text.extend([name, " = ", value.trim(), "  # ", &place.to_string(), "\n"]);
    }
}

struct ConfigPrinter<'a> {
    loaded: &'a LoadedConfig,
    reveal: bool,
}

impl ConfigPrinter<'_> {
    fn print_table(&self, text: &mut String, path: &[String], table: &ConfigNode) {
        let entries = table.sorted_entries().into_iter();
        let shown = entries.filter(|entry| !compiled_in::is_compiled_in(path, &entry.key));
        let is_table =
            |entry: &&TableEntry| matches!(entry.value.kind, ConfigValue::Table(_)) && entry.key != "env";
        let (tables, values): (Vec<_>, Vec<_>) = shown.partition(is_table);
        if !values.is_empty() {
            if !text.is_empty() {
                text.push('\n');
            }
            text.extend(["[", &dotted_key(path), "]\n"]);
        }
        for entry in values {
            let value = self.value(&entry.key, &entry.value).to_string();
            text.extend([quoted_key(&entry.key).as_str(), " = ", value.trim()]);
            match self.loaded.place(&[path, from_ref(&entry.key)].concat()) {
                ConfigPlace::Nowhere => text.push('\n'),
                place => text.extend(["  # ", &place.to_string(), "\n"]),
            }
        }
        for entry in tables {
            self.print_table(text, &[path, from_ref(&entry.key)].concat(), &entry.value);
        }
    }

    fn value(&self, key: &str, value: &ConfigNode) -> toml_edit::Value {
        if self.reveal {
            return toml_value(value);
        }
        match &value.kind {
            ConfigValue::Table(_) if key == "env" => {
                let shown = value.sorted_entries().into_iter().map(|entry| {
                    let value = match entry.value.text() {
                        Some(text) => secrets::redact_variable(&entry.key, text).1.into(),
                        None => toml_value(&entry.value),
                    };
                    (entry.key.clone(), value)
                });
                toml_edit::Value::InlineTable(shown.collect())
            }
            ConfigValue::List(words) if key == "args" => {
                let words = words.iter().map(|word| word.text().unwrap_or_default().to_owned());
                let words = secrets::redact_arguments(&words.collect::<Vec<_>>());
                words.into_iter().collect::<toml_edit::Array>().into()
            }
            _ => without_secrets(toml_value(value)),
        }
    }
}

fn without_secrets(value: toml_edit::Value) -> toml_edit::Value {
    match value {
        toml_edit::Value::String(text) => secrets::redact_text(text.value()).into(),
        toml_edit::Value::Array(items) => {
            items.into_iter().map(without_secrets).collect::<toml_edit::Array>().into()
        }
        toml_edit::Value::InlineTable(table) => {
            let pairs = table.into_iter().map(|(key, value)| (key, without_secrets(value)));
            toml_edit::Value::InlineTable(pairs.collect())
        }
        other => other,
    }
}

fn toml_value(value: &ConfigNode) -> toml_edit::Value {
    match &value.kind {
        ConfigValue::Text(text) | ConfigValue::Raw(text) => text.as_str().into(),
        ConfigValue::Bool(value) => (*value).into(),
        ConfigValue::Int(number) => (*number).into(),
        ConfigValue::Float(number) => (*number).into(),
        ConfigValue::Date => "".into(),
        ConfigValue::List(items) => items.iter().map(toml_value).collect::<toml_edit::Array>().into(),
        ConfigValue::Table(_) => {
            let entries = value.sorted_entries().into_iter();
            let pairs = entries.map(|entry| (entry.key.as_str(), toml_value(&entry.value)));
            toml_edit::Value::InlineTable(pairs.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::layers::{ConfigSources, FlagSetting, load_config};

    #[test]
    fn secrets_are_hidden_by_name_and_by_look_until_they_are_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("w.toml");
        let token = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
        let text = format!(
            "[build.sources]\nmine = \"https://me:pw@host/a#v1\"\n[defaults.env]\nHF_TOKEN = \"hush\"\nHARMLESS = \"{token}\"\n\
             [models.a]\nargs = [\"--hf-token\", \"shh\", \"-c\", \"1\", \"-mu\", \"https://h/m?sig=hushed\"]\nenv = {{ N = \"1\" }}\n\
             request.set = {{ user = \"{token}\" }}\n"
        );
        std::fs::write(&file, text).unwrap();
        let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap();
        let mut machine = HostMachine::read();
        machine.env.clear();
        let hidden = print_config(&loaded, &machine, false);
        for secret in ["hush", token, "shh", "hushed", "pw@"] {
            assert!(!hidden.contains(secret), "{secret} in\n{hidden}");
        }
        assert!(hidden.starts_with("# Secrets are hidden (***); --reveal shows them.\n"), "{hidden}");
        assert!(hidden.contains("env = { HARMLESS = \"***\", HF_TOKEN = \"***\", N = \"1\" }"), "{hidden}");
        assert!(
            hidden.contains("args = [\"--hf-token\", \"***\", \"-c\", \"1\", \"-mu\", \"https://h/m?***\"]"),
            "{hidden}"
        );
        let shown = print_config(&loaded, &machine, true);
        for secret in ["hush", token, "shh", "hushed", "pw@"] {
            assert!(shown.contains(secret), "{secret} is not in\n{shown}");
        }
        assert!(!shown.contains("***"));
    }

    #[test]
    fn the_directories_that_are_used_are_shown_whoever_chose_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("w.toml");
        std::fs::write(&file, "[paths]\nstate_dir = \"mine\"\n").unwrap();
        let loaded =
            load_config(ConfigSources { file: Some(file.clone()), ..ConfigSources::default() }).unwrap();
        let mut machine = HostMachine::read();
        machine.env = vec![("XDG_DATA_HOME".into(), "/data".into()), ("HOME".into(), "/home/me".into())];
        let shown = print_config(&loaded, &machine, false);
        for line in [
            format!("state_dir = \"{}\"  # {}:2\n", dir.path().join("mine").display(), file.display()),
            "data_dir = \"/data/llama-warden\"  # default\n".to_owned(),
            "cache_dir = \"/home/me/.cache/llama-warden\"  # default\n".to_owned(),
            "# runtime_dir: a new directory for each instance, like ".to_owned(),
        ] {
            assert!(shown.contains(&line), "{line} is missing in\n{shown}");
        }
    }

    #[test]
    fn every_value_says_where_it_comes_from_and_the_whole_is_a_configuration_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("w.toml");
        let text = "[server]\nport = 9000\n[models.\"a b\"]\nargs = [\"-c\", \"1\"]\nenv = { X = \"1\" }\npolicy.host.soft = \"1GiB\"\n\
                    mitigations = [\"no-cuda-graphs\", \"cache-ram=64\", \"no-swa-full\", \"cache-rum\"]\n";
        std::fs::write(&file, text).unwrap();
        let loaded = load_config(ConfigSources {
            file: Some(file.clone()),
            env: vec![("LLAMA_WARDEN_LOG__FORMAT".into(), "json".into())],
            flags: vec![FlagSetting::raw("--host", &["server", "host"], "::1")],
            ..ConfigSources::default()
        })
        .unwrap();
        let mut machine = HostMachine::read();
        machine.env = vec![("HOME".into(), "/home/me".into())];
        (machine.uid, machine.pid) = (1000, 4711);
        let shown = print_config(&loaded, &machine, false);
        insta::assert_snapshot!(crate::samples_tests::redacted(&shown, dir.path()));
        let again = dir.path().join("again.toml");
        std::fs::write(&again, &shown).unwrap();
        let again = load_config(ConfigSources { file: Some(again), ..ConfigSources::default() }).unwrap();
        assert_eq!(again.settings.server.port, 9000);
        assert_eq!(again.models[0].1.args, ["-c", "1"]);
    }

    #[test]
    fn compiled_in_numbers_are_shown_where_they_are_set() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("w.toml");
        let text = "[internal.growth]\nhost_effect = \"1MiB\"\n[internal.lifecycle]\nfailures_told = 9\n[models.a]\n";
        std::fs::write(&file, text).unwrap();
        let loaded =
            load_config(ConfigSources { file: Some(file.clone()), ..ConfigSources::default() }).unwrap();
        assert_eq!(loaded.settings.growth.host_effect.0, 1 << 20);
        assert_eq!(loaded.models[0].1.lifecycle.failures_told, 9);
        let shown = print_config(&loaded, &HostMachine::read(), false);
        let place = format!("  # {}", file.display());
        let wanted = format!(
            "\n[internal.growth]\nhost_effect = \"1MiB\"{place}:2\n\n[internal.lifecycle]\nfailures_told = 9{place}:4\n"
        );
        assert!(shown.ends_with(&wanted), "{shown}");
        for hidden in
            ["[growth]", "tls_handshake_timeout", "load_factor", "[diagnose.cure]", "failures_told = 2"]
        {
            assert!(!shown.contains(hidden), "{hidden} in\n{shown}");
        }
        let again = dir.path().join("again.toml");
        std::fs::write(&again, &shown).unwrap();
        let again = load_config(ConfigSources { file: Some(again), ..ConfigSources::default() }).unwrap();
        assert_eq!(again.settings.growth.host_effect.0, 1 << 20);
    }
}
