//! Reads YAML as a JSON value: resolves merge keys, converts keys to text, keeps the order.

use serde_json::{Map, Value};
use serde_norway::Value as Yaml;

use crate::exit::CommandError;

/// Maximum nesting of lists and tables. The parser's time grows with its square; real files nest less than
/// ten levels.
const MAX_YAML_DEPTH: usize = 1000;

/// Returns whether brackets nest too deeply. Counts quoted brackets, too.
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

/// Reads a whole file, which must be a table.
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

/// Formats a value for a command line.
pub(super) fn plain_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The first line that contains a text, for a message: `:12`.
pub(super) fn line_of(text: &str, what: &str) -> String {
    line_after(text, "", what)
}

/// The first line with `what` behind the first line with `first`, for a message.
pub(super) fn line_after(text: &str, first: &str, what: &str) -> String {
    let has = |line: &str, what: &str| !line.trim_start().starts_with('#') && line.contains(what);
    let from = text.lines().position(|line| has(line, first)).unwrap_or_default();
    let behind = text.lines().skip(from).position(|line| has(line, what)).map(|at| from + at);
    let at = behind.or_else(|| text.lines().position(|line| has(line, what)));
    at.map_or_else(String::new, |at| format!(":{}", at + 1))
}
