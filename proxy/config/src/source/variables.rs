//! Converts environment variables to settings: `LLAMA_WARDEN_SERVER__PORT` is `server.port`.
//!
//! Variables are written in capitals, keys in small letters, and names in any case; the schema shows which
//! part of a variable is a key and which is a name. A key is found by its lower-case form. A part that
//! names a model (or a source of `[build.sources]`) stands for the model of exactly this name, else for the
//! one that differs only in case. Below `env`, the name of a process's variable stays as written.

use std::collections::BTreeSet;

use super::tree::{ConfigNode, ConfigValue};
use crate::problem::{ConfigPlace, ConfigProblem, similarity};
use crate::schema::format;
use crate::schema::root::root_schema;

/// Prefix of environment variables; two underscores separate sections and keys after it.
pub const ENV_PREFIX: &str = "LLAMA_WARDEN_";

/// Returns the known names at a path of the configuration, such as those of the models.
type KnownNames<'a> = &'a dyn Fn(&[String]) -> Vec<String>;

#[derive(Debug, PartialEq, Eq)]
struct AmbiguousVariable {
    written: String,
    names: Vec<String>,
}

/// Returns the path that a variable (without its prefix) sets. The validation reports unknown parts.
fn variable_path(key: &str, known: KnownNames<'_>) -> Result<Vec<String>, AmbiguousVariable> {
    let parts: Vec<&str> = key.split("__").collect();
    let mut rest = parts.as_slice();
    let mut schema = root_schema();
    let mut path: Vec<String> = Vec::new();
    while let Some((first, more)) = rest.split_first() {
        let small = first.to_lowercase();
        let inner = &schema["properties"][&small];
        if !inner.is_null() {
            schema = inner;
            rest = more;
            path.push(small);
            continue;
        }
        let named = &schema["additionalProperties"];
        if !named.is_object() {
            path.extend(rest.iter().map(|part| part.to_lowercase()));
            break;
        }
        if named["format"] == format::JSON {
            // A request parameter written in capitals becomes lower-case: no known parameter has capitals.
            let is_capitals = |part: &str| !part.chars().any(char::is_lowercase);
            let lower =
                |part: &&str| if is_capitals(part) { part.to_lowercase() } else { (*part).to_owned() };
            path.extend(rest.iter().map(lower));
            break;
        }
        if path.last().is_some_and(|last| last == "env") {
            path.push(rest.join("__"));
            break;
        }
        let (name, used) = leading_name(rest, &known(&path))?;
        path.push(name);
        schema = named;
        rest = rest.get(used..).unwrap_or_default();
    }
    Ok(path)
}

/// Finds the name at the beginning of these parts, which may contain `__`, and its number of parts.
fn leading_name(parts: &[&str], known: &[String]) -> Result<(String, usize), AmbiguousVariable> {
    let begins = |used: usize| parts.get(..used).unwrap_or_default().join("__");
    let longest_first = || (1..=parts.len()).rev().map(|used| (begins(used), used));
    if let Some(exact) = longest_first().find(|(text, _)| known.contains(text)) {
        return Ok(exact);
    }
    for (text, used) in longest_first() {
        let alike: Vec<&String> =
            known.iter().filter(|name| name.to_lowercase() == text.to_lowercase()).collect();
        match alike.as_slice() {
            [] => {}
            [one] => return Ok(((*one).clone(), used)),
            several => {
                let names = several.iter().copied().cloned().collect();
                return Err(AmbiguousVariable { written: text, names });
            }
        }
    }
    Ok((begins(1), 1))
}

/// Returns a tree for each variable of the environment. `others`: all other layers, which contain the known
/// names. Variables without `__` are ignored.
pub(crate) fn environment_trees(
    env: Vec<(String, String)>,
    others: &[&ConfigNode],
) -> (Vec<ConfigNode>, Vec<ConfigProblem>) {
    let known = |path: &[String]| {
        let entries = others.iter().filter_map(|layer| layer.find(path)).flat_map(ConfigNode::entries);
        entries.map(|entry| entry.key.clone()).collect::<BTreeSet<_>>().into_iter().collect()
    };
    let mut trees = Vec::new();
    let mut problems = Vec::new();
    for (name, value) in env {
        let Some(key) = name.strip_prefix(ENV_PREFIX).filter(|key| key.contains("__")) else { continue };
        let path = variable_path(key, &known);
        let place = ConfigPlace::Env(name);
        match path {
            Ok(path) => {
                let value = ConfigNode::new(ConfigValue::Raw(value));
                trees.push(ConfigNode::with_value(&place, &path, value));
            }
            Err(AmbiguousVariable { written, names }) => {
                let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ");
                let problem = ConfigProblem::new(place, format!("`{written}` may be {names}"));
                problems.push(problem.with_hint("write the name in the variable exactly as it is"));
            }
        }
    }
    problems.extend(unknown_models(&trees, &known(&["models".to_owned()])));
    (trees, problems)
}

/// Reports models that only variables mention and that have nothing to serve: likely misspelt names.
fn unknown_models(trees: &[ConfigNode], known: &[String]) -> Vec<ConfigProblem> {
    // The tree of a variable has at most one model.
    let models = trees.iter().filter_map(|tree| Some((tree, tree.find(&["models"])?.entries().first()?)));
    let has_server = |model: &ConfigNode| {
        let variables = model.find(&["env"]).map_or(&[][..], ConfigNode::entries);
        model.entry("model").or_else(|| model.entry("args")).is_some()
            || variables.iter().any(|entry| entry.key.starts_with("LLAMA_ARG_"))
    };
    let served = models.clone().filter(|(_, model)| has_server(&model.value));
    let served: Vec<&str> = served.map(|(_, model)| model.key.as_str()).collect();
    let mut reported = BTreeSet::new();
    let mut problems = Vec::new();
    for (tree, model) in models {
        let name = &model.key;
        if known.contains(name) || served.contains(&name.as_str()) || !reported.insert(name) {
            continue;
        }
        let near = nearest_name(name, known.iter().map(String::as_str).chain(served.iter().copied()));
        let hint = near.map_or_else(
            || format!("`{ENV_PREFIX}MODELS__{name}__MODEL` would say which file it serves"),
            |near| format!("the nearest is `{near}`"),
        );
        let message = format!("there is no model `{name}`");
        problems.push(ConfigProblem::new(tree.place.clone(), message).with_hint(hint));
    }
    problems
}

fn nearest_name<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let small = name.to_lowercase();
    let scored = all.map(|one| (similarity(&small, &one.to_lowercase()), one));
    scored.filter(|(score, _)| *score >= 0.7).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, one)| one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(names: &[&str], key: &str) -> Result<String, AmbiguousVariable> {
        let known = |at: &[String]| {
            if at == ["models"] { names.iter().map(|&name| name.to_owned()).collect() } else { Vec::new() }
        };
        variable_path(key, &known).map(|path| path.join("|"))
    }

    #[test]
    fn keys_become_small_and_names_stay() {
        for (key, wanted) in [
            ("SERVER__PORT", "server|port"),
            ("Defaults__Policy__HOST__SOFT", "defaults|policy|host|soft"),
            ("DEFAULTS__ENV__GGML_CUDA_DISABLE_GRAPHS", "defaults|env|GGML_CUDA_DISABLE_GRAPHS"),
            ("DEFAULTS__ENV__no_proxy", "defaults|env|no_proxy"),
            ("DEFAULTS__ENV__A__B", "defaults|env|A__B"),
            ("MODELS__Qwen3__ENV__HF_TOKEN", "models|Qwen3|env|HF_TOKEN"),
            ("DEFAULTS__REQUEST__SET__TEMPERATURE", "defaults|request|set|temperature"),
            ("DEFAULTS__REQUEST__SET__topP", "defaults|request|set|topP"),
            ("SERVER__PROT", "server|prot"),
            ("QUEUE__WAIT", "queue|wait"),
        ] {
            assert_eq!(with(&["Qwen3"], key), Ok(wanted.to_owned()), "{key}");
        }
    }

    #[test]
    fn a_model_is_meant_by_its_name_or_as_the_one_that_differs_in_case() {
        let names = ["Qwen3", "small", "SMALL", "a__b", "org/Big-GGUF:Q4"];
        for (key, wanted) in [
            ("MODELS__QWEN3__REPLICAS", "models|Qwen3|replicas"),
            ("MODELS__qwen3__REPLICAS", "models|Qwen3|replicas"),
            ("MODELS__small__REPLICAS", "models|small|replicas"),
            ("MODELS__SMALL__REPLICAS", "models|SMALL|replicas"),
            ("MODELS__A__B__QUEUE__DEPTH", "models|a__b|queue|depth"),
            ("MODELS__ORG/BIG-GGUF:Q4__PRELOAD", "models|org/Big-GGUF:Q4|preload"),
            ("MODELS__Other__PRELOAD", "models|Other|preload"),
        ] {
            assert_eq!(with(&names, key), Ok(wanted.to_owned()), "{key}");
        }
        let both = AmbiguousVariable {
            written: "Small".to_owned(),
            names: vec!["small".to_owned(), "SMALL".to_owned()],
        };
        assert_eq!(with(&names, "MODELS__Small__REPLICAS"), Err(both));
    }
}
