//! Finds the keys that differ between two configurations. The parsed trees are compared, so no key can be
//! forgotten.

use std::collections::BTreeSet;

use super::problem::dotted_key;
use super::source::layers::LoadedConfig;
use super::source::tree::{ConfigNode, ConfigValue};

/// Differences between two configurations.
#[derive(Debug, Default)]
pub struct ConfigChanges {
    /// Changed keys, without their values, which may be secrets. A key of a model is given with the model's
    /// name. A model's key is left out if the same key of `defaults` has changed.
    pub keys: Vec<String>,
    /// Models that are in both configurations and have changed.
    pub models: Vec<String>,
}

/// Compares two configurations. Ignores models that only one of them has.
pub fn compare_loaded(old: &LoadedConfig, new: &LoadedConfig) -> ConfigChanges {
    let mut keys = Vec::new();
    let mut models = Vec::new();
    for name in either_keys(&old.tree, &new.tree).filter(|name| *name != "models") {
        compare(&mut vec![name.to_owned()], old.tree.find(&[name]), new.tree.find(&[name]), &mut keys);
    }
    let shared: Vec<Vec<String>> =
        keys.iter().filter(|key| key[0] == "defaults").map(|key| key[1..].to_vec()).collect();
    let figment = |node: Option<&ConfigNode>| node.map(ConfigNode::to_figment);
    let same_defaults = figment(old.tree.find(&["defaults"])) == figment(new.tree.find(&["defaults"]));
    for (name, _) in &new.models {
        if !old.models.iter().any(|(known, _)| known == name)
            || (same_defaults && figment(old.own_table(name)) == figment(new.own_table(name)))
        {
            continue;
        }
        let mut changed = Vec::new();
        let before = old.merged_table(name);
        compare(&mut Vec::new(), Some(&before), Some(&new.merged_table(name)), &mut changed);
        if !changed.is_empty() {
            models.push(name.clone());
        }
        changed.retain(|key| !shared.contains(key));
        let of_model = |key: Vec<String>| [vec!["models".to_owned(), name.clone()], key].concat();
        keys.extend(changed.into_iter().map(of_model));
    }
    ConfigChanges { keys: keys.iter().map(|key| dotted_key(key)).collect(), models }
}

fn either_keys<'a>(old: &'a ConfigNode, new: &'a ConfigNode) -> impl Iterator<Item = &'a str> {
    let names: BTreeSet<&str> =
        old.entries().iter().chain(new.entries()).map(|entry| entry.key.as_str()).collect();
    names.into_iter()
}

fn compare(
    path: &mut Vec<String>,
    old: Option<&ConfigNode>,
    new: Option<&ConfigNode>,
    keys: &mut Vec<Vec<String>>,
) {
    let is_table =
        |node: Option<&ConfigNode>| node.is_none_or(|node| matches!(node.kind, ConfigValue::Table(_)));
    if !is_table(old) || !is_table(new) {
        // Compare values only: a value may move to another line or file.
        if old.map(ConfigNode::to_figment) != new.map(ConfigNode::to_figment) {
            keys.push(path.clone());
        }
        return;
    }
    // If only one side has a table, compare that with an empty table, so that its keys are listed.
    let empty = ConfigNode::table();
    let old = old.unwrap_or(&empty);
    let new = new.unwrap_or(&empty);
    for name in either_keys(old, new) {
        path.push(name.to_owned());
        compare(path, old.find(&[name]), new.find(&[name]), keys);
        path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::layers::loaded;

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
