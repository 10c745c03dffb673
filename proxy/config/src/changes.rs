//! Finds the keys that differ between two configurations. The parsed trees are compared, so no key can be
//! forgotten.

use figment::value::{Dict, Value};

use super::problem::dotted_key;
use super::source::layers::LoadedConfig;

/// Differences between two configurations.
#[derive(Debug, Default)]
pub struct ConfigChanges {
    /// Changed keys, without their values, which may be secrets. A key of a model is given with the model's
    /// name; it is left out if a change of `defaults` explains it.
    pub keys: Vec<String>,
    /// Models that are in both configurations and have changed.
    pub models: Vec<String>,
}

/// Compares two configurations. Ignores models that only one of them has.
pub fn compare_loaded(old: &LoadedConfig, new: &LoadedConfig) -> ConfigChanges {
    let (mut keys, mut models) = (Vec::new(), Vec::new());
    compare_tables(&mut Vec::new(), &old.merged, &new.merged, &mut keys);
    let shared: Vec<Vec<String>> =
        keys.iter().filter(|key| key[0] == "defaults").map(|key| key[1..].to_vec()).collect();
    let same_defaults = old.settings.defaults == new.settings.defaults;
    for (name, _) in &new.models {
        if !old.models.iter().any(|(known, _)| known == name)
            || (same_defaults && old.own_table(name) == new.own_table(name))
        {
            continue;
        }
        let mut of_model = Vec::new();
        compare_tables(&mut Vec::new(), &old.merged_table(name), &new.merged_table(name), &mut of_model);
        if !of_model.is_empty() {
            models.push(name.clone());
        }
        of_model.retain(|key| !shared.contains(key));
        keys.extend(
            of_model.into_iter().map(|key| {
                ["models".to_owned(), name.clone()].into_iter().chain(key).collect::<Vec<String>>()
            }),
        );
    }
    ConfigChanges { keys: keys.iter().map(|key| dotted_key(key)).collect(), models }
}

fn compare_tables(path: &mut Vec<String>, old: &Dict, new: &Dict, keys: &mut Vec<Vec<String>>) {
    let mut names: Vec<&String> = old.keys().chain(new.keys()).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        path.push(name.clone());
        // If only one side has a table, compare that with an empty table, so that its keys are listed.
        match (old.get(name), new.get(name)) {
            (Some(Value::Dict(_, old)), Some(Value::Dict(_, new))) => compare_tables(path, old, new, keys),
            (Some(Value::Dict(_, old)), None) => compare_tables(path, old, &Dict::new(), keys),
            (None, Some(Value::Dict(_, new))) => compare_tables(path, &Dict::new(), new, keys),
            (old, new) if old != new => keys.push(path.clone()),
            _ => {}
        }
        path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::layers::{ConfigSources, load_config};

    fn loaded(text: &str) -> LoadedConfig {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap()
    }

    fn changed(old: &str, new: &str) -> Vec<String> {
        compare_loaded(&loaded(old), &loaded(new)).keys
    }

    #[test]
    fn whatever_differs_is_named_by_its_key() {
        let model = "[models.a]\nmodel = \"a.gguf\"\n[models.\"b.c\"]\nmodel = \"b.gguf\"\n";
        assert_eq!(changed(model, model), [""; 0]);
        let rules = format!("{model}[models.a.request]\nmax_tokens = 5\n");
        assert_eq!(changed(model, &rules), ["models.a.request.max_tokens"]);
        assert_eq!(changed(&rules, model), ["models.a.request.max_tokens"]);
        let server = format!("{model}[server]\nport = 9\n[log]\nlevel = \"debug\"\n");
        assert_eq!(changed(model, &server), ["log.level", "server.port"]);
        let alias = model.replace("b.gguf\"", "b.gguf\"\naliases = [\"x\"]");
        assert_eq!(changed(model, &alias), ["models.\"b.c\".aliases"]);
    }

    #[test]
    fn a_key_for_all_models_is_named_once_and_other_models_are_left_out() {
        let model = "[models.a]\nmodel = \"a.gguf\"\n";
        let all = format!("[defaults.policy]\nmax_requests = 7\n{model}");
        assert_eq!(changed(model, &all), ["defaults.policy.max_requests"]);
        assert_eq!(compare_loaded(&loaded(model), &loaded(&all)).models, ["a"]);
        let more = format!("{model}[models.b]\nmodel = \"b.gguf\"\n");
        assert_eq!(changed(model, &more), [""; 0]);
    }
}
