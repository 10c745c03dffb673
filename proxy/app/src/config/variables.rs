//! What an environment variable sets: `LLAMA_WARDEN_SERVER__PORT` is `server.port`.
//!
//! Variables are written in capitals, keys of the configuration in small letters, and names as their owners write them. The
//! schema knows which is which: a key is found by its small letters; a model (or a source of `[build.sources]`) is the one
//! of this very name, else the one whose name differs in case only; a variable of a process under `env` stays as it is.

use serde_json::Value;

use super::schema::{format, root};

/// The names that are known at a place of the configuration, such as those of the models.
pub(super) type Known<'a> = &'a dyn Fn(&[String]) -> Vec<String>;

/// Why a variable means nothing.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ambiguous {
    /// As it was written.
    pub(super) written: String,
    /// What it may mean.
    pub(super) names: Vec<String>,
}

/// The path that a variable sets, without the prefix. What the schema does not know stays in small letters, for the check
/// that follows.
pub(super) fn path(key: &str, known: Known<'_>) -> Result<Vec<String>, Ambiguous> {
    let parts: Vec<&str> = key.split("__").collect();
    let (mut schema, mut path, mut rest): (&Value, Vec<String>, _) = (root(), Vec::new(), parts.as_slice());
    while let Some((first, more)) = rest.split_first() {
        let small = first.to_lowercase();
        let inner = &schema["properties"][&small];
        if !inner.is_null() {
            (schema, rest) = (inner, more);
            path.push(small);
            continue;
        }
        let named = &schema["additionalProperties"];
        if !named.is_object() {
            path.extend(rest.iter().map(|part| part.to_lowercase()));
            break;
        }
        if named["format"] == format::JSON {
            // Parameters of requests. None that anybody reads has a capital letter; who writes small ones means them.
            path.extend(
                rest.iter()
                    .map(|part| if is_capitals(part) { part.to_lowercase() } else { (*part).to_owned() }),
            );
            break;
        }
        if path.last().is_some_and(|last| last == "env") {
            path.push(rest.join("__"));
            break;
        }
        let (name, used) = name(rest, &known(&path))?;
        path.push(name);
        (schema, rest) = (named, rest.get(used..).unwrap_or_default());
    }
    Ok(path)
}

fn is_capitals(text: &str) -> bool {
    !text.chars().any(char::is_lowercase)
}

/// The name at the beginning of these parts, and of how many of them it is made: names may contain two underscores, too.
fn name(parts: &[&str], known: &[String]) -> Result<(String, usize), Ambiguous> {
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
                return Err(Ambiguous { written: text, names: several.iter().copied().cloned().collect() });
            }
        }
    }
    Ok((begins(1), 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(names: &[&str], key: &str) -> Result<String, Ambiguous> {
        let known = |at: &[String]| {
            if at == ["models"] { names.iter().map(|&name| name.to_owned()).collect() } else { Vec::new() }
        };
        path(key, &known).map(|path| path.join("|"))
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
        let both =
            Ambiguous { written: "Small".to_owned(), names: vec!["small".to_owned(), "SMALL".to_owned()] };
        assert_eq!(with(&names, "MODELS__Small__REPLICAS"), Err(both));
    }
}
