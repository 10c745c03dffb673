//! Resolves a list of mitigations to variables, flags and build requirements. Pure functions.

use std::sync::Arc;

use serde::Serialize;

use super::catalogue::MitigationCatalogue;
use super::entry::{MitigationAction, MitigationEntry, MitigationPart};
use super::leak::LeakKind;
use super::value::ValueSpec;

const UNSET_VALUE: &str = "off";

/// Effects of one item of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct MitigationEffect {
    /// Index of the item in the list, from 0.
    pub item: usize,
    /// Item without its value.
    pub name: String,
    /// Mitigation of the item.
    pub mitigation: Arc<MitigationEntry>,
    /// Variables to set.
    pub set: Vec<(String, String)>,
    /// Variables to remove.
    pub unset: Vec<String>,
    /// Flags of llama-server that would cancel the effect.
    pub forbidden: Vec<String>,
    /// Flags to pass to llama-server.
    pub flags: Vec<FlagUse>,
    /// Requirement on the build.
    pub need: Option<BuildNeed>,
}

/// A flag passed to llama-server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlagUse {
    /// Words of the flag.
    pub words: Vec<String>,
    /// All flags with the same or the opposite meaning.
    pub names: Vec<String>,
    /// Variables with which llama-server sets the same flag.
    pub variables: Vec<String>,
}

/// Requirement on a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BuildNeed {
    /// A fix of a patch set.
    Fix {
        /// Id of the set.
        set: String,
        /// Id of the fix.
        fix: String,
        /// Text in every binary with the fix; may be empty.
        marker: String,
    },
    /// A cmake option.
    Option {
        /// Name of the option.
        name: String,
        /// Value of the option.
        value: String,
    },
}

/// An error in a list, or a probable mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MitigationFinding {
    /// Index of the item in the list, from 0.
    pub item: usize,
    /// An error, so that the list cannot be used; otherwise a warning.
    pub error: bool,
    /// Description.
    pub message: String,
    /// Remedy.
    pub hint: Option<String>,
}

/// Result of resolving a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MitigationResolution {
    /// Effects of the valid items.
    pub effects: Vec<MitigationEffect>,
    /// Errors and warnings.
    pub findings: Vec<MitigationFinding>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MitigationItem<'a> {
    /// Text before the dot and the equals sign.
    id: &'a str,
    /// Text between dot and equals sign.
    part: Option<&'a str>,
    /// Text after the equals sign.
    value: Option<&'a str>,
}

impl<'a> MitigationItem<'a> {
    /// Parses an item. A value may contain any text, even another equals sign.
    fn parse(text: &'a str) -> Self {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.trim())),
            None => (text, None),
        };
        let (id, part) = match name.split_once('.') {
            Some((id, part)) => (id, Some(part.trim())),
            None => (name, None),
        };
        Self { id: id.trim(), part, value }
    }

    fn name(&self) -> String {
        match self.part {
            Some(part) => format!("{}.{part}", self.id),
            None => self.id.to_owned(),
        }
    }
}

impl MitigationResolution {
    fn add_error(&mut self, item: usize, message: String, hint: Option<String>) {
        self.findings.push(MitigationFinding { item, error: true, message, hint });
    }

    fn add_warning(&mut self, item: usize, message: String, hint: String) {
        self.findings.push(MitigationFinding { item, error: false, message, hint: Some(hint) });
    }
}

impl MitigationCatalogue {
    /// Resolves a list such as `["graph-cache-cap=64", "no-cuda-graphs"]`.
    pub fn resolve(&self, list: &[String]) -> MitigationResolution {
        let mut done = MitigationResolution::default();
        let names: Vec<String> = list.iter().map(|text| MitigationItem::parse(text).name()).collect();
        for (at, text) in list.iter().enumerate() {
            let item = MitigationItem::parse(text);
            match self.one(at, item, &names) {
                Ok(effect) => match find_clash(&done.effects, &effect) {
                    Some(message) => done.add_error(at, message, Some("keep one of them".to_owned())),
                    None => done.effects.push(effect),
                },
                Err((message, hint)) => done.add_error(at, message, hint),
            }
        }
        self.find_pairs(&mut done);
        find_lone_parts(&mut done);
        done
    }

    /// Resolves one item. `names`: the names of all items; a part with its own item gets no default here.
    fn one(
        &self,
        at: usize,
        item: MitigationItem<'_>,
        names: &[String],
    ) -> Result<MitigationEffect, (String, Option<String>)> {
        let Some(found) = self.mitigation(item.id) else { return Err(self.unknown(item.id)) };
        let plain = |why: String| (why, None);
        let (set, value) = match item.part {
            None => {
                let value = item_value(&item, found.value.as_ref()).map_err(plain)?;
                let set = match &found.action {
                    MitigationAction::Patch { variable: Some(name), .. } => {
                        let own = std::iter::once((name.clone(), value.clone()));
                        own.chain(part_defaults(found, names)).collect()
                    }
                    MitigationAction::Variable { name, fixed, .. } => {
                        vec![(name.clone(), fixed.clone().unwrap_or_else(|| value.clone()))]
                    }
                    _ => Vec::new(),
                };
                (set, value)
            }
            Some(name) => {
                let part = find_part(found, name)?;
                if item.value == Some(UNSET_VALUE) {
                    (Vec::new(), String::new())
                } else {
                    let value = item_value(&item, part.value.as_ref()).map_err(plain)?;
                    (vec![(part.variable.clone(), value.clone())], value)
                }
            }
        };
        let (mut unset, mut forbidden, mut flags) = (Vec::new(), Vec::new(), Vec::new());
        let need = match &found.action {
            MitigationAction::Patch { set, marker, .. } => {
                Some(BuildNeed::Fix { set: set.clone(), fix: found.id.clone(), marker: marker.clone() })
            }
            MitigationAction::BuildOption { name, setting } => {
                Some(BuildNeed::Option { name: name.clone(), value: setting.clone() })
            }
            MitigationAction::Unset { names, flags } => {
                unset.clone_from(names);
                forbidden.clone_from(flags);
                None
            }
            MitigationAction::Flags { flags: all } => {
                flags.extend(all.iter().map(|flag| {
                    let mut words = vec![flag.write.clone()];
                    words.extend(flag.value.as_ref().map(|text| text.replace("{}", &value)));
                    FlagUse { words, names: flag.names.clone(), variables: flag.variables.clone() }
                }));
                None
            }
            MitigationAction::Variable { .. } => None,
        };
        let mitigation = Arc::clone(found);
        Ok(MitigationEffect { item: at, name: item.name(), mitigation, set, unset, forbidden, flags, need })
    }

    fn unknown(&self, id: &str) -> (String, Option<String>) {
        if let Some(leak) = self.leak(id) {
            let cures: Vec<&str> = leak.cures.iter().filter_map(|cure| cure.mitigation.as_deref()).collect();
            let hint = match cures.as_slice() {
                [] => format!("`llama-warden mitigations show {id}` says what helps"),
                cures => format!("what helps against it: {}", cures.join(", ")),
            };
            let what = if leak.kind == LeakKind::Defect { "a defect" } else { "a leak" };
            return (format!("`{id}` is {what}, not a mitigation"), Some(hint));
        }
        let near = self.nearest(id, false).map(|near| format!("the nearest is `{near}`; "));
        let hint = format!(
            "{}`llama-warden mitigations list` shows all; a fix of your own comes with its set's folder in \
             `paths.patches`, or with a build that has it",
            near.unwrap_or_default()
        );
        (format!("there is no mitigation `{id}`"), Some(hint))
    }

    /// Warns about items that another item makes useless. The warning is at the later of the two items.
    fn find_pairs(&self, done: &mut MitigationResolution) {
        for pair in &self.pairs {
            let item =
                |id: &str| done.effects.iter().find(|effect| effect.mitigation.id == id).map(|one| one.item);
            let [one, other] = &pair.ids;
            let (Some(first), Some(second)) = (item(one), item(other)) else { continue };
            let message = format!("`{one}` and `{other}`: {}", pair.why);
            done.add_warning(first.max(second), message, "keep one of them".to_owned());
        }
    }
}

fn part_defaults<'a>(
    found: &'a MitigationEntry,
    names: &'a [String],
) -> impl Iterator<Item = (String, String)> + 'a {
    let own = |part: &&MitigationPart| names.contains(&format!("{}.{}", found.id, part.name));
    let rest = found.parts.iter().filter(move |part| !own(part));
    rest.filter_map(|part| Some((part.variable.clone(), part.value.as_ref()?.default.as_ref()?.to_string())))
}

/// Value of an item: the given one, or the default. A mitigation without values has `1`.
fn item_value(item: &MitigationItem<'_>, takes: Option<&ValueSpec>) -> Result<String, String> {
    let name = item.name();
    match (takes, item.value) {
        (None, None) => Ok("1".to_owned()),
        (None, Some(_)) => Err(format!("`{name}` takes no value")),
        (Some(takes), Some(value)) => takes.check(value).map_err(|why| format!("`{name}`: {why}")),
        (Some(ValueSpec { default: Some(default), .. }), None) => Ok(default.to_string()),
        (Some(takes), None) => {
            Err(format!("`{name}` needs a value: `{name}=VALUE`, where VALUE is {}", takes.description()))
        }
    }
}

fn find_part<'a>(
    found: &'a MitigationEntry,
    name: &str,
) -> Result<&'a MitigationPart, (String, Option<String>)> {
    found.parts.iter().find(|part| part.name == name).ok_or_else(|| {
        let parts: Vec<String> =
            found.parts.iter().map(|part| format!("`{}.{}`", found.id, part.name)).collect();
        let hint = if parts.is_empty() {
            "it has no parts".to_owned()
        } else {
            format!("there is {}", parts.join(", "))
        };
        (format!("`{}` has no part `{name}`", found.id), Some(hint))
    })
}

fn find_clash(before: &[MitigationEffect], new: &MitigationEffect) -> Option<String> {
    if before.iter().any(|old| old.name == new.name) {
        return Some(format!("`{}` is given twice", new.name));
    }
    before.iter().find_map(|old| {
        let sets = |one: &MitigationEffect, name: &String| one.set.iter().any(|(own, _)| own == name);
        let same = new
            .set
            .iter()
            .find(|(name, _)| sets(old, name) || old.unset.contains(name))
            .map(|(name, _)| name);
        let same = same.or_else(|| new.unset.iter().find(|name| sets(old, name)));
        let flag = || {
            let all = old.flags.iter().flat_map(|flag| &flag.names).chain(&old.forbidden);
            let all: Vec<&String> = all.collect();
            new.flags
                .iter()
                .flat_map(|flag| &flag.names)
                .chain(&new.forbidden)
                .find(|name| all.contains(name))
        };
        let what = same.or_else(flag)?;
        Some(format!("`{}` and `{}` contradict each other: both decide about {what}", old.name, new.name))
    })
}

/// Warns about parts without their fix: a part sets only its own variable.
fn find_lone_parts(done: &mut MitigationResolution) {
    for effect in done.effects.clone() {
        let (name, id) = (&effect.name, &effect.mitigation.id);
        if name != id && !effect.set.is_empty() && !done.effects.iter().any(|other| other.name == *id) {
            let message = format!("`{name}` is given without `{id}`, which stays off");
            done.add_warning(effect.item, message, format!("add `{id}` to the list, if it was meant"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_split_at_its_first_equals_sign_and_dot() {
        assert_eq!(MitigationItem::parse("a"), MitigationItem { id: "a", part: None, value: None });
        assert_eq!(
            MitigationItem::parse(" a = x=y.z "),
            MitigationItem { id: "a", part: None, value: Some("x=y.z") }
        );
        assert_eq!(
            MitigationItem::parse("a.b=1"),
            MitigationItem { id: "a", part: Some("b"), value: Some("1") }
        );
        assert_eq!(MitigationItem::parse("a.b=1").name(), "a.b");
    }
}
