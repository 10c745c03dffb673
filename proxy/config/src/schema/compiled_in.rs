//! Compiled-in numbers of `defaults.toml` that are not configuration keys, because no operator would know a
//! better value. They are not part of the public schema, the documentation, or hints.
//!
//! A configuration that sets such a number is refused with advice. Tests, and an operator who needs another
//! number after all, may set it in a table `[internal.SECTION]`, with the names of `config show --defaults`.
//! Such a number is validated like a key, shown by `config show`, and warned of at each start; it may change
//! in any version.
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

struct CompiledSection {
    name: &'static str,
    path: Option<&'static [&'static str]>,
    keys: &'static [DefaultsKey],
}

const fn section<T: DefaultsSection>(path: Option<&'static [&'static str]>) -> CompiledSection {
    CompiledSection { name: T::NAME, path, keys: T::KEYS }
}

static PARTS: [CompiledSection; 27] = [
    section::<defaults::Server>(Some(&["server"])),
    section::<defaults::Log>(Some(&["log"])),
    section::<defaults::Upstream>(Some(&["upstream"])),
    section::<defaults::Sensors>(Some(&["sensors"])),
    section::<defaults::Growth>(Some(&["growth"])),
    section::<defaults::Remote>(Some(&["remote"])),
    section::<defaults::Canary>(Some(&["canary"])),
    section::<defaults::Series>(Some(&["series"])),
    section::<defaults::Health>(Some(&["health"])),
    section::<defaults::Child>(Some(&["child"])),
    section::<defaults::Loading>(Some(&["loading"])),
    section::<defaults::Build>(Some(&["build"])),
    section::<defaults::Diagnose>(Some(&["diagnose"])),
    section::<defaults::Proof>(Some(&["proof"])),
    section::<defaults::Update>(Some(&["update"])),
    section::<defaults::Telemetry>(Some(&["telemetry"])),
    section::<defaults::Probe>(Some(&["probe"])),
    section::<defaults::Model>(Some(&["defaults"])),
    section::<defaults::Queue>(Some(&["defaults", "queue"])),
    section::<defaults::Quarantine>(Some(&["defaults", "quarantine"])),
    section::<defaults::Lifecycle>(Some(&["defaults", "lifecycle"])),
    section::<defaults::Recycle>(Some(&["defaults", "policy"])),
    section::<defaults::Levels>(None),
    section::<defaults::Moment>(None),
    section::<defaults::Admission>(None),
    section::<defaults::Warmth>(None),
    section::<defaults::StartSearch>(None),
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
    match at_home.find(|part| part.has(key)) {
        None if bare && path.is_empty() => PARTS.iter().find(|part| part.has(key)),
        own => own,
    }
}

pub(crate) fn is_compiled_in(path: &[String], key: &str) -> bool {
    section_of(path, key, path.is_empty()).is_some()
}

pub(crate) fn is_section(path: &[String], key: &str) -> bool {
    let all_hidden = |part: &CompiledSection| part.keys.iter().all(|key| !key.is_public);
    path.is_empty() && PARTS.iter().any(|part| part.name == key && all_hidden(part))
}

pub(crate) fn compiled_in_problem(
    place: ConfigPlace,
    path: &[String],
    key: &str,
    bare: bool,
) -> Option<ConfigProblem> {
    let part = section_of(path, key, bare)?;
    let full = [path, &[key.to_owned()]].concat();
    let value = schema::default_text(part.name, key).map(|value| format!(", `{value}`,")).unwrap_or_default();
    let why = "leave it out; `llama-warden config show --defaults` says why it is what it is";
    // A compiled-in table or list of numbers cannot be set, even in `[internal]`.
    let (since, hint) = match part.path {
        Some(home) if !value.is_empty() => {
            let whose = if home[0] == "defaults" { " for all models" } else { "" };
            let internal =
                format!("`{INTERNAL}.{}.{key}` sets it{whose}; that may change without notice", part.name);
            (" any more", format!("{why}. Where nothing else helps, {internal}"))
        }
        _ => ("", why.to_owned()),
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
        let sections: serde_json::Map<_, _> = sections.collect();
        json!({ "type": "object", "properties": sections, "additionalProperties": false })
    });
    &SCHEMA
}

/// Moves the values in `[internal]` to their sections. Returns their names and places.
pub(crate) fn move_internal(tree: &mut ConfigNode) -> Vec<(String, ConfigPlace)> {
    let Some(internal) = tree.take(INTERNAL) else { return Vec::new() };
    let moved = move_sections(internal.value, tree);
    moved.into_iter().map(|(name, place)| (format!("{INTERNAL}.{name}"), place)).collect()
}

/// Moves the keys of sections, named as in `defaults.toml`, to their paths in a configuration.
pub(crate) fn move_sections(sections: ConfigNode, tree: &mut ConfigNode) -> Vec<(String, ConfigPlace)> {
    let mut moved = Vec::new();
    let ConfigValue::Table(sections) = sections.kind else { return moved };
    for section in sections {
        let (Some(home), ConfigValue::Table(keys)) = (section_path(&section.key), section.value.kind) else {
            continue;
        };
        for key in keys {
            moved.push((format!("{}.{}", section.key, key.key), key.key_place));
            let path: Vec<String> = home.iter().cloned().chain([key.key]).collect();
            tree.set(&path, key.value);
        }
    }
    moved
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
