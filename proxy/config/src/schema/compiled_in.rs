//! Numbers of `defaults.toml` that are no keys of a configuration: nobody could say what else to set them to. They are in no
//! schema, no table of the documentation and no hint.
//!
//! A file that sets one is refused, and told what to do. Tests need short times and small thresholds, and who cannot do without
//! another number needs a way: a table `[internal.SECTION]`, with the names of `config show --defaults`, sets any number that
//! such a section has. It is checked like a key, shown by `config show`, warned of at each start, and promises nothing.
//!
//! ```text
//!   [growth]              host_effect = "1MiB"   refused: compiled in
//!   [internal.growth]     host_effect = "1MiB"   taken, with a warning; stands at `growth.host_effect` from here on
//!   [internal.lifecycle]  ...                    stands at `defaults.lifecycle`: it holds for all models
//! ```

use std::sync::LazyLock;

use serde_json::{Value, json};
use warden_policies::defaults::{self, Key, Section};

use crate::problem::{Place, Problem, dotted};
use crate::schema;
use crate::source::tree::{Kind, Node};

/// The table in which compiled-in numbers can be set.
pub(crate) const INTERNAL: &str = "internal";

/// A section of the defaults.
struct Part {
    name: &'static str,
    /// Where its keys stand in a configuration; nowhere, if nothing can set them.
    home: Option<&'static [&'static str]>,
    keys: &'static [Key],
}

const fn part<T: Section>(home: &'static [&'static str]) -> Part {
    Part { name: T::NAME, home: Some(home), keys: T::KEYS }
}

const fn fixed<T: Section>() -> Part {
    Part { name: T::NAME, home: None, keys: T::KEYS }
}

static PARTS: [Part; 27] = [
    part::<defaults::Server>(&["server"]),
    part::<defaults::Log>(&["log"]),
    part::<defaults::Upstream>(&["upstream"]),
    part::<defaults::Sensors>(&["sensors"]),
    part::<defaults::Growth>(&["growth"]),
    part::<defaults::Remote>(&["remote"]),
    part::<defaults::Canary>(&["canary"]),
    part::<defaults::Series>(&["series"]),
    part::<defaults::Health>(&["health"]),
    part::<defaults::Child>(&["child"]),
    part::<defaults::Loading>(&["loading"]),
    part::<defaults::Build>(&["build"]),
    part::<defaults::Diagnose>(&["diagnose"]),
    part::<defaults::Proof>(&["proof"]),
    part::<defaults::Update>(&["update"]),
    part::<defaults::Telemetry>(&["telemetry"]),
    part::<defaults::Probe>(&["probe"]),
    part::<defaults::Model>(&["defaults"]),
    part::<defaults::Queue>(&["defaults", "queue"]),
    part::<defaults::Quarantine>(&["defaults", "quarantine"]),
    part::<defaults::Lifecycle>(&["defaults", "lifecycle"]),
    part::<defaults::Recycle>(&["defaults", "policy"]),
    fixed::<defaults::Levels>(),
    fixed::<defaults::Moment>(),
    fixed::<defaults::Admission>(),
    fixed::<defaults::Warmth>(),
    fixed::<defaults::StartSearch>(),
];

impl Part {
    fn hidden(&self) -> impl Iterator<Item = &Key> {
        self.keys.iter().filter(|key| !key.is_public)
    }

    fn has(&self, name: &str) -> bool {
        self.hidden().any(|key| key.name == name)
    }
}

/// Where the keys of a section of the defaults stand in a configuration; nowhere, if nothing can set them.
pub(crate) fn home(section: &str) -> Option<Vec<String>> {
    let home = PARTS.iter().find(|part| part.name == section)?.home?;
    Some(home.iter().map(|&key| key.to_owned()).collect())
}

/// The section of which a key at this place is a compiled-in number. A model's tables are those for all models. `bare`: in a file
/// with the keys of one policy, where they stand outside of any section and the name has to say it.
fn section_of(path: &[String], key: &str, bare: bool) -> Option<&'static Part> {
    let path: Vec<&str> = match path {
        [models, _, rest @ ..] if models == "models" => {
            std::iter::once("defaults").chain(rest.iter().map(String::as_str)).collect()
        }
        path => path.iter().map(String::as_str).collect(),
    };
    let mut at_home = PARTS.iter().filter(|part| part.home.unwrap_or(&[part.name]) == path);
    let own = at_home.find(|part| part.has(key));
    own.or_else(|| PARTS.iter().filter(|_| bare && path.is_empty()).find(|part| part.has(key)))
}

/// Whether the key at this place is compiled in.
pub(crate) fn is_compiled_in(path: &[String], key: &str) -> bool {
    section_of(path, key, path.is_empty()).is_some()
}

/// Whether this is a section of which nothing is public.
pub(crate) fn is_section(path: &[String], key: &str) -> bool {
    let all_hidden = |part: &Part| part.keys.iter().all(|key| !key.is_public);
    path.is_empty() && PARTS.iter().any(|part| part.name == key && all_hidden(part))
}

/// What is said of a compiled-in number at a place where it is no key.
pub(crate) fn refusal(place: Place, path: &[String], key: &str, bare: bool) -> Option<Problem> {
    let part = section_of(path, key, bare)?;
    let full: Vec<String> = path.iter().cloned().chain([key.to_owned()]).collect();
    let value = schema::default_text(part.name, key).map(|value| format!(", `{value}`,")).unwrap_or_default();
    let why = "leave it out; `llama-warden config show --defaults` says why it is what it is";
    // A table or a list of numbers has no place of its own.
    let settable = part.home.filter(|_| !value.is_empty());
    let (since, hint) = match settable {
        Some(home) => {
            let whose = if home[0] == "defaults" { " for all models" } else { "" };
            let internal =
                format!("`{INTERNAL}.{}.{key}` sets it{whose}; that may change without notice", part.name);
            (" any more", format!("{why}. Where nothing else helps, {internal}"))
        }
        None => ("", why.to_owned()),
    };
    let message = format!("`{}` is no key{since}: its value{value} is compiled in", dotted(&full));
    Some(Problem::new(place, message).hint(hint))
}

pub(crate) fn internal() -> &'static Value {
    static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
        let sections = PARTS
            .iter()
            .filter(|part| part.home.is_some())
            .map(|part| (part.name.to_owned(), schema::section(part.name, part.hidden()).to_value()));
        json!({ "type": "object", "properties": sections.collect::<serde_json::Map<_, _>>(), "additionalProperties": false })
    });
    &SCHEMA
}

/// Takes what stands in `[internal]` to the places where it is read. Says which numbers those are, each with its byte.
pub(crate) fn take(tree: &mut Node) -> Vec<(String, Option<usize>)> {
    let mut taken = Vec::new();
    let Some(internal) = tree.take(INTERNAL) else { return taken };
    let Kind::Table(sections) = internal.value.kind else { return taken };
    for section in sections {
        let (Some(home), Kind::Table(keys)) = (home(&section.key), section.value.kind) else { continue };
        for key in keys {
            let byte = key.key_span.or_else(|| key.value.span.clone()).map(|span| span.start);
            taken.push((format!("{INTERNAL}.{}.{}", section.key, key.key), byte));
            let path: Vec<String> = home.iter().cloned().chain([key.key]).collect();
            tree.set(&path, key.value);
        }
    }
    taken
}

/// The compiled-in numbers that can be set: section, place in a configuration, name.
pub(crate) fn settable() -> impl Iterator<Item = (&'static str, Vec<String>, &'static str)> {
    PARTS.iter().flat_map(|part| {
        let home = home(part.name);
        part.hidden().filter_map(move |key| Some((part.name, home.clone()?, key.name)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_section_of_the_defaults_is_a_part_with_the_same_keys() {
        let document: toml::Table = toml::from_str(defaults::TEXT).unwrap();
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
