//! Request fields that are kept or redacted, and keywords of JSON Schema, from `fields.json`. Fields in no
//! list are dropped.

use std::collections::HashSet;
use std::sync::LazyLock;

use serde::Deserialize;

pub(super) static LISTS: LazyLock<FieldLists> =
    LazyLock::new(|| serde_json::from_str(include_str!("fields.json")).unwrap_or_default());

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FieldLists {
    /// Fields whose number or truth value is kept.
    pub(super) kept_fields: HashSet<String>,
    /// Fields whose text is kept if it is one of `kept_words`.
    pub(super) word_fields: HashSet<String>,
    /// Subset of `word_fields` that a valid request needs: an unknown text in them is replaced.
    pub(super) required_fields: HashSet<String>,
    pub(super) kept_words: HashSet<String>,
    /// Fields with a text, or with a value that contains texts.
    pub(super) text_fields: HashSet<String>,
    /// Fields with identifiers, whose length a chat template may check.
    pub(super) id_fields: HashSet<String>,
    pub(super) nested_fields: HashSet<String>,
    /// Fields of an adapter (`lora`). They are numbers; `id` is a position in a list.
    pub(super) adapter_fields: HashSet<String>,
    /// Fields that cannot be replaced, so a request with one of them is not recorded.
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
    /// Keywords whose value maps names to schemas.
    pub(super) named: HashSet<String>,
    /// Keywords whose value is a schema or a list of schemas.
    pub(super) nested: HashSet<String>,
}
