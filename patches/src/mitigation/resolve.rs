//! Resolves a list of mitigations to variables, flags and build requirements. Pure functions.

use std::sync::Arc;

use serde::Serialize;

use super::catalogue::Catalogue;
use super::entry::{Action, Mitigation, Part};
use super::item::Item;
use super::leak::LeakKind;
use super::value::ValueSpec;

/// Value that leaves a part of a fix unset.
const OFF: &str = "off";

/// Effects of one item of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Effect {
    /// Index of the item in the list, from 0.
    pub item: usize,
    /// Item without its value.
    pub name: String,
    /// Mitigation of the item.
    pub mitigation: Arc<Mitigation>,
    /// Variables to set.
    pub set: Vec<(String, String)>,
    /// Variables to remove.
    pub unset: Vec<String>,
    /// Flags of llama-server that would cancel the effect.
    pub forbidden: Vec<String>,
    /// Flags to pass to llama-server.
    pub flags: Vec<FlagUse>,
    /// Requirement on the build.
    pub need: Option<Need>,
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
pub enum Need {
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
pub struct Finding {
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
pub struct Resolution {
    /// Effects of the valid items.
    pub effects: Vec<Effect>,
    /// Errors and warnings.
    pub findings: Vec<Finding>,
}

impl Catalogue {
    /// Resolves a list such as `["graph-cache-cap=64", "no-cuda-graphs"]`.
    pub fn resolve(&self, list: &[String]) -> Resolution {
        let mut done = Resolution::default();
        let names: Vec<String> = list.iter().map(|text| Item::parse(text).name()).collect();
        for (at, text) in list.iter().enumerate() {
            let item = Item::parse(text);
            match self.one(at, item, &names) {
                Ok(effect) => match clash(&done.effects, &effect) {
                    Some(message) => {
                        done.findings.push(Finding {
                            item: at,
                            error: true,
                            message,
                            hint: Some("keep one of them".into()),
                        });
                    }
                    None => done.effects.push(effect),
                },
                Err((message, hint)) => done.findings.push(Finding { item: at, error: true, message, hint }),
            }
        }
        self.pairs_of(&mut done);
        lone_parts(&mut done);
        done
    }

    /// Resolves one item. `names`: all items of the list, so that a part with its own item keeps its value.
    fn one(&self, at: usize, item: Item<'_>, names: &[String]) -> Result<Effect, (String, Option<String>)> {
        let Some(found) = self.mitigation(item.id) else { return Err(self.unknown(item.id)) };
        let plain = |why: String| (why, None);
        let (set, value) = match item.part {
            None => {
                let value = given(&item, found.value.as_ref()).map_err(plain)?;
                let set = match &found.action {
                    Action::Patch { variable: Some(name), .. } => {
                        let own = std::iter::once((name.clone(), value.clone()));
                        own.chain(defaults_of_parts(found, names)).collect()
                    }
                    Action::Variable { name, fixed, .. } => {
                        vec![(name.clone(), fixed.clone().unwrap_or_else(|| value.clone()))]
                    }
                    _ => Vec::new(),
                };
                (set, value)
            }
            Some(name) => {
                let part = part_of(found, name)?;
                if item.value == Some(OFF) {
                    (Vec::new(), String::new())
                } else {
                    let value = given(&item, part.value.as_ref()).map_err(plain)?;
                    (vec![(part.variable.clone(), value.clone())], value)
                }
            }
        };
        let (mut unset, mut forbidden, mut flags) = (Vec::new(), Vec::new(), Vec::new());
        let need = match &found.action {
            Action::Patch { set, marker, .. } => {
                Some(Need::Fix { set: set.clone(), fix: found.id.clone(), marker: marker.clone() })
            }
            Action::BuildOption { name, setting } => {
                Some(Need::Option { name: name.clone(), value: setting.clone() })
            }
            Action::Unset { names, flags } => {
                unset.clone_from(names);
                forbidden.clone_from(flags);
                None
            }
            Action::Flags { flags: all } => {
                flags.extend(all.iter().map(|flag| {
                    let mut words = vec![flag.write.clone()];
                    words.extend(flag.value.as_ref().map(|text| text.replace("{}", &value)));
                    FlagUse { words, names: flag.names.clone(), variables: flag.variables.clone() }
                }));
                None
            }
            Action::Variable { .. } => None,
        };
        let mitigation = Arc::clone(found);
        Ok(Effect { item: at, name: item.name(), mitigation, set, unset, forbidden, flags, need })
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
            "{}`llama-warden mitigations list` shows all; a fix of your own comes with its set's folder in `paths.patches`, or \
             with a build that has it",
            near.unwrap_or_default()
        );
        (format!("there is no mitigation `{id}`"), Some(hint))
    }

    /// Warns about items that another item makes useless, at the later one.
    fn pairs_of(&self, done: &mut Resolution) {
        for pair in &self.pairs {
            let item =
                |id: &str| done.effects.iter().find(|effect| effect.mitigation.id == id).map(|one| one.item);
            let [one, other] = &pair.ids;
            let (Some(first), Some(second)) = (item(one), item(other)) else { continue };
            done.findings.push(Finding {
                item: first.max(second),
                error: false,
                message: format!("`{one}` and `{other}`: {}", pair.why),
                hint: Some("keep one of them".to_owned()),
            });
        }
    }
}

/// Default values of a fix's parts that are set when the fix is enabled.
fn defaults_of_parts<'a>(
    found: &'a Mitigation,
    names: &'a [String],
) -> impl Iterator<Item = (String, String)> + 'a {
    let own = |part: &&Part| names.contains(&format!("{}.{}", found.id, part.name));
    let rest = found.parts.iter().filter(move |part| !own(part));
    rest.filter_map(|part| Some((part.variable.clone(), part.value.as_ref()?.default.as_ref()?.to_string())))
}

/// Value of an item: the given one, or the default. A mitigation without values has `1`.
fn given(item: &Item<'_>, takes: Option<&ValueSpec>) -> Result<String, String> {
    let name = item.name();
    match (takes, item.value) {
        (None, None) => Ok("1".to_owned()),
        (None, Some(_)) => Err(format!("`{name}` takes no value")),
        (Some(takes), Some(value)) => takes.check(value).map_err(|why| format!("`{name}`: {why}")),
        (Some(ValueSpec { default: Some(default), .. }), None) => Ok(default.to_string()),
        (Some(takes), None) => {
            Err(format!("`{name}` needs a value: `{name}=VALUE`, where VALUE is {}", takes.takes()))
        }
    }
}

fn part_of<'a>(found: &'a Mitigation, name: &str) -> Result<&'a Part, (String, Option<String>)> {
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

/// Detects two items with the same or opposite meaning.
fn clash(before: &[Effect], new: &Effect) -> Option<String> {
    if before.iter().any(|old| old.name == new.name) {
        return Some(format!("`{}` is given twice", new.name));
    }
    before.iter().find_map(|old| {
        let sets = |one: &Effect, name: &String| one.set.iter().any(|(own, _)| own == name);
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
fn lone_parts(done: &mut Resolution) {
    for effect in &done.effects {
        let id = &effect.mitigation.id;
        let is_part = effect.name != *id;
        if is_part && !effect.set.is_empty() && !done.effects.iter().any(|other| other.name == *id) {
            done.findings.push(Finding {
                item: effect.item,
                error: false,
                message: format!("`{}` is given without `{id}`, which stays off", effect.name),
                hint: Some(format!("add `{id}` to the list, if it was meant")),
            });
        }
    }
}
