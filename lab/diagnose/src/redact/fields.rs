//! Lists of request fields that are kept or redacted recursively, and of keywords of JSON Schema, from
//! `fields.json`. Fields in no list are dropped.

use std::collections::HashSet;
use std::sync::LazyLock;

use serde::Deserialize;

pub(super) static LISTS: LazyLock<FieldLists> = LazyLock::new(|| {
    // Without lists, everything is dropped.
    serde_json::from_str(include_str!("fields.json")).unwrap_or_default()
});

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FieldLists {
    /// Fields whose number or truth value is kept.
    pub(super) kept_fields: HashSet<String>,
    /// Fields whose text is kept if it is one of `kept_words`.
    pub(super) word_fields: HashSet<String>,
    /// Fields among `word_fields` that a request needs to be valid: an unknown text in them is replaced.
    pub(super) required_fields: HashSet<String>,
    pub(super) kept_words: HashSet<String>,
    /// Fields with a text, or with a value that contains texts.
    pub(super) text_fields: HashSet<String>,
    /// Fields with identifiers; chat templates may require their length.
    pub(super) id_fields: HashSet<String>,
    /// Fields that are redacted recursively.
    pub(super) nested_fields: HashSet<String>,
    /// Fields of an adapter (`lora`), which are numbers. Here `id` is a position in a list and identifies no
    /// person.
    pub(super) adapter_fields: HashSet<String>,
    /// Fields that cannot be replaced: a request with one of these is not recorded.
    pub(super) unreplaceable_fields: HashSet<String>,
    pub(super) schema: SchemaKeywords,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SchemaKeywords {
    pub(super) types: HashSet<String>,
    /// Formats of texts (JSON Schema, Validation, section 7.3).
    pub(super) formats: HashSet<String>,
    /// Keywords whose number or truth value limits amounts and reveals no content.
    pub(super) kept: HashSet<String>,
    /// Keywords with schemas by name.
    pub(super) named: HashSet<String>,
    /// Keywords with a schema, or a list of them.
    pub(super) nested: HashSet<String>,
}
