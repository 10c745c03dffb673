//! Reads YAML as a JSON value (resolves merge keys, converts keys to text, keeps the order), and expands
//! llama-swap's macros: `${NAME}` and `${env.NAME}`. Macros of a model override global ones.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use serde_norway::Value as Yaml;

use super::imported::EnvLookup;
use crate::exit::CommandError;

/// The parser's time grows with the square of the nesting. Real files nest less than ten levels.
const MAX_YAML_DEPTH: usize = 1000;

/// Also counts quoted brackets.
fn is_too_deep(text: &str) -> bool {
    let mut open = 0_usize;
    text.bytes().any(|byte| {
        match byte {
            b'[' | b'{' => open += 1,
            b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        open > MAX_YAML_DEPTH
    })
}

pub(super) fn read_yaml(text: &str, from: &str) -> Result<Map<String, Value>, CommandError> {
    let hint = "give a configuration of llama-swap, or say what it is with `--from`";
    let failed = |error: serde_norway::Error| {
        let place = error.location().map_or_else(String::new, |at| format!(":{}", at.line()));
        CommandError::usage(format!("{from}{place}: this is no YAML that can be read: {error}"), hint)
    };
    if is_too_deep(text) {
        let why = format!(
            "{from}: this is no YAML that can be read: more than {MAX_YAML_DEPTH} brackets are open at a time"
        );
        return Err(CommandError::usage(why, hint));
    }
    let mut yaml: Yaml = serde_norway::from_str(text).map_err(failed)?;
    yaml.apply_merge().map_err(failed)?;
    match yaml_to_json(yaml) {
        Value::Object(map) => Ok(map),
        Value::Null => Ok(Map::new()),
        _ => Err(CommandError::usage(format!("{from}: this is no table of settings"), hint)),
    }
}

fn yaml_to_json(yaml: Yaml) -> Value {
    match yaml {
        Yaml::Null => Value::Null,
        Yaml::Bool(is) => Value::Bool(is),
        Yaml::Number(number) => serde_json::to_value(number).unwrap_or(Value::Null),
        Yaml::String(text) => Value::String(text),
        Yaml::Sequence(list) => Value::Array(list.into_iter().map(yaml_to_json).collect()),
        Yaml::Mapping(map) => {
            let pair = |(key, value)| (plain_text(&yaml_to_json(key)), yaml_to_json(value));
            Value::Object(map.into_iter().map(pair).collect())
        }
        Yaml::Tagged(tagged) => yaml_to_json(tagged.value),
    }
}

pub(super) fn plain_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

pub(super) fn line_of(text: &str, what: &str) -> String {
    line_after(text, "", what)
}

/// Returns `:LINE` for a message. Prefers a line with `what` at or after the first line with `first`.
pub(super) fn line_after(text: &str, first: &str, what: &str) -> String {
    let has = |line: &str, what: &str| !line.trim_start().starts_with('#') && line.contains(what);
    let from = text.lines().position(|line| has(line, first)).unwrap_or_default();
    let behind = text.lines().skip(from).position(|line| has(line, what)).map(|at| from + at);
    let at = behind.or_else(|| text.lines().position(|line| has(line, what)));
    at.map_or_else(String::new, |at| format!(":{}", at + 1))
}

/// Real files nest macros at most three deep.
const MAX_MACRO_DEPTH: usize = 32;

/// In bytes, including intermediate values: macros that double each other would exhaust the memory.
const MAX_EXPANDED_BYTES: usize = 1 << 20;

#[derive(Clone, Default)]
pub(super) struct MacroScope<'a> {
    known: BTreeMap<String, Value>,
    env: Option<EnvLookup<'a>>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct MacroError {
    pub(super) written: String,
    pub(super) why: String,
    pub(super) hint: &'static str,
}

impl MacroError {
    pub(super) fn at(&self, from: &str, line: &str) -> CommandError {
        CommandError::usage(format!("{from}{line}: {}: {}", self.written, self.why), self.hint)
    }
}

struct ExpansionState {
    /// Macros being expanded, outermost first.
    within: Vec<String>,
    left: usize,
}

impl ExpansionState {
    /// An empty macro counts as one byte, because its expansion takes time, too.
    fn count_bytes(&mut self, bytes: usize) -> Result<(), MacroError> {
        let Some(name) = self.within.last() else { return Ok(()) };
        let left = self.left.checked_sub(bytes.max(1));
        self.left = left.ok_or_else(|| limit_error(name, "it becomes longer than any setting can be"))?;
        Ok(())
    }
}

impl<'a> MacroScope<'a> {
    pub(super) fn new(env: EnvLookup<'a>) -> Self {
        Self { known: BTreeMap::new(), env: Some(env) }
    }

    /// Macros of `table` override known ones.
    pub(super) fn with(&self, table: Option<&Value>) -> Self {
        let mut all = self.clone();
        let more = table.and_then(Value::as_object).into_iter().flatten();
        all.known.extend(more.map(|(name, value)| (name.clone(), value.clone())));
        all
    }

    pub(super) fn set(&mut self, name: &str, value: Value) {
        self.known.insert(name.to_owned(), value);
    }

    /// Also expands keys of tables. A text that is a single macro becomes the macro's value, with its type.
    pub(super) fn expand(&self, value: &Value) -> Result<Value, MacroError> {
        self.value(value, &mut ExpansionState { within: Vec::new(), left: MAX_EXPANDED_BYTES })
    }

    fn value(&self, value: &Value, way: &mut ExpansionState) -> Result<Value, MacroError> {
        way.count_bytes(value.as_str().map_or(0, str::len))?;
        match value {
            Value::String(text) => self.text(text, way),
            Value::Array(list) => {
                let each: Result<_, _> = list.iter().map(|one| self.value(one, way)).collect();
                Ok(Value::Array(each?))
            }
            Value::Object(map) => {
                let mut pairs = Map::new();
                for (key, value) in map {
                    let key = plain_text(&self.text(key, way)?);
                    pairs.insert(key, self.value(value, way)?);
                }
                Ok(Value::Object(pairs))
            }
            other => Ok(other.clone()),
        }
    }

    fn text(&self, text: &str, way: &mut ExpansionState) -> Result<Value, MacroError> {
        let mut done = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let Some((name, behind)) = after.split_once('}') else { break };
            done.push_str(before);
            let named = name.strip_prefix("env.").unwrap_or(name);
            let plain_name =
                !named.is_empty() && named.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
            if !plain_name || name == "PID" {
                // Keep the text: the shell expands it, or its value is unknown before a process runs.
                done.push_str("${");
                rest = after;
                continue;
            }
            let value = self.named(name, way)?;
            if before.is_empty() && behind.is_empty() && done.is_empty() {
                return Ok(value);
            }
            let value = plain_text(&value);
            way.count_bytes(value.len())?;
            done.push_str(&value);
            rest = behind;
        }
        Ok(Value::String(done + rest))
    }

    fn named(&self, name: &str, way: &mut ExpansionState) -> Result<Value, MacroError> {
        let wrong = |why: String, hint| MacroError { written: format!("${{{name}}}"), why, hint };
        if let Some(variable) = name.strip_prefix("env.") {
            // Keep an unset variable, because the text around it may not be needed.
            let value = self.env.and_then(|env| env(variable));
            return Ok(Value::String(value.unwrap_or_else(|| format!("${{{name}}}"))));
        }
        let Some(value) = self.known.get(name) else {
            let hint = match self.env.and_then(|env| env(name)) {
                Some(_) => "write a variable as `${env.NAME}`",
                None => "define it under `macros`, of all or of the model",
            };
            return Err(wrong("there is no such macro".to_owned(), hint));
        };
        if way.within.iter().any(|outer| outer == name) {
            return Err(wrong(
                format!("it leads back to itself: {} -> {name}", way.within.join(" -> ")),
                "let no macro stand in its own value",
            ));
        }
        if way.within.len() >= MAX_MACRO_DEPTH {
            return Err(limit_error(name, "it is nested in more than 32 others"));
        }
        way.within.push(name.to_owned());
        let value = self.value(value, way)?;
        way.within.pop();
        Ok(value)
    }
}

pub(super) fn unset_variable(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("${env.")?;
    rest.split_once('}').map(|(name, _)| name)
}

/// Returns whether a process would inherit the variable from llama-warden anyway.
pub(super) fn is_inherited(name: &str, value: &str) -> bool {
    value.strip_prefix("${env.").and_then(|rest| rest.strip_suffix('}')) == Some(name)
}

pub(super) fn inherited_note(name: &str) -> String {
    format!("{name} comes from the environment of llama-warden")
}

fn limit_error(name: &str, why: &str) -> MacroError {
    MacroError { written: format!("${{{name}}}"), why: why.to_owned(), hint: "write out what it stands for" }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn expand(table: &Value, text: &str) -> Result<Value, MacroError> {
        let env = |name: &str| (name == "HOME").then(|| "/home/a".to_owned());
        MacroScope::new(&env).with(Some(table)).expand(&json!(text))
    }

    #[test]
    fn macros_are_expanded_within_macros_and_one_alone_keeps_its_type() {
        let table = json!({ "dir": "${env.HOME}/models", "ctx": 4096, "args": "-c ${ctx}" });
        assert_eq!(expand(&table, "-m ${dir}/a.gguf ${args}").unwrap(), "-m /home/a/models/a.gguf -c 4096");
        assert_eq!(expand(&table, "${ctx}").unwrap(), 4096);
        assert_eq!(expand(&table, "${PID} ${a b} ${").unwrap(), "${PID} ${a b} ${");
    }

    #[test]
    fn macros_that_double_each_other_or_lead_on_for_ever_end() {
        for one in ["${m1}${m1}", "x ${m1} ${m1} ${m1}", "${m1}"] {
            let mut table = Map::new();
            for n in 0..100_000 {
                table.insert(format!("m{n}"), json!(one.replace("m1", &format!("m{}", n + 1))));
            }
            let told = expand(&Value::Object(table), "${m0}").unwrap_err();
            assert!(told.why.contains("more than 32 others"), "{told:?}");
        }
        // Maximum depth, ending in an empty text, or with a list at each level.
        for one in [json!("${m1}${m1}"), json!(["${m1}", "${m1}"])] {
            let mut table: Map<_, _> = (0..30)
                .map(|n| {
                    let text = one.to_string().replace("m1", &format!("m{}", n + 1));
                    (format!("m{n}"), serde_json::from_str(&text).unwrap())
                })
                .collect();
            table.insert("m30".to_owned(), json!(""));
            let told = expand(&Value::Object(table), "${m0}").unwrap_err();
            assert!(told.why.contains("longer than any setting"), "{told:?}");
        }
    }

    #[test]
    fn circles_and_what_is_unknown_are_told() {
        let table = json!({ "a": "x ${b}", "b": "${a}" });
        assert_eq!(expand(&table, "${a}").unwrap_err().why, "it leads back to itself: a -> b -> a");
        assert_eq!(expand(&table, "${c}").unwrap_err().written, "${c}");
        let written = expand(&table, "x=${env.NO}").unwrap();
        assert_eq!((written.as_str(), unset_variable("x=${env.NO}")), (Some("x=${env.NO}"), Some("NO")));
        assert!(is_inherited("NO", "${env.NO}") && !is_inherited("NO", "a${env.NO}"));
        assert_eq!(expand(&table, "${HOME}").unwrap_err().hint, "write a variable as `${env.NAME}`");
    }
}
