//! Compiled-in numbers of `defaults.toml` that are not configuration keys, because no operator would know a
//! better value. They are not part of the public schema, the documentation, or hints.
//!
//! A configuration that sets such a number is refused with advice. But tests need short times and small
//! thresholds, and an operator may need another number after all. Therefore a table `[internal.SECTION]`
//! may set any number of that section, with the names of `config show --defaults`. Such a number is
//! validated like a key, shown by `config show`, and warned of at each start; it may change in any version.
//!
//! ```text
//!   [growth]              host_effect = "1MiB"   refused: compiled in
//!   [internal.growth]     host_effect = "1MiB"   accepted with a warning, and moved to `growth.host_effect`
//!   [internal.lifecycle]  ...                    moved to `defaults.lifecycle`: applies to all models
//! ```

use std::sync::LazyLock;

use serde_json::{Value, json};
use warden_policies::defaults::{self, DefaultsKey, DefaultsSection};

use crate::problem::{ConfigPlace, ConfigProblem, dotted_key};
use crate::schema;
use crate::source::tree::{ConfigNode, ConfigValue};

/// The table in which compiled-in numbers can be set.
pub(crate) const INTERNAL: &str = "internal";

/// A section of `defaults.toml`.
struct CompiledSection {
    name: &'static str,
    /// Path of the section's keys in a configuration; `None` if they cannot be set.
    path: Option<&'static [&'static str]>,
    keys: &'static [DefaultsKey],
}

const fn settable_section<T: DefaultsSection>(home: &'static [&'static str]) -> CompiledSection {
    CompiledSection { name: T::NAME, path: Some(home), keys: T::KEYS }
}

const fn fixed_section<T: DefaultsSection>() -> CompiledSection {
    CompiledSection { name: T::NAME, path: None, keys: T::KEYS }
}

static PARTS: [CompiledSection; 27] = [
    settable_section::<defaults::Server>(&["server"]),
    settable_section::<defaults::Log>(&["log"]),
    settable_section::<defaults::Upstream>(&["upstream"]),
    settable_section::<defaults::Sensors>(&["sensors"]),
    settable_section::<defaults::Growth>(&["growth"]),
    settable_section::<defaults::Remote>(&["remote"]),
    settable_section::<defaults::Canary>(&["canary"]),
    settable_section::<defaults::Series>(&["series"]),
    settable_section::<defaults::Health>(&["health"]),
    settable_section::<defaults::Child>(&["child"]),
    settable_section::<defaults::Loading>(&["loading"]),
    settable_section::<defaults::Build>(&["build"]),
    settable_section::<defaults::Diagnose>(&["diagnose"]),
    settable_section::<defaults::Proof>(&["proof"]),
    settable_section::<defaults::Update>(&["update"]),
    settable_section::<defaults::Telemetry>(&["telemetry"]),
    settable_section::<defaults::Probe>(&["probe"]),
    settable_section::<defaults::Model>(&["defaults"]),
    settable_section::<defaults::Queue>(&["defaults", "queue"]),
    settable_section::<defaults::Quarantine>(&["defaults", "quarantine"]),
    settable_section::<defaults::Lifecycle>(&["defaults", "lifecycle"]),
    settable_section::<defaults::Recycle>(&["defaults", "policy"]),
    fixed_section::<defaults::Levels>(),
    fixed_section::<defaults::Moment>(),
    fixed_section::<defaults::Admission>(),
    fixed_section::<defaults::Warmth>(),
    fixed_section::<defaults::StartSearch>(),
];

impl CompiledSection {
    fn hidden(&self) -> impl Iterator<Item = &DefaultsKey> {
        self.keys.iter().filter(|key| !key.is_public)
    }

    fn has(&self, name: &str) -> bool {
        self.hidden().any(|key| key.name == name)
    }
}

/// Returns the path of a section's keys in a configuration; `None` if they cannot be set.
pub(crate) fn section_path(section: &str) -> Option<Vec<String>> {
    let home = PARTS.iter().find(|part| part.name == section)?.path?;
    Some(home.iter().map(|&key| key.to_owned()).collect())
}

/// Returns the section in which the key at this path is a compiled-in number. Tables of a single model are
/// treated like those for all models. `bare`: the file contains only the keys of one policy, outside any
/// section, so only the key's name decides.
fn section_of(path: &[String], key: &str, bare: bool) -> Option<&'static CompiledSection> {
    let path: Vec<&str> = match path {
        [models, _, rest @ ..] if models == "models" => {
            std::iter::once("defaults").chain(rest.iter().map(String::as_str)).collect()
        }
        path => path.iter().map(String::as_str).collect(),
    };
    let mut at_home = PARTS.iter().filter(|part| part.path.unwrap_or(&[part.name]) == path);
    let own = at_home.find(|part| part.has(key));
    own.or_else(|| PARTS.iter().filter(|_| bare && path.is_empty()).find(|part| part.has(key)))
}

/// Returns true if the key at this path is a compiled-in number.
pub(crate) fn is_compiled_in(path: &[String], key: &str) -> bool {
    section_of(path, key, path.is_empty()).is_some()
}

/// Returns true for a section without any public key.
pub(crate) fn is_section(path: &[String], key: &str) -> bool {
    let all_hidden = |part: &CompiledSection| part.keys.iter().all(|key| !key.is_public);
    path.is_empty() && PARTS.iter().any(|part| part.name == key && all_hidden(part))
}

/// Creates the problem for a compiled-in number that is set outside `[internal]`.
pub(crate) fn compiled_in_problem(
    place: ConfigPlace,
    path: &[String],
    key: &str,
    bare: bool,
) -> Option<ConfigProblem> {
    let part = section_of(path, key, bare)?;
    let full: Vec<String> = path.iter().cloned().chain([key.to_owned()]).collect();
    let value = schema::default_text(part.name, key).map(|value| format!(", `{value}`,")).unwrap_or_default();
    let why = "leave it out; `llama-warden config show --defaults` says why it is what it is";
    // A compiled-in table or list of numbers cannot be set, even in `[internal]`.
    let settable = part.path.filter(|_| !value.is_empty());
    let (since, hint) = match settable {
        Some(home) => {
            let whose = if home[0] == "defaults" { " for all models" } else { "" };
            let internal =
                format!("`{INTERNAL}.{}.{key}` sets it{whose}; that may change without notice", part.name);
            (" any more", format!("{why}. Where nothing else helps, {internal}"))
        }
        None => ("", why.to_owned()),
    };
    let message = format!("`{}` is no key{since}: its value{value} is compiled in", dotted_key(&full));
    Some(ConfigProblem::new(place, message).with_hint(hint))
}

pub(crate) fn internal() -> &'static Value {
    static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
        let sections = PARTS
            .iter()
            .filter(|part| part.path.is_some())
            .map(|part| (part.name.to_owned(), schema::section_schema(part.name, part.hidden()).to_value()));
        json!({ "type": "object", "properties": sections.collect::<serde_json::Map<_, _>>(), "additionalProperties": false })
    });
    &SCHEMA
}

/// Moves the values in `[internal]` to their sections. Returns their names, each with its byte offset in
/// the file.
pub(crate) fn move_internal(tree: &mut ConfigNode) -> Vec<(String, Option<usize>)> {
    let mut taken = Vec::new();
    let Some(internal) = tree.take(INTERNAL) else { return taken };
    let ConfigValue::Table(sections) = internal.value.kind else { return taken };
    for section in sections {
        let (Some(home), ConfigValue::Table(keys)) = (section_path(&section.key), section.value.kind) else {
            continue;
        };
        for key in keys {
            let byte = key.key_span.or_else(|| key.value.span.clone()).map(|span| span.start);
            taken.push((format!("{INTERNAL}.{}.{}", section.key, key.key), byte));
            let path: Vec<String> = home.iter().cloned().chain([key.key]).collect();
            tree.set(&path, key.value);
        }
    }
    taken
}

/// Returns the compiled-in numbers that can be set: section, path in a configuration, and name of each.
pub(crate) fn settable_numbers() -> impl Iterator<Item = (&'static str, Vec<String>, &'static str)> {
    PARTS.iter().flat_map(|part| {
        let home = section_path(part.name);
        part.hidden().filter_map(move |key| Some((part.name, home.clone()?, key.name)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_of_the_defaults_is_a_part_with_the_same_keys() {
        let document: toml::Table = toml::from_str(defaults::DEFAULTS_TEXT).unwrap();
        assert_eq!(document.len(), PARTS.len());
        for part in &PARTS {
            let mut written: Vec<&str> =
                document[part.name].as_table().unwrap().keys().map(String::as_str).collect();
            let mut typed: Vec<&str> = part.keys.iter().map(|key| key.name).collect();
            written.sort_unstable();
            typed.sort_unstable();
            assert_eq!(written, typed, "[{}]", part.name);
        }
    }
}
