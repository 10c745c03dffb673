//! Validates single values against the JSON Schema: durations, sizes, choices, and formats of this crate.
//! Each check returns a message that shows the expected form, or `None` if the value is valid.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde_json::Value;
use warden_builder::git::{GitLocation, GitSource};
use warden_policies::defaults::parse_duration;
use warden_policies::hosts::HostPattern;
use warden_policies::origins::WebOrigin;
use warden_policies::schedule::DayWindows;
use warden_policies::units::{SizeError, format_span};
use warden_policies::{AllowedOrigins, ByteSize, HostNames, MemoryLimit};

use crate::problem::ConfigPlace;
use crate::schema::format;
use crate::source::tree::{ConfigNode, ConfigValue};

/// Checks a value that is neither a table nor a list of values.
pub(crate) fn check_value(node: &ConfigNode, schema: &Value) -> Option<String> {
    match schema["format"].as_str() {
        Some(format::DURATION | format::LIMIT_OF_WORK) => check_duration(node, schema),
        Some(format::SIZE) => check_size(node, parse_error::<ByteSize>),
        Some(format::LIMIT | format::BUDGET) if node.kind == ConfigValue::Int(0) => {
            Some(always_exceeded("0"))
        }
        Some(format::LIMIT) => check_size(node, |text| match text.parse() {
            Ok(MemoryLimit::Auto) => Some(
                "`auto` is for the budgets of one model; a size or a share is needed, like `12GiB` or `80%`"
                    .to_owned(),
            ),
            parsed => limit_error(text, parsed),
        }),
        Some(format::BUDGET) => check_size(node, |text| limit_error(text, text.parse())),
        Some(format::WINDOWS) => check_windows(node),
        Some(format::ORIGINS) => check_origins(node),
        Some(format::NAMES) => check_names(node),
        Some(format::GIT) => check_git(node),
        Some(format::JSON) => check_json(node),
        _ if schema["enum"].is_array() => check_choice(node, schema),
        _ => check_scalar(node, schema),
    }
}

pub(crate) fn accepts_type(schema: &Value, kind: &str) -> bool {
    match &schema["type"] {
        Value::String(one) => one == kind,
        Value::Array(several) => several.iter().any(|one| one == kind),
        _ => false,
    }
}

/// Converts the raw text of a node to the type of the schema. Text of another form stays text, which the
/// check then reports.
pub(crate) fn convert_raw(text: &str, place: &ConfigPlace, schema: &Value) -> ConfigValue {
    let parsed = text.trim().parse::<toml_edit::Value>().ok();
    let parsed = parsed.map(|value| ConfigNode::from_value(&value, &|_| place.clone()).kind);
    let is_wanted = |kind: &ConfigValue| match kind {
        ConfigValue::List(_) if accepts_type(schema, "array") => true,
        ConfigValue::Int(_) if accepts_type(schema, "integer") => true,
        ConfigValue::Text(_) | ConfigValue::Raw(_) | ConfigValue::Date => false,
        _ => !accepts_type(schema, "string"),
    };
    parsed.filter(is_wanted).unwrap_or_else(|| ConfigValue::Text(text.to_owned()))
}

fn parse_error<T: FromStr<Err: ToString>>(text: &str) -> Option<String> {
    text.parse::<T>().err().map(|error| error.to_string())
}

fn limit_error(text: &str, parsed: Result<MemoryLimit, SizeError>) -> Option<String> {
    match parsed {
        Ok(MemoryLimit::Bytes(ByteSize(0))) => Some(always_exceeded(text)),
        parsed => parsed.err().map(|error| error.to_string()),
    }
}

fn always_exceeded(text: &str) -> String {
    format!("`{text}` is always passed; for no budget leave the key out")
}

fn check_duration(node: &ConfigNode, schema: &Value) -> Option<String> {
    let text = match &node.kind {
        ConfigValue::Text(text) => text,
        ConfigValue::Int(number) => {
            return Some(format!("`{number}` has no unit: write a duration in quotes, like `\"{number}s\"`"));
        }
        _ => {
            return Some(format!("this is {}; a duration in quotes is needed, like `\"30s\"`", node.noun()));
        }
    };
    let given = match parse_duration(text) {
        Ok(given) => given,
        Err(error) => return Some(error.to_string()),
    };
    let bound = |key: &str| schema[key].as_str().and_then(|text| parse_duration(text).ok());
    let least = bound(format::MIN_DURATION);
    let most = bound(format::MAX_DURATION);
    if least.is_none_or(|least| given >= least) && most.is_none_or(|most| given <= most) {
        return None;
    }
    Some(match (least.map(format_span), most.map(format_span)) {
        (Some(least), Some(most)) => format!("`{text}` is out of range: it goes from {least} to {most}"),
        (Some(least), None) => format!("`{text}` is too short: {least} is the least"),
        _ => format!("`{text}` is out of range"),
    })
}

fn check_size(node: &ConfigNode, error: impl Fn(&str) -> Option<String>) -> Option<String> {
    match &node.kind {
        ConfigValue::Text(text) => error(text),
        ConfigValue::Int(number) if *number >= 0 => None,
        ConfigValue::Int(number) => {
            Some(format!("`{number}` is negative; a size is needed, like `\"12GiB\"`"))
        }
        _ => Some(format!("this is {}; a size in quotes is needed, like `\"12GiB\"`", node.noun())),
    }
}

fn check_windows(node: &ConfigNode) -> Option<String> {
    let wanted = "a time of day from when to when is needed, like `\"02:00-05:00\"`";
    match &node.kind {
        ConfigValue::Text(text) => parse_error::<DayWindows>(text),
        ConfigValue::List(items) => items.iter().find_map(|item| match &item.kind {
            ConfigValue::Text(text) => parse_error::<DayWindows>(text),
            _ => Some(format!("this is {}; {wanted}", item.noun())),
        }),
        _ => Some(format!("this is {}; {wanted}", node.noun())),
    }
}

fn check_origins(node: &ConfigNode) -> Option<String> {
    let whole = |text: &str| AllowedOrigins::parse(&[text]).err().map(|error| error.to_string());
    check_words::<WebOrigin>(node, whole, "`\"mirror\"`, `\"off\"` or a list of origins")
}

fn check_names(node: &ConfigNode) -> Option<String> {
    let whole = |text: &str| HostNames::parse(&[text]).err().map(|error| error.to_string());
    check_words::<HostPattern>(node, whole, "`\"auto\"`, `\"any\"` or a list of host names")
}

/// Checks a text, or a list of texts of type `T`.
fn check_words<T: FromStr<Err: ToString>>(
    node: &ConfigNode,
    whole: impl Fn(&str) -> Option<String>,
    wanted: &str,
) -> Option<String> {
    let wrong = || format!("this is {}; {wanted} is needed", node.noun());
    match &node.kind {
        ConfigValue::Text(text) => whole(text),
        ConfigValue::List(items) => items.iter().find_map(|item| match &item.kind {
            ConfigValue::Text(text) => parse_error::<T>(text),
            _ => Some(wrong()),
        }),
        _ => Some(wrong()),
    }
}

/// Checks that a value can be written as JSON, which has no dates and no infinite numbers.
fn check_json(node: &ConfigNode) -> Option<String> {
    match &node.kind {
        ConfigValue::Date => Some("this is a date, which JSON does not have; put it in quotes".to_owned()),
        ConfigValue::Float(number) if !number.is_finite() => {
            Some(format!("`{number}` is no number that JSON has"))
        }
        ConfigValue::List(items) => items.iter().find_map(check_json),
        ConfigValue::Table(entries) => entries.iter().find_map(|entry| check_json(&entry.value)),
        _ => None,
    }
}

fn check_git(node: &ConfigNode) -> Option<String> {
    let ConfigValue::Text(text) = &node.kind else {
        return Some(format!("this is {}; a URL or a path in quotes is needed", node.noun()));
    };
    match GitSource::parse(text, &BTreeMap::new()) {
        Ok(GitSource { location: GitLocation::Path(_), .. })
            if !text.starts_with('/') && !text.starts_with("file:///") =>
        {
            Some("a path has to be absolute here; a URL begins with `https://`".to_owned())
        }
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    }
}

fn check_choice(node: &ConfigNode, schema: &Value) -> Option<String> {
    let choices: Vec<&str> = schema["enum"].as_array()?.iter().filter_map(Value::as_str).collect();
    let listed = choices.iter().map(|choice| format!("`{choice}`")).collect::<Vec<_>>().join(", ");
    match &node.kind {
        ConfigValue::Text(text) if choices.contains(&text.as_str()) => None,
        ConfigValue::Text(text) => Some(format!("`{text}` is none of {listed}")),
        _ => Some(format!("this is {}; one of {listed} is needed, in quotes", node.noun())),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a comparison with the small bounds of the schema")]
fn check_scalar(node: &ConfigNode, schema: &Value) -> Option<String> {
    let wanted = if accepts_type(schema, "string") {
        "text in quotes"
    } else if accepts_type(schema, "boolean") {
        "`true` or `false`"
    } else if accepts_type(schema, "integer") {
        "a whole number"
    } else {
        "a number"
    };
    let number = match &node.kind {
        ConfigValue::Text(_) if accepts_type(schema, "string") => return None,
        ConfigValue::Bool(_) if accepts_type(schema, "boolean") => return None,
        ConfigValue::Int(number) if accepts_type(schema, "integer") || accepts_type(schema, "number") => {
            *number as f64
        }
        ConfigValue::Float(number) if accepts_type(schema, "number") => *number,
        ConfigValue::Text(text) => return Some(format!("`{text}` is text; {wanted} is needed")),
        _ => return Some(format!("this is {}; {wanted} is needed", node.noun())),
    };
    let low = schema["minimum"].as_f64();
    let high = schema["maximum"].as_f64();
    let outside =
        number.is_nan() || low.is_some_and(|low| number < low) || high.is_some_and(|high| number > high);
    outside.then(|| match (low, high) {
        (Some(low), Some(high)) => format!("`{number}` is out of range: it goes from {low} to {high}"),
        (Some(low), None) => format!("`{number}` is too small: {low} is the least"),
        _ => format!("`{number}` is out of range"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_always_be_due_is_refused_with_the_least_that_is_not() {
        let node = |kind: ConfigValue| ConfigNode::new(kind);
        let text = |text: &str| ConfigValue::Text(text.to_owned());
        let age =
            serde_json::json!({ "type": "string", "format": format::DURATION, format::MIN_DURATION: "1s" });
        assert_eq!(check_value(&node(text("1s")), &age), None);
        assert_eq!(
            check_value(&node(text("0s")), &age).as_deref(),
            Some("`0s` is too short: 1 s is the least")
        );
        for format in [format::LIMIT, format::BUDGET] {
            let budget = serde_json::json!({ "type": ["string", "integer"], "format": format });
            for zero in [text("0"), text("0GiB"), text("0.0"), ConfigValue::Int(0)] {
                let told = check_value(&node(zero), &budget).unwrap();
                assert!(told.contains("always passed; for no budget leave the key out"), "{told}");
            }
            assert_eq!(check_value(&node(text("1%")), &budget), None);
        }
        let size = serde_json::json!({ "type": ["string", "integer"], "format": format::SIZE });
        assert_eq!(check_value(&node(text("0")), &size), None, "for other sizes nothing may mean something");
    }

    #[test]
    fn text_from_the_environment_gets_the_type_that_the_schema_wants() {
        let schema = |kind: &str| serde_json::json!({ "type": kind });
        let convert = |text: &str, schema: &Value| convert_raw(text, &ConfigPlace::Nowhere, schema);
        assert_eq!(convert("1", &schema("integer")), ConfigValue::Int(1));
        assert_eq!(convert("1", &schema("string")), ConfigValue::Text("1".to_owned()));
        assert_eq!(convert("true", &schema("boolean")), ConfigValue::Bool(true));
        assert_eq!(convert("12GiB", &schema("string")), ConfigValue::Text("12GiB".to_owned()));
        assert!(
            matches!(convert("[\"-c\", \"1\"]", &schema("array")), ConfigValue::List(items) if items.len() == 2)
        );
        let size = serde_json::json!({ "type": ["string", "integer"], "format": format::SIZE });
        assert_eq!(convert("512", &size), ConfigValue::Int(512));
    }
}
