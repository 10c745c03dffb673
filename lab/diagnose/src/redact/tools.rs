//! Redacts tools and JSON schemas of answers. They stay valid and keep their form, because a server makes a
//! grammar of them. Names get the same replacements as in calls.

use serde_json::{Map, Value, json};

use super::fields::LISTS;
use super::made::ReplacementMaker;

impl ReplacementMaker {
    /// Redacts a tool of a chat, of a response, or of Anthropic's messages.
    pub(super) fn replace_tool(&self, tool: &Value) -> Value {
        let Value::Object(fields) = tool else { return Value::Null };
        let mut made = Map::new();
        for (name, value) in fields {
            let other = match (name.as_str(), value) {
                // A tool built into another server does not exist in a replay, so its type is replaced.
                ("type", Value::String(kind)) if kind == "function" || kind == "custom" => value.clone(),
                ("type", Value::String(kind)) => json!(self.replace_name(kind)),
                ("name", Value::String(name)) => json!(self.replace_name(name)),
                ("description", Value::String(text)) => json!(self.replace_words(text)),
                ("parameters" | "input_schema", schema) => self.replace_schema(schema),
                ("function", function) => self.replace_tool(function),
                ("strict", Value::Bool(_)) => value.clone(),
                _ => continue,
            };
            made.insert(name.clone(), other);
        }
        Value::Object(made)
    }

    pub(super) fn replace_schema(&self, schema: &Value) -> Value {
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Array(all) => return all.iter().map(|one| self.replace_schema(one)).collect(),
            Value::Bool(_) => return schema.clone(),
            Value::String(_) | Value::Number(_) | Value::Null => return Value::Null,
        };
        let mut made = Map::new();
        for (name, value) in fields {
            if let Some(value) = self.replace_keyword(name, value) {
                made.insert(name.clone(), value);
            }
        }
        Value::Object(made)
    }

    fn replace_keyword(&self, name: &str, value: &Value) -> Option<Value> {
        let is_type = |value: &Value| value.as_str().is_some_and(|text| LISTS.schema.types.contains(text));
        match (name, value) {
            ("type", Value::String(_)) => is_type(value).then(|| value.clone()),
            ("type", Value::Array(all)) => Some(all.iter().filter(|one| is_type(one)).cloned().collect()),
            ("format", Value::String(text)) => LISTS.schema.formats.contains(text).then(|| value.clone()),
            ("title" | "description" | "$comment", Value::String(text)) => {
                Some(json!(self.replace_words(text)))
            }
            ("required", Value::Array(all)) => Some(
                all.iter().filter_map(Value::as_str).map(|name| json!(self.replace_name(name))).collect(),
            ),
            ("enum", Value::Array(all)) => Some(all.iter().map(|one| self.replace_value(one)).collect()),
            ("const" | "default" | "examples", _) => Some(self.replace_value(value)),
            ("$ref", Value::String(place)) => self.reference(place).map(Value::String),
            (_, Value::Number(_) | Value::Bool(_)) if LISTS.schema.kept.contains(name) => Some(value.clone()),
            (_, Value::Object(all)) if LISTS.schema.named.contains(name) => {
                let other =
                    all.iter().map(|(name, schema)| (self.replace_name(name), self.replace_schema(schema)));
                Some(Value::Object(other.collect()))
            }
            (_, Value::Object(_) | Value::Array(_) | Value::Bool(_))
                if LISTS.schema.nested.contains(name) =>
            {
                Some(self.replace_schema(value))
            }
            // A pattern reveals content, and a replaced pattern would be invalid.
            _ => None,
        }
    }

    /// Redacts a reference within the schema; references elsewhere are dropped. A segment after a keyword
    /// with names is a name.
    fn reference(&self, place: &str) -> Option<String> {
        let mut made = String::from("#");
        let mut is_name = false;
        for part in place.strip_prefix('#')?.split('/').skip(1) {
            made.push('/');
            let known = LISTS.schema.named.contains(part)
                || LISTS.schema.nested.contains(part)
                || part.parse::<u16>().is_ok();
            match (is_name, known) {
                (true, _) => made.push_str(&self.replace_name(part)),
                (false, true) => made.push_str(part),
                (false, false) => return None,
            }
            is_name = !is_name && LISTS.schema.named.contains(part);
        }
        Some(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_stays_one_with_names_that_belong_together_and_says_nothing() {
        let made = ReplacementMaker::default();
        let schema = json!({
            "$schema": "http://secret", "type": "object", "required": ["qcity"], "additionalProperties": false,
            "properties": {
                "qcity": { "type": ["string", "null"], "description": "a secret", "pattern": "^secret$", "minLength": 1 },
                "qunit": { "enum": ["secret", "other secret", 987_654] },
                "qwhen": { "$ref": "#/$defs/items" }, "why": { "$ref": "http://secret" },
                "type": { "anyOf": [{ "const": "secret" }, { "type": "integer", "maximum": 123_456 }] },
            },
            "$defs": { "items": { "type": "string", "format": "date" } }, "x-secret": "secret",
        });
        let other = made.replace_schema(&schema);
        let text = other.to_string();
        for gone in ["secret", "qcity", "qunit", "qwhen", "123456", "987654"] {
            assert!(!text.contains(gone), "{gone}: {text}");
        }
        let (city, items) = (made.replace_name("qcity"), made.replace_name("items"));
        assert_eq!(other["required"], json!([city]));
        assert_eq!(other["properties"][&city]["type"], json!(["string", "null"]));
        assert_eq!(other["properties"][&city]["minLength"], 1);
        assert_eq!(other["properties"][made.replace_name("qwhen")]["$ref"], format!("#/$defs/{items}"));
        assert_eq!(other["$defs"][&items], json!({ "type": "string", "format": "date" }));
        assert_eq!(other["properties"][made.replace_name("qunit")]["enum"].as_array().unwrap().len(), 3);
        assert_eq!(other["properties"][made.replace_name("type")]["anyOf"][1], json!({ "type": "integer" }));
        assert_eq!(other["additionalProperties"], json!(false));
    }
}
