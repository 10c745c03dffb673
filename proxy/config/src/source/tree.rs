//! A configuration as a tree of values, each with the place where it is written.
//!
//! Every source (file, environment, flags, defaults) becomes such a tree. The trees are validated, and merged
//! into one in order of priority. figment reads the types of the settings from the merged tree; its errors
//! name the path of a value.

use std::ops::Range;

use figment::value::{Dict, Value};
use serde::de::DeserializeOwned;
use toml_edit::{Item, TableLike};

use crate::problem::ConfigPlace;

/// Converts a range of bytes in a source to its place.
pub(crate) type PlaceOfSpan<'a> = &'a dyn Fn(Option<Range<usize>>) -> ConfigPlace;

/// A value with its place.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigNode {
    /// Place of the value.
    pub place: ConfigPlace,
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
    /// Place of the key.
    pub key_place: ConfigPlace,
    /// The value.
    pub value: ConfigNode,
}

impl ConfigNode {
    /// Creates a value without a place.
    pub fn new(kind: ConfigValue) -> Self {
        Self { place: ConfigPlace::Nowhere, kind }
    }

    /// Creates an empty table.
    pub fn table() -> Self {
        Self::new(ConfigValue::Table(Vec::new()))
    }

    /// Creates a tree with a single value, written at this place.
    pub(crate) fn with_value(place: &ConfigPlace, path: &[String], mut value: Self) -> Self {
        value.set_place(place);
        let mut tree = Self { place: place.clone(), ..Self::table() };
        tree.set(path, value);
        tree
    }

    fn set_place(&mut self, place: &ConfigPlace) {
        self.place.clone_from(place);
        match &mut self.kind {
            ConfigValue::Table(entries) => {
                for entry in entries {
                    entry.key_place.clone_from(place);
                    entry.value.set_place(place);
                }
            }
            ConfigValue::List(items) => items.iter_mut().for_each(|item| item.set_place(place)),
            _ => {}
        }
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

    /// Returns the entries of a table; none for other values.
    pub fn entries(&self) -> &[TableEntry] {
        match &self.kind {
            ConfigValue::Table(entries) => entries,
            _ => &[],
        }
    }

    pub(crate) fn sorted_entries(&self) -> Vec<&TableEntry> {
        let mut entries: Vec<&TableEntry> = self.entries().iter().collect();
        entries.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        entries
    }

    /// Returns the entry for a key; `None` if there is none or this value is not a table.
    pub fn entry(&self, key: &str) -> Option<&TableEntry> {
        self.entries().iter().find(|entry| entry.key == key)
    }

    /// Returns the items of a list; none for other values.
    pub(crate) fn items(&self) -> &[ConfigNode] {
        match &self.kind {
            ConfigValue::List(items) => items,
            _ => &[],
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match &self.kind {
            ConfigValue::Text(text) | ConfigValue::Raw(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the value at a path, if it exists.
    pub fn find<K: AsRef<str>>(&self, path: &[K]) -> Option<&ConfigNode> {
        path.iter().try_fold(self, |node, key| Some(&node.entry(key.as_ref())?.value))
    }

    pub(crate) fn place_of(&self, path: &[String]) -> Option<&ConfigPlace> {
        let (last, parent) = path.split_last()?;
        Some(&self.find(parent)?.entry(last)?.key_place)
    }

    pub(crate) fn take(&mut self, key: &str) -> Option<TableEntry> {
        let ConfigValue::Table(entries) = &mut self.kind else { return None };
        let at = entries.iter().position(|entry| entry.key == key)?;
        Some(entries.remove(at))
    }

    /// Sets the value at a path; creates tables on the way, and replaces other values by tables.
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
            let table = Self { place: value.place.clone(), ..Self::table() };
            entries.push(TableEntry { key: first.clone(), key_place: value.place.clone(), value: table });
            entries.len() - 1
        });
        entries[at].value.set(rest, value);
    }

    /// Merges a tree of higher priority into this one: tables key by key, other values as a whole.
    pub(crate) fn merge(&mut self, other: Self) {
        self.place = other.place;
        match (&mut self.kind, other.kind) {
            (ConfigValue::Table(entries), ConfigValue::Table(others)) => {
                for other in others {
                    match entries.iter_mut().find(|entry| entry.key == other.key) {
                        Some(entry) => {
                            entry.key_place = other.key_place;
                            entry.value.merge(other.value);
                        }
                        None => entries.push(other),
                    }
                }
            }
            (kind, other) => *kind = other,
        }
    }

    /// Reads a type from the value. An error has the path of the value that does not fit.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, Box<figment::Error>> {
        self.to_figment().deserialize().map_err(Box::new)
    }

    /// Converts the value for figment. Dates become text, but the validation has refused them before.
    pub(crate) fn to_figment(&self) -> Value {
        match &self.kind {
            ConfigValue::Table(entries) => {
                let pairs = entries.iter().map(|entry| (entry.key.clone(), entry.value.to_figment()));
                pairs.collect::<Dict>().into()
            }
            ConfigValue::List(items) => items.iter().map(Self::to_figment).collect::<Vec<_>>().into(),
            ConfigValue::Text(text) | ConfigValue::Raw(text) => text.as_str().into(),
            ConfigValue::Int(number) => (*number).into(),
            ConfigValue::Float(number) => (*number).into(),
            ConfigValue::Bool(value) => (*value).into(),
            ConfigValue::Date => "".into(),
        }
    }

    pub(crate) fn from_item(item: &Item, place: PlaceOfSpan<'_>) -> Self {
        let kind = match item {
            Item::None => ConfigValue::Table(Vec::new()),
            Item::Value(value) => return Self::from_value(value, place),
            Item::Table(table) => table_from(table, place),
            Item::ArrayOfTables(tables) => ConfigValue::List(
                tables
                    .iter()
                    .map(|table| Self { place: place(table.span()), kind: table_from(table, place) })
                    .collect(),
            ),
        };
        Self { place: place(item.span()), kind }
    }

    pub(crate) fn from_value(value: &toml_edit::Value, place: PlaceOfSpan<'_>) -> Self {
        let kind = match value {
            toml_edit::Value::String(text) => ConfigValue::Text(text.value().clone()),
            toml_edit::Value::Integer(number) => ConfigValue::Int(*number.value()),
            toml_edit::Value::Float(number) => ConfigValue::Float(*number.value()),
            toml_edit::Value::Boolean(value) => ConfigValue::Bool(*value.value()),
            toml_edit::Value::Datetime(_) => ConfigValue::Date,
            toml_edit::Value::Array(items) => {
                ConfigValue::List(items.iter().map(|item| Self::from_value(item, place)).collect())
            }
            toml_edit::Value::InlineTable(table) => table_from(table, place),
        };
        Self { place: place(value.span()), kind }
    }
}

fn table_from(table: &dyn TableLike, place: PlaceOfSpan<'_>) -> ConfigValue {
    let entries = table.iter().map(|(key, item)| TableEntry {
        key: key.to_owned(),
        key_place: place(table.key(key).and_then(toml_edit::Key::span).or_else(|| item.span())),
        value: ConfigNode::from_item(item, place),
    });
    ConfigValue::Table(entries.collect())
}
