//! Positions of values in a TOML document, for error messages.

use std::ops::Range;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::PatchError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathStep {
    Key(&'static str),
    Item(usize),
}

/// Place of a value: the steps to it from the top of the document.
#[derive(Clone, Debug, Default)]
pub(super) struct ValuePath(Vec<PathStep>);

#[derive(Debug)]
pub(super) struct DocumentFault {
    at: ValuePath,
    pub(super) why: String,
}

impl ValuePath {
    pub(super) fn key(&self, name: &'static str) -> Self {
        self.step(PathStep::Key(name))
    }

    pub(super) fn item(&self, number: usize) -> Self {
        self.step(PathStep::Item(number))
    }

    pub(super) fn element(&self, key: &'static str, number: usize) -> Self {
        self.key(key).item(number)
    }

    pub(super) fn error(&self, why: impl Into<String>) -> DocumentFault {
        DocumentFault { at: self.clone(), why: why.into() }
    }

    pub(super) fn fault(&self, why: impl Into<String>) -> Result<(), DocumentFault> {
        Err(self.error(why))
    }

    fn step(&self, step: PathStep) -> Self {
        Self(self.0.iter().copied().chain([step]).collect())
    }
}

#[derive(Debug)]
pub(super) struct TomlDocument<'a> {
    file: &'a str,
    text: &'a str,
    root: DeTable<'a>,
}

impl<'a> TomlDocument<'a> {
    pub(super) fn parse(file: &'a str, text: &'a str) -> crate::Result<Self> {
        match DeTable::parse(text) {
            Ok(root) => Ok(Self { file, text, root: root.into_inner() }),
            Err(error) => Err(PatchError::Set {
                file: file.to_owned(),
                line: error.span().map(|span| line_number(text, span.start)),
                key: String::new(),
                why: error.message().to_owned(),
            }),
        }
    }

    pub(super) fn read<T: DeserializeOwned>(&self) -> crate::Result<T> {
        toml::from_str(self.text).map_err(|error| {
            let span = error.span().unwrap_or(0..0);
            PatchError::Set {
                file: self.file.to_owned(),
                line: Some(line_number(self.text, span.start)),
                key: self.key_at(&span),
                why: super::super::join_lines(error.message()),
            }
        })
    }

    /// The error for an invalid value. For a missing key, the error is at the enclosing table.
    pub(super) fn value_error(&self, fault: DocumentFault) -> PatchError {
        let mut key = String::new();
        let mut start = None;
        let mut table = Some(&self.root);
        let mut value: Option<&DeValue<'_>> = None;
        for step in fault.at.0 {
            let next = match step {
                PathStep::Key(name) => {
                    if !key.is_empty() {
                        key.push('.');
                    }
                    key.push_str(name);
                    table.and_then(|table| find_entry(table, name))
                }
                PathStep::Item(number) => {
                    let next = value
                        .and_then(DeValue::as_array)
                        .and_then(|array| array.get(number))
                        .map(|item| (item.span().start, item.get_ref()));
                    key.push_str(&item_label(number, next.map(|(_, value)| value)));
                    next
                }
            };
            start = next.map(|(start, _)| start).or(start);
            value = next.map(|(_, value)| value);
            table = value.and_then(DeValue::as_table);
        }
        PatchError::Set {
            file: self.file.to_owned(),
            line: start.map(|start| line_number(self.text, start)),
            key,
            why: fault.why,
        }
    }

    /// The innermost key whose name or value contains this position.
    fn key_at(&self, span: &Range<usize>) -> String {
        let mut key = String::new();
        table_key(&self.root, span, &mut key);
        key
    }
}

fn find_entry<'t, 'a>(table: &'t DeTable<'a>, name: &str) -> Option<(usize, &'t DeValue<'a>)> {
    table
        .iter()
        .find(|(key, _)| key.get_ref().as_ref() == name)
        .map(|(key, value)| (key.span().start, value.get_ref()))
}

/// Label of an array item: its id if it has one, else its number from 1.
fn item_label(number: usize, value: Option<&DeValue<'_>>) -> String {
    let id = value
        .and_then(DeValue::as_table)
        .and_then(|table| ["id", "name"].into_iter().find_map(|key| table.get(key)?.get_ref().as_str()));
    match id {
        Some(id) => format!("[{id}]"),
        None => format!("[{}]", number + 1),
    }
}

fn table_key(table: &DeTable<'_>, span: &Range<usize>, path: &mut String) {
    for (key, value) in table {
        if contains_range(&key.span(), span)
            || value_range(value).is_some_and(|reach| contains_range(&reach, span))
        {
            if !path.is_empty() {
                path.push('.');
            }
            path.push_str(key.get_ref());
            if !contains_range(&key.span(), span) {
                value_key(value.get_ref(), span, path);
            }
            return;
        }
    }
}

fn value_key(value: &DeValue<'_>, span: &Range<usize>, path: &mut String) {
    if let Some(table) = value.as_table() {
        table_key(table, span, path);
    } else if let Some(array) = value.as_array() {
        let item = array
            .iter()
            .enumerate()
            .find(|(_, item)| value_range(item).is_some_and(|reach| contains_range(&reach, span)));
        if let Some((number, item)) = item {
            path.push_str(&item_label(number, Some(item.get_ref())));
            value_key(item.get_ref(), span, path);
        }
    }
}

/// The range from a value's first to its last byte; the span of a `[[table]]` itself is its head only.
fn value_range(value: &Spanned<DeValue<'_>>) -> Option<Range<usize>> {
    let own = value.span();
    let inner: Vec<Range<usize>> = match value.get_ref() {
        DeValue::Table(table) => {
            table.iter().filter_map(|(key, value)| Some(key.span().start..value_range(value)?.end)).collect()
        }
        DeValue::Array(array) => array.iter().filter_map(value_range).collect(),
        _ => Vec::new(),
    };
    let start = inner.iter().map(|range| range.start).chain([own.start]).min()?;
    let end = inner.iter().map(|range| range.end).chain([own.end]).max()?;
    Some(start..end)
}

fn contains_range(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

fn line_number(text: &str, at: usize) -> usize {
    1 + count_newlines(text.as_bytes(), at)
}

pub(super) fn count_newlines(text: &[u8], end: usize) -> usize {
    text.iter().take(end).filter(|byte| **byte == b'\n').count()
}
