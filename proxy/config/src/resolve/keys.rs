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

use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems, SourceLines, quoted_key};
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
    /// The file cannot be read, other users may write it or read clear-text keys in it, or a key in it is
    /// wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigProblems> {
        let problem = |message: String| ConfigProblem::new(ConfigPlace::whole_file(path), message);
        let unreadable = |error: std::io::Error| {
            problem(format!("the file of keys cannot be read: {error}"))
                .with_hint("`llama-warden keys new NAME --file FILE` writes one; `server.keys` names it")
        };
        let mode = std::fs::metadata(path).map_err(unreadable)?.permissions().mode();
        let bytes = Zeroizing::new(std::fs::read(path).map_err(unreadable)?);
        let text = std::str::from_utf8(&bytes)
            .map_err(|_| problem("the file of keys is not text in UTF-8".to_owned()))?;
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
        Err(problem(format!("the file of keys: {why}")).with_hint(hint).into())
    }

    /// Parses the text of a key file.
    ///
    /// # Errors
    /// The file is not TOML, or a key in it is wrong.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigProblems> {
        let lines = SourceLines::new(path, text);
        let table = DeTable::parse(text).map_err(|error| {
            // Keep only the first line, which describes the error; further lines would quote the text.
            let message = error.message().lines().next().unwrap_or_default();
            ConfigProblem::new(lines.place(error.span()), format!("this is not TOML: {message}"))
        })?;
        let mut problems = Vec::new();
        let mut tree = to_tree(table, &lines, &mut problems);
        problems.extend(validate_as(&mut tree, key_file_schema()));
        let mut keys: Vec<WrittenKey> = Vec::new();
        for entry in tree.entries() {
            let Some(key) = convert_entry(entry, &mut problems) else { continue };
            if let Some(same) = keys.iter().find(|other| other.hash == key.hash) {
                let message = format!("`{}` and `{}` are the same key", same.name, key.name);
                let problem = ConfigProblem::new(key.place.clone(), message);
                problems.push(problem.with_hint("give each its own, or remove one"));
            }
            keys.push(key);
        }
        if keys.is_empty() && problems.is_empty() {
            let place = ConfigPlace::whole_file(path);
            let problem = ConfigProblem::new(place, "there is no key in the file of keys");
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

fn convert_entry(entry: &TableEntry, problems: &mut Vec<ConfigProblem>) -> Option<WrittenKey> {
    let name = entry.key.clone();
    let place = entry.key_place.clone();
    let field = |field: &str| Some(&entry.value.entry(field)?.value);
    let is_name = !name.is_empty()
        && name.len() <= 64
        && name.chars().all(|c| c.is_alphanumeric() || "_-.@+".contains(c));
    if !is_name {
        let message = "the name of a key has 1 to 64 letters, digits or `_-.@+`";
        problems.push(ConfigProblem::new(place.clone(), message));
    }
    let mut rate = |name: &str| {
        let written = field(name)?;
        match written.text()?.parse::<RateLimit>() {
            Ok(rate) => Some(rate),
            Err(error) => {
                let message = format!("`{}.{name}`: {error}", quoted_key(&entry.key));
                problems.push(ConfigProblem::new(written.place.clone(), message));
                None
            }
        }
    };
    let requests = rate("rate");
    let tokens = rate("tokens");
    let hash = find_hash(entry, problems)?;
    let texts =
        |list: &ConfigNode| list.items().iter().filter_map(ConfigNode::text).map(str::to_owned).collect();
    Some(WrittenKey {
        name,
        place,
        hash,
        in_clear: field("key").is_some(),
        models: field("models").map(texts),
        rate: requests,
        tokens,
        concurrency: field("concurrency").and_then(|value| match value.kind {
            ConfigValue::Int(number) => usize::try_from(number).ok(),
            _ => None,
        }),
        operator: field("operator").is_some_and(|value| value.kind == ConfigValue::Bool(true)),
    })
}

fn find_hash(entry: &TableEntry, problems: &mut Vec<ConfigProblem>) -> Option<KeyHash> {
    let name = &entry.key;
    let text = |field: &str| {
        let value = &entry.value.entry(field)?.value;
        Some((value.text()?, &value.place))
    };
    let (place, message, hint) = match (text("key"), text("sha256")) {
        (Some(_), Some((_, place))) => {
            (place, format!("key `{name}`: both `key` and `sha256` are given"), "keep `sha256`")
        }
        // The parser has hashed the clear-text key, and has reported an unsuitable one.
        (Some((hash, _)), None) => return KeyHash::from_hex(hash),
        (None, Some((hash, place))) => {
            let parsed = KeyHash::from_hex(hash.trim());
            if parsed.is_some() {
                return parsed;
            }
            let message = format!("key `{name}`: `sha256` needs 64 hexadecimal digits");
            (place, message, "`printf %s \"$KEY\" | sha256sum` prints them")
        }
        (None, None) => {
            let message = format!("key `{name}`: neither `sha256` nor `key` says which key it is");
            (&entry.key_place, message, "`llama-warden keys new NAME` prints a key and what to write")
        }
    };
    problems.push(ConfigProblem::new(place.clone(), message).with_hint(hint));
    None
}

/// Converts the parsed file for validation, with a hash in place of each clear-text key.
fn to_tree(
    table: Spanned<DeTable<'_>>,
    lines: &SourceLines,
    problems: &mut Vec<ConfigProblem>,
) -> ConfigNode {
    let place = lines.place(Some(table.span()));
    let mut entries = Vec::new();
    for (name, value) in table.into_inner() {
        let start = name.span().start;
        let key_place = lines.place(Some(name.span()));
        let key = name.into_inner().into_owned();
        if key.starts_with(SECRET_PREFIX) {
            let message = "a name begins like a secret key, and names are shown in logs";
            let hint = "write a section like `[alice]` with `key = \"...\"` or `sha256 = \"...\"`";
            problems.push(ConfigProblem::new(key_place, message).with_hint(hint));
            continue;
        }
        let mut value = to_node(value, lines);
        if let ConfigValue::Table(fields) = &mut value.kind
            && let Some(field) = fields.iter_mut().find(|field| field.key == "key")
            && let ConfigValue::Text(text) = &mut field.value.kind
        {
            if let Some(wrong) = unsuitable_key(text) {
                let message = format!("key `{key}`: {wrong}");
                let hint = "`llama-warden keys new NAME` prints one that nobody guesses";
                problems.push(ConfigProblem::new(field.value.place.clone(), message).with_hint(hint));
            }
            let hash = KeyHash::from_key(text.as_bytes()).to_hex();
            text.zeroize();
            *text = hash;
        }
        entries.push((start, TableEntry { key, key_place, value }));
    }
    // Restore the order of the file.
    entries.sort_by_key(|(start, _)| *start);
    let entries = entries.into_iter().map(|(_, entry)| entry);
    ConfigNode { place, kind: ConfigValue::Table(entries.collect()) }
}

/// Returns the reason why a text cannot be used as a key; `None` if it can.
fn unsuitable_key(key: &str) -> Option<String> {
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Some("a key has no spaces and nothing but ASCII letters, digits and signs".to_owned());
    }
    (key.len() < MIN_KEY_BYTES)
        .then(|| format!("a key of {} letters can be guessed; {MIN_KEY_BYTES} are the least", key.len()))
}

fn to_node(value: Spanned<DeValue<'_>>, lines: &SourceLines) -> ConfigNode {
    let place = lines.place(Some(value.span()));
    let kind = match value.into_inner() {
        DeValue::String(text) => ConfigValue::Text(text.into_owned()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or(ConfigValue::Float(f64::MAX), ConfigValue::Int),
        DeValue::Float(number) => ConfigValue::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => ConfigValue::Bool(flag),
        DeValue::Datetime(_) => ConfigValue::Date,
        DeValue::Array(items) => {
            ConfigValue::List(items.into_iter().map(|item| to_node(item, lines)).collect())
        }
        DeValue::Table(table) => {
            let entries = table.into_iter().map(|(key, value)| TableEntry {
                key_place: lines.place(Some(key.span())),
                key: key.into_inner().into_owned(),
                value: to_node(value, lines),
            });
            ConfigValue::Table(entries.collect())
        }
    };
    ConfigNode { place, kind }
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
