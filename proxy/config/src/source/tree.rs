//! A configuration as a tree of values with their positions in the file.
//!
//! Every source (file, environment, flags, defaults) is converted to this form. So there is one validation,
//! one way to report the source of a value, and one conversion to the crate figment, which merges the
//! sources. This module validates nothing.

use std::ops::Range;

use figment::value::{Dict, Value};

/// A value with its byte range in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigNode {
    /// Byte range in the file; `None` for other sources.
    pub span: Option<Range<usize>>,
    /// The value.
    pub kind: ConfigValue,
}

/// A value of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum ConfigValue {
    /// Keys and values, in the order in which they were written.
    Table(Vec<TableEntry>),
    /// Several values.
    List(Vec<ConfigNode>),
    /// Text in quotes.
    Text(String),
    /// A whole number.
    Int(i64),
    /// A number with a fraction.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// Text from a variable or a flag; the schema decides its type.
    Raw(String),
    /// A date or time, which no key accepts.
    Date,
}

/// A key of a table, with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct TableEntry {
    /// The key.
    pub key: String,
    /// Byte range of the key.
    pub key_span: Option<Range<usize>>,
    /// The value.
    pub value: ConfigNode,
}

impl ConfigNode {
    /// Creates a value without a position in a file.
    pub fn new(kind: ConfigValue) -> Self {
        Self { span: None, kind }
    }

    /// Creates an empty table.
    pub fn table() -> Self {
        Self::new(ConfigValue::Table(Vec::new()))
    }

    /// Describes the type of the value, for messages.
    pub fn noun(&self) -> &'static str {
        match self.kind {
            ConfigValue::Table(_) => "a table",
            ConfigValue::List(_) => "a list",
            ConfigValue::Text(_) | ConfigValue::Raw(_) => "text",
            ConfigValue::Int(_) | ConfigValue::Float(_) => "a number",
            ConfigValue::Bool(_) => "true or false",
            ConfigValue::Date => "a date",
        }
    }

    /// Returns the value at a path, if it exists.
    pub fn find(&self, path: &[String]) -> Option<&ConfigNode> {
        let Some((first, rest)) = path.split_first() else { return Some(self) };
        self.entry(first).and_then(|entry| entry.value.find(rest))
    }

    /// Returns the entry for a key; `None` if there is none or this value is not a table.
    pub fn entry(&self, key: &str) -> Option<&TableEntry> {
        match &self.kind {
            ConfigValue::Table(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// The keys of a table, in their order; empty for other values.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        let entries = match &self.kind {
            ConfigValue::Table(entries) => entries.as_slice(),
            _ => &[],
        };
        entries.iter().map(|entry| entry.key.as_str())
    }

    /// Removes an entry from a table.
    pub fn take(&mut self, key: &str) -> Option<TableEntry> {
        let ConfigValue::Table(entries) = &mut self.kind else { return None };
        let at = entries.iter().position(|entry| entry.key == key)?;
        Some(entries.remove(at))
    }

    /// Sets the value at a path, creating tables as needed. A value in the way that is not a table is
    /// replaced.
    pub fn set(&mut self, path: &[String], value: ConfigNode) {
        let Some((first, rest)) = path.split_first() else {
            *self = value;
            return;
        };
        if !matches!(self.kind, ConfigValue::Table(_)) {
            *self = Self::table();
        }
        let ConfigValue::Table(entries) = &mut self.kind else { return };
        let at = entries.iter().position(|entry| entry.key == *first).unwrap_or_else(|| {
            entries.push(TableEntry { key: first.clone(), key_span: None, value: Self::table() });
            entries.len() - 1
        });
        entries[at].value.set(rest, value);
    }

    /// Converts the value for figment. Dates become text, but the validation has refused them before.
    pub fn to_figment(&self) -> Value {
        match &self.kind {
            ConfigValue::Table(_) => self.to_dict().into(),
            ConfigValue::List(items) => items.iter().map(Self::to_figment).collect::<Vec<_>>().into(),
            ConfigValue::Text(text) | ConfigValue::Raw(text) => text.as_str().into(),
            ConfigValue::Int(number) => (*number).into(),
            ConfigValue::Float(number) => (*number).into(),
            ConfigValue::Bool(value) => (*value).into(),
            ConfigValue::Date => "".into(),
        }
    }

    /// Converts a table for figment; any other value becomes an empty table.
    pub fn to_dict(&self) -> Dict {
        match &self.kind {
            ConfigValue::Table(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), entry.value.to_figment())).collect()
            }
            _ => Dict::new(),
        }
    }
}

impl From<&toml_edit::Item> for ConfigNode {
    fn from(item: &toml_edit::Item) -> Self {
        let kind = match item {
            toml_edit::Item::None => ConfigValue::Table(Vec::new()),
            toml_edit::Item::Value(value) => return value.into(),
            toml_edit::Item::Table(table) => return table.into(),
            toml_edit::Item::ArrayOfTables(tables) => {
                ConfigValue::List(tables.iter().map(ConfigNode::from).collect())
            }
        };
        Self { span: item.span(), kind }
    }
}

impl From<&toml_edit::Table> for ConfigNode {
    fn from(table: &toml_edit::Table) -> Self {
        let entries = table.iter().map(|(key, item)| TableEntry {
            key: key.to_owned(),
            key_span: table.key(key).and_then(toml_edit::Key::span),
            value: item.into(),
        });
        Self { span: table.span(), kind: ConfigValue::Table(entries.collect()) }
    }
}

impl From<&toml_edit::Value> for ConfigNode {
    fn from(value: &toml_edit::Value) -> Self {
        let kind = match value {
            toml_edit::Value::String(text) => ConfigValue::Text(text.value().clone()),
            toml_edit::Value::Integer(number) => ConfigValue::Int(*number.value()),
            toml_edit::Value::Float(number) => ConfigValue::Float(*number.value()),
            toml_edit::Value::Boolean(value) => ConfigValue::Bool(*value.value()),
            toml_edit::Value::Datetime(_) => ConfigValue::Date,
            toml_edit::Value::Array(items) => ConfigValue::List(items.iter().map(ConfigNode::from).collect()),
            toml_edit::Value::InlineTable(table) => {
                let entries = table.iter().map(|(key, item)| TableEntry {
                    key: key.to_owned(),
                    key_span: table.key(key).and_then(toml_edit::Key::span),
                    value: item.into(),
                });
                ConfigValue::Table(entries.collect())
            }
        };
        Self { span: value.span(), kind }
    }
}
