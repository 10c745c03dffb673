//! Reads the file of API keys, hashes the keys, and wipes the text.
//!
//! ```toml
//! [alice]                          # the key's name, for logs and metrics
//! sha256 = "9f86d081..."           # or key = "sk-..." in clear text
//! models = ["qwen", "embed-*"]     # names, aliases, patterns; default: all
//! rate = "60/min"
//! tokens = "100000/h"
//! concurrency = 4
//! operator = true                  # opens the page for operators, too
//! ```
//!
//! The parser replaces clear-text keys by their hashes, so that no message can show a key. The text is
//! overwritten before its memory is freed.

use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use warden_gateway::{KeyHash, KeySpec};
use warden_policies::{ModelName, RateLimit, pattern_matches};
use zeroize::{Zeroize, Zeroizing};

use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems, quoted_key};
use crate::schema::validate::validate_as;
use crate::source::tree::{ConfigNode, ConfigValue, TableEntry};

/// Mode bit: users other than owner and group may write the file.
const OTHERS_WRITE: u32 = 0o002;
/// Mode bit: users other than owner and group may read the file.
const OTHERS_READ: u32 = 0o004;
/// Minimum bytes of a clear-text key: 16 random letters cannot be guessed over a network.
const MIN_KEY_BYTES: usize = 16;
/// Prefix of secret keys of well-known services. A key's name with this prefix is likely the secret itself.
const SECRET_PREFIX: &str = "sk-";

/// A file of API keys.
#[derive(Clone, Debug)]
pub struct KeyFile {
    /// Keys in the order of the file.
    pub keys: Vec<WrittenKey>,
}

/// A key in the file.
#[derive(Clone, Debug)]
pub struct WrittenKey {
    /// Name of the key.
    pub name: String,
    place: ConfigPlace,
    hash: KeyHash,
    /// True if the file contains the key in clear text.
    pub in_clear: bool,
    /// Names, aliases and patterns of the allowed models; `None`: all models.
    pub models: Option<Vec<String>>,
    /// Maximum request rate.
    pub rate: Option<RateLimit>,
    /// Maximum token rate.
    pub tokens: Option<RateLimit>,
    /// Maximum number of concurrent requests.
    pub concurrency: Option<usize>,
    /// True if the key opens the page for operators.
    pub operator: bool,
}

impl KeyFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file cannot be read, other users may write it, or a key in it is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigProblems> {
        let whole = || ConfigPlace::File { path: path.to_owned(), line: 0 };
        let unreadable = |error: std::io::Error| {
            ConfigProblem::new(whole(), format!("the file of keys cannot be read: {error}"))
                .with_hint("`llama-warden keys new NAME --file FILE` writes one; `server.keys` names it")
        };
        let mode = std::fs::metadata(path).map_err(unreadable)?.permissions().mode();
        let bytes = Zeroizing::new(std::fs::read(path).map_err(unreadable)?);
        let text = std::str::from_utf8(&bytes)
            .map_err(|_| ConfigProblem::new(whole(), "the file of keys is not text in UTF-8"))?;
        let file = Self::parse(path, text)?;
        let secrets = file.keys.iter().any(|key| key.in_clear);
        let why = if mode & OTHERS_WRITE != 0 {
            "every user of this machine may write to it, and so let themselves in"
        } else if secrets && mode & OTHERS_READ != 0 {
            "every user of this machine may read the keys in it"
        } else {
            return Ok(file);
        };
        let hint = format!(
            "`chmod 600 {}`; a file with nothing but `sha256` may be read by everybody",
            path.display()
        );
        Err(ConfigProblem::new(whole(), format!("the file of keys: {why}")).with_hint(hint).into())
    }

    /// Parses the text of a key file.
    ///
    /// # Errors
    /// The file is not TOML, or a key in it is wrong.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigProblems> {
        let locate = |byte: Option<usize>| ConfigPlace::in_file(path, text, byte);
        let table = DeTable::parse(text).map_err(|error| {
            let byte = error.span().map(|span| span.start);
            // Keep only the first line, which describes the error; further lines would quote the text.
            let message = error.message().lines().next().unwrap_or_default().to_owned();
            ConfigProblem::new(locate(byte), format!("this is not TOML: {message}"))
        })?;
        let mut problems = Vec::new();
        let mut tree = to_tree(table, &locate, &mut problems);
        problems.extend(validate_as(&mut tree, key_file_schema(), &locate));
        let ConfigValue::Table(entries) = &tree.kind else { return Err(ConfigProblems(problems)) };
        let mut keys: Vec<WrittenKey> = Vec::new();
        for entry in entries {
            let place = locate(entry.key_span.as_ref().map(|span| span.start));
            let Some(key) = convert_entry(entry, place, &locate, &mut problems) else { continue };
            if let Some(same) = keys.iter().find(|other| other.hash == key.hash) {
                let message = format!("`{}` and `{}` are the same key", same.name, key.name);
                problems.push(
                    ConfigProblem::new(key.place.clone(), message)
                        .with_hint("give each its own, or remove one"),
                );
            }
            keys.push(key);
        }
        if keys.is_empty() && problems.is_empty() {
            let problem = ConfigProblem::new(locate(None), "there is no key in the file of keys");
            problems.push(problem.with_hint("`llama-warden keys new NAME` prints one"));
        }
        if problems.is_empty() { Ok(Self { keys }) } else { Err(ConfigProblems(problems)) }
    }

    /// Converts the keys for the gateway. `models` holds the name and aliases of each model. Also returns
    /// warnings about patterns that match no model.
    pub fn specs(&self, models: &[(ModelName, Vec<String>)]) -> (Vec<KeySpec>, Vec<ConfigProblem>) {
        let mut warnings = Vec::new();
        let specs = self.keys.iter().map(|key| KeySpec {
            name: Arc::from(key.name.as_str()),
            hash: key.hash,
            models: key.models.as_ref().map(|patterns| {
                patterns.iter().flat_map(|pattern| key.match_models(pattern, models, &mut warnings)).collect()
            }),
            rate: key.rate,
            tokens: key.tokens,
            concurrency: key.concurrency,
            operator: key.operator,
        });
        let specs = specs.collect();
        (specs, warnings)
    }
}

impl WrittenKey {
    fn match_models(
        &self,
        pattern: &str,
        models: &[(ModelName, Vec<String>)],
        warnings: &mut Vec<ConfigProblem>,
    ) -> HashSet<ModelName> {
        let means = |(name, aliases): &&(ModelName, Vec<String>)| {
            pattern_matches(pattern, name.as_str())
                || aliases.iter().any(|alias| pattern_matches(pattern, alias))
        };
        let found: HashSet<_> = models.iter().filter(means).map(|(name, _)| name.clone()).collect();
        if found.is_empty() {
            let message = format!("key `{}`: `{pattern}` in `models` means no model", self.name);
            let names: Vec<_> = models.iter().map(|(name, _)| format!("`{name}`")).collect();
            let hint = format!("the models are {}", names.join(", "));
            warnings.push(ConfigProblem::new(self.place.clone(), message).with_hint(hint));
        }
        found
    }
}

fn key_file_schema() -> &'static Value {
    static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
        let text = json!({ "type": "string" });
        json!({ "type": "object", "additionalProperties": {
            "type": "object",
            "additionalProperties": false,
            "properties": {
                "key": text, "sha256": text, "rate": text, "tokens": text,
                "models": { "type": "array", "items": text },
                "concurrency": { "type": "integer", "minimum": 1 },
                "operator": { "type": "boolean" },
            },
        }})
    });
    &SCHEMA
}

fn convert_entry(
    entry: &TableEntry,
    place: ConfigPlace,
    locate: &dyn Fn(Option<usize>) -> ConfigPlace,
    problems: &mut Vec<ConfigProblem>,
) -> Option<WrittenKey> {
    let name = entry.key.clone();
    let text = |field: &str| match &entry.value.entry(field)?.value.kind {
        ConfigValue::Text(text) => Some(text.as_str()),
        _ => None,
    };
    let at = |field: &str| {
        locate(entry.value.entry(field).and_then(|entry| entry.value.span.as_ref()).map(|span| span.start))
    };
    let is_name = !name.is_empty()
        && name.len() <= 64
        && name.chars().all(|c| c.is_alphanumeric() || "_-.@+".contains(c));
    if !is_name {
        let message = "the name of a key has 1 to 64 letters, digits or `_-.@+`";
        problems.push(ConfigProblem::new(place.clone(), message));
    }
    let mut rate = |field: &str| {
        let parsed = text(field)?.parse::<RateLimit>();
        parsed
            .map_err(|e| {
                problems.push(ConfigProblem::new(at(field), format!("`{}.{field}`: {e}", quoted_key(&name))));
            })
            .ok()
    };
    let (rate, tokens) = (rate("rate"), rate("tokens"));
    let missing = |message: String| {
        ConfigProblem::new(place.clone(), message)
            .with_hint("`llama-warden keys new NAME` prints a key and what to write")
    };
    let hash = match (text("key"), text("sha256")) {
        (Some(_), Some(_)) => {
            problems.push(
                ConfigProblem::new(at("sha256"), format!("key `{name}`: both `key` and `sha256` are given"))
                    .with_hint("keep `sha256`"),
            );
            None
        }
        // The parser has hashed the clear-text key, and has reported an unsuitable one.
        (Some(hash), None) => KeyHash::from_hex(hash),
        (None, Some(hash)) => {
            let parsed = KeyHash::from_hex(hash.trim());
            if parsed.is_none() {
                let message = format!("key `{name}`: `sha256` needs 64 hexadecimal digits");
                problems.push(
                    ConfigProblem::new(at("sha256"), message)
                        .with_hint("`printf %s \"$KEY\" | sha256sum` prints them"),
                );
            }
            parsed
        }
        (None, None) => {
            problems.push(missing(format!("key `{name}`: neither `sha256` nor `key` says which key it is")));
            None
        }
    };
    let models = match entry.value.entry("models").map(|entry| &entry.value.kind) {
        Some(ConfigValue::List(items)) => Some(
            items
                .iter()
                .filter_map(
                    |item| if let ConfigValue::Text(text) = &item.kind { Some(text.clone()) } else { None },
                )
                .collect(),
        ),
        _ => None,
    };
    let concurrency = match entry.value.entry("concurrency").map(|entry| &entry.value.kind) {
        Some(ConfigValue::Int(number)) => usize::try_from(*number).ok(),
        _ => None,
    };
    let operator =
        matches!(entry.value.entry("operator").map(|entry| &entry.value.kind), Some(ConfigValue::Bool(true)));
    let in_clear = text("key").is_some();
    Some(WrittenKey { name, place, hash: hash?, in_clear, models, rate, tokens, concurrency, operator })
}

/// Converts the parsed file for validation, with a hash in place of each clear-text key.
fn to_tree(
    table: Spanned<DeTable<'_>>,
    locate: &dyn Fn(Option<usize>) -> ConfigPlace,
    problems: &mut Vec<ConfigProblem>,
) -> ConfigNode {
    let span = table.span();
    let mut entries = Vec::new();
    for (name, value) in table.into_inner() {
        let at = name.span();
        if name.get_ref().starts_with(SECRET_PREFIX) {
            let message = "a name begins like a secret key, and names are shown in logs";
            let problem = ConfigProblem::new(locate(Some(at.start)), message);
            problems.push(
                problem
                    .with_hint("write a section like `[alice]` with `key = \"...\"` or `sha256 = \"...\"`"),
            );
            continue;
        }
        let mut value = to_node(value);
        if let ConfigValue::Table(fields) = &mut value.kind
            && let Some(field) = fields.iter_mut().find(|field| field.key == "key")
            && let ConfigValue::Text(text) = &mut field.value.kind
        {
            if let Some(wrong) = unsuitable_key(text) {
                let place = locate(field.value.span.as_ref().map(|span| span.start));
                problems.push(
                    ConfigProblem::new(place, format!("key `{}`: {wrong}", name.get_ref()))
                        .with_hint("`llama-warden keys new NAME` prints one that nobody guesses"),
                );
            }
            let hash = KeyHash::from_key(text.as_bytes()).to_hex();
            text.zeroize();
            *text = hash;
        }
        entries.push(TableEntry { key: name.into_inner().into_owned(), key_span: Some(at), value });
    }
    // Sort the entries back into the order of the file.
    entries.sort_by_key(|entry| entry.key_span.as_ref().map(|span| span.start));
    ConfigNode { span: Some(span), kind: ConfigValue::Table(entries) }
}

/// Returns the reason why a text cannot be used as a key; `None` if it can.
fn unsuitable_key(key: &str) -> Option<String> {
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Some("a key has no spaces and nothing but ASCII letters, digits and signs".to_owned());
    }
    (key.len() < MIN_KEY_BYTES)
        .then(|| format!("a key of {} letters can be guessed; {MIN_KEY_BYTES} are the least", key.len()))
}

fn to_node(value: Spanned<DeValue<'_>>) -> ConfigNode {
    let span = value.span();
    let kind = match value.into_inner() {
        DeValue::String(text) => ConfigValue::Text(text.into_owned()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or(ConfigValue::Float(f64::MAX), ConfigValue::Int),
        DeValue::Float(number) => ConfigValue::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => ConfigValue::Bool(flag),
        DeValue::Datetime(_) => ConfigValue::Date,
        DeValue::Array(items) => ConfigValue::List(items.into_iter().map(to_node).collect()),
        DeValue::Table(table) => ConfigValue::Table(
            table
                .into_iter()
                .map(|(key, value)| {
                    let span = key.span();
                    TableEntry {
                        key: key.into_inner().into_owned(),
                        key_span: Some(span),
                        value: to_node(value),
                    }
                })
                .collect(),
        ),
    };
    ConfigNode { span: Some(span), kind }
}

/// Creates a key with 256 random bits.
pub fn new_key() -> Zeroizing<String> {
    let bits = Zeroizing::new(rand::random::<[u8; 32]>());
    let mut text = Zeroizing::new(String::with_capacity(SECRET_PREFIX.len() + 64));
    text.push_str(SECRET_PREFIX);
    for byte in bits.iter() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(digit), 16).unwrap_or('0'));
        }
    }
    text
}

/// Formats the section of a key for the file, with the hash of the key but not the key itself.
pub fn key_section(name: &str, key: &str) -> String {
    format!("[{}]\nsha256 = \"{}\"\n", quoted_key(name), KeyHash::from_key(key.as_bytes()).to_hex())
}

#[cfg(test)]
#[path = "keys_tests.rs"]
mod tests;
