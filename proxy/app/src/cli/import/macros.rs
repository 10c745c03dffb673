//! llama-swap's macros: `${NAME}`, those of a model over those of all, and `${env.NAME}`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Env;
use super::yaml::plain;

/// What names mean at one place.
#[derive(Clone, Default)]
pub(super) struct Macros<'a> {
    known: BTreeMap<String, Value>,
    env: Option<Env<'a>>,
}

/// Why a text cannot be expanded: the macro, as it is written, and what is wrong with it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) written: String,
    pub(super) why: String,
    pub(super) hint: &'static str,
}

impl<'a> Macros<'a> {
    pub(super) fn new(env: Env<'a>) -> Self {
        Self { known: BTreeMap::new(), env: Some(env) }
    }

    /// These over what is known.
    pub(super) fn with(&self, table: Option<&Value>) -> Self {
        let mut all = self.clone();
        let more = table.and_then(Value::as_object).into_iter().flatten();
        all.known.extend(more.map(|(name, value)| (name.clone(), value.clone())));
        all
    }

    pub(super) fn set(&mut self, name: &str, value: Value) {
        self.known.insert(name.to_owned(), value);
    }

    /// All texts of a value, keys of tables included. A text that is one macro becomes its value, with its type.
    pub(super) fn expand(&self, value: &Value) -> Result<Value, Wrong> {
        self.value(value, &mut Vec::new())
    }

    fn value(&self, value: &Value, within: &mut Vec<String>) -> Result<Value, Wrong> {
        match value {
            Value::String(text) => self.text(text, within),
            Value::Array(list) => {
                let each: Result<_, _> = list.iter().map(|one| self.value(one, within)).collect();
                Ok(Value::Array(each?))
            }
            Value::Object(map) => {
                let mut pairs = serde_json::Map::new();
                for (key, value) in map {
                    let key = plain(&self.text(key, within)?);
                    pairs.insert(key, self.value(value, within)?);
                }
                Ok(Value::Object(pairs))
            }
            other => Ok(other.clone()),
        }
    }

    fn text(&self, text: &str, within: &mut Vec<String>) -> Result<Value, Wrong> {
        let mut done = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let Some((name, behind)) = after.split_once('}') else { break };
            done.push_str(before);
            let named = name.strip_prefix("env.").unwrap_or(name);
            let plain_name =
                !named.is_empty() && named.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
            if !plain_name || name == "PID" {
                // A shell's own, or known only when a process runs.
                done.push_str("${");
                rest = after;
                continue;
            }
            let value = self.named(name, within)?;
            if before.is_empty() && behind.is_empty() && done.is_empty() {
                return Ok(value);
            }
            done.push_str(&plain(&value));
            rest = behind;
        }
        Ok(Value::String(done + rest))
    }

    fn named(&self, name: &str, within: &mut Vec<String>) -> Result<Value, Wrong> {
        let wrong = |why: String, hint| Wrong { written: format!("${{{name}}}"), why, hint };
        if let Some(variable) = name.strip_prefix("env.") {
            let value = self.env.and_then(|env| env(variable));
            return value.map(Value::String).ok_or_else(|| {
                wrong(format!("the variable {variable} is not set here"), "set it for the import")
            });
        }
        let Some(value) = self.known.get(name) else {
            return Err(wrong(
                "there is no such macro".to_owned(),
                "define it under `macros`, of all or of the model",
            ));
        };
        if within.iter().any(|outer| outer == name) {
            return Err(wrong(
                format!("it leads back to itself: {} -> {name}", within.join(" -> ")),
                "let no macro stand in its own value",
            ));
        }
        within.push(name.to_owned());
        let value = self.value(value, within)?;
        within.pop();
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn expand(table: &Value, text: &str) -> Result<Value, Wrong> {
        let env = |name: &str| (name == "HOME").then(|| "/home/a".to_owned());
        Macros::new(&env).with(Some(table)).expand(&json!(text))
    }

    #[test]
    fn macros_are_expanded_within_macros_and_one_alone_keeps_its_type() {
        let table = json!({ "dir": "${env.HOME}/models", "ctx": 4096, "args": "-c ${ctx}" });
        assert_eq!(expand(&table, "-m ${dir}/a.gguf ${args}").unwrap(), "-m /home/a/models/a.gguf -c 4096");
        assert_eq!(expand(&table, "${ctx}").unwrap(), 4096);
        assert_eq!(expand(&table, "${PID} ${a b} ${").unwrap(), "${PID} ${a b} ${");
    }

    #[test]
    fn circles_and_what_is_unknown_are_told() {
        let table = json!({ "a": "x ${b}", "b": "${a}" });
        assert_eq!(expand(&table, "${a}").unwrap_err().why, "it leads back to itself: a -> b -> a");
        assert_eq!(expand(&table, "${c}").unwrap_err().written, "${c}");
        assert!(expand(&table, "${env.NO}").unwrap_err().why.contains("NO is not set"));
    }
}
